"""Ask each site about what it has seen: what leaves, who is heard, and what a site makes of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from methods.skewed import SEEN, federate, none_of, with_site
from remote.parties import OPEN, Parties, agreement
from tiny import context, coordinate, deployed, drive, federation, study, watch_bundles
from wardround.data.federation import Federation
from wardround.exchange.bundle import LABEL_COUNTS, SIZE, Bundle
from wardround.exchange.policy import Policy
from wardround.methods.base import Context, join_groups, layout_groups, split_groups
from wardround.methods.consult import Consult, ConsultSettings, common_prior, panel_of, voiced
from wardround.methods.registry import make
from wardround.methods.seen import counts_group, seen_by_sites, told
from wardround.methods.state import State
from wardround.methods.trust import guessed, log_shares
from wardround.models import fresh
from wardround.progress import Silent
from wardround.study import Study
from wardround.words import describe

TRAIN: dict[str, Any] = {"rounds": 1, "train": {"epochs": 12, "batch": 8, "lr": 0.05}}


def method(**own: Any) -> Consult:
    found = make("consult", own)
    assert isinstance(found, Consult)
    return found


def listening(data: Federation, **changes: Any) -> tuple[Context, list[str]]:
    """A context of this study, and its notes."""
    notes: list[str] = []
    return replace(context(study(data, method="consult", **{**TRAIN, **changes})), note=notes.append), notes


def answered(ctx: Context, data: Federation, of: Consult) -> dict[str, Bundle]:
    """What every site sends, as declared."""
    sent = {}
    for site in data.sites:
        found = drive(ctx, of.answer(ctx, site, ctx.bundle("request", site.name, {}), State()))
        of.payload(ctx.study, site.name).check(found.bundle)
        sent[site.name] = found.bundle
    return sent


@pytest.fixture(scope="module")
def skewed() -> tuple[Federation, Study, dict[str, Bundle]]:
    """Three sites that have trained."""
    data = federate()
    ctx, _ = listening(data)
    return data, ctx.study, answered(ctx, data, method())


def claiming(bundle: Bundle, *counts: int) -> Bundle:
    """The same model, with these counts and as many images in all."""
    images = torch.tensor(min(sum(counts), 2**62))
    told = {LABEL_COUNTS: {"counts": torch.tensor(counts)}, SIZE: {"images": images}}
    return replace(bundle, groups={**bundle.groups, **told})


def told_counts(bundle: Bundle) -> list[int]:
    return [int(n) for n in bundle.group(LABEL_COUNTS)["counts"]]


# What leaves ----------------------------------------------------------------------------------------------------------


def test_a_site_sends_its_network_its_size_and_its_counts(skewed: Any) -> None:
    data, agreed, sent = skewed
    payload = method().payload(agreed, "site-1")
    assert [group.name for group in payload.up] == ["parameters", "statistics", "counters", "size", "label_counts"]
    assert {site: told_counts(bundle) for site, bundle in sent.items()} == {
        site.name: site.train.counts().tolist() for site in data.sites
    }
    assert payload.up[-1].optional
    for group in payload.up:
        assert sent["site-1"].group(group.name).keys() == (group.tensors or {}).keys()


def test_counts_in_coarse_bins_or_not_at_all(skewed: Any) -> None:
    agreed, counts = skewed[1], torch.tensor([0, 4, 7, 99])
    assert told("exact", counts) == {LABEL_COUNTS: {"counts": counts}}
    assert told("binned", counts)[LABEL_COUNTS]["counts"].tolist() == [0, 0, 5, 50]
    assert told("none", counts) == {}
    assert counts_group(agreed, "none") == ()
    assert "to the lower end of a coarse bin" in counts_group(agreed, "binned")[0].what


def test_a_site_too_small_to_train_tells_of_nothing() -> None:
    data = with_site(federate(), 1, train=none_of(federate().sites[1].train))
    ctx, notes = listening(data)
    sent = answered(ctx, data, method())
    assert told_counts(sent["site-2"]) == [0, 0, 0, 0]
    (state,) = method().absorb(ctx, State(), sent)
    assert sorted(state.groups) == ["site-1", "site-3"]
    assert notes == []


def test_what_is_not_told_is_guessed_and_said(skewed: Any) -> None:
    """Site 2 leaves its counts out, as its policy may have it."""
    data, agreed, sent = skewed
    ctx, notes = listening(data)
    without = {name: group for name, group in sent["site-2"].groups.items() if name != LABEL_COUNTS}
    answers = {**sent, "site-2": replace(sent["site-2"], groups=without)}
    method().payload(agreed, "site-2").check(answers["site-2"])
    (state,) = method().absorb(ctx, State(), answers)
    expected = guessed(state.groups["site-2"], 24).round().long().tolist()
    assert state.facts[LABEL_COUNTS]["site-2"] == expected
    assert state.facts[LABEL_COUNTS]["site-1"] == told_counts(sent["site-1"])
    assert notes == ["what site-2 trained on was not told, and is guessed from the models alone"]


def test_a_site_that_tells_no_counts_cannot_claim_images_without_end(skewed: Any) -> None:
    data, _, sent = skewed
    ctx, notes = listening(data)
    groups = {name: group for name, group in sent["site-2"].groups.items() if name != LABEL_COUNTS}
    groups[SIZE] = {"images": torch.tensor(2**63 - 1)}
    (state,) = method().absorb(ctx, State(), {**sent, "site-2": replace(sent["site-2"], groups=groups)})
    assert sum(state.facts[LABEL_COUNTS]["site-2"]) == pytest.approx(2**40)
    assert notes[-1].endswith("; it is heard as if it had 72")


def test_images_that_a_model_does_not_show_are_not_counted_and_said(skewed: Any) -> None:
    """A site that claims a thousand of each class, and whose weights have risen for two."""
    data, _, sent = skewed
    ctx, notes = listening(data)
    (state,) = method().absorb(ctx, State(), sent)
    before = state.facts[LABEL_COUNTS]
    assert (before, notes) == ({site: told_counts(bundle) for site, bundle in sent.items()}, [])
    (state,) = method().absorb(ctx, State(), {**sent, "site-2": claiming(sent["site-2"], *[1000] * 4)})
    assert SEEN[1] == (1, 2)
    assert state.facts[LABEL_COUNTS] == {**before, "site-2": [50, 1000, 1000, 50]}
    unseen = f"{data.classes[0]}, {data.classes[3]}"
    assert notes == [
        f"site-2 tells of images of {unseen} that its model does not show, or did not learn from; 1,900 of its 4,000 "
        "images are not counted",
        "site-2 tells of 2,100 images, more than 3 times what the others have on average; it is heard as if it had 72",
    ]


def test_a_model_that_answers_with_no_numbers_is_refused(skewed: Any) -> None:
    data, _, sent = skewed
    ctx, notes = listening(data)
    groups = {name: dict(tensors) for name, tensors in sent["site-2"].groups.items()}
    groups["statistics"] = {name: torch.full_like(t, -1e4) for name, t in groups["statistics"].items()}
    (state,) = method().absorb(ctx, State(), {**sent, "site-2": replace(sent["site-2"], groups=groups)})
    assert sorted(state.groups) == ["site-1", "site-3"]
    assert notes == ["the model of site-2 is refused: its answers are NaN or infinite"]


@pytest.mark.parametrize(("name", "value"), [("running_mean", -1e25), ("running_var", 1e30)])
def test_a_model_whose_statistics_cannot_be_is_refused(skewed: Any, name: str, value: float) -> None:
    """Of one channel that no answer depends on; a synthesis would still be measured by it, and overflow."""
    data, _, sent = skewed
    ctx, notes = listening(data)
    groups = {group: {n: t.clone() for n, t in tensors.items()} for group, tensors in sent["site-2"].groups.items()}
    layer = next(key.removesuffix(name) for key in groups["statistics"] if key.endswith(name))
    groups["statistics"][f"{layer}{name}"][0] = value
    groups["parameters"][f"{layer}weight"][0] = 0
    (state,) = method().absorb(ctx, State(), {**sent, "site-2": replace(sent["site-2"], groups=groups)})
    assert sorted(state.groups) == ["site-1", "site-3"]
    size = abs(value) if name == "running_mean" else value**0.5
    assert notes == [
        f"the model of site-2 is refused: its batch-norm statistics are of feature maps as large as {size:.0e}"
    ]


def test_a_model_that_was_never_trained_is_not_heard(skewed: Any) -> None:
    """In the panel its counts of zero give it no vote, and the student of the panel does not learn from it.

    These sites have hardly trained, either, so the untrained network's head is made smaller still.
    """
    data, agreed, sent = skewed
    ctx, notes = listening(data)
    spec = agreed.spec("site-2")
    weights = fresh(spec, torch.Generator().manual_seed(0))
    nothing = layout_groups(spec, {**weights, "head.weight": 0.1 * weights["head.weight"]})
    answers = {**sent, "site-2": replace(sent["site-2"], groups={**sent["site-2"].groups, **nothing})}
    (state,) = method().absorb(ctx, State(), answers)
    assert state.facts[LABEL_COUNTS]["site-2"] == [0, 0, 0, 0]
    assert state.facts[LABEL_COUNTS]["site-1"] == told_counts(sent["site-1"])
    words = "the model of site-2 says nearly the same of every image, as if never trained; it is not heard"
    assert notes == [words]
    with_it = method().predictor(ctx, state)
    others = replace(state, groups={name: state.groups[name] for name in ("site-1", "site-3")})
    pixels = data.test.images
    scores = [p.scores(pixels, ctx.device) for p in (with_it, method().predictor(ctx, others))]
    torch.testing.assert_close(scores[0], scores[1])
    distilled = make("consult-distilled", {"epochs": 1, "generator_steps": 1, "kd_steps": 1, "batch": 6, "shots": 1})
    (*_, after) = distilled.absorb(ctx, State(), answers)
    assert notes == [words] * 2
    assert sorted(distilled.counts) == ["site-1", "site-3"]  # type: ignore[attr-defined]
    assert "student" in after.groups


@pytest.mark.parametrize("counts", [[0, 2**63 - 1, 0, 0], [0, 2**62, 2**62, 0]])
def test_absurd_counts_do_no_more_than_large_ones(skewed: Any, counts: list[int]) -> None:
    data, _, sent = skewed
    ctx, notes = listening(data)
    (state,) = method().absorb(ctx, State(), {**sent, "site-2": claiming(sent["site-2"], *counts)})
    assert state.facts[LABEL_COUNTS]["site-2"] == [min(n, 2**40) for n in counts]  # of what its model shows
    impossible, large = notes
    assert impossible == f"site-2 tells of counts that cannot be, from 0 to {max(counts):,}"
    assert large.endswith("; it is heard as if it had 72")
    assert bool(method().predictor(ctx, state).scores(data.test.images, ctx.device).isfinite().all())


@pytest.mark.parametrize("why", ["round", "weights", "noise"])
def test_networks_that_did_not_begin_anew_are_not_asked_what_they_show(
    skewed: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _, sent = skewed
    ctx, notes = listening(data)
    answers = {**sent, "site-2": claiming(sent["site-2"], *[1000] * 4)}
    kept = State({name: join_groups(bundle) for name, bundle in answers.items()})
    if why == "round":
        ctx = replace(ctx, round=1)
    elif why == "weights":
        model = ctx.study.settings.model.model_copy(update={"weights": "some.safetensors"})
        ctx = replace(ctx, study=replace(ctx.study, settings=ctx.study.settings.model_copy(update={"model": model})))
    else:
        monkeypatch.setattr("wardround.methods.seen.trains_privately", lambda privacy: True)
    assert seen_by_sites(ctx, kept, answers)["site-2"].tolist() == [1000] * 4
    assert [note.partition(",")[0] for note in notes] == ["site-2 tells of 4"]  # thousand, beside 24 of the others


@pytest.mark.parametrize(
    ("counts", "taken", "words"),
    [
        ([-5, 3, 0, 0], [0, 3, 0, 0], "tells of counts that cannot be, from -5 to 3"),
        (
            [40, 60, 0, 0],
            [10, 14, 0, 0],
            "tells of 100 images by class and of 24 in all; its counts are scaled to these",
        ),
        ([0, 0, 0, 0], [0, 0, 0, 0], "tells of no image of any class, so its model is heard about none"),
    ],
)
def test_counts_that_contradict_themselves_are_named(
    skewed: Any, counts: list[int], taken: list[int], words: str
) -> None:
    data, _, sent = skewed
    ctx, notes = listening(data)
    lie = {**sent["site-1"].groups, LABEL_COUNTS: {"counts": torch.tensor(counts)}}
    (state,) = method().absorb(ctx, State(), {**sent, "site-1": replace(sent["site-1"], groups=lie)})
    assert state.facts[LABEL_COUNTS]["site-1"] == taken
    assert notes == [f"site-1 {words}"]


@pytest.mark.parametrize("counts", ["exact", "binned", "none"])
def test_a_whole_run_crosses_what_is_declared(counts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at sites of two or three images a class, of which coarse bins make nothing."""
    crossed = watch_bundles(monkeypatch)
    result = coordinate(tmp_path / "run", method(counts=counts), rounds=1)
    up = [b for b in crossed if b.envelope.kind == "answer"]
    home = [b for b in crossed if b.envelope.kind == "delivery"]
    assert {LABEL_COUNTS in b.groups for b in up} == {counts != "none"}
    if counts == "binned":
        assert {n for b in up for n in told_counts(b)} == {0}
    assert len(home) == 3
    assert all(LABEL_COUNTS in b.groups for b in home)
    words = [note["text"] for note in result["notes"]]
    assert ("what site-1, site-2, site-3 trained on was not told, and is guessed from the models alone" in words) == (
        counts == "none"
    )
    assert sum(" takes the shared predictor" in text or " keeps its own model" in text for text in words) == 3
    assert sum("tells of no image of any class" in text for text in words) == (3 if counts == "binned" else 0)
    homes = [deployed(tmp_path / "run", f"site-{n}") for n in (1, 2, 3)]
    assert {(found.combine, len(found.members)) for found in homes} <= {("pairs", 3), ("logits", 1)}


