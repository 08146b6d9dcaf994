"""Ensembles whose votes do not count alike: by confidence, image by image; by label counts, class by class."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import (
    context,
    coordinate,
    deployed,
    drive,
    events,
    federation,
    figures,
    images,
    predictor_bytes,
    study,
    watch_bundles,
    watch_fits,
)
from wardround.cli import main
from wardround.coordinator import Coordinator
from wardround.data.federation import Federation
from wardround.errors import BadInput, RunFailed
from wardround.exchange.bundle import Bundle
from wardround.learn.fit import weights_hash
from wardround.methods.base import Context, Method
from wardround.methods.class_ensemble import ClassEnsemble
from wardround.methods.confidence_ensemble import ConfidenceEnsemble
from wardround.methods.ensemble import Ensemble, Panel
from wardround.methods.registry import make
from wardround.methods.state import State
from wardround.models import spec_layout

MIXED: dict[str, Any] = {"model": {"name": "small", "width": 2, "per_site": {"site-2": "cnn4"}}}
BOTH = pytest.mark.parametrize("method", [ConfidenceEnsemble(), ClassEnsemble()], ids=lambda method: method.name)


def of(method: Method, classes: int, sites: int = 2) -> Context:
    """A study of this method with so many classes and sites."""
    return context(study(federation((6,) * sites, classes=classes), method=method.name))


def sent(ctx: Context, site: str, probabilities: list[float], counts: list[int] | None = None, n: int = 5) -> Bundle:
    """The answer of a site whose network has these probabilities for any image, and that reports these counts."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in ctx.study.initial(site).items()}
    weights["head.bias"] = torch.tensor(probabilities).log()
    kinds = spec_layout(ctx.study.spec(site)).groups
    groups: dict[str, dict[str, torch.Tensor]] = {"size": {"images": torch.tensor(n)}}
    for name, tensor in weights.items():
        groups.setdefault(kinds[name], {})[name] = tensor
    if counts is not None:
        groups["label_counts"] = {"counts": torch.tensor(counts)}
    return ctx.bundle("answer", site, groups)


def absorbed(method: Panel, ctx: Context, *answers: Bundle) -> State:
    """The coordinator's state, out of a checkpoint's bytes."""
    by_site = {answer.envelope.site: answer for answer in answers}
    for site, answer in by_site.items():
        method.payload(ctx.study, site).check(answer)
    (state,) = method.absorb(ctx, State(), by_site)
    return State.from_bytes(state.to_bytes())


def found(method: Panel, ctx: Context, *answers: Bundle) -> list[float]:
    """The probabilities that the coordinator's panel has for any image; a site's own panel must have the same."""
    state = absorbed(method, ctx, *answers)
    shared = method.predictor(ctx, state)
    home = method.deliver(ctx, state)["site-1"]
    method.payload(ctx.study, "site-1").check(home)
    data = federation((6, 6))
    own = drive(ctx, method.personal(ctx, data.sites[0], Bundle.from_bytes(home.to_bytes()), State()))
    pixels = images(3, classes=len(ctx.study.classes)).images
    scores = shared.scores(pixels, ctx.device)
    assert torch.equal(own.scores(pixels, ctx.device), scores)
    torch.testing.assert_close(scores, scores[:1].expand_as(scores))
    return [float(p) for p in scores[0].softmax(dim=0)]


# confidence-ensemble --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("margin", [0.2, 0.8]),  # 0.2 to 0.8: 0.2·0.6 + 0.8·0.1
        ("maximum", [0.3, 0.7]),  # 0.6 to 0.9: 0.4·0.6 + 0.6·0.1
    ],
)
def test_the_surer_model_counts_more_by_hand(measure: str, expected: list[float]) -> None:
    method = ConfidenceEnsemble(ConfidenceEnsemble.Settings(measure=measure))
    ctx = of(method, classes=2)
    answers = sent(ctx, "site-1", [0.6, 0.4]), sent(ctx, "site-2", [0.1, 0.9], n=100)
    assert found(method, ctx, *answers) == pytest.approx(expected, abs=1e-5)


