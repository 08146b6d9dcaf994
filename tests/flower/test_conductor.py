"""The hub's side without Flower: nodes that are told, by a table, how they behave."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from flower.deployment import write_images
from remote.parties import KEYS, OPEN, SITES, Parties, agreement
from wardround.agreement import Agreement, write_agreement
from wardround.deploy import onnx_file
from wardround.errors import BadInput
from wardround.exchange.keys import PrivateKey
from wardround.methods.registry import known
from wardround.record.rundir import lock_directory
from wardround.remote.flower.attend import attend
from wardround.remote.flower.conductor import POLL_SECONDS, Conductor
from wardround.remote.flower.letters import ANSWER, HELLO, TAKE_HOME, Call, Reply
from wardround.remote.flower.post import Arrival, Node
from wardround.sitedata import read_site
from wardround.tomltext import to_toml

ONE, TWO, THREE = SITES
NODES = {name: Node(100 + number, "first") for number, name in enumerate(SITES)}
Act = Callable[["World", Node, Call], Reply | Arrival | None]


@dataclass
class World:
    """Three nodes that answer as `attend` does, unless `acts` has something else for one; and a clock of its own."""

    root: Path
    agreed: Agreement
    acts: dict[str, Act] = field(default_factory=dict)
    online: dict[str, Node] = field(default_factory=lambda: dict(NODES))
    time: float = 0.0
    calls: list[tuple[str, str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    waiting: dict[str, tuple[str, Node, Call]] = field(default_factory=dict)

    def nodes(self) -> Collection[Node]:
        return list(self.online.values())

    def send(self, node: Node, call: Call, seconds: float) -> str:
        (name,) = [name for name, here in self.online.items() if here == node]
        self.calls.append((name, call.do))
        key = str(len(self.calls))
        self.waiting[key] = (name, node, call)
        return key

    def arrivals(self, calls: Collection[str]) -> Iterator[Arrival]:
        for key in calls:
            name, node, call = self.waiting[key]
            came = self.acts.get(name, as_it_should)(self, node, call)
            if came is not None:
                yield Arrival(key, came) if isinstance(came, Reply) else replace(came, call=key)

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def desk(self, name: str) -> dict[str, str]:
        return {"study": str(self.root / name / "study.toml"), "data": str(self.root / f"{name}.npz"), "device": "cpu"}

    def play(self, round_seconds: float = 30.0, wait_for_all: bool = True) -> None:
        parties = Parties(self.root, self.agreed)
        self.said.clear()
        self.calls.clear()
        Conductor(
            parties.hub(),
            self,
            self.said.append,
            round_seconds=round_seconds,
            wait_for_all=wait_for_all,
            clock=lambda: self.time,
            sleep=self.sleep,
        ).play()


def as_it_should(world: World, node: Node, call: Call) -> Reply:
    (name,) = [name for name, known in NODES.items() if known.number == node.number]
    return attend(call, node.number, world.desk(name))


def silent(world: World, node: Node, call: Call) -> None:
    """Hears everything and says nothing."""


def world(root: Path, agreed: Agreement) -> World:
    for number, name in enumerate(SITES):
        (root / name).mkdir()
        write_agreement(root / name / "study.toml", agreed)
        KEYS[name].save(root / name / "site.key")
        (root / name / "policy.toml").write_text(to_toml(OPEN.model_dump(mode="json")))
        write_images(root / f"{name}.npz", number)
    return World(root, agreed)


@pytest.fixture(autouse=True)
def no_onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/deploy has ONNX; to make it takes seconds."""

    def none(*_: object) -> None:
        raise BadInput("not in this test")

    monkeypatch.setattr(onnx_file, "make_onnx", none)


@pytest.fixture
def three(tmp_path: Path) -> World:
    """One round of FedAvg among three sites, two of which are enough."""
    return world(tmp_path, agreement("fedavg", rounds=1, quorum=2))


