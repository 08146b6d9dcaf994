"""`dense`, `coboosting`, `dafl`: resumes, which studies they take and refuse."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from methods.generators import ALL, KINDS, begin, data, method, study, uploads
from tiny import context, coordinate, deployed, federation
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput, RunFailed
from wardround.methods.registry import known
from wardround.methods.state import State
from wardround.synthesis.pool import Pool

# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_any_state_but_the_last_can_be_continued_from(name: str) -> None:
    """Through a file, which keeps neither memory layout nor identity."""
    ctx, sent = begin(name)
    (*between, last) = method(name).absorb(ctx, State(), sent)
    assert len(between) == 2
    for state in between:
        (*_, again) = method(name).absorb(ctx, State.from_bytes(state.to_bytes()), sent)
        assert again.groups.keys() == last.groups.keys()
        assert State(again.groups).to_bytes() == State(last.groups).to_bytes()


@pytest.mark.parametrize(
    ("name", "stops"),
    [("coboosting", [(3, 0, 1), (3, 1, 2), (3, 2, 3)]), ("dafl", [(2,)] * 3), ("dense", [(3, 1), (3, 2), (3, 3)])],
)
def test_a_stop_after_any_step_changes_nothing(name: str, stops: list[tuple[int, ...]]) -> None:
    """From every state to the next alone, and from every state to the end; an epoch may take longer than a minute."""
    ctx, sent = begin(name)
    own = {"turns": 3} if name == "dafl" else {}
    *_, expected = method(name, **own).absorb(ctx, State(), sent)
    often = replace(ctx, due=lambda: True)
    states = list(method(name, **own).absorb(often, State(), sent))
    assert [state.facts.get("midway") is None for state in states] == [
        last for steps in stops for last in (*(False for _ in range(sum(steps))), True)
    ]
    state = State()
    for following in states:
        *_, end = method(name, **own).absorb(ctx, State.from_bytes(state.to_bytes()), sent)
        state = next(method(name, **own).absorb(often, State.from_bytes(state.to_bytes()), sent))
        assert timeless(state) == timeless(following)
        assert timeless(end) == timeless(expected)
        assert steps_of(end) == steps_of(expected)
    assert timeless(state) == timeless(expected)


def timeless(state: State) -> bytes:
    """All of a state but how long it took."""
    return State(state.groups, {name: fact for name, fact in state.facts.items() if name != "work"}).to_bytes()


def steps_of(state: State) -> dict[str, float]:
    return {part: found["steps"] for part, found in state.facts["work"].items()}


@pytest.mark.parametrize("name", ALL)
def test_states_are_values_and_leave_the_global_generator_alone(name: str) -> None:
    ctx, sent = begin(name)
    before = torch.get_rng_state()
    kept, later = [], []
    for state in method(name).absorb(ctx, State(), sent):
        kept.append(State(state.groups).to_bytes())
        later.append(state)
    assert [State(state.groups).to_bytes() for state in later] == kept
    assert [state.facts["epoch"] for state in later] == [1, 2, 3]
    assert len(set(kept)) == 3
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("changes", "steps"), [({}, 1 + 2 + 3), ({"kd_steps": 2}, 1 + 2 + 2)])
@pytest.mark.parametrize("name", ["coboosting", "dense"])
def test_a_pass_over_the_pool_may_be_capped(name: str, changes: dict[str, Any], steps: int) -> None:
    ctx, sent = begin(name)
    (*_, last) = method(name, **changes).absorb(ctx, State(), sent)
    assert last.groups["student"]["stages.conv1.2.num_batches_tracked"].item() == steps
    assert last.groups["pool"]["images"].shape == (18, 3, 8, 8)
    assert last.groups["pool"]["labels"].shape == (18,)


def test_the_student_learns_on_images_cut_out_as_the_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    one_pass = Pool.one_pass

    def watched(self: Pool, batch: int, most: int, how: Any, draws: torch.Generator) -> Any:
        asked.append(how)
        return one_pass(self, batch, most, how, draws)

    monkeypatch.setattr(Pool, "one_pass", watched)
    ctx, sent = begin("dense")
    list(method("dense", augment="flip").absorb(ctx, State(), sent))
    assert asked == ["flip"] * 3


@pytest.mark.parametrize("name", ALL)
def test_a_run_of_it_deploys_the_student_everywhere(name: str, tmp_path: Path) -> None:
    coordinate(tmp_path / "run", method(name), data(), rounds=1)
    (member,) = deployed(tmp_path / "run", "site-1").members
    assert member.spec == study(data(), name).student_spec
    assert all(bool(t.isfinite().all()) for t in member.weights.values())


@pytest.mark.parametrize("name", ALL)
def test_two_rounds_begin_the_images_anew(name: str, tmp_path: Path) -> None:
    """Sites go on from the student; what the first round made is not in the second one's state."""
    ctx, sent = begin(name, rounds=2)
    (*_, last) = method(name).absorb(ctx, State(), sent)
    (*_, later) = method(name).absorb(replace(ctx, round=1), last, sent)
    assert later.facts["epoch"] == 3
    assert all(later.groups[g][n].shape == t.shape for g, group in last.groups.items() for n, t in group.items())
    coordinate(tmp_path / "run", method(name), data(), rounds=2)
    assert len(deployed(tmp_path / "run", "site-1").members) == 1


