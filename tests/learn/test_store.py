import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bare_loop import BN, CPU, PLAIN, Distillation, a_fit, images, same, taught_fit
from wardround import tensorfile
from wardround.learn.fit import Fit, Fitted, Objective, Recipe, weights_hash
from wardround.learn.store import FitStore
from wardround.learn.trainer import train_one
from wardround.models import NetSpec, fresh

KEY = "ab" * 32


def a_reusable_fit() -> Fit:
    return replace(a_fit(BN), reusable=True)


# Keys -----------------------------------------------------------------------------------------------------------------


class Named(Objective):
    """An objective that may be reused under a name of its own."""

    key = "named"


def changed() -> dict[str, Fit]:
    """The same fit with one ingredient changed."""
    fit = a_reusable_fit()
    start = {name: tensor.clone() for name, tensor in fit.start.items()}
    start["head.bias"][0] += 1e-6
    pixels, labels = fit.data.images.clone(), fit.data.labels.clone()
    pixels[3, 0, 0, 0] ^= 1
    labels[3] = (labels[3] + 1) % 4
    wider = NetSpec("small", 3, 4, 16, width=4)
    recipes = {
        "epochs": 4,
        "batch": 9,
        "optimiser": "adam",
        "lr": 0.011,
        "momentum": 0.8,
        "weight_decay": 0.0,
        "schedule": "step",
        "milestones": (0.5,),
        "gamma": 0.2,
        "clip_norm": 1.0,
        "augment": True,
        "augmentation": "zoom",
        "checkpointing": True,
        "precision": "bf16",
        "keep": "best",
    }
    assert set(recipes) == set(Recipe.__dataclass_fields__)
    return {
        **{name: replace(fit, recipe=replace(fit.recipe, **{name: value})) for name, value in recipes.items()},  # type: ignore[arg-type]
        "seed": replace(fit, seed=fit.seed + 1),
        "pixel": replace(fit, data=replace(fit.data, images=pixels)),
        "label": replace(fit, data=replace(fit.data, labels=labels)),
        "fewer images": replace(fit, data=fit.data.take(torch.arange(19))),
        "order of images": replace(fit, data=fit.data.take(torch.arange(19, -1, -1))),
        "start": replace(fit, start=start),
        "spec": replace(fit, spec=wider, start=fresh(wider, torch.Generator().manual_seed(0))),
        "frozen": replace(fit, frozen=frozenset({"head.bias"})),
        "validation": replace(fit, validation=images(3)),
        "objective": replace(fit, objective=Named()),
    }


def test_every_ingredient_changes_the_key() -> None:
    keys = {name: fit.key() for name, fit in changed().items()}
    assert None not in keys.values()
    assert len({a_reusable_fit().key(), *keys.values()}) == len(keys) + 1


def test_equal_fits_have_one_key_whoever_asks() -> None:
    fit = a_reusable_fit()
    again = a_reusable_fit()
    renamed = replace(again, label="another method's site", start=dict(reversed(again.start.items())))
    assert fit.key() == again.key() == renamed.key()
    several = [replace(fit, frozen=frozenset(names)) for names in (("a", "b", "c"), ("c", "b", "a"))]
    assert several[0].key() == several[1].key()


def test_fits_that_must_not_be_reused_have_no_key() -> None:
    assert a_fit(BN).key() is None
    assert replace(a_reusable_fit(), objective=Distillation()).key() is None
    taught = replace(taught_fit(augment=False), reusable=True)
    assert taught.key() is None
    assert replace(taught, objective=Objective()).key() is None


def test_the_hash_of_weights_is_that_of_names_shapes_and_values() -> None:
    weights = {"a": torch.zeros(2, 3), "b": torch.tensor(1)}
    others = [
        {"a": torch.zeros(3, 2), "b": torch.tensor(1)},
        {"a": torch.zeros(2, 3), "c": torch.tensor(1)},
        {"a": torch.zeros(2, 3), "b": torch.tensor(2)},
        {"a": torch.zeros(2, 3), "b": torch.tensor(1, dtype=torch.int32)},
        {"a": torch.zeros(2, 3)},
    ]
    assert len({weights_hash(weights), *(weights_hash(other) for other in others)}) == 6
    turned = torch.arange(6.0).reshape(3, 2).T
    assert weights_hash({"a": turned}) == weights_hash({"a": turned.contiguous()})


