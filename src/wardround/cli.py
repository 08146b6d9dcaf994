"""The commands, thin: parse, call, print.

Exit codes: 0 done; 1 a run that started and could not go on; 2 something to correct, said in one line, nothing written;
130 and 143 stopped by Ctrl-C and SIGTERM, with the command that goes on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console

from wardround import __version__, show
from wardround.errors import BadInput, WardroundError
from wardround.progress import Bars, Silent
from wardround.settings import Settings, overlay, parse_assignment, put, read_preset, read_study_file, validate

app = typer.Typer(
    name="wardround",
    help="Federated learning for hospitals: in one round where it can be, in a few where it must.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Image sets: what is known, what is here, and how to get it.", no_args_is_help=True)
app.add_typer(data_app, name="data")

StudyFile = Annotated[Path | None, typer.Option("--study", help="a study file (TOML), or the settings.json of a run")]
Preset = Annotated[str | None, typer.Option(help="a named set of settings, or a TOML file of your own")]
Data = Annotated[str | None, typer.Option(help="phantoms, a set's name, an .npz file or a folder of images")]
Sites = Annotated[int | None, typer.Option(help="number of sites")]
Alpha = Annotated[float | None, typer.Option(help="Dirichlet concentration: small means unequal sites")]
PartitionRule = Annotated[str | None, typer.Option("--partition", help="dirichlet, iid, shards or natural")]
PartitionSeed = Annotated[int | None, typer.Option(help="seed of the partition, apart from --seed")]
Model = Annotated[str | None, typer.Option(help="network: small, cnn4, resnet18, ...")]
Rounds = Annotated[int | None, typer.Option(help="rounds of a multi-round method")]
Epochs = Annotated[int | None, typer.Option(help="local epochs per round")]
Seed = Annotated[int | None, typer.Option(help="seed of everything but the partition")]
DeviceName = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N")]
Out = Annotated[Path | None, typer.Option(help="directory to write; must not exist (default: runs/NAME)")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="any setting as key=value, such as train.lr=0.01")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print the result only")]
Json = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


@app.command()
def run(
    study: Annotated[Path | None, typer.Argument(help="a study file (TOML), or the settings.json of a run")] = None,
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
) -> None:
    """Run one method; without arguments, the built-in study."""
    from wardround.methods.registry import find
    from wardround.run import begin_run

    flags = _flags(locals())
    tree = _layers(study, preset, flags)
    chosen = str(tree.get("method", Settings().method))
    known = {find(chosen).name} if isinstance(tree.get("method", ""), str) else set()
    _assign(tree, set_, known, bare=True)
    settings = validate({**tree, "set": _own(tree.get("set", {}), find(chosen).name)})
    progress = _progress(quiet or as_json)
    _finish(lambda: begin_run(settings, out, progress), quiet, as_json)


@app.command()
def compare(
    methods: Annotated[list[str], typer.Argument(help="methods to compare, each by name")],
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
) -> None:
    """Run several methods on the same partition, sharing trained site models where they can."""
    from wardround.methods.registry import find
    from wardround.run import begin_comparison

    names = [find(method).name for method in methods]
    tree = _layers(study, preset, _flags(locals()))
    _assign(tree, set_, set(names), bare=False)
    own = tree.pop("set", {})
    settings = validate({**tree, "method": names[0]})
    chosen = [(method, _own(own, name)) for method, name in zip(methods, names, strict=True)]
    progress = _progress(quiet or as_json)
    _finish(lambda: begin_comparison(settings, chosen, out, progress), quiet, as_json)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(help="the directory of a run that was stopped")],
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go on with a run that was stopped; it ends with the numbers it would have had."""
    from wardround.run import reopen

    _finish(lambda: reopen(directory, _progress(quiet or as_json)), quiet, as_json)


