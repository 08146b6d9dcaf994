import math
import threading
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from wardround import tensorfile
from wardround.learn import evaluate
from wardround.learn.device import Device
from wardround.learn.evaluate import network_outputs
from wardround.learn.pixels import normalise
from wardround.learn.predictor import UNSURE, Measure, Member, Predictor, confidence, single
from wardround.models import NetSpec, Weights, build, fresh, names

CPU = torch.device("cpu")
BN, PLAIN = NetSpec("small", 3, 2, 8, width=2), NetSpec("cnn4", 3, 2, 8, width=2)


def weights(spec: NetSpec, seed: int) -> Weights:
    """Fresh weights with statistics that are not those of a fresh network, so that evaluation mode shows."""
    generator = torch.Generator().manual_seed(seed)
    drawn = fresh(spec, generator)
    for name, tensor in drawn.items():
        if name.endswith(("running_mean", "running_var")):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return drawn


def pixels(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, 3, 8, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def panel(count: int, **how: object) -> Predictor:
    """A predictor of several members; only their number matters to `combined`."""
    member = Member(PLAIN, weights(PLAIN, 0))
    return Predictor(2, (member,) * count, **how)  # type: ignore[arg-type]


A, B = torch.tensor([[1.0, 3.0], [0.0, 4.0]]), torch.tensor([[5.0, -1.0], [2.0, 0.0]])


# How members combine: numbers by hand ---------------------------------------------------------------------------------


def test_logits_are_averaged() -> None:
    assert panel(2).combined([A, B], 2).tolist() == [[3.0, 1.0], [1.0, 2.0]]


def test_trust_weighs_members() -> None:
    """(3·1 + 1·5) / 4 = 2 and (3·3 − 1) / 4 = 2; (0 + 2) / 4 and (12 + 0) / 4."""
    assert panel(2, trust=torch.tensor([3.0, 1.0])).combined([A, B], 2).tolist() == [[2.0, 2.0], [0.5, 3.0]]


def test_trust_weighs_members_class_by_class() -> None:
    """Class 0 is the mean of both members, class 1 trusts B three times as much as A: (1·3 + 3·(−1)) / 4 = 0."""
    trust = torch.tensor([[2.0, 1.0], [2.0, 3.0]], dtype=torch.float64)
    assert panel(2, trust=trust).combined([A, B], 2).tolist() == [[3.0, 0.0], [1.0, 1.0]]


def test_a_member_without_trust_says_nothing() -> None:
    assert panel(2, trust=torch.tensor([0.0, 5.0])).combined([A, B], 2).tolist() == B.tolist()


def test_a_class_that_nobody_is_trusted_with_stays_finite() -> None:
    scores = panel(2, trust=torch.tensor([[1.0, 0.0], [1.0, 0.0]])).combined([A, B], 2)
    assert scores.tolist() == [[3.0, 0.0], [1.0, 0.0]]


def test_softmax_averages_probabilities_and_scores_are_their_logarithms() -> None:
    """Probabilities (0.2, 0.8) and (0.6, 0.4): the mean is (0.4, 0.6), and with trust 1 to 3 (0.5, 0.5)."""
    logits = [torch.tensor([[0.2, 0.8]]).log(), torch.tensor([[0.6, 0.4]]).log()]
    mean = panel(2, combine="softmax").combined(logits, 1)
    weighed = panel(2, combine="softmax", trust=torch.tensor([1.0, 3.0])).combined(logits, 1)
    assert torch.allclose(mean.exp(), torch.tensor([[0.4, 0.6]]))
    assert torch.allclose(weighed.exp(), torch.tensor([[0.5, 0.5]]))


def test_softmax_of_certain_members_is_finite() -> None:
    scores = panel(1, combine="softmax").combined([torch.tensor([[1000.0, -1000.0]])], 1)
    assert bool(torch.isfinite(scores).all())
    assert scores.argmax().item() == 0


def test_a_chain_by_hand() -> None:
    """P₁ = (½, ¼, ¼), of which the second knows classes 0 and 2: ¾ are theirs. It says 8:9:1 and has seen them 4:1:1,

    so 2:1 of classes 0 and 2: ½, ¼ and ¼. Where the first sees class 1 alone it stays so.
    """
    first = torch.tensor([[0.5, 0.25, 0.25], [1e-6, 1 - 2e-6, 1e-6]]).log() + 7
    second = torch.tensor([[8.0, 9.0, 1.0]] * 2).log() - 2
    of = Predictor(
        3,
        panel(2).members,
        "chain",
        torch.tensor([[1.0, 1, 1], [9, 0, 9]], dtype=torch.float64),
        member_log_prior=torch.tensor([[1.0, 1, 1], [4, 1, 1]], dtype=torch.float64).log(),
    )
    found = of.combined([first, second], 2).exp()
    torch.testing.assert_close(found[0], torch.tensor([0.5, 0.25, 0.25]))
    torch.testing.assert_close(found[1], torch.tensor([4e-6 / 3, 1 - 2e-6, 2e-6 / 3]))
    assert of.familiarity([first, second]).tolist() == first.amax(dim=1).tolist()
    nothing = replace(of, trust=torch.zeros(2, 3)).combined([first, second], 2)
    torch.testing.assert_close(nothing, first.log_softmax(dim=1))  # the first alone
    everything = replace(of, trust=torch.ones(2, 3)).combined([first, second], 2).exp()
    torch.testing.assert_close(everything, torch.tensor([[2.0, 9, 1]] * 2) / 12)  # the second alone
    with pytest.raises(ValueError, match="a chain is of two members"):
        replace(of, trust=None).combined([first, second], 2)


def test_the_log_prior_is_added() -> None:
    prior = torch.tensor([0.25, 0.75], dtype=torch.float64).log()
    assert torch.allclose(
        panel(2, log_prior=prior).combined([A, B], 2), torch.tensor([[3.0, 1], [1, 2]]) + prior.float()
    )
    logits = [torch.tensor([[0.5, 0.5]]).log()]
    found = panel(1, combine="softmax", log_prior=prior).combined(logits, 1)
    assert found.flatten().tolist() == pytest.approx([math.log(0.125), math.log(0.375)])


def test_the_members_own_priors_are_divided_out() -> None:
    """(0.8, 0.2) over (0.8, 0.2) is (1, 1) and so (0.5, 0.5); (0.6, 0.2) over (3, 1) is (0.5, 0.5) as logits are."""
    logits = [torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.6, 0.2]]).log()]
    priors = torch.tensor([[0.8, 0.2], [3.0, 1.0]], dtype=torch.float64).log()
    found = panel(2, combine="softmax", member_log_prior=priors).combined(logits, 1)
    assert torch.allclose(found.exp(), torch.tensor([[0.5, 0.5]]))
    assert torch.allclose(panel(2, member_log_prior=torch.stack([A[0], B[0]])).combined([A, B], 2)[0], torch.zeros(2))


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_prior_alone_is_a_constant_predictor(n: int) -> None:
    constant = Predictor(3, log_prior=torch.tensor([0.1, 0.7, 0.2]).log())
    scores = constant.scores(pixels(n), Device(CPU, 2))
    assert scores.shape == (n, 3)
    assert scores.argmax(1).tolist() == [1] * n


