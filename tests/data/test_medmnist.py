"""MedMNIST files: what is read, and each way in which a file can be wrong."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wardround.data.imageset import Dataset
from wardround.data.medmnist import OFFICIAL, official_name, read_medmnist
from wardround.errors import BadInput

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


PARTS = {"train": 6, "val": 2, "test": 3}


def arrays(**changes: Any) -> dict[str, Any]:
    """A right file of 6, 2 and 3 grey images of 4x4 in two classes, with some arrays changed (None: left out)."""
    whole: dict[str, Any] = {}
    for part, n in PARTS.items():
        whole[f"{part}_images"] = np.arange(n * 16, dtype=np.uint8).reshape(n, 4, 4)
        whole[f"{part}_labels"] = (np.arange(n, dtype=np.uint8) % 2)[:, None]
    return {name: array for name, array in (whole | changes).items() if array is not None}


def write(folder: Path, stem: str = "mine", /, **changes: Any) -> Path:
    path = folder / f"{stem}.npz"
    np.savez(path, **arrays(**changes))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        read_medmnist(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_grey_images(tmp_path: Path) -> None:
    data = read_medmnist(write(tmp_path))
    assert data.name == "mine"
    assert data.train.images.shape == (6, 1, 4, 4)
    assert data.train.images[1].flatten().tolist() == list(range(16, 32))
    assert data.train.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert data.train.classes == ("class 0", "class 1")
    assert data.val is not None
    assert len(data.val) == 2
    assert data.test.labels.tolist() == [0, 1, 0]
    assert data.train.sites is None
    assert data.train.patients is None
    assert data.provenance == "mine.npz: 6 train, 2 val, 3 test images of 4x4"


def test_colour_images_become_channels_first(tmp_path: Path) -> None:
    colour: dict[str, Any] = {
        f"{part}_images": np.arange(n * 12, dtype=np.uint8).reshape(n, 2, 2, 3) for part, n in PARTS.items()
    }
    train = read_medmnist(write(tmp_path, **colour)).train
    assert train.images.shape == (6, 3, 2, 2)
    assert train.images[0, 0].tolist() == [[0, 3], [6, 9]]  # red is every third byte
    assert train.images.is_contiguous()


def test_flat_labels_and_a_last_axis_of_one(tmp_path: Path) -> None:
    shaped: dict[str, Any] = {f"{part}_images": np.zeros((n, 4, 4, 1), np.uint8) for part, n in PARTS.items()}
    train = read_medmnist(write(tmp_path, **shaped, train_labels=np.array([2, 1, 0, 2, 1, 0]))).train
    assert train.labels.tolist() == [2, 1, 0, 2, 1, 0]
    assert train.channels == 1
    assert len(train.classes) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"val_images": None, "val_labels": None},
        {"val_images": np.zeros((0, 4, 4), np.uint8), "val_labels": np.zeros((0, 1), np.uint8)},
    ],
)
def test_validation_may_be_missing_or_empty(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read_medmnist(write(tmp_path, **changes)).val is None


def test_a_class_only_in_the_test_part_counts(tmp_path: Path) -> None:
    data = read_medmnist(write(tmp_path, test_labels=np.array([4, 0, 1])))
    assert len(data.train.classes) == len(data.test.classes) == 5


@pytest.mark.parametrize("stem", ["bloodmnist", "bloodmnist_64", "BloodMNIST_224"])
def test_official_names_give_published_classes(tmp_path: Path, stem: str) -> None:
    classes = read_medmnist(write(tmp_path, stem)).train.classes
    assert len(classes) == 8
    assert classes[7] == "platelet"


def test_the_published_sets() -> None:
    assert {name: (official.channels, len(official.classes)) for name, official in OFFICIAL.items()} == {
        "pathmnist": (3, 9),
        "dermamnist": (3, 7),
        "octmnist": (1, 4),
        "pneumoniamnist": (1, 2),
        "retinamnist": (3, 5),
        "breastmnist": (1, 2),
        "bloodmnist": (3, 8),
        "tissuemnist": (1, 8),
        "organamnist": (1, 11),
        "organcmnist": (1, 11),
        "organsmnist": (1, 11),
    }
    assert official_name("Blood") == official_name("BloodMNIST") == "bloodmnist"


def test_text_ids_are_numbered_alike_in_all_parts(tmp_path: Path) -> None:
    data = read_medmnist(
        write(
            tmp_path,
            train_site=np.array(["Basel", "Ulm", "Basel", "Ulm", "Ulm", "Ulm"]),
            val_site=np.array(["Ulm", "Aachen"]),
            test_site=np.array(["Basel", "Basel", "Graz"]),
        )
    )
    assert data.train.sites is not None
    assert data.train.sites.tolist() == [1, 3, 1, 3, 3, 3]
    assert data.val is not None
    assert data.val.sites is not None
    assert data.val.sites.tolist() == [3, 0]
    assert data.test.sites is not None
    assert data.test.sites.tolist() == [1, 1, 2]
    assert data.provenance.endswith("; sites 0 = Aachen, 1 = Basel, 2 = Graz, 3 = Ulm")
    assert data.site_names == ("Aachen", "Basel", "Graz", "Ulm")


def test_sites_by_number_keep_their_numbers_as_names(tmp_path: Path) -> None:
    data = read_medmnist(write(tmp_path, train_site=np.array([70, 9, 9, 9, 70, 70]), test_site=np.array([9, 70, 500])))
    assert data.train.sites is not None
    assert data.train.sites.tolist() == [1, 0, 0, 0, 1, 1]
    assert data.site_names == ("9", "70", "500")
    assert "sites" not in data.provenance


@pytest.mark.parametrize("key", ["patient", "patient_id", "lesion", "lesion_id"])
def test_images_that_belong_together(tmp_path: Path, key: str) -> None:
    ids: dict[str, Any] = {
        f"train_{key}": np.array([70, 70, 9, 9, 500, 9]),
        f"test_{key}": np.array([[500], [70], [8]], np.uint16),
    }
    data = read_medmnist(write(tmp_path, **ids))
    assert data.train.patients is not None
    assert data.train.patients.tolist() == [2, 2, 1, 1, 3, 1]
    assert data.test.patients is not None
    assert data.test.patients.tolist() == [3, 2, 0]
    assert data.val is not None
    assert data.val.patients is None


def test_a_patient_is_wider_than_a_lesion(tmp_path: Path) -> None:
    ids: dict[str, Any] = {"train_lesion": np.arange(6), "train_patient": np.array([0, 0, 0, 1, 1, 1])}
    patients = read_medmnist(write(tmp_path, **ids)).train.patients
    assert patients is not None
    assert patients.tolist() == [0, 0, 0, 1, 1, 1]


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.text("abé", max_size=3), min_size=11, max_size=11))
def test_numbered_ids_group_as_the_text_does(tmp_path: Path, ids: list[str]) -> None:
    text = np.array(ids, dtype="U3")
    data = read_medmnist(write(tmp_path, train_site=text[:6], val_site=text[6:8], test_site=text[8:]))
    assert data.val is not None
    found = [part.sites for part in (data.train, data.val, data.test)]
    numbers = torch.cat([sites for sites in found if sites is not None])
    assert set(numbers.tolist()) == set(range(len(set(ids))))
    assert len(set(zip(ids, numbers.tolist(), strict=True))) == len(set(ids))


def test_missing_file(tmp_path: Path) -> None:
    assert "check the path" in refusal(tmp_path / "mine.npz")
    assert "`wardround data get bloodmnist`" in refusal(tmp_path / "bloodmnist.npz")
    assert "`wardround data get bloodmnist --size 64`" in refusal(tmp_path / "bloodmnist_64.npz")


def test_a_folder_or_another_kind_of_file(tmp_path: Path) -> None:
    assert "not an .npz file" in refusal(tmp_path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    assert "not an .npz file" in refusal(tmp_path / "one.npy")
    (tmp_path / "text.npz").write_text("hello")
    assert "not an .npz file" in refusal(tmp_path / "text.npz")


def test_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    assert "download it again" in refusal(path)


def test_a_member_that_is_no_array(tmp_path: Path) -> None:
    path = write(tmp_path, train_labels=None)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("train_labels", b"0 1 0 1 0 1")
    assert "train_labels" in refusal(path)


def test_object_arrays_are_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    path = write(tmp_path, train_patient=np.array([Trap()] * 6, dtype=object))
    assert "never unpickled" in refusal(path)
    assert not (tmp_path / "sprung").exists()


CASES: list[tuple[dict[str, Any], str]] = [
    ({"train_images": None}, "lacks train_images"),
    ({"test_labels": None, "test_images": None}, "lacks test_images, test_labels"),
    ({"val_labels": None}, "lacks val_labels"),
    ({"train_images": np.full((6, 4, 4), np.nan, np.float32)}, "not numbers"),
    ({"train_images": np.full((6, 4, 4), np.inf)}, "not numbers"),
    ({"train_images": np.zeros((6, 4, 4), np.float32)}, "float32; store 8-bit"),
    ({"test_images": np.zeros((3, 4, 4), np.uint16)}, "uint16; store 8-bit"),
    ({"train_images": np.zeros((6, 4, 4, 4), np.uint8)}, r"shape \(6, 4, 4, 4\)"),
    ({"train_images": np.zeros((6, 16), np.uint8)}, r"shape \(6, 16\)"),
    ({"train_images": np.zeros((6, 4, 5), np.uint8)}, "4x5"),
    ({"train_images": np.zeros((6, 5, 5), np.uint8)}, "different shapes"),
    ({"train_images": np.uint8(3)}, "one entry per image"),
    ({"train_labels": np.zeros((5, 1), np.uint8)}, "6 images but 5 labels"),
    ({"train_images": np.zeros((0, 4, 4), np.uint8), "train_labels": np.zeros(0, np.uint8)}, "is empty"),
    ({"test_images": np.zeros((0, 4, 4), np.uint8), "test_labels": np.zeros(0, np.uint8)}, "is empty"),
    ({"train_labels": np.zeros((6, 14), np.uint8)}, "several labels per image"),
    ({"train_labels": np.array([0, 1, 0, 1, 0, 0.5])}, "float64; store whole numbers"),
    ({"train_labels": np.array(["a", "b", "a", "b", "a", "b"])}, "store whole numbers"),
    ({"train_labels": np.array([0, 1, -1, 1, 0, 1])}, "from -1 to 1"),
    ({"test_labels": np.array([0, 1, 2**63], np.uint64)}, f"to {2**63}"),
    ({"test_labels": np.array([0, 1, 11])}, "label 11 but fewer images"),
    ({"train_site": np.zeros(5, np.int64)}, "5 ids for 6 images"),
    ({"train_site": np.zeros(6)}, "float64 of shape"),
    ({"train_patient": np.zeros((6, 2), np.int64)}, r"shape \(6, 2\)"),
    ({"train_site": np.zeros(6, np.int64), "test_site": np.array(["a", "b", "c"])}, "text in one part"),
]


@pytest.mark.parametrize(("changes", "says"), CASES, ids=[says for _, says in CASES])
def test_wrong_arrays(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(BadInput, match=says):
        read_medmnist(path)
    assert "\n" not in refusal(path)


def test_a_label_beyond_the_published_classes(tmp_path: Path) -> None:
    assert "breastmnist has 2 classes" in refusal(write(tmp_path, "breastmnist", test_labels=np.array([0, 1, 2])))


def test_chestmnist_is_refused(tmp_path: Path) -> None:
    assert "several labels at once" in refusal(write(tmp_path, "chestmnist_64"))
    assert read_medmnist(write(tmp_path, "chest")).name == "chest"


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays())
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(content)
    message = ""
    try:
        read_medmnist(path)
    except BadInput as error:
        message = str(error)
    assert "\n" not in message


def shared(stem: str) -> Dataset:
    path = SHARED / f"{stem}.npz"
    if not path.exists():
        pytest.skip(f"no {path.name} in ../shared/data beside the checkout")
    return read_medmnist(path)


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("stem", "counts", "classes", "channels"),
    [
        ("bloodmnist", (11959, 1712, 3421), 8, 3),
        ("dermamnist", (7007, 1003, 2005), 7, 3),
        ("oct3", (9934, 785, 750), 3, 1),
        ("breastmnist", (546, 78, 156), 2, 1),
        ("wbc_sites", (1519, 233, 583), 4, 3),
    ],
)
def test_real_files(stem: str, counts: tuple[int, int, int], classes: int, channels: int) -> None:
    data = shared(stem)
    assert data.val is not None
    assert (len(data.train), len(data.val), len(data.test)) == counts
    assert (len(data.train.classes), data.train.channels, data.train.size) == (classes, channels, 28)


@pytest.mark.shared_data
def test_real_sites_lesions_and_patients() -> None:
    for stem in ("wbc_sites", "dermamnist"):
        data = shared(stem)
        assert data.train.sites is not None
        assert set(data.train.sites.tolist()) == {0, 1, 2, 3}
    derma, oct3 = shared("dermamnist"), shared("oct3")
    assert derma.train.patients is not None
    assert derma.test.patients is not None
    assert set(derma.train.patients.tolist()) & set(derma.test.patients.tolist())  # as the official split has it
    assert oct3.train.patients is not None
    assert oct3.test.patients is not None
    assert not set(oct3.train.patients.tolist()) & set(oct3.test.patients.tolist())
