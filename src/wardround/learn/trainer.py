"""The one training loop: every site of every method learns here.

Images stay on the device as uint8 and are gathered by index; a set that is too large for a GPU stays where it is (in
memory, or on disk behind a mapped file), and each batch is brought over. Shuffles and augmentation draws come from the
fit's seed, on the CPU, so that the device changes nothing. The loop never waits for the device inside an epoch. On a
GPU a step that recurs often enough is captured in a CUDA graph (see `captured.py`), which is what makes small networks
fast.

Rules for small sites: a batch of one image is left out where the network has batch norm (its variance is undefined), so
a site with one image is skipped there, and trains where there is none. A fit whose loss is not finite raises
`SiteDiverged`; it never hands NaN on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from wardround.errors import SiteDiverged
from wardround.learn import nets
from wardround.learn.evaluate import batch_outputs, batch_size, network_outputs
from wardround.learn.fit import Fit, Fitted, Outputs, Recipe, Step
from wardround.learn.pixels import augment, draw_augmentation, normalise
from wardround.models import StagedNet, Weights, spec_layout
from wardround.streams import Streams

SHARE_OF_FREE = 0.5  # of a GPU's memory: networks and activations need the rest


def skip_reason(fit: Fit) -> str:
    """Why this fit cannot train, or an empty string."""
    if len(fit.data) == 0:
        return "no training images"
    if fit.recipe.epochs == 0:
        return "no epochs"
    if fit.frozen.issuperset(spec_layout(fit.spec).in_group("parameters")):
        return "every parameter is frozen"
    if spec_layout(fit.spec).has_batch_norm:
        if len(fit.data) == 1:
            return "one image is too few for batch norm"
        if fit.recipe.batch == 1:
            return "batches of one image are too small for batch norm"
    return ""


def batch_bounds(n: int, batch: int, batch_norm: bool) -> list[tuple[int, int]]:
    """Where the batches of an epoch begin and end; a lone image is left out where there is batch norm."""
    bounds = [(start, min(start + batch, n)) for start in range(0, n, batch)]
    return [(start, end) for start, end in bounds if end - start > 1 or not batch_norm]


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The rate of a step, counted from 0 over the whole fit."""
    if recipe.schedule == "cosine":
        return recipe.lr * 0.5 * (1 + math.cos(math.pi * step / (recipe.epochs * steps_per_epoch)))
    if recipe.schedule == "step":
        # The quotient, not share * epochs: 0.55 * 100 is a little more than 55, and would come one epoch late.
        passed = sum((step // steps_per_epoch) / recipe.epochs >= share for share in recipe.milestones)
        return recipe.lr * recipe.gamma**passed
    return recipe.lr


def fits_device(size: int, device: torch.device) -> bool:
    """Whether images of so many bytes may move to a device: on a GPU, where they take at most half of what is free."""
    return device.type != "cuda" or size <= SHARE_OF_FREE * torch.cuda.mem_get_info(device)[0]


TakeStep = Callable[[Tensor, Tensor | None], None]


class Trainer:
    """One fit in progress on a borrowed network. `steps()` does one step at a time, so that many can interleave."""

    def __init__(self, fit: Fit, device: torch.device, borrowed: ExitStack) -> None:
        self.fit, self.device, self.recipe = fit, device, fit.recipe
        self.net = borrowed.enter_context(nets.borrow(fit.spec, device, fit.start))
        self.net.checkpointing = fit.recipe.checkpointing
        borrowed.callback(setattr, self.net, "checkpointing", False)
        images = fit.data.images
        self.is_resident = images.device.type == "cuda" or fits_device(images.numel(), device)
        self.images = images.to(device) if self.is_resident else images
        self.labels = fit.data.labels.to(device)
        self.trained = self._freeze()
        self.rate = torch.tensor(self.recipe.lr, device=device)
        self.optimiser = make_optimiser(self.recipe, list(self.trained.values()), self.rate)
        self.loss_sum = torch.zeros((), device=device)
        self.epochs_done = 0
        self.losses: list[Tensor] = []
        self.best_right, self.best_epoch = torch.tensor([-1, 0], device=device)
        self.best_weights: Weights | None = None
        self.cached_teachers: tuple[Outputs, ...] = ()
        self.teacher_nets: list[StagedNet] = []
        self._teach(borrowed)
        fit.objective.follow(self.rate)
        fit.objective.to(str(device))

    def steps(self, captured: TakeStep | None = None, after_epoch: Callable[[], None] = lambda: None) -> Iterator[None]:
        """What is left of the fit, one optimiser step between two yields; `captured` may stand in for `step`."""
        take_step = captured or self.step
        n = len(self.images)
        bounds = batch_bounds(n, self.recipe.batch, spec_layout(self.fit.spec).has_batch_norm)
        streams = Streams(self.fit.seed)
        done, rate = self.epochs_done * len(bounds), self.recipe.lr
        for epoch in range(self.epochs_done, self.recipe.epochs):
            order = torch.randperm(n, generator=streams.torch("shuffle", index=epoch)).to(self.images.device)
            draws = None
            if self.recipe.augment:
                drawn = draw_augmentation(n, streams.torch("augment", index=epoch), self.recipe.augmentation)
                draws = drawn.to(self.device)
            self._training_mode()
            for start, end in bounds:
                new_rate = learning_rate(self.recipe, done, len(bounds))
                if new_rate != rate:
                    rate = new_rate
                    self.rate.fill_(rate)
                take_step(order[start:end], None if draws is None else draws[start:end])
                done += 1
                yield
            self.losses.append(self.loss_sum / bounds[-1][1])
            self.loss_sum.zero_()  # in place: a captured step adds to this very tensor
            self._keep_best(epoch)
            self.epochs_done = epoch + 1
            after_epoch()

    def step(self, index: Tensor, draws: Tensor | None) -> None:
        """One optimiser step on the images at `index`."""
        images = self.images[index].to(self.device)
        index = index.to(self.device)
        pixels = normalise(images if draws is None else augment(images, draws))
        with _autocast(self.recipe, self.device):
            features, logits = self.fit.objective.outputs(self.net, pixels)
            teachers = self._teacher_outputs(index, pixels)
        labels = self.labels[index]
        outputs = Outputs(features.float(), logits.float())
        loss = self.fit.objective.loss(Step(index, pixels, labels, outputs, teachers))
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.fit.objective.correct(self.trained)
        if self.recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.trained.values(), self.recipe.clip_norm)
        self.optimiser.step()
        self.loss_sum += loss.detach() * len(index)

    def result(self, seconds: float) -> Fitted:
        """The weights that are kept, after the one check that nothing became NaN."""
        losses = torch.stack(self.losses).cpu()
        weights = self.best_weights or nets.read(self.net)
        finite = torch.stack([torch.isfinite(t).all() for t in weights.values() if t.is_floating_point()]).all()
        if not (bool(torch.isfinite(losses).all()) and bool(finite)):
            raise SiteDiverged(
                f"training diverged ({self.fit.label}: the loss is no longer a finite number); "
                f"use a smaller learning rate than {self.recipe.lr:g}, or set train.clip_norm"
            )
        return Fitted(weights, len(self.images), tuple(losses.tolist()), int(self.best_epoch), seconds)

    def _freeze(self) -> dict[str, Tensor]:
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(name not in self.fit.frozen)
        return {name: p for name, p in self.net.named_parameters() if p.requires_grad}

    def _training_mode(self) -> None:
        """Train mode, but a batch-norm layer whose statistics are frozen keeps them."""
        self.net.train()
        for name, module in self.net.named_modules():
            if isinstance(module, _BatchNorm) and {f"{name}.running_mean", f"{name}.running_var"} & self.fit.frozen:
                module.eval()

    def _teach(self, borrowed: ExitStack) -> None:
        """Every teacher's outputs for every image, once, where nothing is augmented; else the teachers stand by."""
        if not self.recipe.augment:
            self.cached_teachers = tuple(
                network_outputs(t.spec, t.weights, self.images, self.device, self.recipe.precision)
                for t in self.fit.teachers
            )
            return
        for teacher in self.fit.teachers:
            net = borrowed.enter_context(nets.borrow(teacher.spec, self.device, teacher.weights))
            self.teacher_nets.append(net.eval())

    def _teacher_outputs(self, index: Tensor, pixels: Tensor) -> tuple[Outputs, ...]:
        if self.cached_teachers:
            return tuple(Outputs(t.features[index], t.logits[index]) for t in self.cached_teachers)
        with torch.no_grad():
            found = [net.outputs(pixels) for net in self.teacher_nets]
        return tuple(Outputs(features.float(), logits.float()) for features, logits in found)

    def _keep_best(self, epoch: int) -> None:
        """Remember the weights if no epoch before was better; decided on the device, so that nothing waits for it.

        Of equals the last: a site of one class is right about all of its validation images from the first epoch on, and
        should still send what it learned after it. `first-best` keeps the first of them, as FedISCA's code does.
        """
        validation = self.fit.validation
        if self.recipe.keep == "last" or validation is None or len(validation) == 0:
            self.best_epoch.fill_(epoch)
            return
        self.net.eval()
        batches = (batch.to(self.device) for batch in torch.split(validation.images, batch_size(self.device)))
        logits = torch.cat([batch_outputs(self.net, batch, self.recipe.precision).logits for batch in batches])
        right = (logits.argmax(dim=1) == validation.labels.to(self.device)).sum()
        better = right > self.best_right if self.recipe.keep == "first-best" else right >= self.best_right
        if self.best_weights is None:
            self.best_weights = nets.read(self.net)
        for name, tensor in self.net.state_dict().items():
            torch.where(better, tensor, self.best_weights[name], out=self.best_weights[name])
        self.best_right.copy_(torch.maximum(right, self.best_right))
        self.best_epoch.copy_(torch.where(better, epoch, self.best_epoch))


def train_one(
    fit: Fit, device: torch.device, on_step: Callable[[], None] = lambda: None, steps: Steps | None = None
) -> Fitted:
    """Run one fit from start to end in the calling thread; `steps` may stand in for the trainer's own."""
    reason = skip_reason(fit)
    if reason:
        return Fitted(dict(fit.start), 0, (), 0, 0.0, reason)
    began = time.perf_counter()
    with ExitStack() as borrowed:
        trainer = Trainer(fit, device, borrowed)
        for _ in trainer.steps() if steps is None else steps(trainer, lambda: None):
            on_step()
        return trainer.result(time.perf_counter() - began)


# Other steps than a trainer's own: one optimiser step between two yields, the last argument called after each epoch.
Steps = Callable[[Trainer, Callable[[], None]], Iterator[None]]


def _autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16", cache_enabled=False)


def make_optimiser(recipe: Recipe, parameters: list[Tensor], rate: Tensor) -> torch.optim.Optimizer:
    """Fused kernels; the rate is a tensor on the device, so that a captured step sees it change."""
    decay = recipe.weight_decay
    if recipe.optimiser == "adam":
        return torch.optim.Adam(parameters, lr=rate, weight_decay=decay, fused=True, capturable=rate.is_cuda)
    return torch.optim.SGD(parameters, lr=rate, momentum=recipe.momentum, weight_decay=decay, fused=True)


def optimiser_state(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimiser carries from step to step (momentum; Adam's moments and step) by place and name: `0.step`."""
    return {
        f"{place}.{name}": tensor
        for place, parameter in enumerate(_parameters(optimiser))
        for name, tensor in optimiser.state.get(parameter, {}).items()
        if tensor is not None
    }


def restore_optimiser(optimiser: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Take back what `optimiser_state` gave. Not by `load_state_dict`, which would put a copy in the rate's place.

    Moments are laid out in memory as their parameters are: fused kernels walk along both.
    """
    parameters = _parameters(optimiser)
    for path, saved in state.items():
        place, _, name = path.partition(".")
        parameter = parameters[int(place)]
        like = parameter if saved.shape == parameter.shape else saved
        optimiser.state[parameter][name] = torch.empty_like(like, device=parameter.device).copy_(saved)


def _parameters(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]