def test_confidence_is_entropy_unless_said_otherwise_by_hand() -> None:
    """Four classes. Two alike: 1 − log 2 / log 4 = 1/2; a certain one: 1. So (1/3·1/2 + 2/3·1, 1/3·1/2, 0, 0)."""
    method = ConfidenceEnsemble()
    ctx = of(method, classes=4)
    answers = sent(ctx, "site-1", [0.5, 0.5, 1e-9, 1e-9]), sent(ctx, "site-2", [1.0, 1e-9, 1e-9, 1e-9])
    assert found(method, ctx, *answers) == pytest.approx([5 / 6, 1 / 6, 0.0, 0.0], abs=1e-5)


def test_an_unknown_measure_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^confidence-ensemble\.measure = 'loudness' cannot be used: it should be"):
        make("confidence-ensemble", {"measure": "loudness"})


def test_confidence_sends_what_an_ensemble_sends(tmp_path: Path) -> None:
    one = coordinate(tmp_path / "confidence", ConfidenceEnsemble())
    other = coordinate(tmp_path / "ensemble", Ensemble())
    groups = [[(row["kind"], row["groups"]) for row in result["ledger"]["rows"]] for result in (one, other)]
    assert groups[0] == groups[1]


# class-ensemble -------------------------------------------------------------------------------------------------------


def test_shares_of_each_class_by_hand() -> None:
    """Shares (3/4, 1/4), (1/2, 1/2) and, of a class that nobody has, equal ones.

    0.75·0.6 + 0.25·0.2 = 0.5; 0.5·0.2 + 0.5·0.6 = 0.4; 0.5·0.2 + 0.5·0.2 = 0.2; renormalised over 1.1.
    """
    ctx = of(ClassEnsemble(), classes=3)
    answers = sent(ctx, "site-1", [0.6, 0.2, 0.2], [3, 1, 0]), sent(ctx, "site-2", [0.2, 0.6, 0.2], [1, 1, 0])
    assert found(ClassEnsemble(), ctx, *answers) == pytest.approx([5 / 11, 4 / 11, 2 / 11], abs=1e-5)


def test_priors_divided_out_by_hand() -> None:
    """Counts + 1/2 give π = (3/4, 1/4) and (1/4, 3/4).

    (0.9, 0.1) / π = (1.2, 0.4), so (3/4, 1/4); (0.6, 0.4) / π = (2.4, 1.6/3), so (9/11, 2/11). Class 0 is site-1's
    alone and class 1 site-2's: (3/4, 2/11), renormalised (33/41, 8/41).
    """
    method = ClassEnsemble(ClassEnsemble.Settings(divide_prior=True))
    ctx = of(method, classes=2)
    answers = sent(ctx, "site-1", [0.9, 0.1], [1, 0]), sent(ctx, "site-2", [0.6, 0.4], [0, 1])
    assert found(method, ctx, *answers) == pytest.approx([33 / 41, 8 / 41], abs=1e-5)
    assert found(ClassEnsemble(), ctx, *answers) == pytest.approx([0.9 / 1.3, 0.4 / 1.3], abs=1e-5)


@pytest.mark.parametrize("divide_prior", [False, True])
def test_a_site_that_reports_no_label_is_heard_only_where_nobody_reports_any(divide_prior: bool) -> None:
    """Without priors: 0.6 of site-1 alone, (0.2 + 0.6) / 2 = 0.4, 0.2 of site-1 alone; over 1.2.

    With them site-1's is (2.5, 0.5, 1.5) / 4.5, and (0.6, 0.2, 0.2) over it is in proportion to (18, 30, 10) / 58;
    site-2's is uniform and changes nothing. So 18/58, (30/58 + 0.6) / 2, 10/58.
    """
    method = ClassEnsemble(ClassEnsemble.Settings(divide_prior=divide_prior))
    ctx = of(method, classes=3)
    answers = sent(ctx, "site-1", [0.6, 0.2, 0.2], [2, 0, 1]), sent(ctx, "site-2", [0.2, 0.6, 0.2], [0, 0, 0])
    scores = [18 / 58, (30 / 58 + 0.6) / 2, 10 / 58] if divide_prior else [0.6, 0.4, 0.2]
    assert found(method, ctx, *answers) == pytest.approx([score / sum(scores) for score in scores], abs=1e-5)


