"""FedAvg: the average worked out by hand, and whole rounds against a plain loop that shares no code with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tiny import context, coordinate, deployed, drive, federation, figures, predictor_bytes, study, watch_fits
from wardround.data.federation import Federation
from wardround.errors import BadInput, RunFailed
from wardround.exchange.bundle import Bundle, Envelope
from wardround.learn.predictor import Predictor
from wardround.methods.fedavg import FedAvg
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.methods.template import Visit, average
from wardround.models import Weights, build
from wardround.streams import Streams


def answer(site: str, images: int, w: Any, mean: float = 0.0, steps: int = 0) -> Bundle:
    groups = {
        "parameters": {"w": torch.tensor(w, dtype=torch.float32)},
        "statistics": {"bn.running_mean": torch.tensor([mean])},
        "counters": {"bn.num_batches_tracked": torch.tensor(steps)},
        "size": {"images": torch.tensor(images)},
    }
    return Bundle(Envelope("answer", "study", "fedavg", site, 0), groups)


def averaged(*answers: Bundle) -> Weights:
    return average({bundle.envelope.site: bundle for bundle in answers}, FedAvg().weigh)


# The average ----------------------------------------------------------------------------------------------------------


def test_weighted_by_images() -> None:
    """(1·[4, 0] + 3·[8, 2]) / 4 = [7, 1.5]; the running mean (1·10 + 3·2) / 4 = 4."""
    mean = averaged(answer("a", 1, [4.0, 0.0], 10.0), answer("b", 3, [8.0, 2.0], 2.0))
    assert mean["w"].tolist() == [7.0, 1.5]
    assert mean["bn.running_mean"].tolist() == [4.0]


def test_counters_take_the_largest_and_stay_whole_numbers() -> None:
    mean = averaged(answer("a", 1, [0.0], steps=3), answer("b", 1, [0.0], steps=8), answer("c", 9, [0.0], steps=5))
    assert mean["bn.num_batches_tracked"].dtype == torch.int64
    assert int(mean["bn.num_batches_tracked"]) == 8


def test_a_skipped_site_has_no_weight_and_no_say() -> None:
    """Even when what it sent is not a number, and even in the counters."""
    mean = averaged(answer("a", 0, [float("nan")], 99.0, steps=50), answer("b", 2, [3.0], 5.0, steps=4))
    assert mean["w"].tolist() == [3.0]
    assert mean["bn.running_mean"].tolist() == [5.0]
    assert int(mean["bn.num_batches_tracked"]) == 4


def test_one_site_gives_exactly_its_weights() -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(1)).tolist()
    mean = averaged(answer("a", 7, values, 0.1, steps=4))
    assert mean["w"].tolist() == torch.tensor(values).tolist()
    assert mean["bn.running_mean"].item() == torch.tensor(0.1).item()


def test_equal_answers_average_to_themselves_where_the_weights_are_exact() -> None:
    mean = averaged(answer("a", 1, [0.1, 0.7]), answer("b", 1, [0.1, 0.7]))
    assert mean["w"].tolist() == torch.tensor([0.1, 0.7]).tolist()


def test_all_skipped_cannot_be_averaged() -> None:
    with pytest.raises(RunFailed, match="no site could train"):
        averaged(answer("a", 0, [1.0]), answer("b", 0, [2.0]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_is_refused_by_name(value: float) -> None:
    with pytest.raises(RunFailed, match=r"the average of w is not finite; b sent NaN or infinity"):
        averaged(answer("a", 1, [1.0]), answer("b", 1, [value]), answer("c", 1, [1.0]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_where_it_can_be_told_the_rest_go_on(value: float) -> None:
    """Weights 1, 5 and 3 without the second: (1·1 + 3·5)/4."""
    said: list[str] = []
    sent = {name: answer(name, n, [w]) for name, n, w in (("a", 1, 1.0), ("b", 5, value), ("c", 3, 5.0))}
    mean = average(sent, FedAvg().weigh, said.append)
    assert mean["w"].tolist() == [4.0]
    assert said == ["the answer of b in round 1 is refused: it holds NaN or infinite values"]
    with pytest.raises(RunFailed, match=r"the average of w is not finite; b sent NaN or infinity"):
        average({"b": sent["b"]}, lambda each: 1.0, said.append)


def test_statistics_that_are_not_numbers_are_refused_too() -> None:
    with pytest.raises(RunFailed, match=r"bn.running_mean is not finite; a, c sent"):
        averaged(answer("a", 1, [1.0], float("nan")), answer("b", 1, [1.0]), answer("c", 1, [1.0], float("inf")))


def test_the_answers_are_not_changed() -> None:
    one, two = answer("a", 1, [1.0, 2.0], 1.0, 3), answer("b", 2, [3.0, 4.0], 2.0, 4)
    before = one.sha256(), two.sha256()
    averaged(one, two)
    assert (one.sha256(), two.sha256()) == before


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 50), st.floats(-100, 100, width=32)), min_size=1, max_size=8), st.randoms())
def test_the_mean_lies_between_and_the_order_of_arrival_changes_nothing(sent: Any, random: Any) -> None:
    answers = {f"site-{i}": answer(f"site-{i}", images, [value]) for i, (images, value) in enumerate(sent)}
    weighed = [value for images, value in sent if images]
    if not weighed:
        with pytest.raises(RunFailed):
            average(answers, FedAvg().weigh)
        return
    mean = average(answers, FedAvg().weigh)["w"]
    assert min(weighed) - 1e-3 <= mean.item() <= max(weighed) + 1e-3
    shuffled = list(answers)
    random.shuffle(shuffled)
    assert torch.equal(average({site: answers[site] for site in shuffled}, FedAvg().weigh)["w"], mean)


# Rounds ---------------------------------------------------------------------------------------------------------------


def plain_fedavg(data: Federation, agreed: Any, rounds: int) -> dict[str, Tensor]:
    """McMahan's Algorithm 1 as a loop: plain SGD with momentum, fresh in every round, nothing of ours but the draws."""
    model: dict[str, Any] = agreed.initial()
    total = sum(len(site.train) for site in data.sites)
    for round in range(rounds):
        recipe = agreed.recipe(round)
        collected = []
        for site in data.sites:
            net = build(agreed.common_spec)
            net.load_state_dict(model)
            net.train()
            optimiser = torch.optim.SGD(
                net.parameters(), lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
            )
            draws = Streams(agreed.streams.number("fit", site.name, round))
            for epoch in range(recipe.epochs):
                order = torch.randperm(len(site.train), generator=draws.torch("shuffle", index=epoch))
                for batch in torch.split(order, recipe.batch):
                    optimiser.zero_grad()
                    pixels = site.train.images[batch].float() / 127.5 - 1
                    F.cross_entropy(net(pixels), site.train.labels[batch]).backward()  # type: ignore[no-untyped-call]
                    optimiser.step()
            collected.append((len(site.train) / total, net.state_dict()))
        model = {
            name: max(state[name] for _, state in collected)
            if name.endswith("num_batches_tracked")
            else sum(share * state[name] for share, state in collected)
            for name in model
        }
    return model


