"""Near duplicates, against the plain definition of a correlation; and the groups that a table of its own gives."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from wardround.data import likeness
from wardround.data.groups import read_groups
from wardround.data.likeness import NEAR, described, like_across, near_pairs, thumbnails
from wardround.data.looks import thumbnail
from wardround.data.medmnist import read_medmnist
from wardround.errors import BadInput


def smooth(n: int, seed: int = 0, side: int = 64) -> np.ndarray:
    """Different pictures with structure, as an X-ray has it."""
    coarse = np.random.default_rng(seed).integers(0, 256, (n, 6, 6), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(c).resize((side, side), Image.Resampling.BICUBIC)) for c in coarse])


def test_a_thumbnail_is_the_mean_of_what_it_covers() -> None:
    picture = np.random.default_rng(1).integers(0, 256, (64, 32), dtype=np.uint8)
    expected = picture.reshape(16, 4, 16, 2).mean(axis=(1, 3))
    assert np.abs(thumbnail(picture).astype(float) - expected).max() <= 1  # rounded twice, rows and columns
    grey = torch.from_numpy(np.stack([picture[:32]] * 2)[:, None])
    colour = grey.expand(-1, 3, -1, -1)
    assert np.array_equal(thumbnails(colour), thumbnails(grey))


def test_pairs_are_those_of_the_plain_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    thumbs = np.stack([thumbnail(p) for p in smooth(60)])
    thumbs[7], thumbs[33], thumbs[59] = thumbs[2], thumbs[2] // 2 + 10, thumbs[40]
    flat = thumbs.reshape(60, -1).astype(np.float64)
    alike = (flat - flat.mean(axis=1, keepdims=True)) / flat.std(axis=1, keepdims=True)
    plain = np.corrcoef(alike - alike.mean(axis=0))
    expected = [(i, j) for i in range(60) for j in range(i + 1, 60) if plain[i, j] >= NEAR]
    monkeypatch.setattr(likeness, "BLOCK", 13)
    assert [tuple(pair) for pair in sorted(near_pairs(described(thumbs)).tolist())] == expected
    assert set(expected) == {(2, 7), (2, 33), (7, 33), (40, 59)}
    assert like_across(thumbs[50:], thumbs[:50]).tolist() == [9]
    monkeypatch.setattr(likeness, "MOST_PAIRS", 1)
    assert len(near_pairs(described(thumbs))) == 1


def test_copies_are_found_and_other_pictures_are_not(tmp_path: Path) -> None:
    pictures = list(smooth(80))
    Image.fromarray(pictures[3]).save(tmp_path / "again.jpg", quality=70)
    copies = [
        np.asarray(Image.open(tmp_path / "again.jpg")),
        np.asarray(Image.fromarray(pictures[4]).resize((48, 48))),
        np.clip(pictures[5].astype(float) * 0.9 + 12, 0, 255).astype(np.uint8),
    ]
    thumbs = np.stack([thumbnail(p) for p in [*pictures, *copies]])
    assert sorted(map(tuple, near_pairs(described(thumbs)).tolist())) == [(3, 80), (4, 81), (5, 82)]


def test_a_brighter_copy_is_found_among_pictures_that_all_look_alike() -> None:
    common = smooth(1, seed=9)[0].astype(float)
    pictures = [(0.8 * common + 0.1 * own).astype(np.uint8) for own in smooth(80)]
    brighter = [(picture * 0.8 + 30).astype(np.uint8) for picture in pictures[:5]]
    thumbs = np.stack([thumbnail(p) for p in [*pictures, *brighter]])
    assert sorted(map(tuple, near_pairs(described(thumbs)).tolist())) == [(i, 80 + i) for i in range(5)]


def test_flat_pictures_are_like_nothing() -> None:
    assert near_pairs(described(np.full((60, 16, 16), 9, np.uint8))).tolist() == []


# Groups ---------------------------------------------------------------------------------------------------------------


def groups(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_table_says_whose_the_images_are(tmp_path: Path) -> None:
    lines = ["split,index,image_id,lesion_id", "test,0,ISIC_2,HAM_7", "train,1,ISIC_9,HAM_7", "train,0,ISIC_1,HAM_3"]
    found = read_groups(groups(tmp_path / "g.csv", lines), {"train": 2, "test": 1})
    assert {part: ids.tolist() for part, ids in found.items()} == {"train": [0, 1], "test": [1]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["split,index", "train,0"], "needs the columns split, index and one of patient, patient_id"),
        (["split,index,patient", "train,0,a", "train,0,b"], "line 3 names image 0 of train again"),
        (["split,index,patient", "train,0,a"], "does not say whose image 1 of train is"),
        (["split,index,patient", "train,2,a"], "line 2 has no split, index and group"),
        (["split,index,patient", "train,-1,a"], "line 2 has no split"),
        (["split,index,patient", "other,0,a"], "line 2 has no split"),
        (["split,index,patient", "train,0"], "line 2 has no split"),
        (["split,index,patient", 'train,0,"a'], "is no CSV"),
    ],
)
def test_bad_groups(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_groups(groups(tmp_path / "g.csv", lines), {"train": 2})
    with pytest.raises(BadInput, match="cannot be read"):
        read_groups(tmp_path / "gone.csv", {"train": 2})


def test_dermamnists_shared_lesions_are_said(tmp_path: Path) -> None:
    pictures = smooth(60, side=28)
    parts = {"train": pictures[:40], "val": pictures[40:45], "test": np.concatenate([pictures[45:], pictures[2:4]])}
    arrays = {f"{part}_images": np.stack([p] * 3, axis=3) for part, p in parts.items()}
    arrays |= {f"{part}_labels": np.arange(len(p)) % 7 for part, p in parts.items()}
    for name in ("dermamnist", "dermamnist_64", "other"):
        np.savez(tmp_path / f"{name}.npz", **arrays)
    (note,) = read_medmnist(tmp_path / "dermamnist.npz").notes
    assert "Scientific Data 12:196, 2025" in note
    assert "2 test images have a near duplicate in training" in note
    assert len(read_medmnist(tmp_path / "dermamnist_64.npz").notes) == 1
    assert read_medmnist(tmp_path / "other.npz").notes == ()
    lines = ["split,index,lesion_id"] + [f"{part},{i},{part}{i}" for part, p in parts.items() for i in range(len(p))]
    known = read_medmnist(tmp_path / "dermamnist.npz", groups(tmp_path / "g.csv", lines))
    assert known.notes == ()
    assert known.test.patients is not None
