"""What the commands print for a person: tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

COLUMNS = {
    "local_accuracy": "local",
    "global_accuracy": "global",
    "balance": "balance",
    "worst_site_accuracy": "worst site",
    "shared_global_accuracy": "shared, global",
}


def opening(prepared: Any, path: Path) -> str:
    """One paragraph that says what is about to happen."""
    study, federation = prepared.study, prepared.federation
    methods = ", ".join(method.name for method in prepared.methods)
    images = sum(len(site.train) for site in federation.sites)
    return (
        f"{methods} on {federation.provenance.partition(';')[0]}\n"
        f"{len(study.sites)} sites ({federation.partition_rule}), {images:,} training images, "
        f"{study.settings.model.name}, {prepared.device}, in {path}"
    )


def result(console: Console, found: dict[str, Any], path: Path, brief: bool = False) -> None:
    """The results table with the definition of every column, notes, and where the page is."""
    headlines: dict[str, dict[str, dict[str, Any]]] = {}
    for headline in found["headlines"]:
        headlines.setdefault(headline["method"], {})[headline["key"]] = headline
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method")
    for label in [*COLUMNS.values(), "up", "down", "seconds"]:
        table.add_column(label, justify="right")
    for method in found["methods"]:
        sent = {"up": 0, "down": 0}
        for row in found["ledger"]["totals"]:
            if row["method"] == method:
                sent[row["direction"]] += row["bytes"]
        figures = [percent(headlines[method].get(key, {}).get("value")) for key in COLUMNS]
        seconds = found["seconds"].get(method)
        table.add_row(
            method, *figures, size(sent["up"]), size(sent["down"]), "–" if seconds is None else f"{seconds:.1f}"
        )
    console.print()
    console.print(table)
    if not brief:
        console.print()
        first = headlines[found["methods"][0]]
        for key, label in COLUMNS.items():
            console.print(f"{label}: {first[key]['definition']}", style="dim", highlight=False, markup=False)
    for note in found["notes"]:
        console.print(f"note ({note['method']}): {note['text']}", style="yellow", highlight=False, markup=False)
    console.print(f"\nreport: {path / 'report.html'}", highlight=False, markup=False, soft_wrap=True)


def methods(console: Console, known: Iterable[Any]) -> None:
    """The methods, a line each."""
    _table(
        console, ("method", "family", "what it does", "paper"), ((m.name, m.family, m.summary, m.paper) for m in known)
    )


def models(console: Console, known: Iterable[Any]) -> None:
    """The networks, a line each."""
    _table(console, ("model", "what it is", "source"), ((info.name, info.what, info.source) for info in known))


def sources(console: Console, known: Iterable[Any], folder: Path) -> None:
    """The image sets, a line each."""
    rows = ((i.name, str(i.classes), str(i.channels), "yes" if i.present else "no", i.what) for i in known)
    _table(console, ("name", "classes", "channels", "here", "what it is"), rows)
    console.print(f"data folder: {folder} (set WARDROUND_DATA to change it)", highlight=False, markup=False)


def download_bar(console: Console) -> Callable[[int, int], None]:
    """A bar to be told (bytes so far, bytes in all)."""
    bar = Progress(BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=console)
    task = bar.add_task("download", total=None)
    bar.start()

    def update(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total or None)
        if total and done >= total:
            bar.stop()

    return update


def percent(value: float | None) -> str:
    """0.9123 as 91.2."""
    return "–" if value is None else f"{100 * value:.1f}"


def size(count: int) -> str:
    """Bytes in decimal units, as papers count them."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def _table(console: Console, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, no_wrap=name in ("method", "model", "name", "family"))
    for row in rows:
        table.add_row(*row)
    console.print(table)
