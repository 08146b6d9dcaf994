"""How often `deepinversion` and `fedisca` talk, what travels, and the studies and settings that they take or refuse."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import context, coordinate, deployed, drive, federation, predictor_bytes, study, watch_bundles, watch_fits
from wardround.data.federation import Federation
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput, Diverged, RunFailed
from wardround.exchange.bundle import Bundle
from wardround.learn.fit import weights_hash
from wardround.learn.predictor import Member
from wardround.methods.base import Context, join_groups, layout_groups
from wardround.methods.deepinversion import DeepInversion
from wardround.methods.distilled import Distilled, Epochs
from wardround.methods.fedbicross import FedBiCross
from wardround.methods.fedisca import FedISCA
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import spec_layout
from wardround.record import absorbing
from wardround.record.rundir import RunDir
from wardround.synthesis.inversion import Iterate, Synthesis
from wardround.synthesis.student import Student, largest

BOTH = ["deepinversion", "fedisca"]
OWN: dict[str, dict[str, Any]] = {
    "deepinversion": {"epochs": 2, "steps": 3, "batch": 6, "kd_steps": 2, "lr": 0.05, "shots": 1},
    "fedisca": {"epochs": 2, "steps": 3, "batch": 6, "lr": 0.05, "shots": 1},
}


def method(name: str, **changes: Any) -> Distilled:
    found = make(name, {**OWN[name], **changes})
    assert isinstance(found, Distilled)
    return found


def answers(ctx: Context, data: Federation, of: Distilled, state: State | None = None) -> dict[str, Bundle]:
    """What the sites really send."""
    requests = of.ask(ctx, state or State())
    assert requests is not None
    return {site.name: drive(ctx, of.answer(ctx, site, requests[site.name], State())).bundle for site in data.sites}


def timeless(state: State) -> bytes:
    """All of a state but how long it took."""
    return State(state.groups, {name: fact for name, fact in state.facts.items() if name != "work"}).to_bytes()


# One shot -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
def test_every_site_takes_the_student_home(name: str, tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", method(name))
    assert list(predictor_bytes(tmp_path / "run")) == ["shared.safetensors"]
    rows = result["ledger"]["rows"]
    parameters = 4 * spec_layout(study().common_spec).parameter_count
    home = [row for row in rows if row["kind"] == "delivery"]
    assert [row["groups"]["parameters"] for row in home] == [parameters] * 3
    up = [row for row in rows if row["kind"] == "answer"]
    assert [set(row["groups"]) for row in up] == [{"parameters", "statistics", "counters", "size"}] * 3


@pytest.mark.parametrize("name", BOTH)
def test_a_site_too_small_to_train_is_left_out(name: str, tmp_path: Path) -> None:
    """The student is that of the other two alone, and goes to all three."""
    coordinate(tmp_path / "three", method(name), federation((9, 6, 1)))
    coordinate(tmp_path / "two", method(name), federation((9, 6)))
    three, two = (deployed(tmp_path / run, "site-1").members[0].weights for run in ("three", "two"))
    assert weights_hash(three) == weights_hash(two)
    assert weights_hash(deployed(tmp_path / "three", "site-3").members[0].weights) == weights_hash(two)


@pytest.mark.parametrize("name", BOTH)
def test_two_classes_and_one_channel(name: str, tmp_path: Path) -> None:
    coloured = federation((8, 6), classes=2)

    def grey(of: ImageSet) -> ImageSet:
        return replace(of, images=of.images[:, :1].contiguous())

    test = grey(coloured.test)
    sites = tuple(
        replace(s, train=grey(s.train), val=grey(s.val), test=replace(s.test, images=test)) for s in coloured.sites
    )
    data = replace(coloured, sites=sites, test=test)
    coordinate(tmp_path / "run", method(name), data)
    (member,) = deployed(tmp_path / "run", "site-1").members
    assert (member.spec.channels, member.spec.classes) == (1, 2)
    assert member.weights["stages.conv1.0.weight"].shape[1] == 1


@pytest.mark.parametrize("name", BOTH)
def test_sites_may_differ_in_architecture_from_each_other_and_from_the_student(name: str, tmp_path: Path) -> None:
    """Every site has batch norm; the student is a cnn4, which has none, and that is what goes home."""
    per_site = {"site-1": "small", "site-2": "wrn16-2"}
    changes: dict[str, Any] = {"model": {"name": "cnn4", "width": 2, "per_site": per_site}}
    data = federation((8, 6))
    agreed = study(data, method=name, **changes)
    method(name).check(agreed)
    result = coordinate(tmp_path / "run", method(name), data, **changes)
    (member,) = deployed(tmp_path / "run", "site-2").members
    assert member.spec == agreed.student_spec
    home = [row["groups"] for row in result["ledger"]["rows"] if row["kind"] == "delivery"]
    assert [set(groups) for groups in home] == [{"parameters"}] * 2


def test_the_student_does_not_start_from_the_sites_weights() -> None:
    ctx = context(study(method="fedisca"))
    spec = ctx.study.student_spec
    assert weights_hash(ctx.study.fresh_weights(spec, "student")) != weights_hash(ctx.study.initial())


# Several shots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shots", "rounds", "expected"), [(None, None, 1), (None, 1, 1), (None, 3, 3), (2, None, 2), (1, 3, 1), (2, 3, 2)]
)
def test_how_many_shots(shots: int | None, rounds: int | None, expected: int) -> None:
    agreed = study(method="fedisca", rounds=rounds)
    of = method("fedisca", shots=shots)
    assert (of.shots(agreed), of.rounds(agreed)) == (expected, expected)
    state = State({"student": agreed.fresh_weights(agreed.student_spec, "student")})
    asked = [of.ask(context(agreed, round), state) is not None for round in range(4)]
    assert asked == [round < expected for round in range(4)]


@pytest.mark.parametrize(
    ("shots", "rounds", "epochs", "expected"),
    [(2, 2, [3, 5], [3, 5]), (2, 5, 1, [3, 2]), (3, 20, 2, [14, 13, 13]), (3, 1, 2, [1, 1, 0])],
)
def test_the_budget_of_epochs_over_shots(shots: int, rounds: int, epochs: Any, expected: list[int]) -> None:
    of = study(method="fedisca", rounds=rounds, train={"epochs": epochs})
    found = [method("fedisca", shots=shots).epochs_of(context(of, number)) for number in range(shots)]
    assert found == expected
    assert sum(found) == of.total_epochs


@pytest.mark.parametrize("changes", [{"shots": 2}, {"shots": None}])
def test_in_the_second_round_sites_start_from_the_student(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny study has two rounds, so that without `shots` there are two, too."""
    fits, crossed = watch_fits(monkeypatch), watch_bundles(monkeypatch)
    result = coordinate(tmp_path / "run", method("fedisca", **changes), train={"round_decay": 0.5})
    agreed = study(method="fedisca", train={"round_decay": 0.5})
    assert [fit.label for fit in fits] == [f"site-{i}, round {r}" for r in (1, 2) for i in (1, 2, 3)]
    assert [(fit.recipe.epochs, fit.recipe.lr) for fit in fits] == [(1, 0.05)] * 3 + [(1, 0.025)] * 3
    assert {weights_hash(fit.start) for fit in fits[:3]} == {weights_hash(agreed.initial())}
    assert len({fit.seed for fit in fits}) == 6

    ctx, of = context(agreed), method("fedisca", **changes)
    *_, first = of.absorb(ctx, State(), answers(ctx, federation(), of))
    student = weights_hash(dict(first.groups["student"]))
    assert {weights_hash(fit.start) for fit in fits[3:]} == {student}
    asked = [bundle for bundle in crossed if bundle.envelope.kind == "request"]
    assert [dict(bundle.groups) for bundle in asked[:3]] == [{}] * 3
    assert [weights_hash(join_groups(bundle)) for bundle in asked[3:]] == [student] * 3

    layout = spec_layout(agreed.student_spec)
    statistics = 4 * sum(torch.Size(layout.shapes[name]).numel() for name in layout.in_group("statistics"))
    whole = {
        "parameters": 4 * layout.parameter_count,
        "statistics": statistics,
        "counters": 8 * len(layout.in_group("counters")),
    }
    rows = [row for row in result["ledger"]["rows"] if row["kind"] == "request"]
    assert [(row["round"], row["groups"]) for row in rows] == [(0, {})] * 3 + [(1, whole)] * 3
    home = {weights_hash(join_groups(bundle)) for bundle in crossed if bundle.envelope.kind == "delivery"}
    assert len(home) == 1
    assert student not in home