@pytest.mark.parametrize("model", ["cnn4", "small"])
def test_two_rounds_of_two_sites_against_a_plain_loop(model: str, tmp_path: Path) -> None:
    """Steps are small and batches even, since a narrow batch-norm network soon makes 1e-3 of a rounding error."""
    data = federation((16, 8))
    schedule: dict[str, Any] = {
        "rounds": 2,
        "train": {"epochs": 2, "batch": 8, "lr": 0.01},
        "model": {"name": model, "width": 4},
    }
    agreed = study(data, **schedule)
    coordinate(tmp_path / "run", FedAvg(), data, **schedule)
    expected = plain_fedavg(data, agreed, 2)
    for site in data.sites:
        (member,) = deployed(tmp_path / "run", site.name).members
        assert member.weights.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(member.weights[name], tensor, rtol=1e-5, atol=2e-6)
    assert not torch.allclose(agreed.initial()["head.weight"], expected["head.weight"], atol=1e-3)


def test_the_shared_model_is_what_every_site_deploys(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", FedAvg())
    assert list(predictor_bytes(tmp_path / "run")) == ["shared.safetensors"]
    by = {(r["model"], r["site"], r["split"], r["metric"]): r["value"] for r in result["rows"] if r["round"] == 1}
    for site in ("site-1", "site-2", "site-3"):
        assert by["personal", site, "global", "macro_auc"] == by["shared", "", "global", "macro_auc"]
        assert by["personal", site, "local", "accuracy"] == by["shared", site, "local", "accuracy"]


def test_one_site_is_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, fits = federation((9,)), watch_fits(monkeypatch)
    coordinate(tmp_path / "run", FedAvg(), data, rounds=1)
    (fit,) = fits
    ctx = context(study(data, rounds=1))
    requests = FedAvg().ask(ctx, State({"model": fit.start})) or {}
    trained = drive(ctx, FedAvg().answer(ctx, data.sites[0], requests["site-1"], State())).bundle
    (member,) = deployed(tmp_path / "run", "site-1").members
    for group in ("parameters", "statistics", "counters"):
        for name, tensor in trained.group(group).items():
            assert torch.equal(member.weights[name], tensor)


def test_only_participants_weigh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "some", FedAvg(), rounds=1, participants=0.34)
    (asked,) = study(participants=0.34).participants(0)
    assert [fit.label for fit in fits] == [f"{asked}, round 1"]
    (member,) = deployed(tmp_path / "some", "site-1").members
    data = federation()
    ctx = context(study(data, rounds=1, participants=0.34))
    requests = FedAvg().ask(ctx, FedAvg().begin(ctx)) or {}
    (site,) = (s for s in data.sites if s.name == asked)
    trained = drive(ctx, FedAvg().answer(ctx, site, requests[asked], State())).bundle
    assert torch.equal(member.weights["head.weight"], trained.group("parameters")["head.weight"])