# The panel ------------------------------------------------------------------------------------------------------------


def test_the_panel_is_made_of_models_and_counts(skewed: Any) -> None:
    data, _, sent = skewed
    ctx, _ = listening(data)
    (state,) = method().absorb(ctx, State(), sent)
    panel = method(vote_temperature=2.0, doubt=7.0, sharpness=4.0).predictor(ctx, State.from_bytes(state.to_bytes()))
    counts = torch.tensor([site.train.counts().tolist() for site in data.sites])
    assert panel.trust is not None
    assert panel.votes is not None
    assert panel.trust.tolist() == counts.tolist()
    assert panel.votes.tolist() == [2.0, 7.0]
    assert panel.sharpness == 4.0 * 8 / 4  # of four classes
    assert panel.member_log_prior is not None
    torch.testing.assert_close(panel.member_log_prior, log_shares(counts))
    home = method().deliver(ctx, state)["site-2"]
    method().payload(ctx.study, "site-2").check(home)
    again = method().predictor(ctx, method().delivered_state(Bundle.from_bytes(home.to_bytes())))
    assert again.parts()[1] == panel.parts()[1]
    assert torch.equal(
        again.scores(data.test.images, ctx.device), method().predictor(ctx, state).scores(data.test.images, ctx.device)
    )


