"""Part of a table as plans: what is chosen, which images, which file; the same entries as the scripts of old."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from papers.filed import blood, one_shot_plan
from wardround.errors import BadInput
from wardround.papers import fedkper, fedmp, multi_round, one_shot
from wardround.papers.experiment import Choice, Part, open_results, parts
from wardround.papers.library import table


def chosen(id: str, data: Path, **choice: Any) -> list[Part]:
    return parts(table(id), Choice(**choice), data, "cpu")[0]


def test_a_part_of_a_table_is_its_cells_a_seed_at_a_time(tmp_path: Path) -> None:
    blood(tmp_path / "bloodmnist.npz")
    choice: dict[str, Any] = {"datasets": ["blood"], "levels": [0.1, 0.5], "methods": ["local", "fedavg"]}
    found = chosen("fedbicross-1", tmp_path, sites=[5, 10], seeds=[0, 1], **choice)
    assert [part.head["study"]["data"]["sites"] for part in found] == [5, 10]
    plans = found[0].plans
    labels = ["local", "fedavg, own init", "fedavg, common init"]
    assert [plan.label for plan in plans] == labels * 4
    assert [(plan.cell.place["seed"], plan.cell.place["alpha"]) for plan in plans[::3]] == [
        *((0, 0.1), (0, 0.5), (1, 0.1), (1, 0.5)),
    ]
    assert plans[0].settings.train.epochs == 100
    assert plans[0].settings.data.source == str(tmp_path / "bloodmnist.npz")
    derma = blood(tmp_path / "dermamnist.npz")
    (largest,) = chosen("fedbicross-1", derma.parent, datasets=["dermamnist"], sites=[20], methods=["local"])
    assert largest.head["study"]["data"]["sites"] == 15


def test_the_default_is_the_papers_setting_and_flags_are_over_it(tmp_path: Path) -> None:
    blood(tmp_path / "bloodmnist.npz")
    (part,) = chosen("fedbicross-1", tmp_path, datasets=["blood"], sites=[5], methods=["fedbicross"], seeds=[0])
    assert part.head["preset"] == "paper"
    assert part.plans[0].record["settings"]["trajectories"] == 100
    flags = {"train": {"epochs": 3}}
    (other,) = chosen("fedbicross-1", tmp_path, datasets=["blood"], sites=[5], flags=flags, preset="fast")
    assert (other.head["preset"], other.plans[0].settings.train.epochs) == ("fast", 3)
    (kper,) = chosen("fedkper-1", tmp_path, datasets=["blood"], methods=["fedprox"], seeds=[2])
    (planned,) = kper.plans
    assert (planned.settings.rounds, planned.settings.data.sites, planned.settings.seed) == (100, 20, 2)


def test_an_entry_has_the_id_that_the_scripts_gave_it(tmp_path: Path) -> None:
    """So that results that were measured before are still known. The ids are those of the scripts before they moved."""
    hashed = hashlib.sha256(blood(tmp_path / "bloodmnist.npz").read_bytes()).hexdigest()
    (part,) = chosen(
        "fedbicross-1", tmp_path, datasets=["blood"], levels=[0.1], sites=[5], methods=["local"], seeds=[3]
    )
    _, planned = one_shot_plan("local", seed=3, hashed=hashed)
    assert part.plans[0].id == planned.id
    tree = fedkper.study_tree(Path("bloodmnist.npz"), {})
    line = table("fedkper-1").entries[0]
    assert multi_round.plan(tree, line, fedkper.cell(Path("bloodmnist.npz"), 2), "h").id == KNOWN["fedkper"]
    tree = fedmp.study_tree("shifted", {"train": {"precision": "bf16"}})
    line = table("fedmp-1").entries[1]
    assert fedmp.plan(tree, line, fedmp.cell(Path("wbc_sites.npz"), "shifted", 3), "h").id == KNOWN["fedmp"]
    tree = one_shot.study_tree(None, {}, "fp32")
    line = table("fedbicross-1").entries[1]
    assert one_shot.plan(tree, line, one_shot.cell(Path("bloodmnist.npz"), 0.3, 1), "h").id == KNOWN["one-shot"]


KNOWN = {"fedkper": "01cac6e35292", "fedmp": "eb8a4230c41c", "one-shot": "128abb95a126"}


def test_images_of_ones_own_take_a_sets_place(tmp_path: Path) -> None:
    blood(tmp_path / "oct3.npz")
    own = blood(tmp_path / "elsewhere" / "scans.npz")
    (part,) = chosen("fedbicross-1", tmp_path, datasets=["oct3", str(own)], levels=[0.1], sites=[5], methods=["local"])
    assert [plan.cell.place["set"] for plan in part.plans[:2]] == ["oct3", "scans"]
    (drawn,) = chosen("fedmp-1", tmp_path, datasets=["phantoms:60"], methods=["fedmp"], seeds=[0])
    settings = drawn.plans[0].settings
    assert (settings.data.source, settings.model.name, settings.data.size) == ("phantoms:60", "resnet18", None)


def test_a_file_that_is_called_as_drawn_images_is_a_file(tmp_path: Path) -> None:
    """It is found where it lies, and an entry of other content is another entry."""
    ids = []
    for images in ("one", "two"):
        own = blood(tmp_path / images / "phantoms_scans.npz")
        own.write_bytes(own.read_bytes() + images.encode())
        (part,) = chosen("fedmp-1", tmp_path, datasets=[str(own)], methods=["fedmp"], seeds=[0])
        assert part.plans[0].settings.data.source == str(own)
        ids.append(part.plans[0].id)
    assert ids[0] != ids[1]


def test_fedmps_own_sets_have_the_papers_network_and_places(tmp_path: Path) -> None:
    for name in ("tb", "busi"):
        (tmp_path / f"{name}.csv").write_text("path,label,site\n")
    first, second = chosen("fedmp-1", tmp_path, datasets=["tb", "busi"], methods=["fedmp"], seeds=[0])
    tb, busi = first.plans[0].settings, second.plans[0].settings
    assert (tb.model.name, tb.model.stem, tb.data.size) == ("resnet50", "imagenet", 256)
    assert (tb.data.partition, tb.data.sites) == ("natural", 0)
    assert (busi.data.partition, busi.data.sites, busi.data.shift) == ("iid", 5, "none")


def test_what_is_missing_is_left_out_and_named(tmp_path: Path) -> None:
    blood(tmp_path / "bloodmnist.npz")
    found, missing = parts(table("fedkper-1"), Choice(seeds=[0]), tmp_path, "cpu")
    assert [part.head["set"] for part in found] == ["bloodmnist"]
    assert len(missing) == 2
    assert missing[0].startswith(f"organsmnist: {tmp_path}/organsmnist.npz is missing: wardround data get organsmnist")


@pytest.mark.parametrize(
    ("id", "choice", "message"),
    [
        ("fedbicross-1", {}, "no images of fedbicross-1 are at hand: bloodmnist: .* is missing"),
        (
            "fedbicross-1",
            {"datasets": ["bllod", "blood", "drema", "bllod"]},
            "'bllod', 'drema': no set of fedbicross-1 .* and no file; check the name",
        ),
        ("fedbicross-1", {"levels": [0.4]}, "--alphas 0.4 is not in fedbicross-1; choose from 0.1, 0.2, 0.3, 0.5"),
        ("fedbicross-1", {"methods": ["fedmp"]}, "'fedmp' is not in fedbicross-1; choose from majority, "),
        ("fedbicross-fig3", {}, "nothing is run for fedbicross-fig3; Every run of a method that makes images"),
        ("fedmp-5", {}, "nothing is run for fedmp-5; docs/audit.md"),
    ],
)
def test_bad_choices_are_told(id: str, choice: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        chosen(id, tmp_path, **choice)


def test_a_number_of_sites_that_is_not_in_the_table_is_told(tmp_path: Path) -> None:
    blood(tmp_path / "bloodmnist.npz")
    with pytest.raises(BadInput, match="--sites 7 is not in fedbicross-1; choose from 5, 10, 20"):
        chosen("fedbicross-1", tmp_path, datasets=["blood"], sites=[7])


def test_results_of_other_settings_get_a_file_of_their_own(tmp_path: Path) -> None:
    blood(tmp_path / "bloodmnist.npz")
    found = chosen("fedbicross-1", tmp_path, datasets=["blood"], sites=[5, 10], methods=["local"], seeds=[0])
    folder = tmp_path / "papers"
    for part, name in zip(found, ("one_shot_grid.json", "one_shot_grid-2.json"), strict=True):
        results = open_results(part, folder)
        assert results.path == folder / name
        results.add(part.plans[0], {"figures": {"local_accuracy": 0.5}, "seconds": 1.0}, {})
        assert open_results(part, folder).path == folder / name
        summary = json.loads(results.path.read_text())["summary"]
        assert [(row["set"], row["entry"], row["mean"]["local_accuracy"]) for row in summary] == [
            ("bloodmnist", "local", 0.5)
        ]
    with pytest.raises(BadInput, match="holds results of another preset or other settings"):
        open_results(found[1], folder / "one_shot_grid.json")


def test_results_that_do_not_say_their_settings_are_refused(tmp_path: Path) -> None:
    blood(tmp_path / "bloodmnist.npz")
    (part,) = chosen("fedbicross-1", tmp_path, datasets=["blood"], sites=[5], methods=["local"])
    file = tmp_path / "grid.json"
    file.write_text(json.dumps({"benchmark": "one_shot_grid", "recipes": {}, "cells": [], "entries": []}))
    with pytest.raises(BadInput, match="holds results of another preset or other settings; use another --out"):
        open_results(part, file)