class Watched(FedISCA):
    """Says what it begins with."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.seen: list[tuple[int, State, dict[str, Any]]] = []

    def epochs(self, ctx: Context, state: State, members: list[Member], student: Student, begun: int) -> Epochs:
        self.seen.append(
            (begun, State({"student": student.weights(), "momentum": student.momentum()}), {**state.groups})
        )
        yield from super().epochs(ctx, state, members, student, begun)


def two_rounds(name: str) -> tuple[Context, State, dict[str, Bundle]]:
    """The second round of two: its context, the state that the first left, and its answers."""
    data, of = federation((9, 6)), method(name, shots=2)
    first, second = (context(study(data, method=name), round) for round in (0, 1))
    *_, state = of.absorb(first, State(), answers(first, data, of))
    return second, state, answers(second, data, of, state)


def test_in_the_second_round_the_student_goes_on_and_all_else_begins_anew() -> None:
    ctx, before, sent = two_rounds("fedisca")
    of = Watched(method("fedisca", shots=2).settings)
    first, last = of.absorb(ctx, before, sent)
    ((begun, student, groups),) = of.seen
    assert begun == 0
    assert student.to_bytes() == State({name: before.groups[name] for name in ("student", "momentum")}).to_bytes()
    assert groups.keys() == {"student", "momentum"}
    assert [(state.facts["round"], state.facts["epoch"]) for state in (first, last)] == [(1, 1), (1, 2)]
    assert not torch.equal(first.groups["gallery"]["images"], before.groups["gallery"]["images"])
    for state, epochs in ((before, 2), (first, 3), (last, 4)):
        assert {part: found["steps"] for part, found in state.facts["work"].items()} == dict.fromkeys(
            ("synthesis", "adaptation", "distillation"), 3 * epochs
        )


@pytest.mark.parametrize("name", BOTH)
def test_a_stop_after_any_step_of_the_second_round_changes_nothing(name: str) -> None:
    ctx, before, sent = two_rounds(name)
    whole = list(method(name, shots=2).absorb(ctx, before, sent))
    often = replace(ctx, due=lambda: True)
    states = list(method(name, shots=2).absorb(often, State.from_bytes(before.to_bytes()), sent))
    assert timeless(states[-1]) == timeless(whole[-1])
    for state in states[:-1]:
        *_, last = method(name, shots=2).absorb(ctx, State.from_bytes(state.to_bytes()), sent)
        assert timeless(last) == timeless(whole[-1])


class Killed(BaseException):
    """What `kill -9` is to a process."""


@pytest.mark.parametrize("name", BOTH)
def test_a_run_killed_in_the_second_round_ends_as_if_it_had_not_been(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds of two epochs of three steps; the eleventh step of all is in the last epoch."""
    monkeypatch.setattr(absorbing, "SAVE_EVERY_SECONDS", -1.0)
    coordinate(tmp_path / "straight", method(name, shots=2))
    wait, calls, fatal = Synthesis.wait, [], [11]

    def watched(self: Synthesis) -> Iterate:
        calls.append(self.done)
        if len(calls) in fatal:
            raise Killed
        return wait(self)

    monkeypatch.setattr(Synthesis, "wait", watched)
    with pytest.raises(Killed):
        coordinate(tmp_path / "killed", method(name, shots=2))
    assert calls == [0, 1, 2] * 3 + [0, 1]
    fatal.clear()
    calls.clear()
    fits = watch_fits(monkeypatch)
    result = coordinate(tmp_path / "killed", method(name, shots=2))
    assert calls == [0, 1, 2]  # the state after the epoch before is the last that another followed
    assert fits == []
    assert predictor_bytes(tmp_path / "killed") == predictor_bytes(tmp_path / "straight")
    assert {row["round"] for row in result["ledger"]["rows"] if row["kind"] == "answer"} == {0, 1}


