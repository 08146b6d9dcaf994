"""The card: what it says, and that nothing from outside can be anything but text in it."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from deploy.samples import ABOUT, MADE, PREDICTORS, bright, panel
from wardround.deploy.about import Measured, ModelAbout, Origin, Task
from wardround.deploy.card import Card, FileEntry, OnnxCheck, combination, markdown, tells_shares
from wardround.deploy.escape import cell, escaped, visible
from wardround.learn.predictor import Predictor

FILES = {"model.safetensors": FileEntry(bytes=12_345, sha256="a" * 64)}


def card(about: ModelAbout = ABOUT, **changes: object) -> Card:
    made = Card(
        made=MADE,
        about=about,
        networks=("cnn4, width 1, 1×4×4 images, 2 classes",),
        combination="one network",
        versions={"wardround": "0.1.0", "torch": "2.13.0"},
        files=FILES,
        onnx=OnnxCheck(difference=3e-8, images=18),
    )
    return made.model_copy(update=changes)


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


# In words -------------------------------------------------------------------------------------------------------------


def test_the_sections() -> None:
    text = markdown(card())
    assert text.startswith("# Model card: lungs, north\n\nAn image classifier for the site north, ")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "What it answers",
        "How it was trained",
        "How good it is",
        "Limits",
        "How to use it",
        "Files",
        "Where it comes from",
    ]
    assert "no medical device" in text
    assert "must not be used" in text


def test_the_figures_come_with_their_definitions() -> None:
    good = section(markdown(card()), "How good it is")
    assert "| Local accuracy | 91.2 % | Of north's predictor on 100 images. |" in good
    nothing = section(markdown(card(ABOUT.model_copy(update={"accuracies": ()}))), "How good it is")
    assert nothing.strip().startswith("Nothing was measured.")
    assert "|" not in nothing


def test_label_counts_are_told_only_where_they_were_given() -> None:
    text = markdown(card())
    assert "| 0 | benign |\n| 1 | malignant |\n" in text
    assert "is not stated" in section(text, "How it was trained")
    assert "had no image of" not in text
    told = markdown(card(ABOUT.model_copy(update={"label_counts": (1234, 0)})))
    assert "| 0 | benign | 1,234 |\n| 1 | malignant | 0 |\n" in told
    assert "is not stated" not in told
    assert "- The site had no image of: malignant. What the model knows of these, if anything, " in told


def test_what_was_chosen_is_told_where_something_was_noted() -> None:
    method = "The study's method is fedavg (a mean)."
    about = ABOUT.model_copy(update={"method_summary": "a mean."})
    assert f"\n{method}\n" in section(markdown(card(about)), "How it was trained")
    assert "chosen here" not in markdown(card(about))
    noted = about.model_copy(update={"notes": ("north keeps its own model: it is better", "1. *two*.")})
    text = markdown(card(noted))
    assert f"\n{method} What became of it here is told in the next section.\n" in section(text, "How it was trained")
    assert section(text, "What was chosen here, and why") == (
        "\nWhat the program noted when it made this model:\n\n"
        "- Note: north keeps its own model: it is better.\n- Note: 1. \\*two\\*.\n"
    )
    assert text.index("## How it was trained") < text.index("## What was chosen here") < text.index("## How good it is")


def test_provenance_and_files() -> None:
    text = markdown(card())
    origin = section(text, "Where it comes from")
    assert "- Study: lungs, id 0123456789abcdef, seed 3.\n" in origin
    assert "- Method: fedavg. Site: north.\n" in origin
    assert f"- Exported: {MADE}, with wardround 0.1.0.\n" in origin
    assert "- Versions: torch 2.13.0, wardround 0.1.0.\n" in origin
    files = section(text, "Files")
    assert f"| `model.safetensors` | 12,345 | `{'a' * 64}` |" in files
    assert "on 18 images: the largest difference of a probability is 3.0e-08." in files
    without = section(markdown(card(onnx=OnnxCheck(not_written="pip install 'wardround[onnx]'"))), "Files")
    assert r"`model.onnx` was not written: pip install 'wardround\[onnx\]'." in without


def test_the_model_of_all_sites() -> None:
    shared = ABOUT.model_copy(update={"origin": ABOUT.origin.model_copy(update={"site": "shared"})})
    text = markdown(card(shared))
    assert "An image classifier for all sites, " in text
    assert "The sites together trained on 1,234 images." in text


@pytest.mark.parametrize(
    ("predictor", "words"),
    [
        (bright(), "one network"),
        (PREDICTORS["nothing"], "no network: every class is equally probable"),
        (PREDICTORS["prior"], "no network: the same probabilities for every image, the classes' shares in training"),
        (panel(), "the mean of the networks' scores before softmax"),
        (PREDICTORS["softmax"], "the mean of the networks' probabilities, each network weighed"),
        (PREDICTORS["entropy"], "the mean of the networks' probabilities, a network with small entropy counting more"),
        (
            PREDICTORS["maximum"],
            "the mean of the networks' probabilities, a network with a large highest one counting more, each network "
            "weighed class by class, each network's own class shares divided out first",
        ),
        (
            PREDICTORS["pairs"],
            "votes of the networks on every pair of classes, each network heard on the pairs it has seen, each network "
            "weighed class by class, each network's own class shares divided out first, then weighed by class shares",
        ),
        (
            PREDICTORS["chain"],
            "the first network tells the classes that the second has not seen, and the second those that it has, each "
            "network's own class shares divided out first, then weighed by class shares",
        ),
        (
            Predictor(2, bright().members, log_prior=torch.zeros(2)),
            "one network, then weighed by class shares",
        ),
    ],
)
def test_how_networks_combine_in_words(predictor: Predictor, words: str) -> None:
    assert combination(predictor) == words


def test_marks_are_explained_to_those_who_read_answers_and_to_those_who_write_programs() -> None:
    text, without = markdown(card(marks=True)), markdown(card())
    assert "with no high score for any class, are marked as unfamiliar: not all " in section(text, "What it answers")
    assert "and gives `probabilities` and `unfamiliar` (float32, 1 for a marked " in section(text, "How to use it")
    assert "unfamiliar" not in without
    assert "and gives `probabilities`.\n" in section(without, "How to use it")


@pytest.mark.parametrize(("name", "tell"), [("pairs", True), ("chain", True), ("prior", True), ("nothing", False)])
def test_that_the_files_tell_of_sites_counts_is_said(name: str, tell: bool) -> None:
    """Counts and shares are what votes are weighed by, so they are in the files, whatever the card leaves out."""
    assert tells_shares(PREDICTORS[name]) == tell
    training = section(markdown(card(shares=tell)), "How it was trained")
    assert ("is made of how many images of each class one site or more of the study have" in training) == tell


def test_networks_of_one_kind_are_told_once() -> None:
    assert "- 5 networks: a.\n- 1 network: b.\n" in markdown(card(networks=("a",) * 5 + ("b",)))


def test_the_record_survives_its_file() -> None:
    assert Card.model_validate_json(card().model_dump_json()) == card()


# Text from outside ----------------------------------------------------------------------------------------------------

HOSTILE = [
    "<script>alert(1)</script>",
    "a | b",
    "[click](https://example.org)",
    "https://example.org/x",
    "www.example.org",
    "**bold** _it_ `code` ~~gone~~",
    "# heading",
    "&lt;b&gt; &amp;",
    "![x](y)",
    "\x1b[2J\x07 \u202egnp.exe",
    "line\nbreak\r\n\n# heading",
    "back\\slash\\",
    "name@example.org $x$",
]
BLOCKS = ("heading", "paragraph", "bullet_list", "list_item", "table", "thead", "tbody", "tr", "th", "td")
text = st.one_of(st.sampled_from(HOSTILE), st.text(min_size=1, max_size=40).filter(lambda s: s.strip() != ""))


@settings(deadline=None, max_examples=100)
@given(first=text, second=text, words=text)
def test_outside_text_is_shown_as_text_and_as_nothing_else(first: str, second: str, words: str) -> None:
    task = Task(classes=(first, f"{second}2" if first == second else second), channels=1, size=4)
    origin = Origin(study=first, study_id=second, method=words, site=second, seed=1)
    about = ModelAbout(
        task=task,
        origin=origin,
        images=1,
        accuracies=(Measured(label=first, value=1.0, definition=words),),
        method_summary=words,
        notes=(words, first),
    )
    made = markdown(card(about, made=words, networks=(first,), versions={first: second}))
    assert all(c.isprintable() or c == "\n" for c in made)
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(made)
    kinds = {token.type for token in tokens} | {child.type for token in tokens for child in token.children or []}
    assert kinds <= {
        *(f"{kind}_{end}" for kind in BLOCKS for end in ("open", "close")),
        *("inline", "text", "text_special", "softbreak", "code_inline"),
    }
    shown = ["".join(child.content for child in token.children or []) for token in tokens if token.type == "inline"]
    assert shown[0] == f"Model card: {visible(first)}, {visible(second)}".strip()
    assert visible(first).strip() in shown[shown.index("Class") + 2]
    assert sum(token.type == "heading_open" for token in tokens) == 9


def test_what_is_escaped_for_markdown() -> None:
    assert escaped("a_b*[c](d)|<e>&f") == r"a\_b\*\[c\](d)\|\<e\>\&f"
    assert escaped("\x1b\u202e\n") == r"\\x1b\\u202e\\n"
    assert escaped("see https://x and WWW.y") == r"see https:\//x and WWW\.y"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("scan.png", "scan.png"),
        ("=1+1.png", "'=1+1.png"),
        ("+1.png", "'+1.png"),
        ("-1.png", "'-1.png"),
        ("@x.png", "'@x.png"),
        ("  =1.png", "'  =1.png"),
        ("'=1.png", "''=1.png"),
        ("＝1.png", "'＝1.png"),
        ("a=1.png", "a=1.png"),
        ("\t=1.png", r"\t=1.png"),
        ("a\r\n=1.png", r"a\r\n=1.png"),
        ("\x1b[31m\x00", r"\x1b[31m\x00"),
        ("\u202e.png", r"\u202e.png"),
        ("\udc80.png", r"\udc80.png"),
        (r"C:\scans\a.png", r"C:\scans\a.png"),
        ("Läsion ß.png", "Läsion ß.png"),
    ],
)
def test_what_is_escaped_for_a_spreadsheet(name: str, shown: str) -> None:
    assert cell(name) == shown


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=30))
def test_a_cell_always_prints_and_never_begins_as_a_formula(name: str) -> None:
    assert cell(name).isprintable()
    assert cell(name).encode().decode() == cell(name)  # also of names that are not UTF-8 on the disk
    assert not cell(name).lstrip().startswith(("=", "+", "-", "@"))
