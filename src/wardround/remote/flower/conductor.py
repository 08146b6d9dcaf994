"""The hub's side over a network: call the nodes, collect what they answer, go on, deliver.

All that counts is in the hub's folder, so a conductor that is killed is simply started again: sites whose answer is
there are not asked again, and a parcel that came on a stick meanwhile counts like any other. A round waits for
everyone until its time is over, then the agreed quorum is enough. Who is missing is told by name, and why, if known.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from wardround.errors import BadInput
from wardround.exchange.keys import PublicKey
from wardround.files import disk_errors, write_atomically
from wardround.record.rundir import lock_directory, write_json
from wardround.remote.flower.letters import ANSWER, HELLO, NONCE_BYTES, TAKE_HOME, Call, Reply
from wardround.remote.flower.post import Arrival, Node, Post
from wardround.remote.hub import Hub
from wardround.remote.hubrecord import HubRecord, Round
from wardround.remote.standing import answers_needed

POLL_SECONDS = 0.5
MOST_WAITS = 60
SPARE_SECONDS = 60.0  # a call outlives its round by this, so that a late reply can be told from none
DELIVERED, INCOMING = "delivered.json", "incoming.parcel"


@dataclass
class Phase:
    """A round, or the delivery: what is asked of which site, until when, and what became of it."""

    do: str
    parcels: Mapping[str, str | None]  # by site, files in the hub's folder
    ends: float
    to_strangers: str  # what a node is asked of which nobody knows the site
    called: dict[str, Node] = field(default_factory=dict)
    trouble: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sent:
    """A call that is under way; its phase may be over before the reply comes."""

    phase: Phase
    node: Node
    call: Call


class Conductor:
    """One study, from wherever its hub stands, to the end."""

    def __init__(
        self,
        hub: Hub,
        post: Post,
        say: Callable[[str], None],
        *,
        round_seconds: float,
        wait_for_all: bool = True,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.hub, self.post, self.say = hub, post, say
        self.round_seconds, self.wait_for_all = round_seconds, wait_for_all
        self.clock, self.sleep = clock, sleep
        self.folder = hub.folder / "flower"
        self.site_of: dict[Node, str] = {}
        self.greeted: set[Node] = set()
        self.under_way: dict[str, Sent] = {}

    def play(self) -> None:
        """Every round that is left, and the delivery; by one conductor at a time."""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        with lock_directory(self.folder):
            self.hub.standing()  # begins the study, where it has not begun
            while (current := self._record().current) is not None:
                self._gather(current)
                if self._still_open(current) is None:
                    self.say(
                        f"round {current.number + 1} was closed or opened anew by someone else; going on from there"
                    )
                    continue
                self._wait_for_the_folder()
                try:
                    self.hub.step(now=True)
                    if self._still_open(current) and (reason := self.hub.standing().refusal):
                        raise reason  # nothing came: the step has handed out once more what is in the outbox
                except BadInput as error:
                    raise BadInput(f"{error}; start the run again to go on from here") from error
            self._deliver()

    # The two phases ---------------------------------------------------------------------------------------------------

    def _gather(self, current: Round) -> None:
        """Wait for the answers of a round, as long as it may take."""
        parcels = {site: current.parcels.get(site) for site in current.asked}
        # In the first round everyone is asked for the same thing, so there is no need to know who is who before.
        is_fresh = current.number == 0 and not current.received and current.asked.keys() == set(self.hub.study.sites)
        phase = Phase(ANSWER, parcels, self.clock() + self.round_seconds, ANSWER if is_fresh else HELLO)
        self.say(f"round {current.number + 1}: {len(current.received)} of {len(current.asked)} answers are here")

        def missing() -> list[str]:
            found = self._still_open(current)
            return [] if found is None else [site for site in found.asked if site not in found.received]

        def is_enough() -> bool:
            found = self._still_open(current)
            return found is None or len(found.received) >= answers_needed(found, self.hub.agreement)

        self._attend_to(phase, missing, is_enough)
        for site in missing():
            self.say(f"{site} did not answer round {current.number + 1}: {phase.trouble.get(site, 'nothing came')}")

    def _deliver(self) -> None:
        """Bring every site what it takes home; a site that is not there gets it when the run is started again."""
        record = self._record()
        phase = Phase(TAKE_HOME, record.deliveries, self.clock() + self.round_seconds, HELLO)
        last = record.previous.received if record.previous is not None else record.deliveries

        def missing() -> list[str]:
            taken = self._taken()
            return [site for site, file in record.deliveries.items() if taken.get(site) != file]

        self._attend_to(phase, missing, lambda: not set(missing()) & set(last))
        for site in missing():
            why = phase.trouble.get(site, "nothing came")
            self.say(f"{site} has not taken its parcel home: {why}; start the run again, or carry it from the outbox")
        self.say(f"study {self.hub.agreement.name} is over")

    def _attend_to(self, phase: Phase, missing: Callable[[], Collection[str]], is_enough: Callable[[], bool]) -> None:
        while (left := missing()) and self.clock() < phase.ends and (self.wait_for_all or not is_enough()):
            self._call(phase, left)
            for arrival in self.post.arrivals(list(self.under_way)):
                self._take(arrival)
            self.sleep(POLL_SECONDS)

    # Calls and replies ------------------------------------------------------------------------------------------------

    def _call(self, phase: Phase, missing: Collection[str]) -> None:
        """Call those who are online, missing, and not called yet; and greet those of whom nothing is known."""
        online = list(self.post.nodes())
        for node in online:
            site = self.site_of.get(node)
            if site is None:
                if node not in self.greeted:
                    self.greeted.add(node)
                    self._send(phase, node, phase.to_strangers, None)
            elif site in missing and phase.called.get(site) not in online:
                phase.called[site] = node
                self.say(f"asking {site} to {phase.do}")
                self._send(phase, node, phase.do, phase.parcels[site])

    def _send(self, phase: Phase, node: Node, do: str, parcel: str | None) -> None:
        content = self.hub.register.bytes_of(parcel) if parcel is not None else b""
        call = Call(do, self.hub.study.id, secrets.token_bytes(NONCE_BYTES), content)
        name = self.post.send(node, call, phase.ends - self.clock() + SPARE_SECONDS)
        if not name:
            self.say(f"node {node.number} could not be called; it is left out of this phase")
            return
        self.under_way[name] = Sent(phase, node, Call(call.do, call.study, call.nonce))

    def _take(self, arrival: Arrival) -> None:
        sent = self.under_way.pop(arrival.call, None)
        if sent is None:  # a second reply to one call; the first one counts
            return
        if arrival.reply is None:
            self._lost(sent, arrival)
            return
        site = self._identify(sent, arrival.reply)
        if site is None or sent.call.do == HELLO:
            return
        sent.phase.called.setdefault(site, sent.node)
        if arrival.reply.words:
            self._trouble(sent.phase, site, arrival.reply.words)
        elif sent.call.do == ANSWER:
            self._collect(sent.phase, site, arrival.reply.parcel)
        else:
            self._note_taken(site, self._record().deliveries.get(site, ""))

    def _lost(self, sent: Sent, arrival: Arrival) -> None:
        """A call without a reply; where the node is gone it may be called again when it is back."""
        if arrival.is_gone:
            self.greeted.discard(sent.node)
        site = self.site_of.get(sent.node)
        if site is None:
            self.say(f"node {sent.node.number}: {arrival.failure}")
            return
        self._trouble(sent.phase, site, arrival.failure)
        if arrival.is_gone:
            sent.phase.called.pop(site, None)

    def _identify(self, sent: Sent, reply: Reply) -> str | None:
        """The site that a node speaks for; one that no site of the study has sent is told and left alone."""
        try:
            key: PublicKey = reply.sender(sent.call, sent.node.number)
            site = self.hub.trust.site_of(key)
        except BadInput as error:
            self.say(f"node {sent.node.number} is ignored: {error}")
            return None
        if sent.node not in self.site_of:
            self.say(f"node {sent.node.number} is {site}")
        self.site_of[sent.node] = site
        return site

    def _collect(self, phase: Phase, site: str, parcel: bytes) -> None:
        path = self.folder / INCOMING
        with disk_errors(path):
            write_atomically(path, parcel)
        self._wait_for_the_folder()
        try:
            receipt, is_new = self.hub.collect(path)
        except BadInput as error:
            self._trouble(phase, site, f"its answer is refused: {error}")
        else:
            word = "stored" if is_new else "already here"
            self.say(f"{word}: {receipt.site}, round {receipt.round + 1}, receipt {receipt.id}")
        finally:
            path.unlink(missing_ok=True)

    def _wait_for_the_folder(self) -> None:
        """Somebody may be looking at the hub just now (`wardround hub status`); no answer should be lost to that."""
        for _ in range(MOST_WAITS):
            try:
                with self.hub.register.held():
                    return
            except BadInput:
                self.sleep(POLL_SECONDS)

    def _trouble(self, phase: Phase, site: str, words: str) -> None:
        phase.trouble[site] = words
        self.say(f"{site}: {words}")

    # Records ----------------------------------------------------------------------------------------------------------

    def _still_open(self, round: Round) -> Round | None:
        """The round as it stands now; None once somebody has closed it, or opened another, by hand."""
        found = self._record().current
        return found if found is not None and found.state == round.state else None

    def _record(self) -> HubRecord:
        record = self.hub.register.read()
        if record is None:
            raise BadInput(f"{self.hub.register.folder} is gone; restore it from a copy")
        return record

    def _taken(self) -> dict[str, str]:
        """Which delivery each site has taken home."""
        path = self.folder / DELIVERED
        if not path.exists():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return {str(site): str(file) for site, file in found.items()}
        except (OSError, ValueError, AttributeError) as error:
            raise BadInput(f"{path} cannot be read; delete it, and every site gets its parcel again") from error

    def _note_taken(self, site: str, file: str) -> None:
        path = self.folder / DELIVERED
        with disk_errors(path):
            write_json(path, {**self._taken(), site: file})
        self.say(f"{site} has taken its parcel home")