def test_what_is_common_everywhere_is_expected() -> None:
    """Counts 40 + 20, 10 + 0, 0 + 30 of three classes: shares of 60.5, 10.5, 30.5 of 101.5.

    A class that one site alone has is as common as it says; a site that claims a million is held to three times the
    others' median or mean.
    """
    counts = torch.tensor([[40, 10, 0], [20, 0, 30]])
    expected = torch.tensor([60.5, 10.5, 30.5], dtype=torch.float64).div(101.5).log()
    found = panel_of((), counts, ConsultSettings(federation=0.25, doubt=100.0)).log_prior
    torch.testing.assert_close(found, expected / 4)
    assert panel_of((), counts, ConsultSettings(federation=0.0)).log_prior is None
    liar = torch.tensor([[40, 10, 0], [20, 0, 30], [0, 1_000_000, 0]])  # held to 150 images
    lied = panel_of((), liar, ConsultSettings(federation=1.0, doubt=5.0)).log_prior
    torch.testing.assert_close(lied, log_shares(torch.tensor([60, 115, 30])))  # and to the others' 100 and 5
    two = torch.tensor([[50, 50], [1_000_000, 0]])  # of two nobody can say which is out of line; 100 and 5 hold here
    lied = panel_of((), two, ConsultSettings(federation=1.0, doubt=5.0)).log_prior
    torch.testing.assert_close(lied, log_shares(torch.tensor([155, 50])))