# Members weighed image by image ---------------------------------------------------------------------------------------


def probabilities(predictor: Predictor, *members: list[list[float]]) -> Tensor:
    """What a predictor makes of members that have these probabilities."""
    return predictor.combined([torch.tensor(p).log() for p in members], len(members[0])).softmax(dim=1)


def test_a_wide_margin_counts_more() -> None:
    """Margins 0.2 and 0.8: 0.2·0.6 + 0.8·0.1 = 0.2. Of the second image 0.6 and 0.2: 0.75·0.8 + 0.25·0.4 = 0.7."""
    found = probabilities(panel(2, combine="margin"), [[0.6, 0.4], [0.8, 0.2]], [[0.1, 0.9], [0.4, 0.6]])
    assert torch.allclose(found, torch.tensor([[0.2, 0.8], [0.7, 0.3]]))


def test_a_large_maximum_counts_more() -> None:
    """0.6 to 0.9 are shares of 0.4 and 0.6: 0.4·0.6 + 0.6·0.1 = 0.3."""
    found = probabilities(panel(2, combine="maximum"), [[0.6, 0.4]], [[0.1, 0.9]])
    assert torch.allclose(found, torch.tensor([[0.3, 0.7]]))


def test_a_small_entropy_counts_more() -> None:
    """Of four classes two alike: 1 − log 2 / log 4 = 1/2; a certain one: 1. So 1/3·1/2 + 2/3·1 = 5/6."""
    four = Predictor(4, panel(2).members, combine="entropy")
    found = probabilities(four, [[0.5, 0.5, 0.0, 0.0]], [[1.0, 0.0, 0.0, 0.0]])
    assert torch.allclose(found, torch.tensor([[5 / 6, 1 / 6, 0.0, 0.0]]))


def test_trust_and_confidence_multiply() -> None:
    """Margins 0.2 and 0.8 with trust 4 to 1 are equal shares."""
    found = probabilities(panel(2, combine="margin", trust=torch.tensor([4.0, 1.0])), [[0.6, 0.4]], [[0.1, 0.9]])
    assert torch.allclose(found, torch.tensor([[0.35, 0.65]]))


