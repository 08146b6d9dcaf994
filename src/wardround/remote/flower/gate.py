"""A SuperNode that takes our project and no other: code that comes over the network is never run at a site.

Flower sends a project to the nodes and runs what it holds, so whoever may start runs could run anything at a hospital,
past its policy. Here a project is looked into before it is stored: one file of settings that names the ClientApp
which this site has installed, and not one line of code. Anything else stops the node, with a line that says why.

    python -m wardround.remote.flower.gate ARGUMENTS-OF-flower-supernode
"""

from __future__ import annotations

import io
import os
import signal
import time
import tomllib
import zipfile
from collections.abc import Callable
from typing import Any, NoReturn

from wardround.errors import BadInput
from wardround.remote.cli import say
from wardround.remote.flower.project import COMPONENTS

PROJECT = "pyproject.toml"
LISTING = ".info/CONTENT"  # Flower's list of what a bundle holds
MOST_BYTES = 2**16
POLL, POLL_SECONDS, MOST_SECONDS = "WARDROUND_NODE_POLL_SECONDS", 1.0, 60.0


def refuse_code(bundle: bytes) -> None:
    """Refuse a Flower app bundle unless it is a project of ours."""
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            names = [entry.filename for entry in archive.infolist()]
            size = sum(entry.file_size for entry in archive.infolist())
            if sorted(names) not in ([PROJECT], sorted([LISTING, PROJECT])) or size > MOST_BYTES:
                others = ", ".join(sorted(set(names) - {LISTING, PROJECT})) or "too much"
                raise BadInput(f"the run brings code to this site ({others!r}); it is not taken, and the node ends")
            tree = tomllib.loads(archive.read(PROJECT).decode())
            components = tree["tool"]["flwr"]["app"]["components"]
    except BadInput:
        raise
    except Exception as error:  # zlib, lzma and others each have their own; what cannot be read is never taken
        raise BadInput("the run's project cannot be read; it is not taken, and the node ends") from error
    if components != COMPONENTS:
        raise BadInput("the run names another app than wardround's; it is not taken, and the node ends")


def poll_seconds() -> float:
    """How long a node waits after a look for calls that found none; its environment may say otherwise."""
    text = os.environ.get(POLL, str(POLL_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MOST_SECONDS:
        raise BadInput(f"{POLL}={text} is no number of seconds up to {MOST_SECONDS:g}; correct it, or leave it out")
    return seconds


def guarded(
    pull: Callable[..., Any], stop: Callable[[BadInput], NoReturn], seconds: float = POLL_SECONDS
) -> Callable[..., Any]:
    """Flower's function that fetches a message and the project it belongs to, with our look into the project.

    It returns when there is a message. Flower would wait for three seconds after each look that finds none, which is
    the better part of a short round.
    """

    def pull_guarded(**given: Any) -> Any:
        fetch = given.pop("get_fab")

        def get_fab(*arguments: Any) -> Any:
            fab = fetch(*arguments)
            try:
                refuse_code(fab.content)
            except BadInput as error:
                stop(error)
            return fab

        while (run := pull(get_fab=get_fab, **given)) is None:
            time.sleep(seconds)
        return run

    return pull_guarded


def stop_node(error: BadInput) -> NoReturn:
    """End as on Ctrl-C, which is how Flower tells the SuperLink and ends its helpers; it would swallow an exception."""
    say(f"error: {error}")
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        raise SystemExit(error.exit_code)


def main() -> None:
    """A SuperNode with the gate in place."""
    from flwr.supernode import start_client_internal as internal
    from flwr.supernode.cli.flower_supernode import flower_supernode

    try:
        seconds = poll_seconds()
    except BadInput as error:
        say(f"error: {error}")
        raise SystemExit(error.exit_code) from error
    internal._pull_and_store_message = guarded(internal._pull_and_store_message, stop_node, seconds)
    flower_supernode()


if __name__ == "__main__":
    main()