@pytest.mark.parametrize("classes", [2, 3, 8, 20])
def test_a_class_that_wins_all_its_pairs_has_the_same_odds_however_many_there_are(classes: int) -> None:
    """It wins C − 1, the others half of their C − 2 pairs: C/2 more, times 5·8/C."""
    panel = panel_of((), torch.ones(2, classes), ConsultSettings())
    assert panel.sharpness is not None
    won, others = classes - 1.0, (classes - 2) / 2
    assert float(panel.sharpness) * (won - others) == pytest.approx(20.0)


def test_the_panel_knows_more_than_the_mean_of_logits(skewed: Any) -> None:
    """On classes that no single site has all of: what the method is for."""
    data, _, sent = skewed
    ctx, _ = listening(data)

    def right(name: str) -> float:
        of = make(name, {})
        (kept,) = of.absorb(ctx, State(), sent)
        shared = of.predictor(ctx, kept)
        assert shared is not None
        return float((shared.scores(data.test.images, ctx.device).argmax(dim=1) == data.test.labels).double().mean())

    assert right("consult") >= right("ensemble")
    assert right("consult") > 0.5


# At the site ----------------------------------------------------------------------------------------------------------


def at_site(ctx: Context, data: Federation, sent: dict[str, Bundle], place: int, **own: Any) -> Any:
    of = method(**own)
    (state,) = of.absorb(ctx, State(), sent)
    site = data.sites[place]
    return drive(ctx, of.personal(ctx, site, of.deliver(ctx, state)[site.name], State()))