def test_a_site_too_small_to_train_is_left_out_of_both_rounds(tmp_path: Path) -> None:
    coordinate(tmp_path / "three", method("fedisca", shots=2), federation((9, 6, 1)))
    coordinate(tmp_path / "two", method("fedisca", shots=2), federation((9, 6)))
    three, two = (deployed(tmp_path / run, "site-1").members[0].weights for run in ("three", "two"))
    assert weights_hash(three) == weights_hash(two)


@pytest.mark.parametrize("name", BOTH)
def test_what_may_come_down(name: str) -> None:
    agreed = study(method=name)
    weights = agreed.fresh_weights(agreed.student_spec, "student")
    once, twice = (method(name, shots=shots).payload(agreed, "site-1") for shots in (1, 2))
    assert (once.up, once.home) == (twice.up, twice.home)
    assert once.down == ()
    assert [group.name for group in twice.down] == ["parameters", "statistics", "counters"]
    first, second = context(agreed, 0), context(agreed, 1)
    student = second.bundle("request", "site-1", layout_groups(agreed.student_spec, weights))
    twice.check(first.bundle("request", "site-1", {}))
    twice.check(student)
    with pytest.raises(BadInput, match=r"which .* did not declare"):
        once.check(student)
    with pytest.raises(BadInput, match="declared is"):
        twice.check(second.bundle("request", "site-1", {"parameters": {"head.bias": torch.zeros(5)}}))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    "per_site", [{"site-2": "wrn16-2"}, {f"site-{i}": "wrn16-2" for i in (1, 2, 3)}], ids=["one differs", "all differ"]
)
def test_several_rounds_need_the_students_network_at_every_site(name: str, per_site: dict[str, str]) -> None:
    agreed = study(method=name, model={"name": "small", "width": 2, "per_site": per_site})
    method(name, shots=1).check(agreed)
    for shots in (2, None):
        with pytest.raises(BadInput, match=f"^{name} in several rounds needs one model at all sites") as caught:
            method(name, shots=shots).check(agreed)
        assert "\n" not in str(caught.value)


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [FedISCA, DeepInversion, FedBiCross])
@pytest.mark.parametrize(
    ("size", "expected"), [(8, (500, 256, 2)), (28, (500, 256, 2)), (128, (500, 256, 2)), (224, (1000, 50, 30))]
)
def test_values_that_depend_on_the_size_of_images(
    kind: type[Distilled | FedBiCross], size: int, expected: tuple[int, int, int]
) -> None:
    s = kind.Settings().at(size)
    assert (s.steps, s.batch, s.jitter) == expected
    how = s.inversion()
    assert (how.steps, how.batch, how.jitter, how.lr) == (*expected, 0.05)
    assert kind.Settings().steps is None  # what was asked is not changed


