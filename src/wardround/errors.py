"""Errors that a person can act on.

Everything a user can cause or mend is raised as one of these, with a message that says what is wrong and what to do.
The command line prints the message as one line and exits with `exit_code`; any other exception is a fault of ours and
keeps its traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wardround.methods.state import State


class WardroundError(Exception):
    """Something the user can mend; `str(error)` is the whole message."""

    exit_code = 2


class BadInput(WardroundError):
    """A setting, a file or data that cannot be used; found before any work starts."""


class RunFailed(WardroundError):
    """A run that started and cannot go on: every site diverged, the disk is full, a round had no answers."""

    exit_code = 1


class Diverged(RunFailed):
    """Work that its settings have led into numbers without end: going on would lead there again.

    `made` is a state to look at, not to go on from: clusters, images, times.
    """

    made: State | None = None


class SiteFailed(WardroundError):
    """One site could not answer; the others go on. The message names the reason, the runner adds the site."""

    exit_code = 1


class SiteDiverged(SiteFailed):
    """A site whose training its settings have led into numbers without end."""