@pytest.mark.parametrize("measure", ["entropy", "margin"])
def test_who_is_not_sure_at_all_is_not_heard_beside_one_who_is(measure: Measure) -> None:
    found = probabilities(panel(2, combine=measure), [[0.5, 0.5]], [[0.1, 0.9]])
    assert torch.allclose(found, torch.tensor([[0.1, 0.9]]), atol=1e-5)


def test_members_of_whom_none_is_sure_vote_alike() -> None:
    three = Predictor(3, panel(2).members, combine="margin")
    found = probabilities(three, [[0.5, 0.5, 0.0]], [[0.0, 0.5, 0.5]])
    assert torch.allclose(found, torch.tensor([[0.25, 0.5, 0.25]]))


@given(st.integers(0, 2**32), st.integers(2, 6), st.sampled_from(["entropy", "margin", "maximum"]))
@settings(deadline=None, max_examples=25)
def test_confidence_lies_between_unsure_and_one_and_the_mean_between_the_members(
    seed: int, classes: int, measure: Measure
) -> None:
    logits = torch.randn(3, 5, classes, generator=torch.Generator().manual_seed(seed)) * 4
    softmax = logits.softmax(dim=2)
    sure = confidence(softmax, measure)
    assert sure.shape == (3, 5)
    assert bool(((sure >= UNSURE) & (sure <= 1 + 1e-6)).all())
    found = Predictor(classes, panel(3).members, measure).combined(list(logits), 5).exp()
    assert bool((found <= softmax.amax(dim=0) + 1e-6).all())
    assert bool((found >= softmax.amin(dim=0) - 1e-6).all())
    assert torch.allclose(found.sum(dim=1), torch.ones(5), atol=1e-5)


# Members are networks -------------------------------------------------------------------------------------------------


def test_scores_come_from_the_networks_in_evaluation_mode() -> None:
    first, second = Member(BN, weights(BN, 1)), Member(PLAIN, weights(PLAIN, 2))
    images = pixels(5)
    expected = []
    for member in (first, second):
        net = build(member.spec)
        net.load_state_dict(member.weights)
        with torch.no_grad():
            expected.append(torch.stack([net.eval()(normalise(image[None]))[0] for image in images]))
    found = Predictor(2, (first, second), trust=torch.tensor([1.0, 3.0])).scores(images, Device(CPU, 2))
    assert torch.allclose(found, 0.25 * expected[0] + 0.75 * expected[1], atol=1e-5)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("name", names())
def test_no_images_give_empty_outputs_and_one_gives_one(name: str) -> None:
    spec = NetSpec(name, 1, 3, 16, width=2)
    held = fresh(spec, torch.Generator().manual_seed(0))
    for n in (0, 1):
        outputs = network_outputs(spec, held, torch.zeros(n, 1, 16, 16, dtype=torch.uint8), CPU)
        assert outputs.logits.shape == (n, 3)
        assert outputs.features.shape == (n, outputs.features.shape[1])
        assert bool(torch.isfinite(outputs.logits).all())