@pytest.mark.parametrize("size", [28, 224])
def test_values_that_are_given_win(size: int) -> None:
    s = FedISCA.Settings(steps=7, batch=5, jitter=0, bn_over="sum", classify="each").at(size)
    assert (s.steps, s.batch, s.jitter) == (7, 5, 0)
    assert (s.inversion().bn_over, s.inversion().classify) == ("sum", "each")
    only = FedISCA.Settings(batch=6).at(224)
    assert (only.steps, only.batch, only.jitter) == (1000, 6, 30)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("model", [{"name": "cnn4"}, {"name": "small", "width": 2, "per_site": {"site-2": "cnn4"}}])
def test_a_network_without_batch_norm_is_refused_by_name(name: str, model: dict[str, Any]) -> None:
    agreed = study(method=name, model=model)
    with pytest.raises(BadInput, match=rf"^{name} makes images from .*, and cnn4 \(site-[12]\) has none") as caught:
        method(name).check(agreed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", BOTH)
def test_a_batch_must_hold_every_class(name: str) -> None:
    method(name, batch=4).check(study(method=name))
    with pytest.raises(BadInput, match=rf"^{name}\.batch is 3, too small for each of 4 classes to be in it; use 4"):
        method(name, batch=3).check(study(method=name))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epochs", 0),
        ("steps", 0),
        ("batch", 1),
        ("synthesis_lr", 0),
        ("jitter", -1),
        ("temperature", 0),
        ("momentum", 1),
    ],
)
def test_settings_out_of_range_are_refused(name: str, key: str, value: float) -> None:
    with pytest.raises(BadInput, match=key):
        method(name, **{key: value})


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.nan, "it holds NaN or infinite values"),
        (-1e30, "its batch-norm statistics are of feature maps as large as 1e+30"),
        (-1e4, "its answers are NaN or infinite"),
        (1e-30, "its answers to noise are as large as "),
    ],
)
def test_an_upload_that_is_not_finite_is_refused_by_its_site_and_the_rest_go_on(
    value: float, words: str, name: str
) -> None:
    """Statistics of -1e4 are finite, as the check of what is sent asks for; what they make of an image is not."""
    data, of = federation((9, 6)), method(name, epochs=1)
    notes: list[str] = []
    ctx = replace(context(study(data, method=name)), note=notes.append)
    sent = answers(ctx, data, of)
    broken = {}
    for site in sent:
        groups = {kind: dict(group) for kind, group in sent[site].groups.items()}
        groups["statistics"] = {n: torch.full_like(t, value) for n, t in groups["statistics"].items()}
        broken[site] = ctx.bundle("answer", site, groups)
    (alone,) = of.absorb(ctx, State(), {"site-1": sent["site-1"]})
    assert notes == []
    (state,) = of.absorb(ctx, State(), {"site-1": sent["site-1"], "site-2": broken["site-2"]})
    assert timeless(state) == timeless(alone)
    assert len(notes) == 1
    assert notes[0].startswith(f"the model of site-2 is refused: {words}")
    with pytest.raises(RunFailed, match=r"^no site sent a usable model: all were too small to train, or not finite"):
        next(iter(of.absorb(ctx, State(), broken)))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"synthesis_lr": 1e30}, "the synthesis diverged"),
        ({"lr": 1e30}, "the student diverged in epoch 1"),
        ({"lr": 1e4, "temperature": 20.0}, "the student diverged in epoch 1"),  # finite, but beyond all measure
    ],
)
def test_divergence_fails_the_run_and_says_which(
    name: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RunFailed, match=words):
        coordinate(tmp_path / "run", method(name, **changes), federation((9, 6)))


