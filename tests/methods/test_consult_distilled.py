"""The panel in one network: what comes home, what a site makes of it, and that a stop changes nothing."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.skewed import federate, none_of, with_site
from methods.test_consult import SHAPES
from tiny import context, coordinate, deployed, drive, federation, predictor_bytes, study, watch_bundles
from wardround.data.federation import Federation
from wardround.errors import BadInput, SiteDiverged
from wardround.exchange.bundle import Bundle
from wardround.learn import statistics
from wardround.learn.pixels import normalise
from wardround.learn.predictor import Member, Predictor
from wardround.methods import consult_distilled
from wardround.methods.base import Context, join_groups
from wardround.methods.consult_distilled import ConsultDistilled, chain_of, evenly
from wardround.methods.home_lesson import HomeLesson
from wardround.methods.oneshot import OWN
from wardround.methods.panel_epochs import LESSONS, SYNTHETIC, PanelEpochs
from wardround.methods.personal_prior import Judge, Offer
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.methods.trust import log_shares
from wardround.record import absorbing
from wardround.synthesis.pool import cropped
from wardround.synthesis.student import Student
from wardround.synthesis.tally import TallyLayer

SYNTHESIS: dict[str, Any] = {
    "epochs": 2, "generator_steps": 3, "batch": 6, "codes": 4, "kd_steps": 2, "averaged": 1.0, "shots": 1
}  # fmt: skip
QUICK = {**SYNTHESIS, "replayed": 5, "tune_epochs": 1}


def method(**own: Any) -> ConsultDistilled:
    found = make("consult-distilled", {**QUICK, **own})
    assert isinstance(found, ConsultDistilled)
    return found


def listening(data: Federation, **changes: Any) -> tuple[Context, list[str]]:
    notes: list[str] = []
    agreed = study(data, method="consult-distilled", rounds=1, **changes)
    return replace(context(agreed), note=notes.append), notes


Sent = tuple[Federation, Context, dict[str, Bundle], dict[str, State]]


@pytest.fixture(scope="module")
def sent() -> Sent:
    """What two sites send, and what they remember."""
    data = federate(((0, 1), (1, 2, 3)), n=9, val=12)
    ctx, _ = listening(data)
    bundles, memories = {}, {}
    for site in data.sites:
        done = drive(ctx, method().answer(ctx, site, ctx.bundle("request", site.name, {}), State()))
        method().payload(ctx.study, site.name).check(done.bundle)
        bundles[site.name], memories[site.name] = done.bundle, done.memory
    return data, ctx, bundles, memories


def absorbed(sent: Sent, of: ConsultDistilled, due: Callable[[], bool] = lambda: False) -> list[State]:
    return list(of.absorb(replace(sent[1], due=due), State(), sent[2]))


def timeless(state: State) -> bytes:
    return State(state.groups, {name: fact for name, fact in state.facts.items() if name != "work"}).to_bytes()


# What crosses ---------------------------------------------------------------------------------------------------------


def test_a_site_sends_what_it_does_for_consult_and_remembers_its_network(sent: Sent) -> None:
    data, ctx, bundles, memories = sent
    of, plain = method(), make("consult", {})
    assert of.payload(ctx.study, "site-1").up == plain.payload(ctx.study, "site-1").up
    assert of.payload(ctx.study, "site-1").seen_by == "the coordinator"
    for site in data.sites:
        assert bundles[site.name].group("label_counts")["counts"].tolist() == site.train.counts().tolist()
        own, trained = memories[site.name].groups[OWN], join_groups(bundles[site.name])
        assert own.keys() == trained.keys()
        assert all(torch.equal(own[name], trained[name]) for name in own)


def test_a_site_too_small_to_train_remembers_nothing() -> None:
    data = with_site(federate(n=6, val=4), 0, train=none_of(federate().sites[0].train))
    ctx, _ = listening(data)
    done = drive(ctx, method().answer(ctx, data.sites[0], ctx.bundle("request", "site-1", {}), State()))
    assert done.memory == State()
    assert done.bundle.group("label_counts")["counts"].tolist() == [0, 0, 0, 0]


def test_the_student_and_synthetic_images_come_home(sent: Sent) -> None:
    _, ctx, _, _ = sent
    of = method()
    state = absorbed(sent, of)[-1]
    home = of.deliver(ctx, State.from_bytes(state.to_bytes()))
    for site, bundle in home.items():
        of.payload(ctx.study, site).check(bundle)
        assert bundle.group(SYNTHETIC)["images"].shape == (5, 3, 8, 8)
        assert bundle.group(SYNTHETIC)["images"].dtype == torch.uint8
        assert set(bundle.group(SYNTHETIC)["labels"].tolist()) <= {0, 1, 2, 3}
        assert all(torch.equal(t, state.groups["student"][name]) for name, t in join_groups(bundle).items())
    (group,) = (group for group in of.payload(ctx.study, "site-1").home if group.name == SYNTHETIC)
    assert group.max_bytes == 5 * 3 * 64 + 5 * 8


@pytest.mark.parametrize("replayed", [0, 40])
def test_as_many_synthetic_images_as_wanted(replayed: int, sent: Sent) -> None:
    """None; or more than one batch of six: the classes in turn, and all of them different."""
    _, ctx, _, _ = sent
    of = method(replayed=replayed)
    home = of.deliver(ctx, absorbed(sent, of)[-1])["site-1"]
    of.payload(ctx.study, "site-1").check(home)
    assert len(home.group(SYNTHETIC).get("images", ())) == replayed
    if replayed:
        images = home.group(SYNTHETIC)["images"]
        assert len(images.flatten(1).unique(dim=0)) == replayed


# The coordinator's work -----------------------------------------------------------------------------------------------


def work(sent: Sent, of: ConsultDistilled, counts: dict[str, torch.Tensor] | None = None) -> PanelEpochs:
    """As `epochs` begins it."""
    _, ctx, bundles, _ = sent
    found: list[PanelEpochs] = []
    init = PanelEpochs.__init__

    class Stop(Exception):
        pass

    def caught(self: PanelEpochs, *given: Any) -> None:
        init(self, *given)
        found.append(self)
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PanelEpochs, "__init__", caught)
        if counts is not None:
            patch.setattr(consult_distilled, "seen_by_sites", lambda *_: counts)
        with pytest.raises(Stop):
            list(of.absorb(ctx, State(), bundles))
    return found[0]


def test_images_are_made_of_the_classes_that_any_site_has_seen(sent: Sent) -> None:
    """What the student is shown: the classes in turn, as often as a batch of nine or six allows."""

    def even(of: PanelEpochs) -> list[int]:
        labels: list[int] = of.dealt.labels[of.dealt.even].tolist()
        return labels

    assert even(work(sent, method(batch=9))) == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    without = {"site-1": torch.tensor([3, 0, 0, 0]), "site-2": torch.tensor([0, 0, 0, 4])}
    assert even(work(sent, method(), without)) == [0, 3, 0, 3, 0, 3]
    lie = {"site-1": torch.tensor([2**63 - 1, 0, 0, 0]), "site-2": torch.tensor([1, 0, 0, 4])}  # 2^63 in all: overflow
    assert even(work(sent, method(), lie)) == [0, 3, 0, 3, 0, 3]
    nothing = dict.fromkeys(("site-1", "site-2"), torch.zeros(4, dtype=torch.int64))  # coarse bins of small sites
    assert even(work(sent, method(), nothing)) == [0, 1, 2, 3, 0, 1]


def test_a_step_of_the_generator_is_one_down_its_loss(sent: Sent) -> None:
    """L = what the labels cost + λ·how far statistics are, by a plain Adam on the same network and the same draws."""
    of = work(sent, method(bn_weight=0.7, generator_lr=0.01))
    of.begin(0, torch.Generator().manual_seed(3))
    codes, crops = of._drawn(len(of.dealt.labels))
    plain = copy.deepcopy(of.maker.net)
    named = torch.cat([codes, 3.0 * torch.eye(4)[of.dealt.labels]], dim=1)
    wrong, gap = of.teachers.opinion(cropped(plain(named), crops), of.dealt)
    adam = torch.optim.Adam(plain.parameters(), lr=0.01, betas=(0.5, 0.999))
    (wrong + 0.7 * gap).backward()
    adam.step()
    found = of.make(codes, crops)
    torch.testing.assert_close(found, (wrong + 0.7 * gap).detach())
    for ours, theirs in zip(of.maker.net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("weight", "votes"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.6), (0.3, 0.6)])
def test_a_step_of_the_student_is_on_new_images_towards_the_panel(weight: float, votes: float, sent: Sent) -> None:
    """KL from the panel's answers to the student's, what it sees less and how votes fall, on the batch's even part.

    The generator stays as it is.
    """
    own = {"feature_weight": weight, "tally_weight": votes}
    of = work(sent, method(temperature=2.0, momentum=0.0, weight_decay=0.0, **own))
    of.begin(0, torch.Generator().manual_seed(3))
    of.student.set_rate(0.1)
    codes, crops = of._drawn(len(of.dealt.even))
    made, net = of.maker.state(), copy.deepcopy(of.student.net)
    with torch.no_grad():
        images = of.maker.net(torch.cat([codes, 3.0 * torch.eye(4)[of.dealt.labels]], dim=1))[of.dealt.even]
    pixels = cropped(images, crops)
    wanted, said = of.teachers.logits(pixels).div(2).softmax(dim=1), net(pixels).div(2).log_softmax(dim=1)
    loss = 4 * (wanted * (wanted.log() - said)).sum(dim=1).mean()
    if of.maps is not None:
        loss = loss + weight * copy.deepcopy(of.maps).gap(net.features(pixels), of.teachers.outputs(pixels)[0])
    if of.tally is not None:
        loss = loss + votes * copy.deepcopy(of.tally).gap(net.features(pixels), of.teachers.outputs(pixels)[1])
    loss.backward()
    of.learn(codes, crops)
    for ours, theirs in zip(of.student.net.parameters(), net.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(ours.detach(), theirs.detach() - 0.1 * theirs.grad)
    assert all(torch.equal(tensor, made[name]) for name, tensor in of.maker.state().items())


def test_the_student_begins_as_the_member_that_has_seen_most_pairs(sent: Sent) -> None:
    """Site 2 has three classes, site 1 two; of networks unlike the student's none can be begun with."""

    def first(counts: dict[str, torch.Tensor] | None = None, **own: Any) -> torch.Tensor:
        return work(sent, method(**own), counts).student.weights()["head.weight"]

    _, ctx, bundles, _ = sent
    models = {site: join_groups(bundle)["head.weight"] for site, bundle in bundles.items()}
    assert torch.equal(first(), models["site-2"])
    fresh = ctx.study.fresh_weights(ctx.study.student_spec, "student")["head.weight"]
    assert torch.equal(first(begin="random"), fresh)
    of = method()
    of.counts = {"site-1": torch.tensor([90, 90, 0, 0]), "site-2": torch.tensor([0, 2, 2, 2])}  # 2·log 91, 6·log 3
    members = [Member(ctx.study.spec(site), join_groups(bundles[site])) for site in ("site-1", "site-2")]
    assert of.begins_as(ctx, members) is members[0].weights
    claimed = [[9, 9, 9, 0], [10**6, 10**6, 0, 0], [10, 10, 10, 10]]  # of a million, 60 are believed
    of.counts = {f"site-{place + 1}": torch.tensor(counts) for place, counts in enumerate(claimed)}
    three = [*members, replace(members[0], spec=replace(members[0].spec, width=3))]
    assert of.begins_as(ctx, three) is members[0].weights
    of.counts = {"site-1": torch.tensor([90, 90, 0, 0]), "site-2": torch.tensor([0, 2, 2, 2])}
    other = replace(members[0], spec=replace(members[0].spec, width=3))
    assert of.begins_as(ctx, [other, members[1]]) is members[1].weights
    assert torch.equal(of.begins_as(ctx, [other, other])["head.weight"], fresh)


