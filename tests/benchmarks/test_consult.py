"""The experiments with `consult`: what a bad site sends, exact summaries, and that a start goes on from a stop."""

import importlib
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tiny import context, drive, federation, images, study
from wardround.exchange.bundle import Bundle
from wardround.methods import personal_prior
from wardround.methods.registry import make
from wardround.methods.state import State

ROOT = Path(__file__).parents[2]
NAMES = ("robust", "heldout", "calibration", "picture", "balance", "two_classes", "sharpness", "site_choice")


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """The scripts' modules, which are no package: they find one another beside the script that runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield SimpleNamespace(**{name: importlib.import_module(f"consult_{name}") for name in NAMES})


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of eight-pixel images that tell by their brightness."""
    return _blobs(tmp_path_factory.mktemp("data") / "blobs.npz", 240)


def _blobs(path: Path, train: int) -> Path:
    draw, arrays = np.random.default_rng(0), {}
    for part, n in (("train", train), ("val", 30), ("test", 60)):
        labels = np.arange(n) % 3
        pixels = draw.integers(0, 60, (n, 8, 8, 3)) + 80 * labels.reshape(-1, 1, 1, 1)
        arrays |= {f"{part}_images": pixels.astype(np.uint8), f"{part}_labels": labels.reshape(-1, 1)}
    np.savez(path, **arrays)
    return path


def test_two_processes_fill_one_file(scripts: Any, tmp_path: Path) -> None:
    """Each began before the other had added anything."""
    import experiments

    counted = SimpleNamespace(name="some", summarise=len)
    out, begun = tmp_path / "out.json", {"benchmark": "some", "cells": [], "entries": []}
    for seed in (0, 1, 1):
        record = experiments._kept(counted, out, begun, {"seed": seed}, [{"seed": seed, "value": seed}])
    assert record == json.loads(out.read_text())
    assert record["cells"] == [{"seed": 0}, {"seed": 1}]
    assert (len(record["entries"]), record["summary"]) == (2, 2)


OPTIONS = ["--smoke", "--device", "cpu", "--seeds", "0", "--alphas", "0.5", "--sites", "3"]


