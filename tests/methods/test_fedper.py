"""FedPer: which layers stay, what crosses under either fate of the heads, and FedAvg where nothing stays."""

from pathlib import Path
from typing import Any

import pytest
import torch

from methods.personal_runs import FEW, names_in, odd_sites, straight_and_killed
from tiny import CPU, context, coordinate, deployed, federation, predictor_bytes, study, watch_bundles, watch_fits
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle, Envelope
from wardround.learn.trainer import train_one
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedper import FedPer, last_layers, layers_of
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import NetSpec, Weights, names, spec_layout

SMALL, CNN4 = NetSpec("small", 3, 4, 8, width=2), NetSpec("cnn4", 3, 4, 8, width=2)
HEAD = {"head.weight", "head.bias"}
FATES = ["private", "averaged"]


def fedper(**own: Any) -> Any:
    return make("fedper", own)


# Layers ---------------------------------------------------------------------------------------------------------------


def test_the_last_layers_of_two_networks() -> None:
    """In `small` the stage before the head is the pooling, which has no tensors: the next layer is conv4."""
    assert last_layers(SMALL, 0) == frozenset()
    assert last_layers(SMALL, 1) == last_layers(CNN4, 1) == HEAD
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert last_layers(SMALL, 2) == {*HEAD, "stages.conv4.0.weight", *(f"stages.conv4.2.{part}" for part in norm)}
    assert last_layers(CNN4, 2) == {*HEAD, "stages.fc.1.weight", "stages.fc.1.bias"}
    assert (len(layers_of(SMALL)), len(layers_of(CNN4))) == (5, 4)


@pytest.mark.parametrize("name", names())
def test_every_tensor_is_in_exactly_one_layer(name: str) -> None:
    spec = NetSpec(name, 3, 4, 32, width=2)
    assert sorted(tensor for layer in layers_of(spec) for tensor in layer) == sorted(spec_layout(spec).names)


def test_the_defaults_keep_the_head_private() -> None:
    assert (FedPer().settings.layers, FedPer().settings.heads) == (1, "private")


# What crosses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_private_layers_are_in_no_bundle(layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedper(layers=layers), rounds=3)
    assert len(crossed) == 3 * 3 * 2 + 3
    assert names_in(crossed) == (set(spec_layout(SMALL).names) - last_layers(SMALL, layers)) | {"images"}


def test_averaged_heads_go_up_and_come_home_but_never_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedper(heads="averaged"), rounds=3)
    assert names_in(crossed, "answer") == {*spec_layout(SMALL).names, "images"}
    assert names_in(crossed, "request") == set(spec_layout(SMALL).names) - HEAD
    assert names_in(crossed, "delivery") == set(spec_layout(SMALL).names)


def test_a_private_head_that_is_sent_is_refused() -> None:
    """The declaration does not have it, so that no slip in a method lets it out."""
    agreed = study(method="fedper")
    answer = Bundle(Envelope("answer", "x", "fedper", "site-1", 0), {"parameters": {"head.bias": torch.zeros(4)}})
    with pytest.raises(BadInput, match=r"parameters/head\.bias is .*no such tensor"):
        fedper().payload(agreed, "site-1").check(answer)


def test_counters_that_travel_are_never_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites of 11, 8 and 6 images take 3, 2 and 2 steps a round, so every counter is 3, then 6."""
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedper())
    for kind, steps in (("request", {0, 3}), ("delivery", {6})):
        counters = [b.groups["counters"] for b in crossed if b.envelope.kind == kind]
        assert {int(t) for group in counters for t in group.values()} == steps
        assert {t.dtype for group in counters for t in group.values()} == {torch.int64}


# Averaging ------------------------------------------------------------------------------------------------------------


def answer(site: str, count: int, **values: float) -> Bundle:
    groups = {
        "parameters": {name.replace("_", "."): torch.tensor([value]) for name, value in values.items()},
        "size": {"images": torch.tensor(count)},
    }
    return Bundle(Envelope("answer", "study", "fedper", site, 0), groups)


def test_the_body_is_averaged_and_the_coordinators_head_stays_as_it_began() -> None:
    """(1·4 + 3·8) / 4 = 7."""
    state = State({"model": {"body.weight": torch.tensor([1.0]), "head.weight": torch.tensor([2.0])}})
    sent = {"a": answer("a", 1, body_weight=4.0), "b": answer("b", 3, body_weight=8.0)}
    (after,) = fedper().absorb(context(study()), state, sent)
    assert {name: t.tolist() for name, t in after.groups["model"].items()} == {
        "body.weight": [7.0],
        "head.weight": [2.0],
    }


def test_the_shared_model_has_the_mean_head_of_the_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One round by hand: each site's fit again, then Σ n_k/n · head_k."""
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", fedper(heads="averaged"), rounds=1)
    trained = [train_one(fit, CPU).weights for fit in fits]
    home = {b.envelope.site: b for b in sent_home(tmp_path / "again", monkeypatch)}
    expected = sum(n / 25 * weights["head.weight"] for n, weights in zip((11, 8, 6), trained, strict=True))
    torch.testing.assert_close(home["site-1"].group("parameters")["head.weight"], expected)
    (own,) = deployed(tmp_path / "run", "site-2").members
    assert torch.equal(own.weights["head.weight"], trained[1]["head.weight"])


