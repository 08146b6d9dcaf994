"""`wardround papers`: parse, call, print."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table as Grid

from wardround.errors import BadInput
from wardround.files import disk_errors, write_atomically
from wardround.progress import Bars, Silent
from wardround.settings import parse_assignment, put
from wardround.show import printable

if TYPE_CHECKING:
    from wardround.papers.work import Say

papers_app = typer.Typer(rich_markup_mode=None)
UNFINISHED = "unfinished"  # cells that were stopped lie here, beside the results, and go on from here
WIDE = 160  # characters of a line where no terminal says how many it has
Id = Annotated[str, typer.Argument(metavar="ID", hidden=True)]
ResultFiles = Annotated[
    list[Path] | None,
    typer.Option("--results", help="file or folder of results; may be repeated (default: papers, benchmarks/results)"),
]
DataFolder = Annotated[
    Path | None, typer.Option("--data", help="where images are (default: $WARDROUND_DATA or ~/.wardround/data)")
]
Datasets = Annotated[str | None, typer.Option(help="some sets, such as blood,derma; or files of your own")]
Alphas = Annotated[str | None, typer.Option(help="some levels, such as 0.1,0.5 or iid")]
Sites = Annotated[str | None, typer.Option(help="some numbers of sites, such as 5,10")]
Methods = Annotated[str | None, typer.Option(help="some lines by method or label, such as fedisca,dense")]
Seeds = Annotated[str | None, typer.Option(help="how many seeds, such as 3; or 0,2 for these two")]
Jobs = Annotated[int, typer.Option(help="so many cells at once, each in a process of its own; they share all GPUs")]
Ray = Annotated[str | None, typer.Option(help="a Ray cluster's address, or `local`; --jobs cells at once on it")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="a study's setting that is not the paper's")]
Preset = Annotated[str | None, typer.Option(help="one-shot tables: other settings of sites and methods")]
Work = Annotated[Path | None, typer.Option("--work", help="folder of unfinished cells (default: one in --results)")]
Out = Annotated[Path, typer.Option("--results", help="file, or folder of files, that results go to")]
Form = Annotated[str, typer.Option("--format", help="text, markdown, latex or csv")]
Everything = Annotated[bool, typer.Option("--all", help="also parts that nothing was measured of")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no progress")]


@papers_app.callback(invoke_without_command=True)
def papers(context: typer.Context) -> None:
    """The papers' tables and figures: what they print, and our own figures beside it."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@papers_app.command("list")
def list_command(results: ResultFiles = None) -> None:
    """List every table and figure, with how many of its cells are measured."""
    from wardround.papers.comparison import Comparison
    from wardround.papers.library import tables

    grid = Grid(box=None, pad_edge=False, header_style="bold")
    grid.add_column("id", no_wrap=True)
    grid.add_column("cells done", justify="right", no_wrap=True)
    grid.add_column("title")
    stored = _stored(_files(results))
    for table in tables():
        done, whole = Comparison(table, stored.get(table.family, ())).done()
        grid.add_row(table.id, f"{done} of {whole}" if whole else "–", table.title)
    Console().print(grid)


@papers_app.command("show")
def show_command(id: Id) -> None:
    """Show what a table is: its protocol, its lines with their settings, and where ours must deviate.

    ID is one of `wardround papers list`.
    """
    from wardround.papers.describe import describe
    from wardround.papers.library import table

    _echo(describe(table(id)))


