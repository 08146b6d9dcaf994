"""FedAS: class means, alignment and traces by hand and against plain loops, and heads that stay at the sites."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from methods.personal_runs import FEW, names_in, odd_sites, straight_and_killed
from tiny import (
    CPU,
    context,
    coordinate,
    deployed,
    drive,
    federation,
    images,
    predictor_bytes,
    study,
    watch_bundles,
    watch_fits,
)
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput, RunFailed
from wardround.exchange.bundle import Bundle, Envelope
from wardround.learn.fit import Fit, Outputs, Step, weights_hash
from wardround.learn.trainer import train_one
from wardround.methods import fedas as module
from wardround.methods.fedas import ALIGNMENT, Alignment, FedAS, squared_gradients
from wardround.methods.fedper import FedPer
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.methods.template import average
from wardround.models import NetSpec, StagedNet, build, fresh, spec_layout
from wardround.streams import Streams

SMALL, CNN4 = NetSpec("small", 3, 4, 8, width=2), NetSpec("cnn4", 3, 4, 8, width=2)
HEAD = {"head.weight", "head.bias"}


def fedas(**own: Any) -> Any:
    return make("fedas", own)


def test_the_defaults() -> None:
    assert (FedAS().settings.heads, FedAS().settings.trace) == ("private", "sum")
    assert (ALIGNMENT.epochs, ALIGNMENT.batch, ALIGNMENT.lr, ALIGNMENT.optimiser) == (1, 16, 0.01, "sgd")
    assert (ALIGNMENT.momentum, ALIGNMENT.weight_decay) == (0.0, 0.0)


# Alignment ------------------------------------------------------------------------------------------------------------


def step(features: list[list[float]], labels: list[int]) -> Step:
    y = torch.tensor(labels)
    outputs = Outputs(torch.tensor(features, requires_grad=True), torch.zeros(len(y), 3))
    return Step(torch.arange(len(y)), torch.zeros(len(y), 3, 8, 8), y, outputs, ())


def test_the_loss_of_alignment_by_hand() -> None:
    """Class 0, two images at distances (1, 0) and (3, 1) from (0, 0): (1 + 0 + 9 + 1)/4. Class 1, one: (4 + 0)/2.

    Summed over classes, 2.75 + 2; a mean over images would give more weight to class 0.
    """
    means = torch.tensor([[0.0, 0.0], [1.0, 1.0], [9.0, 9.0]])
    loss = Alignment(means).loss(step([[1.0, 0.0], [3.0, 1.0], [3.0, 1.0]], [0, 0, 1]))
    assert loss.item() == 4.75


def test_alignment_against_a_plain_loop_over_classes() -> None:
    """One epoch of 20 images in batches of 16 and 4, the loss class by class, the head left alone."""
    start, means, data = (
        fresh(CNN4, Streams(1).torch("x")),
        torch.rand(4, 32, generator=Streams(2).torch("y")),
        images(20),
    )
    fit = Fit("x", CNN4, start, data, ALIGNMENT, seed=5, objective=Alignment(means), frozen=frozenset(HEAD))
    found = train_one(fit, CPU).weights

    net = build(CNN4)
    net.load_state_dict(start)
    body = list(net.stages.parameters())
    order = torch.randperm(20, generator=Streams(5).torch("shuffle", index=0))
    for batch in (order[:16], order[16:]):
        features = net.features(data.images[batch].float() / 127.5 - 1)
        labels = data.labels[batch]
        loss = torch.zeros(())
        for c in set(labels.tolist()):
            members = features[labels == c]
            loss = loss + F.mse_loss(members, means[c].expand_as(members))
        with torch.no_grad():
            for p, gradient in zip(body, torch.autograd.grad(loss, body), strict=True):
                p.sub_(0.01 * gradient)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-7)
    assert not torch.equal(found["stages.fc.1.weight"], start["stages.fc.1.weight"])
    assert all(torch.equal(found[name], start[name]) for name in HEAD)


def labels_of(fits: list[Fit], site: str) -> list[str]:
    return [fit.label.partition(", ")[2] for fit in fits if fit.label.startswith(f"{site},")]


def test_a_site_aligns_from_its_second_round_on_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never at its first, whenever that is; and never at a site that was not asked."""
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", fedas(), rounds=4, participants=0.67)
    for site in ("site-1", "site-2", "site-3"):
        asked = [r for r in range(4) if site in study(participants=0.67).participants(r)]
        assert len(asked) > 1
        expected = [f"round {asked[0] + 1}"]
        expected += [text for r in asked[1:] for text in (f"round {r + 1}, alignment", f"round {r + 1}")]
        assert labels_of(fits, site) == [*expected, "round 4, last alignment"]


