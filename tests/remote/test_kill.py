"""`kill -9` of `site train`, `hub collect` and `hub step`: run again, each ends with the bytes it would have had.

Three chosen moments here; in the soak tests before every single rename and deletion that a command makes, and at twenty
random moments each.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote.parties import Parties, agreement, copy, tree
from soak import times
from wardround.learn.trainer import Trainer
from wardround.remote import workplace

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the killer forks")
METHOD = "fedbicross"
CHANGES: dict[str, Any] = {"rounds": 1, "train": {"epochs": 3}}
ACTIONS = ("train site-1", "collect site-1 site-2 site-3", "step")
each_action = pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.split()[0])


class Killer:
    """The other side of `killer.py`."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        script = Path(__file__).with_name("killer.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, root: Path, action: str, **kill: Any) -> int:
        """Do an action in a process of its own; how it ended, negative where it was killed."""
        assert self.process.stdin
        assert self.process.stdout
        order = {"root": str(root), "action": action, "method": METHOD, "changes": CHANGES, "log": str(self.log)}
        self.process.stdin.write(json.dumps({**order, **kill}) + "\n")
        self.process.stdin.flush()
        return int(json.loads(self.process.stdout.readline())["status"])

    def changes(self) -> list[str]:
        """What the last action did to files, in order."""
        return self.log.read_text().splitlines()


@pytest.fixture(scope="module")
def killer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killer]:
    made = Killer(tmp_path_factory.mktemp("killer"))
    yield made
    assert made.process.stdin
    made.process.stdin.close()
    assert made.process.wait(timeout=30) == 0


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Everyone's folders as they are before each action."""
    root = tmp_path_factory.mktemp("before")
    parties = Parties(root / "collect", agreement(METHOD, **CHANGES))
    for name in parties.sites:
        parties.answer(name)
    copy(root / "collect", root / "step")
    Parties(root / "step", parties.agreed).collect(*parties.sites)
    (root / "train").mkdir()
    return {action: root / action.split()[0] for action in ACTIONS}


def chosen(changes: list[str]) -> list[int]:
    """Three moments: after some work, before that work counts, and right after it does."""
    done = max(i for i, change in enumerate(changes) if change in ("replace desk.json", "replace hub.json"))
    return [done // 2, done, done + 1]


@each_action
@pytest.mark.parametrize("moments", [pytest.param("all", marks=pytest.mark.soak), "three"])
def test_killed_between_changes_of_files_and_run_again(
    action: str, moments: str, killer: Killer, before: dict[str, Path], tmp_path: Path
) -> None:
    straight = copy(before[action], tmp_path / "straight")
    assert killer.run(straight, action) == 0
    changes = killer.changes()
    expected = tree(straight)
    assert expected != tree(before[action])
    for place in chosen(changes) if moments == "three" else range(len(changes)):
        root = copy(before[action], tmp_path / "killed")
        assert killer.run(root, action, kill_before=place) == -signal.SIGKILL, changes[place]
        assert killer.run(root, action) == 0, changes[place]
        assert tree(root) == expected, f"killed before {changes[place]}"
        shutil.rmtree(root)
    assert killer.run(straight, action) == 0
    assert tree(straight) == expected, "a command that is done changes nothing"


def test_training_goes_on_from_its_last_epoch(
    killer: Killer, before: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (action, *_) = ACTIONS
    root = copy(before[action], tmp_path / "killed")
    assert killer.run(root, action) == 0
    place = killer.changes().index("replace fit-0.safetensors", 1)  # the second epoch's
    shutil.rmtree(root)
    root = copy(before[action], tmp_path / "killed")
    assert killer.run(root, action, kill_before=place) == -signal.SIGKILL
    steps = []
    monkeypatch.setattr(workplace, "SAVE_EVERY_SECONDS", -1.0)
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda *given: (steps.append(1), step(*given)))
    Parties(root, agreement(METHOD, **CHANGES)).answer("site-1")
    assert len(steps) == 2 * 3  # eleven images in batches of four make three steps an epoch


@pytest.mark.soak
@each_action
def test_killed_at_twenty_random_moments(action: str, killer: Killer, before: dict[str, Path], tmp_path: Path) -> None:
    straight = copy(before[action], tmp_path / "straight")
    began = time.monotonic()
    assert killer.run(straight, action) == 0
    seconds = time.monotonic() - began
    draw = random.Random(20)  # noqa: S311 - moments, no secrets
    for number in range(times(20)):
        root = copy(before[action], tmp_path / str(number))
        ended = killer.run(root, action, kill_after=draw.uniform(0, seconds))
        assert ended in (0, -signal.SIGKILL)
        assert killer.run(root, action) == 0
        assert tree(root) == tree(straight), number