def test_counts_below_zero_are_refused_by_name() -> None:
    ctx = of(ClassEnsemble(), classes=2)
    with pytest.raises(RunFailed, match="the label counts of site-2 cannot be used: it sent a number below 0"):
        absorbed(ClassEnsemble(), ctx, sent(ctx, "site-1", [0.5, 0.5], [1, 1]), sent(ctx, "site-2", [1, 1], [3, -1]))


def test_a_site_may_be_called_what_the_counts_are() -> None:
    data = federation((6, 6), classes=2)
    sites = (data.sites[0], replace(data.sites[1], name="label_counts"))
    ctx = context(study(Federation(**{**vars(data), "sites": sites}), method="class-ensemble"))
    answers = sent(ctx, "site-1", [0.9, 0.1], [1, 0]), sent(ctx, "label_counts", [0.6, 0.4], [0, 1])
    assert found(ClassEnsemble(), ctx, *answers) == pytest.approx([0.9 / 1.3, 0.4 / 1.3], abs=1e-5)


# What leaves ----------------------------------------------------------------------------------------------------------


def test_counts_are_declared_in_words_up_and_home() -> None:
    payload = ClassEnsemble().payload(study(method="class-ensemble"), "site-1")
    (up,) = (group for group in payload.up if group.name == "label_counts")
    (home,) = (group for group in payload.home if group.name == "label_counts")
    assert (up.what, up.max_bytes) == ("how many images of each class the site trained on", 4 * 8)
    assert (home.what, home.max_bytes) == ("how many images of each class every site trained on", 3 * 4 * 8)
    assert payload.seen_by == "the coordinator and every other site"


def test_an_answer_has_counts_exactly_where_they_are_declared() -> None:
    ctx = of(ClassEnsemble(), classes=2)
    counted, bare = sent(ctx, "site-1", [0.5, 0.5], [1, 1]), sent(ctx, "site-1", [0.5, 0.5])
    payload = ClassEnsemble().payload(ctx.study, "site-1")
    payload.check(counted)
    with pytest.raises(BadInput, match="lacks label_counts/counts, which class-ensemble declared"):
        payload.check(bare)
    with pytest.raises(BadInput, match=r"label_counts/counts is \(\(1,\), 'int64'\)"):
        payload.check(sent(ctx, "site-1", [0.5, 0.5], [2]))
    with pytest.raises(BadInput, match="holds group 'label_counts'"):
        ConfidenceEnsemble().payload(ctx.study, "site-1").check(counted)


def test_counts_of_a_run_are_those_of_the_training_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, crossed = federation(), watch_bundles(monkeypatch)
    result = coordinate(tmp_path / "run", ClassEnsemble(), data)
    up = {b.envelope.site: b.group("label_counts")["counts"] for b in crossed if b.envelope.kind == "answer"}
    assert {site: found.tolist() for site, found in up.items()} == {
        "site-1": [3, 3, 3, 2],
        "site-2": [2, 2, 2, 2],
        "site-3": [2, 2, 1, 1],
    }
    for bundle in crossed:
        if bundle.envelope.kind == "delivery":
            home = bundle.group("label_counts")
            assert {name: t.tolist() for name, t in home.items()} == {f"{s}/counts": t.tolist() for s, t in up.items()}
    total = {(t["direction"], t["group"]): t["bytes"] for t in result["ledger"]["totals"]}
    assert (total["up", "label_counts"], total["down", "label_counts"]) == (3 * 32, 3 * 3 * 32)


def test_a_site_too_small_to_train_has_no_vote_and_tells_no_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", ClassEnsemble(), federation((8, 1, 6)))
    (answer,) = (b for b in crossed if (b.envelope.kind, b.envelope.site) == ("answer", "site-2"))
    assert answer.group("label_counts")["counts"].tolist() == [0, 0, 0, 0]
    homes = [bundle.group("label_counts") for bundle in crossed if bundle.envelope.kind == "delivery"]
    assert [sorted(home) for home in homes] == [["site-1/counts", "site-3/counts"]] * 3
    panel = deployed(tmp_path / "run", "site-2")
    assert len(panel.members) == 2
    assert panel.trust is not None
    assert panel.trust.tolist() == [[2, 2, 2, 2], [2, 2, 1, 1]]


