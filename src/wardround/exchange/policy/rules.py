"""The rules themselves: what each one forbids, of a method's declaration and of a bundle.

A refusal may reach the coordinator, as a reason for not answering. So its text never tells what a rule protects: not
which class has few images, nor how few.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag
from torch import Tensor

from wardround.errors import BadInput
from wardround.exchange.bundle import COUNTERS, LABEL_COUNTS, PARAMETERS, SIZE, STATISTICS, Bundle
from wardround.exchange.payload import Payload
from wardround.methods.base import Method
from wardround.methods.registry import known
from wardround.settings import Frozen
from wardround.study import Study

# What leaves unless the site says otherwise: sums and averages over many images, and networks trained on them.
ORDINARY = (
    *(PARAMETERS, STATISTICS, COUNTERS, SIZE, LABEL_COUNTS, "prototypes", "score", "trace", "fisher", "fisher_weights"),
    *("sensitivity", "update", "update_left", "update_right", "generator"),
)
# Something of single images: leaves only where the site's list names it; the word "any" is not enough.
OF_SINGLE_IMAGES = ("images", "embeddings", "subspace")
BY_CLASS = (LABEL_COUNTS, "prototypes", "embeddings", "images")  # tell which classes a site has, or how many of each
KEPT_FROM_OTHER_SITES = ("nobody", "the coordinator")  # `Payload.seen_by` in any other words: other sites see it, too
NOTHING: Mapping[str, float] = MappingProxyType({})


def _word_or_list(value: object) -> str:
    return "<word>" if isinstance(value, str) else "<list>"


Name = Annotated[str, Field(min_length=1, max_length=200)]
Names = Annotated[tuple[Name, ...], Tag("<list>")]
AnyOrNames = Annotated[Annotated[Literal["any"], Tag("<word>")] | Names, Discriminator(_word_or_list)]
Metrics = Annotated[Annotated[Literal["none", "all"], Tag("<word>")] | Names, Discriminator(_word_or_list)]
Yes = Annotated[bool, Field(strict=True)]
Number = Annotated[int, Field(strict=True, ge=0)]


class Refused(BadInput):
    """A rule of the site's policy forbids it; the text begins with the rule's name."""


class Privacy(Frozen):
    """The weakest differential privacy under which anything may leave."""

    max_epsilon: Annotated[float, Field(strict=True, gt=0)]
    max_delta: Annotated[float, Field(strict=True, ge=0, lt=1)]


class Policy(Frozen):
    """One site's rules; each field is a rule, and `default_policy_text` explains them to the site."""

    methods: AnyOrNames = "any"
    methods_from_files: Yes = False
    coordinators: AnyOrNames = "any"
    groups: AnyOrNames = ORDINARY
    never_groups: tuple[Name, ...] = ("images",)
    max_bytes_per_round: Number = 1_000_000_000
    max_bytes_per_study: Number = 20_000_000_000
    min_images_per_class: Number = 5
    seen_by_other_sites: Yes = False
    metrics: Metrics = "none"
    privacy: Privacy | None = None

    def check_method(self, name: str) -> None:
        """Before a method is looked up by the name that a study gives: loading it from a file runs that file."""
        if name.endswith(".py"):
            if not self.methods_from_files:
                raise _refused("methods_from_files", f"the study's method is a file of its own, {name!r}")
        elif self.methods != "any" and name not in self.methods:
            raise _refused("methods", f"{name!r} is not allowed ({_listed(self.methods)})")

    def check_plan(
        self,
        study: Study,
        method: Method,
        payload: Payload,
        coordinator: str,
        counts: Tensor | None,
        privacy: Mapping[str, float] | None = NOTHING,
    ) -> dict[str, str]:
        """Before training: hold every rule against what the method declares; optional groups that would stay, and why.

        `coordinator` is the fingerprint of its key, empty where it has none. `counts` is how many images of each class
        the site trains on, `privacy` what the study promises in `epsilon` and `delta`; where either is None it is not
        known yet, and `check_bundle` sees to it.
        """
        self.check_method(method.name)
        if not self.methods_from_files and known().get(method.name) is not type(method):
            raise _refused("methods_from_files", f"{method.name!r} is not built in")
        self._check_coordinator(coordinator)
        stay = {name: reason for name in _optional(payload) if (reason := self._forbids(name, counts))}
        groups = [group for group in payload.up if group.name not in stay]
        up = [group.name for group in groups]
        if not up:
            return stay
        self._check_groups(up)
        if not self.seen_by_other_sites and payload.seen_by not in KEPT_FROM_OTHER_SITES:
            raise _refused("seen_by_other_sites", f"what this site sends would be seen by {payload.seen_by}")
        a_round, rounds = sum(group.max_bytes for group in groups), method.rounds(study)
        self._check_bytes(a_round, a_round * rounds, f"{method.name} may send")
        if counts is not None:
            self._check_counts(up, counts)
        if privacy is not None:
            self._check_privacy(privacy)
        return stay

    def staying(self, bundle: Bundle, payload: Payload, counts: Tensor | None) -> dict[str, str]:
        """The optional groups of a bundle that a rule forbids, each with the rule."""
        named = _optional(payload) & bundle.groups.keys()
        alone = {name: replace(bundle, groups={name: bundle.groups[name]}) for name in named}
        return {name: reason for name, part in alone.items() if (reason := self._forbids(name, counts, part))}

    def _forbids(self, group: str, counts: Tensor | None, bundle: Bundle | None = None) -> str:
        """The rule that forbids one group, and why, or nothing."""
        try:
            self._check_groups([group])
            if bundle is not None:
                self._check_classes(bundle, counts)
            elif counts is not None:
                self._check_counts([group], counts)
        except Refused as refusal:
            return str(refusal).partition(";")[0]
        return ""

    def check_bundle(
        self,
        bundle: Bundle,
        payload: Payload,
        counts: Tensor | None,
        metrics: Mapping[str, float] = NOTHING,
        privacy: Mapping[str, float] = NOTHING,
        *,
        sent_in_round: int = 0,
        sent_in_study: int = 0,
    ) -> None:
        """Before anything is written or sent: hold every rule against what really would leave.

        `sent_in_round` and `sent_in_study` are the bytes that have left before, this bundle's not among them.
        `privacy` is what has been spent with this bundle, all that left before included.
        """
        for name in sorted(metrics.keys() - self.leaving(metrics).keys()):
            raise _refused("metrics", f"{name!r} may not leave ({_listed(self.metrics)})")
        if bundle.groups:
            self._check_groups(bundle.groups)
            self._check_privacy(privacy)
            self._check_classes(bundle, counts)
        size = bundle_bytes(bundle)
        self._check_bytes(sent_in_round + size, sent_in_study + size, "with this bundle this site would send")
        payload.check(bundle)

    def leaving(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Those of the site's metrics that may leave; the caller says which ones stay."""
        return {
            name: value
            for name, value in metrics.items()
            if self.metrics == "all" or (self.metrics != "none" and name in self.metrics)
        }

    def _check_coordinator(self, fingerprint: str) -> None:
        if self.coordinators != "any" and fingerprint not in self.coordinators:
            who = f"the key {fingerprint!r}" if fingerprint else "a coordinator without a key"
            raise _refused("coordinators", f"{who} is not allowed ({_listed(self.coordinators)})")

    def _check_groups(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            if name in self.never_groups:
                raise _refused("never_groups", f"{name!r} never leaves this site")
            if self.groups == "any" and name in OF_SINGLE_IMAGES:
                raise _refused("groups", f'{name!r} is something of single images, and no part of "any"; name it')
            if self.groups != "any" and name not in self.groups:
                raise _refused("groups", f"{name!r} is not allowed ({_listed(self.groups)})")

    def _check_bytes(self, in_round: int, in_study: int, who: str) -> None:
        for rule, size, most, when in (
            ("max_bytes_per_round", in_round, self.max_bytes_per_round, "a round"),
            ("max_bytes_per_study", in_study, self.max_bytes_per_study, "the whole study"),
        ):
            if size > most:
                raise _refused(rule, f"{who} {size:,} bytes in {when}, and {most:,} may leave")

    def _check_classes(self, bundle: Bundle, counts: Tensor | None) -> None:
        """Against the site's own counts, and against those in the bundle: neither can vouch for the other."""
        if counts is not None:
            self._check_counts(bundle.groups, counts)
        elif self.min_images_per_class > 1 and not set(BY_CLASS).isdisjoint(bundle.groups):
            raise _refused("min_images_per_class", "how many images each class has is not known")
        for told in bundle.group(LABEL_COUNTS).values():
            self._check_counts(bundle.groups, told)

    def _check_counts(self, groups: Collection[str], counts: Tensor) -> None:
        named = [name for name in BY_CLASS if name in groups]
        if named and bool(((counts > 0) & (counts < self.min_images_per_class)).any()):
            raise _refused(
                "min_images_per_class",
                f"{named[0]!r} would leave, and a class has images here, but fewer than {self.min_images_per_class}",
            )

    def _check_privacy(self, privacy: Mapping[str, float]) -> None:
        if self.privacy is None:
            return
        for name, most in (("epsilon", self.privacy.max_epsilon), ("delta", self.privacy.max_delta)):
            value = privacy.get(name)
            if value is None:
                raise _refused(f"privacy.max_{name}", f"no {name} is promised, and at most {most:g} is required")
            if not 0 <= value <= most:
                raise _refused(f"privacy.max_{name}", f"{name} is {value:g}, and at most {most:g} is required")


def bundle_bytes(bundle: Bundle) -> int:
    """All bytes of a bundle when serialised."""
    return sum(bundle.bytes_by_group.values()) + bundle.overhead


def _optional(payload: Payload) -> set[str]:
    return {group.name for group in payload.up if group.optional}


def _refused(rule: str, reason: str) -> Refused:
    return Refused(f"policy rule {rule}: {reason}; change policy.toml of this site, or leave the study")


def _listed(allowed: str | tuple[str, ...]) -> str:
    names = (allowed,) if isinstance(allowed, str) else allowed
    return f"allowed: {', '.join(names) or 'none'}"
