"""From settings to a finished directory: run one method, compare several, or go on with what was stopped."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from wardround.agreement import Agreement, read_agreement
from wardround.coordinator import Coordinator
from wardround.data.federate import federate, federate_files
from wardround.data.federation import Federation
from wardround.data.imageset import Dataset
from wardround.data.partition import Partition
from wardround.data.sources import default_data_folder, load
from wardround.errors import BadInput, Diverged, WardroundError
from wardround.exchange.policy import read_policy
from wardround.files import disk_errors
from wardround.learn.device import Device, find_device, one_thread_per_worker
from wardround.learn.store import FitStore
from wardround.learn.trainer import fits_device
from wardround.methods.base import Method
from wardround.methods.registry import make
from wardround.models import load_weights
from wardround.privacy.account import delta_notes
from wardround.privacy.plan import check as check_privacy
from wardround.privacy.plan import trains_privately
from wardround.progress import Silent
from wardround.record import result as results
from wardround.record.rundir import Log, RunDir, lock_directory, refuse_existing, sweep, write_json
from wardround.report import write_report
from wardround.settings import Settings, validate
from wardround.sitedata import all_sites, read_site
from wardround.study import Study, agree

SETTINGS, PARTITION, DATA, ENVIRONMENT = "settings.json", "partition.json", "data.json", "environment.json"
COMPARISON, RESULT, REPORT = "comparison.json", "result.json", "report.html"
FAILED = "failed"  # the event that says why a run has ended without a result
AGREEMENT = "study.toml"  # of a rehearsal alone: what it rehearses


@dataclass(frozen=True)
class Prepared:
    """A study whose every input has been read and checked; nothing is written yet."""

    study: Study
    federation: Federation
    partition: Partition
    device: Device
    methods: tuple[Method, ...]
    named: tuple[str, ...]  # the methods as the user named them: a name, or the path of a Python file


def prepare(
    settings: Settings,
    methods: Sequence[tuple[str, dict[str, Any]]],
    progress: Silent,
    agreed: Agreement | None = None,
) -> Prepared:
    """Check everything that can be checked before work starts; `agreed` is what a rehearsal rehearses."""
    made = tuple(make(name, own) for name, own in methods)
    if len({method.name for method in made}) < len(made):
        raise BadInput("a method is named twice; name each method once")
    device = find_device(settings.device, settings.workers)
    federation, partition = _federation(settings, progress, agreed)
    study = replace(agree(settings, federation), agreed_id=agreed.id if agreed else "")
    for spec in {study.spec(site) for site in study.sites}:  # refuses a model that is unknown or unfit for the images
        if settings.model.weights is not None:
            load_weights(settings.model.weights, spec)
    for method in made:
        method.check(_under(study, method))
        check_privacy(_under(study, method), method)
    return Prepared(study, federation, partition, device, made, tuple(name for name, _ in methods))


def _under(study: Study, method: Method) -> Study:
    """The study as this method sees it, under its name (a method may come from a file) and with all its settings."""
    return study.with_method(method.name, method.settings.model_dump(mode="json"))


@dataclass(frozen=True)
class Job:
    """Work in a directory of its own. `finish` does whatever is left of it, however often it was stopped."""

    path: Path
    prepared: Prepared
    is_comparison: bool
    progress: Silent

    def finish(self) -> dict[str, Any]:
        """Run to the end; the result. A directory that is finished stays as it is."""
        with lock_directory(self.path):
            if not (self.path / RESULT).is_file():
                sweep(self.path)
                for text in self._privacy_notes():
                    self.progress.say(f"note: {text}")
                if self.is_comparison:
                    self._compare()
                else:
                    (method,) = self.prepared.methods
                    fits = FitStore(self.path / "fits")
                    self._run(self.path, _under(self.prepared.study, method), method, fits)
                    fits.clear()
        return read_result(self.path)

    def _compare(self) -> None:
        """One run directory per method, and one folder of trained site models that they share."""
        runs = {method.name: self.path / method.name for method in self.prepared.methods}
        with self.progress.task("methods", len(runs)) as advance:
            for method, named in zip(self.prepared.methods, self.prepared.named, strict=True):
                study = _under(self.prepared.study, method)
                inner = runs[method.name]
                if not inner.exists():
                    again = study.with_method(named, study.settings.set)
                    RunDir.create(inner, lambda part, study=again: self.write_opening(part, study))  # type: ignore[misc]
                if not (inner / RESULT).is_file():
                    self._run(inner, study, method, FitStore(self.path / "fits"))
                advance()
        self._conclude(self.path, "compare", self.prepared.study, runs)

    def _run(self, path: Path, study: Study, method: Method, fits: FitStore) -> None:
        run = RunDir(path)
        federation = _on_device(self.prepared.federation, self.prepared.device)
        try:
            with one_thread_per_worker():
                Coordinator(study, federation, method, self.prepared.device, run, fits, self.progress).work()
        except Exception as error:
            _leave_word(run, error)
            raise
        finally:
            run.close()
            self.prepared.device.release()
        self._conclude(path, "run", study, {method.name: path})

    def _conclude(self, path: Path, kind: str, study: Study, runs: dict[str, Path]) -> None:
        data = results.describe_data(self.prepared.federation)
        result = results.whole(
            kind,
            path.name,
            shlex.join(["wardround", *self._again(path, kind, study.settings)]),
            study.settings.model_dump(mode="json"),
            data,
            results.environment(self.prepared.device),
            [results.one_method(run, name, data, within=path) for name, run in runs.items()],
        )
        result["notes"][:0] = [
            *({"method": "data", "text": text} for text in self.prepared.federation.notes),
            *({"method": "privacy", "text": text} for text in self._privacy_notes()),
        ]
        with disk_errors(path):
            write_report(result, path / REPORT)
            write_json(path / RESULT, result)

    def _again(self, path: Path, kind: str, settings: Settings) -> list[str]:
        """The command that repeats it. A rehearsal's images become the agreement's classes in no other way."""
        if (path / AGREEMENT).is_file():
            data = [word for name, source in settings.data.files.items() for word in ("--data", f"{name}={source}")]
            out = ["--out", f"{path}-again", "--device", settings.device]
            return ["study", "rehearse", str(path / AGREEMENT), *data, *out]
        return [kind, *([*self.prepared.named, "--study"] if kind == "compare" else []), str(path / SETTINGS)]

    def _privacy_notes(self) -> list[str]:
        privacy = self.prepared.study.settings.privacy
        images = {site.name: len(site.train) for site in self.prepared.federation.sites}
        return delta_notes(privacy.delta, images) if trains_privately(privacy) else []

    def write_opening(self, part: Path, study: Study) -> None:
        """The opening files of a run directory."""
        write_json(part / SETTINGS, study.settings.model_dump(mode="json"))
        self.prepared.partition.save(part / PARTITION)
        write_json(part / DATA, results.describe_data(self.prepared.federation))
        write_json(part / ENVIRONMENT, results.environment(self.prepared.device))


def _leave_word(run: RunDir, error: Exception) -> None:
    """Say in the log why nothing more comes, for whoever looks. A resume takes it back: no checkpoint counts on it."""
    text = str(error) if isinstance(error, WardroundError) else f"a fault of wardround ({type(error).__name__})"
    with suppress(WardroundError):  # a full disk has been told of already
        run.events.append({"kind": FAILED, "text": text, "diverged": isinstance(error, Diverged)})


def begin_run(settings: Settings, out: Path | None, progress: Silent) -> Job:
    """Check everything, then make the directory of a run of one method."""
    if out is not None:
        refuse_existing(out)
    _check_policies(settings)
    prepared = prepare(settings, [(settings.method, settings.set)], progress)
    job = Job(out or _free_path(settings, prepared.methods[0].name), prepared, False, progress)
    RunDir.create(job.path, lambda part: job.write_opening(part, prepared.study))
    return job


def begin_comparison(
    settings: Settings, methods: Sequence[tuple[str, dict[str, Any]]], out: Path | None, progress: Silent
) -> Job:
    """Check everything, then make the directory of a comparison: same partition, shared site models."""
    if out is not None:
        refuse_existing(out)
    _check_policies(settings)
    prepared = prepare(settings, methods, progress)
    job = Job(out or _free_path(settings, "compare"), prepared, True, progress)

    def fill(part: Path) -> None:
        job.write_opening(part, prepared.study)
        write_json(part / COMPARISON, [{"method": name, "set": own} for name, own in methods])

    RunDir.create(job.path, fill)
    return job


def reopen(path: Path, progress: Silent) -> Job:
    """The job of a directory that was stopped, with its data read and checked again."""
    if not (path / SETTINGS).is_file():
        raise BadInput(f"{path} is not the directory of a run: it has no {SETTINGS}; check the path")
    settings = validate(read_json(path / SETTINGS, dict))
    comparison = path / COMPARISON
    listed: list[dict[str, Any]] = [{"method": settings.method, "set": settings.set}]
    if comparison.is_file():
        listed = read_json(comparison, list)
    _check_policies(settings)
    prepared = prepare(settings, [(entry["method"], entry["set"]) for entry in listed], progress, agreed_in(path))
    if read_json(path / DATA, dict) != results.describe_data(prepared.federation):
        raise BadInput(f"the images or the partition have changed since {path} was begun; use the same data")
    return Job(path, prepared, comparison.is_file(), progress)


def prepare_again(
    path: Path, settings: Settings, methods: Sequence[tuple[str, dict[str, Any]]], progress: Silent
) -> Prepared:
    """What a finished run was made from, read again; images that are not the run's are refused."""
    prepared = prepare(settings, methods, progress, agreed_in(path))
    if not results.is_of(prepared.federation, read_json(path / DATA, dict)):
        raise BadInput(
            f"these are not the images of {path}: their hashes differ from its {DATA}; name the run's own images with "
            "--data"
        )
    return prepared


