"""What the sites of a finished run sent, found out from its directory.

A run keeps no bundle: its ledger says which groups left, and state is a value (rule 3), so a site can be asked again.
A method of one round gives the very bundle that left. After several rounds the last state is asked once more, and the
answer is what the site would send in one round more; a note on the record says so. Where nothing leaves, the model
that stays at the site is attacked as if it did: that is what a stolen copy would tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from wardround import run
from wardround.audit.target import Target
from wardround.data.federation import Federation, Site
from wardround.errors import BadInput, SiteFailed
from wardround.exchange.bundle import Bundle, Envelope
from wardround.exchange.inprocess import step_together
from wardround.learn.device import Device, one_thread_per_worker
from wardround.learn.fit import Fit, Fitted, Recipe
from wardround.learn.predictor import Member
from wardround.learn.side_by_side import Outcome, count_steps, train_many
from wardround.methods.base import Answer, Context, Method, join_groups
from wardround.methods.state import State
from wardround.models import NetSpec, spec_layout
from wardround.privacy.guard import Guard, guard_for
from wardround.privacy.plan import is_on
from wardround.privacy.secret import FILE, keep_secret
from wardround.progress import Silent
from wardround.record import deployed, gallery
from wardround.record.rundir import RunDir
from wardround.settings import Settings, validate
from wardround.study import Study


@dataclass(frozen=True)
class FinishedRun:
    """A run of one method with its images, read again and found to be the same."""

    path: Path
    study: Study
    federation: Federation
    method: Method

    def site(self, name: str) -> Site:
        """A site by name."""
        for site in self.federation.sites:
            if site.name == name:
                return site
        raise BadInput(f"there is no site {name!r} in {self.path}; sites are {', '.join(self.study.sites)}")


def open_run(path: Path, data: str | None, site: str | None, progress: Silent) -> FinishedRun:
    """The run in this directory; images that are not the run's are refused, since figures on others mean nothing."""
    if (path / run.COMPARISON).is_file():
        runs = ", ".join(str(inner.parent) for inner in sorted(path.glob(f"*/{run.SETTINGS}")))
        raise BadInput(f"{path} compares several methods; audit one of them: {runs}")
    run.read_result(path)
    settings = _with_data(validate(run.read_json(path / run.SETTINGS, dict)), data, site)
    prepared = run.prepare_again(path, settings, [(settings.method, settings.set)], progress)
    (method,) = prepared.methods
    study = prepared.study.with_method(method.name, method.settings.model_dump(mode="json"))
    return FinishedRun(path, study, prepared.federation, method)


def targets(found: FinishedRun, names: Sequence[str], device: Device, progress: Silent) -> Iterator[Target]:
    """What each of these sites sent."""
    for name in names:
        site = found.site(name)
        yield _kept(found, site) if found.method.rounds(found.study) == 0 else _sent(found, site, device, progress)


def _kept(found: FinishedRun, site: Site) -> Target:
    predictor = deployed.read(found.path, site.name)
    envelope = Envelope("answer", found.study.id, found.method.name, site.name, 0)
    model = predictor.members[0] if predictor is not None and len(predictor.members) == 1 else None
    note = f"{found.method.name} sends nothing; the model that stays at the site is attacked as if it had left"
    privacy = _spent(found.path, site.name)
    return Target(Bundle(envelope, {}), site, _recipe(found.study), model, kept=True, notes=(note,), privacy=privacy)


def _sent(found: FinishedRun, site: Site, device: Device, progress: Silent) -> Target:
    study, method = found.study, found.method
    ctx, state, memory, note = _last_question(found, site.name, device, progress)
    requests = method.ask(ctx, state) or {}
    if site.name not in requests:
        raise BadInput(f"{method.name} does not ask {site.name} in its last round; audit another site")
    guard = _guard(found, site, progress)
    answer = _answer(ctx, method, site, requests[site.name], memory, guard, progress)
    model, unknown = _model(study.spec(site.name), answer)
    return Target(
        answer.bundle,
        site,
        _recipe(study),
        model,
        stage=getattr(method.settings, "stage", None),
        synthetic=_synthetic(found.path),
        notes=(*note, *unknown),
        privacy=_spent(found.path, site.name),
    )


