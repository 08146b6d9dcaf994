"""The study in plain words: nothing that may leave goes unmentioned, and every number is the declaration's."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import pytest

import tiny
from wardround.exchange.glossary import GROUPS, LAST_LAYER, SEEN_BY
from wardround.exchange.payload import Group, Payload
from wardround.methods.base import Method
from wardround.methods.fedavg import FedAvg
from wardround.methods.registry import known, make
from wardround.study import Study
from wardround.words import Section, describe, markdown

# Settings under which a method declares more than under its defaults.
WIDER: dict[str, dict[str, Any]] = {
    "fedbicross": {"clustering": "subspaces"},
    "fedmp": {"class_counts": True},
    "fedisca": {"shots": 3},
}
NARROWER: dict[str, dict[str, Any]] = {"fedmp-fewshot": {"sfmc": False}}
JARGON = re.compile(
    r"tensor|payload|batch.?norm|embedding|logit|prototype|fisher|parameter|bundle|epoch|\bsites?\b", re.IGNORECASE
)
HEADINGS = [
    "What is done",
    "Until when",
    "What leaves a hospital",
    "Who sees it",
    "What an attacker could try with it",
    "What comes back",
    "What stays",
    "If a hospital withdraws",
    "What protects it",
]

every_method = pytest.mark.parametrize(
    ("name", "own"),
    [*((name, {}) for name in known()), *WIDER.items(), *NARROWER.items()],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)) or "default",
)


def study_of(name: str, **changes: Any) -> Study:
    changes = {"model": {"name": "small", "width": 2}, **changes}
    return tiny.study(tiny.federation(), method=name, **changes)


def said(sections: list[Section], heading: str) -> list[str]:
    return dict(sections)[heading]


class Odd(FedAvg):
    """A method of somebody's own that sends something nobody has heard of."""

    name = "odd"

    def payload(self, study: Study, site: str) -> Payload:
        return Payload(up=(Group("runes", "marks that nobody can read", 1500),), seen_by="a passer-by")


# Every method ---------------------------------------------------------------------------------------------------------


@every_method
def test_every_group_and_whoever_sees_it_has_words(name: str, own: dict[str, Any]) -> None:
    """Fails for a group without words: explain it in `exchange/glossary.py` and in docs/methods.md."""
    for payload in (make(name, own).payload(study_of(name), site) for site in ("site-1", "site-2")):
        names = {group.name for group in (*payload.up, *payload.down, *payload.home)}
        assert names <= GROUPS.keys()
        assert all(GROUPS[group.name].content for group in payload.up)
        assert payload.seen_by in {"nobody", *SEEN_BY}


