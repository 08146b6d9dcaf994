"""No patient in two parts, by default; and what is said where somebody else's parts share patients."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.test_federate import dataset, images, toy
from dicoms import write_dicom
from wardround.cli import main
from wardround.data.federate import federate, federate_files
from wardround.data.federation import Federation
from wardround.data.imageset import ImageSet
from wardround.data.partition import Partition
from wardround.data.sources import load
from wardround.data.splits import Splits
from wardround.errors import BadInput

LABELS = [0, 1, 2, 0] * 25
PATIENTS = [i // 4 for i in range(100)]


def patients_of(federation: Federation) -> list[set[int]]:
    parts = [p for site in federation.sites for p in (site.train, site.val, site.test.images)]
    return [set(p.patients.tolist()) for p in parts if p.patients is not None]


def test_patients_stay_whole_unless_that_is_turned_off() -> None:
    data = dataset(images(LABELS, patients=PATIENTS), None, toy().test)
    federation, _ = federate(data, rule="iid", sites=4, test="own")
    seen = patients_of(federation)
    assert sum(map(len, seen)) == len(set().union(*seen)) == 25
    assert "no patient in two sites" in federation.partition_rule
    assert federation.provenance.endswith("for validation, no patient in both parts")
    assert federation.notes == ()
    split, dealt = federate(data, rule="iid", sites=4, test="own", by_patient=False)
    assert sum(map(len, patients_of(split))) > 25
    places = [set(np.array(PATIENTS)[index].tolist()) for index in dealt.sites]
    several = sum(sum(p in place for place in places) > 1 for p in range(25))
    assert split.notes == (f"{several} patients (or lesions) have images at several sites",)
    assert "no patient" not in split.provenance + split.partition_rule + split.local_protocol


def test_natural_sites_and_a_file_are_facts_that_are_noted(tmp_path: Path) -> None:
    train = images([0, 1] * 8, sites=[0] * 8 + [1] * 8, patients=[i // 2 for i in range(15)] + [0], classes=2)
    data = dataset(train, None, images([0, 1] * 2, sites=[0, 0, 1, 1], patients=[0, 1, 30, 31], classes=2))
    noted = (
        "2 patients (or lesions) are in both training and test, with 2 of the 4 test images: accuracies on these parts "
        "are too good",
        "1 patients (or lesions) have images at several sites",
    )
    federation, dealt = federate(data, rule="natural", sites=0, test="natural")
    assert federation.notes == noted
    with pytest.raises(BadInput, match="patient 0 has images in sites 1 and 2"):
        federate(data, rule="natural", sites=0, test="natural", by_patient=True)
    path = tmp_path / "partition.json"
    dealt.save(path)
    again, _ = federate(data, rule="iid", sites=2, partition_file=path)
    assert again.notes == noted
    assert Partition.load(path).sha256 == again.partition_hash


def test_each_file_is_split_by_its_own_patients() -> None:
    train = images([0, 1, 2] * 8, patients=[i // 6 for i in range(24)])
    known = dataset(train, None, images([0, 1, 2], patients=[3, 9, 9]))
    federation, _ = federate_files({"north": known, "south": toy()}, val_share=0.3)
    north = federation.sites[0]
    assert north.train.patients is not None and north.val.patients is not None  # noqa: PT018
    assert not set(north.train.patients.tolist()) & set(north.val.patients.tolist())
    assert federation.notes == (
        "north: 1 patients (or lesions) are in both training and test, with 1 of the 3 test images: accuracies on "
        "these parts are too good",
    )
    with pytest.raises(BadInput, match="south has no patient ids"):
        federate_files({"north": known, "south": toy()}, by_patient=True)


def test_rules_that_split_patients_say_how_to_go_on() -> None:
    data = dataset(images(LABELS, patients=PATIENTS), None, toy().test)
    for how in ({"rule": "shards"}, {"rule": "iid", "test": "balanced"}):
        with pytest.raises(BadInput, match=r"splits patients; .* set data\.by_patient=false"):
            federate(data, sites=2, **how)  # type: ignore[arg-type]
        federate(data, sites=2, by_patient=False, **how)  # type: ignore[arg-type]


def test_a_site_without_ids_splits_by_image() -> None:
    plain = ImageSet(torch.zeros(10, 1, 2, 2, dtype=torch.uint8), torch.zeros(10, dtype=torch.int64), ("a", "b"))
    assert [len(part) for part in Splits().split("site-1", plain)[:2]] == [9, 1]


def test_a_drawn_test_share_follows_the_setting(tmp_path: Path) -> None:
    lines = ["path,label,patient"]
    for i in range(40):
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{'ab'[i % 2]},{i // 4}")
    (tmp_path / "t.csv").write_text("\n".join(lines))
    shared = {}
    for by_patient in (True, False):
        data = load(str(tmp_path / "t.csv"), tmp_path, by_patient=by_patient)
        assert data.train.patients is not None and data.test.patients is not None  # noqa: PT018
        shared[by_patient] = set(data.train.patients.tolist()) & set(data.test.patients.tolist())
    assert shared[True] == set()
    assert len(shared[False]) > 3


def test_a_run_says_it_in_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    parts = {}
    for part, n in (("train", 60), ("test", 20)):
        parts[f"{part}_images"] = rng.integers(0, 256, (n, 8, 8), dtype=np.uint8)
        parts[f"{part}_labels"] = np.arange(n) % 2
        parts[f"{part}_patient"] = np.arange(n) // 4
    np.savez(tmp_path / "scans.npz", **parts)
    flags = ["--data", str(tmp_path / "scans.npz"), "--sites", "2", "--partition", "iid", "--quiet", "--out"]
    assert main(["run", "--method", "majority", *flags, str(tmp_path / "run")]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["data"]["partition_rule"] == "IID, no patient in two sites, 2 sites, partition seed 0"
    text = "5 patients (or lesions) are in both training and test, with 20 of the 20 test images"
    assert [note["method"] for note in result["notes"] if note["text"].startswith(text)] == ["data"]
    assert f"note (data): {text}" in " ".join(capsys.readouterr().out.split())


# Slices ---------------------------------------------------------------------------------------------------------------


def test_slices_from_the_command_line(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(24):
        write_dicom(tmp_path / "films" / "ab"[i % 2] / f"{i}.dcm", rng.integers(0, 99, (3, 8, 8), dtype=np.uint8))
    flags = [
        "run",
        "--method",
        "majority",
        "--data",
        str(tmp_path / "films"),
        "--sites",
        "2",
        "--partition",
        "iid",
        "-q",
    ]
    flags += ["--set", "data.folder=" + str(tmp_path), "--set", "data.by_patient=false", "--out", str(tmp_path / "run")]
    assert main(flags) == 2
    assert main([*flags, "--set", "data.slices=most"]) == 2
    assert main([*flags, "--set", "data.slices=all"]) == 0
    sites = json.loads((tmp_path / "run" / "result.json").read_text())["data"]["sites"]
    assert sum(site["train"] + site["val"] for site in sites) + sites[0]["test"] == 72
