"""The coordinator's loop: sites that fail, memory that does not grow, and what is measured when."""

import gc
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import CPU, SIZES, coordinate, deployed, federation, figures, images, predictor_bytes, study
from wardround import coordinator, examine
from wardround.data.federation import LocalTest, Site
from wardround.errors import Diverged, RunFailed, SiteFailed
from wardround.examine import Examiner
from wardround.exchange.answers import Answers
from wardround.exchange.bundle import Bundle
from wardround.exchange.inprocess import InProcess
from wardround.learn.device import Device
from wardround.learn.evaluate import network_outputs
from wardround.learn.predictor import Predictor
from wardround.measure.manifold import directed
from wardround.methods.base import Answer, Context, Work
from wardround.methods.fedavg import FedAvg
from wardround.methods.local import Local
from wardround.methods.registry import make
from wardround.methods.single import Single
from wardround.methods.state import State
from wardround.progress import Silent
from wardround.record import absorbing
from wardround.record.rundir import Log


class Fragile(FedAvg):
    """FedAvg whose sites fail as told: `{round: [sites]}`."""

    name = "fedavg"

    def __init__(self, failures: Mapping[int, list[str]]) -> None:
        super().__init__()
        self.failures = failures

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        if site.name in self.failures.get(ctx.round, []):
            raise SiteFailed("the scanner is down")
        return (yield from super().answer(ctx, site, request, memory))


def texts(result: Mapping[str, Any]) -> list[str]:
    return [note["text"] for note in result["notes"] if "constant" not in note["text"]]


