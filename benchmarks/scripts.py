"""What the scripts that fill a table have in common: their options, and the way from plans to a printed table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import told
from wardround.errors import BadInput
from wardround.papers.cells import Plan
from wardround.papers.results import Results, read_results
from wardround.papers.runs import Runs, machine
from wardround.papers.work import Means


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where results go, where it runs, and how long."""
    parser.add_argument("--out", type=Path, required=True, help="JSON of results; what it holds is not done again")
    parser.add_argument("--table", action="store_true", help="print the table of --out as Markdown and do nothing else")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, help="folder of unfinished runs (default: a temporary one)")
    parser.add_argument("--seconds", type=float, help="start no entry that would not end within so many seconds")
    parser.add_argument("--jobs", type=int, default=1, help="so many entries at once, each in a process of its own")


def settings_given(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings out of options, without those that are not set and tables with nothing in them."""
    found = {key: settings_given(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    return {key: value for key, value in found.items() if value is not None and value != {}}


def begin(
    options: argparse.Namespace,
    name: str,
    markdown: Callable[[Mapping[str, Any]], str],
    start: Callable[[argparse.Namespace], int],
) -> int:
    """Print the table, or start; what a person can mend becomes one line and an exit code."""

    def work() -> int:
        if options.table:
            print(markdown(read_results(options.out, name)))
            return 0
        if options.jobs < 1:
            raise BadInput(f"--jobs {options.jobs} cannot be used; it should be 1 or more")
        return start(options)

    try:
        return told(work)
    except KeyboardInterrupt:
        print("stopped; the same command goes on, with the same --work where each entry stood", file=sys.stderr)
        return 130


def fill(
    options: argparse.Namespace,
    runs: type[Runs],
    results: Results,
    plans: Sequence[Plan],
    markdown: Callable[[Mapping[str, Any]], str],
    began: float,
) -> int:
    """Do what is left of the plans, print the table, and 1 where an entry failed."""
    means = Means(options.device, options.work, options.seconds, options.jobs, began)
    left, failed = means.finish(runs, results, plans, lambda text: print(text, flush=True))
    print(f"\n{len(plans) - left} of {len(plans)} entries are done  ({machine()})\n")
    print(markdown(results.tree))
    return 1 if failed else 0