@pytest.mark.parametrize(("averaged", "over"), [(0.0, 1), (0.5, 2), (1.0, 4)])
def test_the_mean_of_the_last_students_goes_home(averaged: float, over: int, sent: Sent) -> None:
    """Of four epochs the last one, two, or all; a counter of batch norm is the last one's."""
    states = absorbed(sent, method(epochs=4, averaged=averaged, tally_weight=0.0))
    alone = absorbed(sent, method(epochs=4, averaged=0.0, tally_weight=0.0))
    assert all(torch.equal(a, b) for a, b in _pairs(states[:3], alone[:3]))
    for name, found in states[-1].groups["student"].items():
        students = [state.groups["student"][name] for state in alone[-over:]]
        expected = torch.stack(students).double().mean(dim=0) if found.is_floating_point() else students[-1]
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_the_head_has_a_last_lesson_from_the_mean_of_the_layers(sent: Sent) -> None:
    """On what the mean student sees in made images; the layer stays behind."""
    layers: list[Tensor] = []
    add, teach = PanelEpochs._add, TallyLayer.teach

    def noted(self: PanelEpochs) -> None:
        assert self.tally is not None
        layers.append(self.tally.trained["weight"].detach().clone())
        add(self)

    def watched(self: TallyLayer, head: torch.nn.Linear, features: Tensor, draws: torch.Generator) -> None:
        torch.testing.assert_close(self.trained["weight"].detach(), torch.stack(layers).mean(dim=0))
        assert len(features) == LESSONS * 6
        teach(self, head, features, draws)
        said, wanted = (found.detach().softmax(dim=1) for found in (head(features), self.scores(features)))
        assert float((said - wanted).abs().mean()) < 0.05
        layers.append(head.weight.detach().clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PanelEpochs, "_add", noted)
        patch.setattr(TallyLayer, "teach", watched)
        states = absorbed(sent, method(epochs=3))
    assert len(layers) == 3 + 1
    assert torch.equal(states[2].groups["student"]["head.weight"], layers[-1])
    assert ["tally" in state.groups for state in states] == [True, True, False]


