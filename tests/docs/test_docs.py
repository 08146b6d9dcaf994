"""The documentation, checked against the program: commands, settings, methods, measures, fields, links and examples."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, cast, get_args, get_origin

import pytest
import torch
import typer
from pydantic import BaseModel

import tiny
import wardround.data.download
import wardround.run
from record.painter import Painter
from wardround import __version__
from wardround import methods as package
from wardround.cli import app, main
from wardround.data.sources import load
from wardround.exchange.bundle import COUNTERS, PARAMETERS, SIZE, STATISTICS, Bundle, Envelope
from wardround.measure import OVER_ROUNDS, headlines
from wardround.methods.base import Context
from wardround.methods.registry import known, make
from wardround.methods.state import State
from wardround.models import NetSpec, names, spec_layout
from wardround.record.result import PRIVACY_FIELDS
from wardround.settings import Settings, validate
from wardround.show import COLUMNS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, kind: str) -> list[str]:
    """The fenced blocks of one kind."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for found, block in fenced if found == kind]


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def sections(text: str, mark: str) -> dict[str, str]:
    """The text under each heading of one level, up to the next heading of that level or above."""
    parts = re.split(rf"^(#{{1,{len(mark)}}}) (.+)$", text, flags=re.MULTILINE)[1:]
    found = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return {title: body for level, title, body in found if level == mark}


def rows(text: str, header: str) -> list[list[str]]:
    """The cells of every table with this header line."""
    tables = re.findall(rf"^{re.escape(header)}\n\|[-| ]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [line[2:-2].split(" | ") for table in tables for line in table.splitlines()]


def commands(text: str) -> list[list[str]]:
    """The words of every `wardround ...` line in a shell block, without the name."""
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    words = [shlex.split(line.removeprefix(".venv/bin/"), comments=True) for line in lines]
    return [rest for name, *rest in filter(None, words) if name == "wardround"]


# Links, commands and study files --------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The names that a link may point at: headings as GitHub spells them."""
    titles = re.findall(r"^#+ (.+)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        pointed = (page.parent / path).resolve() if path else page
        assert pointed.exists(), target
        assert not anchor or anchor in anchors(pointed), target


def test_every_page_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", text_of("docs/README.md")))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


@each_page
def test_every_command_is_one_of_the_program(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`(?:\.venv/bin/)?wardround((?: [^`]+)?)`", prose(text))
    for words in [*commands(text), *map(shlex.split, inline)]:
        command: Any = typer.main.get_command(app)
        while words and not words[0].startswith("-") and hasattr(command, "commands"):
            assert words[0] in command.commands, words
            command, words = command.commands[words[0]], words[1:]
        command.make_context("wardround", list(words))


class Reached(Exception):
    """The command was understood, its settings are valid, and its work would begin."""


@each_page
def test_every_command_in_a_block_would_begin(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(settings: Settings, chosen: list[tuple[str, dict[str, Any]]]) -> None:
        NetSpec(settings.model.name, 3, 8, 28, settings.model.width, settings.model.stem)
        for name, own in chosen:
            make(name, own)
        raise Reached

    def reached(*_: Any) -> None:
        raise Reached

    monkeypatch.setattr(wardround.run, "begin_run", lambda s, out, progress: begin(s, [(s.method, s.set)]))
    monkeypatch.setattr(wardround.run, "begin_comparison", lambda s, chosen, out, progress: begin(s, chosen))
    monkeypatch.setattr(wardround.run, "reopen", reached)
    monkeypatch.setattr(wardround.data.download, "fetch", lambda *_, **__: Path("file.npz"))
    monkeypatch.chdir(tmp_path)
    write_files(page.read_text(encoding="utf-8"), tmp_path)
    for words in commands(page.read_text(encoding="utf-8")):
        if words[0] in ("run", "compare", "resume"):
            with pytest.raises(Reached):
                assert main(words) == 0, (words, capsys.readouterr().err)
        else:
            assert main(words) == 0, words


def write_files(text: str, folder: Path) -> None:
    """The study files of a page, which say their name in the first line, and the method of `add-a-method.md`."""
    for block in blocks(text, "toml"):
        (folder / block.splitlines()[0].removeprefix("# ")).write_text(block, encoding="utf-8")
    (folder / "fedavgm.py").write_text(example(), encoding="utf-8")


def test_the_ten_lines_of_the_readme_are_valid() -> None:
    (block,) = blocks(text_of("README.md"), "toml")
    tree = tomllib.loads(block)
    assert make("fedprox", tree.pop("set")["fedprox"]).settings.mu == 0.1
    assert validate(tree).data.sites == 8
    assert len(block.splitlines()) <= 11  # the name of the file and ten lines


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", text_of("Makefile"), re.MULTILINE))
    used = {
        words[1]
        for page in PAGES
        for block in blocks(page.read_text(encoding="utf-8"), "sh")
        for words in map(str.split, block.splitlines())
        if words[:1] == ["make"]
    }
    assert {"run", "test"} <= used <= targets


# Settings, methods, measures ------------------------------------------------------------------------------------------


def settable(record: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Key, type and default of every setting, with those of the tables in it."""
    for name, field in record.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from settable(type(field.default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.annotation, field.default


def choices(annotation: Any) -> set[str]:
    """The words that a setting may be."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {word for part in get_args(annotation) for word in choices(part)}


def test_every_setting_is_in_its_page_with_its_default() -> None:
    listed = rows(text_of("docs/settings.md"), "| Setting | Default | Meaning |")
    found = {key.strip("`"): (default, meaning) for key, default, meaning in listed}
    assert len(found) == len(listed)
    own = [(m, key, *rest) for m in known().values() for key, *rest in settable(m.Settings, f"{m.name}.")]
    expected = [*settable(Settings), *((key, *rest) for _, key, *rest in own)]
    assert sorted(found) == sorted(key for key, *_ in expected)
    for key, annotation, default in expected:
        shown, meaning = found[key]
        assert shown == ("not set" if default is None else f"`{json.dumps(default)}`"), key
        assert choices(annotation) <= set(re.findall(r"`([^`]+)`", meaning)), key
    assert set(names()) <= set(re.findall(r"`([^`]+)`", found["model.name"][1]))
    for method, key, *_ in own:
        assert f"`{key.rpartition('.')[2]}`" in sections(text_of("docs/methods.md"), "##")[method.name]


