"""wardround from Python: run a study, compare methods, open what an earlier run left.

    import wardround
    result = wardround.simulate("fedbicross", sites=5, epochs=3)
    result.headlines["fedbicross"]["balance"]

The same settings, checks and run directories as the commands have; `wardround resume` goes on with a run that was
stopped here, and `wardround.open` opens one that a command made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wardround.choices import for_methods, gather
from wardround.errors import BadInput
from wardround.show import COLUMNS, percent, printable, size

if TYPE_CHECKING:  # loaded when a run begins: torch takes seconds
    from wardround.learn.predictor import Predictor
    from wardround.run import Job

Epochs = int | Sequence[int]


@dataclass(frozen=True)
class Result:
    """A finished run or comparison; `record` is its whole result.json, as docs/compare.md describes it."""

    path: Path
    record: dict[str, Any]

    @property
    def methods(self) -> list[str]:
        """The methods, in the order they were asked for."""
        return list(self.record["methods"])

    @cached_property
    def headlines(self) -> dict[str, dict[str, float | None]]:
        """By method and key, such as `local_accuracy` and `balance`; None where a figure is not defined."""
        found: dict[str, dict[str, float | None]] = {method: {} for method in self.methods}
        for headline in self.record["headlines"]:
            found[headline["method"]][headline["key"]] = headline["value"]
        return found

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every measure by method, site, round, split and model; `pandas.DataFrame(result.rows)` is a table of it."""
        return list(self.record["rows"])

    @property
    def notes(self) -> list[str]:
        """What should be read first."""
        return [f"{note['method']}: {note['text']}" for note in self.record["notes"]]

    @property
    def report_path(self) -> Path:
        """The page to look at."""
        return self.path / "report.html"

    def table(self) -> list[dict[str, Any]]:
        """The results table that the commands print: a row for each method, accuracies as shares, bytes and seconds."""
        sent = {method: {"up": 0, "down": 0} for method in self.methods}
        for total in self.record["ledger"]["totals"]:
            sent[total["method"]][total["direction"]] += total["bytes"]
        return [
            {
                "method": method,
                **{heading: self.headlines[method].get(key) for key, (heading, _) in COLUMNS.items()},
                **sent[method],
                "seconds": self.record["seconds"].get(method),
            }
            for method in self.methods
        ]

    def predictor(self, site: str, method: str | None = None) -> Predictor:
        """What a site would deploy. Of a comparison, say of which method."""
        from wardround.record import deployed

        if method is None and len(self.methods) > 1:
            raise BadInput(f"there are several methods; say which: method={self.methods[0]!r}")
        if method is not None and method not in self.methods:
            raise BadInput(f"there is no method {method!r} in this result; there are {', '.join(self.methods)}")
        sites = [found["name"] for found in self.record["data"]["sites"]]
        if site not in sites:
            raise BadInput(f"there is no site {site!r} in this result; there are {', '.join(sites)}")
        run = self.path / method if method is not None and self.record["kind"] == "compare" else self.path
        found = deployed.read(run, site)
        if found is None:
            raise BadInput(f"{site} has no predictor in {run}; the notes of the result say why")
        return found

    def __str__(self) -> str:
        lines = [list(self.table()[0]), *map(_cells, self.table())]
        first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
        return "\n".join(
            "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
            for name, *cells in lines
        )

    def __repr__(self) -> str:
        return f"<wardround result of {', '.join(self.methods)} in {self.path}>"

    def _repr_html_(self) -> str:
        """The table in a notebook, with the notes and a link to the page."""
        rows = self.table()
        head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(row))}</tr>" for row in rows)
        notes = "".join(f"<li>{escape(printable(note))}</li>" for note in self.notes)
        link = f'<a href="{escape(self.report_path.as_posix())}">{escape(self.report_path.as_posix())}</a>'
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            + (f"<ul>{notes}</ul>" if notes else "")
            + f"<p>Report: {link}</p>"
        )


def simulate(
    method: str = "fedavg",
    *,
    data: str | None = None,
    sites: int | None = None,
    alpha: float | None = None,
    partition: str | None = None,
    partition_seed: int | None = None,
    model: str | None = None,
    rounds: int | None = None,
    epochs: Epochs | None = None,
    seed: int | None = None,
    device: str | None = None,
    study: str | Path | None = None,
    preset: str | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    progress: bool = True,
) -> Result:
    """Run one method with all sites in this process, as `wardround run` does.

    Without `data` and `study` it is the built-in study. `settings` holds any other key: `{"train.lr": 0.01}`, or one of
    the method's own, `{"fedprox.mu": 0.1}`.
    """
    chosen, others = gather(_path(study), preset, locals(), (settings or {}).items())

    from wardround.methods.registry import find, own_settings
    from wardround.run import begin_run

    name = find(method).name
    own = own_settings(for_methods(chosen.set, others, [name], bare=name), name)
    return _finished(begin_run(chosen.model_copy(update={"set": own}), _path(out), _progress(progress)))


def compare(
    methods: Sequence[str],
    *,
    data: str | None = None,
    sites: int | None = None,
    alpha: float | None = None,
    partition: str | None = None,
    partition_seed: int | None = None,
    model: str | None = None,
    rounds: int | None = None,
    epochs: Epochs | None = None,
    seed: int | None = None,
    device: str | None = None,
    study: str | Path | None = None,
    preset: str | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    progress: bool = True,
) -> Result:
    """Run several methods on the same partition, as `wardround compare` does; arguments are those of `simulate`."""
    if isinstance(methods, str) or not methods:
        raise BadInput("compare takes a list of methods, such as ['fedavg', 'local']")
    chosen, others = gather(_path(study), preset, locals(), (settings or {}).items())

    from wardround.methods.registry import find, own_settings
    from wardround.run import begin_comparison

    names = [find(method).name for method in methods]
    own = for_methods(chosen.set, others, names)
    chosen = chosen.model_copy(update={"method": methods[0], "set": own})
    each = [(method, own_settings(own, name, names)) for method, name in zip(methods, names, strict=True)]
    return _finished(begin_comparison(chosen, each, _path(out), _progress(progress)))


def open(run: str | Path) -> Result:
    """The result of a finished run, from its directory."""
    from wardround.run import read_result

    return Result(Path(run), read_result(Path(run)))


def _finished(job: Job) -> Result:
    return Result(job.path, job.finish())


def _progress(wanted: bool) -> Any:
    """Bars in a notebook or on a terminal; nothing where neither can show them."""
    from rich.console import Console

    from wardround.notebook import NotebookBars, in_notebook
    from wardround.progress import Bars, Silent

    if not wanted:
        return Silent()
    if in_notebook():
        return NotebookBars()
    console = Console(stderr=True)
    return Bars(console) if console.is_terminal else Silent()


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def _cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table as the commands write it."""
    shares = {heading for heading, _ in COLUMNS.values()}

    def written(name: str, value: Any) -> str:
        if name in shares:
            return percent(value)
        if name in ("up", "down"):
            return size(value)
        return "–" if value is None else f"{value:.1f}" if name == "seconds" else printable(str(value))

    return [written(name, value) for name, value in row.items()]