def test_a_site_that_fails_is_noted_by_name_and_the_others_go_on(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", Fragile({1: ["site-2"]}), rounds=3)
    assert texts(result) == ["site-2 did not answer in round 2: the scanner is down"]
    answered = [(row["round"], row["site"]) for row in result["ledger"]["rows"] if row["kind"] == "answer"]
    assert [site for round, site in answered if round == 1] == ["site-1", "site-3"]
    assert [site for round, site in answered if round == 2] == ["site-1", "site-2", "site-3"]
    assert {row["site"] for row in result["rows"] if row["model"] == "personal"} == {"site-1", "site-2", "site-3"}


def test_a_site_that_always_fails_changes_nothing_for_the_others(tmp_path: Path) -> None:
    coordinate(tmp_path / "failing", Fragile({0: ["site-3"], 1: ["site-3"]}), federation((9, 7, 5)))
    coordinate(tmp_path / "without", FedAvg(), federation((9, 7)))
    assert predictor_bytes(tmp_path / "failing") == predictor_bytes(tmp_path / "without")


def test_all_sites_fail(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"no site answered in round 2 \(site-1: the scanner is down; site-2: the"):
        coordinate(tmp_path / "run", Fragile({1: ["site-1", "site-2", "site-3"]}))


def test_a_failed_round_can_be_tried_again(tmp_path: Path) -> None:
    method = Fragile({1: ["site-1", "site-2", "site-3"]})
    with pytest.raises(RunFailed):
        coordinate(tmp_path / "run", method)
    method.failures = {}
    again = coordinate(tmp_path / "run", method)
    assert figures(again) == figures(coordinate(tmp_path / "straight", FedAvg()))


def test_sites_that_diverge_are_named(tmp_path: Path) -> None:
    """To go on would lead there again, so it is no failure that a resumed run might mend."""
    words = r"no site answered in round 1 \(site-1: training diverged .*clip_norm; site-2.*\); change that$"
    with pytest.raises(Diverged, match=words):
        coordinate(tmp_path / "run", FedAvg(), train={"lr": 1e30, "epochs": 3})


def test_a_site_without_a_predictor_is_noted(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", Local(), train={"lr": 1e30, "epochs": 3})
    assert len(texts(result)) == 3
    assert texts(result)[0].startswith("site-1 has no predictor: training diverged")
    assert result["rows"] == []
    assert {headline["value"] for headline in result["headlines"]} == {None}


@pytest.mark.parametrize(("share", "asked"), [(0.1, 1), (0.16, 1), (0.17, 1), (0.5, 2), (1.0, 3)])
def test_a_share_that_rounds_to_nobody_asks_one_site_and_says_so(share: float, asked: int, tmp_path: Path) -> None:
    """0.16 of 3 sites is 0.48, which rounds to none; 0.17 is 0.51, which is one."""
    result = coordinate(tmp_path / "run", FedAvg(), participants=share)
    by_round = [row["round"] for row in result["ledger"]["rows"] if row["kind"] == "answer"]
    assert by_round == [0] * asked + [1] * asked
    said = f"participants = {share:g} of 3 sites rounds to none; one site is asked in each round"
    assert texts(result) == ([said] if share < 0.17 else [])


def test_a_method_that_asks_everybody_does_not_speak_of_shares(tmp_path: Path) -> None:
    assert texts(coordinate(tmp_path / "run", Single(), participants=0.1)) == []


class AsksNobody(FedAvg):
    """Forgets to ask."""

    def ask(self, ctx: Context, state: State) -> dict[str, Bundle] | None:
        return {}


class AbsorbsNothing(FedAvg):
    """Forgets to answer."""

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        yield from ()


@pytest.mark.parametrize(
    ("method", "words"), [(AsksNobody, "asked no site in round 1"), (AbsorbsNothing, "made nothing of the answers")]
)
def test_a_fault_of_a_method_ends_the_run(method: type[FedAvg], words: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=f"{words}; this is a fault of the method"):
        coordinate(tmp_path / "run", method())


def test_the_answers_of_a_round_do_not_outlive_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred rounds need no more memory than ten, and one round's answers no more than their own."""
    alive: list[weakref.ref[Answers]] = []
    at_start: list[int] = []
    make = Answers.__init__

    def watched(self: Answers, *arguments: Any) -> None:
        gc.collect()
        at_start.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(self))
        make(self, *arguments)

    monkeypatch.setattr(Answers, "__init__", watched)
    coordinate(tmp_path / "run", FedAvg(), federation((4,)), rounds=4)
    assert at_start == [0, 0, 0, 0]


def test_predictors_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five hundred sites with a network of their own are measured one after the other, not held."""
    alive: list[weakref.ref[Predictor]] = []
    most = 0
    keep = coordinator.Coordinator._keep

    def watched(self: Any, site: str, predictor: Predictor, shared: Any) -> None:
        nonlocal most
        alive.append(weakref.ref(predictor))
        gc.collect()
        most = max(most, sum(ref() is not None for ref in alive))
        keep(self, site, predictor, shared)

    monkeypatch.setattr(coordinator.Coordinator, "_keep", watched)
    monkeypatch.setattr(InProcess.__init__, "__defaults__", (2, {}))
    coordinate(tmp_path / "run", Local(), federation([4] * 8), model={"name": "cnn4", "width": 1})
    assert len(alive) == 8
    assert most <= 3  # those that are in step, and the one that is measured


def test_fits_are_logged_with_how_they_went(tmp_path: Path) -> None:
    coordinate(tmp_path / "run", FedAvg(), federation((6, 1)), rounds=1)
    trained, skipped = (row for row in Log(tmp_path / "run" / "events.jsonl").rows() if row["kind"] == "fit")
    assert (trained["label"], trained["images"], trained["skipped"]) == ("site-1, round 1", 6, "")
    assert trained["loss"] > 0
    assert (skipped["label"], skipped["images"], skipped["loss"]) == ("site-2, round 1", 0, None)


# What a site has right after its training -----------------------------------------------------------------------------


def trained_rows(result: Mapping[str, Any]) -> list[tuple[int, str]]:
    rows = [row for row in result["rows"] if row["model"] == "trained"]
    assert {(row["split"], row["n"]) for row in rows} <= {("local", 16)}
    return [(row["round"], row["site"]) for row in rows if row["metric"] == "accuracy"]


def test_trained_models_are_measured_where_asked_for(tmp_path: Path) -> None:
    assert trained_rows(coordinate(tmp_path / "off", FedAvg(), rounds=4)) == []
    found = coordinate(tmp_path / "on", FedAvg(), rounds=4, participants=0.34, evaluate_trained=True)
    asked = [study(participants=0.34).participants(round) for round in range(4)]
    assert trained_rows(found) == [(round, site) for round, sites in enumerate(asked) for site in sites]
    seldom = coordinate(
        tmp_path / "seldom", FedAvg(), rounds=4, participants=0.34, evaluate_trained=True, evaluate_every=2
    )
    assert trained_rows(seldom) == [pair for pair in trained_rows(found) if pair[0] in (1, 3)]


def test_measuring_them_changes_nothing_else(tmp_path: Path) -> None:
    off, on = (coordinate(tmp_path / str(flag), FedAvg(), evaluate_trained=flag) for flag in (False, True))
    assert [row for row in on["rows"] if row["model"] != "trained"] == off["rows"]
    assert predictor_bytes(tmp_path / "True") == predictor_bytes(tmp_path / "False")


def test_a_trained_model_is_measured_before_it_is_averaged(tmp_path: Path) -> None:
    """One site: what it has after training is what the shared model becomes."""
    result = coordinate(tmp_path / "run", FedAvg(), federation((9,)), evaluate_trained=True)
    by = {(r["model"], r["round"]): r["value"] for r in result["rows"] if r["site"] and r["metric"] == "accuracy"}
    assert [by["trained", round] for round in (0, 1)] == [by["shared", round] for round in (0, 1)]


def test_features_are_compared_where_asked_for(tmp_path: Path) -> None:
    off, on = (coordinate(tmp_path / str(flag), FedAvg(), evaluate_features=flag) for flag in (False, True))
    assert off["features"] == []
    assert figures(on) == figures(off)
    assert predictor_bytes(tmp_path / "True") == predictor_bytes(tmp_path / "False")
    assert [(row["site"], row["images"]) for row in on["features"]] == [
        (f"site-{number}", size) for number, size in enumerate(SIZES, 1)
    ]
    # By its definition, from the predictor that the run left.
    (member,) = deployed(tmp_path / "True", "site-1").members
    network = member.spec, member.weights
    sites = [(network_outputs(*network, s.train.images, CPU).features, s.train.labels) for s in federation().sites]
    for row, (own, labels) in zip(on["features"], sites, strict=True):
        expected = [
            max(directed(union, own[labels == c]), directed(own[labels == c], union))
            for c in range(4)
            for union in [torch.cat([f[y == c] for f, y in sites])]
            if (labels == c).any()
        ]
        assert row["by_class"] == pytest.approx(expected)
        assert row["distance"] == pytest.approx(sum(expected) / len(expected))
        assert row["relative"] > 0


def test_of_a_large_site_some_images_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "FEATURES_OF_A_SITE", 7)
    one, same, other = (
        coordinate(tmp_path / str(i), FedAvg(), evaluate_features=True, seed=seed)["features"]
        for i, seed in enumerate((0, 0, 1))
    )
    assert [row["images"] for row in one] == [7, 7, 6]
    assert one == same != other


def test_without_one_shared_network_there_is_a_note(tmp_path: Path) -> None:
    for name in ("local", "ensemble"):
        found = coordinate(tmp_path / name, make(name, {}), evaluate_features=True)
        assert found["features"] == []
        assert texts(found) == ["features are not compared: there is no one network that all sites share"]


def test_a_site_without_images_has_no_features(tmp_path: Path) -> None:
    found = coordinate(tmp_path / "run", FedAvg(), federation((9, 0)), evaluate_features=True)
    assert [(row["site"], row["distance"]) for row in found["features"]] == [("site-1", 0.0)]


class Slow(FedAvg):
    """Absorbs in three steps, and dies once after the second."""

    def __init__(self, dies_in: int) -> None:
        super().__init__()
        self.dies_in = dies_in

    def absorb(self, ctx: Context, state: State, answers: Mapping[str, Bundle]) -> Iterator[State]:
        for step in range(3):
            if step == 2 and ctx.round == self.dies_in:
                self.dies_in = -1
                raise KeyboardInterrupt
            yield state if step < 2 else next(iter(super().absorb(ctx, state, answers)))


def test_a_run_that_is_stopped_measures_every_trained_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of absorbing, it goes on from stored answers, and asks and measures nobody again."""
    monkeypatch.setattr(absorbing, "SAVE_EVERY_SECONDS", -1.0)
    straight = coordinate(tmp_path / "straight", Slow(-1), evaluate_trained=True)
    stopped = Slow(1)
    with pytest.raises(KeyboardInterrupt):
        coordinate(tmp_path / "stopped", stopped, evaluate_trained=True)
    again = coordinate(tmp_path / "stopped", stopped, evaluate_trained=True)
    assert figures(again) == figures(straight)
    assert trained_rows(again) == [(round, f"site-{k}") for round in (0, 1) for k in (1, 2, 3)]


def test_the_seconds_of_a_round_are_without_those_of_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr("wardround.coordinator.time.monotonic", lambda: float(next(clock)))
    points = coordinate(tmp_path / "run", FedAvg(), evaluate_trained=True)["rounds"]
    events = list(Log(tmp_path / "run" / "events.jsonl").rows())
    ends = [event["seconds"] for event in events if event["kind"] == "round"]
    spent = [sum(e["seconds"] for e in events if (e["kind"], e.get("round")) == ("measuring", r)) for r in (0, 1)]
    assert spent == [4.0, 4.0]  # three sites and the shared model, a tick each
    assert [point["seconds"] for point in points] == [ends[0] - 4, ends[1] - 8]


# The examiner ---------------------------------------------------------------------------------------------------------


def examiner() -> Examiner:
    return Examiner(federation(), Device(CPU, 1), "fp32", "toy", 7, Silent())


def constant(logits: list[float]) -> Predictor:
    return Predictor(4, log_prior=torch.tensor(logits))


def test_the_rows_of_a_constant_by_hand() -> None:
    """Sites of 11, 8 and 6 images in turn over four classes: 3 of 11, 2 of 8 and 2 of 6 are of class 0."""
    rows = list(examiner().shared(2, constant([1.0, 0.0, 0.0, 0.0])))
    assert {(row["method"], row["seed"], row["round"], row["model"]) for row in rows} == {("toy", 7, 2, "shared")}
    found = {(row["site"], row["metric"]): row["value"] for row in rows}
    assert found["", "accuracy"] == found["", "balanced_accuracy"] == 0.25
    assert found["", "macro_auc"] == 0.5
    assert found["site-1", "accuracy"] == pytest.approx(3 / 11)
    assert found["site-2", "accuracy"] == pytest.approx(2 / 8)
    assert found["site-3", "accuracy"] == pytest.approx(2 / 6)


def test_a_personal_predictor_is_measured_on_its_own_and_on_the_global_test() -> None:
    rows = list(examiner().personal(0, "site-2", constant([0.0, 1.0, 0.0, 0.0])))
    assert [(row["site"], row["split"], row["metric"]) for row in rows] == [
        ("site-2", "local", "accuracy"),
        ("site-2", "local", "balanced_accuracy"),
        ("site-2", "global", "accuracy"),
        ("site-2", "global", "balanced_accuracy"),
        ("site-2", "global", "macro_auc"),
    ]


def own_test(labels: list[int]) -> Examiner:
    """An examiner of sites of which the first is tested on images of its own."""
    data = federation()
    first = replace(data.sites[0], test=LocalTest(images(len(labels), seed=8, labels=labels), None))
    return Examiner(replace(data, sites=(first, *data.sites[1:])), Device(CPU, 1), "fp32", "toy", 0, Silent())


def test_a_site_with_images_of_its_own_is_tested_on_them() -> None:
    rows = own_test([3, 3, 3, 3, 0]).personal(0, "site-1", constant([0.0, 0.0, 0.0, 1.0]))
    assert [(row["value"], row["n"]) for row in rows if row["split"] == "local"] == [(0.8, 5), (0.5, 5)]


def test_short_lived_predictors_are_not_taken_for_one_another() -> None:
    """A predictor is told by its tensors' addresses, which the next one would be given if it were let go."""
    examined = own_test([3, 3, 3, 3, 0])
    for number in range(40):
        logits = [float(c == number % 4) for c in range(4)]
        accuracy = next(examined.personal(0, "site-1", constant(logits)))["value"]
        assert accuracy == {0: 0.2, 3: 0.8}.get(number % 4, 0.0)


def test_constant_predictors_are_recognised() -> None:
    assert examiner().is_constant(constant([1.0, 0.0, 0.0, 0.0]))


def test_the_same_predictor_on_the_same_images_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    scores = Predictor.scores_of
    monkeypatch.setattr(Predictor, "scores_of", lambda self, *rest: computed.append(1) or scores(self, *rest))  # type: ignore[func-returns-value]
    examined, one = examiner(), constant([1.0, 0.0, 0.0, 0.0])
    list(examined.shared(0, one))
    list(examined.personal(0, "site-1", one))
    assert examined.is_constant(one)
    assert len(computed) == 1
    list(examined.personal(0, "site-2", constant([0.0, 1.0, 0.0, 0.0])))
    assert len(computed) == 2
    examined.forget(except_for=one)
    list(examined.shared(0, one))
    assert len(computed) == 2
    examined.forget()
    list(examined.shared(0, one))
    assert len(computed) == 3
