"""`dense`, `coboosting` and `dafl` on two tiny sites, for the tests of the methods that train a generator."""

from __future__ import annotations

from functools import cache
from typing import Any

import tiny
from tiny import context, drive, federation
from wardround.data.federation import Federation
from wardround.exchange.bundle import Bundle
from wardround.methods.base import Context
from wardround.methods.coboosting import CoBoosting
from wardround.methods.dafl import DAFL
from wardround.methods.dense import DENSE
from wardround.methods.distilled import Distilled
from wardround.methods.state import State
from wardround.settings import checked
from wardround.study import Study

KINDS: dict[str, type[Distilled]] = {"dense": DENSE, "coboosting": CoBoosting, "dafl": DAFL}
ALL = sorted(KINDS)
OWN: dict[str, dict[str, Any]] = {
    "dense": {"epochs": 3, "batch": 6, "codes": 5, "generator_steps": 3, "lr": 0.02},
    "coboosting": {"epochs": 3, "batch": 6, "codes": 5, "generator_steps": 3, "lr": 0.02},
    "dafl": {"epochs": 3, "batch": 6, "codes": 5, "turns": 2, "kd_steps": 2, "lr": 0.02},
}


def study(of: Federation, name: str, **changes: Any) -> Study:
    return tiny.study(of, method=name, **{"rounds": 1, **changes})


def method(name: str, **changes: Any) -> Any:
    kind = KINDS[name]
    return kind(checked(kind.Settings, {**OWN[name], **changes}, prefix=name))


@cache
def data() -> Federation:
    return federation((9, 6))


def uploads(ctx: Context, of: Federation) -> dict[str, Bundle]:
    """What the sites really send."""
    asked = method(ctx.study.settings.method)
    requests = asked.ask(ctx, State())
    return {site.name: drive(ctx, asked.answer(ctx, site, requests[site.name], State())).bundle for site in of.sites}


@cache
def usual(name: str) -> dict[str, Bundle]:
    return uploads(context(study(data(), name)), data())


def begin(name: str, **changes: Any) -> tuple[Context, dict[str, Bundle]]:
    ctx = context(study(data(), name, **changes))
    return ctx, uploads(ctx, data()) if changes else usual(name)