def _last_question(
    found: FinishedRun, site: str, device: Device, progress: Silent
) -> tuple[Context, State, State, tuple[str, ...]]:
    """The context, the coordinator's state and the site's memory of the last question, as far as the run kept them."""

    def train(fits: list[Fit]) -> list[Fitted]:
        raise BadInput(f"{found.method.name} trains at the coordinator before it asks; its run cannot be audited")

    kept = RunDir(found.path)
    checkpoint = kept.checkpoint()
    rounds = checkpoint.round if checkpoint is not None else 1
    ctx = Context(found.study, max(rounds - 1, 0), device, train, progress)
    if checkpoint is None or rounds <= 1:
        return ctx, found.method.begin(ctx), State(), ()
    memory = kept.load(checkpoint.memories[site]) if site in checkpoint.memories else State()
    note = (
        f"the run kept the state after round {rounds}, not the bundles: attacked is what the site would send if round "
        f"{rounds} came once more"
    )
    return ctx, kept.load(checkpoint.state), memory, (note,)


def _guard(found: FinishedRun, site: Site, progress: Silent) -> Guard | None:
    """The site's guard as it stood before any training; with the run's secret it draws the same noise again."""
    if not is_on(found.study.settings.privacy):
        return None
    file = found.path / FILE
    if not file.exists():
        raise BadInput(f"there is no {file}, so what this site sent cannot be made again; restore it from a copy")
    secret = keep_secret(file)
    return guard_for(found.study, found.method, site, secret, progress=progress)


def _spent(path: Path, site: str) -> dict[str, float]:
    """ε and δ that the run's record says this site has spent in the end."""
    rows = [e["spent"] for e in RunDir(path).events.rows() if e["kind"] == "privacy" and e["spent"]["site"] == site]
    return {name: rows[-1][name] for name in ("epsilon", "delta") if rows and rows[-1][name] is not None}


def _answer(
    ctx: Context,
    method: Method,
    site: Site,
    request: Bundle,
    memory: State,
    guard: Guard | None,
    progress: Silent,
) -> Answer:
    def train(fits: list[Fit]) -> list[Outcome]:
        with progress.task(f"{site.name} answers again", sum(map(count_steps, fits))) as advance:
            return train_many(fits, ctx.device, advance)

    work = method.answer(ctx, site, request, memory)
    with one_thread_per_worker():
        guarded = work if guard is None else guard.doing(work, ctx.device.torch)
        outcome = step_together({site.name: guarded}, train)[site.name]
    if isinstance(outcome, SiteFailed):
        raise outcome
    return outcome if guard is None else replace(outcome, bundle=guard.outgoing(outcome.bundle))


def _model(spec: NetSpec, answer: Answer) -> tuple[Member | None, tuple[str, ...]]:
    """The network that what left makes; where parts stay at the site, the attacker is granted them."""
    sent = join_groups(answer.bundle)
    missing = [name for name in spec_layout(spec).names if name not in sent]
    if not missing:
        return Member(spec, sent), ()
    trained = answer.trained
    if not sent or trained is None or len(trained.members) != 1:
        return None, ()
    note = (
        f"{len(missing)} tensors of the network stay at the site; the attacks on the model grant them to the attacker"
    )
    return trained.members[0], (note,)


def _recipe(study: Study) -> Recipe:
    """How shadow models are trained: for the whole budget, as if all rounds were one."""
    return study.recipe(0, study.total_epochs)


def _synthetic(path: Path) -> tuple[Tensor, Tensor] | None:
    """The last frame of every gallery that the run shows: images that the coordinator computed from what it got."""
    file = path / gallery.FILE
    if not file.is_file():
        return None
    found = gallery.read(file)
    frames = [pictures[-1] for pictures in found.pictures.values()]
    return torch.cat(frames), torch.tensor(found.labels).repeat(len(frames))


def _with_data(settings: Settings, data: str | None, site: str | None) -> Settings:
    if data is None:
        return settings
    if not settings.data.files:
        return settings.model_copy(update={"data": settings.data.model_copy(update={"source": data})})
    if site is None:
        raise BadInput("this run has a file for each site; say with --site whose images --data names")
    files = {**settings.data.files, site: data}
    return settings.model_copy(update={"data": settings.data.model_copy(update={"files": files})})