def test_asks_for_as_many_rounds_as_the_study_has() -> None:
    method = FedAvg()
    agreed = study(rounds=3)
    state = method.begin(context(agreed))
    assert [method.ask(context(agreed, round), state) is None for round in range(4)] == [False, False, False, True]


def test_epochs_of_a_round_come_from_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few-shot: a list of epochs, the last holding for what follows; the rate decays by round."""
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", FedAvg(), federation((4,)), rounds=3, train={"epochs": [3, 1], "round_decay": 0.5})
    assert [(fit.recipe.epochs, fit.recipe.lr) for fit in fits] == [(3, 0.05), (1, 0.025), (1, 0.0125)]


def test_a_site_too_small_to_train_is_noted_and_left_out(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "with", FedAvg(), federation((10, 1)))
    alone = coordinate(tmp_path / "without", FedAvg(), federation((10,)))
    texts = [note["text"] for note in result["notes"]]
    assert "site-2, round 1: not trained, one image is too few for batch norm" in texts
    assert predictor_bytes(tmp_path / "with") == predictor_bytes(tmp_path / "without")
    assert {r["site"] for r in result["rows"] if r["model"] == "personal"} == {"site-1", "site-2"}
    assert not any("not trained" in note["text"] for note in alone["notes"])


@pytest.mark.parametrize(
    ("name", "own", "settings", "round"),
    [
        ("fedavg", {}, {"rounds": 2, "train": {"epochs": 0}}, 1),
        ("fedprox", {}, {"rounds": 4, "train": {"epochs": [3, 1, 0]}}, 3),
        ("fedmp", {}, {"rounds": 2, "train": {"epochs": [1, 0]}}, 2),
        ("fedntd", {}, {"rounds": 2, "train": {"epochs": [1, 0]}}, 2),
        ("fedmp-fewshot", {"epochs": [2, 0, 1]}, {}, 2),
        ("single", {}, {"rounds": 2, "train": {"epochs": 0}}, 1),
    ],
)
def test_a_round_without_epochs_is_refused_before_any_work(
    name: str, own: dict[str, Any], settings: dict[str, Any], round: int
) -> None:
    """Not when that round comes, after all those before it."""
    with pytest.raises(BadInput, match=rf"^{name} would train for 0 epochs in round {round}, .* one epoch or more$"):
        make(name, own).check(study(federation((4, 4)), **settings))


@pytest.mark.parametrize(
    ("name", "own", "settings"),
    [
        ("fedavg", {}, {"rounds": 2, "train": {"epochs": [1, 1, 0]}}),  # a third round is not there
        ("fedmp-fewshot", {"epochs": 1}, {"rounds": 2, "train": {"epochs": 0}}),
        ("single", {}, {"rounds": 2, "train": {"epochs": [0, 1]}}),
        ("local", {}, {"rounds": 2, "train": {"epochs": 0}}),
    ],
)
def test_no_epochs_where_no_round_goes_without(name: str, own: dict[str, Any], settings: dict[str, Any]) -> None:
    make(name, own).check(study(federation((4, 4)), **settings))


@pytest.mark.parametrize(("name", "group"), [("fedas", "trace"), ("fedmp", "embeddings"), ("fedmp", "prototypes")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_site_that_would_send_what_is_no_number_does_not_answer_and_the_others_go_on(
    name: str, group: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finite weights can have infinite features and gradients."""
    kind = type(make(name, {}))
    more_up = kind.more_up

    def broken(self: Any, visit: Visit, fit: Any, fitted: Any) -> Any:
        found = more_up(self, visit, fit, fitted)
        if visit.site.name == "site-2":
            found[group] = {n: t * value if t.is_floating_point() else t for n, t in found[group].items()}
        return found

    monkeypatch.setattr(kind, "more_up", broken)
    result = coordinate(tmp_path / "run", make(name, {}), federation((8, 8, 8)), rounds=2)
    told = [note["text"] for note in result["notes"] if "did not answer" in note["text"]]
    said = f"its {group} would hold NaN or infinite values; use a smaller train.lr, or set train.clip_norm"
    assert told == [f"site-2 did not answer in round {round}: {said}" for round in (1, 2)]