def test_the_targets_are_the_class_means_of_the_last_trained_body(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is aligned is the received body under the site's own head, from which training then goes on."""
    fits = watch_fits(monkeypatch)
    coordinate(tmp_path / "run", fedas())
    (first, align, second, last) = (fit for fit in fits if fit.label.startswith("site-1,"))
    old = train_one(first, CPU).weights
    net = build(SMALL).eval()
    net.load_state_dict(old)
    features = net.features(first.data.images.float() / 127.5 - 1).detach()
    assert isinstance(align.objective, Alignment)
    for c in range(4):
        mean = features[first.data.labels == c].mean(dim=0)
        torch.testing.assert_close(align.objective.means[c], mean, rtol=1e-4, atol=1e-5)
    assert align.frozen == frozenset(HEAD)
    for name in HEAD:
        assert torch.equal(align.start[name], old[name])
    assert weights_hash(second.start) == weights_hash(train_one(align, CPU).weights)
    (member,) = deployed(tmp_path / "run", "site-1").members
    assert weights_hash(member.weights) == weights_hash(train_one(last, CPU).weights)


def test_every_site_aligns_a_copy_of_what_it_received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The public code aligns the coordinator's own model in place, so that each site leaves it changed for the next."""
    fits, crossed = watch_fits(monkeypatch), watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedas())
    starts = [fit.start for fit in fits if fit.label.endswith("round 2, alignment")]
    requests = [b for b in crossed if b.envelope.kind == "request" and b.envelope.round == 1]
    assert len(starts) == len(requests) == 3
    for name in set(spec_layout(SMALL).names) - HEAD:
        group = spec_layout(SMALL).groups[name]
        assert len({start[name].numpy().tobytes() for start in starts}) == 1
        assert len({request.groups[group][name].numpy().tobytes() for request in requests}) == 1


# Traces ---------------------------------------------------------------------------------------------------------------


def white(*labels: int) -> ImageSet:
    """White pixels, which a network sees as 1."""
    pixels = torch.full((len(labels), 1, 1, 1), 255, dtype=torch.uint8)
    return ImageSet(pixels, torch.tensor(labels), ("a", "b"))


def test_squared_gradients_by_hand() -> None:
    """A head of zeros gives ½ and ½: ∂L/∂z = ±½, so weight and bias have ½ each and an image has 1.

    Two images of one class in a batch have the same gradient, so 1 again; of two classes opposite ones, so 0.
    """
    net = StagedNet({"flat": nn.Flatten()}, 1, 2)
    nn.init.zeros_(net.head.weight)
    nn.init.zeros_(net.head.bias)
    order = torch.arange(4)
    assert squared_gradients(net, white(0, 0, 0, 1), order, 1).tolist() == [1.0, 1.0, 1.0, 1.0]
    assert squared_gradients(net, white(0, 0, 0, 1), order, 2).tolist() == [1.0, 0.0]
    assert squared_gradients(net, white(0, 0, 0, 1), order, 3).tolist() == pytest.approx([1.0, 1.0])


def answered(method: Any, site: Any, **changes: Any) -> Any:
    ctx = context(study(method="fedas", **changes))
    requests = method.ask(ctx, method.begin(ctx))
    return drive(ctx, method.answer(ctx, site, requests["site-1"], State()))


def test_the_trace_of_a_site_against_a_plain_loop() -> None:
    """After training, in evaluation mode, over body and head: the sum over batches, or their mean."""
    site = federation().sites[0]
    total, mean = (answered(fedas(trace=kind), site) for kind in ("sum", "mean"))
    net = build(SMALL).eval()
    net.load_state_dict(total.trained.members[0].weights)
    order = torch.randperm(11, generator=study().streams.torch("fisher", "site-1", 0))
    plain = 0.0
    for batch in (order[:4], order[4:8], order[8:]):
        net.zero_grad()
        logits = net(site.train.images[batch].float() / 127.5 - 1)
        F.cross_entropy(logits, site.train.labels[batch]).backward()  # type: ignore[no-untyped-call]
        plain += sum(float((p.grad**2).sum()) for p in net.parameters() if p.grad is not None)
    assert plain > 0.01
    assert float(total.bundle.groups["trace"]["fisher"]) == pytest.approx(plain, rel=1e-4)
    assert float(mean.bundle.groups["trace"]["fisher"]) == pytest.approx(plain / 3, rel=1e-4)


def sent(site: str, trace: float, value: float) -> Bundle:
    groups = {"parameters": {"w": torch.tensor([value])}, "trace": {"fisher": torch.tensor(trace)}}
    return Bundle(Envelope("answer", "study", "fedas", site, 0), groups)


def test_sites_weigh_by_their_traces() -> None:
    """(1·4 + 3·8)/4 = 7, whatever they weigh otherwise; a trace of 0 is a site that did not train."""
    answers = {"a": sent("a", 1.0, 4.0), "b": sent("b", 3.0, 8.0), "c": sent("c", 0.0, float("nan"))}
    assert average(answers, fedas().weigh)["w"].tolist() == [7.0]


@pytest.mark.parametrize("trace", [-3.0, float("nan"), float("inf")])
def test_a_trace_that_cannot_be_has_no_weight(trace: float) -> None:
    """One below 0 would take another site's part away: (1·4 − 3·8)/(1 − 3) = 10 is no mean of 4 and 8."""
    answers = {"a": sent("a", 1.0, 4.0), "b": sent("b", trace, 8.0)}
    assert average(answers, fedas().weigh)["w"].tolist() == [4.0]


