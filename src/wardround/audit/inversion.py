"""Whether images computed from a model, or synthesised, show a patient or only what a class looks like.

Model inversion (Fredrikson et al., CCS 2015) in the strong form that the synthesis toolkit has: DeepInversion, which
also matches batch-norm statistics. An image of a class always resembles the class's training images somewhat, so its
distance to the nearest of them is held against the distances of those images to one another: a copy is nearer than
they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wardround.audit.report import Attack, Figure
from wardround.audit.similarity import best_ssim, nearest, ssim
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput
from wardround.learn.evaluate import network_outputs
from wardround.learn.predictor import Member
from wardround.models import spec_layout
from wardround.streams import Streams
from wardround.synthesis.gallery import to_pixels
from wardround.synthesis.inversion import Inversion, Synthesis, balanced_labels
from wardround.synthesis.teachers import Teachers, View
from wardround.tensorfile import Groups

BELIEVED = 0.5  # of the computed images: with fewer, the inversion did not work
RARE = 0.01  # of the training images may be as near to another one; duplicates among them must not hide a copy


class LabelTeachers(Teachers):
    """Networks without batch norm: they say nothing of statistics, so only the label and smoothness guide an image."""

    def view(self, pixels: Tensor) -> View:
        """Logits, and no distance."""
        return View(tuple(teacher.logits(pixels) for teacher in self.teachers), (pixels.new_zeros(()),))


@dataclass(frozen=True)
class Inverted:
    """Images (8-bit) that a model takes for its classes, the classes they were made for, and the classes it says."""

    images: Tensor
    labels: Tensor
    said: Tensor

    def attack(self, likeness: Likeness, seed: int) -> Attack:
        """For the record: first whether the inversion worked at all, as otherwise its distances say nothing."""
        share, n = _share(self.said == self.labels), len(self.labels)
        what = f"{n} images are computed that the model takes for its classes (DeepInversion)"
        found = likeness.attack(seed, "model-inversion", what)
        believed = Figure(
            "believed", share, "the share of computed images, as 8-bit images, that the model takes for their class", n
        )
        weak = (f"the model believes only {share:.0%} of the computed images, so this attack is weak; use more steps",)
        findings = (*(weak if share < BELIEVED else ()), *found.findings)
        return replace(found, figures=(believed, *found.figures), findings=findings)


def invert(
    model: Member,
    how: Inversion,
    streams: Streams,
    device: torch.device,
    on_step: Callable[[], None] = lambda: None,
) -> Inverted:
    """`how.batch` images, all on the CPU."""
    spec = model.spec
    kind = Teachers if spec_layout(spec).has_batch_norm else LabelTeachers
    labels = balanced_labels(how.batch, spec.classes).to(device)
    synthesis = Synthesis(kind([model], device), labels, (spec.channels, spec.size, spec.size), how)
    found = synthesis.images.detach()
    for iterate in synthesis.trajectory(streams.torch("audit inversion")):
        found = iterate.images
        on_step()
    images = to_pixels(found).cpu().contiguous()
    said = network_outputs(spec, model.weights, images, device).logits.argmax(dim=1)
    return Inverted(images, labels.cpu(), said.cpu())


@dataclass(frozen=True)
class Likeness:
    """Computed images (8-bit) with each one's nearest training image of its class, and the controls.

    `distance` is each one's L2 to it, `similarity` the highest SSIM with a training image of the class, both `(n,)`;
    `classmates` and `classmates_similarity` are the same for drawn training images and others of their class.
    The nearest images are patients' images: a `Likeness` stays at the site.
    """

    images: Tensor
    nearest: Tensor
    distance: Tensor
    similarity: Tensor
    classmates: Tensor
    classmates_similarity: Tensor

    def attack(self, seed: int, name: str, what: str) -> Attack:
        """For the record."""
        n, m = len(self.distance), len(self.classmates)
        closer = _share(self.classmates <= self.distance.min())
        figures = (
            Figure(
                "min_l2", float(self.distance.min()), "the smallest L2 of an image and a training image of its class", n
            ),
            Figure(
                "mean_l2",
                float(self.distance.mean()),
                "the mean L2 of an image and the nearest training image of its class",
                n,
            ),
            Figure(
                "max_ssim",
                float(self.similarity.max()),
                "the highest SSIM of an image and a training image of its class",
                n,
            ),
            Figure(
                "control_min_l2",
                float(self.classmates.min()),
                "the smallest L2 of two training images of one class",
                m,
            ),
            Figure(
                "control_mean_l2",
                float(self.classmates.mean()),
                "the mean L2 of a training image and the nearest other one of its class",
                m,
            ),
            Figure(
                "control_max_ssim",
                float(self.classmates_similarity.max()),
                "the highest SSIM of two training images of one class",
                m,
            ),
            Figure(
                "classmates_closer",
                closer,
                "the share of training images that have another one of their class at least as near as the nearest "
                "computed image is to a training image: near 1, the images look like the class at most; 0, one is "
                "nearer to a training image than any two of a class are to one another",
                m,
            ),
        )
        return Attack(name, what, seed, figures, self._findings())

    def pictures(self, count: int = 8) -> Groups:
        """The `count` images nearest to a training image, nearest first, each beside that image."""
        first = self.distance.argsort(stable=True)[:count]
        pairs = {"computed": self.images[first], "nearest": self.nearest[first], "l2": self.distance[first].float()}
        return {"pairs": pairs}

    def _findings(self) -> tuple[str, ...]:
        closer = (self.classmates <= self.distance.unsqueeze(1)).double().mean(dim=1)
        copies = int((closer < RARE).sum())
        if not copies:
            return ()
        return (
            f"{copies} of {len(self.distance)} images are nearer to a training image than {1 - RARE:.0%} of the "
            "training images are to any other of their class: look at the pictures, they may show a patient's image",
        )


def likeness(images: Tensor, labels: Tensor, training: ImageSet, streams: Streams, most: int = 1000) -> Likeness:
    """Computed or synthetic 8-bit images against the training images of their own class.

    L2 is taken to every training image, so that no copy is missed. The controls are measured on a random draw of at
    most `most` training images, and SSIM with these and the nearest alone: its time grows with the square of `most`.
    Images of classes with fewer than two drawn training images are left out, as there is nothing to hold them against;
    `BadInput` where none are left.
    """
    if images.shape[1:] != training.images.shape[1:]:
        raise BadInput(
            f"images of {tuple(images.shape[1:])} cannot be held against training images of "
            f"{tuple(training.images.shape[1:])}; give the images of the same study"
        )
    drawn = torch.zeros(len(training), dtype=torch.bool)
    drawn[torch.randperm(len(training), generator=streams.torch("audit likeness"))[:most]] = True
    parts = []
    for c in range(len(training.classes)):
        mine, members = images[labels == c], training.labels == c
        sample = torch.nonzero(drawn[members]).flatten()
        if len(mine) and len(sample) > 1:
            parts.append(_of_class(mine, training.images[members], sample))
    if not parts:
        raise BadInput(
            "no class has both a computed image and two training images, so likeness cannot be judged; give more images"
        )
    columns = zip(*parts, strict=True)
    return Likeness(*(torch.cat(column) for column in columns))


def _of_class(images: Tensor, training: Tensor, sample: Tensor) -> tuple[Tensor, ...]:
    distance, index = nearest(images, training)
    few = training[sample]
    return (
        images,
        training[index],
        distance,
        torch.maximum(best_ssim(images, few), ssim(images, training[index])),
        nearest(few, training, apart_from=sample)[0],
        best_ssim(few, few, apart_from=torch.arange(len(few))),
    )


def _share(which: Tensor) -> float:
    return float(which.double().mean())
