"""A process that decodes files for another one (see `reading`): questions on its input, answers on its output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from wardround.data.reading import Source, Wish, read_one, send
from wardround.data.slices import SliceRule


def main() -> None:
    """Answer until the questions end; who asked decides about Ctrl-C.

    Whatever else in this process prints (a codec in C may) goes to the errors, not among the answers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    wish = Wish(**json.loads(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError):  # who asked was killed; nobody is left to tell
        for line in sys.stdin.buffer:
            path, rule = json.loads(line)
            source = Source(Path(path), None if rule is None else SliceRule(*rule))
            send(read_one(source, wish), answers)
    os._exit(0)  # past the closing of `answers`, which would complain of the same


if __name__ == "__main__":
    main()
