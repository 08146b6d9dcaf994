"""What each site has seen: its label counts as it tells them, held to what can be, or guessed from its model.

`methods/trust.py` has the rules; this asks them for a study's sites, and notes whatever is not believed. `consult` and
`consult-distilled` weigh models by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wardround.exchange.bundle import LABEL_COUNTS, SIZE, Bundle
from wardround.exchange.payload import Group
from wardround.learn.predictor import Member
from wardround.methods.base import Context
from wardround.methods.oneshot import of_noise
from wardround.methods.state import State
from wardround.methods.trust import MOST, guessed, held_to_model, plausible, spread, still
from wardround.privacy.counts import binned
from wardround.privacy.plan import trains_privately
from wardround.study import Study

ABSURD = 2**40  # images, more than which nobody has; sums of more would overflow
NOTED = 0.9  # of what a site tells: a note names it where less is believed


def counts_group(study: Study, how: str) -> tuple[Group, ...]:
    """What may leave of the counts; a site's policy may leave them out."""
    shape = {"counts": ((len(study.classes),), "int64")}
    words = {"exact": "exactly", "binned": "to the lower end of a coarse bin"}
    what = f"how many images of each class the site trained on, {words.get(how, '')}"
    return () if how == "none" else (Group(LABEL_COUNTS, what, 8 * len(study.classes), shape, optional=True),)


def told(how: str, counts: Tensor) -> dict[str, dict[str, Tensor]]:
    """The group of counts as the setting says, or none."""
    return {} if how == "none" else {LABEL_COUNTS: {"counts": binned(counts) if how == "binned" else counts}}


def seen_by_sites(ctx: Context, kept: State, answers: Mapping[str, Bundle]) -> dict[str, Tensor]:
    """The counts of every site whose model is kept: its own word, or a guess from its model, which is noted."""
    found, silent = {}, []
    for site, weights in kept.groups.items():
        counts, images = answers[site].group(LABEL_COUNTS).get("counts"), int(answers[site].group(SIZE)["images"])
        if counts is None:
            silent.append(site)
            found[site] = guessed(weights, min(images, ABSURD)).round().long()
        else:
            found[site] = _possible(ctx, site, counts, images)
    if silent:
        ctx.note(f"what {', '.join(silent)} trained on was not told, and is guessed from the models alone")
    epsilon = ctx.study.settings.privacy.counts_epsilon
    if epsilon is not None and len(silent) < len(found):
        ctx.note(
            f"label counts came in coarse bins and with noise: of one image, (ε, δ) = ({epsilon:g}, 0) of the counts"
        )
    held = _as_models_show(ctx, kept, found, silent)
    _note_large(ctx, held)
    return held


def _possible(ctx: Context, site: str, told: Tensor, images: int) -> Tensor:
    """What a site tells, as far as it can be: no count below 0, and no more in all than the images it trained on.

    Noise may add a few of either, and coarse bins may leave nothing of a site with a handful of every class.
    """
    counts = told.clamp(0, ABSURD)
    noised = ctx.study.settings.privacy.counts_epsilon is not None
    if not noised and not torch.equal(counts, told):
        ctx.note(f"{site} tells of counts that cannot be, from {int(told.min()):,} to {int(told.max()):,}")
    total = int(counts.sum())
    if not noised and total > images:
        ctx.note(f"{site} tells of {total:,} images by class and of {images:,} in all; its counts are scaled to these")
        counts = (counts.double() * (images / total)).round().long()
    if total == 0:
        ctx.note(f"{site} tells of no image of any class, so its model is heard about none")
    return counts


def _note_large(ctx: Context, counts: Mapping[str, Tensor]) -> None:
    """Name the sites that are not believed to have trained on as many images as they say."""
    table = torch.stack([counts[site] for site in counts]).double()
    for site, told, believed in zip(counts, table.sum(dim=1), plausible(table).sum(dim=1), strict=True):
        if believed < NOTED * told:
            ctx.note(
                f"{site} tells of {told:,.0f} images, more than {MOST:g} times what the others have on average; it is "
                f"heard as if it had {believed:,.0f}"
            )


def _as_models_show(
    ctx: Context, kept: State, counts: Mapping[str, Tensor], silent: Sequence[str]
) -> dict[str, Tensor]:
    """The counts less what the models contradict, which is noted where it is more than a tenth of what a site tells.

    Of a model that was never trained none count; it stays in the panel, for its site to compare with. What classes it
    shows is asked only of networks that began with small random weights, and were trained without noise on them.
    """
    settings, held = ctx.study.settings, dict(counts)
    held |= {site: torch.zeros_like(counts[site]) for site in untrained(ctx, kept.groups)}
    if ctx.round > 0 or settings.model.weights is not None or trains_privately(settings.privacy):
        return held
    for site, before in held.items():
        held[site] = held_to_model(before.double(), kept.groups[site]).round().long()
        if site not in silent and int(held[site].sum()) < NOTED * int(before.sum()):
            ctx.note(_doubted(ctx, site, before, held[site]))
    return held


def untrained(ctx: Context, models: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Sites whose models tell no image from another, unlike others of their kind; a note names them."""
    found: list[str] = []
    for spec in dict.fromkeys(map(ctx.study.spec, models)):
        alike = [site for site in models if ctx.study.spec(site) == spec]
        said = [of_noise(ctx, Member(spec, dict(models[site]))) for site in alike]
        nothing = still(torch.stack([spread(logits) for logits in said])).tolist()
        found += [site for site, none in zip(alike, nothing, strict=True) if none]
    for site in found:
        ctx.note(f"the model of {site} says nearly the same of every image, as if never trained; it is not heard")
    return found


def _doubted(ctx: Context, site: str, before: Tensor, after: Tensor) -> str:
    """What is not believed of a site's counts, in words."""
    classes = ", ".join(ctx.study.classes[c] for c in torch.nonzero(after < before).flatten().tolist())
    images, lost = int(before.sum()), int(before.sum() - after.sum())
    noised = ctx.study.settings.privacy.counts_epsilon is not None
    who = f"the counts of {site}, with their noise, tell" if noised else f"{site} tells"
    what = f"{who} of images of {classes} that its model does not show, or did not learn from"
    return f"{what}; {lost:,} of its {images:,} images are not counted"
