"""What the commands print for a person: tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

# The headline figures of the results table: heading, and what it is in a few words. The definition in full, with the
# number of sites and the round, belongs to the figure and is in result.json and on the page.
COLUMNS = {
    "local_accuracy": ("local", "each site's own predictor on its local test, averaged over sites"),
    "global_accuracy": ("global", "the same predictors on the global test, averaged over sites"),
    "balance": ("balance", "the mean of local and global"),
    "worst_site_accuracy": ("worst", "the lowest local accuracy of a site"),
    "shared_global_accuracy": ("shared", "the one model shared by all sites on the global test"),
}
# The figures over rounds, in a table of their own where sites were measured right after their training.
ROUND_COLUMNS = {
    "mean_shared_global_accuracy": ("global", "the shared model on the global test"),
    "backward_transfer": ("transfer", "change of the shared model on sites' local tests since they last took part"),
    "shared_global_consistency": ("consistency", "1 less what the shared model loses between its records"),
    "mean_trained_local_accuracy": ("local", "what asked sites have right after their training, on their local tests"),
    "worst_trained_local_accuracy": ("worst", "the lowest of these among the sites of a round"),
    "trained_local_consistency": ("local consistency", "consistency of local"),
    "balance_over_rounds": ("balance", "the mean of global and local"),
}
PLAIN: dict[str, Any] = {"highlight": False, "markup": False}
WIDE = 1000  # columns: more than any table of figures takes


def opening(console: Console, prepared: Any, path: Path) -> None:
    """What is about to happen."""
    study, federation = prepared.study, prepared.federation
    images = sum(len(site.train) for site in federation.sites)
    has_files = bool(study.settings.data.files)
    rows = {
        "method": ", ".join(method.name for method in prepared.methods),
        "data": "a file or folder per site" if has_files else federation.provenance.partition(";")[0],
        "sites": f"{federation.partition_rule}; {images:,} training images",
        "model": f"{study.settings.model.name}, on {prepared.device}",
    }
    if changed := "; ".join(words for method in prepared.methods if (words := _unlike_default(method))):
        rows["not by default"] = changed
    _definitions(console, [*rows.items(), ("in", str(path))])


def _unlike_default(method: Any) -> str:
    """A method's settings that make it do something else than it does by default: not how much, how fast or how hot.

    So choices and switches, and numbers that are 0 by default. A preset must not change a method silently.
    """
    default = type(method.settings)()
    pairs = ((name, value, getattr(default, name)) for name, value in method.settings)
    found = [
        f"{name} {_lower(value)} ({_lower(before)})"
        for name, value, before in pairs
        if value != before and (isinstance(value, bool | str) or before == 0)
    ]
    return f"{method.name}: {', '.join(found)}" if found else ""


def _lower(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def result(console: Console, found: dict[str, Any], path: Path, brief: bool = False) -> None:
    """The results table with the meaning of every column, notes, and where the page is."""
    headlines: dict[str, dict[str, dict[str, Any]]] = {}
    for headline in found["headlines"]:
        headlines.setdefault(headline["method"], {})[headline["key"]] = headline
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method", no_wrap=True)
    for heading in [*(heading for heading, _ in COLUMNS.values()), "up", "down", "seconds"]:
        table.add_column(heading, justify="right", no_wrap=True)
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
    _print_whole(console, table)
    over_rounds = any("mean_trained_local_accuracy" in headlines[method] for method in found["methods"])
    if over_rounds:
        _over_rounds(console, headlines)
    if not brief:
        console.print()
        _definitions(console, _meanings(found))
        if over_rounds:
            means = [(f"{heading}, all rounds", words) for heading, words in ROUND_COLUMNS.values()]
            _definitions(console, [*means, ("", "All in %, means over all measured rounds.")])
        worked = [*_features(found), *_work(found), *_privacy(found)]
        if worked:
            console.print()
        for line in worked:
            console.print(printable(line), **PLAIN)
    if found["notes"]:
        console.print()
    for note in found["notes"]:
        console.print(printable(f"note ({note['method']}): {note['text']}"), style="yellow", **PLAIN)
    console.print(f"\nreport: {printable(str(path / 'report.html'))}", **PLAIN, soft_wrap=True)


def _over_rounds(console: Console, headlines: dict[str, dict[str, dict[str, Any]]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("over all rounds", no_wrap=True)
    for heading, _ in ROUND_COLUMNS.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for method, figures in headlines.items():
        table.add_row(method, *(percent(figures.get(key, {}).get("value")) for key in ROUND_COLUMNS))
    console.print()
    _print_whole(console, table)


def _meanings(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield from COLUMNS.values()
    yield "", "All in %, after the last round. Figures of a site's own predictor leave out sites that have none."
    yield "local test", found["data"]["local_protocol"]
    yield "global test", found["data"]["global_protocol"]
    yield "up, down", "bytes that left all sites and that came to them, in all rounds"


def _work(found: dict[str, Any]) -> Iterator[str]:
    """How the coordinator's own work went, a line for each method that has any to tell."""
    for method in found["methods"]:
        entries = [entry for entry in found.get("work", []) if entry["method"] == method]
        said = "; ".join(
            f"{entry['part']} {entry['steps']:,} steps"
            + ("" if entry["ms_per_step"] is None else f", {entry['ms_per_step']:,.1f} ms each")
            for entry in entries
        )
        if said:
            yield f"coordinator ({method}): {said}"