@app.command()
def report(directory: Annotated[Path, typer.Argument(help="the directory of a finished run")]) -> None:
    """Write the HTML page of a finished run again."""
    from wardround.run import rewrite_report

    typer.echo(rewrite_report(directory))


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods."""
    from wardround.methods.registry import known

    if as_json:
        fields = ("name", "family", "paper", "summary")
        _echo_json([{field: getattr(method, field) for field in fields} for method in known().values()])
    else:
        show.methods(_console(), known().values())


@app.command()
def models(as_json: Json = False) -> None:
    """List the networks."""
    from wardround.models import catalogue

    if as_json:
        _echo_json([vars(info) for info in catalogue()])
    else:
        show.models(_console(), catalogue())


@data_app.command("list")
def data_list(
    folder: Annotated[Path | None, typer.Option(help="the data folder")] = None, as_json: Json = False
) -> None:
    """List the image sets that are known by name, and which are here."""
    from wardround.data.sources import default_data_folder, known

    place = folder or default_data_folder()
    found = known(place)
    if as_json:
        _echo_json([vars(info) for info in found])
    else:
        show.sources(_console(), found, place)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="a MedMNIST set, such as bloodmnist")],
    folder: Annotated[Path | None, typer.Option(help="where to put it")] = None,
    size: Annotated[int, typer.Option(help="28, 64, 128 or 224 pixels")] = 28,
    quiet: Quiet = False,
) -> None:
    """Download an official MedMNIST file and check it."""
    from wardround.data.download import fetch
    from wardround.data.sources import default_data_folder

    typer.echo(fetch(name, folder or default_data_folder(), size, progress=_download_bar(quiet)))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main(arguments: list[str] | None = None) -> int:
    """The command's entry: every error a person can mend becomes one line and an exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = typer.main.get_command(app).main(args=arguments, prog_name="wardround", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except WardroundError as error:
        _complain(str(error))
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        typer.echo(error.format_message())
        return 2
    except click.ClickException as error:
        _complain(error.format_message())
        return 2
    except _Terminated:
        return 143
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the reader went away; nothing more can be said
        return 0


class _Terminated(KeyboardInterrupt):
    """SIGTERM: the same clean end as Ctrl-C, another exit code."""


def _terminate(_signal: int, _frame: object) -> None:
    raise _Terminated


def _finish(begin: Callable[[], Any], quiet: bool, as_json: bool) -> None:
    """Do a job to its end and show what came of it; when it is stopped, say how to go on."""
    job = begin()
    if not (quiet or as_json):
        _console().print(show.opening(job.prepared, job.path), highlight=False, markup=False)
    try:
        result = job.finish()
    except KeyboardInterrupt:
        _complain(f"stopped; go on with: wardround resume {job.path}", "")
        raise
    except WardroundError as error:
        raise type(error)(f"{error}; then go on with: wardround resume {job.path}") from error
    if as_json:
        _echo_json({"directory": str(job.path), **{k: result[k] for k in ("methods", "headlines", "notes", "seconds")}})
    else:
        show.result(Console(), result, job.path, brief=quiet)


def _flags(given: dict[str, Any]) -> dict[str, Any]:
    """The flags that were set, as nested settings."""
    keys = {
        "method": "method",
        "data": "data.source",
        "sites": "data.sites",
        "alpha": "data.alpha",
        "partition": "data.partition",
        "partition_seed": "data.partition_seed",
        "model": "model.name",
        "rounds": "rounds",
        "epochs": "train.epochs",
        "seed": "seed",
        "device": "device",
    }
    tree: dict[str, Any] = {}
    for flag, key in keys.items():
        if given.get(flag) is not None:
            put(tree, key, given[flag])
    return tree


def _layers(study: Path | None, preset: str | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Flags over preset, preset over file."""
    tree = read_study_file(study) if study else {}
    if preset:
        tree = overlay(tree, read_preset(preset))
    return overlay(tree, flags)


def _assign(tree: dict[str, Any], assignments: list[str] | None, methods: set[str], bare: bool) -> None:
    """`--set`: a study's key (train.lr), a method's (fedprox.mu), or bare for the one method that runs (mu)."""
    for text in assignments or []:
        key, value = parse_assignment(text)
        head = key.partition(".")[0]
        if head in Settings.model_fields:
            put(tree, key, value)
        elif head in methods or (bare and "." not in key):
            put(tree, f"set.{key}", value)
        else:
            raise BadInput(f"--set {key}: no such setting; write a study's key such as train.lr, or METHOD.key")


def _own(tree: dict[str, Any], method: str) -> dict[str, Any]:
    """A method's own settings: those under its name, and those under no name."""
    from wardround.methods.registry import known

    bare = {key: value for key, value in tree.items() if key not in known() and key != method}
    return {**bare, **tree.get(method, {})}


def _console() -> Console:
    return Console(stderr=True)


def _progress(quiet: bool) -> Silent:
    console = _console()
    return Silent() if quiet or not console.is_terminal else Bars(console)


def _download_bar(quiet: bool) -> Any:
    return None if quiet else show.download_bar(_console())


def _complain(text: str, prefix: str = "error: ") -> None:
    sys.stderr.write(f"{prefix}{' '.join(text.split())}\n")


def _echo_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, allow_nan=False, default=str))
