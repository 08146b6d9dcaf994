"""What is agreed: schedule, participants, networks, initial weights, and the hash of it all."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from safetensors.torch import save_file

from tiny import federation, give_tiny_data, settings, study
from wardround import run
from wardround.data.federation import Federation
from wardround.errors import BadInput
from wardround.learn.fit import weights_hash
from wardround.models import NetSpec
from wardround.progress import Silent
from wardround.study import agree, round_half_up


def crowd(n: int) -> Federation:
    return federation([4] * n)


# Schedule -------------------------------------------------------------------------------------------------------------


def test_epochs_of_a_list_hold_on() -> None:
    agreed = study(rounds=4, train={"epochs": [3, 6]})
    assert [agreed.epochs(round) for round in range(4)] == [3, 6, 6, 6]
    assert agreed.total_epochs == 21


def test_a_list_longer_than_the_rounds_is_cut() -> None:
    assert study(rounds=1, train={"epochs": [3, 6]}).total_epochs == 3


def test_one_number_is_every_round() -> None:
    assert study(rounds=3, train={"epochs": 2}).total_epochs == 6


def test_the_rate_decays_by_round() -> None:
    agreed = study(train={"lr": 0.4, "round_decay": 0.5, "epochs": [1, 7]})
    assert [(agreed.recipe(r).lr, agreed.recipe(r).epochs) for r in (0, 1, 2)] == [(0.4, 1), (0.2, 7), (0.1, 7)]
    assert agreed.recipe(0, 99).epochs == 99


def test_a_recipe_is_the_settings() -> None:
    agreed = study(train={"optimiser": "adam", "weight_decay": 0.25, "clip_norm": 5.0, "keep": "best", "batch": 3})
    recipe = agreed.recipe(0)
    found = (recipe.optimiser, recipe.weight_decay, recipe.clip_norm, recipe.keep, recipe.batch)
    assert found == ("adam", 0.25, 5.0, "best", 3)


# Participants ---------------------------------------------------------------------------------------------------------


@examples(deadline=None, max_examples=25)
@given(st.floats(0.001, 1.0), st.integers(1, 12), st.integers(0, 30))
def test_participants_are_some_and_known_and_in_order(share: float, sites: int, round: int) -> None:
    agreed = study(crowd(sites), participants=share)
    chosen = agreed.participants(round)
    assert len(chosen) == max(1, round_half_up(share * sites)) == len(set(chosen))
    assert list(chosen) == [site for site in agreed.sites if site in chosen]


def test_everyone() -> None:
    assert study(participants=1.0).participants(5) == ("site-1", "site-2", "site-3")


@pytest.mark.parametrize("change", [{"seed": 9}, {"method": "fedprox"}, {"train": {"lr": 0.5}}, {"rounds": 50}])
def test_every_method_and_seed_asks_the_same_sites(change: dict[str, Any]) -> None:
    data = crowd(10)
    rounds = [study(data, participants=0.2).participants(r) for r in range(20)]
    assert [study(data, participants=0.2, **change).participants(r) for r in range(20)] == rounds
    assert len(set(rounds)) > 5
    assert {site for chosen in rounds for site in chosen} == set(study(data).sites)


def test_the_partition_seed_asks_others() -> None:
    data = crowd(10)
    one, other = (study(data, participants=0.2, data={"partition_seed": s}) for s in (0, 1))
    assert [one.participants(r) for r in range(5)] != [other.participants(r) for r in range(5)]


@pytest.mark.parametrize(("value", "rounded"), [(0.5, 1), (1.5, 2), (2.5, 3), (2.49, 2), (0.0, 0), (3.0, 3)])
def test_halves_go_up(value: float, rounded: int) -> None:
    assert round_half_up(value) == rounded


# Networks -------------------------------------------------------------------------------------------------------------


def test_the_network_follows_from_the_images() -> None:
    assert study().common_spec == NetSpec("small", 3, 4, 8, width=2)


def test_a_site_may_have_another_with_its_own_width() -> None:
    agreed = study(model={"per_site": {"site-2": "cnn4"}})
    assert agreed.spec("site-1") == NetSpec("small", 3, 4, 8, width=2)
    assert agreed.spec("site-2") == NetSpec("cnn4", 3, 4, 8)
    with pytest.raises(BadInput, match="fedavg needs the same model at every site, but there are cnn4, small"):
        _ = agreed.common_spec


def test_the_same_network_named_per_site_is_the_same() -> None:
    assert study(model={"per_site": {"site-2": "small"}}).common_spec.width == 2


def test_a_network_for_no_site_is_refused() -> None:
    with pytest.raises(BadInput, match=r"model.per_site names 'site-9', which is no site; sites are site-1, site-2"):
        study(model={"per_site": {"site-9": "cnn4"}})


def test_a_comparison_names_the_method_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first of the list, which can."""
    give_tiny_data(monkeypatch)
    mixed = settings(method="local", model={"per_site": {"site-2": "cnn4"}})
    with pytest.raises(BadInput, match=r"^single needs the same model"):
        run.begin_comparison(mixed, [("local", {}), ("ensemble", {}), ("single", {})], tmp_path / "out", Silent())
    assert list(tmp_path.iterdir()) == []


