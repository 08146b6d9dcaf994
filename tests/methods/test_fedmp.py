"""FedMP: its limits, what travels and what never does, the bank, and the prototypes by hand."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import (
    CPU,
    context,
    coordinate,
    drive,
    federation,
    predictor_bytes,
    study,
    watch_bundles,
)
from wardround.data.federation import Federation
from wardround.errors import BadInput
from wardround.exchange.bundle import SIZE, Bundle
from wardround.learn.evaluate import network_outputs
from wardround.methods.base import Context, join_groups
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedmp import BANK, BANK_LABELS, EMBEDDINGS, PROTOTYPES
from wardround.methods.registry import make
from wardround.methods.state import State

OFF = {"sfmc": False, "cpgma": False}


def method(**own: Any) -> Any:
    return make("fedmp", own)


def one_round(how: Any, ctx: Context, state: State, memories: dict[str, State], data: Federation) -> State:
    """Ask, answer one by one, absorb; `memories` is what the sites keep."""
    requests = how.ask(ctx, state) or {}
    answers = {}
    for site in data.sites:
        if site.name in requests:
            memory = memories.get(site.name, State())
            answer = drive(ctx, how.answer(ctx, site, requests[site.name], memory))
            how.payload(ctx.study, site.name).check(requests[site.name])
            how.payload(ctx.study, site.name).check(answer.bundle)
            answers[site.name], memories[site.name] = answer.bundle, answer.memory
    (state,) = how.absorb(ctx, state, answers)
    return state


def rounds(how: Any, count: int, **changes: Any) -> tuple[State, dict[str, State]]:
    agreed = study(method="fedmp", **changes)
    state, memories = how.begin(context(agreed)), dict[str, State]()
    for number in range(count):
        state = one_round(how, context(agreed, number), state, memories, federation())
    return state, memories


# Limits ---------------------------------------------------------------------------------------------------------------


def test_both_terms_off_is_fedavg_bit_for_bit_and_nothing_more_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "fedavg", FedAvg(), rounds=3)
    plain = [bundle.bytes_by_group for bundle in crossed]
    crossed.clear()
    coordinate(tmp_path / "fedmp", method(**OFF), rounds=3)
    assert predictor_bytes(tmp_path / "fedmp") == predictor_bytes(tmp_path / "fedavg")
    assert [bundle.bytes_by_group for bundle in crossed] == plain
    assert method(**OFF).payload(study(), "site-1") == FedAvg().payload(study(), "site-1")


def test_the_first_round_has_neither_term(tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg(), rounds=1)
    coordinate(tmp_path / "fedmp", method(), rounds=1)
    assert predictor_bytes(tmp_path / "fedmp") == predictor_bytes(tmp_path / "fedavg")


def test_each_term_acts_by_default_and_alone(tmp_path: Path) -> None:
    coordinate(tmp_path / "fedavg", FedAvg())
    coordinate(tmp_path / "both", method())
    coordinate(tmp_path / "sfmc", method(cpgma=False))
    coordinate(tmp_path / "cpgma", method(sfmc=False))
    coordinate(tmp_path / "literal", method(weights="literal"))
    found = [predictor_bytes(tmp_path / name) for name in ("fedavg", "both", "sfmc", "cpgma", "literal")]
    assert all(a != b for i, a in enumerate(found) for b in found[:i])


def test_the_defaults_are_the_papers() -> None:
    s = method().settings
    assert (s.sfmc, s.cpgma, s.stage, s.download, s.weights) == (True, True, None, 100, "mended")
    assert (s.mu_client, s.mu_server, s.class_counts) == (0.5, 0.7, False)


def test_how_many_work_at_once_changes_nothing(tmp_path: Path) -> None:
    for workers in (1, 3):
        coordinate(tmp_path / str(workers), method(), workers=workers)
    assert predictor_bytes(tmp_path / "1") == predictor_bytes(tmp_path / "3")


# What travels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "more"),
    [
        ({}, {EMBEDDINGS, PROTOTYPES}),
        ({"cpgma": False}, {EMBEDDINGS}),
        ({"sfmc": False}, {PROTOTYPES}),
        ({"class_counts": True}, {EMBEDDINGS, PROTOTYPES, "label_counts"}),
        ({"class_counts": True, "cpgma": False}, {EMBEDDINGS}),
    ],
)
def test_only_what_a_term_needs_travels(
    own: dict[str, Any], more: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed = watch_bundles(monkeypatch)
    coordinate(tmp_path / "run", method(**own))
    network = {"parameters", "statistics", "counters"}
    for bundle in crossed:
        kind, groups = bundle.envelope.kind, set(bundle.groups)
        if kind == "answer":
            assert groups == network | {SIZE} | more
        elif kind == "request" and bundle.envelope.round > 0:
            assert groups == network | (more - {"label_counts"})
        else:  # the first request, and what goes home
            assert groups == network


def test_it_says_that_other_sites_see_embeddings() -> None:
    agreed = study(method="fedmp")
    declared = method().payload(agreed, "site-1")
    assert "every other site" in declared.seen_by
    (embeddings,) = (group for group in declared.up if group.name == EMBEDDINGS)
    assert "rebuild" in embeddings.what
    assert "other sites" in embeddings.what
    assert method(sfmc=False).payload(agreed, "site-1").seen_by == "the coordinator"


def test_the_declared_bytes_are_enough_and_no_more() -> None:
    """Eleven embeddings of eight numbers with their labels: 11·(4·8 + 8); one more is refused."""
    agreed = study(method="fedmp")
    ctx, how = context(agreed), method(upload=11)
    request = (how.ask(ctx, how.begin(ctx)) or {})["site-1"]
    bundle = drive(ctx, how.answer(ctx, federation().sites[0], request, State())).bundle
    how.payload(agreed, "site-1").check(bundle)
    with pytest.raises(BadInput, match="'embeddings' has 440 bytes, declared are 400"):
        method(upload=10).payload(agreed, "site-1").check(bundle)


def test_a_site_sends_what_its_trained_network_makes_of_each_image() -> None:
    state, _ = rounds(method(), 1)
    agreed = study(method="fedmp")
    ctx, how, site = context(agreed, 1), method(), federation().sites[0]
    request = (how.ask(ctx, state) or {})["site-1"]
    bundle = drive(ctx, how.answer(ctx, site, request, State())).bundle
    features = network_outputs(agreed.common_spec, join_groups(bundle), site.train.images, CPU).features
    assert torch.equal(bundle.group(EMBEDDINGS)["features"], features)
    assert torch.equal(bundle.group(EMBEDDINGS)["labels"], site.train.labels)


def test_an_upload_is_capped_by_a_draw() -> None:
    everything, _ = rounds(method(), 1)
    capped, _ = rounds(method(upload=4), 1)
    for site in ("site-1", "site-2", "site-3"):
        assert len(capped.groups[BANK][site]) == 4
        whole = {tuple(row) for row in everything.groups[BANK][site].tolist()}
        assert {tuple(row) for row in capped.groups[BANK][site].tolist()} <= whole
    torch.testing.assert_close(capped.groups[PROTOTYPES]["means"], everything.groups[PROTOTYPES]["means"])


def rows_of(tensor: Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in tensor.tolist()}


def test_a_site_gets_other_sites_embeddings_and_never_its_own() -> None:
    state, _ = rounds(method(), 1)
    ctx = context(study(method="fedmp"), 1)
    for site, request in (method().ask(ctx, state) or {}).items():
        got = rows_of(request.group(EMBEDDINGS)["features"])
        others = {name for name in state.groups[BANK] if name != site}
        assert got == {row for name in others for row in rows_of(state.groups[BANK][name])}
    few = method(download=5).ask(ctx, state) or {}
    assert all(len(request.group(EMBEDDINGS)["labels"]) == 5 for request in few.values())
    again = method(download=5).ask(context(study(method="fedmp", rounds=3), 2), state) or {}
    assert not torch.equal(*(r["site-1"].group(EMBEDDINGS)["features"] for r in (few, again)))


def test_the_bank_holds_each_sites_latest_upload() -> None:
    once, _ = rounds(method(), 1)
    twice, _ = rounds(method(), 2)
    assert [len(twice.groups[BANK][f"site-{i}"]) for i in (1, 2, 3)] == [11, 8, 6]
    assert [len(twice.groups[BANK_LABELS][f"site-{i}"]) for i in (1, 2, 3)] == [11, 8, 6]
    assert not torch.equal(twice.groups[BANK]["site-1"], once.groups[BANK]["site-1"])


# Prototypes -----------------------------------------------------------------------------------------------------------


def answered(site: str, means: list[list[float]], known: list[bool], size: int, **more: Any) -> Bundle:
    """An answer of 25 numbers of one network, whose prototypes are what is looked at."""
    ctx = context(study(method="fedmp"))
    groups: dict[str, Any] = {name: dict(group) for name, group in network(ctx).items()}
    wide = torch.zeros(4, 8)
    wide[:, : len(means[0])] = torch.tensor(means)
    groups[PROTOTYPES] = {"means": wide, "known": torch.tensor(known)}
    groups[SIZE] = {"images": torch.tensor(size)}
    return ctx.bundle("answer", site, {**groups, **more})


def network(ctx: Context) -> Mapping[str, Mapping[str, Tensor]]:
    return (FedAvg().ask(ctx, FedAvg().begin(ctx)) or {})["site-1"].groups


def moved(how: Any, *answer_rounds: dict[str, Bundle]) -> State:
    agreed = study(method="fedmp")
    state = how.begin(context(agreed))
    for number, answers in enumerate(answer_rounds):
        (state,) = how.absorb(context(agreed, number), state, answers)
    return state


def test_prototypes_by_hand_over_two_rounds() -> None:
    """(1·1 + 3·5)/4 = 4, then 0.3·4 + 0.7·10 = 8.2. Class 1 is only at b, and away in the second round."""
    how = method(sfmc=False)
    yes, no = [True, False, False, False], [True, True, False, False]
    first = {
        "a": answered("a", [[1.0], [0.0], [0.0], [0.0]], yes, 1),
        "b": answered("b", [[5.0], [7.0], [0.0], [0.0]], no, 3),
    }
    second = {"a": answered("a", [[10.0], [0.0], [0.0], [0.0]], yes, 1)}
    found = moved(how, first, second).groups[PROTOTYPES]
    torch.testing.assert_close(found["means"][:, 0], torch.tensor([8.2, 7.0, 0.0, 0.0]))
    assert found["known"].tolist() == [True, True, False, False]


def test_a_site_may_count_by_its_images_of_the_class() -> None:
    """(9·1 + 1·11)/10 = 2, whatever the sites' sizes say."""
    known = [True, False, False, False]

    def counted(site: str, value: float, n: int) -> Bundle:
        counts = {"counts": torch.tensor([n, 0, 0, 0])}
        return answered(site, [[value], [0.0], [0.0], [0.0]], known, 50, label_counts=counts)

    answers = {"a": counted("a", 1.0, 9), "b": counted("b", 11.0, 1)}
    found = moved(method(sfmc=False, class_counts=True), answers).groups[PROTOTYPES]
    assert found["means"][0, 0] == 2.0
    for wrong in ({}, {"counts": torch.tensor([-1, 0, 0, 0])}):
        bad = {"a": replace(answers["a"], groups={**answers["a"].groups, "label_counts": wrong})}
        with pytest.raises(BadInput, match=r"^the answer of a in round 1: its label counts"):
            moved(method(sfmc=False, class_counts=True), bad)


def test_a_sites_own_means_move_by_half() -> None:
    """Eq. 6 at μ = 0.5, from what the site itself remembers."""
    _, once = rounds(method(), 1)
    state, twice = rounds(method(), 2)
    site = federation().sites[0]
    now = state.groups[BANK]["site-1"]
    for c in range(4):
        mean = now[site.train.labels == c].mean(dim=0)
        before = once["site-1"].groups[PROTOTYPES]["means"][c]
        torch.testing.assert_close(twice["site-1"].groups[PROTOTYPES]["means"][c], 0.5 * before + 0.5 * mean)


def test_a_class_is_known_once_its_site_was_asked() -> None:
    """Then no note names it any more."""
    said: list[str] = []
    agreed = study(method="fedmp")
    state = method(sfmc=False).begin(context(agreed))
    for number, known in enumerate(([True, True, True, False], [False, False, False, True])):
        answers = {"a": answered("a", [[1.0]] * 4, known, 2)}
        (state,) = method(sfmc=False).absorb(replace(context(agreed, number), note=said.append), state, answers)
    assert len(said) == 1
    assert "durmast" in said[0]
