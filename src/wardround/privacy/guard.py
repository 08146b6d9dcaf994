"""What stands between a site's images and its boundary: private training, noise on what else leaves, and the account.

A `Guard` belongs to one site in one study. It does the site's `Fit`s itself, one after the other, so no method and no
transport knows; it changes a bundle before the site's policy sees it; and it says what has been spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from wardround.data.federation import Site
from wardround.errors import SiteFailed
from wardround.exchange.bundle import LABEL_COUNTS, Bundle
from wardround.learn.fit import Fit, Fitted
from wardround.learn.side_by_side import count_steps
from wardround.methods.base import Method, Work
from wardround.privacy.account import Account, Spent, SpentRow, noise_for, of_rows, rate_and_steps
from wardround.privacy.counts import binned, noised
from wardround.privacy.dpsgd import Mechanism, cost, train_private
from wardround.privacy.features import protected
from wardround.privacy.plan import OF_FEATURES, count_tables, is_on, trains_privately
from wardround.privacy.secret import Secret
from wardround.progress import NO_PROGRESS, Silent
from wardround.study import Study

T = TypeVar("T")
ROUNDING = 1e-9


@dataclass
class Guard:
    """`account` grows with every fit, `counted` with every table of counts that left.

    `unfinished` is a folder for how far each fit is, so that one that was stopped goes on; who gives it clears it when
    what the fits were for is stored. `whole` is what the study costs if all of it is trained.
    """

    study: Study
    site: str
    mechanism: Mechanism | None
    secret: Secret
    account: Account
    tables: int = 0  # of counts that the whole study may send
    counted: int = 0
    on_fit: Callable[[Fit, Fitted], None] = lambda fit, fitted: None
    on_spent: Callable[[SpentRow], None] = lambda row: None
    progress: Silent = field(default=NO_PROGRESS)
    unfinished: Path | None = None
    whole: float = 0.0
    fits: int = 0  # that were trained here

    # Training ---------------------------------------------------------------------------------------------------------

    def doing(self, work: Work[T], device: torch.device) -> Work[T]:
        """The same work, whose fits are trained here and never asked of anyone."""
        if self.mechanism is None:
            return (yield from work)
        move: Callable[[], Fit] = lambda: next(work)  # noqa: E731
        while True:
            try:
                fit = move()
            except StopIteration as stop:
                result: T = stop.value
                return result
            try:
                fitted = self._train(fit, device)
            except SiteFailed as failure:
                move = lambda failure=failure: work.throw(failure)  # type: ignore[misc] # noqa: E731
            else:
                move = lambda fitted=fitted: work.send(fitted)  # type: ignore[misc] # noqa: E731

    def _train(self, fit: Fit, device: torch.device) -> Fitted:
        assert self.mechanism is not None  # noqa: S101 - `doing` asks first
        price = cost(fit, self.mechanism)
        after, limit = self.account.after(*price), self.study.settings.privacy.epsilon
        if limit is not None and after.epsilon() + self._of_counts(self.tables) > limit + ROUNDING:
            raise SiteFailed(
                f"the privacy budget is spent: {fit.label} would take ε from {self.account.epsilon():.3g} to "
                f"{after.epsilon():.3g}, and privacy.epsilon is {limit:g}"
            )
        with self.progress.task(f"{fit.label}, with privacy", count_steps(fit)) as advance:
            file = None if self.unfinished is None else self.unfinished / f"private-{self.fits}.safetensors"
            fitted = train_private(fit, self.mechanism, self.secret, device, advance, file)
        self.fits += 1
        self.account = after
        self.on_fit(fit, fitted)
        for spent in price:
            row = SpentRow(
                site=self.site,
                mechanism="dp-sgd",
                steps=spent.steps,
                noise=spent.noise,
                rate=spent.rate,
                clip=self.mechanism.clip,
                **self.spent(),
            )
            self.on_spent(row)
        return fitted

    # What leaves ------------------------------------------------------------------------------------------------------

    def outgoing(self, bundle: Bundle) -> Bundle:
        """The bundle as it may leave: features cut and noised, counts noised and binned, by the study's settings."""
        privacy, round = self.study.settings.privacy, bundle.envelope.round
        groups = {name: dict(tensors) for name, tensors in bundle.groups.items()}
        if privacy.feature_clip is not None:
            for group, name in OF_FEATURES.items():
                if group not in groups:
                    continue
                if name not in groups[group]:
                    raise SiteFailed(
                        f"{group} would leave as it is: it has no tensor {name!r} for privacy.feature_clip"
                    )
                draw = self.secret.numpy(f"features|{bundle.sha256()}|{group}", self.site, round)
                rows = groups[group][name]
                groups[group][name] = protected(rows, privacy.feature_clip, privacy.feature_noise, draw)
        if privacy.counts_epsilon is not None and LABEL_COUNTS in groups:
            for name, counts in groups[LABEL_COUNTS].items():
                draw = self.secret.numpy(f"counts|{bundle.sha256()}|{name}", self.site, round)
                groups[LABEL_COUNTS][name] = binned(noised(counts, privacy.counts_epsilon, draw)).to(counts)
                self._pay_for_a_table()
                self.on_spent(SpentRow(site=self.site, mechanism="counts", steps=1, **self.spent()))
        return replace(bundle, groups=groups)

    def promised(self) -> dict[str, float]:
        """What all of the study will have cost at most; nothing where nothing is promised."""
        if self.mechanism is None:
            return {}
        privacy = self.study.settings.privacy
        if privacy.epsilon is not None:
            return {"epsilon": privacy.epsilon, "delta": privacy.delta}
        return {"epsilon": max(self.whole, self.spent()["epsilon"]), "delta": privacy.delta}

    def spent(self) -> dict[str, float]:
        """(ε, δ) of all that has been trained and counted so far, by the Rényi accountant and simple composition."""
        if self.mechanism is None:
            return {}
        return {"epsilon": self.account.epsilon() + self._of_counts(self.counted), "delta": self.account.delta}

    def _pay_for_a_table(self) -> None:
        """One more table of counts; a round that is asked for again must not get another draw for nothing."""
        if self.mechanism is not None and self.counted >= self.tables:
            raise SiteFailed(
                f"the privacy budget is spent: {self.counted} tables of label counts have left, and no more are due"
            )
        self.counted += 1

    def _of_counts(self, tables: int) -> float:
        return (self.study.settings.privacy.counts_epsilon or 0.0) * tables


