"""DP-SGD: each image's gradient clipped, their sum noised, then an ordinary optimiser step (Abadi et al., CCS 2016).

Clipping and scaling are Opacus'; the batches and the noise come from the site's secret, never from the study's streams:
whoever knew which images were in a batch, or the noise, could undo the protection. Batches are Poisson draws, as the
accountant assumes, so one may be empty or large; the sum is always divided by the mean batch size.

Each epoch has a generator of its own, so that a fit that was stopped goes on from its last epoch with the very draws it
would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wardround.errors import BadInput
from wardround.learn.fit import Fit, Fitted, Step
from wardround.learn.pixels import augment, draw_augmentation, normalise
from wardround.learn.resumable import progress_key, train_resumable
from wardround.learn.trainer import Trainer, learning_rate, skip_reason, train_one
from wardround.privacy.account import Spent, rate_and_steps
from wardround.privacy.per_image import gradients, images_at_once
from wardround.privacy.secret import Secret
from wardround.streams import Streams


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
    fit: Fit,
    mechanism: Mechanism,
    secret: Secret,
    device: torch.device,
    on_step: Callable[[], None] = lambda: None,
    progress_file: Path | None = None,
) -> Fitted:
    """One fit, from where `progress_file` stands if there is one. The same fit and secret give the same weights.

    A file that is given is kept when the fit is done (see `train_resumable`); to delete it is the caller's.
    """
    steps = _Steps(identity(fit, mechanism), mechanism, secret)
    if progress_file is None:
        return train_one(fit, device, on_step, steps)
    return train_resumable(fit, device, progress_file, on_step, keep_finished=True, steps=steps, salt=steps.salt())


@dataclass(frozen=True)
class _Steps:
    """What a trainer does in the place of its own steps; `what` is the identity of the fit before it began."""

    what: str
    mechanism: Mechanism
    secret: Secret

    def __call__(self, trainer: Trainer, after_epoch: Callable[[], None]) -> Iterator[None]:
        return _PrivateSteps(trainer, self.mechanism, self.draws).run(after_epoch)

    def draws(self, epoch: int) -> np.random.Generator:
        """Where the batches and the noise of an epoch come from."""
        return self.secret.numpy(f"dp-sgd|{self.what}", index=epoch)

    def salt(self) -> tuple[str, str]:
        """What tells a file of another secret from one of this; nothing can be learned of the secret from it."""
        return self.what, self.secret.numpy(f"progress|{self.what}").bytes(16).hex()


class _PrivateSteps:
    """The steps of one fit, over an ordinary trainer's network, optimiser and teachers."""

    def __init__(self, trainer: Trainer, mechanism: Mechanism, draws: Callable[[int], np.random.Generator]) -> None:
        self.trainer, self.fit, self.draws = trainer, trainer.fit, draws
        recipe, n = self.fit.recipe, len(self.fit.data)
        self.rate, self.steps = rate_and_steps(n, recipe.batch, recipe.epochs)
        self.optimiser = _private_optimiser(trainer.optimiser, mechanism, min(recipe.batch, n))

    def run(self, after_epoch: Callable[[], None]) -> Iterator[None]:
        """What is left of the fit, one step between two yields."""
        trainer, recipe, n = self.trainer, self.fit.recipe, len(self.fit.data)
        per_epoch = self.steps // recipe.epochs
        trainer.net.train()
        for epoch in range(trainer.epochs_done, recipe.epochs):
            secret = self.optimiser.secret = self.draws(epoch)
            draws = None
            if recipe.augment:
                stream = Streams(self.fit.seed).torch("augment", index=epoch)
                draws = draw_augmentation(n, stream, recipe.augmentation)
            seen = 0
            for number in range(per_epoch):
                trainer.rate.fill_(learning_rate(recipe, epoch * per_epoch + number, per_epoch))
                chosen = torch.from_numpy(np.flatnonzero(secret.random(n) < self.rate))
                self.step(chosen, None if draws is None else draws[chosen])
                seen += len(chosen)
                yield
            trainer.losses.append(trainer.loss_sum / max(seen, 1))
            trainer.loss_sum.zero_()
            trainer.best_epoch.fill_(epoch)
            trainer.epochs_done = epoch + 1
            after_epoch()

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


def _private_optimiser(optimiser: torch.optim.Optimizer, mechanism: Mechanism, batch: int) -> Any:
    """Opacus' optimiser with noise from its attribute `secret`, a generator of the site's."""
    try:
        from opacus.optimizers import DPOptimizer
    except ImportError as error:
        raise BadInput("training with privacy needs Opacus: pip install 'wardround[privacy]'") from error

    class FromSecret(DPOptimizer):  # type: ignore[misc]
        secret: np.random.Generator

        def add_noise(self) -> None:
            deviation = self.noise_multiplier * self.max_grad_norm
            for parameter in self.params:
                draw = self.secret.standard_normal(tuple(parameter.shape), dtype=np.float32)
                noise = torch.from_numpy(np.asarray(draw)).to(parameter.device)
                # Laid out in memory as the parameter is: the fused optimiser walks along both.
                parameter.grad = torch.empty_like(parameter).copy_(parameter.summed_grad + deviation * noise)

    return FromSecret(
        optimiser, noise_multiplier=mechanism.noise, max_grad_norm=mechanism.clip, expected_batch_size=batch
    )


def identity(fit: Fit, mechanism: Mechanism) -> str:
    """A hash of all that is trained, and how: two fits that differ in anything must not share their noise.

    The objective and its teachers count, too: a coordinator who has a round done again may send the same weights to a
    site whose memory, and so a teacher, has changed since. The same noise on both would leave their difference bare.
    """
    return progress_key(fit, (fit.label, str(mechanism)))