@pytest.mark.parametrize("spec", [BN, PLAIN], ids=lambda spec: spec.name)
def test_workers_change_no_bit_and_batches_nothing_that_matters(spec: NetSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    held, images = weights(spec, 3), pixels(23)
    whole = network_outputs(spec, held, images, CPU)
    monkeypatch.setattr(evaluate, "CPU_BATCH", 4)
    alone = network_outputs(spec, held, images, CPU)
    for workers in (2, 3, 50):
        shared = network_outputs(spec, held, images, CPU, workers=workers)
        assert torch.equal(shared.logits, alone.logits)
        assert torch.equal(shared.features, alone.features)
    assert torch.allclose(alone.logits, whole.logits, rtol=1e-5, atol=1e-6)
    assert torch.allclose(alone.features, whole.features, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [1, 3])
def test_progress_hears_of_every_batch(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "CPU_BATCH", 4)
    seen: list[int] = []
    network_outputs(PLAIN, weights(PLAIN, 3), pixels(23), CPU, workers=workers, on_batch=lambda: seen.append(1))
    assert len(seen) == 6


def test_a_network_is_given_back_only_when_no_worker_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch fails while another is still under way; the rest are not begun."""
    monkeypatch.setattr(evaluate, "CPU_BATCH", 1)
    begun: list[int] = []
    ended: list[int] = []
    other_began = threading.Event()

    def on_batch() -> None:
        begun.append(1)
        if len(begun) == 1:
            other_began.wait(10)
            raise InterruptedError
        other_began.set()
        time.sleep(0.1)
        ended.append(1)

    with pytest.raises(InterruptedError):
        network_outputs(PLAIN, weights(PLAIN, 3), pixels(100), CPU, workers=2, on_batch=on_batch)
    assert len(ended) == len(begun) - 1
    assert len(begun) < 50


def test_evaluation_changes_neither_weights_nor_images_and_keeps_no_graph() -> None:
    held, images = weights(BN, 3), pixels(5)
    copies, before = {name: tensor.clone() for name, tensor in held.items()}, images.clone()
    outputs = network_outputs(BN, held, images, CPU)
    assert all(torch.equal(held[name], copies[name]) for name in held)
    assert torch.equal(images, before)
    assert not outputs.logits.requires_grad
    assert torch.is_grad_enabled()


def test_bf16_evaluation_is_close_and_returns_float32() -> None:
    held, images = weights(BN, 3), pixels(9)
    exact, rounded = network_outputs(BN, held, images, CPU), network_outputs(BN, held, images, CPU, "bf16")
    assert rounded.logits.dtype == torch.float32
    assert not torch.equal(rounded.logits, exact.logits)
    assert torch.allclose(rounded.logits, exact.logits, atol=0.05)


def test_weights_that_do_not_fit_the_network_are_an_error() -> None:
    held = weights(PLAIN, 0)
    with pytest.raises(KeyError, match=r"head\.bias"):
        network_outputs(PLAIN, {name: t for name, t in held.items() if name != "head.bias"}, pixels(1), CPU)
    with pytest.raises(ValueError, match=r"head\.bias has shape \(1,\)"):
        network_outputs(PLAIN, {**held, "head.bias": torch.zeros(1)}, pixels(1), CPU)


# Saved and loaded -----------------------------------------------------------------------------------------------------


def round_trip(predictor: Predictor) -> Predictor:
    return Predictor.from_parts(*tensorfile.from_bytes(tensorfile.to_bytes(*predictor.parts())))


@pytest.mark.parametrize(
    "predictor",
    [
        single(BN, weights(BN, 1)),
        Predictor(
            2, (Member(BN, weights(BN, 1)), Member(PLAIN, weights(PLAIN, 2))), "softmax", torch.tensor([1.0, 2.0])
        ),
        Predictor(
            2,
            (Member(PLAIN, weights(PLAIN, 2)),) * 11,
            trust=torch.arange(22.0).reshape(11, 2),
            log_prior=torch.zeros(2),
        ),
        Predictor(4, log_prior=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()),
        Predictor(4),
        Predictor(2, (Member(BN, weights(BN, 1)), Member(PLAIN, weights(PLAIN, 2))), "entropy"),
        Predictor(
            2,
            (Member(BN, weights(BN, 1)), Member(PLAIN, weights(PLAIN, 2))),
            "chain",
            torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
            member_log_prior=torch.zeros(2, 2),
        ),
        Predictor(
            2,
            (Member(PLAIN, weights(PLAIN, 2)), Member(PLAIN, weights(PLAIN, 3))),
            "softmax",
            torch.tensor([[1.0, 0.0], [2.0, 3.0]]),
            member_log_prior=torch.tensor([[0.1, 0.9], [0.5, 0.5]], dtype=torch.float64).log(),
        ),
    ],
    ids=["single", "softmax", "panel", "prior", "nothing", "confidence", "chain", "priors"],
)
def test_a_predictor_survives_a_file(predictor: Predictor) -> None:
    loaded, images, device = round_trip(predictor), pixels(6), Device(CPU, 1)
    assert torch.equal(loaded.scores(images, device), predictor.scores(images, device))
    assert [member.spec for member in loaded.members] == [member.spec for member in predictor.members]
    assert loaded.combine == predictor.combine
    assert tensorfile.to_bytes(*loaded.parts()) == tensorfile.to_bytes(*predictor.parts())


def test_identity_is_that_of_the_networks_tensors_and_of_the_values_beside_them() -> None:
    held, prior = weights(BN, 1), torch.zeros(2)
    one = Predictor(2, (Member(BN, held),), log_prior=prior)
    again = Predictor(2, (Member(BN, dict(reversed(held.items()))),), log_prior=prior.clone())
    assert one.identity() == again.identity()
    others = [
        Predictor(2, (Member(BN, held),)),
        Predictor(2, (Member(BN, held),), log_prior=torch.tensor([0.0, 1.0])),
        Predictor(2, (Member(BN, held),), member_log_prior=prior),
        Predictor(2, (Member(BN, held),), "softmax", log_prior=prior),
        Predictor(2, (Member(BN, held),) * 2, log_prior=prior),
        Predictor(2, (Member(BN, {name: t.clone() for name, t in held.items()}),), log_prior=prior),
    ]
    assert len({one.identity(), *(other.identity() for other in others)}) == 7
