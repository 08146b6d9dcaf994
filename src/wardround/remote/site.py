"""A site's desk: what a hospital does with a request, and with what it takes home.

    desk/       desk.json says what counts: the open request, the last two answers and the memory that belongs to each,
                and what was noted when answers were made and when the model was taken home
    outbox/     the answer, to be looked at and carried out
    models/     what the site may deploy; it stays here

An answer, its notes and the memory that goes with it become valid in one rename. A request that comes twice gets the
stored bytes again. The policy is held against the plan before training, and against the bundle before its parcel is
written. The request of the first round is worked out here from the agreement, so nothing need be carried in before the
first answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from wardround.agreement import COORDINATOR, Agreement
from wardround.data.federation import Site
from wardround.data.imageset import ImageSet
from wardround.deploy.about import about_study, kept_notes
from wardround.deploy.export import Exported, export
from wardround.errors import BadInput
from wardround.exchange.answers import refuse_stray
from wardround.exchange.bundle import Bundle, Envelope, Kind
from wardround.exchange.keys import PrivateKey
from wardround.exchange.manifest import Manifest
from wardround.exchange.parcel import copy_verified, read_manifest, read_parcel, write_parcel
from wardround.exchange.policy import Gate, Policy, Refused
from wardround.files import disk_errors
from wardround.learn.device import Device, one_thread_per_worker
from wardround.learn.predictor import Predictor
from wardround.measure import Tally, tally
from wardround.methods.base import Answer
from wardround.methods.state import State
from wardround.privacy.account import SpentRow, delta_notes
from wardround.privacy.guard import Guard, guard_for
from wardround.privacy.plan import is_on
from wardround.privacy.secret import FILE, keep_secret
from wardround.progress import NO_PROGRESS, Silent
from wardround.remote.admission import admit_parcel
from wardround.remote.deskrecord import Answered, Arrived, DeskRecord
from wardround.remote.register import Register, hand_out, take_back, utc_now
from wardround.remote.resign import under_this_key
from wardround.remote.rules import refusal
from wardround.remote.trust import Trust
from wardround.remote.workplace import Workplace

ROUNDS_KEPT = 2  # the last answer, and the memory it began from, in case the coordinator redoes the round
SAME_ANSWER = "gives the same answer to every test image"


@dataclass(frozen=True)
class TakenHome:
    """What a site may deploy, and how good it is on the site's own test images."""

    predictor: Predictor
    images: int
    accuracy: float
    balanced_accuracy: float
    constant: bool  # one answer to all of them
    delivery: str  # the SHA-256 of the delivered bundle
    notes: tuple[str, ...] = ()  # which form of it was chosen, and why


