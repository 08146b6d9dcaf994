"""What it is worth that the sharpness of `consult`'s votes depends on the number of classes, on sets as they are.

As `consult_two_classes.py`, with all classes: `consult` is asked with its sharpness, and with that of eight classes,
whatever their number. Sets of eight classes would show the same twice.

    python benchmarks/consult_sharpness.py dermamnist.npz oct3.npz --smoke --seeds 0 1 2 3 4 5
    python benchmarks/consult_sharpness.py --table --page docs/consult.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from consult_two_classes import EXPERIMENT as TWO_CLASSES
from experiments import main_of

NAME = "consult_sharpness"
EXPERIMENT = replace(TWO_CLASSES, name=NAME, images=lambda source, folder: source)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is left, and print the table."""
    return main_of(EXPERIMENT, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
