"""The commands, thin: parse, call, print.

Exit codes: 0 done; 1 a run that started and could not go on; 2 something to correct, said in one line, nothing written;
130 and 143 stopped by Ctrl-C and SIGTERM, with the command that goes on.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from wardround import __version__, show
from wardround.audit.cli import audit_command
from wardround.board.cli import board_command
from wardround.choices import assigned, for_methods, gather, overruled
from wardround.data.check.command import check_command
from wardround.deploy.cli import predict_command
from wardround.errors import BadInput, Diverged, WardroundError
from wardround.papers.cli import mount as mount_papers
from wardround.progress import Bars, NowAndThen, Silent
from wardround.remote.cli import mount as mount_remote
from wardround.tracking.cli import track_command

typer.core.HAS_RICH = False  # our help is plain text; with rich at hand typer 0.20 would write "\[default: ...]" in it
app = typer.Typer(name="wardround", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
data_app = typer.Typer(rich_markup_mode=None)
app.add_typer(data_app, name="data")
mount_remote(app)
mount_papers(app)
app.command("predict")(predict_command)
data_app.command("check")(check_command)
app.command("board")(board_command)
app.command("track")(track_command)
app.command("audit")(audit_command)
# Typer's own complaints about flags. Taken from Typer, since not every version of it has click beside it.
UsageError: Any = typer.BadParameter.__mro__[1]

# Arguments are described in the commands' docstrings: not every version of Typer shows their help.
Study = Annotated[Path | None, typer.Argument(hidden=True)]
Methods = Annotated[list[str], typer.Argument(hidden=True)]
Directory = Annotated[Path, typer.Argument(hidden=True)]
SetName = Annotated[str, typer.Argument(metavar="NAME", hidden=True)]

StudyFile = Annotated[Path | None, typer.Option("--study", help="a study file (TOML), or the settings.json of a run")]
Preset = Annotated[str | None, typer.Option(help="a named set of settings, or a TOML file of your own")]
Data = Annotated[str | None, typer.Option(help="phantoms, a set's name, an .npz file, a table of files, or a folder")]
Sites = Annotated[int | None, typer.Option(help="number of sites")]
Alpha = Annotated[float | None, typer.Option(help="Dirichlet concentration: small means unequal sites")]
PartitionRule = Annotated[str | None, typer.Option("--partition", help="dirichlet, iid, shards or natural")]
PartitionSeed = Annotated[int | None, typer.Option(help="seed of the partition, apart from --seed")]
Model = Annotated[str | None, typer.Option(help="network: small, cnn4, resnet18, ...")]
Rounds = Annotated[int | None, typer.Option(help="rounds of a multi-round method")]
Epochs = Annotated[str | None, typer.Option(help="local epochs per round; 30,60,60: one number for each round")]
Seed = Annotated[int | None, typer.Option(help="seed of everything but the partition")]
DeviceName = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N")]
Folder = Annotated[Path | None, typer.Option(help="the data folder (default: $WARDROUND_DATA or ~/.wardround/data)")]
Size = Annotated[int, typer.Option(help="28 (the default), 64, 128 or 224 pixels", show_default=False)]
RealImages = Annotated[
    bool,
    typer.Option("--real-images", help="put patients' images beside the gallery, in a page that stays at the site"),
]
RunData = Annotated[
    str | None, typer.Option(help="the run's images for --real-images, where its settings no longer find them")
]
Plots = Annotated[Path | None, typer.Option(help="a folder to write every chart into, too, as SVG and PNG")]
Out = Annotated[Path | None, typer.Option(help="directory to write; must not exist (default: runs/NAME)")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="any setting, such as train.lr=0.01; may be repeated")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print the result only")]
Json = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
Track = Annotated[list[str] | None, typer.Option(help="log to tensorboard or mlflow, too; may be repeated")]


@app.callback(invoke_without_command=True)
def wardround(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    """Federated learning for hospitals: in one round where it can be, in a few where it must."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    _help_unless_command(context)