class SiteDesk:
    """One site's side of one study, in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        trust: Trust,
        key: PrivateKey,
        policy: Policy,
        device: Device,
        progress: Silent = NO_PROGRESS,
        clock: Callable[[], str] = utc_now,
    ) -> None:
        agreement: Agreement = trust.agreement
        agreement.complete()
        self.folder, self.trust, self.key, self.policy = folder, trust, key, policy
        self.device, self.progress, self.clock = device, progress, clock
        self.agreement, self.name = agreement, trust.site_of(key.public)
        self.study, self.method = agreement.study(), agreement.method()
        self.payload = self.method.payload(self.study, self.name)
        self.register = Register(folder / "desk", DeskRecord, "desk.json")
        self.workplace = Workplace(folder / "desk" / "unfinished", device, progress)
        self.notes: list[str] = []  # of the work that is under way

    # What leaves ------------------------------------------------------------------------------------------------------

    def train(self, site: Site, again: bool = False, anew: bool = False) -> Path:
        """Answer the open request; the parcel in the outbox. `again`: also where this round was answered otherwise.

        `anew` trains once more what was answered already: on corrected images, or under other rules.
        """
        with self.register.held():
            record = self._record()
            if record.delivery is not None:
                raise BadInput("there is nothing to train: the study is over here; look into models/")
            if record.request is None:
                request, sha256 = self._first_request(), ""
            else:
                request, sha256 = self._read(record.request, "request"), record.request.sha256
            try:
                stored = self._answer(record, site, request, sha256, again, anew)
            except Refused:  # what a rule forbids today must not lie there to be carried out
                take_back(self.folder / "outbox", [f"{self.agreement.name}-{self.name}-round*-answer.parcel"])
                raise
            self.workplace.clear()
            return self._hand_out(stored)

    def _answer(
        self, record: DeskRecord, site: Site, request: Bundle, sha256: str, again: bool, anew: bool
    ) -> Answered:
        round = request.envelope.round
        self.notes.clear()
        gate = Gate(self.policy, site.train.counts(), dict(record.sent), self._note)
        spent = list(record.spent)
        guard = self._guard(site, spent)
        promised = guard.promised() if guard is not None else {}
        for note in delta_notes(promised["delta"], {self.name: len(site.train)}) if promised else []:
            self._note(note)
        gate.before(self.study, self.method, self.payload, self.trust.key_of(COORDINATOR).fingerprint, promised)
        for before in record.answered:
            if (before.round, before.request) == (round, sha256):
                if anew:
                    continue
                stored = self._allowed_still(self._under_this_key(record, before), site.train.counts())
                self._note(
                    f"round {round + 1} was answered before: this is the same answer, and nothing was trained now "
                    "(to train once more, on corrected images, say --replace)"
                )
                return stored
            if before.round >= round and not again:
                raise refusal(
                    "second request",
                    f"round {before.round + 1} was answered before, for another request; if the "
                    "coordinator told you that it redoes the round, run the command again with --again",
                )
        refuse_stray(request, self._envelope("request", round))
        ctx = self.workplace.context(self.study, round, note=self._note)
        work = self.method.answer(ctx, site, request, self._memory(record, round))
        if guard is None:
            done = self.workplace.do(self.name, work)
            metrics, privacy = self.policy.leaving(self._metrics(site, done)), {}
        else:
            done = self.workplace.do(self.name, guard.doing(work, self.device.torch))
            done = replace(done, bundle=guard.outgoing(done.bundle))
            metrics, privacy = {}, guard.spent()  # a loss or an accuracy would tell of images without noise
        done = replace(done, bundle=gate.outgoing(done.bundle, self.payload, metrics, privacy))
        changed = record.model_copy(update={"sent": gate.sent, "spent": tuple(spent)})
        return self._store(changed, done, sha256, metrics, privacy)

    def _store(
        self,
        record: DeskRecord,
        done: Answer,
        request: str,
        metrics: dict[str, float],
        privacy: dict[str, float],
    ) -> Answered:
        """The signed answer and the memory after it, valid together or not at all; read back before it may leave."""
        round = done.bundle.envelope.round
        stem = f"round{round + 1}-{request[:16] or 'first'}"
        if f"{stem}-answer.parcel" in record.files():  # a name that counts must not be written over before the commit
            stem = f"{stem}-anew"
        stored = Answered(
            round=round, request=request, parcel=f"{stem}-answer.parcel", memory=f"{stem}-memory.safetensors"
        )
        parcel = self.register.path(stored.parcel)
        with disk_errors(self.register.folder):
            done.memory.write(self.register.path(stored.memory))
            made = self.clock()
            write_parcel(parcel, done.bundle, self.key, made=made, metrics=metrics, answers=request, privacy=privacy)
        own = {self.key.public.fingerprint: self.key.public}
        read_parcel(parcel, own, self.payload, self._envelope("answer", round))
        kept = [answer for answer in record.answered if answer.round < round][-(ROUNDS_KEPT - 1) :]
        noted = record.noting(round, self.notes)
        self.register.commit(noted.model_copy(update={"answered": (*kept, stored)}))
        return stored

    def _under_this_key(self, record: DeskRecord, stored: Answered) -> Answered:
        """The stored answer; signed again, untrained, where the site has a new key since."""
        path = self.register.path(stored.parcel)
        parcel = under_this_key(path, self.name, self.trust, self.payload, self.key, self.clock())
        if parcel == path:
            return stored
        again = stored.model_copy(update={"parcel": parcel.name})
        answered = tuple(again if answer == stored else answer for answer in record.answered)
        self.register.commit(record.model_copy(update={"answered": answered}))
        return again

    def _allowed_still(self, stored: Answered, counts: Tensor) -> Answered:
        """A stored answer that is handed out once more; refused where the site has changed a rule since."""
        own = {self.key.public.fingerprint: self.key.public}
        envelope = self._envelope("answer", stored.round)
        manifest, bundle = read_parcel(self.register.path(stored.parcel), own, self.payload, envelope)
        try:
            self.policy.check_bundle(bundle, self.payload, counts, manifest.metrics, manifest.privacy)
        except Refused as refused:
            advice = "the answer was made under other rules: make it anew with: wardround site train --replace"
            raise Refused(f"{refused}; {advice}") from refused
        return stored

    def _guard(self, site: Site, spent: list[SpentRow]) -> Guard | None:
        """What protects the site's images where the study has privacy on; what it spends is added to `spent`."""
        if not is_on(self.study.settings.privacy):
            return None
        secret = keep_secret(self.folder / FILE)
        return guard_for(
            self.study,
            self.method,
            site,
            secret,
            tuple(spent),
            on_spent=spent.append,
            progress=self.progress,
            unfinished=self.workplace.folder,
        )

    def _metrics(self, site: Site, done: Answer) -> dict[str, float]:
        """What the coordinator might want to know of this round; whether it leaves is the policy's matter."""
        metrics = {} if self.workplace.last_loss is None else {"training_loss": self.workplace.last_loss}
        if done.trained is not None and len(site.val):
            metrics["validation_accuracy"] = self._tally(done.trained, site.val).accuracy()
        return metrics

    def _first_request(self) -> Bundle:
        ctx = self.workplace.context(self.study, 0)
        asked = self.method.ask(ctx, self.method.begin(ctx))
        if asked is None:
            raise BadInput(
                f"there is nothing to train: {self.method.name} asks no site for anything; wait for the coordinator's "
                "parcel, then run: wardround site receive"
            )
        if self.name not in asked:
            raise refusal("not asked", f"round 1 does not ask {self.name}; wait for a parcel from the coordinator")
        return asked[self.name]

    def _hand_out(self, answer: Answered) -> Path:
        """Into the outbox, in the place of any earlier answer."""
        stem = f"{self.agreement.name}-{self.name}-round"
        files = {f"{stem}{answer.round + 1}-answer.parcel": self.register.path(answer.parcel)}
        (target,) = hand_out(self.folder / "outbox", files, [f"{stem}*-answer.parcel"])
        return target

    # What comes in ----------------------------------------------------------------------------------------------------

    def receive(self, parcel: Path) -> Manifest:
        """Verify and store what the coordinator sent: a request, or what the site takes home."""
        signers = self.trust.signers(COORDINATOR, *self.agreement.sites)  # a site's own answer is refused by name
        with self.register.held():
            record = self._record()
            manifest = read_manifest(parcel, signers)
            rounds = self.method.rounds(self.study)
            if note := admit_parcel(manifest, record, self.trust, rounds, self._made):
                self._note(note)
            arrived = Arrived(
                round=manifest.round, sha256=manifest.sha256, file=f"{manifest.kind}-{manifest.id}.parcel"
            )
            with disk_errors(self.register.folder):
                copy_verified(parcel, self.register.path(arrived.file), signers)
            try:
                self._read(arrived, manifest.kind, called=parcel)
            except BadInput:
                if arrived.file not in record.files():
                    self.register.path(arrived.file).unlink(missing_ok=True)
                raise
            is_request = manifest.kind == "request"
            self.register.commit(record.with_request(arrived) if is_request else record.with_delivery(arrived))
        return manifest

    def take_home(self, site: Site) -> TakenHome:
        """Make the site's own predictor of what was delivered, and measure it on the site's test images."""
        with self.register.held():
            record = self._record()
            if record.delivery is None:
                raise BadInput("there is nothing to take home yet; first receive the coordinator's delivery parcel")
            delivered = self._read(record.delivery, "delivery")
            self.notes.clear()
            round = record.delivery.round
            ctx = self.workplace.context(self.study, round, note=self._note)
            memory = self._memory(record, round + 1)
            work = self.method.personal(ctx, site, delivered, memory)
            guard = self._guard(site, list(record.spent))
            predictor = self.workplace.do(self.name, work if guard is None else guard.doing(work, self.device.torch))
            found = self._tally(predictor, site.test.images)
            if found.is_constant:
                self._note(f"the model {SAME_ANSWER} of the site, whatever it shows: it is of no use here")
            figures = found.accuracy(), found.balanced_accuracy(), found.is_constant
            notes = kept_notes(self.notes)
            self.register.commit(record.model_copy(update={"delivery_notes": notes}))
            return TakenHome(predictor, found.n, *figures, record.delivery.sha256, notes)

    def deploy(self, site: Site, home: TakenHome) -> Exported:
        """Export what was taken home into models/, with a card; it stays at the site.

        The card has the notes of this model alone: why something did not leave (a class has too few images) must not
        travel with a model that the site passes on.
        """
        beware = f" (beware: the model {SAME_ANSWER})" if home.constant else ""
        figures = [
            {
                "label": label,
                "value": value,
                "definition": f"this model on the {home.images:,} test images of the site: {what}{beware}",
            }
            for label, value, what in (
                ("accuracy", home.accuracy, "the share of right answers"),
                ("balanced accuracy", home.balanced_accuracy, "the share of right answers of a class, averaged"),
            )
        ]
        about = about_study(self.study, self.name, len(site.train), figures, name=self.agreement.name, notes=home.notes)
        folder = self.folder / "models" / self.agreement.name
        exported = export(home.predictor, folder, about, made=self.clock(), images=site.test.images.images)
        self.workplace.clear()
        return exported

    # Services ---------------------------------------------------------------------------------------------------------

    def _record(self) -> DeskRecord:
        record = self.register.read() or DeskRecord(study=self.study.id, site=self.name)
        if (record.study, record.site) != (self.study.id, self.name):
            raise BadInput(
                f"{self.folder} was begun by {record.site} under study {record.study}, and this is {self.name} under "
                f"{self.study.id}; use the study file it was begun with, or a new folder"
            )
        return record

    def _read(self, arrived: Arrived, kind: Kind, called: Path | None = None) -> Bundle:
        path = self.register.path(arrived.file)
        self.trust.check_sender(COORDINATOR, read_manifest(path, self.trust.signers(COORDINATOR)).sender)
        envelope = self._envelope(kind, arrived.round)
        return read_parcel(path, self.trust.now(COORDINATOR), self.payload, envelope, called=called)[1]

    def _made(self, arrived: Arrived) -> str:
        """When a parcel that is here was made."""
        return read_manifest(self.register.path(arrived.file), self.trust.signers(COORDINATOR)).made

    def _envelope(self, kind: Kind, round: int) -> Envelope:
        return Envelope(kind, self.study.id, self.study.settings.method, self.name, round)

    def _memory(self, record: DeskRecord, before: int) -> State:
        """What the site remembered when it went into a round."""
        earlier = [answer for answer in record.answered if answer.round < before]
        return State.from_bytes(self.register.bytes_of(earlier[-1].memory)) if earlier else State()

    def _note(self, text: str) -> None:
        """A remark; kept with what the work that is under way stores, if it stores anything."""
        self.notes.append(text)
        self.progress.say(f"note: {text}")

    def _tally(self, predictor: Predictor, images: ImageSet) -> Tally:
        with one_thread_per_worker():
            scores = predictor.scores(images.images, self.device, self.study.settings.train.precision, self.progress)
        return tally(scores, images.labels.cpu(), len(images.classes))