def test_that_lesson_sees_images_by_the_statistics_that_go_home(sent: Sent) -> None:
    """Not by those of each batch, and looking at images leaves the statistics as they were."""
    of = work(sent, method())
    of.begin(0, torch.Generator().manual_seed(3))
    before = {name: tensor.clone() for name, tensor in of.student.weights().items()}
    found = of._features()
    of.begin(0, torch.Generator().manual_seed(3))
    net = copy.deepcopy(of.student.net).eval()
    with torch.no_grad():
        expected = torch.cat([net.features(of._some()) for _ in range(LESSONS)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(before[name], tensor) for name, tensor in of.student.weights().items())
    assert of.student.net.training


def _pairs(some: list[State], others: list[State]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for one, other in zip(some, others, strict=True):
        yield from ((tensor, other.groups["student"][name]) for name, tensor in one.groups["student"].items())


def test_a_model_without_answers_does_not_end_the_study(sent: Sent) -> None:
    """Its weights are finite, as the check of what is sent asks for; what they make of an image is not."""
    _, base, bundles, _ = sent
    notes: list[str] = []
    ctx = replace(base, note=notes.append)
    groups = {name: dict(tensors) for name, tensors in bundles["site-2"].groups.items()}
    groups["statistics"] = {name: torch.full_like(t, -1e4) for name, t in groups["statistics"].items()}
    bad = {**bundles, "site-2": replace(bundles["site-2"], groups=groups)}
    *_, state = method().absorb(ctx, State(), bad)
    *_, without = method().absorb(ctx, State(), {"site-1": bundles["site-1"]})
    assert notes == ["the model of site-2 is refused: its answers are NaN or infinite"]
    assert timeless(state) == timeless(without)


def test_the_generator_goes_on_from_epoch_to_epoch(sent: Sent) -> None:
    states = absorbed(sent, method(epochs=3))
    made = [state.groups["generator"]["start.weight"] for state in states[:2]]
    steps = [float(state.groups["generator"]["optimiser.start.weight.step"]) for state in states[:2]]
    assert steps == [3, 6]
    assert not torch.equal(made[0], made[1])
    assert "generator" not in states[2].groups  # nothing goes on from it
    assert [SYNTHETIC in state.groups for state in states] == [False, False, True]


def test_the_rate_falls_along_a_cosine() -> None:
    of = method(epochs=4, lr=0.2)
    assert [of.rate(epoch) for epoch in range(4)] == pytest.approx(
        [0.1 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    )
    assert (of.rate(0), of.rate(2)) == pytest.approx((0.2, 0.1))


def test_a_network_without_batch_norm_is_refused() -> None:
    data = federate(n=6, val=4)
    agreed = study(data, method="consult-distilled", model={"name": "cnn4", "width": 2})
    with pytest.raises(BadInput, match=r"consult-distilled makes images from .*, and cnn4 \(site-1\) has none"):
        method().check(agreed)


# Stops ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of", [{"averaged": 0.0}, {"averaged": 1.0}, {"feature_weight": 0.0}, {"tally_weight": 0.0}, {"momentum": 0.0}]
)
def test_a_stop_after_any_step_changes_nothing(of: dict[str, float], sent: Sent) -> None:
    """From every state, through a file, to the next one, and so to the end: two epochs of 3 + 2 steps."""
    expected = absorbed(sent, method(**of))[-1]
    states = absorbed(sent, method(**of), due=lambda: True)
    assert len(states) == 2 * (3 + 2 + 1)
    assert timeless(states[-1]) == timeless(expected)
    often = replace(sent[1], due=lambda: True)
    for state, following in pairwise(states):
        gone_on = next(method(**of).absorb(often, State.from_bytes(state.to_bytes()), sent[2]))
        assert timeless(gone_on) == timeless(following)


class Killed(BaseException):
    """What `kill -9` is to a process."""


def test_a_run_killed_within_an_epoch_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the student's last step of the second epoch; the step before it is done again, no other."""
    monkeypatch.setattr(absorbing, "SAVE_EVERY_SECONDS", -1.0)
    data = federate(n=9, val=12)
    coordinate(tmp_path / "straight", method(), data, rounds=1)
    step, taken, fatal = Student.step, [], [4]

    def watched(self: Student, loss: Any) -> None:
        taken.append(1)
        if len(taken) in fatal:
            raise Killed
        step(self, loss)

    monkeypatch.setattr(Student, "step", watched)
    with pytest.raises(Killed):
        coordinate(tmp_path / "killed", method(), data, rounds=1)
    taken.clear()
    fatal.clear()
    coordinate(tmp_path / "killed", method(), data, rounds=1)
    assert len(taken) == 2
    assert predictor_bytes(tmp_path / "killed") == predictor_bytes(tmp_path / "straight")


# At the site ----------------------------------------------------------------------------------------------------------


def right(predictor: Predictor, ctx: Context, images: Any) -> float:
    return float((predictor.scores(images.images, ctx.device).argmax(dim=1) == images.labels).double().mean())


def constant(ctx: Context, klass: int) -> dict[str, torch.Tensor]:
    """A student that answers with one class, whatever it sees."""
    weights = {
        name: torch.zeros_like(tensor) for name, tensor in ctx.study.fresh_weights(ctx.study.student_spec, "x").items()
    }
    weights["head.bias"][klass] = 50.0
    return weights


def home(ctx: Context, of: ConsultDistilled, weights: dict[str, torch.Tensor], n: int = 5) -> Bundle:
    """A delivery of this student, with grey synthetic images of class 0."""
    state = State({"student": weights})
    if n:
        pictures = {"images": torch.full((n, 3, 8, 8), 90, dtype=torch.uint8), "labels": torch.zeros(n).long()}
        state = State({"student": weights, SYNTHETIC: pictures})
    return of.deliver(ctx, state)["site-1"]


def test_a_site_keeps_its_own_model_where_the_student_is_useless(sent: Sent) -> None:
    """A student that is sure of a class the site has never seen, and an own model that is right half of the time."""
    data, base, _, _ = sent
    notes: list[str] = []
    ctx, of = replace(base, note=notes.append), method(replayed=0, with_own=False)
    memory = State({OWN: constant(ctx, 0)})
    found = drive(ctx, of.personal(ctx, data.sites[0], home(ctx, of, constant(ctx, 3), 0), memory))
    assert right(found, ctx, data.sites[0].val) == 0.5
    assert torch.equal(found.members[0].weights["head.bias"], memory.groups[OWN]["head.bias"])
    assert notes[0].startswith("site-1 keeps its own model: the shared predictor, whatever the site expects,")


def test_before_that_both_are_heard(sent: Sent) -> None:
    """The same student and model: together they are as good as the model, and a site has two networks then."""
    data, base, _, _ = sent
    notes: list[str] = []
    ctx, of = replace(base, note=notes.append), method(replayed=0)
    delivered, memory = home(ctx, of, constant(ctx, 3), 0), State({OWN: constant(ctx, 0)})
    found = drive(ctx, of.personal(ctx, data.sites[0], delivered, memory))
    assert right(found, ctx, data.sites[0].val) == 0.5
    assert [float(member.weights["head.bias"][3]) for member in found.members] == [50, 0]
    assert notes[0].startswith("site-1 takes the shared predictor, heard with its own model, its own model's votes")
    fixed = drive(ctx, method(replayed=0, prior=0.0).personal(ctx, data.sites[0], delivered, memory))
    assert len(fixed.members) == 1


def test_the_own_model_tells_the_sites_classes_apart_and_the_student_what_it_has_not_seen(sent: Sent) -> None:
    """A student that mistakes 0 for 1 and 1 for 0, and knows 2; a model of images of 0 and 1 that knows these alone."""
    data, ctx, _, _ = sent
    labels = torch.tensor([0, 1] * 12)
    own_images = replace(data.sites[0].train, labels=torch.arange(9) % 2)
    val = replace(data.sites[0].val, images=data.sites[0].val.images[:1].repeat(24, 1, 1, 1), labels=labels)
    site = replace(data.sites[0], train=own_images, val=val)
    student, own = (Member(ctx.study.student_spec, constant(ctx, k)) for k in (1, 0))
    swapped = 9.0 * torch.nn.functional.one_hot(1 - labels, 4)
    knows = 9.0 * torch.nn.functional.one_hot(labels, 4)
    offer = Offer(Predictor(4, (student,)), swapped.double(), ", taught,")
    offers = method()._with_own([offer], (own, knows), site)
    assert [each.how for each in offers] == [
        ", taught, heard with its own model,",
        *(f", taught, heard with its own model, its own model's votes counted {n} times," for n in (4, 16, 64)),
        ", taught, its own model telling apart what it has seen,",
    ]
    came = method()._with_own([offer, offer._replace(how="")], (own, knows), site)
    assert [each.how for each in came[5:7]] == [
        ", heard with its own model,",
        ", heard with its own model, its own model's votes counted 4 times,",
    ]
    found = Judge(site, None, calibrate=False).choose([offer], (own, knows), offers)
    assert found.accuracy == 1
    assert found.words.startswith("takes the shared predictor, taught, heard with its own model, its own model's votes")
    unseen = found.predictor.combined([torch.tensor([[0.0, 0.0, 9.0, 0.0]]), torch.tensor([[9.0, 0.0, 0.0, 0.0]])], 1)
    assert int(unseen.argmax()) == 2
    assert method(with_own=False)._with_own([offer], (own, knows), site) == []
    assert method()._with_own([offer], None, site) == []


def test_in_a_chain_the_own_model_tells_apart_what_it_has_five_images_of(sent: Sent) -> None:
    """P = (0.1, 0.2, 0.3, 0.4), so 0.3 for classes 0 and 1; its own model, of 9 and 5 images, says 2:0.2."""
    ctx = sent[1]
    student, own = (Member(ctx.study.student_spec, constant(ctx, k)) for k in (1, 0))
    found = chain_of(student, own, torch.tensor([9, 5, 4, 0]))
    assert found.members == (student, own)
    said = [torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log(), torch.tensor([[19.0, 1.1, 500, 500]]).log()]
    expected = torch.tensor([[0.3 * 2 / 2.2, 0.3 * 0.2 / 2.2, 0.3, 0.4]])  # 19/9.5 and 1.1/5.5
    torch.testing.assert_close(found.combined(said, 1).exp(), expected)


def test_the_student_is_taught_on_the_sites_images_and_made_ones_of_what_it_has_not_seen(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 0 and 1 the site has four or five images; of 2 and 3 made ones came, and some of 0 that are not needed."""
    data, base, _, _ = sent
    monkeypatch.setattr(consult_distilled, "SEEN", 3)
    monkeypatch.setattr(consult_distilled, "LEAST", 6)
    notes: list[str] = []
    ctx, of = replace(base, note=notes.append), method(tune_epochs=3, tune_lr=0.01, tune_share=0.2, prior=0.0)
    site, weights = data.sites[0], ctx.study.fresh_weights(ctx.study.student_spec, "x")
    pictures = {"images": torch.full((5, 3, 8, 8), 90, dtype=torch.uint8), "labels": torch.tensor([0, 2, 2, 3, 0])}
    delivered = of.deliver(ctx, State({"student": weights, SYNTHETIC: pictures}))["site-1"]
    work = of.personal(ctx, site, delivered, State())
    fit = next(work)
    assert fit.data.counts().tolist() == [6, 6, 6, 6]
    grey = (fit.data.images == 90).flatten(1).all(dim=1)
    assert torch.equal(grey, fit.data.labels >= 2)
    assert (fit.recipe.lr, fit.recipe.schedule, fit.recipe.epochs, fit.recipe.keep) == (0.01, "cosine", 3, "last")
    assert isinstance(fit.objective, HomeLesson)
    assert (fit.objective.seen.tolist(), fit.objective.share) == ([True, True, False, False], 0.2)
    (teacher,) = fit.teachers  # the student with new statistics, which is what it begins as
    changed = {name for name, tensor in teacher.weights.items() if not torch.equal(tensor, weights[name])}
    assert changed
    assert all("running" in name or "tracked" in name for name in changed)
    assert all(torch.equal(teacher.weights[name], fit.start[name]) for name in fit.start)
    fitted = ctx.train([fit])[0]
    with pytest.raises(StopIteration) as end:
        work.send(fitted)
    assert torch.equal(end.value.value.members[0].weights["head.weight"], fitted.weights["head.weight"])
    assert notes[0].startswith("site-1 takes the shared predictor, taught what the site has seen, as set (")


def test_a_lesson_that_does_not_help_is_not_taken(sent: Sent) -> None:
    """Class 0 is half of the images, and the student says nothing else; after the lesson only what is not there."""
    data, base, _, _ = sent
    notes: list[str] = []
    ctx, of = replace(base, note=notes.append), method()
    site = data.sites[0]
    more = replace(site, train=replace(site.train, labels=torch.zeros_like(site.train.labels)))  # nine of class 0: seen
    work = of.personal(ctx, more, home(ctx, of, constant(ctx, 0)), State({OWN: constant(ctx, 0)}))
    fitted = ctx.train([next(work)])[0]
    with pytest.raises(StopIteration) as end:
        work.send(replace(fitted, weights=constant(ctx, 3)))
    assert right(end.value.value, ctx, site.val) == 0.5
    assert float(end.value.value.members[0].weights["head.bias"][0]) == 50
    assert notes[0].startswith("site-1 takes the shared predictor, its batch-norm statistics taken anew,")
    assert notes[0].endswith(
        "; the student before any prior: taught what the site has seen 0.0%, its batch-norm statistics taken anew "
        "50.0%, as it came 50.0%"
    )


def test_a_lesson_that_diverges_is_left_out(sent: Sent) -> None:
    data, base, _, _ = sent
    notes: list[str] = []
    ctx, of = replace(base, note=notes.append), method()
    site = data.sites[0]
    more = replace(site, train=replace(site.train, labels=torch.zeros_like(site.train.labels)))
    work = of.personal(ctx, more, home(ctx, of, constant(ctx, 0)), State({OWN: constant(ctx, 0)}))
    next(work)
    with pytest.raises(StopIteration) as end:
        work.throw(SiteDiverged("training diverged"))
    assert right(end.value.value, ctx, site.val) == 0.5
    assert notes[0] == "the lesson at site-1 diverged and is left out; use a smaller tune_lr"
    assert notes[1].startswith("site-1 takes the shared predictor, its batch-norm statistics taken anew,")


def test_an_own_model_that_diverged_is_no_bar(sent: Sent) -> None:
    data, base, _, _ = sent
    notes: list[str] = []
    ctx, of = replace(base, note=notes.append), method(replayed=0)
    own = {name: t * math.nan if t.is_floating_point() else t for name, t in constant(ctx, 0).items()}
    found = drive(ctx, of.personal(ctx, data.sites[0], home(ctx, of, constant(ctx, 1), 0), State({OWN: own})))
    assert right(found, ctx, data.sites[0].val) == 0.5
    assert notes[0].startswith("site-1 takes the shared predictor")


def test_a_site_without_memory_or_validation_images(sent: Sent) -> None:
    data, base, _, _ = sent
    notes: list[str] = []
    ctx, of = replace(base, note=notes.append), method(replayed=0)
    delivered = home(ctx, of, constant(ctx, 3), 0)
    drive(ctx, of.personal(ctx, data.sites[0], delivered, State()))
    assert "with so few validation images; it has no model of its own to be held against (0.0% of 12 " in notes[0]
    blind = replace(data.sites[0], val=none_of(data.sites[0].val))
    found = drive(ctx, of.personal(ctx, blind, delivered, State()))
    assert found.log_prior is not None
    torch.testing.assert_close(found.log_prior, log_shares(data.sites[0].train.counts()))
    assert notes[1] == (
        "site-1 has no validation images: it takes the shared predictor with its own prior, tempered by 1.00, as "
        "nothing can be measured"
    )
    of = method(tune_epochs=0)
    drive(ctx, of.personal(ctx, blind, home(ctx, of, constant(ctx, 3)), State()))
    assert notes[2].startswith(
        "site-1 has no validation images: it takes the shared predictor, its batch-norm statistics taken anew, with "
        "its own prior, tempered by 1.00"
    )


@pytest.mark.parametrize("own", [{"tune_epochs": 0}, {"replayed": 0}, {}])
def test_no_lesson_without_epochs_or_images_or_classes_that_the_site_knows(own: dict[str, Any], sent: Sent) -> None:
    """Of four or five images a class, fewer than five are not enough to know it; nor are five where nothing came."""
    data, ctx, _, memories = sent
    of, site = method(**own), data.sites[0]
    if own:
        site = replace(site, train=replace(site.train, labels=torch.zeros_like(site.train.labels)))
    else:
        site = replace(site, train=replace(site.train, labels=torch.arange(9) % 4))
    work = of.personal(ctx, site, home(ctx, of, constant(ctx, 0), of.settings.replayed), memories["site-1"])
    with pytest.raises(StopIteration):
        next(work)


# Statistics taken anew at the site ------------------------------------------------------------------------------------


def test_as_many_of_every_class_that_is_marked_and_there() -> None:
    labels = torch.tensor([0, 0, 1, 3, 3, 3])
    places = evenly(labels, torch.tensor([True, False, True, True]), 4, torch.Generator().manual_seed(0))
    assert labels[places].tolist() == [0, 0, 0, 0, 3, 3, 3, 3]
    assert len(evenly(labels, torch.tensor([False, False, True, False]), 4, torch.Generator())) == 0


def test_statistics_are_of_the_sites_images_and_of_made_ones_of_what_it_has_not_seen(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four images of each of two classes, of which three are enough to be the site's own; made images are grey."""
    data, ctx, _, _ = sent
    monkeypatch.setattr(consult_distilled, "SEEN", 3)
    monkeypatch.setattr(consult_distilled, "MOST", 2)
    site, shown = data.sites[0], []
    assert site.train.counts().tolist()[2:] == [0, 0]
    monkeypatch.setattr(
        consult_distilled, "retaken", lambda _spec, weights, batches, *_: shown.extend(batches) or weights
    )
    of = method(prior=0.0, tune_epochs=0)
    images = torch.stack([torch.full((3, 8, 8), 10 * c, dtype=torch.uint8) for c in (0, 1, 2, 2, 3)])
    pictures = {"images": images, "labels": torch.tensor([0, 1, 2, 2, 3])}
    weights = ctx.study.fresh_weights(ctx.study.student_spec, "x")
    delivered = of.deliver(ctx, State({"student": weights, SYNTHETIC: pictures}))["site-1"]
    drive(ctx, of.personal(ctx, site, delivered, State()))
    (batch,) = shown
    greys = [normalise(image.unsqueeze(0))[0] for image in images]
    assert [sum(torch.equal(image, grey) for image in batch) for grey in greys] == [0, 0, 2, 2, 2]  # 2 and 2 are one
    own = normalise(site.train.images)
    for klass in (0, 1):
        assert sum(any(torch.equal(image, real) for real in own[site.train.labels == klass]) for image in batch) == 2
    monkeypatch.setattr(statistics, "BATCH", 6)
    drive(ctx, of.personal(ctx, site, delivered, State()))
    assert [len(batch) for batch in shown] == [8, 4, 4]


def test_the_form_of_the_student_that_needs_less_of_the_prior_is_taken(sent: Sent) -> None:
    """With t fixed it is the one with new statistics, unless that is off or no images came."""
    data, base, _, _ = sent
    notes: list[str] = []
    ctx = replace(base, note=notes.append)
    weights = ctx.study.fresh_weights(ctx.study.student_spec, "x")
    for own in ({}, {"retake": False}, {"replayed": 0}):
        of = method(prior=0.0, tune_epochs=0, **own)
        found = drive(ctx, of.personal(ctx, data.sites[0], home(ctx, of, weights, of.settings.replayed), State()))
        differ = [name for name, tensor in found.members[0].weights.items() if not torch.equal(tensor, weights[name])]
        assert bool(differ) == (not own)
        assert all("running" in name or "tracked" in name for name in differ)
    assert notes[0].startswith("site-1 takes the shared predictor, its batch-norm statistics taken anew, as set (")
    assert all(note.startswith("site-1 takes the shared predictor as it is, as set (") for note in notes[1:])


# Whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_study(shape: str, tmp_path: Path) -> None:
    data, changes = SHAPES[shape]
    if shape == "mixed networks":
        changes = {"model": {"name": "small", "width": 2, "per_site": {"site-2": "wrn16-2"}}}
    result = coordinate(tmp_path / "run", method(), data, rounds=1, **changes)
    for site in data.sites:
        found = deployed(tmp_path / "run", site.name)
        assert (found.combine, len(found.members), found.classes) == ("logits", 1, len(data.classes))
    assert sum("validation images" in note["text"] for note in result["notes"]) == len(data.sites)


@pytest.mark.parametrize("counts", ["binned", "none"])
def test_counts_that_tell_little(counts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At sites of two or three images a class, of which coarse bins make nothing."""
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", method(counts=counts), federation(), rounds=1)
    up = [b for b in crossed if b.envelope.kind == "answer"]
    assert {"label_counts" in b.groups for b in up} == {counts == "binned"}
    assert sum(SYNTHETIC in b.groups for b in crossed) == 3


def test_several_shots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The student goes down in between; synthetic images only at the end."""
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", method(shots=2, epochs=1), federate(n=9, val=4), rounds=2)
    kinds = [(b.envelope.kind, b.envelope.round, SYNTHETIC in b.groups) for b in crossed if b.envelope.site == "site-1"]
    assert kinds == [
        ("request", 0, False),
        ("answer", 0, False),
        ("request", 1, False),
        ("answer", 1, False),
        ("delivery", 1, True),
    ]