# The folder -----------------------------------------------------------------------------------------------------------


def test_a_stored_fit_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store, fitted = FitStore(tmp_path / "fits"), train_one(a_fit(BN), CPU)
    assert store.get(KEY) is None
    store.put(KEY, fitted)
    found = FitStore(tmp_path / "fits").get(KEY)
    assert found is not None
    assert same(dict(sorted(found.weights.items())), dict(sorted(fitted.weights.items())))
    assert all(found.weights[name].dtype == tensor.dtype for name, tensor in fitted.weights.items())
    assert replace(found, weights={}) == replace(fitted, weights={})


def test_a_skipped_fit_is_stored_too(tmp_path: Path) -> None:
    store, fitted = FitStore(tmp_path), train_one(a_fit(BN, n=1), CPU)
    store.put(KEY, fitted)
    found = store.get(KEY)
    assert found is not None
    assert (found.trained_on, found.losses, found.skipped) == (0, (), "one image is too few for batch norm")


def test_training_on_from_a_stored_fit_is_training_on_from_the_fit(tmp_path: Path) -> None:
    store, fitted = FitStore(tmp_path), train_one(a_fit(BN), CPU)
    store.put(KEY, fitted)
    found = store.get(KEY)
    assert found is not None
    onward = replace(a_fit(BN), seed=12)
    direct = train_one(replace(onward, start=fitted.weights), CPU)
    assert same(train_one(replace(onward, start=found.weights), CPU).weights, direct.weights)


def test_keys_do_not_share_files(tmp_path: Path) -> None:
    store, one, other = FitStore(tmp_path), train_one(a_fit(BN), CPU), train_one(a_fit(PLAIN), CPU)
    store.put("1" * 64, one)
    store.put("2" * 64, other)
    first, second = store.get("1" * 64), store.get("2" * 64)
    assert first is not None
    assert second is not None
    assert weights_hash(first.weights) == weights_hash(one.weights)
    assert weights_hash(second.weights) == weights_hash(other.weights)


def stored(folder: Path) -> Path:
    FitStore(folder).put(KEY, Fitted({"w": torch.arange(4.0)}, 20, (1.5, 1.0), 1, 0.25))
    (file,) = folder.iterdir()
    return file


def test_a_cleared_store_is_empty_and_can_be_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "fits"
    FitStore(folder).clear()
    stored(folder)
    FitStore(folder).clear()
    assert not folder.exists()
    assert FitStore(folder).get(KEY) is None
    stored(folder)
    assert FitStore(folder).get(KEY) is not None


@pytest.mark.parametrize("damage", ["empty", "half", "garbage", "header", "one bit of a weight"])
def test_a_damaged_file_counts_as_absent_and_can_be_replaced(tmp_path: Path, damage: str) -> None:
    file = stored(tmp_path)
    data = bytearray(file.read_bytes())
    if damage == "one bit of a weight":
        data[-1] ^= 1
    elif damage == "header":
        data[20] ^= 255
    else:
        data = bytearray({"empty": b"", "half": data[: len(data) // 2], "garbage": os.urandom(300)}[damage])
    file.write_bytes(data)
    assert FitStore(tmp_path).get(KEY) is None
    assert not file.exists()
    stored(tmp_path)
    found = FitStore(tmp_path).get(KEY)
    assert found is not None
    assert found.weights["w"].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("key", ["trained_on", "losses", "best_epoch", "seconds", "skipped", "weights_sha256"])
def test_a_record_that_lacks_something_counts_as_absent(tmp_path: Path, key: str) -> None:
    file = stored(tmp_path)
    groups, record = tensorfile.from_bytes(file.read_bytes())
    file.write_bytes(tensorfile.to_bytes(groups, {name: value for name, value in record.items() if name != key}))
    assert FitStore(tmp_path).get(KEY) is None
    stored(tmp_path)
    file.write_bytes(tensorfile.to_bytes(groups, {**record, "losses": 3}))
    assert FitStore(tmp_path).get(KEY) is None
    file.write_bytes(tensorfile.to_bytes({"other": groups["weights"]}, record))
    assert FitStore(tmp_path).get(KEY) is None
