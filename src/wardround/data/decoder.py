"""A process that decodes files for another one (see `reading`): questions on its input, answers on its output."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from wardround.data.reading import Source, Wish, read_one, send
from wardround.data.slices import SliceRule


def main() -> None:
    """Answer until the questions end; who asked decides about Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wish = Wish(**json.loads(sys.argv[1]))
    for line in sys.stdin.buffer:
        path, rule = json.loads(line)
        source = Source(Path(path), None if rule is None else SliceRule(*rule))
        send(read_one(source, wish), sys.stdout.buffer)


if __name__ == "__main__":
    main()