def test_no_site_can_train(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="no site could train"):
        coordinate(tmp_path / "run", FedAvg(), federation((1, 1)))


def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    runs = {
        workers: coordinate(tmp_path / str(workers), FedAvg(), federation((9, 7, 1, 5)), workers=workers)
        for workers in (1, 2, 4)
    }
    assert figures(runs[1]) == figures(runs[2]) == figures(runs[4])
    assert predictor_bytes(tmp_path / "1") == predictor_bytes(tmp_path / "2") == predictor_bytes(tmp_path / "4")


def test_another_seed_is_another_result(tmp_path: Path) -> None:
    coordinate(tmp_path / "0", FedAvg(), seed=0)
    coordinate(tmp_path / "again", FedAvg(), seed=0)
    coordinate(tmp_path / "1", FedAvg(), seed=1)
    assert predictor_bytes(tmp_path / "0") == predictor_bytes(tmp_path / "again")
    assert predictor_bytes(tmp_path / "0") != predictor_bytes(tmp_path / "1")


def test_the_predictor_is_the_averaged_network() -> None:
    ctx = context(study())
    state = FedAvg().begin(ctx)
    predictor = FedAvg().predictor(ctx, state)
    assert isinstance(predictor, Predictor)
    assert predictor.members[0].weights == dict(state.groups["model"])