@app.command()
def run(
    study: Study = None,
    method: Annotated[str | None, typer.Option(help="a name from `wardround methods`, or a Python file")] = None,
    preset: Preset = None,
    data: Data = None,
    sites: Sites = None,
    alpha: Alpha = None,
    partition: PartitionRule = None,
    partition_seed: PartitionSeed = None,
    model: Model = None,
    rounds: Rounds = None,
    epochs: Epochs = None,
    seed: Seed = None,
    device: DeviceName = None,
    out: Out = None,
    set_: Sets = None,
    quiet: Quiet = False,
    as_json: Json = False,
    track: Track = None,
) -> None:
    """Run one method; without arguments, the built-in study.

    STUDY is a study file (TOML), or the settings.json of an earlier run. Flags win over a preset, a preset over the
    file. Where neither a study nor images are named, the preset is demo.
    """
    settings, others = gather(study, preset, _choices(locals()), assigned(set_))
    if not (quiet or as_json) and (words := overruled(study, preset, settings)):
        _complain(f"note: {words}")

    from wardround.methods.registry import find, own_settings
    from wardround.run import begin_run

    method = find(settings.method).name
    own = own_settings(for_methods(settings.set, others, [method], bare=method), method)
    settings = settings.model_copy(update={"set": own})
    _finish(lambda: begin_run(settings, out, _progress(quiet or as_json)), quiet, as_json, track)


@app.command()
def compare(
    methods: Methods,
    study: StudyFile = None,
    preset: Preset = None,
    data: Data = None,
    sites: Sites = None,
    alpha: Alpha = None,
    partition: PartitionRule = None,
    partition_seed: PartitionSeed = None,
    model: Model = None,
    rounds: Rounds = None,
    epochs: Epochs = None,
    seed: Seed = None,
    device: DeviceName = None,
    out: Out = None,
    set_: Sets = None,
    quiet: Quiet = False,
    as_json: Json = False,
    track: Track = None,
) -> None:
    """Run several METHODS on the same partition.

    Each is a name from `wardround methods`, or a Python file. Trained site models are shared where methods can.
    """
    settings, others = gather(study, preset, _choices(locals()), assigned(set_))
    if not (quiet or as_json) and (words := overruled(study, preset, settings)):
        _complain(f"note: {words}")

    from wardround.methods.registry import find, own_settings
    from wardround.run import begin_comparison

    names = [find(method).name for method in methods]
    own = for_methods(settings.set, others, names)
    settings = settings.model_copy(update={"method": methods[0], "set": own})
    chosen = [(method, own_settings(own, name, names)) for method, name in zip(methods, names, strict=True)]
    _finish(lambda: begin_comparison(settings, chosen, out, _progress(quiet or as_json)), quiet, as_json, track)


@app.command()
def resume(directory: Directory, quiet: Quiet = False, as_json: Json = False, track: Track = None) -> None:
    """Go on with a run that was stopped, in its DIRECTORY.

    It ends with the numbers it would have had.
    """
    from wardround.run import reopen

    _finish(lambda: reopen(directory, _progress(quiet or as_json)), quiet, as_json, track)


