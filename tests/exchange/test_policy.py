"""A site's policy: every rule refuses by its name, before training and before anything leaves, and no file slips by."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle, Envelope
from wardround.exchange.payload import Group, Payload
from wardround.exchange.policy import (
    OF_SINGLE_IMAGES,
    ORDINARY,
    Gate,
    Policy,
    Privacy,
    Refused,
    bundle_bytes,
    default_policy_text,
    read_policy,
)
from wardround.exchange.policy.rules import BY_CLASS
from wardround.methods.base import Method
from wardround.methods.fedavg import FedAvg
from wardround.methods.registry import known
from wardround.settings import checked
from wardround.study import Study

KEY = "ACDE-FHJK-MNPQ-RTVW-XY23-4567"
OTHER_KEY = "2222-3333-4444-5555-6666-7777"
MANY = torch.tensor([5, 0, 90, 12])
FEW = torch.tensor([5, 0, 4, 12])
END = "; change policy.toml of this site, or leave the study"
SINGLE = Payload(up=(Group("parameters", "a network", 100), Group("size", "how many", 8)))
OPEN: dict[str, Any] = {
    "groups": (*ORDINARY, *OF_SINGLE_IMAGES),
    "never_groups": (),
    "max_bytes_per_round": 2**62,
    "max_bytes_per_study": 2**62,
    "min_images_per_class": 0,
    "seen_by_other_sites": True,
}

# What the default policy refuses of the tiny study, whose sites have 1 to 3 images of a class.
BY_DEFAULT = {
    "centralised": "never_groups",
    "class-ensemble": "seen_by_other_sites",
    "confidence-ensemble": "seen_by_other_sites",
    "consult": "seen_by_other_sites",
    "ensemble": "seen_by_other_sites",
    "fedmp": "groups",
    "fedmp-fewshot": "groups",
    "fedmr": "min_images_per_class",
}


def policy(**rules: Any) -> Policy:
    return checked(Policy, rules)


def bundle(round: int = 0, **groups: Tensor) -> Bundle:
    """An answer with one tensor in each group."""
    return Bundle(Envelope("answer", "s", "fedavg", "site-1", round), {name: {"t": t} for name, t in groups.items()})


def declared(made: Bundle) -> Payload:
    """A declaration that allows this bundle."""
    return Payload(up=tuple(Group(name, "", size) for name, size in made.bytes_by_group.items()))


def plan(
    rules: Policy, name: str = "fedavg", *, counts: Tensor | None = MANY, coordinator: str = KEY, **more: Any
) -> None:
    """Hold a policy against a built-in method as it would run."""
    study, method = tiny.study(method=name), tiny.quick(name)
    rules.check_plan(study, method, method.payload(study, "site-1"), coordinator, counts, **more)


def leave(rules: Policy, made: Bundle, *, counts: Tensor | None = MANY, **more: Any) -> None:
    """Hold a policy against a bundle that keeps to its declaration."""
    rules.check_bundle(made, declared(made), counts, **more)


def refusal(rule: str, reason: str) -> Any:
    return pytest.raises(Refused, match=f"^{re.escape(f'policy rule {rule}: {reason}{END}')}$")


def by_rule(rule: str) -> Any:
    return pytest.raises(Refused, match=f"^{re.escape(f'policy rule {rule}: ')}")


def answer_of(name: str) -> tuple[Study, Method, Bundle, Tensor]:
    """What a site of the tiny study really sends under a built-in method."""
    study, method, site = tiny.study(method=name), tiny.quick(name), tiny.federation().sites[0]
    ctx = tiny.context(study)
    state = method.begin(ctx)
    requests = method.ask(ctx, state)
    assert requests is not None
    found = tiny.drive(ctx, method.answer(ctx, site, requests[site.name], type(state)()))
    return study, method, found.bundle, site.train.counts()


# Built-in methods -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", known())
def test_every_method_under_the_default_policy(name: str) -> None:
    counts = tiny.federation().sites[0].train.counts()
    assert counts.tolist() == [3, 3, 3, 2]
    if name in BY_DEFAULT:
        with by_rule(BY_DEFAULT[name]):
            plan(Policy(), name, counts=counts)
    else:
        plan(Policy(), name, counts=counts)


@pytest.mark.parametrize("name", [name for name, method in known().items() if method().rounds(tiny.study()) > 0])
def test_what_really_leaves_is_refused_like_what_is_declared(name: str) -> None:
    """A plan that passes does not fail after the training; and under an open policy everything passes."""
    study, method, made, counts = answer_of(name)
    payload = method.payload(study, "site-1")
    assert Gate(policy(**OPEN), counts).outgoing(made, payload) == made
    optional = {group.name for group in payload.up if group.optional}
    needed = made.groups.keys() - optional
    by_bundle = {"seen_by_other_sites": "min_images_per_class" if "label_counts" in needed else None}
    rule = BY_DEFAULT.get(name)
    rule = by_bundle.get(rule, rule) if rule else None
    gate = Gate(Policy(), counts)
    if rule is None:
        assert gate.outgoing(made, payload).groups.keys() == needed
    else:
        with by_rule(rule):
            gate.outgoing(made, payload)


@pytest.mark.parametrize("name", known())
def test_every_group_of_a_built_in_method_is_ordinary_or_of_single_images(name: str) -> None:
    """Fails for a new group: decide in `exchange/policy/rules.py` whether it leaves by default."""
    up = {group.name for group in tiny.quick(name).payload(tiny.study(method=name), "site-1").up}
    assert up <= {*ORDINARY, *OF_SINGLE_IMAGES}
    assert set(BY_CLASS) <= {*ORDINARY, *OF_SINGLE_IMAGES}


# Rule by rule, before training ----------------------------------------------------------------------------------------


def test_methods() -> None:
    plan(policy(methods=["fedavg"]))
    with refusal("methods", "'fedavg' is not allowed (allowed: fedprox, fedbn)"):
        plan(policy(methods=["fedprox", "fedbn"]))
    with refusal("methods", "'fedavg' is not allowed (allowed: none)"):
        plan(policy(methods=[]))
    with refusal("methods", "'local' is not allowed (allowed: fedavg)"):  # though nothing would leave
        plan(policy(methods=["fedavg"]), "local")


def test_methods_from_files_before_the_file_is_loaded() -> None:
    Policy().check_method("fedavg")
    policy(methods_from_files=True, methods=["mine"]).check_method("somewhere/mine.py")
    with refusal("methods_from_files", "the study's method is a file of its own, 'somewhere/fedavg.py'"):
        Policy().check_method("somewhere/fedavg.py")


class Impostor(FedAvg):
    """Not built in, whatever it calls itself."""


def test_methods_from_files_by_what_they_are_and_not_by_their_name() -> None:
    assert Impostor.name == "fedavg"
    study, method = tiny.study(), Impostor()
    payload = method.payload(study, "site-1")
    policy(methods_from_files=True).check_plan(study, method, payload, KEY, MANY)
    with refusal("methods_from_files", "'fedavg' is not built in"):
        Policy().check_plan(study, method, payload, KEY, MANY)


def test_coordinators() -> None:
    plan(policy(coordinators=[OTHER_KEY, KEY]))
    with refusal("coordinators", f"the key '{KEY}' is not allowed (allowed: {OTHER_KEY})"):
        plan(policy(coordinators=[OTHER_KEY]))
    with refusal("coordinators", f"a coordinator without a key is not allowed (allowed: {OTHER_KEY})"):
        plan(policy(coordinators=[OTHER_KEY]), coordinator="")
    plan(Policy(), coordinator="")


def test_groups() -> None:
    plan(policy(groups=["parameters", "statistics", "counters", "size"]))
    with refusal("groups", "'statistics' is not allowed (allowed: parameters, counters, size)"):
        plan(policy(groups=["parameters", "counters", "size"]))


@pytest.mark.parametrize("group", OF_SINGLE_IMAGES)
def test_any_group_is_none_of_single_images(group: str) -> None:
    made = bundle(**{group: torch.zeros(2)})
    leave(policy(groups="any", never_groups=[]), bundle(runes=torch.zeros(2)))
    leave(policy(groups=[group], never_groups=[]), made)
    with refusal("groups", f"'{group}' is something of single images, and no part of \"any\"; name it"):
        leave(policy(groups="any", never_groups=[]), made)


def test_never_groups_wins_over_groups() -> None:
    with refusal("never_groups", "'images' never leaves this site"):
        leave(policy(groups=["images"]), bundle(images=torch.zeros(2)))
    with refusal("never_groups", "'statistics' never leaves this site"):
        plan(policy(groups="any", never_groups=["statistics"]))
    plan(policy(never_groups=["statistics"]), "fedbn")


def test_bytes_before_training_are_the_most_that_is_declared() -> None:
    """FedAvg of the tiny network: 2520 + 144 + 32 + 8 bytes in each of two rounds."""
    plan(policy(max_bytes_per_round=2704, max_bytes_per_study=5408))
    with refusal("max_bytes_per_round", "fedavg may send 2,704 bytes in a round, and 2,703 may leave"):
        plan(policy(max_bytes_per_round=2703))
    with refusal("max_bytes_per_study", "fedavg may send 5,408 bytes in the whole study, and 5,407 may leave"):
        plan(policy(max_bytes_per_study=5407))
    plan(policy(max_bytes_per_round=0, max_bytes_per_study=0), "local")


def test_classes_with_few_images_before_training() -> None:
    plan(policy(), "fedmr", counts=MANY)
    plan(policy(min_images_per_class=4), "fedmr", counts=FEW)
    plan(policy(), "fedavg", counts=FEW)  # which sends nothing by class
    plan(policy(), "fedmr", counts=None)  # the bundle is checked all the same
    reason = "'label_counts' would leave, and a class has images here, but fewer than 5"
    with refusal("min_images_per_class", reason):
        plan(policy(), "fedmr", counts=FEW)


def test_seen_by_other_sites() -> None:
    plan(policy(seen_by_other_sites=True), "ensemble")
    reason = "what this site sends would be seen by the coordinator and every other site"
    with refusal("seen_by_other_sites", reason):
        plan(Policy(), "ensemble")
    study, method = tiny.study(), tiny.quick("fedavg")
    with refusal("seen_by_other_sites", "what this site sends would be seen by the press"):  # not known, not trusted
        Policy().check_plan(study, method, replace(SINGLE, seen_by="the press"), KEY, MANY)


STRICT = {"privacy": {"max_epsilon": 8.0, "max_delta": 1e-5}}


def test_privacy_refuses_every_method_that_sends_something_today() -> None:
    for name in known():
        rules = policy(**STRICT, **OPEN)
        if tiny.quick(name).payload(tiny.study(method=name), "site-1").up:
            with refusal("privacy.max_epsilon", "no epsilon is promised, and at most 8 is required"):
                plan(rules, name)
        else:
            plan(rules, name)


@pytest.mark.parametrize(
    ("promised", "refused"),
    [
        ({"epsilon": 8.0, "delta": 1e-5}, None),
        ({"epsilon": 0.5, "delta": 0.0}, None),
        ({"epsilon": 8.1, "delta": 1e-5}, ("epsilon", "epsilon is 8.1, and at most 8 is required")),
        ({"epsilon": 1.0, "delta": 1e-4}, ("delta", "delta is 0.0001, and at most 1e-05 is required")),
        ({"epsilon": 1.0}, ("delta", "no delta is promised, and at most 1e-05 is required")),
        ({"epsilon": -1.0, "delta": 0.0}, ("epsilon", "epsilon is -1, and at most 8 is required")),
        ({"epsilon": float("nan"), "delta": 0.0}, ("epsilon", "epsilon is nan, and at most 8 is required")),
    ],
)
def test_privacy(promised: dict[str, float], refused: tuple[str, str] | None) -> None:
    rules, made = policy(**STRICT), bundle(parameters=torch.zeros(3))
    for check in (lambda: plan(rules, privacy=promised), lambda: leave(rules, made, privacy=promised)):
        if refused is None:
            check()
        else:
            with refusal(f"privacy.max_{refused[0]}", refused[1]):
                check()


# Before anything leaves -----------------------------------------------------------------------------------------------


def test_a_bundle_that_holds_more_than_was_declared_is_caught() -> None:
    """The plan passed on a declaration that was not true."""
    hidden = bundle(parameters=torch.zeros(2), embeddings=torch.zeros(2))
    with by_rule("groups"):
        Policy().check_bundle(hidden, SINGLE, MANY)
    with pytest.raises(BadInput, match="holds group 'score', which fedavg did not declare"):
        Policy().check_bundle(bundle(parameters=torch.zeros(2), score=torch.zeros(())), SINGLE, MANY)
    with pytest.raises(BadInput, match="group 'parameters' has 800 bytes, declared are 100"):
        Policy().check_bundle(bundle(parameters=torch.zeros(200)), SINGLE, MANY)


def test_bytes_that_leave_are_all_bytes_of_the_bundle() -> None:
    made = bundle(parameters=torch.zeros(500))
    size = len(made.to_bytes())
    assert bundle_bytes(made) == size > 2000
    leave(policy(max_bytes_per_round=size, max_bytes_per_study=size), made)
    reason = f"with this bundle this site would send {size:,} bytes in a round, and {size - 1:,} may leave"
    with refusal("max_bytes_per_round", reason):
        leave(policy(max_bytes_per_round=size - 1), made)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 3000), st.integers(0, 5000), st.integers(0, 6000), st.integers(0, 9000))
def test_bytes_of_a_round_and_of_a_study_add_up(in_round: int, before: int, a_round: int, a_study: int) -> None:
    made = bundle(parameters=torch.zeros(500))
    size, rules = bundle_bytes(made), policy(max_bytes_per_round=a_round, max_bytes_per_study=a_study)
    sent = {"sent_in_round": in_round, "sent_in_study": in_round + before}
    if in_round + size > a_round:
        with by_rule("max_bytes_per_round"):
            leave(rules, made, **sent)
    elif in_round + before + size > a_study:
        with by_rule("max_bytes_per_study"):
            leave(rules, made, **sent)
    else:
        leave(rules, made, **sent)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(0, 9),
    st.sampled_from([*BY_CLASS, "parameters", "score"]),
)
def test_a_class_with_too_few_images_blocks_what_goes_by_class(counts: list[int], least: int, group: str) -> None:
    made, rules = bundle(**{group: torch.full((3,), 99)}), policy(**{**OPEN, "min_images_per_class": least})
    if group in BY_CLASS and any(0 < count < least for count in counts):
        with by_rule("min_images_per_class"):
            leave(rules, made, counts=torch.tensor(counts))
    else:
        leave(rules, made, counts=torch.tensor(counts))


def test_counts_in_a_bundle_are_checked_whatever_the_site_says_of_itself() -> None:
    leave(Policy(), bundle(label_counts=MANY), counts=MANY)
    with by_rule("min_images_per_class"):
        leave(Policy(), bundle(label_counts=FEW), counts=MANY)
    with by_rule("min_images_per_class"):
        leave(Policy(), bundle(label_counts=MANY), counts=FEW)


def test_counts_that_are_not_known_do_not_pass() -> None:
    with refusal("min_images_per_class", "how many images each class has is not known"):
        leave(Policy(), bundle(prototypes=torch.zeros(4, 2)), counts=None)
    leave(Policy(), bundle(parameters=torch.zeros(4, 2)), counts=None)
    leave(policy(min_images_per_class=1), bundle(prototypes=torch.zeros(4, 2)), counts=None)


def test_a_refusal_does_not_tell_what_it_protects() -> None:
    """It may travel as the reason for not answering: neither the class nor its number may be in it."""
    with pytest.raises(Refused) as told:
        leave(policy(min_images_per_class=50), bundle(label_counts=torch.tensor([37, 61, 0])), counts=MANY)
    assert set(re.findall(r"\d+", str(told.value))) == {"50"}


def test_metrics() -> None:
    made = bundle(parameters=torch.zeros(2))
    found = {"accuracy": 0.9, "loss": 0.3}
    leave(policy(metrics="all"), made, metrics=found)
    leave(policy(metrics=["accuracy", "loss"]), made, metrics=found)
    leave(Policy(), made, metrics={})
    with refusal("metrics", "'accuracy' may not leave (allowed: none)"):
        leave(Policy(), made, metrics=found)
    with refusal("metrics", "'loss' may not leave (allowed: accuracy)"):
        leave(policy(metrics=["accuracy"]), made, metrics=found)
    with refusal("metrics", "'accuracy' may not leave (allowed: none)"):  # alone, without a tensor
        leave(policy(metrics=[]), bundle(), metrics=found)
    assert policy(metrics=["loss", "auc"]).leaving(found) == {"loss": 0.3}
    assert Policy().leaving(found) == {}
    assert policy(metrics="all").leaving(found) == found


def test_an_empty_bundle_needs_no_privacy() -> None:
    leave(policy(**STRICT), bundle())


# What a method can do without ----------------------------------------------------------------------------------------

OPTIONAL = Payload(up=(Group("parameters", "", 400), Group("label_counts", "", 32, None, optional=True)))
STAYS = "label_counts does not leave site-1, and the study goes on without it: policy rule "


@pytest.mark.parametrize(
    ("rules", "counts", "told", "reason"),
    [
        ({"never_groups": ["label_counts"]}, MANY, MANY, "never_groups: 'label_counts' never leaves this site"),
        ({"groups": ["parameters"]}, MANY, MANY, "groups: 'label_counts' is not allowed (allowed: parameters)"),
        ({}, FEW, MANY, "min_images_per_class: 'label_counts' would leave, and a class has images here, but fewer "),
        ({}, MANY, FEW, "min_images_per_class: 'label_counts' would leave, and a class has images here, but fewer "),
        ({}, None, MANY, "min_images_per_class: how many images each class has is not known"),
    ],
)
def test_an_optional_group_stays_and_the_rest_leaves(
    rules: dict[str, Any], counts: Tensor | None, told: Tensor, reason: str
) -> None:
    said: list[str] = []
    made = bundle(parameters=torch.ones(100), label_counts=told)
    gate = Gate(policy(**rules), counts, say=said.append)
    left = gate.outgoing(made, OPTIONAL)
    assert left.groups.keys() == {"parameters"}
    assert gate.sent == {0: bundle_bytes(left)}  # what stayed is not counted
    assert [text.startswith(STAYS + reason) for text in said] == [True]
    needed = replace(OPTIONAL, up=tuple(replace(group, optional=False) for group in OPTIONAL.up))
    with by_rule(reason.partition(":")[0]):
        Gate(policy(**rules), counts).outgoing(made, needed)


def test_an_optional_group_that_may_leave_does() -> None:
    said: list[str] = []
    made = bundle(parameters=torch.ones(100), label_counts=MANY)
    assert Gate(Policy(), MANY, say=said.append).outgoing(made, OPTIONAL) == made
    assert said == []


def test_the_other_rules_hold_for_a_bundle_without_what_stays() -> None:
    made = bundle(parameters=torch.ones(100), label_counts=MANY)
    size = bundle_bytes(bundle(parameters=torch.ones(100)))
    Gate(policy(never_groups=["label_counts"], max_bytes_per_round=size), MANY).outgoing(made, OPTIONAL)
    said: list[str] = []
    with by_rule("max_bytes_per_round"):
        rules = policy(never_groups=["label_counts"], max_bytes_per_round=size - 1)
        Gate(rules, MANY, say=said.append).outgoing(made, OPTIONAL)
    assert said == []  # nothing left, so nothing was left out of it


def test_a_plan_says_what_will_stay() -> None:
    study, method = tiny.study(method="consult-distilled"), tiny.quick("consult-distilled")
    payload = method.payload(study, "site-1")
    assert Policy().check_plan(study, method, payload, KEY, MANY) == {}
    stay = policy(never_groups=["label_counts"]).check_plan(study, method, payload, KEY, None)
    assert stay == {"label_counts": "policy rule never_groups: 'label_counts' never leaves this site"}
    assert Policy().check_plan(study, method, payload, KEY, FEW).keys() == {"label_counts"}
    without = sum(group.max_bytes for group in payload.up if group.name != "label_counts")
    policy(never_groups=["label_counts"], max_bytes_per_round=without).check_plan(study, method, payload, KEY, None)
    with by_rule("max_bytes_per_round"):
        policy(max_bytes_per_round=without).check_plan(study, method, payload, KEY, None)
    with by_rule("groups"):  # what the method cannot do without
        policy(groups=["size", "label_counts"]).check_plan(study, method, payload, KEY, None)


# The gate -------------------------------------------------------------------------------------------------------------


def test_a_gate_counts_what_has_left() -> None:
    first, second = bundle(0, parameters=torch.zeros(100)), bundle(1, parameters=torch.zeros(100))
    size = bundle_bytes(first)
    gate = Gate(policy(max_bytes_per_study=2 * size, max_bytes_per_round=size), MANY)
    gate.outgoing(first, declared(first))
    assert gate.sent == {0: size}
    with by_rule("max_bytes_per_round"):  # a second answer in the same round
        gate.outgoing(first, declared(first))
    gate.outgoing(second, declared(second))
    assert gate.sent == {0: size, 1: size}
    third = bundle(2, parameters=torch.zeros(0))
    with by_rule("max_bytes_per_study"):
        gate.outgoing(third, declared(third))
    assert gate.sent == {0: size, 1: size}  # what was refused has not left


def test_a_gate_that_is_made_anew_goes_on_counting() -> None:
    made = bundle(3, parameters=torch.zeros(100))
    size = bundle_bytes(made)
    Gate(policy(max_bytes_per_study=size + 70), MANY, {0: 30, 1: 40}).outgoing(made, declared(made))
    with by_rule("max_bytes_per_study"):
        Gate(policy(max_bytes_per_study=size + 70), MANY, {0: 31, 1: 40}).outgoing(made, declared(made))


def test_a_gate_holds_every_rule() -> None:
    study, method = tiny.study(method="fedmr"), tiny.quick("fedmr")
    payload = method.payload(study, "site-1")
    Gate(Policy(), MANY).before(study, method, payload, KEY)
    with by_rule("min_images_per_class"):
        Gate(Policy(), FEW).before(study, method, payload, KEY)
    with by_rule("coordinators"):
        Gate(policy(coordinators=[OTHER_KEY]), MANY).before(study, method, payload, KEY)
    made = bundle(parameters=torch.zeros(2))
    with by_rule("metrics"):
        Gate(Policy(), MANY).outgoing(made, declared(made), {"loss": 1.0})
    strict = Gate(policy(**STRICT), MANY)
    strict.outgoing(made, declared(made), privacy={"epsilon": 1.0, "delta": 0.0})
    with by_rule("privacy.max_epsilon"):
        strict.outgoing(made, declared(made))


def test_a_refusal_can_be_told_on() -> None:
    """The command line makes a longer error of the same kind out of an error's text."""
    assert Refused.exit_code == 2
    assert str(Refused("policy rule x: y; then go on")) == "policy rule x: y; then go on"