def agreed_in(path: Path) -> Agreement | None:
    """What was rehearsed in this directory; None where it holds an ordinary run."""
    return read_agreement(path / AGREEMENT) if (path / AGREEMENT).is_file() else None


def _check_policies(settings: Settings) -> None:
    """Not in `prepare`, which also serves those who only look at a run: they need no policy."""
    for path in settings.policies.values():
        read_policy(path)


def read_result(path: Path) -> dict[str, Any]:
    """The result of a finished run."""
    file = path / RESULT if path.is_dir() else path
    if not path.exists():
        raise BadInput(f"there is no {path}; give the directory of a run")
    if not file.is_file():
        for log in (path / "events.jsonl", *sorted(path.glob("*/events.jsonl"))):  # of a comparison, those of its runs
            *_, last = [{}, *Log(log).rows()]
            if last.get("kind") == FAILED and last.get("diverged"):  # to go on would lead there again
                raise BadInput(f"{path} has no {RESULT}: {last['text']} in a new run")
        again = f"wardround resume {shlex.quote(str(path))}"
        raise BadInput(f"{path} has no {RESULT}; if a run was stopped there, go on with: {again}")
    found: dict[str, Any] = read_json(file, dict)
    if found.get("schema_version") != results.SCHEMA_VERSION:
        raise BadInput(f"{file} is not a result this version can read (schema_version {results.SCHEMA_VERSION})")
    return found


