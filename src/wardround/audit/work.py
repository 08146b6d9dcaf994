"""An audit from its targets to its files: job after job, each stored when it is done.

OUT/audit.json     the record: figures alone, no picture        OUT/audit.html     the page, with patients' images
OUT/parts/         what is done of an audit that was stopped; removed at the end
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from wardround import __version__, tensorfile
from wardround.audit.attacks import Attacker, Done, Effort, Job
from wardround.audit.page import write_page
from wardround.audit.report import (
    SCHEMA,
    Audit,
    AuditRecord,
    GroupAudit,
    attack_from_json,
    attack_to_json,
    averaged,
)
from wardround.audit.target import Target
from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.learn.device import Device, one_thread_per_worker
from wardround.privacy.account import delta_notes
from wardround.progress import Silent
from wardround.record.rundir import lock_directory
from wardround.tensorfile import Groups

RECORD, PAGE, PARTS = "audit.json", "audit.html", "parts"
Pictures = dict[tuple[str, str, str], Groups]  # by site, group and attack


class PartStore:
    """Finished jobs of an audit in progress, by a hash of all that a job's result depends on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Done | None:
        """A stored result, if it is whole; what cannot be read is done again."""
        try:
            groups, record = tensorfile.from_bytes((self.folder / f"{key}.safetensors").read_bytes())
            return Done(attack_from_json(json.dumps(record["attack"])), groups)
        except (OSError, BadInput, KeyError):
            return None

    def put(self, key: str, done: Done) -> None:
        """Store a result, whole or not at all."""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            os.chmod(self.folder, 0o700)  # the pictures are patients' images
            record = {"attack": json.loads(attack_to_json(done.attack))}
            tensorfile.write(self.folder / f"{key}.safetensors", done.pictures, record)


def work(
    source: str,
    targets: Iterable[Target],
    attacks: Sequence[str],
    effort: Effort,
    seed: int,
    out: Path,
    device: Device,
    progress: Silent,
) -> AuditRecord:
    """Attack every target and write the record and the page into `out`; goes on where it was stopped."""
    if (out / RECORD).exists():
        raise BadInput(f"{out / RECORD} exists already; choose another --out, or remove it")
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    audits: list[Audit] = []
    pictures: Pictures = {}
    notes: dict[str, tuple[str, ...]] = {}
    privacy: dict[str, dict[str, float]] = {}
    with lock_directory(out), one_thread_per_worker():
        store = PartStore(out / PARTS)
        for target in targets:
            attacker = Attacker(target, seed, effort, device, progress)
            found = _attacked(attacker, attacks, store, pictures)
            audits.append(found)
            notes[target.name] = (*target.notes, *_weak_promise(target), *_not_judged(attacker, attacks))
            privacy[target.name] = dict(target.privacy)
        record = AuditRecord(
            SCHEMA, __version__, source, asdict(effort), tuple(audits), averaged(audits), notes, privacy
        )
        with disk_errors(out):
            write_page(out / PAGE, record, pictures)
            write_atomically(out / RECORD, (record.to_json() + "\n").encode())
            shutil.rmtree(out / PARTS, ignore_errors=True)
    return record


def _attacked(attacker: Attacker, attacks: Sequence[str], store: PartStore, pictures: Pictures) -> Audit:
    target = attacker.target
    jobs = [job for job in attacker.jobs() if job.name in attacks]
    groups: dict[str, list[Done]] = {}
    for job in attacker.progress.track(jobs, f"attacks on {target.name}"):
        key = _key(attacker, job)
        done = store.get(key)
        if done is None:
            done = job.run()
            store.put(key, done)
        groups.setdefault(job.group, []).append(done)
        if done.pictures:
            pictures[target.name, job.group, job.name] = done.pictures
    envelope = target.bundle.envelope
    found = tuple(GroupAudit(name, tuple(done.attack for done in of)) for name, of in groups.items())
    unjudged = tuple(GroupAudit(name, ()) for name in attacker.unjudged())
    return Audit(
        envelope.study, envelope.method, target.name, attacker.seed, len(target.site.train), (*found, *unjudged)
    )


def _key(attacker: Attacker, job: Job) -> str:
    facts = [attacker.target.sha256, job.group, job.name, attacker.seed, asdict(attacker.effort), __version__]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _weak_promise(target: Target) -> list[str]:
    delta = target.privacy.get("delta")
    return [] if delta is None else delta_notes(delta, {target.name: len(target.site.train)})


def _not_judged(attacker: Attacker, attacks: Sequence[str]) -> list[str]:
    notes = []
    if unjudged := attacker.unjudged():
        notes.append(f"{', '.join(unjudged)} left, too, and no attack here is made for it: it is not judged")
    if not any(job.name in attacks for job in attacker.jobs()):
        notes.append("none of the chosen attacks applies to what left this site")
    return notes
