"""`wardround data check`: parse, look, print; the exit code says whether a result would be spoilt."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from wardround.errors import BadInput
from wardround.progress import Bars, Silent
from wardround.show import PLAIN, printable

if TYPE_CHECKING:
    from wardround.data.check.findings import Finding
    from wardround.data.check.inspected import Inspected

Source = Annotated[str, typer.Argument(metavar="PATH", hidden=True)]
Out = Annotated[Path | None, typer.Option(help="the HTML page to write (default: NAME-check.html here)")]
NoPage = Annotated[bool, typer.Option("--no-page", help="write no page")]
Size = Annotated[int | None, typer.Option(help="pixels that a study would resize to; for --cache")]
Slices = Annotated[str | None, typer.Option(help="which pictures of volumes and films, such as 'middle axial'")]
Groups = Annotated[Path | None, typer.Option(help="for an .npz file: a CSV table of whose each image is")]
Keep = Annotated[bool, typer.Option("--cache", help="also build the cache that training reads, in the same pass")]
Folder = Annotated[Path | None, typer.Option(help="the data folder (default: $WARDROUND_DATA or ~/.wardround/data)")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print findings only")]
Json = Annotated[bool, typer.Option("--json", help="print findings as JSON")]

STYLES = {"spoils": "bold red", "look": "yellow", "note": "cyan"}
NAMED = 3  # files that a line on the terminal names


def check_command(
    path: Source,
    out: Out = None,
    no_page: NoPage = False,
    size: Size = None,
    slices: Slices = None,
    groups: Groups = None,
    cache: Keep = False,
    folder: Folder = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Look at the images in PATH as a careful person would, before anybody trains on them.

    PATH is anything that `wardround run --data` takes. The exit code is 1 where something would spoil a result.
    """
    from wardround.data.check.findings import find
    from wardround.data.check.inspected import inspect
    from wardround.data.check.page import write_page
    from wardround.data.sources import default_data_folder

    if out is not None and not out.parent.is_dir():
        raise BadInput(f"there is no folder {out.parent}; make it first")
    errors = Console(stderr=True)
    progress = Silent() if quiet or as_json or not errors.is_terminal else Bars(errors)
    seen = inspect(path, folder or default_data_folder(), slices, size, groups, cache, progress)
    findings = find(seen)
    page = out or Path(f"{re.sub(r'[^A-Za-z0-9._-]+', '-', seen.name).strip('-.') or 'data'}-check.html")
    if not no_page:
        write_page(seen, findings, page)
    if as_json:
        fields = ("severity", "kind", "text", "count", "names")
        typer.echo(json.dumps([{f: getattr(finding, f) for f in fields} for finding in findings], indent=1))
    else:
        _show(Console(), seen, findings, quiet)
        if not no_page:
            Console().print(f"\npage: {printable(str(page))}", soft_wrap=True, **PLAIN)
    if any(finding.severity == "spoils" for finding in findings):
        raise typer.Exit(1)


def _show(console: Console, seen: Inspected, findings: Sequence[Finding], brief: bool) -> None:
    from wardround.data.check.findings import SEVERITIES
    from wardround.data.check.page import counts, facts
    from wardround.data.listing import PARTS

    if not brief:
        for key, value in facts(seen):
            console.print(f"{key:<13} {printable(value)}", **PLAIN)
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("class")
        for part in PARTS:
            table.add_column(part, justify="right")
        for name, held in counts(seen):
            table.add_row(printable(name), *(f"{n:,}" for n in held))
        console.print()
        console.print(table, **PLAIN)
        console.print()
    for finding in findings:
        words = SEVERITIES[finding.severity]
        console.print(
            f"{words}: {finding.kind} ({finding.count:,}): {printable(finding.text)}",
            style=STYLES[finding.severity],
            **PLAIN,
        )
        for name in finding.names[:NAMED]:
            console.print(f"  {printable(name)}", soft_wrap=True, **PLAIN)
        if finding.count > NAMED and finding.names:
            console.print(f"  and {finding.count - NAMED:,} more", **PLAIN)
    if not findings:
        console.print("Nothing was found.", style="green", **PLAIN)