# The file -------------------------------------------------------------------------------------------------------------


def written(folder: Path, text: str) -> Path:
    path = folder / "policy.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_default_text_is_the_default_policy(tmp_path: Path) -> None:
    text = default_policy_text()
    assert read_policy(written(tmp_path, text)) == Policy() == read_policy(None)
    assert tomllib.loads(text).keys() | {"privacy"} == Policy.model_fields.keys()
    assert max(map(len, text.splitlines())) <= 120


def test_the_privacy_table_of_the_default_text_can_be_switched_on(tmp_path: Path) -> None:
    before, mark, table = default_policy_text().partition("# [privacy]")
    on = before + (mark + table).replace("# ", "")
    assert read_policy(written(tmp_path, on)).privacy == Privacy(max_epsilon=8.0, max_delta=1e-5)


def test_an_empty_file_and_a_windows_file_are_policies(tmp_path: Path) -> None:
    assert read_policy(written(tmp_path, "")) == Policy()
    path = tmp_path / "policy.toml"
    path.write_bytes(b'\xef\xbb\xbfmethods = ["fedavg"]\r\nmetrics = "all"\r\n')
    assert read_policy(path) == policy(methods=["fedavg"], metrics="all")


def test_a_link_to_the_sites_own_file_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "link.toml"
    link.symlink_to(written(tmp_path, "min_images_per_class = 20"))
    assert read_policy(link).min_images_per_class == 20


