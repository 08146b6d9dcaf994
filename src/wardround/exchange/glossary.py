"""Every tensor group in plain words: what it is, and what an attacker could try with it; and who sees it.

A closed table. What a method sends under a name that is not here has not been explained to anybody yet, and a test
fails until it has been.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

ALIKE = "Nothing beyond what can be tried with"
LAST_LAYER = (  # of weights, where the last layer is among them: docs/consult.md measures how near the guess is
    "From the last layer it can be told roughly which classes the network learned from, and how many images of each, "
    "whether or not these numbers are sent."
)
OF_OTHERS = "It is a sum over the other hospitals; of two hospitals, each sees what is the other's own."


class Words(NamedTuple):
    """A tensor group for a reader who knows no computing: its name, what it is, what could be tried with it.

    `back` is what it is when it comes back, where that is something else than what the coordinator made of it.
    """

    title: str
    content: str
    risk: str
    back: str = ""


GROUPS: Mapping[str, Words] = {
    "parameters": Words(
        "weights",
        "the numbers in which a network keeps what it has learned from the images",
        "Whoever has them can run the network. With an image in hand they can test whether it was among those that the "
        "network learned from (membership inference), and they can compute images that the network takes for a typical "
        "case of a class (model inversion). Both work the better, the fewer images there were.",
    ),
    "statistics": Words(
        "averages",
        "for every layer of a network, the average and the spread of what the images caused in it",
        "They are averages over a hospital's images, layer by layer. Together with the weights they help to compute "
        "images that look like typical ones of the hospital, and they tell something of its devices, such as how "
        "bright its images are.",
    ),
    "counters": Words(
        "step counters",
        "how many steps of training a network has taken",
        "They tell roughly how many images a hospital has.",
    ),
    "size": Words(
        "number of images",
        "how many images the hospital has trained on, one number",
        "It tells how many such cases a hospital has collected.",
    ),
    "label_counts": Words(
        "numbers by class",
        "how many images of each class the hospital has trained on",
        "They tell how frequent each diagnosis is at a hospital. A small number may point at single patients.",
    ),
    "prototypes": Words(
        "class averages",
        "for every class, the average of the descriptions that the network makes of its images; where there is one "
        "image of a class, it is the description of that image",
        "They tell which classes a hospital has. From a description a likeness of the image can be rebuilt by a "
        "program that was trained to do so; from an average of many, a blend of them.",
        "for every class, the average over all hospitals",
    ),
    "embeddings": Words(
        "descriptions of single images",
        "for every image, a row of numbers in which the network describes it, and its class",
        "A program that was trained on similar images (a decoder) can rebuild a likeness of a single image from them. "
        "They also tell how frequent each diagnosis is, and allow to test whether a given image is among them.",
        "some of other hospitals' images, drawn by lot, with their classes",
    ),
    "subspace": Words(
        "main patterns",
        "patterns out of which the hospital's images can be composed, each a blend of many images",
        "They can be looked at. They resemble images, and a rare or striking one may show through.",
    ),
    "score": Words(
        "score",
        "one number from 0 to 1: how well the network does on the images it learned from, times how evenly they are "
        "spread over the classes",
        "It tells whether a hospital has nearly all of its images in one class.",
    ),
    "trace": Words(
        "strength of learning",
        "one number: how strongly the hospital's images still change the network",
        "It tells how well the network fits a hospital's images as a whole.",
    ),
    "fisher": Words(
        "importance of weights",
        "for every weight, how much it matters on the hospital's images",
        "It is computed from what each image would change in the network. It can be used like the weights, to test "
        "whether an image was among them, and it tells which classes a hospital has.",
    ),
    "fisher_weights": Words(
        "importance times weight",
        "the same numbers, each times its weight",
        f"{ALIKE} the weights and their importance.",
    ),
    "others_fisher": Words(
        "importance of weights elsewhere",
        "",
        OF_OTHERS,
        "for every weight, how much it matters on the images of all other hospitals together",
    ),
    "others_fisher_weights": Words(
        "importance times weight elsewhere",
        "",
        OF_OTHERS,
        "the sum of the same numbers of the other hospitals, each times its weight",
    ),
    "sensitivity": Words(
        "sensitivity of weights",
        "for every weight, how much the network's output on the hospital's images depends on it",
        "It is an average over many images. It can be used like the weights, to test whether an image was among them.",
    ),
    "update": Words(
        "changes of weights",
        "what training at the hospital has changed in the weights of a network",
        "A change tells more of the images than the weights do: from the change that few images cause, likenesses of "
        "them can be computed (gradient inversion). It also allows all that can be tried with weights.",
    ),
    "update_left": Words(
        "changes of weights, first factor",
        "the same for larger tables of weights, which are sent as two smaller tables: the first",
        f"{ALIKE} changes of weights.",
    ),
    "update_right": Words(
        "changes of weights, second factor",
        "the second of these tables",
        f"{ALIKE} changes of weights.",
    ),
    "generator": Words(
        "generator",
        "the weights of a small network that invents descriptions of images of a class",
        "It has learned from the hospital's images. What it invents may resemble the descriptions of real ones, from "
        "which a likeness of an image can be rebuilt.",
    ),
    "synthetic": Words(
        "artificial images",
        "",
        "They can be looked at. They are computed from the networks of all hospitals, not from any image, and show "
        "what the networks have learned: colours and shapes that are typical of a class, and perhaps of a hospital's "
        "devices. A rare or striking image may show through where few were learned from.",
        "images that the coordinator computed from the networks of all hospitals, each with the class that they see in "
        "it",
    ),
    "images": Words(
        "images",
        "the images themselves, with the class of each",
        "Nothing needs to be attacked: whoever receives them sees the patients' images.",
    ),
}

# `Payload.seen_by` as it ends the sentence "What a hospital sends is seen by ..."
SEEN_BY: Mapping[str, str] = {
    "the coordinator": "the coordinator, not by the other hospitals.",
    "the coordinator and every other site": "the coordinator and by every other hospital.",
    "the coordinator; random samples of the embeddings, with labels, by every other site": (
        "the coordinator. Of the descriptions of single images, some that are drawn by lot go to every other hospital."
    ),
    "the coordinator; the last model by every other site": (
        "the coordinator. What a hospital sends in the last round is seen by every other hospital, too."
    ),
    "the coordinator; the last model by every other site; before, random samples of the embeddings, with labels": (
        "the coordinator. What a hospital sends in the last round is seen by every other hospital, too, and before, "
        "some of the descriptions of single images, drawn by lot."
    ),
}