@pytest.mark.parametrize("name", BOTH)
def test_what_was_made_before_it_diverged_is_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is absurd in the third epoch: the student and the images of two are there."""
    rate = Distilled.rate
    monkeypatch.setattr(Distilled, "rate", lambda self, epoch: 1e30 if epoch == 2 else rate(self, epoch))
    with pytest.raises(Diverged, match="the student diverged in epoch 3"):
        coordinate(tmp_path / "run", method(name, epochs=4), federation((9, 6)))
    record = RunDir(tmp_path / "run")
    checkpoint = record.checkpoint()
    assert checkpoint is not None
    kept = record.load(checkpoint.state)
    assert kept.facts["epoch"] == 2
    assert largest(dict(kept.groups["student"])) < 1e3
    assert (tmp_path / "run" / "gallery.safetensors").is_file()


@pytest.mark.parametrize("name", BOTH)
def test_images_and_times_are_kept_though_no_epoch_was_done(name: str, tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="the student diverged in epoch 1"):
        coordinate(tmp_path / "run", method(name, epochs=2, lr=1e30), federation((9, 6)))
    assert (tmp_path / "run" / "gallery.safetensors").is_file()
    events = RunDir(tmp_path / "run").events.rows()
    assert {"synthesis", "distillation"} <= {event["part"] for event in events if event["kind"] == "work"}


@pytest.mark.parametrize("name", BOTH)
def test_divergence_within_an_epoch_names_that_epoch(name: str) -> None:
    data = federation((9, 6))
    ctx = replace(context(study(data, method=name)), due=lambda: True)
    states = method(name, lr=1e30).absorb(ctx, State(), answers(ctx, data, method(name)))
    with pytest.raises(RunFailed, match="the student diverged in epoch 1"):
        list(states)