def right(predictor: Any, ctx: Context, images: Any) -> float:
    return float((predictor.scores(images.images, ctx.device).argmax(dim=1) == images.labels).double().mean())


def test_no_site_is_below_its_own_model_on_its_validation_images(skewed: Any) -> None:
    data, _, sent = skewed
    ctx, notes = listening(data)
    for place, site in enumerate(data.sites):
        predictor = at_site(ctx, data, sent, place)
        alone = make("ensemble", {})
        (state,) = alone.absorb(ctx, State(), {site.name: sent[site.name]})
        own = alone.predictor(ctx, state)
        assert right(predictor, ctx, site.val) >= right(own, ctx, site.val)
        assert notes[-1].startswith(f"{site.name} ")
        assert "calibration error" in notes[-1]


def permuted(bundle: Bundle) -> Bundle:
    """The model of a site that calls every class by the name of the next."""
    groups = {name: dict(tensors) for name, tensors in bundle.groups.items()}
    for name in ("head.weight", "head.bias"):
        groups["parameters"][name] = groups["parameters"][name].roll(1, dims=0)
    return replace(bundle, groups=groups)


def test_a_member_that_is_wrong_about_what_it_claims_to_know_is_not_heard(skewed: Any) -> None:
    """Site 2 has wrong labels; site 1 and 3 hear of it where their images can tell, site 2 itself keeps its model."""
    data, _, sent = skewed
    wrong = {**sent, "site-2": claiming(permuted(sent["site-2"]), 30, 30, 30, 30)}
    ctx, notes = listening(data)
    heard = [len(at_site(ctx, data, wrong, place, prior=0.0).members) for place in range(3)]
    assert heard == [2, 3, 2]
    words = [note for note in notes if " takes " in note or " keeps " in note]
    assert words[0].endswith("; it does not hear site-2, wrong about what it claims to have seen")
    assert "does not hear" not in words[1]
    assert [len(at_site(ctx, data, wrong, place, prior=0.0, vet=0.0).members) for place in range(3)] == [3, 3, 3]


