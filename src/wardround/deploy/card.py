"""The model card: what a model is, what it was measured on, and what it must not be used for.

`model_card.json` is the record; `model_card.md` says the same in words and is made of the record alone. The JSON is
written last and holds the hashes of the model's files, so a folder with a card that fits is a whole export.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from wardround.deploy.about import ModelAbout, Number, Text, Words
from wardround.deploy.escape import escaped
from wardround.learn.predictor import Predictor
from wardround.settings import Frozen
from wardround.show import percent

SHARED = "shared"  # the site of a model that is all sites'
COMBINATION = {
    "logits": "the mean of the networks' scores before softmax",
    "softmax": "the mean of the networks' probabilities",
    "pairs": "votes of the networks on every pair of classes, each network heard on the pairs it has seen",
    "chain": "the first network tells the classes that the second has not seen, and the second those that it has",
    "entropy": "the mean of the networks' probabilities, a network with small entropy counting more",
    "margin": "the mean of the networks' probabilities, a network with its two best far apart counting more",
    "maximum": "the mean of the networks' probabilities, a network with a large highest one counting more",
}


class FileEntry(Frozen):
    """One of the model's files."""

    bytes: Number
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class OnnxCheck(Frozen):
    """How `model.onnx` compares with the model, or why there is none."""

    difference: Annotated[float, Field(ge=0)] | None = None  # largest absolute difference of a probability
    images: Number = 0
    not_written: Annotated[str, Field(max_length=4000)] = ""


class Card(Frozen):
    """All that the card says."""

    format: Literal["wardround-card-1"] = "wardround-card-1"
    made: Text
    about: ModelAbout
    networks: tuple[Text, ...]
    combination: Words
    marks: bool = False  # whether it tells which images are unlike those it was trained on
    shares: bool = False  # whether its files hold class counts or shares of sites
    versions: dict[Text, Text]
    files: dict[Text, FileEntry]
    onnx: OnnxCheck


def combination(predictor: Predictor) -> str:
    """How a predictor makes one answer of its networks, in words."""
    if not predictor.members:
        words = "no network: the same probabilities for every image, the classes' shares in training"
        return words if predictor.log_prior is not None else "no network: every class is equally probable"
    words = COMBINATION[predictor.combine] if len(predictor.members) > 1 else "one network"
    if predictor.trust is not None and predictor.combine != "chain":
        words += ", each network weighed" + (" class by class" if predictor.trust.ndim == 2 else "")
    if predictor.member_log_prior is not None:
        words += ", each network's own class shares divided out first"
    return words + (", then weighed by class shares" if predictor.log_prior is not None else "")


def tells_shares(predictor: Predictor) -> bool:
    """Whether what the networks are combined with is made of how many images of each class sites have."""
    by_class = predictor.trust is not None and predictor.trust.ndim == 2
    return by_class or predictor.member_log_prior is not None or predictor.log_prior is not None


def markdown(card: Card) -> str:
    """The card in words: plain Markdown, no HTML, everything from outside escaped."""
    parts = (_title, _answers, _training, _chosen, _measured, _limits, _use, _files, _provenance)
    return "\n".join(line for part in parts if (lines := list(part(card))) for line in (*lines, ""))


def _title(card: Card) -> Iterator[str]:
    origin = card.about.origin
    whose = "all sites" if origin.site == SHARED else f"the site {escaped(origin.site)}"
    yield f"# Model card: {escaped(origin.study)}, {escaped(origin.site)}"
    yield ""
    yield (
        f"An image classifier for {whose}, made by federated learning in the study {escaped(origin.study)}. It is the "
        "result of research software and no medical device: it has no approval of any authority. The first sections "
        "are for those who read its answers, the last three for those who install it."
    )


def _answers(card: Card) -> Iterator[str]:
    task, counts = card.about.task, card.about.label_counts
    yield "## What it answers"
    yield ""
    yield (
        "For one image it gives a probability for each of the classes below; they add up to 1. It always answers with "
        "one of these classes, also for an image that shows none of them. A probability is the model's own, "
        "calibrated at most on few images of one site: of images with 0.9, not necessarily nine in ten are right."
    )
    if card.marks:
        yield (
            "Images unlike those it was trained on, with no high score for any class, are marked as unfamiliar: not "
            "all of them, and with them some that it answers right. An image without a mark can be wrong as well."
        )
    yield ""
    yield "| Number | Class |" if counts is None else "| Number | Class | Images trained on |"
    yield "| --- | --- |" if counts is None else "| --- | --- | --- |"
    for number, name in enumerate(task.classes):
        yield f"| {number} | {escaped(name)} |" + ("" if counts is None else f" {counts[number]:,} |")


