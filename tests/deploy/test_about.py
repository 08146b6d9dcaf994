from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from deploy.samples import ABOUT, TASK
from wardround import __version__
from wardround.deploy.about import (
    LONGEST,
    MOST_NOTES,
    NORMALISATION,
    Measured,
    ModelAbout,
    Task,
    about_study,
    kept_notes,
    parsed,
)
from wardround.errors import BadInput
from wardround.learn.pixels import normalise
from wardround.measure import headlines
from wardround.methods.fedavg import FedAvg


def test_the_normalisation_is_the_one_that_networks_were_trained_with() -> None:
    pixels = torch.arange(256).reshape(256, 1, 1, 1)
    assert NORMALISATION == "pixels / 127.5 - 1"
    assert torch.allclose(normalise(pixels.to(torch.uint8)), pixels / 127.5 - 1, atol=1e-6)


def test_what_a_study_says_of_its_models() -> None:
    study = tiny.study(method="fedavg", seed=7)
    about = about_study(study, "site-2", 8, label_counts=[2, 2, 2, 2])
    assert about.task == Task(classes=tiny.CLASSES, channels=3, size=8)
    assert about.origin.model_dump() == {
        "study": study.id,
        "study_id": study.id,
        "method": "fedavg",
        "site": "site-2",
        "seed": 7,
        "program": __version__,
    }
    assert (about.images, about.label_counts) == (8, (2, 2, 2, 2))
    assert about.method_summary == FedAvg.summary
    assert about_study(tiny.study(name="lungs"), "shared", 1).origin.study == "lungs"
    assert about_study(tiny.study(name="lungs"), "shared", 1, name="agreed").origin.study == "agreed"
    assert about_study(study, "shared", 1).label_counts is None


def test_notes_are_kept_once_and_within_limits() -> None:
    assert kept_notes(["b", "a", "", "b"]) == ("b", "a")
    assert kept_notes(["x" * LONGEST, "y" * (LONGEST + 1)]) == ("x" * LONGEST, "y" * (LONGEST - 1) + "…")
    assert kept_notes(map(str, range(MOST_NOTES + 1))) == tuple(map(str, range(MOST_NOTES)))
    about = about_study(tiny.study(), "a", 1, notes=["z" * 2 * LONGEST, *map(str, range(2 * MOST_NOTES))])
    assert (len(about.notes[0]), len(about.notes)) == (LONGEST, MOST_NOTES)
    assert about_study(tiny.study(), "a", 1).notes == ()


def test_a_run_has_notes_of_each_site_as_the_page_says(tmp_path: Path) -> None:
    """`docs/deploy.md` picks those of a site by how they begin."""
    result = tiny.coordinate(tmp_path / "run", tiny.quick("consult"))
    for site in ("site-1", "site-2", "site-3"):
        own = [note["text"] for note in result["notes"] if note["text"].startswith(f"{site} ")]
        about = about_study(tiny.study(method="consult"), site, 1, notes=own)
        assert [note.split()[1] for note in about.notes] in (["takes"], ["keeps"])


def test_headlines_become_figures_and_those_without_a_value_do_not() -> None:
    row = {"method": "m", "seed": 0, "site": "a", "round": 0, "split": "local", "model": "personal", "n": 5}
    found = headlines([{**row, "metric": "accuracy", "value": 0.75}], "m", ["a"], "its own five", "none")
    about = about_study(tiny.study(), "a", 1, found)
    assert [(figure.label, figure.value) for figure in about.accuracies] == [
        ("Local accuracy", 0.75),
        ("Worst site", 0.75),
        ("Bottom decile", 0.75),
    ]
    assert about.accuracies[0].definition.endswith("Local test: its own five.")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"classes": ("a",)}, "task.classes"),
        ({"classes": ("a", "a")}, "two classes have the same name"),
        ({"classes": ("a", "")}, "task.classes.1"),
        ({"classes": ("a", "b" * 256)}, "task.classes.1"),
        ({"channels": 2}, "task.channels"),
        ({"size": 0}, "task.size"),
        ({"size": 4097}, "task.size"),
        ({"normalisation": "none"}, "task.normalisation"),
        ({"colour": "red"}, "task.colour"),
    ],
)
def test_a_record_that_is_not_ours_is_refused_in_one_line(change: dict[str, Any], says: str) -> None:
    tree = {**ABOUT.model_dump(), "task": {**TASK.model_dump(), **change}}
    with pytest.raises(BadInput) as caught:
        parsed(ModelAbout, tree, "card.json")
    assert str(caught.value).startswith("card.json is not as wardround writes it (task")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tree", [None, [], 3, "text"])
def test_what_is_no_record_at_all(tree: Any) -> None:
    with pytest.raises(BadInput, match=r"not as wardround writes it \(the record: "):
        parsed(ModelAbout, tree, "it")


def test_counts_must_be_of_these_classes() -> None:
    with pytest.raises(BadInput, match="3 label counts do not fit 2 classes"):
        parsed(ModelAbout, {**ABOUT.model_dump(), "label_counts": (1, 2, 3)}, "it")


def test_a_figure_is_a_number() -> None:
    for value in (float("nan"), float("inf"), None):
        with pytest.raises(BadInput, match="value"):
            parsed(Measured, {"label": "a", "value": value, "definition": "b"}, "it")
