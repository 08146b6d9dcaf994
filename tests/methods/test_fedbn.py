"""FedBN: batch norm found by type and kept at home, and FedAvg where it is shared."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from methods.personal_runs import FEW, names_in, odd_sites, straight_and_killed
from tiny import CPU, coordinate, deployed, federation, predictor_bytes, study, watch_bundles, watch_fits
from wardround.errors import BadInput
from wardround.learn.trainer import train_one
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedbn import FedBN
from wardround.methods.registry import make
from wardround.models import NetSpec, build, spec_layout

SMALL = NetSpec("small", 3, 4, 8, width=2)
NORMS = spec_layout(SMALL).batch_norm
REST = set(spec_layout(SMALL).names) - NORMS


def fedbn(**own: Any) -> Any:
    return make("fedbn", own)


def test_norms_are_private_by_default() -> None:
    assert FedBN().settings.norms == "private"


@pytest.mark.parametrize("name", ["small", "resnet18", "resnet50", "wrn16-2", "vgg8"])
def test_every_tensor_of_every_norm_stays_whatever_its_name(name: str) -> None:
    """Five tensors per layer, found here by walking the network."""
    agreed = study(federation(size=16), method="fedbn", model={"name": name})
    net = build(agreed.common_spec)
    expected = {
        f"{prefix}.{part}"
        for prefix, layer in net.named_modules()
        if isinstance(layer, _BatchNorm)
        for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert fedbn().kept(agreed) == expected
    assert fedbn().shared(agreed) == set(net.state_dict()) - expected


def test_the_norm_of_a_shortcut_stays_though_its_name_does_not_say_bn() -> None:
    kept = fedbn().kept(study(method="fedbn", model={"name": "resnet18"}))
    shortcuts = {name for name in kept if "downsample" in name}
    assert len(shortcuts) == 3 * 5
    assert not any("bn" in name for name in shortcuts)


def test_no_tensor_of_a_norm_is_in_any_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedbn(), rounds=3)
    assert names_in(crossed) == REST | {"images"}
    assert {group for bundle in crossed for group in bundle.groups} == {"parameters", "size"}


def test_averaged_norms_go_up_and_come_home_but_never_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedbn(norms="averaged"))
    assert names_in(crossed, "answer") == REST | NORMS | {"images"}
    assert names_in(crossed, "request") == REST
    home = [bundle for bundle in crossed if bundle.envelope.kind == "delivery"]
    assert names_in(home) == REST | NORMS
    counters = [t for bundle in home for t in bundle.groups["counters"].values()]
    assert {(t.dtype, int(t)) for t in counters} == {(torch.int64, 6)}  # 3 steps a round at the largest site


def test_each_site_goes_on_from_its_own_norms_and_the_common_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second round by hand: what a site's first fit left in its norms; Σ n_k/n of the rest."""
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", fedbn())
    trained = [train_one(fit, CPU).weights for fit in fits[:3]]
    for own, fit in zip(trained, fits[3:], strict=True):
        for name in NORMS:
            assert torch.equal(fit.start[name], own[name])
        for name in REST:
            mean = sum(n / 25 * weights[name] for n, weights in zip((11, 8, 6), trained, strict=True))
            torch.testing.assert_close(fit.start[name], mean, rtol=1e-5, atol=1e-7)
    assert not torch.equal(trained[0]["stages.conv1.2.running_mean"], trained[1]["stages.conv1.2.running_mean"])


def test_averaging_norms_changes_nothing_but_what_is_measured(tmp_path: Path) -> None:
    private, averaged = (coordinate(tmp_path / norms, fedbn(norms=norms)) for norms in ("private", "averaged"))
    assert predictor_bytes(tmp_path / "private") == predictor_bytes(tmp_path / "averaged")
    assert {row["model"] for row in private["rows"]} == {"personal"}
    assert {row["model"] for row in averaged["rows"]} == {"personal", "shared"}


def test_a_site_that_never_took_part(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "private", fedbn(), **FEW)
    (member,) = deployed(tmp_path / "private", "site-3").members
    initial = study().initial()
    assert all(torch.equal(member.weights[name], initial[name]) for name in NORMS)
    assert any(note["text"].startswith("site-3 never trained") for note in result["notes"])
    coordinate(tmp_path / "averaged", fedbn(norms="averaged"), **FEW)
    assert "shared.safetensors" in predictor_bytes(tmp_path / "averaged")


@pytest.mark.parametrize("how", [{}, FEW, {"init": "own"}], ids=["all", "few", "own"])
def test_shared_norms_are_fedavg_bit_for_bit(how: dict[str, Any], tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg(), **how)
    coordinate(tmp_path / "fedbn", fedbn(norms="shared"), **how)
    assert predictor_bytes(tmp_path / "fedbn") == predictor_bytes(tmp_path / "fedavg")


def test_the_default_is_not_fedavg(tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg())
    coordinate(tmp_path / "fedbn", fedbn())
    (fedavg,), (own,) = (deployed(tmp_path / name, "site-1").members for name in ("fedavg", "fedbn"))
    assert not torch.equal(own.weights["stages.conv1.2.weight"], fedavg.weights["stages.conv1.2.weight"])
    assert not torch.equal(own.weights["head.weight"], fedavg.weights["head.weight"])


@pytest.mark.parametrize("norms", ["private", "averaged", "shared"])
def test_odd_sites(norms: str, tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", fedbn(norms=norms), odd_sites())
    assert {row["site"] for row in result["rows"] if row["model"] == "personal"} == {"site-1", "site-2", "site-3"}


def test_a_resumed_run_ends_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, killed = straight_and_killed(monkeypatch, tmp_path, "fedbn", {})
    assert killed == straight


def test_a_network_without_batch_norm_is_refused() -> None:
    """It would be FedAvg under another name; who asks for just that gets it."""
    plain = study(method="fedbn", model={"name": "cnn4"})
    for norms in ("private", "averaged"):
        with pytest.raises(BadInput, match=r"^fedbn keeps batch norm at the sites, and cnn4 has none; use ") as caught:
            fedbn(norms=norms).check(plain)
        assert "\n" not in str(caught.value)
    fedbn(norms="shared").check(plain)


def test_refuses_another_fate() -> None:
    with pytest.raises(BadInput, match=r"^fedbn\.norms = "):
        fedbn(norms="frozen")
