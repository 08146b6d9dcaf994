"""FedBiCross against plain code: what Stage 1 compares, Stage 2 as a whole (Algorithm 1, lines 8 to 21), Eq. 10."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from methods.plain import followers, kd, mean_logits, members, network, snapshot, synthesis
from tiny import context, drive, federation, study
from wardround.exchange.bundle import Bundle
from wardround.learn.fit import Outputs, Step
from wardround.learn.predictor import Member
from wardround.methods.base import Context
from wardround.methods.cross_cluster import StageTwo
from wardround.methods.fedbicross import FedBiCross, PersonalDistillation
from wardround.methods.state import State
from wardround.models import StagedNet, Weights
from wardround.synthesis.bilevel import sampled_steps

OWN: dict[str, Any] = {"trajectories": 2, "steps": 6, "samples": 3, "batch": 16, "lr": 0.05, "recalibrate": "none"}
PAIR, ALONE = [[0, 2], [1]], [[0], [1], [2]]  # clusters, by the sites' places
OWN_MOST = [[0.4, 0.3, 0.3], [0.2, 0.6, 0.2], [0.3, 0.3, 0.4]]  # weights to begin with
RATES = (0.05, 0.005)  # of two trajectories: half of them have passed before the second
TRAINING = 13  # of sixteen images; the last three, a fifth, are for validation


@cache
def three() -> tuple[Context, dict[str, Bundle]]:
    """Three sites that have sent what they send."""
    data, ctx, of = federation(), context(study(method="fedbicross")), FedBiCross(FedBiCross.Settings())
    asked = of.ask(ctx, State()) or {}
    return ctx, {site.name: drive(ctx, of.answer(ctx, site, asked[site.name], State())).bundle for site in data.sites}


# Stage 1 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", ["softmax", "logits"])
def test_sites_are_compared_by_their_answers_to_gaussian_noise(probe: str) -> None:
    ctx, sent = three()
    state = next(FedBiCross(FedBiCross.Settings(**OWN, probe=probe, probes=5)).absorb(ctx, State(), sent))
    noise = torch.randn(5, 3, 8, 8, generator=ctx.streams.torch("noise probes"))
    with torch.no_grad():
        said = [network(member)(noise) for member in members(ctx, sent)]
    rows = torch.stack([(logits.softmax(dim=1) if probe == "softmax" else logits).flatten() for logits in said])
    cosines = F.cosine_similarity(rows[:, None], rows[None], dim=2)
    assert state.facts["similarity"]["sites"] == sorted(sent)
    torch.testing.assert_close(torch.tensor(state.facts["similarity"]["values"]), cosines, rtol=0, atol=1e-4)


# Stage 2 --------------------------------------------------------------------------------------------------------------


class Lesson:
    """A cluster's images at step t, and Eq. 5 on some of them."""

    def __init__(self, x: Tensor, teachers: list[StagedNet], adapted: list[StagedNet], left: float, t: float) -> None:
        with torch.no_grad():
            self.x, self.near, self.far = x, mean_logits(teachers, x), mean_logits(adapted, x)
        self.left, self.temperature = left, t

    def loss(self, said: Tensor, rows: slice) -> Tensor:
        far, near = (kd(target[rows], said, self.temperature) for target in (self.far, self.near))
        return self.left * far + (1 - self.left) * near