def test_who_is_not_heard_is_not_counted_among_the_patients_either(skewed: Any) -> None:
    """Site 1 expects the mix of the two sites that it hears, not that of all three."""
    data, _, sent = skewed
    lied = {**sent, "site-2": claiming(permuted(sent["site-2"]), 30, 30, 30, 30)}
    ctx, _ = listening(data)
    (state,) = method().absorb(ctx, State(), lied)
    every = method().predictor(ctx, state)
    found = at_site(ctx, data, lied, 0, prior=0.0, calibrate=False)
    assert len(found.members) == 2
    assert every.trust is not None
    assert every.log_prior is not None
    assert found.log_prior is not None
    torch.testing.assert_close(found.log_prior, common_prior(every.trust[[0, 2]], method().settings))
    assert float((found.log_prior - every.log_prior).abs().max()) > 0.01


def test_a_site_without_a_model_that_believes_nobody_hears_all(skewed: Any) -> None:
    data, _, sent = skewed
    wrong = {site: claiming(permuted(sent[site]), 30, 30, 30, 30) for site in ("site-2", "site-3")}
    ctx, _ = listening(data)
    assert len(at_site(ctx, data, wrong, 0, vet=0.99).members) == 2


@pytest.mark.parametrize(("images", "heard"), [(19, 3), (20, 2)])
def test_few_images_are_no_proof(skewed: Any, images: int, heard: int) -> None:
    """However many pairs of classes each of them is asked about."""
    data, _, sent = skewed
    few = with_site(data, 0, val=data.sites[0].val.take(torch.arange(images)))
    ctx, _ = listening(few)
    wrong = {**sent, "site-2": claiming(permuted(sent["site-2"]), 30, 30, 30, 30)}
    assert len(at_site(ctx, few, wrong, 0, prior=0.0).members) == heard


def test_its_own_model_may_be_louder(skewed: Any) -> None:
    """As loud as it takes, up to the setting; with its prior fixed, and where it has no model, never."""
    data, _, sent = skewed
    ctx, _ = listening(data)
    (state,) = method().absorb(ctx, State(), sent)
    panel = method().predictor(ctx, state)
    said = [torch.randn(7, 4, generator=torch.Generator().manual_seed(k)) for k in range(3)]

    def voices(own: int | None, **setting: float) -> list[list[float] | None]:
        offers = voiced(panel, said, own, method(**setting).settings.own_voice)
        for offer in offers:
            torch.testing.assert_close(offer.scores, offer.predictor.combined(said, 7).double())
        return [None if o.predictor.voices is None else o.predictor.voices.tolist() for o in offers]

    assert voices(1) == [None, [1, 4, 1], [1, 16, 1], [1, 64, 1]]
    assert voices(0, own_voice=20.0) == [None, [4, 1, 1], [16, 1, 1]]
    assert voices(2, own_voice=1.0) == voices(None) == [None]
    assert at_site(ctx, data, sent, 0, prior=0.5).voices is None