def test_every_flag_is_in_the_settings_page() -> None:
    program: Any = typer.main.get_command(app)
    both = [*program.commands["run"].params, *program.commands["compare"].params]
    real = {name for parameter in both for name in parameter.opts if name.startswith("-")}
    cells = [cells[0] for cells in rows(text_of("docs/settings.md"), "| Flag | Sets |")]
    assert set(re.findall(r"`([^`]+)`", " ".join(cells))) == real | {"--help"}


def test_every_method_has_a_section_that_says_what_leaves() -> None:
    found = sections(text_of("docs/methods.md"), "##")
    assert sorted(found) == sorted(known())
    all_groups = {cells[0].strip("`") for cells in rows(text_of("docs/methods.md"), "| Group | Content |")}
    for name, method in known().items():
        section = found[name]
        payload = method().payload(tiny.study(method=name), "site-1")
        leaves = re.search(r"\*\*Leaves a site:\*\*(.*?)\n- ", section, re.DOTALL)
        assert leaves, name
        said = set(re.findall(r"`([^`]+)`", leaves[1])) & all_groups
        assert said == {group.name for group in payload.up}, name
        assert "**Comes back:**" in section, name
        assert "**Paper:**" in section, name
        assert payload.seen_by == "nobody" or "as `fedavg`" in section or payload.seen_by in section, name
        assert {"bar": "Bar.", "one-shot": "One-shot.", "multi-round": "Multi-round."}[method.family] in section, name


def test_every_headline_has_a_section() -> None:
    keys = [*(headline["key"] for headline in headlines([], "m", ["a"], "local", "global")), *OVER_ROUNDS]
    assert [title.strip("`") for title in sections(text_of("docs/measures.md"), "###") if "`" in title] == keys


def test_every_column_of_the_table_is_explained() -> None:
    listed = [cells[0] for cells in rows(text_of("docs/first-run.md"), "| Column | Meaning |")]
    assert listed == [*(heading for heading, _ in COLUMNS.values()), "up, down", "seconds"]


