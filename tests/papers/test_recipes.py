"""The recipes of `docs/data`: each snippet is run on a few made-up files, and its table is read as a study reads it."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wardround.data.sources import load
from wardround.papers.datasets import DATASETS

PAGES = sorted((Path(__file__).parents[2] / "docs" / "data").glob("*.md"))
SITES = ("aptos", "idrid", "retino")


def snippet(writes: str) -> str:
    """The snippet that writes a table."""
    blocks = [b for page in PAGES for b in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)]
    (found,) = [block for block in blocks if f'"{writes}"' in block]
    return found


def picture(path: str, value: int = 0) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((12, 10, 3), value, dtype=np.uint8)).save(path)


def listed(path: str, *rows: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("\n".join(rows) + "\n")


def tb() -> None:
    for n in range(5):
        for sick in (0, 1):
            picture(f"tb/shenzhen/CHNCXR_{n:04d}_{sick}.png")
            picture(f"tb/montgomery/MCUCXR_{n:04d}_{sick}.png", 50)
            picture(f"tb/india/{'np'[sick]}x{n:03d}.jpg", 99)


def covid() -> None:
    for part in ("Train", "Val", "Test"):
        for label in ("COVID-19", "Non-COVID", "Normal"):
            folder = f"covid-qu-ex/Lung Segmentation Data/Lung Segmentation Data/{part}/{label}"
            picture(f"{folder}/images/a.png")
            picture(f"{folder}/lung masks/a.png")


def busi() -> None:
    for label in ("normal", "benign", "malignant"):
        for n in range(5):
            picture(f"busi/{label}/{label} ({n}).png")
            picture(f"busi/{label}/{label} ({n})_mask.png")


def neojaundice() -> None:
    rows = [f"{n}.png,{n // 5},child {n}" for n in range(10)]
    for n in range(10):
        picture(f"neojaundice/images/{n}.png", n)
    listed("neojaundice/labels.csv", "image,label,patient", *rows)


def office() -> None:
    for site in ("amazon", "caltech", "dslr", "webcam"):
        for label in ("bike", "mug"):
            for n in range(5):
                picture(f"office-caltech10/{site}/{label}/{n}.jpg")


def dr() -> None:
    for site in SITES:
        for n in range(10):
            picture(f"dr/{site}/images/{n}.png")
        listed(f"dr/{site}/labels.csv", "image,grade", *(f"{n}.png,{n % 2}" for n in range(10)))


def eyepacs() -> None:
    for part, labels in (("train", "trainLabels"), ("test", "retinopathy_solution")):
        names = [f"{n}_{side}" for n in (1, 2) for side in ("left", "right")]
        for name in names:
            picture(f"eyepacs/{part}/{name}.jpeg")
        listed(f"eyepacs/{labels}.csv", "image,level", *(f"{name},{n % 2}" for n, name in enumerate(names)))


def isic() -> None:
    for n in range(8):
        picture(f"isic/images/ISIC_{n}.jpg")
    rows = [f"ISIC_{n},{n % 2},{n // 2 % 2},{('train', 'test')[n // 4]}" for n in range(8)]
    listed("isic/split.csv", "image,target,center,fold", *rows)


MADE = {  # the table's name: what makes the files; images to train on and to test on; classes; sites
    "tb": (tb, 24, 6, 2, 3),
    "covid-qu-ex": (covid, 3, 3, 3, 0),
    "busi": (busi, 12, 3, 3, 0),
    "neojaundice": (neojaundice, 8, 2, 2, 0),
    "office-caltech10": (office, 32, 8, 2, 4),
    "dr": (dr, 24, 6, 2, 3),
    "eyepacs": (eyepacs, 4, 4, 2, 0),
    "isic": (isic, 4, 4, 2, 0),
    "isic-centres": (isic, 4, 4, 2, 2),
}


@pytest.mark.parametrize("name", MADE)
def test_a_recipe_makes_a_table_that_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, train, test, classes, sites = MADE[name]
    monkeypatch.chdir(tmp_path)
    make()
    exec(compile(snippet(f"{name}.csv"), name, "exec"), {})  # noqa: S102 - the block is ours
    data = load(DATASETS[name].file, tmp_path, size=8)
    assert (len(data.train), len(data.test), len(data.train.classes)) == (train, test, classes)
    found = data.train.sites
    assert (0 if found is None else len(found.unique())) == sites
    assert DATASETS[name].places == bool(sites)


def test_the_table_of_rsna_names_every_dicom_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ("p1,Normal", "p2,Lung Opacity", "p2,Lung Opacity", "p3,No Lung Opacity / Not Normal")
    listed("rsna/stage_2_detailed_class_info.csv", "patientId,class", *rows)
    exec(compile(snippet("rsna.csv"), "rsna", "exec"), {})  # noqa: S102 - the block is ours
    with open("rsna.csv", encoding="utf-8") as file:
        found = [(row["path"], row["label"]) for row in csv.DictReader(file)]
    folder = "rsna/stage_2_train_images"
    assert found == [(f"{folder}/p1.dcm", "normal"), (f"{folder}/p2.dcm", "abnormal"), (f"{folder}/p3.dcm", "abnormal")]
