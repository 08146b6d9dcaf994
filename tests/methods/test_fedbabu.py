"""FedBABU: a head that nothing moves while sites talk, fine-tuning of everything at the end, FedAvg without both."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from methods.personal_runs import FEW, names_in, odd_sites, straight_and_killed
from tiny import CPU, coordinate, deployed, federation, predictor_bytes, study, watch_bundles, watch_fits
from wardround.errors import BadInput
from wardround.learn.fit import weights_hash
from wardround.learn.trainer import learning_rate, train_one
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedbabu import FedBABU
from wardround.methods.registry import make
from wardround.models import spec_layout

HEAD = {"head.weight", "head.bias"}
# Decay and momentum that would move any tensor which is merely given a learning rate of 0 or no gradient.
HEAVY: dict[str, Any] = {"train": {"weight_decay": 0.1, "momentum": 0.9}}


def fedbabu(**own: Any) -> Any:
    return make("fedbabu", own)


def rounds_and_tuning(fits: list[Any]) -> tuple[list[Any], list[Any]]:
    return [f for f in fits if ", round " in f.label], [f for f in fits if f.label.endswith(", fine-tuning")]


def test_the_defaults() -> None:
    own = FedBABU().settings
    assert (own.finetune_epochs, own.finetune_lr, own.train_head) == (5, None, False)


# While sites talk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["common", "own"])
def test_the_head_stays_the_common_one_to_the_bit(init: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every site, before and after training, through weight decay and momentum; the body does move."""
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", fedbabu(finetune_epochs=0), rounds=3, init=init, **HEAVY)
    common = study().initial()
    assert len(fits) == 9
    for fit in fits:
        after = train_one(fit, CPU).weights
        assert all(torch.equal(fit.start[name], common[name]) for name in HEAD)
        assert all(torch.equal(after[name], common[name]) for name in HEAD)
        assert not torch.equal(after["stages.conv1.0.weight"], fit.start["stages.conv1.0.weight"])
    (shared,) = deployed(tmp_path / "run", "site-1").members
    assert all(torch.equal(shared.weights[name], common[name]) for name in HEAD)


def test_own_initial_bodies_are_still_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", fedbabu(finetune_epochs=0), rounds=1, init="own")
    assert len({fit.start["stages.conv1.0.weight"].numpy().tobytes() for fit in fits}) == 3


def test_the_head_is_in_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedbabu())
    assert names_in(crossed) == (set(spec_layout(study().common_spec).names) - HEAD) | {"images"}
    counters = [t for b in crossed if b.envelope.kind == "delivery" for t in b.groups["counters"].values()]
    assert {(t.dtype, int(t)) for t in counters} == {(torch.int64, 6)}  # the largest site's 3 steps a round


def test_bodies_are_averaged_by_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", fedbabu(finetune_epochs=0))
    trained = [train_one(fit, CPU).weights for fit in fits[:3]]
    for name in ("stages.conv1.0.weight", "stages.conv2.2.running_var"):
        mean = sum(n / 25 * weights[name] for n, weights in zip((11, 8, 6), trained, strict=True))
        for fit in fits[3:]:
            torch.testing.assert_close(fit.start[name], mean)


# Fine-tuning ----------------------------------------------------------------------------------------------------------