def test_a_named_file_that_is_missing_is_never_no_policy(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    with pytest.raises(BadInput, match=f"^cannot read the policy {re.escape(str(path))}: No such file"):
        read_policy(path)
    with pytest.raises(BadInput, match=r"^cannot read the policy .*: Is a directory; check the path$"):
        read_policy(tmp_path)
    path.symlink_to(tmp_path / "nowhere.toml")
    with pytest.raises(BadInput, match=r"^cannot read the policy "):
        read_policy(path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('method = "any"', "there is no rule 'method'; did you mean methods?"),
        ("max_bytes_per_rond = 5", "there is no rule 'max_bytes_per_rond'; did you mean max_bytes_per_round?"),
        ("privacy.delta = 0.1", "there is no rule 'privacy.delta'; did you mean privacy.max_delta?"),
        ("[train]\nlr = 1", "there is no rule 'train'; rules are methods, methods_from_files, coordinators, "),
        ("privacy = 5", "privacy = 5 cannot be used: it should be a table"),
        ("[privacy]\nmax_epsilon = 1.0", "privacy.max_delta is not set and has no default; set it"),
        ("privacy = {max_epsilon = 0.0, max_delta = 0.0}", "privacy.max_epsilon = 0.0 cannot be used: it should be"),
        ('privacy = {max_epsilon = "1", max_delta = 0}', "privacy.max_epsilon = '1' cannot be used: it should be"),
        ("privacy = {max_epsilon = inf, max_delta = 0.0}", "privacy.max_epsilon = inf cannot be used: it should"),
        ("privacy = {max_epsilon = 1.0, max_delta = 1.0}", "privacy.max_delta = 1.0 cannot be used: it should be less"),
        ("max_bytes_per_round = -1", "max_bytes_per_round = -1 cannot be used: it should be greater than or equal"),
        ('max_bytes_per_round = "5"', "max_bytes_per_round = '5' cannot be used: it should be a whole number"),
        ("max_bytes_per_study = true", "max_bytes_per_study = True cannot be used: it should be a whole number"),
        ("min_images_per_class = 1.0", "min_images_per_class = 1.0 cannot be used: it should be a whole number"),
        ('seen_by_other_sites = "yes"', "seen_by_other_sites = 'yes' cannot be used: it should be true or false"),
        ("methods_from_files = 1", "methods_from_files = 1 cannot be used: it should be true or false"),
        ('methods = "fedavg"', "methods = 'fedavg' cannot be used: it should be 'any'"),
        ("methods = 5", "methods = 5 cannot be used: it should be a list"),
        ("methods = [5]", "methods.0 = 5 cannot be used: it should be text"),
        ('methods = [""]', "methods.0 = '' cannot be used: it should have at least 1 character"),
        ('methods = ["fedavgg"]', "methods names 'fedavgg', which is not built in; did you mean fedavg?"),
        ('methods = ["any"]', "methods names 'any', which is not built in"),
        ('metrics = "some"', "metrics = 'some' cannot be used: it should be 'none' or 'all'"),
        ("metrics = false", "metrics = False cannot be used: it should be a list"),
        ('never_groups = "images"', "never_groups = 'images' cannot be used: it should be a list"),
        ('never_groups = ["embedings"]', "never_groups names 'embedings', which is not built in; did you mean embed"),
        ('groups = ["zzz"]', "groups names 'zzz', which is not built in; built in are parameters, statistics, "),
        ('coordinators = ["acde"]', "coordinators names 'acde', which is no fingerprint; copy it with its hyphens"),
    ],
)  # fmt: skip
def test_every_mistake_is_one_line_that_names_the_file_and_the_rule(tmp_path: Path, text: str, complaint: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(BadInput) as told:
        read_policy(path)
    assert str(told.value).startswith(f"{path}: {complaint}")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"methods = ", "is not valid TOML: Invalid value (at end of document); correct it"),
        (b"groups = []\ngroups = []", "is not valid TOML: Cannot overwrite a value (at end of document); correct it"),
        (b"\xff\xfe", "is not UTF-8 text (invalid start byte); save it as UTF-8"),
        (b"a = " + b"[" * 100_000, "is not valid TOML: "),
        (b"max_bytes_per_round = " + b"9" * 5000, "is not valid TOML: "),
    ],
)
def test_what_is_no_toml_is_refused(tmp_path: Path, data: bytes, complaint: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(data)
    with pytest.raises(BadInput) as told:
        read_policy(path)
    assert str(told.value).startswith(f"{path} {complaint}")
    assert "\n" not in str(told.value)


def test_groups_of_methods_from_files_may_be_named(tmp_path: Path) -> None:
    text = 'methods_from_files = true\nmethods = ["mine"]\ngroups = ["runes"]\nnever_groups = ["marks"]'
    rules = read_policy(written(tmp_path, text))
    leave(rules, bundle(runes=torch.zeros(2)))
    with refusal("never_groups", "'marks' never leaves this site"):
        leave(rules, bundle(marks=torch.zeros(2)))


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | st.sampled_from(["any", "all"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def outcome(path: Path) -> Policy | str:
    try:
        return read_policy(path)
    except BadInput as error:
        return str(error)


@settings(deadline=None, max_examples=25)
@given(st.dictionaries(st.sampled_from([*Policy.model_fields]) | st.text(max_size=8), VALUES, max_size=3))
def test_no_tree_of_values_does_anything_but_hold_or_be_refused(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]
) -> None:
    path = written(tmp_path_factory.mktemp("policy"), "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wardround.exchange.policy.file.tomllib.loads", lambda text: tree)
        found = outcome(path)
    if isinstance(found, str):
        assert found.startswith(f"{path}: ")
    else:
        held = json.loads(found.model_dump_json())
        assert all(held[rule] == value for rule, value in tree.items())


def test_the_page_lists_every_rule_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "policy.md").read_text(encoding="utf-8")
    table = page.partition("| Rule | Default | Refuses |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    listed = {cells[0].strip("`"): cells[1] for cells in (line[2:-2].split(" | ") for line in table.splitlines())}
    rules = [name for name in Policy.model_fields if name != "privacy"]
    assert list(listed) == [*rules, "privacy.max_epsilon", "privacy.max_delta"]
    for rule in rules:
        default = Policy.model_fields[rule].default
        shown = "all groups but `embeddings`, `subspace`, `images`" if rule == "groups" else f"`{json.dumps(default)}`"
        assert listed[rule] == shown
    assert listed["privacy.max_epsilon"] == listed["privacy.max_delta"] == "not set"