@app.command()
def report(directory: Directory, plots: Plots = None, real_images: RealImages = False, data: RunData = None) -> None:
    """Write the HTML page of a finished run again, in its DIRECTORY."""
    from wardround.run import read_result, rewrite_report

    if data is not None and not real_images:
        raise BadInput("--data is for --real-images; a report without real images reads none")
    if real_images:
        from wardround.report.patients import write_with_real_images

        page = show.printable(str(write_with_real_images(directory, data, _progress(False))))
        typer.echo(f"{page}\nIt shows patients' images: it stays at the site.")
    else:
        typer.echo(show.printable(str(rewrite_report(directory))))
    if plots is not None:
        from wardround.report.plots import write_plots

        folder = directory if directory.is_dir() else directory.parent
        typer.echo(f"{len(write_plots(read_result(directory), folder, plots))} plots in {show.printable(str(plots))}")


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods."""
    from wardround.methods.registry import known

    if as_json:
        fields = ("name", "family", "paper", "summary")
        _echo_json([{field: getattr(method, field) for field in fields} for method in known().values()])
    else:
        show.methods(Console(), known().values())


@app.command()
def models(as_json: Json = False) -> None:
    """List the networks."""
    from wardround.models import catalogue

    if as_json:
        _echo_json([vars(info) for info in catalogue()])
    else:
        show.models(Console(), catalogue())


@data_app.callback(invoke_without_command=True)
def data(context: typer.Context) -> None:
    """Image sets: what is known, what is here, and how to get it."""
    _help_unless_command(context)


@data_app.command("list")
def data_list(folder: Folder = None, as_json: Json = False) -> None:
    """List the image sets that are known by name, and which are here."""
    from wardround.data.sources import default_data_folder, known

    place = folder or default_data_folder()
    found = known(place)
    if as_json:
        _echo_json([vars(info) for info in found])
    else:
        show.sources(Console(), found, place)


@data_app.command("get")
def data_get(name: SetName, folder: Folder = None, size: Size = 28, quiet: Quiet = False) -> None:
    """Download an official MedMNIST file and check it.

    NAME is one of `wardround data list`, such as bloodmnist.
    """
    from wardround.data.download import fetch
    from wardround.data.sources import default_data_folder

    with contextlib.nullcontext() if quiet else show.download_bar(_console()) as progress:
        path = fetch(name, folder or default_data_folder(), size, progress=progress)
    typer.echo(show.printable(str(path)))


def main(arguments: list[str] | None = None) -> int:
    """The command's entry: every error a person can mend becomes one line and an exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a result must not be lost to a terminal that lacks a character
            stream.reconfigure(errors="backslashreplace")
    try:
        code = typer.main.get_command(app).main(args=arguments, prog_name="wardround", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except WardroundError as error:
        _complain(f"error: {error}")
        return error.exit_code
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else "wardround"
        _complain(f"error: {error.format_message()} (see: {command} --help)")
        return 2
    except _Terminated:
        return 143
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader went away; nothing more can be said, nor may the interpreter try to at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Terminated(BaseException):
    """SIGTERM: the same clean end as Ctrl-C. No KeyboardInterrupt, which Typer turns into exit code 130."""


def _terminate(_signal: int, _frame: object) -> None:
    raise _Terminated


def _finish(begin: Callable[[], Any], quiet: bool, as_json: bool, track: list[str] | None) -> None:
    """Do a job to its end and show what came of it; when it is stopped, say how to go on."""
    following = _followed(track or [], quiet or as_json)
    job = begin()
    again = shlex.join(["wardround", "resume", str(job.path)])
    try:
        if not (quiet or as_json):
            show.opening(_console(), job.prepared, job.path)
        with following(job.path):
            result = job.finish()
    except (KeyboardInterrupt, _Terminated):
        _complain(f"stopped; go on with: {again}")
        raise
    except Diverged as error:
        some = any(any(job.path.rglob(name)) for name in ("checkpoint.json", "gallery.safetensors"))
        made = ", and what it had made until then" if some else ""
        raise Diverged(f"{error} in a new run: {job.path} keeps the settings that it began with{made}") from error
    except WardroundError as error:
        raise type(error)(f"{error}; then go on with: {again}") from error
    if as_json:
        _echo_json({"directory": str(job.path), **{k: result[k] for k in ("methods", "headlines", "notes", "seconds")}})
    else:
        show.result(Console(), result, job.path, brief=quiet)


def _followed(tools: list[str], quiet: bool) -> Callable[[Path], contextlib.AbstractContextManager[None]]:
    """How a run is followed into other tools, which must be there before it begins."""
    if not tools:
        return lambda path: contextlib.nullcontext()
    from wardround.tracking.follow import tracked
    from wardround.tracking.sink import check

    check(tools)
    return lambda path: tracked(path, tools, _complain, (lambda text: None) if quiet else _complain)


def _choices(given: dict[str, Any]) -> dict[str, Any]:
    """A command's flags; `--epochs` is text."""
    return {**given, "epochs": _epochs(given["epochs"]) if given["epochs"] is not None else None}


def _epochs(text: str) -> int | list[int]:
    """`5` for every round, or `30,60,60` round by round."""
    try:
        first, *others = map(int, text.split(","))
    except ValueError:
        raise BadInput(f"--epochs {text!r} is no number; write 5, or 30,60,60 for one number a round") from None
    return [first, *others] if others else first


def _help_unless_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _console() -> Console:
    return Console(stderr=True)


def _progress(quiet: bool) -> Silent:
    console = _console()
    if quiet:
        return Silent()
    return Bars(console) if console.is_terminal else NowAndThen()


def _complain(text: str) -> None:
    sys.stderr.write(f"{show.printable(text)}\n")


def _echo_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, allow_nan=False, default=str))