@papers_app.command("run")
def run_command(
    id: Id,
    datasets: Datasets = None,
    alphas: Alphas = None,
    sites: Sites = None,
    methods: Methods = None,
    seeds: Seeds = None,
    data: DataFolder = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    jobs: Jobs = 1,
    ray: Ray = None,
    preset: Preset = None,
    set_: Sets = None,
    work: Work = None,
    seconds: Annotated[float | None, typer.Option(help="start no cell that would not end within so many")] = None,
    out: Out = Path("papers"),
    quiet: Quiet = False,
) -> None:
    """Run a table, or part of it; what is finished is not done again.

    ID is one of `wardround papers list`. The default of every cell is the paper's setting.
    """
    if jobs < 1:
        raise BadInput(f"--jobs {jobs} cannot be used; it should be 1 or more")
    flags: dict[str, Any] = {}
    for text in set_ or ():
        put(flags, *parse_assignment(text))

    from wardround.papers.experiment import Choice, open_results, parts
    from wardround.papers.library import table
    from wardround.papers.work import Means

    asked = table(id)
    levels: list[Any] = [
        one if one in ("iid", "natural") else _number(one, "--alphas", float) for one in _words(alphas)
    ]
    numbers = [_number(one, "--sites", int) for one in _words(sites)]
    choice = Choice(_words(datasets), levels, numbers, _words(methods), _seeds(seeds), flags, preset)
    found, missing = parts(asked, choice, data or _data_folder(), device)
    opened = [(part, open_results(part, out)) for part in found]
    if len({results.path for _, results in opened}) < len(opened):
        raise BadInput("these cells have different settings and need a file each; give a folder with --results")
    total = sum(len(part.plans) for part in found)
    done = sum(results.has(planned) for part, results in opened for planned in part.plans)
    folder = work or (out.parent if out.suffix == ".json" else out) / UNFINISHED
    means = Means(device, folder, seconds, jobs, ray=ray)
    failures = left = 0
    with _watched(quiet, total, done) as (say, ended):
        for line in missing:
            say(f"left out: {line}")
        say(f"{done} of {total} cells are done")
        for part, results in opened:
            try:
                rest, failed = means.finish(part.runs, results, part.plans, ended)
            except Exception:
                raise
            except BaseException:  # Ctrl-C, or SIGTERM, which a cluster sends
                say(f"stopped; go on with: {_again()}")
                raise
            left, failures = left + rest, failures + failed
    again = f"; go on with: {_again()}" if left else ""
    typer.echo(printable(f"{total - left} of {total} cells are done{again}"))
    if written := [str(results.path) for _, results in opened if results.path.is_file()]:
        typer.echo(printable(f"results: {', '.join(written)}"))
    if failures:
        raise typer.Exit(1)


@papers_app.command("table")
def table_command(
    id: Id,
    form: Form = "text",
    results: ResultFiles = None,
    data: DataFolder = None,
    everything: Everything = False,
    out: Annotated[Path | None, typer.Option(help="file to write to (default: print it)")] = None,
) -> None:
    """Print a table: ours beside the published, the difference, and every deviation.

    ID is one of `wardround papers list`.
    """
    from wardround.papers.comparison import Comparison
    from wardround.papers.library import table
    from wardround.papers.render import Format, render

    if form not in get_args(Format):
        raise BadInput(f"--format {form!r} is unknown; use {', '.join(get_args(Format))}")
    asked = table(id)
    files = _files(results)
    found = Comparison(asked, _stored(files).get(asked.family, ()), tuple(files))
    width = shutil.get_terminal_size((WIDE, 0)).columns if out is None else None
    text = render(found, form, data or _data_folder(), everything, width)  # type: ignore[arg-type]
    if out is None:
        _echo(text)
    else:
        with disk_errors(out):
            write_atomically(out, text.encode())


def _echo(text: str) -> None:
    """Lines as they are, whatever a file of results had in them."""
    for line in text.splitlines():
        typer.echo(" " * (len(line) - len(line.lstrip(" "))) + printable(line))


def mount(app: typer.Typer) -> None:
    """Put the commands under `wardround papers`."""
    app.add_typer(papers_app, name="papers")


def _files(given: list[Path] | None) -> list[Path]:
    from wardround.papers.stored import result_files

    return result_files(given or ())


def _stored(files: list[Path]) -> dict[Any, tuple[Any, ...]]:
    """Everything that is finished, by family."""
    from wardround.papers.families import RUNS
    from wardround.papers.stored import read_finished

    return {family: tuple(read_finished(files, family)) for family in RUNS}


def _data_folder() -> Path:
    from wardround.data.sources import default_data_folder

    return default_data_folder()


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _number(text: str, option: str, kind: Any) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise BadInput(f"{option} {text!r} is no number; separate several by commas") from None


def _seeds(text: str | None) -> list[int]:
    """`3` are three seeds from 0; `0,2` are these two."""
    words = [_number(word, "--seeds", int) for word in _words(text)]
    if any(seed < 0 for seed in words) or words == [0]:
        raise BadInput(f"--seeds {text} cannot be used; give how many, such as 3, or several such as 0,2")
    return list(range(words[0])) if len(words) == 1 else words


@contextmanager
def _watched(quiet: bool, total: int, done: int) -> Iterator[tuple[Say, Say]]:
    """A bar over the cells on a terminal, and lines beside it: one to say something, one to say that a cell ended."""
    console = Console(stderr=True)
    progress: Silent = Bars(console) if console.is_terminal and not quiet else Silent()
    with progress.task("cells", total, done) as advance:

        def say(text: str) -> None:
            if not quiet:
                console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

        def ended(text: str) -> None:
            say(text)
            advance()

        yield say, ended


def _again() -> str:
    return shlex.join(["wardround", *sys.argv[1:]])