def rewrite_report(path: Path) -> Path:
    """Make the report of a finished run again."""
    result = read_result(path)
    page = (path if path.is_dir() else path.parent) / REPORT
    with disk_errors(page):
        write_report(result, page)
    return page


# Data -----------------------------------------------------------------------------------------------------------------


def _federation(settings: Settings, progress: Silent, agreed: Agreement | None) -> tuple[Federation, Partition]:
    try:
        if agreed is not None:
            files = settings.data.files
            return all_sites(agreed, [read_site(agreed, name, source, progress) for name, source in files.items()])
        return _sites(settings, progress)
    except MemoryError as error:
        raise BadInput("the images do not fit into memory; use fewer images, smaller ones or fewer sites") from error


def _sites(settings: Settings, progress: Silent) -> tuple[Federation, Partition]:
    data = settings.data
    common: dict[str, Any] = {
        "by_patient": data.by_patient,
        "seed_for_splits": data.partition_seed,
        "partition_seed": data.partition_seed,
        "merge_val": data.merge_val,
        "val_share": data.val_share,
        "test": data.test or ("natural" if data.files or data.partition == "natural" else "weighted"),
        "test_share": data.test_share,
        "shift": data.shift,
        "shift_strength": data.shift_strength,
    }
    if data.files:
        return federate_files(
            {name: _dataset(settings, source, progress) for name, source in data.files.items()}, **common
        )
    return federate(
        _dataset(settings, data.source, progress),
        rule=data.partition,
        sites=data.sites,
        alpha=data.alpha,
        capped=data.capped,
        classes_per_site=data.classes_per_site,
        min_size=data.min_size,
        partition_file=data.partition_file,
        **common,
    )


def _dataset(settings: Settings, source: str, progress: Silent) -> Dataset:
    data = settings.data
    sites = max(data.sites, 1) if data.partition == "natural" else 0
    folder = Path(os.path.expanduser(data.folder)) if data.folder else default_data_folder()
    return load(
        source,
        folder,
        size=data.size,
        phantom_sites=sites,
        progress=progress,
        slices=data.slices,
        groups=data.groups,
        by_patient=data.by_patient is not False,
    )


def _on_device(federation: Federation, device: Device) -> Federation:
    """Images live where they are used, if there is room; sets that several sites share stay shared."""
    parts = {id(part): part for site in federation.sites for part in (site.train, site.val, site.test.images)}
    parts[id(federation.test)] = federation.test
    if not device.is_cuda or not fits_device(sum(part.images.numel() for part in parts.values()), device.torch):
        return federation
    moved: dict[int, Any] = {}

    def move(images: Any) -> Any:
        if id(images) not in moved:
            moved[id(images)] = images.to(device.torch)
        return moved[id(images)]

    sites = tuple(
        replace(
            site, train=move(site.train), val=move(site.val), test=replace(site.test, images=move(site.test.images))
        )
        for site in federation.sites
    )
    return replace(federation, sites=sites, test=move(federation.test))


# Directories ----------------------------------------------------------------------------------------------------------


def _free_path(settings: Settings, what: str) -> Path:
    """`runs/NAME`, with a number behind it where that name is taken."""
    source = "files" if settings.data.files else Path(settings.data.source).resolve().stem
    name = settings.name or re.sub(r"[^A-Za-z0-9._]+", "-", f"{what}-{source}")[:64].rstrip("-.")
    numbered = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in count(1))
    with disk_errors(Path("runs")):
        return next(path for path in numbered if not path.exists())


def read_json(path: Path, kind: type) -> Any:
    """What a run's directory holds under this name; a directory may come from anywhere."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, kind):
            raise ValueError("it does not hold what wardround wrote")
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(
            f"{path} cannot be read: {error}; give the directory of a run, or start the run again in a new directory"
        ) from error
    return found