class Learner:
    """G_k and its momentum."""

    def __init__(self, ctx: Context, k: int, momentum: float, decay: float) -> None:
        spec, self.momentum, self.decay = ctx.study.student_spec, momentum, decay
        self.net = network(Member(spec, ctx.study.fresh_weights(spec, "cluster model", f"cluster-{k}"))).train()
        self.velocity = {name: torch.zeros_like(p) for name, p in self.net.named_parameters()}

    def step(self, lessons: list[Lesson], own: int, shares: Tensor, rate: float) -> Tensor:
        """Eq. 7, and the gradient of Eq. 8 by differentiating through that step."""
        weights = shares.float().requires_grad_(True)
        rows, held_out = slice(0, TRAINING), slice(TRAINING, None)
        taught = [j for j in range(len(lessons)) if float(shares[j]) > 0]
        inner = [weights[j] * lessons[j].loss(self.net(lessons[j].x[rows]), rows) for j in taught]
        names, parameters = zip(*self.net.named_parameters(), strict=True)
        slopes = torch.autograd.grad(torch.stack(inner).sum(), parameters, create_graph=True)
        after = {}
        for name, p, slope in zip(names, parameters, slopes, strict=True):
            self.velocity[name] = self.momentum * self.velocity[name] + slope + self.decay * p.detach()
            after[name] = p.detach() - rate * self.velocity[name]
        statistics = {name: buffer.clone() for name, buffer in self.net.named_buffers()}
        said = functional_call(self.net, {**after, **statistics}, (lessons[own].x[held_out],))
        (gradient,) = torch.autograd.grad(lessons[own].loss(said, held_out), weights)
        for name, p in self.net.named_parameters():
            p.data = after[name].detach()
            self.velocity[name] = self.velocity[name].detach()
        return gradient.double()


Found = tuple[list[Weights], Tensor, list[list[StagedNet]]]


def plain_stage_two(
    ctx: Context, of: list[Member], clusters: list[list[int]], cross: Tensor, s: Any
) -> Iterator[Found]:
    """After each trajectory the clusters' models, the weights and the teachers that follow the noise."""
    teachers = [[network(of[i]) for i in places] for places in clusters]
    adapted = [followers([of[i] for i in places], s.follow) for places in clusters]
    learners = [Learner(ctx, k, s.momentum, s.weight_decay) for k in range(len(clusters))]
    for number, rate in enumerate(RATES):
        draws = [ctx.streams.torch("synthesis", f"cluster-{k}", 0, number) for k in range(len(clusters))]
        paths = [synthesis(nets, draw, 6, batch=16) for nets, draw in zip(teachers, draws, strict=True)]
        sampled = sampled_steps(6, 3, ctx.streams.torch("sampled steps", index=number))
        for t in range(1, 7):
            images = [path[t - 1].images for path in paths]
            with torch.no_grad():
                for x, nets in zip(images, adapted, strict=True):
                    for net in nets:
                        net.train()(x)
                        net.eval()
            if t not in sampled and s.inner == "sampled":
                continue
            asked = zip(images, teachers, adapted, strict=True)
            lessons = [Lesson(*each, 1 - t / 6, s.temperature) for each in asked]
            steps = [learner.step(lessons, k, cross[k], rate) for k, learner in enumerate(learners)]
            if t in sampled and s.cross == "bilevel":
                cross = torch.stack([moved(w, h, s) for w, h in zip(cross, steps, strict=True)])
        yield [snapshot(learner.net) for learner in learners], cross, adapted


def moved(weights: Tensor, gradient: Tensor, s: Any) -> Tensor:
    """Eq. 8 where no weight reaches zero: then the nearest point of the simplex is the same distance off in each."""
    point = weights - s.eta_w * (gradient / gradient.abs().max() if s.normalise else gradient)
    found = point - (point.sum() - 1) / len(point)
    assert float(found.min()) > 0.05
    return found