def sent_home(path: Path, patch: pytest.MonkeyPatch) -> list[Bundle]:
    crossed = watch_bundles(patch)
    coordinate(path, fedper(heads="averaged"), rounds=1)
    return [bundle for bundle in crossed if bundle.envelope.kind == "delivery"]


def test_averaging_heads_changes_nothing_but_what_is_measured(tmp_path: Path) -> None:
    results = {fate: coordinate(tmp_path / fate, fedper(heads=fate), rounds=3) for fate in FATES}
    assert predictor_bytes(tmp_path / "private") == predictor_bytes(tmp_path / "averaged")
    models = {fate: {row["model"] for row in result["rows"]} for fate, result in results.items()}
    assert models == {"private": {"personal"}, "averaged": {"personal", "shared"}}


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", FATES)
def test_a_site_goes_on_from_its_own_head_however_long_it_waits(
    fate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", fedper(heads=fate), rounds=6, participants=0.34)
    left: dict[str, Weights] = {}
    for fit in fits:
        site = fit.label.partition(",")[0]
        expected = left.get(site, study().initial())
        assert all(torch.equal(fit.start[name], expected[name]) for name in HEAD)
        left[site] = train_one(fit, CPU).weights
    assert len(fits) == 6 > len(left) > 1


def test_a_site_that_never_took_part(tmp_path: Path) -> None:
    """A private head is then untrained and a note says so; an averaged one comes with the shared model."""
    private = coordinate(tmp_path / "private", fedper(), **FEW)
    (member,) = deployed(tmp_path / "private", "site-3").members
    assert torch.equal(member.weights["head.weight"], study().initial()["head.weight"])
    notes = [note["text"] for note in private["notes"] if "never trained" in note["text"]]
    assert notes == ["site-3 never trained: the layers that fedper leaves to a site are untrained there"]
    averaged = coordinate(tmp_path / "averaged", fedper(heads="averaged"), **FEW)
    assert sorted(predictor_bytes(tmp_path / "averaged")) == [
        "shared.safetensors",
        "site-1.safetensors",
        "site-2.safetensors",
    ]
    assert not [note for note in averaged["notes"] if "never trained" in note["text"]]


def test_a_resumed_run_ends_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, killed = straight_and_killed(monkeypatch, tmp_path, "fedper", {"heads": "averaged"})
    assert killed == straight


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("how", [{}, FEW, {"init": "own"}], ids=["all", "few", "own"])
def test_no_layers_is_fedavg_bit_for_bit(how: dict[str, Any], fate: str, tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg(), **how)
    coordinate(tmp_path / "fedper", fedper(layers=0, heads=fate), **how)
    assert predictor_bytes(tmp_path / "fedper") == predictor_bytes(tmp_path / "fedavg")


def test_the_default_is_not_fedavg(tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg())
    coordinate(tmp_path / "fedper", fedper())
    (fedavg,), (own,) = (deployed(tmp_path / name, "site-1").members for name in ("fedavg", "fedper"))
    assert not torch.equal(own.weights["head.weight"], fedavg.weights["head.weight"])
    assert not torch.equal(own.weights["stages.conv1.0.weight"], fedavg.weights["stages.conv1.0.weight"])


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("model", ["small", "cnn4"])
def test_odd_sites(model: str, fate: str, tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", fedper(heads=fate), odd_sites(), model={"name": model})
    assert {row["site"] for row in result["rows"] if row["model"] == "personal"} == {"site-1", "site-2", "site-3"}


def test_sharing_nothing_is_refused() -> None:
    fedper(layers=4).check(study(method="fedper"))
    with pytest.raises(
        BadInput, match=r"fedper\.layers = 5 leaves nothing to share: small has 5 layers; use at most 4"
    ):
        fedper(layers=5).check(study(method="fedper"))


@pytest.mark.parametrize("own", [{"layers": -1}, {"layers": 1.5}, {"heads": "public"}])
def test_refuses_settings_that_are_none(own: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"^fedper\.(layers|heads) = "):
        fedper(**own)


def test_sites_must_agree_on_the_network() -> None:
    with pytest.raises(BadInput, match="fedper needs the same model at every site"):
        fedper().check(study(federation(), method="fedper", model={"per_site": {"site-2": "cnn4"}}))


def test_a_site_too_small_to_train_has_no_head_of_its_own(tmp_path: Path) -> None:
    """It keeps nothing of the round, so the averaged head is what it takes home, and without one a note says so."""
    coordinate(tmp_path / "averaged", make("fedper", {"heads": "averaged"}), federation((9, 1)))
    (shared,) = deployed(tmp_path / "averaged", "site-2").members
    assert not torch.equal(shared.weights["head.bias"], study().initial("site-2")["head.bias"])
    private = coordinate(tmp_path / "private", make("fedper", {}), federation((9, 1)))
    said = [note["text"] for note in private["notes"] if "never trained" in note["text"]]
    assert said == ["site-2 never trained: the layers that fedper leaves to a site are untrained there"]
