"""What a site keeps to itself: a toy FedPer whose head never leaves, and how its memory is kept."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tiny import context, coordinate, deployed, federation, figures, predictor_bytes, study, watch_bundles, watch_fits
from wardround.learn.fit import Fit, Fitted
from wardround.methods.fedavg import FedAvg
from wardround.methods.state import State
from wardround.methods.template import Averaging, Visit
from wardround.models import spec_layout
from wardround.record.rundir import RunDir
from wardround.study import Study

HEAD = {"head.weight", "head.bias"}


class KeepsHead(Averaging):
    """FedAvg of everything but the head."""

    name = "keepshead"
    paper = "-"
    summary = "a toy"

    def shared(self, study: Study) -> frozenset[str] | None:
        layout = spec_layout(study.common_spec)
        return frozenset(layout.names) - layout.head


def test_what_is_private_is_in_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", KeepsHead(), rounds=3)
    assert len(crossed) == 3 * 3 * 2 + 3
    names = {name for bundle in crossed for group in bundle.groups.values() for name in group}
    assert names == (set(spec_layout(study().common_spec).names) - HEAD) | {"images"}


def test_every_site_deploys_its_own_head_on_the_shared_body(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", KeepsHead())
    weights = [deployed(tmp_path / "run", f"site-{i}").members[0].weights for i in (1, 2, 3)]
    for name in weights[0]:
        same = torch.equal(weights[0][name], weights[1][name]) and torch.equal(weights[1][name], weights[2][name])
        assert same == (name not in HEAD)


def test_a_site_goes_on_from_its_own_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 2 starts from the head that round 1 left at this site, and from the common body."""
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", KeepsHead(), rounds=2)
    first, second = fits[:3], fits[3:]
    common = study().initial()
    for fit in first:
        assert torch.equal(fit.start["head.weight"], common["head.weight"])
    assert len({fit.start["head.weight"].numpy().tobytes() for fit in second}) == 3
    first_of_body = next(iter(common))
    assert len({fit.start[first_of_body].numpy().tobytes() for fit in second}) == 1


def test_a_site_that_is_not_asked_keeps_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of three sites asked a round, a site's head waits for it however long that takes."""
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", KeepsHead(), rounds=6, participants=0.34)
    asked = [fit.label.partition(",")[0] for fit in fits]
    assert max(asked.count(site) for site in set(asked)) > 1
    initial = study().initial()["head.weight"]
    for place, (site, fit) in enumerate(zip(asked, fits, strict=True)):
        assert torch.equal(fit.start["head.weight"], initial) == (site not in asked[:place])


def test_sharing_everything_is_fedavg(tmp_path: Path) -> None:
    class KeepsNothing(KeepsHead):
        def shared(self, study: Study) -> frozenset[str] | None:
            return frozenset(spec_layout(study.common_spec).names)

    coordinate(tmp_path / "nothing", KeepsNothing())
    coordinate(tmp_path / "fedavg", FedAvg())
    nothing, fedavg = (deployed(tmp_path / name, "site-1").members[0].weights for name in ("nothing", "fedavg"))
    assert all(torch.equal(nothing[name], tensor) for name, tensor in fedavg.items())


def test_workers_change_nothing(tmp_path: Path) -> None:
    one, three = (coordinate(tmp_path / str(n), KeepsHead(), workers=n) for n in (1, 3))
    assert figures(one) == figures(three)
    assert predictor_bytes(tmp_path / "1") == predictor_bytes(tmp_path / "3")


class Forgets(FedAvg):
    """Remembers in the first round, and wants to have forgotten in the second."""

    def remember(self, visit: Visit, fit: Fit, fitted: Fitted) -> State:
        seen.append((visit.ctx.round, visit.memory.facts.get("secret")))
        return State({}, {"secret": visit.site.name}) if visit.ctx.round == 0 else State()


seen: list[tuple[int, str | None]] = []


def test_a_memory_can_be_emptied(tmp_path: Path) -> None:
    seen.clear()
    coordinate(tmp_path / "run", Forgets(), federation((4,)), rounds=3)
    assert seen == [(0, None), (1, "site-1"), (2, None)]


def test_old_memories_are_deleted(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", KeepsHead(), rounds=3)
    kept = sorted(file.name for file in (tmp_path / "run" / "checkpoint").iterdir())
    assert kept == [*(f"memory-site-{i}-2.safetensors" for i in (1, 2, 3)), "state-2.safetensors"]


# State as a value -----------------------------------------------------------------------------------------------------


def contents(groups: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, list[float]]]:
    return {group: {name: t.tolist() for name, t in tensors.items()} for group, tensors in groups.items()}


def test_a_state_comes_back_as_it_was_even_its_empty_groups() -> None:
    """A bank that is empty before the first round must not be missing after a resume."""
    state = State({"model": {"w": torch.tensor([1.5])}, "bank": {}}, {"step": 3, "rate": 0.1, "names": ["a", None]})
    back = State.from_bytes(state.to_bytes())
    assert contents(back.groups) == {"model": {"w": [1.5]}, "bank": {}}
    assert back.facts == state.facts
    assert back.to_bytes() == state.to_bytes()


def test_equal_states_have_equal_bytes() -> None:
    one = State({"a": {"x": torch.zeros(1), "y": torch.ones(2)}}, {"p": 1, "q": 2})
    two = State({"a": {"y": torch.ones(2), "x": torch.zeros(1)}}, {"q": 2, "p": 1})
    assert one.to_bytes() == two.to_bytes()


def test_a_state_is_saved_and_loaded_by_a_run(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", lambda part: None)
    state = State({"m": {"w": torch.arange(3.0)}}, {"round": 1})
    assert contents(run.load(run.save("x.safetensors", state)).groups) == contents(state.groups)


def test_what_a_site_never_had_starts_as_the_study_does() -> None:
    method, ctx = KeepsHead(), context(study())
    bundle = (method.ask(ctx, method.begin(ctx)) or {})["site-1"]
    whole = method.assemble(ctx, federation().sites[0], bundle, State())
    assert all(torch.equal(tensor, ctx.study.initial()[name]) for name, tensor in whole.items())
    assert whole.keys() == ctx.study.initial().keys()
