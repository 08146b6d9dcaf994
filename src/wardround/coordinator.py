"""The coordinator's loop: ask, exchange, absorb, measure, commit; then deliver and personalise.

Everything between two commits can be lost and done again with the same result, because state is a value and every
random draw is derived from the round. So a killed run resumes and ends with the numbers it would have had.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from wardround.data.federation import Federation
from wardround.errors import Diverged, RunFailed, SiteDiverged, SiteFailed
from wardround.examine import PERSONAL, SHARED, Examiner
from wardround.exchange.answers import Answers
from wardround.exchange.bundle import Bundle
from wardround.exchange.inprocess import InProcess
from wardround.exchange.ledger import Entry
from wardround.exchange.policy import Gate, read_policy
from wardround.files import disk_errors
from wardround.learn.device import Device
from wardround.learn.fit import Fit, Fitted
from wardround.learn.predictor import Predictor
from wardround.learn.side_by_side import Outcome, all_fitted, count_steps, train_many
from wardround.learn.store import FitStore
from wardround.methods.base import Context, Method
from wardround.methods.state import State
from wardround.privacy import secret as secrets
from wardround.privacy.account import SpentRow
from wardround.privacy.guard import Guard, guard_for
from wardround.privacy.plan import is_on
from wardround.progress import Silent
from wardround.record import deployed, workings
from wardround.record.absorbing import Pace, last_state
from wardround.record.rundir import Checkpoint, RunDir
from wardround.study import Study, round_half_up


@dataclass
class Coordinator:
    """One method on one study, recorded in one directory."""

    study: Study
    federation: Federation
    method: Method
    device: Device
    run: RunDir
    fits: FitStore
    progress: Silent

    def __post_init__(self) -> None:
        settings = self.study.settings
        self.examiner = Examiner(
            self.federation, self.device, settings.train.precision, self.method.name, settings.seed, self.progress
        )
        self.gates = {
            site.name: Gate(read_policy(settings.policies[site.name]), site.train.counts().cpu(), say=self._note_once)
            for site in self.federation.sites
            if site.name in settings.policies
        }
        self.guards: dict[str, Guard] = {}
        self.memories: dict[str, str] = {}
        self.saved = 0
        self.began = time.monotonic()
        self.pace = Pace()

    def work(self) -> None:
        """From wherever the record stands to the last predictor."""
        checkpoint = self.run.checkpoint()
        self.run.rewind(checkpoint)
        if checkpoint is None:
            state, round, answers = self.method.begin(self._context(0)), 0, {}
        else:
            state, round, answers = self.run.load(checkpoint.state), checkpoint.round, checkpoint.answers
            self.memories, self.saved = dict(checkpoint.memories), checkpoint.saved
            self.began -= checkpoint.seconds
            self._recall_what_left()
        self._stand_guard()
        self._note_a_share_of_nobody()
        with self.progress.task("rounds", self.method.rounds(self.study), done=round) as advance:
            while (newer := self._round(self._context(round), state, answers)) is not None:
                state, round, answers = newer, round + 1, {}
                self.run.commit(self._checkpoint(round, state))
                advance()
        self._finish(self._context(max(round - 1, 0)), state, rounds=round)

    # One round --------------------------------------------------------------------------------------------------------

    def _round(self, ctx: Context, state: State, stored: dict[str, str]) -> State | None:
        """The state after this round, measured; None where the method is done. `stored` answers are not asked again."""
        if stored:
            received: Mapping[str, Bundle] = self._stored_answers(ctx, stored)
        else:
            requests = self.method.ask(ctx, state)
            if requests is None:
                return None
            received = self._exchange(ctx, requests)
        state = self._absorb(ctx, state, received, stored)
        if self._measure(ctx.round):
            with self._measuring(ctx.round):
                self._measure_shared(ctx, self.method.predictor(ctx, state))
                if ctx.round + 1 < self.method.rounds(self.study):  # the end asks for the last one's again
                    self.examiner.forget()
        self.run.events.append({"kind": "round", "round": ctx.round, "seconds": self._seconds()})
        return state

    def _exchange(self, ctx: Context, requests: dict[str, Bundle]) -> Mapping[str, Bundle]:
        if not requests:
            raise RunFailed(f"{self.method.name} asked no site in round {ctx.round + 1}; this is a fault of the method")

        def remember(site: str, memory: State) -> None:
            if memory.groups or memory.facts or site in self.memories:
                fresh_memories[site] = self.run.save(f"memory-{site}-{ctx.round}.safetensors", memory)

        def measure(site: str, trained: Predictor) -> None:
            with self._measuring(ctx.round):
                for row in self.examiner.trained(ctx.round, site, trained):
                    self.run.events.append(row)
                self.examiner.forget()

        fresh_memories: dict[str, str] = {}
        shown = measure if self.study.settings.evaluate_trained and self._measure(ctx.round) else None
        found = self.transport.exchange(ctx, self.method, requests, self._recall, remember, shown)
        self.memories.update(fresh_memories)
        for site, reason in found.failures.items():
            self._note(f"{site} did not answer in round {ctx.round + 1}: {reason}", site=site, round=ctx.round)
        if not found.answers:
            reasons = "; ".join(f"{site}: {reason}" for site, reason in found.failures.items())
            words = f"no site answered in round {ctx.round + 1} ({reasons})"
            if all(isinstance(failure, SiteDiverged) for failure in found.failures.values()):
                raise Diverged(f"{words}; change that")  # to go on would lead here again
            raise RunFailed(words)
        return found.answers

    def _absorb(self, ctx: Context, state: State, received: Mapping[str, Bundle], stored: dict[str, str]) -> State:
        """Take the last state; commit those in between at most every so often, with the answers they still need.

        A state is committed when another has followed it: from the last one a resumed run would absorb twice.
        """
        self.pace = Pace()

        def save(latest: State) -> Checkpoint:
            nonlocal stored
            stored = stored or self._store_answers(ctx, received)
            return self._checkpoint(ctx.round, latest, stored)

        try:
            return last_state(self.method.absorb(ctx, state, received), self.pace, save, self.run.commit)
        except Diverged as error:
            for event in workings.leave(self.run.path, error.made or State()):
                self.run.events.append(event)
            raise

    def _measure(self, round: int) -> bool:
        """Whether this round is measured."""
        return (round + 1) % self.study.settings.evaluate_every == 0

    @contextmanager
    def _measuring(self, round: int) -> Iterator[None]:
        """Log how long measuring takes: it is no part of the method, and its seconds are told apart from the work's."""
        began = time.monotonic()
        yield
        self.run.events.append({"kind": "measuring", "round": round, "seconds": time.monotonic() - began})

    def _measure_shared(self, ctx: Context, predictor: Predictor | None) -> None:
        if predictor is not None:
            for row in self.examiner.shared(ctx.round, predictor):
                self.run.events.append(row)

    # The end ----------------------------------------------------------------------------------------------------------

    def _finish(self, ctx: Context, state: State, rounds: int) -> None:
        """What each site takes home, makes of it, and how good that is."""
        shared = self.method.predictor(ctx, state)
        if rounds == 0 or not self._measure(ctx.round):
            self._measure_shared(ctx, shared)
        if shared is not None:
            self._count_answers(ctx.round, SHARED, "", shared)
        if shared is not None and self.examiner.is_constant(shared):
            self._note("the shared model is a constant predictor: it gives one class for every test image")
        delivered = self.method.deliver(ctx, state)
        constant = []
        with self.progress.task("what each site deploys", len(self.study.sites)) as advance:
            for site, predictor in self.transport.personalise(ctx, self.method, delivered, self._recall):
                if isinstance(predictor, SiteFailed):
                    self._note(f"{site} has no predictor: {predictor}", site=site, round=ctx.round)
                    continue
                for row in self.examiner.personal(ctx.round, site, predictor):
                    self.run.events.append(row)
                self._count_answers(ctx.round, PERSONAL, site, predictor)
                if self.examiner.is_constant(predictor):
                    constant.append(site)
                self._keep(site, predictor, shared)
                self.examiner.forget(except_for=shared)
                advance()
        if constant:
            self._note(f"constant predictors (one class for every test image) at {', '.join(constant)}")
        self.examiner.forget()
        if self.study.settings.evaluate_features:
            self._measure_features(shared)
        for event in workings.leave(self.run.path, state):
            self.run.events.append(event)
        self.run.events.append({"kind": "end", "seconds": self._seconds()})
        self.run.events.flush()
        self.run.ledger.flush()

    def _count_answers(self, round: int, model: str, site: str, predictor: Predictor) -> None:
        for event in self.examiner.answers(round, model, site, predictor):
            self.run.events.append(event)

    def _measure_features(self, shared: Predictor | None) -> None:
        if shared is None or len(shared.members) != 1:
            self._note("features are not compared: there is no one network that all sites share")
            return
        for event in self.examiner.features(shared.members[0], self.study.streams):
            self.run.events.append(event)

    def _keep(self, site: str, predictor: Predictor, shared: Predictor | None) -> None:
        with disk_errors(self.run.path / "predictors"):
            deployed.keep(self.run.path, site, predictor, shared)

    # Services ---------------------------------------------------------------------------------------------------------

    def _context(self, round: int) -> Context:
        return Context(
            self.study, round, self.device, self._train_or_fail, self.progress, lambda: self.pace.due(), self._note_once
        )

    def _train(self, fits: list[Fit]) -> list[Outcome]:
        """Reuse what the store has, train the rest side by side, and say how each went."""
        keys = [fit.key() for fit in fits]
        outcomes: dict[int, Outcome] = {}
        for i, key in enumerate(keys):
            found = self.fits.get(key) if key else None
            if found is not None:
                outcomes[i] = found
        todo = [i for i in range(len(fits)) if i not in outcomes]
        label = fits[0].label if len(fits) == 1 else f"{len(fits)} sites ({fits[0].label.partition(', ')[2]})"
        with self.progress.task(label, sum(count_steps(fits[i]) for i in todo)) as advance:
            for i, outcome in zip(todo, train_many([fits[i] for i in todo], self.device, advance), strict=True):
                outcomes[i] = outcome
                key = keys[i]
                if key and isinstance(outcome, Fitted):
                    with disk_errors(self.fits.folder):
                        self.fits.put(key, outcome)
        for i, fit in enumerate(fits):
            self._log_fit(fit, outcomes[i], reused=i not in todo)
        return [outcomes[i] for i in range(len(fits))]

    def _train_or_fail(self, fits: list[Fit]) -> list[Fitted]:
        return all_fitted(self._train(fits))

    def _log_fit(self, fit: Fit, outcome: Outcome, reused: bool) -> None:
        row: dict[str, Any] = {"kind": "fit", "label": fit.label, "reused": reused}
        if isinstance(outcome, Fitted):
            row |= {
                "images": outcome.trained_on,
                "seconds": round(outcome.seconds, 3),
                "loss": outcome.losses[-1] if outcome.losses else None,
                "best_epoch": outcome.best_epoch,
                "skipped": outcome.skipped,
            }
        self.run.events.append(row)
        if isinstance(outcome, Fitted) and outcome.skipped:
            self._note(f"{fit.label}: not trained, {outcome.skipped}")

    def _stand_guard(self) -> None:
        """The transport, with a guard at every site where privacy is on; what was spent before a stop is spent."""
        if is_on(self.study.settings.privacy):
            secret = secrets.keep_secret(self.run.path / secrets.FILE)
            rows = [SpentRow(**row["spent"]) for row in self.run.events.rows() if row["kind"] == "privacy"]
            for site in self.federation.sites:
                guard = guard_for(
                    self.study,
                    self.method,
                    site,
                    secret,
                    rows,
                    on_fit=lambda fit, fitted: self._log_fit(fit, fitted, reused=False),
                    on_spent=lambda row: self.run.events.append({"kind": "privacy", "spent": row.model_dump()}),
                    progress=self.progress,
                )
                if guard is not None:
                    self.guards[site.name] = guard
        self.transport = InProcess(self.federation, self._train, self._count, gates=self.gates, guards=self.guards)

    def _recall_what_left(self) -> None:
        """Bytes that left before a stop count against the sites' policies, too."""
        for row in self.run.ledger.rows():
            if row["direction"] == "up" and row["site"] in self.gates:
                sent, size = self.gates[row["site"]].sent, sum(row["groups"].values()) + row["overhead"]
                sent[row["round"]] = sent.get(row["round"], 0) + size

    def _count(self, bundle: Bundle) -> None:
        self.run.ledger.append(Entry.of(bundle).as_row())

    def _seconds(self) -> float:
        """Since the run began, without the time it lay stopped."""
        return round(time.monotonic() - self.began, 3)

    def _recall(self, site: str) -> State:
        return self.run.load(self.memories[site]) if site in self.memories else State()

    def _note(self, text: str, **place: Any) -> None:
        self.run.events.append({"kind": "note", "text": text, **place})
        self.progress.say(f"note: {text}")

    def _note_a_share_of_nobody(self) -> None:
        """The rule for a share of the sites that rounds to none of them: one is asked, and a note says so."""
        share, count = self.study.settings.participants, len(self.study.sites)
        if self.method.family == "multi-round" and round_half_up(share * count) == 0:
            self._note_once(
                f"participants = {share:g} of {count} sites rounds to none; one site is asked in each round"
            )

    def _note_once(self, text: str) -> None:
        """A method's note: work that it does again after a stop has the same things to say."""
        if not any(row["kind"] == "note" and row["text"] == text for row in self.run.events.rows()):
            self._note(text)

    def _store_answers(self, ctx: Context, received: Mapping[str, Bundle]) -> dict[str, str]:
        names = {site: f"answer-{site}-{ctx.round}.safetensors" for site in received}
        with disk_errors(self.run.path):
            for site, name in names.items():
                received[site].write(self.run.path / "checkpoint" / name)
        return names

    def _stored_answers(self, ctx: Context, names: dict[str, str]) -> Answers:
        found = Answers(ctx.study.id, ctx.study.settings.method, ctx.round)
        for site, name in names.items():
            found.add(site, Bundle.from_bytes(self.run.read(name)))
        return found

    def _checkpoint(self, round: int, state: State, answers: dict[str, str] | None = None) -> Checkpoint:
        """Save a state under a name of its own: until this is committed, the checkpoint before it needs its file."""
        name = self.run.save(f"state-{self.saved}.safetensors", state)
        self.saved += 1
        return Checkpoint(
            round,
            name,
            self.memories,
            answers or {},
            self.saved,
            self.run.events.flush(),
            self.run.ledger.flush(),
            self._seconds(),
        )