def test_the_readme_quotes_the_benchmarks_results() -> None:
    speed = " ".join(sections(text_of("README.md"), "##")["Speed"].split())
    found = json.loads(text_of("benchmarks/results/side_by_side.json"))
    assert found["machine"].split(", torch")[0] in speed
    assert f"median of {found['n']}" in speed
    for key in ("eager_fp32", "side_by_side_fp32", "side_by_side_bf16"):
        assert f"| {found[key]:,.0f} | {found[key] / found['eager_fp32']:.1f} |" in speed
    for precision, values in found["accuracy"].items():
        assert re.search(rf"{precision} \|[^%]*\| {sum(values) / len(values):.2f} % \|", speed)
    synthesis = json.loads(text_of("benchmarks/results/synthesis.json"))
    plain = synthesis["milliseconds"]["eager fp32"]
    for precision in ("fp32", "bf16"):
        assert all(f"{value:.1f}" in speed for value in synthesis["milliseconds"][precision].values())
    for part, value in synthesis["milliseconds"]["bf16"].items():
        assert f"{value:.1f} ({plain[part] / value:.1f} times)" in speed
    for parts in synthesis["fedisca_epoch_seconds"].values():
        seconds, whole = sum(parts.values()), sum(plain.values()) / 2
        assert f"{whole:.1f} s" in speed
        assert f"{seconds:.1f} s ({whole / seconds:.1f} times)" in speed
        public = sum(synthesis["milliseconds"]["eager fp32, as the public code"].values()) / 2
        assert f"{public:.1f} s" in speed
        assert f"{public / seconds:.1f} times" in speed
    precision = json.loads(text_of("benchmarks/results/synthesis_precision.json"))["entries"]
    for kind in ("bf16", "fp32"):
        accuracies = [100 * row["figures"]["accuracy"] for row in precision if row["precision"] == kind]
        assert " and ".join(f"{value:.1f}" for value in accuracies) + " %" in speed
    held = json.loads(text_of("benchmarks/results/stage_two_memory.json"))["GiB"]
    assert f"of 500 steps ({held['fedbicross']['T 500']['most']:.1f} GiB at most)" in speed
    assert f"100 ({held['fedbicross']['T 100']['most']:.1f} GiB)" in speed
    long, short = (held["fedisca"][length]["held"] for length in ("T 500", "T 100"))
    assert f"holds {long:.2f} GiB between steps instead of {short:.2f}" in speed
    for of in ("most", "held"):
        assert held["fedbicross"]["T 500"][of] <= held["fedbicross"]["T 100"][of]
    exchange = json.loads(text_of("benchmarks/results/exchange_overhead.json"))
    assert f"{1000 * exchange['exchange_s']:.0f} ms, and {1000 * exchange['checkpoint_s']:.0f} ms" in speed
    assert f"{json.loads(text_of('benchmarks/results/fedavg_cpu.json'))['ratio']:.2f} times" in speed
    memory = json.loads(text_of("benchmarks/results/memory.json"))
    assert all(f"{memory[key]:,.0f} MiB" in speed for key in ("ten_rounds_mib", "hundred_rounds_mib", "many_sites_mib"))


def test_the_citation_has_this_version() -> None:
    (block,) = blocks(text_of("README.md"), "bibtex")
    assert f"version = {{{__version__}}}" in block


# Examples -------------------------------------------------------------------------------------------------------------


def example() -> str:
    """The file that `add-a-method.md` shows."""
    (block,) = blocks(text_of("docs/add-a-method.md"), "python")
    return block


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs on the same sites: the example with momentum, without, and FedAvg."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "fedavgm.py").write_text(example(), encoding="utf-8")
    mine = str(folder / "fedavgm.py")
    study = shlex.split("--data phantoms:96 --sites 3 --rounds 3 --epochs 1 --device cpu --set model.width=2 --quiet")
    assert main(["run", "--method", mine, *study, "--set", "momentum=0.5", "--out", str(folder / "half")]) == 0
    assert main(["run", "--method", mine, *study, "--set", "momentum=0", "--out", str(folder / "none")]) == 0
    assert main(["run", "--method", "fedavg", *study, "--out", str(folder / "fedavg")]) == 0
    return folder


def measured(run: Path) -> list[dict[str, Any]]:
    found = json.loads((run / "result.json").read_text(encoding="utf-8"))["rows"]
    return [{key: value for key, value in row.items() if key != "method"} for row in found]


def kept(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run / "predictors").iterdir()}


def test_the_example_runs_as_a_method_of_its_own(runs: Path) -> None:
    result = json.loads((runs / "half" / "result.json").read_text(encoding="utf-8"))
    assert result["methods"] == ["fedavgm"]
    assert result["settings"]["set"] == {"momentum": 0.5}
    assert {row["round"] for row in result["rows"]} == {0, 1, 2}
    assert (runs / "half" / "report.html").stat().st_size > 0


def test_the_example_without_momentum_is_fedavg_bit_for_bit(runs: Path) -> None:
    assert measured(runs / "none") == measured(runs / "fedavg")
    assert kept(runs / "none") == kept(runs / "fedavg")
    assert kept(runs / "half") != kept(runs / "fedavg")