def _features(found: dict[str, Any]) -> Iterator[str]:
    """How far the sites' features lie from all sites', a line for each method that was asked."""
    for method in found["methods"]:
        entries = [entry for entry in found.get("features", []) if entry["method"] == method]
        known = [entry for entry in entries if entry["relative"] is not None]
        if known:
            furthest = max(known, key=lambda entry: entry["relative"])
            mean = sum(entry["relative"] for entry in known) / len(known)
            yield (
                f"features ({method}): a site's lie {mean:.2f} times their spread from all sites' (mean over sites); "
                f"furthest {furthest['site']}, {furthest['relative']:.2f}"
            )


def _privacy(found: dict[str, Any]) -> Iterator[str]:
    """What was spent of differential privacy, a line for each method that trained with noise."""
    for method in found["methods"]:
        spent = [e for e in found.get("privacy", []) if e["method"] == method and e["epsilon"] is not None]
        if spent:
            most = max(spent, key=lambda entry: entry["epsilon"])
            yield (
                f"privacy ({method}): no site spent more than epsilon {most['epsilon']:.3g} at delta "
                f"{most['delta']:g}, for one image"
            )


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
    console.print(f"data folder: {printable(str(folder))} (set WARDROUND_DATA to change it)", **PLAIN, soft_wrap=True)


@contextmanager
def download_bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar to be told (bytes so far, bytes in all); gone at the end, however the download ends."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("download", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def percent(value: float | None) -> str:
    """0.9123 as 91.2."""
    return "–" if value is None else f"{100 * value:.1f}"


def size(count: int) -> str:
    """Bytes in decimal units, as papers count them."""
    if count < 1000:
        return f"{count} B"
    amount = float(count)
    for unit in ("kB", "MB", "GB"):
        amount /= 1000
        if round(amount, 1) < 1000:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1000:.1f} TB"


def printable(text: str) -> str:
    """Text in one line that cannot steer the terminal: a file's name, or a stranger's file, may try to."""
    one_line = " ".join(line.strip() for line in text.splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in one_line)


def _definitions(console: Console, pairs: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold", style="dim")
    for word, meaning in pairs:
        table.add_row(Text(word), Text(printable(meaning)))
    console.print(table, highlight=False)


def _table(console: Console, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, no_wrap=name in ("method", "model", "name", "family"))
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _print_whole(console: Console, table: Table) -> None:
    """A table of figures is never cut: where the terminal is too narrow it may break the lines."""
    wanted = console.measure(table, options=console.options.update(width=WIDE)).maximum
    Console(file=console.file, width=max(console.width, wanted)).print(table)