def test_a_site_without_validation_images(skewed: Any) -> None:
    data, _, sent = skewed
    blind = with_site(data, 0, val=none_of(data.sites[0].val))
    ctx, notes = listening(blind)
    predictor = at_site(ctx, blind, sent, 0)
    torch.testing.assert_close(predictor.log_prior, log_shares(data.sites[0].train.counts()))
    assert notes == [
        "site-1 has no validation images: it takes the shared predictor with its own prior, tempered by 1.00, as "
        "nothing can be measured"
    ]
    assert predictor.least_familiar is None


# Every shape of study -------------------------------------------------------------------------------------------------


def grey(data: Federation) -> Federation:
    """The same images in one channel."""

    def one(images: Any) -> Any:
        return replace(images, images=images.images[:, :1].contiguous())

    sites = tuple(
        replace(s, train=one(s.train), val=one(s.val), test=replace(s.test, images=one(s.test.images)))
        for s in data.sites
    )
    return replace(data, sites=sites, test=one(data.test))


SHAPES: dict[str, tuple[Federation, dict[str, Any]]] = {
    "two classes": (federate(((0,), (1,), (0, 1)), n=8, val=8, classes=2), {}),
    "one channel": (grey(federate(n=8, val=8)), {}),
    "mixed networks": (federate(n=8, val=8), {"model": {"name": "small", "width": 2, "per_site": {"site-2": "cnn4"}}}),
    "two sites": (federation((6, 4)), {}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_study(shape: str, tmp_path: Path) -> None:
    data, changes = SHAPES[shape]
    result = coordinate(tmp_path / "run", method(), data, rounds=1, **changes)
    homes = [deployed(tmp_path / "run", site.name) for site in data.sites]
    assert {(found.combine, len(found.members)) for found in homes} <= {("pairs", len(data.sites)), ("logits", 1)}
    assert {found.classes for found in homes} == {len(data.classes)}
    assert sum("validation images" in note["text"] for note in result["notes"]) == len(data.sites)


def test_fifty_sites() -> None:
    """Their networks as they were drawn: who is asked what depends on the counts."""
    data = federation((4,) * 50)
    ctx, notes = listening(data)
    sent = {
        site.name: ctx.bundle(
            "answer",
            site.name,
            {
                **split_groups(ctx, site.name, ctx.study.initial(site.name)),
                "size": {"images": torch.tensor(4)},
                LABEL_COUNTS: {"counts": site.train.counts()},
            },
        )
        for site in data.sites
    }
    predictor = at_site(ctx, data, sent, 49)
    assert len(predictor.members) in (1, 50)
    assert [note.partition(" ")[0] for note in notes] == ["site-50"]


# Policies, and noise --------------------------------------------------------------------------------------------------


def test_a_policy_that_forbids_counts_does_not_forbid_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed = watch_bundles(monkeypatch)
    rules = tmp_path / "policy.toml"
    rules.write_text('never_groups = ["label_counts"]\nseen_by_other_sites = true\n')
    result = coordinate(tmp_path / "run", method(), federate(n=8, val=8), rounds=1, policies={"site-2": str(rules)})
    up = {b.envelope.site: b for b in crossed if b.envelope.kind == "answer"}
    assert {site for site, b in up.items() if LABEL_COUNTS in b.groups} == {"site-1", "site-3"}
    texts = [note["text"] for note in result["notes"]]
    assert (
        "label_counts does not leave site-2, and the study goes on without it: policy rule never_groups: "
        "'label_counts' never leaves this site"
    ) in texts
    assert "what site-2 trained on was not told, and is guessed from the models alone" in texts
    assert len(up) == 3


class Heard(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_over_parcels_counts_stay_and_the_site_hears_why(tmp_path: Path) -> None:
    """The sites of the tiny study have one to three images of a class, too few for the default rule of five."""
    rules = OPEN.model_copy(update={"min_images_per_class": 5})
    parties, heard = Parties(tmp_path, agreement("consult"), policy=rules), Heard()
    for name, site in parties.sites.items():
        desk = parties.desk(name)
        desk.progress = heard
        parties.hub().collect(desk.train(site))
    assert [line.partition(", ")[0] for line in heard.lines] == [
        f"note: label_counts does not leave {name}" for name in parties.sites
    ]
    assert all("policy rule min_images_per_class: " in line for line in heard.lines)
    parties.step()
    assert parties.hub().standing().notes == (
        "what site-1, site-2, site-3 trained on was not told, and is guessed from the models alone",
    )
    desk = parties.desk("site-1")
    desk.progress = heard
    assert desk.take_home(parties.sites["site-1"]).predictor.classes == 4
    assert heard.lines[-1].startswith("note: site-1 ")  # what it chose, and why


def test_the_words_for_an_ethics_board_say_that_counts_may_stay(skewed: Any) -> None:
    def line(name: str) -> str:
        agreed = study(federate(), method=name)
        leaves = {section.heading: section.paragraphs for section in describe(agreed, make(name, {}))}
        (found,) = (text for text in leaves["What leaves a hospital"] if text.startswith("Numbers by class"))
        return found

    end = " A hospital whose rules forbid it leaves it out, and the study goes on."
    assert line("consult").endswith(end)
    assert "(at most 32 bytes)" in line("consult").replace(" B)", " bytes)")
    assert not line("class-ensemble").endswith(end)


def test_a_policy_is_not_asked_for_what_it_forbids_before_training() -> None:
    rules = Policy(never_groups=("label_counts",), seen_by_other_sites=True)
    agreed = study(federate(), method="consult")
    payload = method().payload(agreed, "site-1")
    assert rules.check_plan(agreed, method(), payload, "", None).keys() == {LABEL_COUNTS}


def test_noised_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ε = ½ counts leave with noise and in bins, and the run goes to its end; what was sent is what is used."""
    crossed = watch_bundles(monkeypatch)
    data = federate(n=40, val=8)
    result = coordinate(tmp_path / "run", method(), data, rounds=1, privacy={"counts_epsilon": 0.5})
    words = "label counts came in coarse bins and with noise: of one image, (ε, δ) = (0.5, 0) of the counts"
    assert words in [note["text"] for note in result["notes"]]
    sent: dict[str, Tensor] = {
        b.envelope.site: b.group(LABEL_COUNTS)["counts"] for b in crossed if b.envelope.kind == "answer"
    }
    edges = {0, 5, 10, 20, 50, 100}
    assert {int(n) for counts in sent.values() for n in counts} <= edges
    home = next(b for b in crossed if b.envelope.kind == "delivery").group(LABEL_COUNTS)
    assert {path.partition("/")[0]: counts.tolist() for path, counts in home.items()} == {
        site: counts.tolist() for site, counts in sent.items()
    }


def test_with_private_training_all_that_leaves_is_within_epsilon(tmp_path: Path) -> None:
    pytest.importorskip("opacus", reason="needs the extra [privacy]")
    privacy = {"epsilon": 3.0, "delta": 1e-3, "counts_epsilon": 0.5}
    model = {"name": "small-gn", "width": 4}
    result = coordinate(tmp_path / "run", method(), federate(n=24, val=8), rounds=1, privacy=privacy, model=model)
    assert {row["site"] for row in result["privacy"]} == {"site-1", "site-2", "site-3"}
    assert all(0.5 < row["epsilon"] <= 3.0 + 1e-6 for row in result["privacy"])


def test_every_class_has_a_site_here() -> None:
    """Of the samples: each class is seen, none by all."""
    assert {c for classes in SEEN for c in classes} == {0, 1, 2, 3}
    assert max(sum(c in classes for classes in SEEN) for c in range(4)) < len(SEEN)