@pytest.fixture
def builtin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example moved into the package, as its page says."""
    (tmp_path / "fedavgm.py").write_text(example(), encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    yield importlib.import_module("wardround.methods.fedavgm")
    del sys.modules["wardround.methods.fedavgm"]


def test_the_example_is_found_among_the_methods(builtin: ModuleType) -> None:
    assert known.__wrapped__()["fedavgm"] is builtin.FedAvgM
    assert builtin.FedAvgM.family == "multi-round"


def test_the_example_starts_at_rest_and_moves_parameters_only(builtin: ModuleType) -> None:
    study = tiny.study()
    state = builtin.FedAvgM().begin(tiny.context(study))
    assert set(state.groups["velocity"]) == set(spec_layout(study.common_spec).in_group(PARAMETERS))
    assert not any(tensor.any() for tensor in state.groups["velocity"].values())


def test_two_steps_of_the_example_by_hand(builtin: ModuleType) -> None:
    """β = 1/2. Step 1: mean (0·1 + 1·3)/4 = 3/4, Δ = 1/4 = v, w = 3/4.

    Step 2: mean 1/2, Δ = 3/4 - 1/2 = 1/4, v = 1/8 + 1/4 = 3/8, w = 3/4 - 3/8 = 3/8. The statistic follows its mean.
    """
    method = builtin.FedAvgM(builtin.FedAvgM.Settings(momentum=0.5))
    start = {"w": torch.tensor([1.0]), "m": torch.tensor([4.0]), "c": torch.tensor(0)}
    state = State({"model": start, "velocity": {"w": torch.tensor([0.0])}})
    state = one_step(method, state, a=(1, 0.0, 2.0, 5), b=(3, 1.0, 2.0, 7))
    assert numbers(state) == {"model": {"w": [0.75], "m": [2.0], "c": 7}, "velocity": {"w": [0.25]}}
    state = one_step(method, State.from_bytes(state.to_bytes()), a=(1, 0.5, 1.0, 8), b=(3, 0.5, 1.0, 6))
    assert numbers(state) == {"model": {"w": [0.375], "m": [1.0], "c": 8}, "velocity": {"w": [0.375]}}


def numbers(state: State) -> dict[str, Any]:
    return {group: {name: t.tolist() for name, t in tensors.items()} for group, tensors in state.groups.items()}


def one_step(method: Any, state: State, **sent: tuple[int, float, float, int]) -> State:
    """What the coordinator makes of sites that send (images, weight, statistic, counter)."""
    answers = {
        site: Bundle(
            Envelope("answer", "study", "fedavgm", site, 0),
            {
                PARAMETERS: {"w": torch.tensor([weight])},
                STATISTICS: {"m": torch.tensor([statistic])},
                COUNTERS: {"c": torch.tensor(counter)},
                SIZE: {"images": torch.tensor(images)},
            },
        )
        for site, (images, weight, statistic, counter) in sent.items()
    }
    (after,) = method.absorb(cast(Context, None), state, answers)
    return cast(State, after)


def test_the_npz_example_makes_a_file_with_sites_and_patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(text_of("docs/your-images.md"), "python")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "your-images.md", "exec"), {})  # noqa: S102 - the block is ours
    data = load("scans.npz", tmp_path)
    assert (len(data.train), len(data.test)) == (120, 40)
    assert set(cast(torch.Tensor, data.train.sites).tolist()) == {0, 1}
    apart = [set(cast(torch.Tensor, part.patients).tolist()) for part in (data.train, data.test)]
    assert not apart[0] & apart[1]


# The record -----------------------------------------------------------------------------------------------------------

OPEN = {
    "settings",
    "seconds",
    "ledger.rows[].groups",
    "clusters[].silhouettes",
}  # whose keys depend on the study


def fields(value: Any, path: str = "") -> set[str]:
    """The path of every field, as `compare.md` writes it."""
    if isinstance(value, dict) and path not in OPEN:
        return {found for key, inner in value.items() for found in fields(inner, f"{path}.{key}".lstrip("."))}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {found for inner in value for found in fields(inner, f"{path}[]")}
    return {path}


def test_every_field_of_a_result_is_in_its_page(runs: Path, tmp_path: Path) -> None:
    painted = tiny.coordinate(tmp_path / "run", Painter())
    result = json.loads((runs / "half" / "result.json").read_text(encoding="utf-8"))
    result["notes"] = result["notes"] or [{"method": "fedavgm", "text": "a note"}]
    compared = tiny.coordinate(tmp_path / "compared", make("fedavg", {}), evaluate_features=True)
    for key in ("work", "clusters", "galleries"):
        result[key] += painted[key]
    for key in ("features", "projections"):
        result[key] += compared[key]
    result["privacy"] += [{"method": "fedavg", **dict.fromkeys(PRIVACY_FIELDS, 1.0)}]
    listed = [cells[0].strip("`") for cells in rows(text_of("docs/compare.md"), "| Field | Content |")]
    assert sorted(listed) == sorted(fields(result))
    assert result["schema_version"] == 1


def test_every_file_of_a_run_is_in_its_page(runs: Path) -> None:
    (tree,) = (block for block in blocks(text_of("docs/compare.md"), "") if block.startswith("runs/NAME/"))
    listed = re.findall(r"^  (\S+)", tree, re.MULTILINE)
    there = {file.name + "/" * file.is_dir() for file in (runs / "half").iterdir() if not file.name.startswith(".")}
    assert set(listed) == there
