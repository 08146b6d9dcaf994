"""FedMP's tables: the protocol as settings, exact differences and tables, and runs that are stopped and go on."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from wardround.errors import BadInput
from wardround.papers import fedmp
from wardround.progress import Silent
from wardround.run import prepare

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PHANTOMS = Path("phantoms:60")


@pytest.fixture(scope="module")
def table() -> Iterator[Any]:
    """The scripts' modules, which are no package: they find one another beside the script that runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        names = ("fedmp_table", "fedmp_entries", "fedmp_summary")
        yield SimpleNamespace(**{name.removeprefix("fedmp_"): importlib.import_module(name) for name in names})


# The protocol ---------------------------------------------------------------------------------------------------------


def planned(
    table: Any, label: str, kind: fedmp.Kind = "natural", source: Path = Path("wbc_sites.npz"), **flags: Any
) -> Any:
    (entry,) = (e for e in table.entries.chosen(table.entries.PARTS) if e.label == label)
    tree = fedmp.study_tree(kind, flags)
    return fedmp.plan(tree, entry, fedmp.cell(source, kind, 3), "hash")


def test_the_protocol_is_the_papers_as_far_as_it_says(table: Any) -> None:
    found = planned(table, "fedmp").settings
    assert (found.rounds, found.participants, found.seed, found.evaluate_features) == (100, 1.0, 3, True)
    assert (found.model.name, found.model.stem, found.model.weights) == ("resnet18", None, None)
    train = found.train
    assert (train.optimiser, train.lr, train.weight_decay, train.batch, train.epochs) == ("adam", 1e-4, 5e-4, 64, 5)
    assert (train.round_decay, train.schedule, train.augment, train.keep) == (1.0, "constant", False, "last")
    assert (found.data.partition, found.data.sites, found.data.test, found.data.shift) == (
        *("natural", 0, "natural", "none"),
    )
    shifted = planned(table, "fedmp", "shifted").settings.data
    assert (shifted.partition, shifted.sites, shifted.shift, shifted.test) == ("iid", 5, "fixed", "weighted")