@pytest.mark.parametrize(
    ("clusters", "cross", "own"),
    [
        (PAIR, [[0.5, 0.5], [0.5, 0.5]], {"eta_w": 0.02}),
        (ALONE, OWN_MOST, {"inner": "all", "eta_w": 0.02, "follow": 0.6}),
        (ALONE, OWN_MOST, {"normalise": False, "eta_w": 0.1, "temperature": 3.0, "weight_decay": 0.5}),
        (PAIR, [[0.75, 0.25], [0.0, 1.0]], {"cross": "uniform", "inner": "all", "momentum": 0.5}),
    ],
    ids=["two clusters", "at every step", "raw gradients", "fixed weights"],
)
def test_stage_two_is_a_plain_loop(clusters: list[list[int]], cross: list[list[float]], own: dict[str, Any]) -> None:
    ctx, sent = three()
    of = FedBiCross(FedBiCross.Settings(**{**OWN, **own}))
    named = [[sorted(sent)[i] for i in places] for places in clusters]
    weights = torch.tensor(cross, dtype=torch.float64)
    begun = State({"cross": {"weights": weights}}, {"trajectory": 0, "clusters": named, "silhouettes": {}})
    plain = plain_stage_two(ctx, members(ctx, sent), clusters, weights, of.settings)
    for state, (models, expected, adapted) in zip(of.absorb(ctx, begun, sent), plain, strict=True):
        torch.testing.assert_close(state.groups["cross"]["weights"], expected, rtol=0, atol=2e-4)
        for k, model in enumerate(models):
            assert state.groups[f"model-00{k}"].keys() == model.keys()
            for name, tensor in model.items():
                torch.testing.assert_close(state.groups[f"model-00{k}"][name], tensor, rtol=2e-3, atol=2e-4)
            buffers = {f"{i:03d}.{n}": b for i, net in enumerate(adapted[k]) for n, b in net.named_buffers()}
            for name, tensor in state.groups[f"adapted-00{k}"].items():
                torch.testing.assert_close(tensor, buffers[name], rtol=1e-3, atol=1e-4)
    assert float((expected - weights).abs().max()) > 0.01 or own.get("cross") == "uniform"


@pytest.mark.parametrize(("clusters", "same"), [(ALONE, True), (PAIR, False)], ids=["alone", "a pair"])
def test_only_where_models_answer_together_it_matters_what_is_averaged(clusters: list[list[int]], same: bool) -> None:
    """The logarithm of one model's probabilities is its logits but for a constant, which no loss feels."""
    ctx, sent = three()
    named = [[sorted(sent)[i] for i in places] for places in clusters]
    weights = torch.full((len(clusters), len(clusters)), 1 / len(clusters), dtype=torch.float64)
    begun = State({"cross": {"weights": weights}}, {"trajectory": 0, "clusters": named, "silhouettes": {}})
    readings = [
        FedBiCross.Settings(**{**OWN, "steps": 3, "trajectories": 1}, mean=of) for of in ("logits", "probabilities")
    ]
    one, other = (list(FedBiCross(s).absorb(ctx, begun, sent))[-1].groups["model-000"] for s in readings)
    for s in readings:
        stage = StageTwo(ctx, s, begun, dict(zip(sorted(sent), members(ctx, sent), strict=True)))
        assert {of.mean for cluster in stage.clusters for of in (cluster.teachers, cluster.adapted)} == {s.mean}
    apart = max(float((one[name] - other[name]).abs().max()) for name in one if one[name].is_floating_point())
    assert apart < 1e-4 if same else apart > 1e-3


# Stage 3 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [1.0, 2.0])
def test_the_personal_loss_by_hand(t: float) -> None:
    """Equal logits, so CE = ln 2; a teacher of (3/4, 1/4) at T is T²·(¾ ln 3/2 + ¼ ln 1/2) away, one that agrees 0."""
    away = t * t * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    nothing = torch.zeros(1, 2)
    sure = Outputs(nothing, torch.tensor([[t * math.log(3), 0.0]]))
    step = Step(
        torch.tensor([0]), nothing, torch.tensor([0]), Outputs(nothing, nothing), (sure, Outputs(nothing, nothing))
    )
    assert float(PersonalDistillation([0.5, 0.3], t).loss(step)) == pytest.approx(math.log(2) + 0.5 * away)
    swapped = step._replace(teachers=step.teachers[::-1])
    assert float(PersonalDistillation([0.5, 0.3], t).loss(swapped)) == pytest.approx(math.log(2) + 0.3 * away)