def test_everyone_answers_and_takes_home(three: World) -> None:
    three.play()
    assert [do for _, do in three.calls] == [ANSWER] * 3 + [TAKE_HOME] * 3  # nobody need be greeted
    assert [line for line in three.said if "did not" in line or "has not" in line] == []
    assert three.said[-1] == "study tiny is over"
    for name in SITES:
        assert (three.root / name / "models" / "tiny" / "model.safetensors").is_file()
    three.play()
    assert three.calls == []
    assert three.said == ["study tiny is over"]


def test_a_silent_node_is_named_at_the_deadline(three: World) -> None:
    three.acts[THREE] = silent
    three.play(round_seconds=30)
    assert "site-3 did not answer round 1: nothing came" in three.said
    assert "site-3 has not taken its parcel home: nothing came; start the run again, or carry it from the outbox" in (
        three.said
    )
    assert 60 <= three.time <= 60 + 4 * POLL_SECONDS  # the round, and the delivery
    del three.acts[THREE]
    three.play()
    assert [call for call in three.calls if call[1] == TAKE_HOME] == [(THREE, TAKE_HOME)]


def test_a_node_that_never_joins_is_named(three: World) -> None:
    del three.online[TWO]
    three.play()
    assert "site-2 did not answer round 1: nothing came" in three.said
    assert three.said[-1] == "study tiny is over"


def test_without_a_quorum_the_run_ends_and_can_go_on(three: World) -> None:
    three.online = {ONE: NODES[ONE]}
    with pytest.raises(BadInput, match=r"^quorum: round 1 has 1 of the 2 .*; start the run again to go on from here$"):
        three.play()
    three.online = dict(NODES)
    three.play()
    assert (ONE, ANSWER) not in three.calls
    assert three.calls[:3] == [(name, HELLO) for name in SITES]  # whoever has answered must not be asked again
    assert three.said[-1] == "study tiny is over"


def test_a_later_round_without_any_answer_ends_the_run_too(tmp_path: Path) -> None:
    three = world(tmp_path, agreement("fedavg", rounds=2, quorum=2))

    def once(at: World, node: Node, call: Call) -> Reply | None:
        assert at.time < 100  # or it waits without end
        return as_it_should(at, node, call) if Parties(at.root, at.agreed).hub().standing().round == 0 else None

    three.acts = dict.fromkeys(SITES, once)
    with pytest.raises(BadInput, match=r"^quorum: round 2 has 0 of the 2 .*; start the run again to go on from here$"):
        three.play(round_seconds=20.0)
    three.acts.clear()
    three.play()
    assert three.said[-1] == "study tiny is over"


def test_a_round_that_has_nobody_left_to_ask_ends_the_run(tmp_path: Path) -> None:
    """One site is asked in a round; in the second one it withdraws."""
    three = world(tmp_path, agreement("fedavg", rounds=2, quorum=1, participants=0.34))

    class Said(list[str]):
        def append(self, line: str) -> None:
            assert len(self) < 100  # or it says the same without end
            super().append(line)

    three.said = Said()

    def leave(at: World, node: Node, call: Call) -> Reply | None:
        hub = Parties(at.root, at.agreed).hub()
        if call.do == ANSWER and hub.standing().round == 1:
            hub.withdraw(next(name for name, known in NODES.items() if known.number == node.number))
            return None
        return as_it_should(at, node, call)

    three.acts = dict.fromkeys(SITES, leave)
    with pytest.raises(BadInput, match=r"^quorum: no site is left in round 2; make a new study"):
        three.play(round_seconds=20.0)


def test_the_quorum_is_enough_where_nobody_waits_for_all(three: World) -> None:
    three.acts[THREE] = silent
    three.play(wait_for_all=False, round_seconds=1000)
    assert three.time < 10
    assert three.said[-1] == "study tiny is over"


def test_an_answer_that_comes_late_is_refused_by_name(tmp_path: Path) -> None:
    three = world(tmp_path, agreement("fedavg", rounds=2, quorum=2))

    def late(world: World, node: Node, call: Call) -> Reply | None:
        return as_it_should(world, node, call) if world.time > 30 else None

    three.acts[THREE] = late
    three.play(round_seconds=30)
    assert any(line.startswith("site-3: its answer is refused: late parcel: round 1 is closed") for line in three.said)
    assert "stored: site-3, round 2" in "\n".join(three.said)