def test_every_entry_is_valid_and_acts_as_its_name_says(table: Any) -> None:
    labels = [entry.label for entry in table.entries.chosen(table.entries.PARTS)]
    assert labels == table.summary.ORDER
    settings = {label: planned(table, label).record["settings"] for label in labels}
    modules = {label: (settings[label]["sfmc"], settings[label]["cpgma"]) for label in labels if "fedmp" in label}
    assert modules["fedmp, SFMC only"] == (True, False)
    assert modules["fedmp, cPGMA only"] == (False, True)
    assert modules["fedmp"] == modules["fedmp, stage 1"] == modules["fedmp-fewshot"] == (True, True)
    assert [settings[f"fedmp, stage {stage}"]["stage"] for stage in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert settings["fedmp"]["stage"] is None
    assert settings["fedmp, Eq. 1 as printed"]["weights"] == "literal"
    assert (settings["fedmp-fewshot"]["shots"], settings["fedmp-fewshot"]["epochs"]) == (3, [30, 60, 60])
    published = table.entries.published
    assert published("fedmp-1", "fedmp", "tb") == ["88.08±0.42"]
    assert published("fedmp-2", "fedmp, stage 4", "tb") == ["88.08", "60"]
    assert published("fedmp-4", "fedmp-fewshot", "tb") == ["3", "1.71", "85.49"]
    assert published("fedmp-3", "fedmp, Eq. 1 as printed", "dr") is published("fedmp-1", "fedmp, stage 1", "tb") is None


def test_parts_are_chosen_and_fedavg_and_fedmp_belong_to_all(table: Any) -> None:
    def labels(*parts: str) -> list[str]:
        return [entry.label for entry in table.entries.chosen(parts)]

    assert labels("compare") == ["fedavg", "fedmp"]
    assert labels("fewshot", "ablation") == [
        *("fedavg", "fedmp", "fedmp, SFMC only", "fedmp, cPGMA only", "fedmp, Eq. 1 as printed", "fedmp-fewshot"),
    ]
    assert len(labels("baselines")) == 10


def test_seeds_share_the_sites_and_kinds_do_not(table: Any) -> None:
    flags = {"device": "cpu"}
    entry = table.entries.FEDAVG
    prepared = {}
    kinds: tuple[fedmp.Kind, ...] = ("natural", "shifted")
    for kind in kinds:
        tree = fedmp.study_tree(kind, flags)
        for seed in (0, 1):
            cell = fedmp.cell(PHANTOMS, kind, seed)
            settings = fedmp.plan(tree, entry, cell, "hash").settings
            prepared[kind, seed] = prepare(settings, [("fedavg", {})], Silent())
    natural, shifted = prepared["natural", 0], prepared["shifted", 0]
    assert natural.partition.sha256 == prepared["natural", 1].partition.sha256
    assert (len(natural.federation.sites), len(shifted.federation.sites)) == (fedmp.PHANTOM_SITES, 5)
    assert sum(len(site.test.images) for site in natural.federation.sites) == len(natural.federation.test) == 15
    assert "gamma 0.6" in shifted.federation.provenance
    assert {len(site.val) for site in (*natural.federation.sites, *shifted.federation.sites)} == {0}


# Summary --------------------------------------------------------------------------------------------------------------


def line(table: Any, label: str, seed: int, accuracy: float, **more: Any) -> dict[str, Any]:
    figures = {**dict.fromkeys(table.summary.MEASURES), "shared_global_accuracy": accuracy, **more}
    return {"set": "wbc", "seed": seed, "entry": label, "recipe": label, "seconds": 10.0, "figures": figures}


def test_the_interval_of_paired_differences_by_hand(table: Any) -> None:
    """Differences 1 to 5 points: mean 3, deviation √2.5, t(0.975, 4) = 2.776, so ± 2.776 · √2.5 / √5 = 1.963."""
    found = table.summary.paired([0.01, 0.02, 0.03, 0.04, 0.05])
    assert (found["pairs"], found["mean"]) == (5, 0.03)
    assert found["interval"] == pytest.approx([0.03 - 0.01963, 0.03 + 0.01963], abs=1e-5)
    assert table.summary.paired([0.25]) == {"pairs": 1, "mean": 0.25, "interval": None}


def test_seeds_are_paired_with_fedavg_of_the_same_seed_and_set(table: Any) -> None:
    lines = [
        *(line(table, "fedmp", seed, value) for seed, value in ((0, 0.75), (1, 0.5), (2, 0.9))),
        *(line(table, "fedavg", seed, value) for seed, value in ((1, 0.25), (0, 0.625))),
        {**line(table, "fedavg", 2, 0.1), "set": "derma"},
    ]
    other, fedavg, fedmp = table.summary.summarise(lines)
    assert (other["set"], fedavg["entry"], fedmp["entry"]) == ("derma", "fedavg", "fedmp")
    assert fedavg["against_fedavg"] is None
    assert fedmp["seeds"] == [0, 1, 2]
    assert fedmp["against_fedavg"]["pairs"] == 2  # seed 2 has no FedAvg on this set
    assert fedmp["against_fedavg"]["mean"] == 0.1875
    assert fedmp["mean"]["shared_global_accuracy"] == pytest.approx(2.15 / 3, abs=1e-5)
    assert fedmp["standard_deviation"]["bytes"] is None


def test_tables_are_exact(table: Any) -> None:
    course = {"rounds_to_convergence": 40, "bytes": 10e9, "bytes_to_convergence": 4e9}
    lines = [
        *(line(table, "fedavg", seed, 0.5, **course) for seed in (0, 1)),
        *(line(table, "fedmp", seed, 0.51 + 0.02 * seed, feature_distance=1.25) for seed in (0, 1)),
        line(table, "fedmp, stage 1", 0, 0.75, embedding_width=50176, bytes=2.5e9),
        line(table, "fedmp-fewshot", 0, 0.48, bytes=0.25e9),
    ]
    shown = table.summary.markdown({"summary": table.summary.summarise(lines)}).splitlines()
    assert [text for text in shown if "Table" in text and not text.startswith(("-", "|"))] == [
        *("Methods (Table 1)", "Stages (Table 2)", "Bytes (Table 4)"),  # no module was run alone
    ]
    rows = {text.split(" | ")[0][2:]: text for text in shown[:9]}
    assert rows["fedmp"] == ("| fedmp | 2 | 52.0 ± 1.4 | +2.0 [-10.7, +14.7] | – | – | – | 1.25 | 88.08 | 75.96 | 10 |")
    assert "| fedmp, stage 1 | 1 | 50,176 | 75.0 | +25.0 | – | – | 2.500 | 89.12 (80) | 77.13 (170) | 10 |" in shown
    assert "| fedmp-fewshot | 1 | 48.0 | -2.0 | – | 0.250 | – | 2.5 % | 6.2 % | 3, 1.71, 85.49 | 10 |" in shown
    assert any(text.startswith("- published: ") and "other images than these" in text for text in shown)
    assert any("from scratch: no pretrained weights" in text for text in shown)


# The whole ------------------------------------------------------------------------------------------------------------

TINY = [
    *("--device", "cpu", "--rounds", "2", "--epochs", "1", "--model", "small", "--width", "2"),
    *("--fewshot-epochs", "1", "1", "--seeds", "0"),
]


def arguments(folder: Path, *more: str) -> list[str]:
    return [*more, "--out", str(folder / "papers" / "fedmp.json"), "--work", str(folder / "work"), *TINY]


def figures(folder: Path) -> dict[tuple[Any, ...], Any]:
    found = json.loads((folder / "papers" / "fedmp.json").read_text())["entries"]
    return {(e["set"], e["entry"], e["seed"]): (e["figures"], e["rounds"]["shared_global_accuracy"]) for e in found}


def test_both_kinds_stopped_gone_on_and_in_two_processes(
    table: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [str(PHANTOMS), "--shifted", "phantoms:56", "--parts", "compare", "fewshot"]
    assert table.table.main(arguments(tmp_path / "one", str(PHANTOMS), "--parts", "fewshot")) == 0
    first = figures(tmp_path / "one")
    assert len(first) == 3
    assert table.table.main(arguments(tmp_path / "one", *sets, "--seconds", "0.001")) == 0
    assert "3 of 6 entries are done" in capsys.readouterr().out
    assert table.table.main(arguments(tmp_path / "one", *sets)) == 0
    shown = capsys.readouterr().out
    assert "6 of 6 entries are done" in shown
    found = figures(tmp_path / "one")
    assert {key: found[key] for key in first} == first
    assert table.table.main(arguments(tmp_path / "two", *sets, "--jobs", "2")) == 0
    assert figures(tmp_path / "two") == found

    values = found["phantoms:60", "fedmp", 0][0]
    assert values["embedding_width"] == 8
    assert values["feature_distance"] > 0
    assert values["bytes"] > found["phantoms:60", "fedavg", 0][0]["bytes"]
    assert found["phantoms:60", "fedavg", 0][0]["embedding_width"] is None
    assert len(found["phantoms:56, shifted", "fedmp-fewshot", 0][1]) == 2
    assert [path.name for path in (tmp_path / "two" / "work").iterdir()] == [".lock"]
    capsys.readouterr()
    assert table.table.main(["--table", "--out", str(tmp_path / "one" / "papers" / "fedmp.json")]) == 0
    assert capsys.readouterr().out.strip() == shown.partition("\n\n")[2].partition("\n\n")[2].strip()
    with pytest.raises(BadInput, match="other settings; use another --out"):
        table.table.open_results(tmp_path / "one" / "papers" / "fedmp.json", {"natural": {}, "shifted": {}})


def test_a_file_with_places_of_acquisition(table: Any, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, n in (("train", 48), ("val", 12), ("test", 24)):
        labels = np.arange(n) % 3
        arrays[f"{part}_labels"] = labels[:, None].astype(np.uint8)
        arrays[f"{part}_site"] = (np.arange(n) // 3 % 2).astype(np.int64)
        arrays[f"{part}_images"] = (draw.integers(0, 90, (n, 28, 28, 3)) + 50 * labels[:, None, None, None]).astype(
            np.uint8
        )
    np.savez(tmp_path / "places.npz", **arrays)
    line = arguments(tmp_path, str(tmp_path / "places.npz"), "--parts", "compare")
    assert table.table.main(line) == 0
    tree = json.loads((tmp_path / "papers" / "fedmp.json").read_text())
    assert tree["cells"][0]["images"] == [30, 30]  # the validation part is trained on
    assert "merged" in tree["cells"][0]["provenance"]
    assert tree["cells"][0]["global_protocol"] == "accuracy on the official test set of 24 images"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no set is named"),
        (["absent.npz"], "cannot read absent.npz: No such file"),
        (["a/one.npz", "b/one.npz"], "two sets have the same name"),
        (["absent.npz", "--rounds", "0"], "rounds = 0 cannot be used"),
        (["absent.npz", "--precision", "fp8"], "train.precision = 'fp8' cannot be used"),
        (["phantoms:60", "--fewshot-epochs", "-1"], "fedmp-fewshot.epochs.0 = -1 cannot be used"),
    ],
)
def test_bad_input_is_one_line(
    table: Any, given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.table.main([*given, "--out", str(tmp_path / "table.json"), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