def guard_for(
    study: Study, method: Method, site: Site, secret: Secret, rows: Iterable[SpentRow] = (), **watchers: Any
) -> Guard | None:
    """The guard of a site that has trained what `rows` say; None where the study's privacy is off."""
    privacy = study.settings.privacy
    if not is_on(privacy):
        return None
    tables = count_tables(study, method)
    noise = _noise(study, len(site.train), tables) if trains_privately(privacy) else None
    whole = 0.0 if noise is None else _whole(study, len(site.train), noise) + (privacy.counts_epsilon or 0.0) * tables
    mine = [row for row in rows if row.site == site.name]
    return Guard(
        study,
        site.name,
        None if noise is None else Mechanism(privacy.clip, noise),
        secret.within(study.id),
        of_rows(privacy.delta, mine),
        tables,
        sum(row.mechanism == "counts" for row in mine),
        whole=whole,
        **watchers,
    )


def _noise(study: Study, images: int, tables: int) -> float:
    """As set, or the least at which the whole study stays within ε."""
    privacy = study.settings.privacy
    if privacy.noise is not None:
        return privacy.noise
    assert privacy.epsilon is not None  # noqa: S101 - one of the two is set
    if images == 0 or study.total_epochs == 0:
        return 1.0  # nothing will be trained
    rate, steps = rate_and_steps(images, study.settings.train.batch, study.total_epochs)
    left = privacy.epsilon - (privacy.counts_epsilon or 0.0) * tables
    return noise_for(left, privacy.delta, rate, steps)


def _whole(study: Study, images: int, noise: float) -> float:
    """ε of every step that the study may take at a site of so many images."""
    if images == 0 or study.total_epochs == 0:
        return 0.0
    spent = Spent(noise, *rate_and_steps(images, study.settings.train.batch, study.total_epochs))
    return Account(study.settings.privacy.delta, (spent,)).epsilon()


NO_GUARDS: Mapping[str, Guard] = MappingProxyType({})