def test_a_bad_site_among_three(scripts: Any, blobs: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = [str(blobs), *OPTIONS, "--out", str(tmp_path / "out.json"), "--work", str(tmp_path / "work")]
    assert scripts.robust.main(arguments) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    rows = record["entries"]
    assert len(rows) == 3 * 8 * 3  # which site is bad, how, and the method
    by = {(row["bad"], row["kind"], row["method"]): row["figures"] for row in rows}
    assert {key for figures in by.values() for key in figures} == set(scripts.robust.FIGURES)
    for site in ("site-1", "site-2", "site-3"):
        # Counts mean nothing to the mean of logits, and a million of everything much to the panel of shares.
        assert by[site, "counts", "ensemble"] == by[site, "honest", "ensemble"]
        assert by[site, "both", "ensemble"] == by[site, "labels", "ensemble"]
    honest = [by[site, "honest", "class-ensemble"]["shared_global"] for site in ("site-1", "site-2", "site-3")]
    both = [by[site, "both", "class-ensemble"]["shared_global"] for site in ("site-1", "site-2", "site-3")]
    assert sum(both) < sum(honest)
    assert "| both |" in capsys.readouterr().out

    before = (tmp_path / "out.json").stat().st_mtime_ns
    assert scripts.robust.main(arguments) == 0  # done: nothing is done again
    assert (tmp_path / "out.json").stat().st_mtime_ns == before
    assert scripts.robust.main([*arguments, "--sites", "4"]) == 2  # other settings
    assert "holds results of other settings" in capsys.readouterr().err


def test_a_class_that_nobody_has_seen(scripts: Any, blobs: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    arguments = [str(blobs), *OPTIONS, "--out", str(out), "--work", str(tmp_path / "work"), "--classes"]
    assert scripts.heldout.main([*arguments, "2"]) == 0
    first = json.loads(out.read_text())
    assert [(row["class"], row["method"]) for row in first["entries"]] == [
        (2, "consult"), (2, "class-ensemble"), (2, "ensemble"),
    ]  # fmt: skip
    assert all(0 <= row["figures"]["auroc"] <= 1 for row in first["entries"])
    assert first["entries"][1]["figures"]["marked_known"] is None
    assert scripts.heldout.main([*arguments, "2", "0"]) == 0  # goes on
    second = json.loads(out.read_text())
    assert second["entries"][:3] == first["entries"]
    assert [cell["class"] for cell in second["cells"]] == [2, 0]
    assert "| blobs | 0.5 | 2 | consult |" in capsys.readouterr().out
    assert scripts.robust.main(["--table", "--out", str(out)]) == 2
    assert "it is not of this benchmark" in capsys.readouterr().err
    assert scripts.heldout.main(["--table", "--out", str(out)]) == 0
    assert scripts.heldout.main(["--table", "--out", str(tmp_path / "none.json")]) == 2
    assert "none.json holds no results; name the file of an earlier start with --out" in capsys.readouterr().err


def test_no_site_keeps_an_image_of_the_class(scripts: Any) -> None:
    site = scripts.heldout.without(federation().sites[0], {"class": 1})
    assert site.train.counts().tolist() == [3, 0, 3, 2]
    assert site.val.counts().tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("number", ["3", "-1"])
def test_a_class_that_the_set_does_not_have(
    number: str, scripts: Any, blobs: Path, tmp_path: Path, capsys: Any
) -> None:
    arguments = [str(blobs), *OPTIONS, "--out", str(tmp_path / "out.json"), "--classes", number]
    assert scripts.heldout.main(arguments) == 2
    assert f"there is no class {number} to hold out; name some of 0 to 2 with --classes" in capsys.readouterr().err


def test_calibration_before_and_after(scripts: Any, tmp_path: Path, capsys: Any) -> None:
    out, blobs = tmp_path / "out.json", _blobs(tmp_path / "blobs.npz", 900)  # with validation images enough to fit
    assert scripts.calibration.main([str(blobs), *OPTIONS, "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["entries"]
    assert set(row["figures"]) == set(scripts.calibration.EXPERIMENT.figures)
    assert all(0 <= error <= 1 for error in row["figures"].values())
    assert row["figures"]["before_local"] != row["figures"]["after_local"]
    assert "| blobs | 0.5 | 1 |" in capsys.readouterr().out


def test_classes_are_merged_into_two(scripts: Any, blobs: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "out.json"
    assert scripts.two_classes.main([str(blobs), *OPTIONS, "--out", str(out)]) == 2
    assert "has more than two classes; use bloodmnist, dermamnist, oct3, or a set of two" in capsys.readouterr().err
    monkeypatch.setitem(scripts.two_classes.SECOND, "blobs", (1, 2))
    merged = np.load(scripts.two_classes.merged(blobs, tmp_path))
    assert merged["test_labels"].tolist() == [[0], [1], [1]] * 20
    assert scripts.two_classes.main([str(blobs), *OPTIONS, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    (row,) = record["entries"]
    assert row["figures"].keys() == record["measures"].keys()
    assert all(0 <= value <= 1 for value in row["figures"].values())
    assert "\n| all |  |  |" in capsys.readouterr().out


def test_the_sharpness_of_eight_classes_asked_about_three(
    scripts: Any, blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All classes are kept, and the panel is asked with β = 5·8/3, and with the 5 of eight classes."""
    from wardround.methods import consult

    made, asked = consult.panel_of, set()

    def panel_of(members: Any, counts: torch.Tensor, how: Any) -> Any:
        panel = made(members, counts, how)
        asked.add((counts.shape[1], round(float(panel.sharpness), 6)))
        return panel

    monkeypatch.setattr(consult, "panel_of", panel_of)
    out = tmp_path / "out.json"
    assert scripts.sharpness.main([str(blobs), *OPTIONS, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    (row,) = record["entries"]
    assert record["benchmark"] == scripts.sharpness.NAME
    assert row["figures"].keys() == record["measures"].keys()
    assert asked == {(3, 13.333333), (3, 5.0)}


def test_what_each_step_of_a_sites_choice_is_worth(scripts: Any, tmp_path: Path, capsys: Any) -> None:
    """The pages' line is what the row says, and what a step is without is put back."""
    out, blobs = tmp_path / "out.json", _blobs(tmp_path / "blobs.npz", 900)
    assert scripts.site_choice.main([str(blobs), *OPTIONS, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    ((row,), (line,)) = record["entries"], record["summary"]
    assert row["figures"].keys() == record["measures"].keys()
    assert line == {"set": "blobs", "alpha": 0.5, "seeds": [0], **row["figures"]}
    pairs = [[100 * row["figures"][f"{who}_{test}"] for test in ("local", "global")] for who in scripts.site_choice.WHO]
    shown = " | ".join(f"{local:.1f} / {everywhere:.1f}" for local, everywhere in pairs)
    assert capsys.readouterr().out.endswith(f"| blobs | 0.5 | 1 | {shown} |\n| all |  |  | {shown} |\n")
    scores, labels, far = torch.tensor([[0.0, 1.0]]).double(), torch.tensor([0]), torch.full((2,), 9.0).double()
    assert not scripts.site_choice._nothing(scores, labels, 1, far).any()
    assert personal_prior.lowering(scores, labels, 1, far)[1] > 1


def test_two_classes_that_are_two_already_are_taken_as_they_are(scripts: Any, tmp_path: Path) -> None:
    labels = {f"{part}_labels": np.array([[0], [1]], dtype=np.uint8) for part in ("train", "val", "test")}
    np.savez(tmp_path / "breast.npz", **labels)
    found = np.load(scripts.two_classes.merged(tmp_path / "breast.npz", tmp_path))
    assert all(found[name].tolist() == [[0], [1]] for name in labels)


# What a bad site sends ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answer() -> Bundle:
    data = federation()
    ctx = context(study(data, method="consult", rounds=1))
    found = drive(ctx, make("consult", {}).answer(ctx, data.sites[0], ctx.bundle("request", "site-1", {}), State()))
    bundle: Bundle = found.bundle
    return bundle


def test_wrong_labels_are_those_of_the_class_before(scripts: Any, answer: Bundle) -> None:
    """As if class 0 had been called 1: what the network said of 0 it now says of 1, and so do the counts."""
    wrong = scripts.robust.with_wrong_labels(answer)
    assert answer.group("label_counts")["counts"].tolist() == [3, 3, 3, 2]
    assert wrong.group("label_counts")["counts"].tolist() == [2, 3, 3, 3]
    for name in ("head.weight", "head.bias"):
        assert torch.equal(wrong.group("parameters")[name][1], answer.group("parameters")[name][0])
    assert wrong.group("statistics").keys() == answer.group("statistics").keys()


def test_a_shuffled_model_has_the_same_numbers_in_another_order(scripts: Any, answer: Bundle) -> None:
    mixed = scripts.robust.shuffled(answer, torch.Generator().manual_seed(0))
    assert mixed.group("label_counts") == answer.group("label_counts")
    assert mixed.group("counters") == answer.group("counters")
    for group in ("parameters", "statistics"):
        assert mixed.group(group).keys() == answer.group(group).keys()
        for name, tensor in answer.group(group).items():
            assert torch.equal(mixed.group(group)[name].flatten().sort().values, tensor.flatten().sort().values)
    assert not torch.equal(mixed.group("parameters")["head.weight"], answer.group("parameters")["head.weight"])


def test_a_handful_of_the_commonest_class(scripts: Any) -> None:
    site = federation().sites[0]
    crowded = type(site)(site.name, images(23, labels=[0] * 3 + [2] * 20), site.val, site.test)
    assert scripts.robust.with_few(crowded).train.counts().tolist() == [3, 0, 5, 0]


def test_means_over_seeds_and_bad_sites(scripts: Any) -> None:
    """Without site 1 there is 0.9, without site 2 0.75; a noise there gives 0.75 and 0.5: most lost, 0.25."""
    place = {"set": "blood", "alpha": 0.1, "seed": 0, "method": "consult"}
    rows = [
        {**place, "kind": kind, "bad": bad, "figures": dict.fromkeys(scripts.robust.FIGURES, value)}
        for kind, values in (("noise", (0.75, 0.5)), ("without", (0.9, 0.75)))
        for bad, value in zip(("site-1", "site-2"), values, strict=True)
    ]
    noise, without = summary = scripts.robust.summarise(rows)
    assert (noise["n"], noise["mean"]["shared_global"], noise["lowest"]["shared_global"]) == (2, 0.625, 0.5)
    assert noise["most_lost"] == dict.fromkeys(scripts.robust.FIGURES, 0.25)
    assert set(without["most_lost"].values()) == {0}
    first, second = scripts.robust.markdown({"summary": summary}).split(
        "### blood, α = 0.1: the most that one bad site cost"
    )
    assert "| noise | 62.5 / 62.5 (62.5) | – | – |" in first
    assert "| noise | 25.0 / 25.0 (25.0) | – | – |" in second
    assert "| without |" not in second


# The picture ----------------------------------------------------------------------------------------------------------


def row(entry: str, *figures: float | None, alpha: float = 0.1) -> dict[str, Any]:
    keys = ("local_accuracy", "global_accuracy", "shared_local_accuracy", "shared_global_accuracy")
    return {"set": "blood", "alpha": alpha, "entry": entry, "seeds": [0], "mean": dict(zip(keys, figures, strict=True))}


TREE: dict[str, Any] = {
    "study": {"data": {"sites": 5}, "model": {"name": "resnet18"}},
    "summary": [
        row("local", 0.98, 0.5, None, None),
        row("ensemble", 0.6, 0.62, 0.6, 0.62),
        row("consult", 0.985, 0.7, 0.9, 0.92),
        row("consult", 0.98, 0.8, 0.96, 0.97, alpha=0.3),
    ],
}


def test_the_table_has_a_line_for_each_predictor(scripts: Any) -> None:
    _, text = scripts.picture.figures(TREE, "blood", "consult.svg")
    assert text.partition("| method ")[2].splitlines()[2:] == [
        "| `consult`, shared | 90.0 / 92.0 | 96.0 / 97.0 |",
        "| `consult`, at the site | 98.5 / 70.0 | 98.0 / 80.0 |",
        "| `local` | 98.0 / 50.0 | – |",
        "| `ensemble` | 60.0 / 62.0 | – |",
    ]


def test_the_picture_has_a_point_for_each_predictor(scripts: Any) -> None:
    drawn, _ = scripts.picture.figures(TREE, "blood", "consult.svg")
    mark = "{http://www.w3.org/2000/svg}"
    circles = ElementTree.fromstring(drawn).findall(f"{mark}circle")  # noqa: S314 - our own
    assert len(circles) == (2 + 2 + 1 + 1) + (2 + 2 + 1)  # of the corner above 60 `local` is no part
    assert sum(circle.get("fill") == "#fff" for circle in circles) == 2 + 2


def test_rivals_are_compared_on_the_seeds_that_both_have(scripts: Any) -> None:
    """`consult` has balances 0.8 and 0.6; `local`, of both seeds, is 10 behind, `dense`, of the second, 5 ahead."""

    def entry(name: str, seed: int, balance: float) -> dict[str, Any]:
        shared = dict.fromkeys(("shared_local_accuracy", "shared_global_accuracy"), 0.5)
        figures = {"balance": balance, **shared}
        return {"set": "blood", "alpha": 0.1, "seed": seed, "entry": name, "figures": figures}

    ours = [entry("consult", 0, 0.8), entry("consult", 1, 0.6), entry("consult, prior 0.25", 0, 0.7)]
    ours.append(entry("consult, prior 0.25", 1, 0.7))
    others = [
        entry("local", 0, 0.7),
        entry("local", 1, 0.5),
        entry("dense", 1, 0.65),
        entry("dense, as released", 1, 1),
    ]
    _, _, line = scripts.balance.balance_table([*ours, *others]).splitlines()
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "blood", "0.1", "2", "70.0", "50.0", "70.0", "dense 65.0 (of 1 seed, `consult` there 60.0); local 60.0"
    ]  # fmt: skip


def test_a_page_without_marks_is_left_alone(scripts: Any, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# nothing\n")
    (tmp_path / "results.json").write_text(json.dumps({**TREE, "entries": []}))
    assert scripts.picture.main([str(tmp_path / "results.json"), str(tmp_path / "page.md"), "--set", "blood"]) == 2
    assert (tmp_path / "page.md").read_text() == "# nothing\n"


def test_the_page_has_the_figures_of_the_results(scripts: Any) -> None:
    """Fails when results are new; then run the command in benchmarks/consult_picture.py."""
    tree, ten = (
        json.loads((ROOT / "papers" / f"one_shot_{name}.json").read_text(encoding="utf-8"))
        for name in ("grid", "ten_sites")
    )
    drawn, text = scripts.picture.figures(tree, "bloodmnist", "consult.svg")
    page = (ROOT / "docs" / "consult.md").read_text(encoding="utf-8")
    assert text in page
    assert scripts.balance.balance_table(tree["entries"]) in page
    assert scripts.balance.balance_table(ten["entries"]) in page
    assert drawn == (ROOT / "docs" / "consult.svg").read_text(encoding="utf-8")
