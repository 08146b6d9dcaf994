"""A process that does one command of a study after another, each in a child that may be killed on the way.

Started once, so that torch is loaded once. Reads a JSON line for each command and answers with one: how the child ended
and what it had done to files, in order. `kill_before` is the place in that order before which the child kills itself
with SIGKILL; `kill_after` the seconds after which this process kills it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2] / "src")]

import torch  # noqa: E402

from remote.parties import Parties, agreement  # noqa: E402
from wardround.methods.registry import known  # noqa: E402
from wardround.record import absorbing  # noqa: E402
from wardround.remote import workplace  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    warm_up()
    # Every epoch and every state on the way is saved, so that there is much to be killed in.
    absorbing.SAVE_EVERY_SECONDS = workplace.SAVE_EVERY_SECONDS = -1.0
    for line in sys.stdin:
        order = json.loads(line)
        log = Path(order["log"])
        log.write_text("")
        child = os.fork()
        if child == 0:
            reach = watch(log, order.get("kill_before"))
            act(order)
            reach("the end")
            os._exit(0)
        if "kill_after" in order:
            time.sleep(order["kill_after"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(json.dumps({"status": os.waitstatus_to_exitcode(status)}) + "\n")
        sys.stdout.flush()


def warm_up() -> None:
    """Load here, once, what takes long to load. No backward pass: torch refuses one after a fork that follows one."""
    known()
    importlib.import_module("sklearn.cluster")
    agreement("fedbicross").study().initial()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def watch(log: Path, kill_before: int | None) -> Callable[[str], None]:
    """Count what changes files for good (a rename, a deletion), and die before one of them, or at the end."""
    done = 0

    def reach(what: str) -> None:
        nonlocal done
        if done == kill_before:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        with log.open("a") as file:
            file.write(f"{what}\n")

    def watched(name: str, real: Any) -> Any:
        def change(path: Path, *rest: Any, **named: Any) -> Any:
            reach(f"{name} {(rest[0] if rest else path).name}")
            return real(path, *rest, **named)

        return change

    for name in ("replace", "unlink"):
        setattr(Path, name, watched(name, getattr(Path, name)))
    return reach


def act(order: dict[str, Any]) -> None:
    parties = Parties(Path(order["root"]), agreement(order["method"], **order["changes"]))
    action, *names = order["action"].split()
    if action == "train":
        parties.answer(names[0])
    elif action == "collect":
        for name in names:
            (parcel,) = (parties.root / name / "outbox").iterdir()
            parties.hub().collect(parcel)
    else:
        parties.hub().step()


if __name__ == "__main__":
    main()