@pytest.mark.parametrize("name", ALL)
def test_two_classes_one_channel_and_nine_pixels(name: str, tmp_path: Path) -> None:
    coloured = federation((8, 6), classes=2, size=9)

    def grey(of: ImageSet) -> ImageSet:
        return replace(of, images=of.images[:, :1].contiguous())

    test = grey(coloured.test)
    sites = tuple(
        replace(s, train=grey(s.train), val=grey(s.val), test=replace(s.test, images=test)) for s in coloured.sites
    )
    coordinate(tmp_path / "run", method(name), replace(coloured, sites=sites, test=test), rounds=1)
    (member,) = deployed(tmp_path / "run", "site-1").members
    assert (member.spec.channels, member.spec.classes, member.spec.size) == (1, 2, 9)


@pytest.mark.parametrize("name", ALL)
def test_one_site_alone(name: str) -> None:
    ctx = context(study(federation((8,)), name))
    (*_, last) = method(name).absorb(ctx, State(), uploads(ctx, federation((8,))))
    assert all(bool(t.isfinite().all()) for t in last.groups["student"].values())


@pytest.mark.parametrize("name", ALL)
def test_sites_may_differ_in_architecture_from_each_other_and_from_the_student(name: str) -> None:
    model = {"name": "cnn4", "width": 2, "per_site": {"site-1": "small", "site-2": "wrn16-2"}}
    ctx, sent = begin(name, model=model)
    method(name).check(ctx.study)
    (state, *_) = method(name, epochs=1).absorb(ctx, State(), sent)
    assert "stages.conv1.0.weight" in state.groups["student"]
    assert all(bool(t.isfinite().all()) for t in state.groups["student"].values())


@pytest.mark.parametrize(("name", "changes"), [("dafl", {}), ("coboosting", {}), ("dense", {"bn_weight": 0.0})])
def test_networks_without_batch_norm_will_do_where_it_is_not_matched(name: str, changes: dict[str, Any]) -> None:
    ctx, sent = begin(name, model={"name": "cnn4", "width": 2})
    found = method(name, **changes)
    found.check(ctx.study)
    (*_, last) = found.absorb(ctx, State(), sent)
    assert all(bool(t.isfinite().all()) for t in last.groups["student"].values())


@pytest.mark.parametrize("name", ALL)
def test_bf16_is_honoured(name: str) -> None:
    wide, sent = begin(name)
    narrow = context(study(data(), name, train={"precision": "bf16"}))
    found = []
    for ctx in (wide, narrow):
        (*_, last) = method(name, epochs=1).absorb(ctx, State(), sent)
        found.append(last.groups["student"]["head.weight"])
    assert found[1].isfinite().all()
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, rtol=0.2, atol=0.1)