# Runs -----------------------------------------------------------------------------------------------------------------


@BOTH
def test_sites_without_a_model_are_left_out(method: Panel) -> None:
    ctx = of(method, classes=2)
    counts = [1, 1] if isinstance(method, ClassEnsemble) else None
    answers = sent(ctx, "site-1", [0.7, 0.3], counts), sent(ctx, "site-2", [0.1, 0.9], counts, n=0)
    assert found(method, ctx, *answers) == pytest.approx([0.7, 0.3], abs=1e-5)
    with pytest.raises(RunFailed, match="no site sent a usable model"):
        absorbed(method, ctx, answers[1])


@BOTH
def test_sites_may_differ_in_architecture(method: Panel, tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", method, **MIXED)
    members = deployed(tmp_path / "run", "site-3").members
    assert [member.spec.name for member in members] == ["small", "cnn4", "small"]
    assert {r["site"] for r in result["rows"] if r["model"] == "personal"} == {"site-1", "site-2", "site-3"}


@pytest.mark.parametrize(
    "method",
    [
        ConfidenceEnsemble(ConfidenceEnsemble.Settings(measure="margin")),
        ClassEnsemble(ClassEnsemble.Settings(divide_prior=True)),
    ],
    ids=lambda method: method.name,
)
def test_a_run_stopped_after_its_round_ends_with_the_same_panel(
    method: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise InterruptedError

    whole = coordinate(tmp_path / "whole", method)
    with monkeypatch.context() as patch:
        patch.setattr(Coordinator, "_finish", stop)
        with pytest.raises(InterruptedError):
            coordinate(tmp_path / "stopped", method)
    fits = watch_fits(monkeypatch)
    assert figures(coordinate(tmp_path / "stopped", method)) == figures(whole)
    assert fits == []
    assert events(tmp_path / "stopped") == events(tmp_path / "whole")
    panels = predictor_bytes(tmp_path / "stopped")
    assert panels == predictor_bytes(tmp_path / "whole")
    assert list(panels) == ["shared.safetensors"], "every site deploys the shared panel, kept once"


def test_the_ensembles_compared_train_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fits = watch_fits(monkeypatch)
    names = ["ensemble", "confidence-ensemble", "class-ensemble"]
    tiny = ["--data", "phantoms:96", "--sites", "3", "--rounds", "1", "--epochs", "1", "--device", "cpu", "--quiet"]
    own = ["confidence-ensemble.measure=maximum", "class-ensemble.divide_prior=true", "model.width=2"]
    assert main(["compare", *names, *tiny, *(word for key in own for word in ("--set", key)), "--out", "c"]) == 0
    assert [fit.label for fit in fits] == ["site-1, alone", "site-2, alone", "site-3, alone"]
    result = json.loads(Path("c/result.json").read_text(encoding="utf-8"))
    assert result["methods"] == names
    panels = {name: deployed(Path("c") / name, "site-1") for name in names}
    assert len({tuple(weights_hash(m.weights) for m in panel.members) for panel in panels.values()}) == 1
    assert [panels[name].combine for name in names] == ["logits", "maximum", "softmax"]
    assert [panels[name].member_log_prior is not None for name in names] == [False, False, True]


def test_a_delivery_without_a_sites_counts_is_refused_at_the_site() -> None:
    method = ClassEnsemble()
    ctx = of(method, classes=2)
    state = absorbed(method, ctx, sent(ctx, "site-1", [0.5, 0.5], [3, 2]), sent(ctx, "site-2", [0.2, 0.8], [1, 4]))
    home = method.deliver(ctx, state)["site-1"]
    groups = {**home.groups, "label_counts": {"site-1/counts": torch.tensor([3, 2])}}
    partly = ctx.bundle("delivery", "site-1", groups)
    method.payload(ctx.study, "site-1").check(partly)
    with pytest.raises(BadInput, match="no label counts of site-2"):
        method.delivered_state(partly)