def test_initial_weights_come_from_the_seed_alone() -> None:
    assert weights_hash(study().initial()) == weights_hash(study(method="fedprox", rounds=9).initial("site-3"))
    assert weights_hash(study().initial()) != weights_hash(study(seed=1).initial())


def test_initial_weights_out_of_a_file(tmp_path: Path) -> None:
    agreed = study()
    weights = {name: torch.ones_like(tensor) for name, tensor in agreed.initial().items()}
    save_file(weights, tmp_path / "start.safetensors")
    started = study(model={"weights": tmp_path / "start.safetensors"}, init="own")
    assert weights_hash(started.initial()) == weights_hash(started.initial("site-2")) == weights_hash(weights)


# Identity -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"name": "other"}, {"device": "cuda"}, {"workers": 7}])
def test_what_cannot_change_a_result_is_not_part_of_the_id(change: dict[str, Any]) -> None:
    assert study(**change).id == study().id


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"method": "single"}, {"rounds": 3}, {"train": {"lr": 0.051}}, {"set": {"a": 1}}, {"init": "own"}],
)
def test_what_can_is(change: dict[str, Any]) -> None:
    assert study(**change).id != study().id


def test_the_partition_and_the_classes_are_part_of_the_id() -> None:
    data = federation()
    other = replace(data, partition_hash="0" * 64)
    renamed = replace(data, classes=("w", "x", "y", "z"))
    assert len({study(data).id, study(other).id, study(renamed).id}) == 3


def test_the_id_is_a_name_that_a_bundle_can_carry() -> None:
    assert len(study().id) == 16
    assert study().id.isalnum()


def test_the_same_study_under_another_method() -> None:
    other = study().with_method("fedprox", {"mu": 0.5})
    assert (other.settings.method, other.settings.set) == ("fedprox", {"mu": 0.5})
    assert other.id == study(method="fedprox", set={"mu": 0.5}).id


@pytest.mark.parametrize("name", ["Zürich", "a b", "a/b", "x" * 65, "-a", ""])
def test_a_site_whose_name_no_bundle_can_carry_is_refused_before_any_work(name: str) -> None:
    data = federation((4, 4))
    renamed = replace(data, sites=(replace(data.sites[0], name=name), data.sites[1]))
    with pytest.raises(BadInput, match="is no name"):
        agree(settings(), renamed)


def test_no_site_may_take_the_name_of_the_shared_model() -> None:
    data = federation((4, 4))
    renamed = replace(data, sites=(replace(data.sites[0], name="shared"), data.sites[1]))
    with pytest.raises(BadInput, match="cannot be called 'shared'"):
        agree(settings(), renamed)
