"""`dense`: Zhang et al., DENSE: Data-Free One-Shot Federated Learning, NeurIPS 2022.

Each epoch a generator begins anew and is trained, together with the codes it starts from, so that its images x have
three virtues (the paper's L_gen = L_CE + λ₁ L_BN + λ₂ L_div, with D(x) the mean of the sites' logits):

    L_CE = CE(D(x), y)                       similarity: they look like the label they were drawn for
    L_BN = mean over sites of Σ_l ‖μ_l(x) − μ_l‖ + ‖σ²_l(x) − σ²_l‖     stability: the sites' statistics hold
    L_div = −mean ω·KL(D(x) ‖ f_S(x)), ω = 1 where the student's class is another than D's   transferability

The images of lowest loss join a pool, and the student learns D on one pass over all of it: T²·KL at temperature T.

What the paper leaves open, and what its public code really does. The code's L_BN is always zero: the ensemble keeps its
networks in a plain list, so no batch-norm layer is found; here it is applied, and `bn_weight = 0` is what was released.
L_div has temperature 1 and passes through a student in evaluation mode. Values are the README's: weights of 1, 30
generator steps, distillation at temperature 20 and a constant rate of 0.005, 200 epochs, batches of 256. The code's
networks see pixels in 0..1; ours see -1..1, so the generator's output is mapped to that. Crops are out of images padded
by their own edge (the code: by black), as elsewhere in this package; the code leaves crops out of distillation for sets
other than CIFAR (`augment = "flip"`). The pool holds bytes, as the code's pictures. A pass over a growing pool
makes the whole quadratic in `epochs`; `kd_steps` caps a pass.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from wardround.errors import BadInput
from wardround.learn.distillation import distillation
from wardround.learn.predictor import Member
from wardround.learn.replay import Replay
from wardround.methods.base import Context
from wardround.methods.distilled import Distilled, Epochs, Midway
from wardround.methods.parts import Parts
from wardround.methods.state import State
from wardround.models import spec_layout
from wardround.settings import Count, Frozen, NotNegative, Positive, Share
from wardround.study import Study
from wardround.synthesis.gallery import one_of_each, trail_of_epochs
from wardround.synthesis.generator import BatchMaker, ImageGenerator, settled_logits, view
from wardround.synthesis.pool import Augmentation, Pool, cropped, draw_crops
from wardround.synthesis.student import Student
from wardround.synthesis.teachers import Teachers, View

POOL, MAKER = "pool", "maker"  # what was made, and what is making more


class DENSE(Distilled):
    """A generator per epoch, a growing pool, a pass over it."""

    name = "dense"
    paper = "Zhang et al., NeurIPS 2022"
    summary = "one student distilled on images of a generator that seeks where it disagrees with the sites' models"

    class Settings(Frozen):
        """The generator's, then the student's."""

        epochs: Count = 200
        shots: Count | None = None  # exchanges with the sites; None: as many as `rounds` says where set, else one
        batch: Annotated[int, Field(ge=2)] = 256  # of the generator and of the student
        codes: Count = 256  # numbers that an image is made from
        generator_steps: Count = 30
        generator_lr: Positive = 1e-3
        label_weight: NotNegative = 1.0
        bn_weight: NotNegative = 1.0  # λ₁
        adversarial_weight: NotNegative = 1.0  # λ₂
        augment: Augmentation = "crop"
        kd_steps: Annotated[int, Field(ge=0)] = 0  # of one epoch at most; 0: a whole pass
        temperature: Positive = 20.0
        lr: Positive = 5e-3  # constant
        momentum: Share = 0.9
        weight_decay: NotNegative = 0.0

    def check(self, study: Study) -> None:
        """Batch-norm statistics must be there if they are to be matched."""
        check_statistics(self.name, study, self.settings.bn_weight)
        self.check_shots(study)

    def rate(self, epoch: int) -> float:
        """Constant."""
        return float(self.settings.lr)

    def epochs(self, ctx: Context, state: State, members: list[Member], student: Student, begun: int) -> Epochs:
        """A batch of images for the pool, then a pass over it."""
        study, s, device = ctx.study, self.settings, ctx.device.torch
        precision = study.settings.train.precision
        shape = study.image_shape
        teachers = Teachers(members, device, precision)
        pool = Pool(s.epochs * s.batch, shape, device)
        pool.restore(state.groups.get(POOL, {}))

        def generator_loss(images: Tensor, labels: Tensor, crops: Tensor) -> Tensor:
            pixels = cropped(images, crops)
            return self.loss(view(teachers, pixels, s.bn_weight > 0), settled_logits(student, pixels), labels)

        def distil(index: Tensor, crops: Tensor) -> None:
            pixels = pool.pixels(index, crops)
            student.step(distillation(teachers.logits(pixels), student.logits(pixels), s.temperature))

        generator = ImageGenerator(shape, s.codes, device, lr=s.generator_lr, learned=s.batch, precision=precision)
        maker, lesson = BatchMaker(generator, generator_loss), Replay(distil, device)
        self.trail = trail = trail_of_epochs(study.classes, s.epochs, state)
        parts = Parts(ctx, self.watch, state.facts.get("midway"))
        for epoch in range(begun, s.epochs):
            if "distillation" not in parts.done:  # else this epoch was stopped after its images had joined the pool
                draw = ctx.streams.torch("synthesis", round=ctx.round, index=epoch)
                drawn = torch.randint(len(study.classes), (s.batch,), generator=draw)
                labels = drawn.to(device)
                crops = draw_crops(s.generator_steps * s.batch, "crop", draw).to(device)
                inputs = [(labels, crop) for crop in crops.view(s.generator_steps, s.batch, -1)]
                maker.begin(draw)
                if parts.done:
                    maker.restore(state.groups[MAKER])
                for _ in parts.run_all("synthesis", maker.step, inputs):
                    yield Midway({POOL: pool.state(), MAKER: maker.state()}, dict(parts.done))
                images = maker.made()
                pool.add(images, labels)
                trail.see(epoch, one_of_each(images, drawn.tolist(), len(study.classes)))
            order = ctx.streams.torch("distillation", round=ctx.round, index=epoch)
            lessons = pool.one_pass(s.batch, s.kd_steps, s.augment, order)
            student.set_rate(self.rate(epoch))
            for _ in parts.run_all("distillation", lesson, lessons):
                yield Midway({POOL: pool.state()}, dict(parts.done))
            parts.done = {}
            yield epoch, {POOL: pool.state()}

    def loss(self, seen: View, student: Tensor, labels: Tensor) -> Tensor:
        """L_gen of images that the teachers have viewed and the student has answered."""
        s, mean = self.settings, seen.mean
        loss: Tensor = F.cross_entropy(mean, labels) * s.label_weight
        loss = loss - disagreement(mean, student) * s.adversarial_weight
        return loss + torch.stack(seen.gaps).mean() * s.bn_weight if seen.gaps else loss


def disagreement(teacher: Tensor, student: Tensor) -> Tensor:
    """The mean over the batch of KL(teacher ‖ student), counted only where their classes differ."""
    apart = F.kl_div(student.log_softmax(dim=1), teacher.log_softmax(dim=1), reduction="none", log_target=True)
    differ = teacher.argmax(dim=1) != student.argmax(dim=1)
    return (apart.sum(dim=1) * differ).mean()


def check_statistics(method: str, study: Study, bn_weight: float) -> None:
    """Refuse a site whose network has no statistics where they are to be matched."""
    for site in study.sites:
        spec = study.spec(site)
        if bn_weight > 0 and not spec_layout(spec).has_batch_norm:
            raise BadInput(
                f"{method} matches batch-norm statistics, and {spec.name} ({site}) has none; "
                f"use small, a resnet, wrn16-2 or a vgg, or set {method}.bn_weight to 0"
            )