def test_a_wrong_answer_is_told_and_left_out(three: World) -> None:
    def wrong(world: World, node: Node, call: Call) -> Reply:
        reply = as_it_should(world, node, call)
        return replace(reply, parcel=reply.parcel[:-1] + bytes([reply.parcel[-1] ^ 1])) if call.do == ANSWER else reply

    three.acts[TWO] = wrong
    three.play()
    refused = [line for line in three.said if line.startswith("site-2: its answer is refused: ")]
    assert len(refused) == 1
    assert "is not the one that was signed" in refused[0]
    assert any(line.startswith("site-2 did not answer round 1: its answer is refused") for line in three.said)
    assert not list((three.root / "hub" / "flower").glob("*.parcel"))
    assert three.said[-1] == "study tiny is over"


def test_a_stranger_is_told_and_ignored(three: World) -> None:
    stranger = PrivateKey(b"s" * 32)

    def strange(world: World, node: Node, call: Call) -> Reply:
        return Reply.signed(call, node.number, stranger)

    three.acts[THREE] = strange
    three.play()
    assert f"node {NODES[THREE].number} is ignored: no site of study tiny has the key" in "\n".join(three.said)
    assert "site-3 did not answer round 1: nothing came" in three.said


def test_no_node_can_speak_for_another(three: World) -> None:
    """A node that hands on what another one said, or replays it, is found out: nonce and node are signed."""
    heard: list[Reply] = []

    def overheard(world: World, node: Node, call: Call) -> Reply:
        heard.append(as_it_should(world, node, call))
        return heard[-1]

    def thief(world: World, node: Node, call: Call) -> Reply | None:
        return heard[0] if heard else None

    three.acts.update({ONE: overheard, THREE: thief})
    three.play()
    assert f"node {NODES[THREE].number} is ignored: the node's reply is not signed for this study" in "\n".join(
        three.said
    )


def test_a_node_that_was_started_again_is_called_again(tmp_path: Path) -> None:
    """In a second round, when it is known who is who: the first call went down with the node."""
    three = world(tmp_path, agreement("fedavg", rounds=2))

    def dies(world: World, node: Node, call: Call) -> Reply | None:
        if call.parcel and node.joined == "first":
            world.online[TWO] = replace(node, joined="again")
            return None
        return as_it_should(world, node, call)

    three.acts[TWO] = dies
    three.play()
    assert [do for name, do in three.calls if name == TWO] == [ANSWER, ANSWER, HELLO, ANSWER, TAKE_HOME]
    assert three.said[-1] == "study tiny is over"


def test_a_call_that_is_lost_is_made_again_and_a_failed_app_is_not(three: World) -> None:
    lost = iter([Arrival("", None, "its node went offline", is_gone=True)])

    def offline(world: World, node: Node, call: Call) -> Reply | Arrival:
        return next(lost, None) or as_it_should(world, node, call)

    def broken(world: World, node: Node, call: Call) -> Arrival:
        return Arrival("", None, "its Flower app failed; its log says why")

    three.acts.update({ONE: offline, TWO: broken})
    three.play()
    assert [do for name, do in three.calls if name == ONE] == [ANSWER, ANSWER, TAKE_HOME]
    assert [do for name, do in three.calls if name == TWO] == [ANSWER]
    assert f"node {NODES[TWO].number}: its Flower app failed; its log says why" in three.said
    assert "site-2 did not answer round 1: nothing came" in three.said


def test_a_parcel_that_came_on_a_stick_counts(three: World) -> None:
    parties = Parties(three.root, three.agreed)
    parties.hub().collect(parties.desk(ONE).train(read_site(three.agreed, ONE, str(three.root / f"{ONE}.npz"))))
    three.play()
    assert (ONE, ANSWER) not in three.calls
    assert "round 1: 1 of 3 answers are here" in three.said


