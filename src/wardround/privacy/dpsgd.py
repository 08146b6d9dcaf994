"""DP-SGD: each image's gradient clipped, their sum noised, then an ordinary optimiser step (Abadi et al., CCS 2016).

Clipping and scaling are Opacus'; the batches and the noise come from the site's secret, never from the study's streams:
whoever knew which images were in a batch, or the noise, could undo the protection. Batches are Poisson draws, as the
accountant assumes, so one may be empty or large; the sum is always divided by the mean batch size.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wardround.errors import BadInput
from wardround.learn.fit import Fit, Fitted, Step
from wardround.learn.pixels import augment, draw_augmentation, normalise
from wardround.learn.trainer import Trainer, learning_rate, skip_reason
from wardround.privacy.account import Spent, rate_and_steps
from wardround.privacy.per_image import gradients, images_at_once
from wardround.privacy.secret import Secret
from wardround.streams import Streams
from wardround.tensorfile import canonical


@dataclass(frozen=True)
class Mechanism:
    """How much one image may move a step: `clip` is the norm of its gradient, `noise` the deviation over `clip`."""

    clip: float
    noise: float


def cost(fit: Fit, mechanism: Mechanism) -> tuple[Spent, ...]:
    """What a fit costs, before it is trained."""
    if skip_reason(fit):
        return ()
    rate, steps = rate_and_steps(len(fit.data), fit.recipe.batch, fit.recipe.epochs)
    return (Spent(mechanism.noise, rate, steps),)


def train_private(
    fit: Fit, mechanism: Mechanism, secret: Secret, device: torch.device, on_step: Callable[[], None] = lambda: None
) -> Fitted:
    """One fit from start to end. The same fit under the same secret gives the same weights."""
    reason = skip_reason(fit)
    if reason:
        return Fitted(dict(fit.start), 0, (), 0, 0.0, reason)
    began = time.perf_counter()
    with ExitStack() as borrowed:
        trainer = Trainer(fit, device, borrowed)
        _PrivateSteps(trainer, mechanism, secret).run(on_step)
        return trainer.result(time.perf_counter() - began)


class _PrivateSteps:
    """The steps of one fit, over an ordinary trainer's network, optimiser and teachers."""

    def __init__(self, trainer: Trainer, mechanism: Mechanism, secret: Secret) -> None:
        self.trainer, self.fit, self.mechanism = trainer, trainer.fit, mechanism
        self.generator = secret.numpy(f"dp-sgd|{_identity(self.fit)}|{mechanism}")
        recipe = self.fit.recipe
        self.rate, self.steps = rate_and_steps(len(self.fit.data), recipe.batch, recipe.epochs)
        self.optimiser = _private_optimiser(trainer.optimiser, mechanism, recipe.batch, self.generator)

    def run(self, on_step: Callable[[], None]) -> None:
        trainer, recipe, n = self.trainer, self.fit.recipe, len(self.fit.data)
        per_epoch = self.steps // recipe.epochs
        trainer.net.train()
        for epoch in range(recipe.epochs):
            draws = None
            if recipe.augment:
                stream = Streams(self.fit.seed).torch("augment", index=epoch)
                draws = draw_augmentation(n, stream, recipe.augmentation)
            seen = 0
            for number in range(per_epoch):
                trainer.rate.fill_(learning_rate(recipe, epoch * per_epoch + number, per_epoch))
                chosen = torch.from_numpy(np.flatnonzero(self.generator.random(n) < self.rate))
                self.step(chosen, None if draws is None else draws[chosen])
                seen += len(chosen)
                on_step()
            trainer.losses.append(trainer.loss_sum / max(seen, 1))
            trainer.loss_sum.zero_()

    def step(self, chosen: Tensor, draws: Tensor | None) -> None:
        """One optimiser step on the images of a batch; an empty one is noise alone."""
        trainer, optimiser = self.trainer, self.optimiser
        at_once = images_at_once(trainer.trained)
        for start in range(0, len(chosen), at_once):
            part = slice(start, start + at_once)
            self._add(chosen[part], None if draws is None else draws[part])
        if not len(chosen):
            for parameter in trainer.trained.values():
                parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))  # type: ignore[attr-defined]
            optimiser.clip_and_accumulate()
        optimiser.add_noise()
        optimiser.scale_grad()
        self.fit.objective.correct(trainer.trained)
        optimiser.original_optimizer.step()
        for parameter in trainer.trained.values():
            parameter.summed_grad = parameter.grad_sample = None  # type: ignore[attr-defined]

    def _add(self, index: Tensor, draws: Tensor | None) -> None:
        """Clip these images' gradients and add them to the sum."""
        trainer = self.trainer
        images = trainer.images[index.to(trainer.images.device)].to(trainer.device)
        pixels = normalise(images if draws is None else augment(images, draws.to(trainer.device)))
        index = index.to(trainer.device)
        teachers = trainer._teacher_outputs(index, pixels)
        whole = Step(index, pixels, trainer.labels[index], None, teachers)  # type: ignore[arg-type]
        found, loss = gradients(trainer.net, self.fit.objective, whole, trainer.trained)
        for name, parameter in trainer.trained.items():
            parameter.grad_sample = found[name]  # type: ignore[attr-defined]
        self.optimiser.clip_and_accumulate()
        trainer.loss_sum += loss.detach()


def _private_optimiser(
    optimiser: torch.optim.Optimizer, mechanism: Mechanism, batch: int, generator: np.random.Generator
) -> Any:
    """Opacus' optimiser with the noise of the site's secret."""
    try:
        from opacus.optimizers import DPOptimizer
    except ImportError as error:
        raise BadInput("training with privacy needs Opacus: pip install 'wardround[privacy]'") from error

    class FromSecret(DPOptimizer):  # type: ignore[misc]
        def add_noise(self) -> None:
            deviation = self.noise_multiplier * self.max_grad_norm
            for parameter in self.params:
                draw = generator.standard_normal(tuple(parameter.shape), dtype=np.float32)
                noise = torch.from_numpy(np.asarray(draw)).to(parameter.device)
                # Laid out in memory as the parameter is: the fused optimiser walks along both.
                parameter.grad = torch.empty_like(parameter).copy_(parameter.summed_grad + deviation * noise)

    return FromSecret(
        optimiser, noise_multiplier=mechanism.noise, max_grad_norm=mechanism.clip, expected_batch_size=batch
    )


def _identity(fit: Fit) -> str:
    """A hash of what is trained: two fits that differ in anything must not share their noise."""
    return hashlib.sha256(canonical({**fit.ingredients(), "label": fit.label}).encode()).hexdigest()