@pytest.mark.parametrize("output", ["sigmoid", "tanh"])
def test_dafls_own_generator_makes_another_student(output: str) -> None:
    ctx, sent = begin("dafl")
    (*_, last) = method("dafl", output=output, beta=0.9, generator_lr=0.02).absorb(ctx, State(), sent)
    assert last.groups["student"]["head.weight"].isfinite().all()
    other = "tanh" if output == "sigmoid" else "sigmoid"
    (*_, else_) = method("dafl", output=other, beta=0.9, generator_lr=0.02).absorb(ctx, State(), sent)
    assert not torch.equal(last.groups["student"]["head.weight"], else_.groups["student"]["head.weight"])


def test_coboostings_weights_stay_equal_without_a_step_and_in_the_first_epoch() -> None:
    ctx, sent = begin("coboosting")
    found = [s.groups["ensemble_weights"]["weights"].tolist() for s in method("coboosting").absorb(ctx, State(), sent)]
    assert found[0] == [0.5, 0.5]
    assert found[1] != found[0]
    (*_, last) = method("coboosting", weight_step=0.0).absorb(ctx, State(), sent)
    assert last.groups["ensemble_weights"]["weights"].tolist() == [0.5, 0.5]


def test_coboostings_student_takes_clipped_steps() -> None:
    """Six steps of at most 1e-8 · 0.02, each going on with momentum."""
    ctx, sent = begin("coboosting")
    (*_, last) = method("coboosting", clip_norm=1e-8, weight_decay=0.0).absorb(ctx, State(), sent)
    start = ctx.study.fresh_weights(ctx.study.student_spec, "student")
    torch.testing.assert_close(last.groups["student"]["head.weight"], start["head.weight"], rtol=0, atol=1e-7)


# Refusals -------------------------------------------------------------------------------------------------------------


def test_the_registry_knows_them() -> None:
    assert {name: known()[name] for name in ALL} == {name: KINDS[name] for name in ALL}


@pytest.mark.parametrize(("name", "changes"), [("dense", {}), ("coboosting", {"bn_weight": 1.0})])
@pytest.mark.parametrize("model", [{"name": "cnn4"}, {"name": "small", "width": 2, "per_site": {"site-2": "cnn4"}}])
def test_matching_statistics_needs_batch_norm(name: str, changes: dict[str, Any], model: dict[str, Any]) -> None:
    with pytest.raises(
        BadInput, match=rf"^{name} matches .* and cnn4 \(site-\d\) has none; .* set {name}\.bn_weight to 0$"
    ) as said:
        method(name, **changes).check(study(data(), name, model=model))
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("key", "value"),
    [("epochs", 0), ("batch", 1), ("codes", 0), ("generator_lr", 0), ("temperature", 0), ("momentum", 1), ("steps", 5)],
)
def test_settings_out_of_range_are_refused(name: str, key: str, value: float) -> None:
    with pytest.raises(BadInput, match=key):
        method(name, **{key: value})


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 1, "generator_lr": 1e30}, "the generator diverged: .* use a smaller generator_lr"),
        ({"lr": 1e30}, "diverged.* a smaller lr$"),  # by its weights, or first by what it does to the generator's loss
    ],
)
def test_divergence_fails_the_run_and_says_which(name: str, changes: dict[str, Any], words: str) -> None:
    ctx, sent = begin(name)
    with pytest.raises(RunFailed, match=words):
        list(method(name, **changes).absorb(ctx, State(), sent))


@pytest.mark.parametrize("name", ALL)
def test_one_image_of_each_class_in_every_epoch_is_kept_for_the_report(name: str) -> None:
    ctx = context(study(data(), name))
    sent = uploads(ctx, data())
    *_, last = method(name).absorb(ctx, State(), sent)
    assert last.facts["gallery"]["steps"] == [1, 2, 3]
    assert last.groups["gallery"]["images"].shape == (3, 4, 3, 8, 8)