def test_an_answer_waits_while_somebody_looks_at_the_hub(three: World) -> None:
    looking = ExitStack()

    def at_a_bad_time(world: World, node: Node, call: Call) -> Reply:
        if call.do == ANSWER:
            looking.enter_context(lock_directory(world.root / "hub" / "hub"))
        return as_it_should(world, node, call)

    def sleep(seconds: float) -> None:
        looking.close()
        three.time += seconds

    three.acts[ONE] = at_a_bad_time
    three.sleep = sleep  # type: ignore[method-assign]
    three.play()
    assert any(line.startswith("stored: site-1, round 1") for line in three.said)


def test_a_second_reply_to_a_call_is_not_taken(three: World) -> None:
    class Twice(World):
        def arrivals(self, calls: Collection[str]) -> Iterator[Arrival]:
            for arrival in super().arrivals(calls):
                yield arrival
                yield arrival

    twice = Twice(three.root, three.agreed)
    twice.play()
    assert sum(line.startswith("stored: ") for line in twice.said) == 3
    assert sum("has taken its parcel home" in line for line in twice.said) == 3


def test_a_round_that_is_closed_by_hand_meanwhile_is_left_alone(tmp_path: Path) -> None:
    """`wardround hub step --now` beside a running conductor: it goes on with the round that is open then."""
    by_hand = world(tmp_path, agreement("fedavg", rounds=2, quorum=2))

    def step_by_hand(at: World, node: Node, call: Call) -> Reply | None:
        hub = Parties(at.root, at.agreed).hub()
        current = hub.standing()
        if current.round == 0 and current.answers == 2:
            hub.step(now=True)
        return None if current.round == 0 else as_it_should(at, node, call)

    by_hand.acts[THREE] = step_by_hand
    by_hand.play(round_seconds=20.0)
    closed = "round 1 was closed or opened anew by someone else; going on from there"
    assert [line for line in by_hand.said if line.startswith("round ")] == [
        "round 1: 0 of 3 answers are here",
        closed,
        "round 2: 0 of 3 answers are here",
    ]
    assert by_hand.said[-1] == "study tiny is over"
    assert sum("has taken its parcel home" in line for line in by_hand.said) == 3


def test_a_site_that_withdraws_meanwhile_counts_for_no_answer(three: World) -> None:
    """Of three one has answered and one has left: that is not the quorum of two, and the third is waited for."""

    def withdraw(at: World, node: Node, call: Call) -> None:
        hub = Parties(at.root, at.agreed).hub()
        if hub.standing().answers == 1 and "withdrew" not in hub.standing().sites[TWO]:
            hub.withdraw(TWO)

    def slowly(at: World, node: Node, call: Call) -> Reply | None:
        return as_it_should(at, node, call) if at.time > 5 else None

    three.acts = {TWO: withdraw, THREE: slowly}
    three.play(round_seconds=20.0, wait_for_all=False)
    assert [line.split(",")[0] for line in three.said if line.startswith("stored: ")] == [
        f"stored: {ONE}",
        f"stored: {THREE}",
    ]
    assert three.said[-1] == "study tiny is over"


def test_one_conductor_at_a_time(three: World) -> None:
    folder = three.root / "hub" / "flower"
    folder.mkdir(parents=True)
    with lock_directory(folder), pytest.raises(BadInput, match="is in use by another run"):
        three.play()


def test_a_damaged_list_of_deliveries_is_told(three: World) -> None:
    three.play()
    file = three.root / "hub" / "flower" / "delivered.json"
    assert sorted(json.loads(file.read_text())) == list(SITES)
    for text in ("{", "[]"):
        file.write_text(text)
        with pytest.raises(BadInput, match="delete it, and every site gets its parcel again"):
            three.play()


def test_a_method_that_asks_nobody_is_delivered_at_once(tmp_path: Path) -> None:
    three = world(tmp_path, agreement("local"))
    three.play()
    for name in SITES:
        assert (three.root / name / "models" / "tiny" / "model.safetensors").is_file()
    assert three.said[-1] == "study tiny is over"


@pytest.mark.soak
@pytest.mark.parametrize("method", known())
def test_every_method_comes_to_its_end(method: str, tmp_path: Path) -> None:
    three = world(tmp_path, agreement(method))
    three.play()
    assert three.said[-1] == "study tiny is over"
    assert [line for line in three.said if "not" in line.split()] == []