def test_every_site_fine_tunes_the_whole_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the shared body and the common head, nothing frozen; also at a site that was never asked."""
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", fedbabu(), **FEW)
    rounds, tuning = rounds_and_tuning(fits)
    assert [fit.label for fit in tuning] == [f"site-{i}, fine-tuning" for i in (1, 2, 3)]
    assert len(rounds) == FEW["rounds"]
    assert len({weights_hash(fit.start) for fit in tuning}) == 1
    common = study().initial()
    for fit in tuning:
        assert fit.frozen == frozenset()
        assert all(torch.equal(fit.start[name], common[name]) for name in HEAD)
        after = train_one(fit, CPU).weights
        assert all(not torch.equal(after[name], fit.start[name]) for name in (*HEAD, "stages.conv1.0.weight"))
        site = fit.label.partition(",")[0]
        assert weights_hash(deployed(tmp_path / "run", site).members[0].weights) == weights_hash(after)


def test_the_recipe_of_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 epochs at the study's first rate: 4 whole, 2 at a tenth, 2 at a hundredth; the rounds' decay is not in it."""
    fits = watch_fits(monkeypatch)
    train = {"momentum": 0.5, "weight_decay": 0.1, "round_decay": 0.5, "clip_norm": 3.0}
    coordinate(tmp_path / "run", fedbabu(finetune_epochs=8), federation((4,)), rounds=3, train=train)
    (fit,) = rounds_and_tuning(fits)[1]
    assert (fit.recipe.momentum, fit.recipe.weight_decay, fit.recipe.epochs) == (0.9, 0.0, 8)
    assert (fit.recipe.optimiser, fit.recipe.batch, fit.recipe.clip_norm) == ("sgd", 4, 3.0)
    rates = [learning_rate(fit.recipe, epoch, 1) for epoch in range(8)]
    assert rates == pytest.approx([0.05] * 4 + [0.005] * 2 + [0.0005] * 2)


def test_a_rate_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", fedbabu(finetune_lr=0.2), federation((4,)), rounds=1)
    (fit,) = rounds_and_tuning(fits)[1]
    assert fit.recipe.lr == 0.2


def test_the_shared_model_is_measured_without_fine_tuning(tmp_path: Path) -> None:
    tuned, plain = (coordinate(tmp_path / str(n), fedbabu(finetune_epochs=n)) for n in (5, 0))
    shared = [[row for row in result["rows"] if row["model"] == "shared"] for result in (tuned, plain)]
    assert shared[0] == shared[1]
    assert {row["round"] for row in shared[0]} == {0, 1}
    assert len(set(predictor_bytes(tmp_path / "5").values())) == 3
    assert len(set(predictor_bytes(tmp_path / "0").values())) == 1


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, FEW, {"init": "own"}], ids=["all", "few", "own"])
def test_training_the_head_without_fine_tuning_is_fedavg_bit_for_bit(how: dict[str, Any], tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg(), **how)
    coordinate(tmp_path / "fedbabu", fedbabu(train_head=True, finetune_epochs=0), **how)
    assert predictor_bytes(tmp_path / "fedbabu") == predictor_bytes(tmp_path / "fedavg")


def test_the_default_is_not_fedavg_even_before_fine_tuning(tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg())
    coordinate(tmp_path / "fedbabu", fedbabu(finetune_epochs=0))
    (fedavg,), (own,) = (deployed(tmp_path / name, "site-1").members for name in ("fedavg", "fedbabu"))
    for name in ("head.weight", "stages.conv4.0.weight"):
        assert not torch.equal(own.weights[name], fedavg.weights[name])


@pytest.mark.parametrize("model", ["small", "cnn4"])
def test_odd_sites(model: str, tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", fedbabu(finetune_epochs=1), odd_sites(), model={"name": model})
    assert {row["site"] for row in result["rows"] if row["model"] == "personal"} == {"site-1", "site-2", "site-3"}


def test_a_site_without_images_deploys_the_shared_body(tmp_path: Path) -> None:
    data = federation((6, 2))
    empty = replace(data.sites[1], train=data.sites[1].train.take(torch.tensor([], dtype=torch.int64)))
    coordinate(tmp_path / "run", fedbabu(), replace(data, sites=(data.sites[0], empty)))
    (member,) = deployed(tmp_path / "run", "site-2").members
    assert torch.equal(member.weights["head.weight"], study().initial()["head.weight"])


def test_a_resumed_run_ends_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, killed = straight_and_killed(monkeypatch, tmp_path, "fedbabu", {"finetune_epochs": 1})
    assert killed == straight


@pytest.mark.parametrize("own", [{"finetune_epochs": -1}, {"finetune_lr": 0}, {"train_head": "maybe"}])
def test_refuses_settings_that_are_none(own: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"^fedbabu\.(finetune_epochs|finetune_lr|train_head) = "):
        fedbabu(**own)
