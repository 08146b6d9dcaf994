"""The coordinator's hub: collects the sites' parcels, does the coordinator's work, and writes one parcel per site.

    hub/        hub.json says what counts: the open round, the uploads it has, the round before it
    outbox/     one signed parcel for each site: a request of the next round, or what it takes home

Every change becomes valid in one rename, so any command may be killed and run again. The hub never sees an image. A
refusal begins with the name of its rule; docs/airgap.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from wardround.agreement import COORDINATOR
from wardround.errors import BadInput
from wardround.exchange.answers import Answers, refuse_stray
from wardround.exchange.bundle import SIZE, Bundle, Envelope, Kind
from wardround.exchange.keys import PrivateKey
from wardround.exchange.manifest import Manifest
from wardround.exchange.parcel import check_whole, copy_verified, read_manifest, read_parcel, write_parcel
from wardround.files import disk_errors
from wardround.learn.device import Device, one_thread_per_worker
from wardround.methods.state import State
from wardround.progress import NO_PROGRESS, Silent
from wardround.record.absorbing import Pace, last_state
from wardround.remote.admission import admit_upload
from wardround.remote.hubrecord import HubRecord, Receipt, Round
from wardround.remote.register import Register, hand_out, utc_now
from wardround.remote.resign import under_this_key
from wardround.remote.rules import refusal
from wardround.remote.standing import Standing, standing
from wardround.remote.trust import Trust
from wardround.remote.workplace import Workplace

SENT: tuple[Kind, ...] = ("request", "delivery")


class Hub:
    """The coordinator's side of one study, in a folder of its own."""

    def __init__(
        self,
        folder: Path,
        trust: Trust,
        key: PrivateKey,
        device: Device,
        progress: Silent = NO_PROGRESS,
        clock: Callable[[], str] = utc_now,
    ) -> None:
        agreement = trust.agreement
        agreement.complete()
        if trust.key_of(COORDINATOR) != key.public:
            trust.refuse_revoked(key.public)
            raise BadInput(
                f"the key {key.public.fingerprint} is not the coordinator's of study {agreement.name}; check the file"
            )
        self.folder, self.trust, self.key = folder, trust, key
        self.progress, self.clock, self.agreement = progress, clock, agreement
        self.study, self.method = agreement.study(), agreement.method()
        self.notes: list[str] = []
        self.register = Register(folder / "hub", HubRecord, "hub.json")
        self.workplace = Workplace(folder / "hub" / "unfinished", device, progress)

    # What comes in ----------------------------------------------------------------------------------------------------

    def collect(self, parcel: Path, replace: bool = False) -> tuple[Receipt, bool]:
        """Verify and store one upload; the receipt, and whether it is new."""
        signers = self.trust.signers(COORDINATOR, *self.agreement.sites)  # its own parcel is refused by name
        with self.register.held():
            record = self._record()
            manifest = read_manifest(parcel, signers)
            for receipt in record.history + tuple(record.current.received.values() if record.current else ()):
                if receipt.id == manifest.id and manifest.site not in record.withdrawn:
                    self.trust.check_sender(manifest.site, manifest.sender)
                    check_whole(parcel, signers)
                    return receipt, False
            current, note = admit_upload(manifest, record, self.trust, replace)
            if note:
                self.progress.say(f"note: {note}")
            receipt = self._receipt(manifest)
            stored = self.register.path(receipt.file)
            with disk_errors(self.register.folder):
                copy_verified(parcel, stored, signers)
            try:
                claimed = self._read_upload(receipt, called=parcel).group(SIZE).get("images")
            except BadInput:
                if receipt.file not in record.files():
                    stored.unlink(missing_ok=True)
                raise
            receipt = receipt.model_copy(update={"images": None if claimed is None else int(claimed)})
            received = {**current.received, manifest.site: receipt}
            current = current.model_copy(update={"received": dict(sorted(received.items()))})
            self._commit(record.model_copy(update={"current": current, "absorbing": ""}))
        return receipt, True

    def _receipt(self, manifest: Manifest) -> Receipt:
        return Receipt(
            file=f"round{manifest.round + 1}-{manifest.site}-{manifest.id}.parcel",
            arrived=self.clock(),
            **{
                name: getattr(manifest, name)
                for name in ("site", "round", "id", "sha256", "bytes", "sender", "program", "made", "metrics")
            },
        )

    # What goes on -----------------------------------------------------------------------------------------------------

    def standing(self) -> Standing:
        """Who has answered, who is missing, and whether the next step may be taken."""
        with self.register.held():
            return standing(self._record(), self.agreement, self.clock(), hurry=False)

    def step(self, now: bool = False) -> list[Path]:
        """Close the open round: absorb what came, and write the next parcels; those in the outbox.

        Where the last step was cut short, or nothing has come since, what it wrote is handed out again. `now` does not
        wait for the missing ones once the quorum is met.
        """
        with self.register.held():
            record = self._record()
            current = record.current
            if current is not None and (current.received or record.previous is None):
                reason = standing(record, self.agreement, self.clock(), hurry=now).refusal
                if reason is not None:
                    raise reason
                with one_thread_per_worker():
                    record = self._close(record, current)
            self.workplace.clear()
            return self._hand_out(self._under_this_key(record))

    def _close(self, record: HubRecord, current: Round) -> HubRecord:
        """The round after this one, or the end, committed."""
        answers = Answers(self.study.id, self.study.settings.method, current.number)
        for site, receipt in current.received.items():
            answers.add(site, self._read_upload(receipt))

        def save(state: State) -> HubRecord:
            return self._saved(record, "absorbing", state)

        def commit(changed: HubRecord) -> None:
            nonlocal record
            record = self._commit(changed)

        pace = Pace()
        ctx = self.workplace.context(self.study, current.number, pace.due, self._note)
        begun = self._load(record.absorbing or current.state)
        state = last_state(self.method.absorb(ctx, begun, answers), pace, save, commit)
        history = (*record.history, *current.received.values())
        closed = {"previous": current, "absorbing": "", "history": history}
        return self._open(self._saved(record, "final", state).model_copy(update=closed), state, current.number + 1)

    def _open(self, record: HubRecord, state: State, number: int) -> HubRecord:
        """Ask the sites for round `number` of a state that is saved as `final`; or deliver, where all is done."""
        requests = self.method.ask(self.workplace.context(self.study, number), state)
        if requests is None:
            ctx = self.workplace.context(self.study, max(number - 1, 0))
            given = self.method.deliver(ctx, state)
            home = {site: given.get(site) or ctx.bundle("delivery", site, {}) for site in self.agreement.sites}
            written = self._write(record, "delivery", ctx.round, home)
            parcels = {site: file for site, (file, _) in written.items()}
            return self._commit(record.model_copy(update={"current": None, "deliveries": parcels}))
        asked = {site: request for site, request in sorted(requests.items()) if site not in record.withdrawn}
        if number == 0:
            current = Round(number=0, state=record.final, since=self.clock(), asked=dict.fromkeys(asked, ""))
        else:
            written = self._write(record, "request", number, asked)
            current = Round(
                number=number,
                state=record.final,
                since=self.clock(),
                asked={site: sha256 for site, (_, sha256) in written.items()},
                parcels={site: file for site, (file, _) in written.items()},
            )
        return self._commit(record.model_copy(update={"current": current, "final": "", "deliveries": {}}))

    def _write(
        self, record: HubRecord, kind: Kind, round: int, bundles: Mapping[str, Bundle]
    ) -> dict[str, tuple[str, str]]:
        """A signed parcel for each site that has not withdrawn: its file, and the hash of its body."""
        written = {}
        for site, bundle in bundles.items():
            if site in record.withdrawn:
                continue
            refuse_stray(bundle, self._envelope(kind, site, round))
            self.method.payload(self.study, site).check(bundle)
            # The number of the state makes the name new: a redone round must not touch what a commit still names.
            file = f"{kind}{round + 1}-{site}-{record.saved}.parcel"
            manifest = write_parcel(self.register.path(file), bundle, self.key, made=self.clock())
            written[site] = (file, manifest.sha256)
        return written

    def _under_this_key(self, record: HubRecord) -> HubRecord:
        """With parcels that wait in the outbox signed again, where the coordinator has a new key since."""

        def signed(parcels: Mapping[str, str]) -> dict[str, str]:
            return {
                site: under_this_key(
                    self.register.path(file),
                    COORDINATOR,
                    self.trust,
                    self.method.payload(self.study, site),
                    self.key,
                    self.clock(),
                ).name
                for site, file in parcels.items()
            }

        current = record.current
        changes: dict[str, object] = {"deliveries": signed(record.deliveries)}
        if current is not None:
            changes["current"] = current.model_copy(update={"parcels": signed(current.parcels)})
        changed = record.model_copy(update=changes)
        return record if changed == record else self._commit(changed)

    # What is taken back -----------------------------------------------------------------------------------------------

    def withdraw(self, site: str, redo: bool = False) -> HubRecord:
        """A site leaves: its uploads are deleted and it is asked no more. `redo` also opens the last round again."""
        if site not in self.agreement.sites:
            raise BadInput(f"there is no site {site!r} in study {self.agreement.name}")
        with self.register.held():
            record = self._record()
            if redo:
                record = self._reopened(record)
            withdrawn = {**record.withdrawn, site: record.withdrawn.get(site, self.clock()[:10])}
            deliveries = {who: file for who, file in record.deliveries.items() if who != site}
            rounds = {
                name: None if found is None else found.without(site)
                for name, found in (("current", record.current), ("previous", record.previous))
            }
            history = tuple(
                receipt.model_copy(update={"metrics": {}}) if receipt.site == site else receipt
                for receipt in record.history
            )
            changes = {"withdrawn": withdrawn, "deliveries": deliveries, "absorbing": "", "history": history}
            record = self._commit(record.model_copy(update={**rounds, **changes}))
            self._hand_out(record)
        return record

    def reopen(self) -> HubRecord:
        """Open the last closed round again, for a late parcel or without a site that withdrew."""
        with self.register.held():
            record = self._commit(self._reopened(self._record()))
            self._hand_out(record)
        return record

    def _reopened(self, record: HubRecord) -> HubRecord:
        """As it was before the round was closed; what came since answers requests that no longer hold."""
        before = record.previous
        if before is None:
            raise refusal("no closed round", "only the last round that was closed can be opened again; go on without")
        history = tuple(receipt for receipt in record.history if receipt.round != before.number)
        return record.model_copy(
            update={
                "current": before,
                "previous": None,
                "final": "",
                "deliveries": {},
                "absorbing": "",
                "history": history,
            }
        )

    # Services ---------------------------------------------------------------------------------------------------------

    def _record(self) -> HubRecord:
        """What counts; a folder without a record begins the study."""
        record = self.register.read()
        if record is None:
            state = self.method.begin(self.workplace.context(self.study, 0))
            record = self._open(self._saved(HubRecord(study=self.study.id, current=None), "final", state), state, 0)
        if record.study != self.study.id:
            raise BadInput(
                f"{self.register.folder} was begun under study {record.study}, and the study file is {self.study.id} "
                "now; put the file back, or begin in a new folder"
            )
        return record

    def _commit(self, record: HubRecord) -> HubRecord:
        self.register.commit(record)
        return record

    def _saved(self, record: HubRecord, place: str, state: State) -> HubRecord:
        """Write a state under a name of its own; the record that names it as `place`, for the caller to commit."""
        file = f"state-{record.saved}.safetensors"
        with disk_errors(self.register.folder):
            state.write(self.register.path(file))
        notes = tuple(dict.fromkeys([*record.notes, *self.notes]))
        return record.model_copy(update={place: file, "saved": record.saved + 1, "notes": notes})

    def _load(self, file: str) -> State:
        return State.from_bytes(self.register.bytes_of(file))

    def _note(self, text: str) -> None:
        """A method's remark; kept with the next state."""
        self.notes.append(text)
        self.progress.say(f"note: {text}")

    def _read_upload(self, receipt: Receipt, called: Path | None = None) -> Bundle:
        """An upload with everything about it verified, under the key that counts now."""
        self.trust.check_sender(receipt.site, receipt.sender)
        payload = self.method.payload(self.study, receipt.site)
        envelope = self._envelope("answer", receipt.site, receipt.round)
        path = self.register.path(receipt.file)
        return read_parcel(path, self.trust.now(receipt.site), payload, envelope, called=called)[1]

    def _envelope(self, kind: Kind, site: str, round: int) -> Envelope:
        return Envelope(kind, self.study.id, self.study.settings.method, site, round)

    def _hand_out(self, record: HubRecord) -> list[Path]:
        """The parcels of the present round or of the end into the outbox, in the place of earlier ones."""
        if record.current is not None:
            kind, number, parcels = "request", record.current.number, record.current.parcels
        else:
            kind, number, parcels = "delivery", record.previous.number if record.previous else 0, record.deliveries
        name = self.agreement.name
        files = {
            f"{name}-{site}-round{number + 1}-{kind}.parcel": self.register.path(file) for site, file in parcels.items()
        }
        stale = [f"{name}-{site}-round*-{kind}.parcel" for site in self.agreement.sites for kind in SENT]
        return hand_out(self.folder / "outbox", files, stale)