def test_sites_without_any_gradient_left_weigh_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The public code divides 0 by 0 there, and every weight is NaN."""
    monkeypatch.setattr(module, "squared_gradients", lambda *_: torch.zeros(3))
    fits, crossed = watch_fits(monkeypatch), watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedas(), rounds=1)
    trained = [train_one(fit, CPU).weights["stages.conv1.0.weight"] for fit in fits[:3]]
    home = crossed[-1].groups["parameters"]["stages.conv1.0.weight"]
    torch.testing.assert_close(home, sum(trained) / 3)


def test_a_site_too_small_to_train_sends_no_trace_and_has_no_weight(tmp_path: Path) -> None:
    answer = answered(fedas(), federation((1,)).sites[0])
    assert float(answer.bundle.groups["trace"]["fisher"]) == 0.0
    assert not answer.memory.groups
    with pytest.raises(RunFailed, match="no site could train"):
        coordinate(tmp_path / "run", fedas(), federation((1, 1)))


def test_no_trace_is_taken_at_a_site_that_was_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def watched(net: StagedNet, data: ImageSet, order: Tensor, batch: int) -> Tensor:
        taken.append(len(data))
        return squared_gradients(net, data, order, batch)

    monkeypatch.setattr(module, "squared_gradients", watched)
    coordinate(tmp_path / "run", fedas(), **FEW)
    sizes = {"site-1": 11, "site-2": 8, "site-3": 6}
    asked = [site for r in range(FEW["rounds"]) for site in study(**FEW).participants(r)]
    assert taken == [sizes[site] for site in asked]


# What crosses ---------------------------------------------------------------------------------------------------------


def test_heads_and_class_means_are_in_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number goes up beside the body, and the number of images does not."""
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", fedas(), rounds=3)
    body = set(spec_layout(SMALL).names) - HEAD
    assert names_in(crossed, "request", "delivery") == body
    assert names_in(crossed, "answer") == body | {"fisher"}
    traces = [b.groups["trace"]["fisher"] for b in crossed if b.envelope.kind == "answer"]
    assert {(t.dtype, t.shape) for t in traces} == {(torch.float32, torch.Size([]))}
    counters = [t for b in crossed if b.envelope.kind == "delivery" for t in b.groups["counters"].values()]
    assert {t.dtype for t in counters} == {torch.int64}


def test_the_trace_is_declared_in_words() -> None:
    (group,) = (g for g in fedas().payload(study(method="fedas"), "site-1").up if g.name == "trace")
    assert "one number" in group.what
    assert (group.max_bytes, group.tensors) == (4, {"fisher": ((), "float32")})


def test_averaged_heads_go_up_and_change_nothing_at_the_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    averaged = coordinate(tmp_path / "averaged", fedas(heads="averaged"), rounds=3)
    assert names_in(crossed, "answer") == {*spec_layout(SMALL).names, "fisher"}
    assert names_in(crossed, "request") == set(spec_layout(SMALL).names) - HEAD
    private = coordinate(tmp_path / "private", fedas(), rounds=3)
    assert predictor_bytes(tmp_path / "private") == predictor_bytes(tmp_path / "averaged")
    models = [{row["model"] for row in result["rows"]} for result in (private, averaged)]
    assert models == [{"personal"}, {"personal", "shared"}]


# Runs -----------------------------------------------------------------------------------------------------------------


def test_a_site_that_never_took_part_has_an_untrained_head(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", fedas(), **FEW)
    (member,) = deployed(tmp_path / "run", "site-3").members
    assert torch.equal(member.weights["head.weight"], study().initial()["head.weight"])
    assert any(note["text"].startswith("site-3 never trained") for note in result["notes"])


def test_it_is_neither_fedper_in_the_first_round_nor_later(tmp_path: Path) -> None:
    for rounds in (1, 2):
        coordinate(tmp_path / f"fedper-{rounds}", FedPer(), rounds=rounds)
        coordinate(tmp_path / f"fedas-{rounds}", fedas(), rounds=rounds)
        (other,), (own,) = (deployed(tmp_path / f"{name}-{rounds}", "site-1").members for name in ("fedper", "fedas"))
        assert not torch.equal(own.weights["stages.conv1.0.weight"], other.weights["stages.conv1.0.weight"])


@pytest.mark.parametrize("heads", ["private", "averaged"])
@pytest.mark.parametrize("model", ["small", "cnn4"])
def test_odd_sites(model: str, heads: str, tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", fedas(heads=heads), odd_sites(), rounds=3, model={"name": model})
    assert {row["site"] for row in result["rows"] if row["model"] == "personal"} == {"site-1", "site-2", "site-3"}


def test_a_resumed_run_ends_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, killed = straight_and_killed(monkeypatch, tmp_path, "fedas", {})
    assert killed == straight


@pytest.mark.parametrize("own", [{"heads": "public"}, {"trace": "median"}])
def test_refuses_settings_that_are_none(own: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=rf"^fedas\.{next(iter(own))} = "):
        fedas(**own)