def _training(card: Card) -> Iterator[str]:
    about = card.about
    summary = f" ({escaped(about.method_summary.rstrip('.'))})" if about.method_summary else ""
    yield "## How it was trained"
    yield ""
    yield (
        f"The study's method is {escaped(about.origin.method)}{summary}."
        + (" What became of it here is told in the next section." if about.notes else "")
    )
    where = "The sites together" if about.origin.site == SHARED else f"The site {escaped(about.origin.site)}"
    yield (
        f"{where} trained on {about.images:,} images. What other sites gave is what the study agreed on; their images "
        "are not known here."
    )
    if about.label_counts is None:
        yield "How many images each class had is not stated here: whoever exported the model did not release it."
    if card.shares:
        yield (
            "The model's files hold what its answers are weighed by, which is made of how many images of each class "
            "one site or more of the study have. Whoever is given the files can read it."
        )


def _chosen(card: Card) -> Iterator[str]:
    """Nothing where nothing was noted. Each line begins with a word of ours, so that no note can begin a list."""
    if card.about.notes:
        yield "## What was chosen here, and why"
        yield ""
        yield "What the program noted when it made this model:"
        yield ""
        yield from (f"- Note: {escaped(note.rstrip('.'))}." for note in card.about.notes)


def _measured(card: Card) -> Iterator[str]:
    yield "## How good it is"
    yield ""
    if not card.about.accuracies:
        yield "Nothing was measured. Do not rely on it before you have measured it on images of your own."
        return
    yield "Each figure holds for the test that its definition names, and for no other images."
    yield ""
    yield "| Figure | Value | Definition |"
    yield "| --- | --- | --- |"
    for figure in card.about.accuracies:
        yield f"| {escaped(figure.label)} | {percent(figure.value)} % | {escaped(figure.definition)} |"


def _limits(card: Card) -> Iterator[str]:
    about = card.about
    yield "## Limits"
    yield ""
    if about.label_counts is not None:
        unseen = [escaped(n) for n, count in zip(about.task.classes, about.label_counts, strict=True) if not count]
        if unseen:
            yield (
                f"- The site had no image of: {', '.join(unseen)}. What the model knows of these, if anything, came "
                "from other sites alone, and no local figure tells how well it finds them."
            )
    yield (
        "- A class that the site had few images of, or none, may be missed far more often than the figures above "
        "suggest: they are averages over all images of a test."
    )
    yield (
        "- Another scanner, stain, camera, protocol or group of patients than in training may lower every figure "
        "without any sign of it in the probabilities. Measure again when anything of the kind changes."
    )
    yield (
        f"- It sees {about.task.size}×{about.task.size} pixels. Larger images are cut to their central square and "
        "shrunk: what lies outside, or is too small to remain, is not seen."
    )
    yield ""
    yield "It must not be used:"
    yield ""
    yield "- to decide on a patient without a physician who judges the image independently;"
    yield "- on images of another kind, organ or modality than it was trained on;"
    yield "- to find anything but the classes above, or to rule out disease in general;"
    yield "- to draw conclusions about whose images it was trained on;"
    yield "- at a site where it was not measured first."


def _use(card: Card) -> Iterator[str]:
    task = card.about.task
    colours = "grey" if task.channels == 1 else "red, green and blue"
    yield "## How to use it"
    yield ""
    yield "`wardround predict FOLDER IMAGES --out table.csv`, where FOLDER holds this card, or in a program:"
    yield ""
    yield f"- Input: {task.channels}×{task.size}×{task.size} images ({colours}; channel, row, column), values 0 to 255."
    yield (
        f"- Normalisation: {task.normalisation}. It is inside `model.onnx`, which takes `pixels` (float32, raw values, "
        "any number of images) and gives `probabilities`"
        + (" and `unfamiliar` (float32, 1 for a marked image, else 0)." if card.marks else ".")
    )
    for network, count in Counter(card.networks).items():
        yield f"- {count:,} {'network' if count == 1 else 'networks'}: {escaped(network)}."
    yield f"- Answer: {card.combination}."


def _files(card: Card) -> Iterator[str]:
    yield "## Files"
    yield ""
    yield "| File | Bytes | SHA-256 |"
    yield "| --- | --- | --- |"
    for name, entry in sorted(card.files.items()):
        yield f"| `{name}` | {entry.bytes:,} | `{entry.sha256}` |"
    yield ""
    if card.onnx.difference is None:
        yield f"`model.onnx` was not written: {escaped(card.onnx.not_written)}."
    else:
        yield (
            f"`model.onnx` was compared with `model.safetensors` on {card.onnx.images:,} images: the largest "
            f"difference of a probability is {card.onnx.difference:.1e}."
        )


def _provenance(card: Card) -> Iterator[str]:
    origin = card.about.origin
    yield "## Where it comes from"
    yield ""
    yield f"- Study: {escaped(origin.study)}, id {escaped(origin.study_id)}, seed {origin.seed}."
    yield f"- Method: {escaped(origin.method)}. Site: {escaped(origin.site)}."
    yield f"- Exported: {escaped(card.made)}, with wardround {escaped(origin.program)}."
    yield f"- Versions: {', '.join(f'{escaped(n)} {escaped(v)}' for n, v in sorted(card.versions.items()))}."
