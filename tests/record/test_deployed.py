"""What sites deploy, kept and read: networks that sites have in common are written once."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tiny import coordinate, federation
from wardround import examine, tensorfile
from wardround.errors import BadInput
from wardround.learn.predictor import Member, Predictor, single
from wardround.methods.registry import make
from wardround.models import NetSpec, fresh
from wardround.record import deployed

SPEC = NetSpec("small", 3, 2, 8, width=2)


def member(seed: int) -> Member:
    return Member(SPEC, fresh(SPEC, torch.Generator().manual_seed(seed)))


PANEL = Predictor(2, (member(0), member(1), member(2)), log_prior=torch.tensor([0.5, 0.25]))


def same(one: Predictor | None, other: Predictor) -> bool:
    """Whether the files of both would be the same."""
    assert one is not None
    return tensorfile.to_bytes(*one.parts()) == tensorfile.to_bytes(*other.parts())


def stored(run: Path) -> dict[str, list[str]]:
    """The groups that each file of a run holds."""
    files = sorted(run.rglob("*.safetensors"))
    return {str(file.relative_to(run)): sorted(tensorfile.from_bytes(file.read_bytes())[0]) for file in files}


def test_a_panels_networks_are_written_once(tmp_path: Path) -> None:
    own = {
        "site-1": replace(PANEL, log_prior=torch.tensor([0.0, 1.0])),
        "site-2": replace(PANEL, members=PANEL.members[1:]),  # one is not heard
        "site-3": Predictor(2, PANEL.members[2:]),  # it keeps its own model
        "site-4": replace(PANEL, members=(member(3), *PANEL.members[:1])),  # and one network more
    }
    for name, predictor in own.items():
        deployed.keep(tmp_path, name, predictor, PANEL)
    assert stored(tmp_path) == {
        "networks.safetensors": ["member-000", "member-001", "member-002"],
        "predictors/site-1.safetensors": ["combine"],
        "predictors/site-2.safetensors": ["combine"],
        "predictors/site-3.safetensors": [],
        "predictors/site-4.safetensors": ["combine", "member-000"],
    }
    for name, predictor in own.items():
        assert same(deployed.read(tmp_path, name), predictor)
    assert deployed.read(tmp_path, "site-5") is None  # it has none; there is nothing that all deploy


def test_predictors_without_their_networks_are_refused(tmp_path: Path) -> None:
    """Copied without them, or beside those of another run: other weights would be taken for these."""
    own = replace(PANEL, log_prior=torch.tensor([0.0, 1.0]))
    deployed.keep(tmp_path / "one", "site-1", own, PANEL)
    other = replace(PANEL, members=(member(5), *PANEL.members[1:]))
    deployed.keep(tmp_path / "two", "site-1", replace(other, log_prior=own.log_prior), other)
    shutil.copy(tmp_path / "two" / deployed.NETWORKS, tmp_path / "one")
    with pytest.raises(BadInput, match="holds networks of another run, and the predictors beside it need it; copy"):
        deployed.read(tmp_path / "one", "site-1")
    (tmp_path / "one" / deployed.NETWORKS).unlink()
    with pytest.raises(BadInput, match="is missing"):
        deployed.read(tmp_path / "one", "site-1")


def test_a_site_that_deploys_what_all_share_has_no_file(tmp_path: Path) -> None:
    deployed.keep(tmp_path, "site-1", PANEL, PANEL)
    deployed.keep(tmp_path, "site-2", replace(PANEL), PANEL)
    assert [*stored(tmp_path)] == ["predictors/shared.safetensors"]
    for name in ("site-1", "site-2", "shared"):
        assert same(deployed.read(tmp_path, name), PANEL)


@pytest.mark.parametrize("shared", [None, single(SPEC, member(0).weights)])
def test_without_a_panel_a_file_holds_all(tmp_path: Path, shared: Predictor | None) -> None:
    own = Predictor(2, (member(0),), log_prior=torch.tensor([0.0, 1.0]))
    deployed.keep(tmp_path, "site-1", own, shared)
    file = tmp_path / "predictors" / "site-1.safetensors"
    assert same(Predictor.from_parts(*tensorfile.from_bytes(file.read_bytes())), own)
    assert [*stored(tmp_path)] == ["predictors/site-1.safetensors"]


def test_a_run_of_consult_measures_and_keeps_each_network_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sites: four passes over the test images, not four for the shared panel and four more for every site's."""
    passes = []
    whole = examine.member_logits

    def counted(members: list[Member], *rest: object) -> list[Tensor]:
        passes.extend(members)
        return whole(members, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(examine, "member_logits", counted)
    data = federation((30,) * 4)
    coordinate(tmp_path / "run", make("consult", {"prior": 0.5}), data)
    assert len(passes) == 4
    groups = stored(tmp_path / "run")
    assert groups["networks.safetensors"] == [f"member-{i:03d}" for i in range(4)]
    assert [groups[f"predictors/{s.name}.safetensors"] for s in data.sites] == [["combine"]] * 4