def test_the_glossary_has_the_groups_of_the_methods_page_and_no_others() -> None:
    page = (Path(__file__).parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")
    table = page.partition("| Group | Content |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == GROUPS.keys()


def test_no_words_for_whom_no_method_has() -> None:
    found = {method().payload(study_of(name), "site-1").seen_by for name, method in known().items()}
    found |= {make(name, own).payload(study_of(name), "site-1").seen_by for name, own in NARROWER.items()}
    assert found == {"nobody", *SEEN_BY}


@every_method
def test_every_method_is_described_with_all_that_may_leave_and_its_size(name: str, own: dict[str, Any]) -> None:
    method, study = make(name, own), study_of(name)
    sections = describe(study, method, quorum=2, deadline=14)
    assert [section.heading for section in sections] == HEADINGS
    assert all(section.paragraphs and all(section.paragraphs) for section in sections)
    leaves, risks = said(sections, "What leaves a hospital"), said(sections, "What an attacker could try with it")
    up = method.payload(study, "site-1").up
    for group in up:
        (line,) = [text for text in leaves if f"[{group.name}]" in text]
        assert GROUPS[group.name].content in line
        assert any(f"[{group.name}]: {GROUPS[group.name].risk}" in text for text in risks)
    assert (leaves == ["Nothing leaves a hospital."]) == (not up)
    assert "Something else" not in markdown(sections, "a study")


@every_method
def test_the_words_are_no_jargon(name: str, own: dict[str, Any]) -> None:
    for heading, paragraphs in describe(study_of(name), make(name, own)):
        for text in [heading, *paragraphs]:
            plain = re.sub(r"\[\w+\]|site-\d", "", text)
            assert text.startswith("In the words of the field: ") or not JARGON.search(plain), text


def test_the_technical_line_names_the_method_and_its_paper() -> None:
    *_, line = said(describe(study_of("fedavg"), make("fedavg", {})), "What is done")
    assert line == (
        "In the words of the field: fedavg, train locally, average the models weighted by images, repeat "
        "(McMahan et al., AISTATS 2017)."
    )
    *_, line = said(describe(study_of("local"), make("local", {})), "What is done")
    assert line == "In the words of the field: local, each site trains alone and never shares."


def test_what_is_said_to_leave_is_what_leaves() -> None:
    """The sizes in the text are those of a bundle that a site really sends."""
    study, method = study_of("fedavg"), make("fedavg", {})
    ctx, site = tiny.context(study), tiny.federation().sites[0]
    requests = method.ask(ctx, method.begin(ctx))
    assert requests is not None
    sent = tiny.drive(ctx, method.answer(ctx, site, requests[site.name], method.begin(ctx))).bundle.bytes_by_group
    assert sent == {"parameters": 2520, "statistics": 144, "counters": 32, "size": 8}
    assert said(describe(study, method), "What leaves a hospital")[:6] == [
        "In each of 2 rounds a hospital sends this:",
        "Weights [parameters] (2.5 kB): the numbers in which a network keeps what it has learned from the images.",
        "Averages [statistics] (144 B): for every layer of a network, the average and the spread of what the images "
        "caused in it.",
        "Step counters [counters] (32 B): how many steps of training a network has taken.",
        "Number of images [size] (8 B): how many images the hospital has trained on, one number.",
        "Together: 2.7 kB in a round, at most 5.4 kB in all.",
    ]


def test_a_resnet18_over_twenty_rounds() -> None:
    """11,170,884 weights of 4 bytes are 44.7 MB; with averages (9,600 numbers), counters and a size still so."""
    data = tiny.federation(size=28)
    study = tiny.study(data, method="fedavg", rounds=20, model={"name": "resnet18", "width": None})
    sections = describe(study, make("fedavg", {}))
    assert said(sections, "What is done")[:2] == [
        "3 hospitals (site-1, site-2, site-3) and a coordinator want programs that sort colour images of 28 by 28 "
        "points into 4 classes: ash, birch, cedar, durmast.",
        "Every hospital trains a network of 11,170,884 numbers on its own images, on a machine of its own, and sends "
        "what is listed below. The coordinator combines what came, in each of 20 rounds.",
    ]
    assert 20 * (4 * (11_170_884 + 9_600) + 20 * 8 + 8) == 894_442_080
    assert "Together: 44.7 MB in a round, at most 894.4 MB in all." in said(sections, "What leaves a hospital")


# Special cases --------------------------------------------------------------------------------------------------------


def test_a_study_in_which_nothing_leaves() -> None:
    sections = describe(study_of("local"), make("local", {}), quorum=2, deadline=14)
    assert said(sections, "Until when") == ["There is nothing to wait for: hospitals do not depend on one another."]
    assert said(sections, "Who sees it") == ["Nobody sees anything of a hospital."]
    assert said(sections, "What an attacker could try with it") == ["Nothing leaves, so there is nothing to try."]
    assert said(sections, "What comes back") == ["Nothing: every hospital has the model that it made itself."]
    assert said(sections, "What protects it") == ["Nothing needs protection, as nothing leaves."]


def test_images_that_leave_are_said_to_leave() -> None:
    sections = describe(study_of("centralised"), make("centralised", {}))
    assert "Every hospital sends its images to the coordinator" in said(sections, "What is done")[1]
    assert said(sections, "What leaves a hospital")[1:3] == [
        "Images [images] (without a limit): the images themselves, with the class of each.",
        "Together: without a limit.",
    ]
    assert said(sections, "What stays")[0].startswith("The images do not stay")
    back = said(sections, "What an attacker could try with it")
    assert any(text.startswith("Weights [parameters]: ") for text in back)  # of what comes back


def test_images_that_stay_are_said_to_stay() -> None:
    stays = said(describe(study_of("fedmp"), make("fedmp", {})), "What stays")
    assert stays[0] == "The images stay at the hospital, and so does all else that it knows of its patients."


@pytest.mark.parametrize(
    ("name", "made"), [("fedisca", True), ("dense", True), ("fedbicross", True), ("fedavg", False), ("ensemble", False)]
)
def test_artificial_images_are_owned_up_to(name: str, made: bool) -> None:
    done = " ".join(said(describe(study_of(name), make(name, {})), "What is done"))
    assert ("computes artificial images out of them" in done) == made


def test_sites_that_are_drawn_by_lot() -> None:
    leaves = said(describe(study_of("fedavg", participants=0.67), make("fedavg", {})), "What leaves a hospital")
    assert leaves[0] == "In each of 2 rounds 2 of the hospitals, drawn by lot, send this:"
    leaves = said(describe(study_of("ensemble", participants=0.67), make("ensemble", {})), "What leaves a hospital")
    assert leaves[0] == "Once a hospital sends this:"  # one-shot methods ask everybody


def test_sites_with_different_networks() -> None:
    study = study_of("ensemble", model={"name": "small", "width": 2, "per_site": {"site-2": "cnn4"}})
    sections = describe(study, make("ensemble", {}))
    assert "a network of 630 to 187,332 numbers" in said(sections, "What is done")[1]
    leaves = said(sections, "What leaves a hospital")
    assert leaves[1].startswith("Weights [parameters] (2.5 kB to 749.3 kB): ")
    assert leaves[2].startswith("Averages [statistics] (144 B): ")  # of those that have any
    assert leaves[5] == "Together: 2.7 kB to 749.3 kB."


def test_what_is_a_bound_is_said_to_be_one() -> None:
    """100,000 descriptions of 8 numbers and a label: 4 MB."""
    leaves = said(describe(study_of("fedmp"), make("fedmp", {})), "What leaves a hospital")
    assert any(text.startswith("Descriptions of single images [embeddings] (at most 4.0 MB): ") for text in leaves)
    assert "Together: at most 4.0 MB in a round, at most 8.0 MB in all." in leaves


def test_whose_comes_back_is_told_apart() -> None:
    kept = said(describe(study_of("ensemble"), make("ensemble", {})), "What comes back")
    assert "Weights [parameters] (at most 7.6 kB): those of every hospital." in kept
    averaged = said(describe(study_of("fedavg"), make("fedavg", {})), "What comes back")
    assert averaged.count("Weights [parameters] (2.5 kB): as the coordinator made them.") == 2  # in rounds, at the end
    samples = said(describe(study_of("fedmp"), make("fedmp", {})), "What comes back")
    assert any("some of other hospitals' images, drawn by lot" in text for text in samples)


@pytest.mark.parametrize(
    ("name", "who"),
    [
        ("fedavg", "the coordinator, not by the other hospitals."),
        ("ensemble", "the coordinator and by every other hospital."),
    ],
)
def test_who_sees_it(name: str, who: str) -> None:
    seen = said(describe(study_of(name), make(name, {})), "Who sees it")
    assert seen[0] == f"What a hospital sends is seen by {who}"
    assert not any("two hospitals" in text for text in seen)


def test_two_hospitals_can_take_away_their_own_part() -> None:
    study = tiny.study(tiny.federation((11, 8)), method="fedavg")
    seen = said(describe(study, make("fedavg", {})), "Who sees it")
    assert seen[-1].startswith("As there are two hospitals, each may be able to work out the other's part")


@pytest.mark.parametrize(
    ("quorum", "deadline", "expected"),
    [
        (None, None, "all hospitals that are asked have answered. There is no date by which they must answer."),
        (2, 1, "at least 2 of 3 hospitals have answered. They have 1 day in each round."),
        (3, 14, "at least 3 of 3 hospitals have answered. They have 14 days in each round."),
        (2, datetime.date(2031, 3, 9), "at least 2 of 3 hospitals have answered. They have until 2031-03-09."),
    ],
)
def test_quorum_and_deadline(quorum: int | None, deadline: Any, expected: str) -> None:
    sections = describe(study_of("fedavg"), make("fedavg", {}), quorum=quorum, deadline=deadline)
    assert said(sections, "Until when") == [f"A round ends when {expected}"]


def test_withdrawal_after_one_round_and_after_several() -> None:
    once = said(describe(study_of("fedbicross"), make("fedbicross", {})), "If a hospital withdraws")
    often = said(describe(study_of("fedavg"), make("fedavg", {})), "If a hospital withdraws")
    assert once[-1] == "What other hospitals have already received cannot be called back."
    assert often[-1].startswith("What it sent in earlier rounds remains a part of the models that were made then. ")
    assert "deleted by the coordinator" in once[1]


def test_protection_by_noise_is_on_or_off() -> None:
    study, method = study_of("fedavg"), make("fedavg", {})
    assert said(describe(study, method), "What protects it")[0] == (
        "No noise is added to what leaves (no differential privacy)."
    )

    def noisy(**privacy: float) -> list[str]:
        """As the study itself has it: whoever shows it cannot forget to say so."""
        return said(describe(study_of("fedavg", privacy=privacy), method), "What protects it")

    assert "(differential privacy, epsilon = 8, delta = 1e-05; the smaller, the stronger)." in noisy(epsilon=8.0)[0]
    assert "of a strength that every message states" in noisy(noise=1.0)[0]
    assert noisy(feature_clip=1.0)[0].startswith("Embeddings and class means are shortened before they leave.")
    both = noisy(feature_clip=1.0, feature_noise=0.5)[0]
    assert both.startswith("Embeddings and class means are shortened and noise is added to them before")


# Numbers by class -----------------------------------------------------------------------------------------------------

BINS = "rounded down to coarse bins (0, 5, 10, 20, 50 and so on)"


def counted(name: str, heading: str, own: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    return said(describe(study_of(name, **changes), make(name, own or {})), heading)


def the_line(paragraphs: list[str], group: str) -> str:
    (found,) = [text for text in paragraphs if f"[{group}]" in text]
    return found


def test_noise_on_counts_alone_is_stated_with_its_strength_and_no_more_is_promised() -> None:
    assert counted("class-ensemble", "What protects it", privacy={"counts_epsilon": 0.5})[0] == (
        "Noise is added to the numbers by class before they are rounded and leave (differential privacy of these "
        "numbers alone, epsilon = 0.5, delta = 0, for one image added or removed; the smaller epsilon, the stronger). "
        "A patient of whom there are several images is protected less. The noise comes from a secret that stays at the "
        "hospital. Of all else that leaves nothing is promised: the network is trained without noise."
    )


def test_noised_counts_of_several_rounds_add_up() -> None:
    protects = counted("fedmr", "What protects it", rounds=4, privacy={"counts_epsilon": 0.5})[0]
    assert "epsilon = 0.5 in each round, at most 2 in all, delta = 0, for one image added or removed" in protects


def test_noised_counts_are_a_part_of_what_private_training_promises() -> None:
    _, counts, *_ = counted("consult", "What protects it", privacy={"epsilon": 8.0, "counts_epsilon": 1.0})
    assert counts == (
        "Noise is added to the numbers by class before they are rounded and leave. What that costs (epsilon = 1, "
        "delta = 0, for one image added or removed, of these numbers) is a part of what is stated above."
    )


@pytest.mark.parametrize(
    ("own", "privacy", "changed"),
    [
        ({}, {}, ""),
        ({"counts": "binned"}, {}, f", {BINS}"),
        ({}, {"counts_epsilon": 1.0}, f", with noise added, then {BINS}"),
    ],
)
@pytest.mark.parametrize("name", ["consult", "consult-distilled"])
def test_counts_that_leave_are_said_to_be_exact_rounded_or_noised(
    name: str, own: dict[str, Any], privacy: dict[str, float], changed: str
) -> None:
    line = the_line(counted(name, "What leaves a hospital", own, privacy=privacy), "label_counts")
    assert f"how many images of each class the hospital has trained on{changed}. A hospital whose" in line


def test_counts_that_are_only_rounded_promise_nothing() -> None:
    none, rounded, *_ = counted("consult", "What protects it", {"counts": "binned"})
    assert none == "No noise is added to what leaves (no differential privacy)."
    assert rounded.startswith("To round the numbers by class makes them coarser, and promises nothing: ")
    assert not any("To round" in text for text in counted("consult", "What protects it"))


@pytest.mark.parametrize("name", ["consult", "fedavg", "fedkd", "ensemble", "fedbn"])
def test_the_last_layer_is_said_to_tell_the_classes(name: str) -> None:
    own = {"counts": "none"} if name == "consult" else {}
    risks = counted(name, "What an attacker could try with it", own)
    assert the_line(risks, "parameters").endswith(f" {LAST_LAYER}")
    assert " ".join(risks).count(LAST_LAYER) == 1


@pytest.mark.parametrize("name", ["fedper", "fedas", "fedbabu"])
def test_a_last_layer_that_stays_tells_nothing(name: str) -> None:
    assert LAST_LAYER not in " ".join(counted(name, "What an attacker could try with it"))


@pytest.mark.parametrize(
    ("name", "own", "end"),
    [
        ("class-ensemble", {}, "those of every hospital."),
        ("consult", {}, "those of every hospital, guessed from its weights where it sends none."),
        ("consult", {"counts": "none"}, "those of every hospital, guessed from its weights where it sends none."),
    ],
)
def test_counts_that_come_back_unsent_are_said_to_be_guesses(name: str, own: dict[str, Any], end: str) -> None:
    assert the_line(counted(name, "What comes back", own), "label_counts").endswith(f": {end}")


# What nobody has heard of ---------------------------------------------------------------------------------------------


def test_a_group_that_nobody_has_explained_is_shown_as_such() -> None:
    odd: Method = Odd()
    sections = describe(study_of("fedavg"), odd)
    line = said(sections, "What leaves a hospital")[1]
    assert line == "Something else [runes] (at most 1.5 kB): marks that nobody can read."
    assert said(sections, "What an attacker could try with it")[1] == (
        "Something else [runes]: This is no part of the program. Ask the author of the method."
    )
    assert said(sections, "Who sees it")[0] == "What a hospital sends is seen by a passer-by."


# As a page ------------------------------------------------------------------------------------------------------------


def test_markdown() -> None:
    sections = [Section("What is done", ["One.", "Two [x] & *three*."]), Section("Until when", ["Now."])]
    page = markdown(sections, "My_study")
    assert page == (
        "# My\\_study\n\n## What is done\n\nOne.\n\nTwo \\[x\\] \\& \\*three\\*.\n\n## Until when\n\nNow.\n"
    )


def test_names_from_outside_steer_neither_a_terminal_nor_a_page() -> None:
    hostile = ("ash\x1b[31m", "<script>\n# Heading", "[link](https://example.org)", "`code`")
    study = study_of("fedavg")
    object.__setattr__(study, "classes", hostile)
    sections = describe(study, make("fedavg", {}))
    (line, *_) = said(sections, "What is done")
    assert line.isprintable()
    assert r"ash\x1b[31m, <script> # Heading" in line
    page = markdown(sections, "a\x1bb")
    assert page.startswith("# a\\\\x1bb\n")
    assert not re.search(r"(?<!\\)[<>`\[\]]", page)
    assert page.count("\n# ") == 0
