"""What a site lets out: rules that the site itself writes down, and that the program installed there enforces.

A policy is a TOML file of the site's own; the coordinator never sees it and cannot relax it. It is held against the
method's declaration before any training starts, and against the bundle itself before anything is written or sent, so a
declaration that does not tell the truth is caught. Nothing of a bundle is ever altered to fit: what a rule forbids is
refused, by the rule's name, and the site decides what to do. Only a group that the method declares as optional is left
out whole, and the rest goes.

A refusal may reach the coordinator, as a reason for not answering. So its text never tells what a rule protects: not
which class has few images, nor how few.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag
from torch import Tensor

from wardround.errors import BadInput
from wardround.exchange.bundle import COUNTERS, PARAMETERS, SIZE, STATISTICS, Bundle
from wardround.exchange.keys import FINGERPRINT
from wardround.exchange.payload import Payload
from wardround.methods.base import Method
from wardround.methods.registry import known
from wardround.settings import Frozen, checked, hint, keys
from wardround.study import Study

LABEL_COUNTS = "label_counts"
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
        privacy: Mapping[str, float] = NOTHING,
    ) -> dict[str, str]:
        """Before training: hold every rule against what the method declares; optional groups that would stay, and why.

        `coordinator` is the fingerprint of its key, empty where it has none. `counts` is how many images of each class
        the site trains on; where they are not known yet, `check_bundle` sees to them. `privacy` is what the method
        promises in `epsilon` and `delta`.
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


@dataclass
class Gate:
    """A site's boundary: its policy, what the rules need to know of the site, and what has left so far.

    `counts` is how many images of each class the site trains on, `sent` the bytes that have left by round. A transport
    that goes on after a stop makes the gate anew, with `sent` out of its receipts. `say` is told what is left out.
    """

    policy: Policy
    counts: Tensor | None = None
    sent: dict[int, int] = field(default_factory=dict)
    say: Callable[[str], None] = lambda text: None

    def before(
        self,
        study: Study,
        method: Method,
        payload: Payload,
        coordinator: str,
        privacy: Mapping[str, float] = NOTHING,
    ) -> None:
        """Before the site trains."""
        self.policy.check_plan(study, method, payload, coordinator, self.counts, privacy)

    def outgoing(
        self,
        bundle: Bundle,
        payload: Payload,
        metrics: Mapping[str, float] = NOTHING,
        privacy: Mapping[str, float] = NOTHING,
    ) -> Bundle:
        """Before an answer is written or sent: what of it leaves, without optional groups that a rule forbids.

        What passes is counted. An answer that is sent again was counted before.
        """
        stay = self.policy.staying(bundle, payload, self.counts)
        bundle = replace(bundle, groups={name: group for name, group in bundle.groups.items() if name not in stay})
        round = bundle.envelope.round
        before, in_all = self.sent.get(round, 0), sum(self.sent.values())
        self.policy.check_bundle(
            bundle, payload, self.counts, metrics, privacy, sent_in_round=before, sent_in_study=in_all
        )
        self.sent[round] = before + bundle_bytes(bundle)
        for name, reason in sorted(stay.items()):
            self.say(f"{name} does not leave {bundle.envelope.site}, and the study goes on without it: {reason}")
        return bundle


def _optional(payload: Payload) -> set[str]:
    return {group.name for group in payload.up if group.optional}


def bundle_bytes(bundle: Bundle) -> int:
    """All bytes of a bundle when serialised."""
    return sum(bundle.bytes_by_group.values()) + bundle.overhead


def default_policy_text() -> str:
    """The default rules as a file for a site to begin with, every rule explained."""
    return DEFAULT_TEXT


def read_policy(path: Path | None) -> Policy:
    """The policy in a TOML file; None: the default rules. A file that was named and cannot be used is an error."""
    if path is None:
        return Policy()
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows' editors put a mark in front
    except OSError as error:
        raise BadInput(f"cannot read the policy {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text ({error.reason}); save it as UTF-8") from error
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not valid TOML: {error}; correct it") from error
    try:
        _refuse_unknown_rules(tree)
        policy = checked(Policy, tree)
        _refuse_unknown_names(policy)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from error
    return policy


def _refuse_unknown_rules(tree: Mapping[str, Any]) -> None:
    """A rule with a slip in its name would not hold."""
    rules = [*keys(Policy), *keys(Privacy, "privacy")]
    table = tree.get("privacy")
    for key in [*tree, *(f"privacy.{name}" for name in table)] if isinstance(table, dict) else tree:
        if key not in rules:
            raise BadInput(f"there is no rule {key!r}; {hint(key, rules) or 'rules are ' + ', '.join(rules)}")


def _refuse_unknown_names(policy: Policy) -> None:
    """Nor would `never_groups` with a slip in a group's name. Methods from files may have groups of their own."""
    for text in () if policy.coordinators == "any" else policy.coordinators:
        if not FINGERPRINT.fullmatch(text):
            raise BadInput(f"coordinators names {text!r}, which is no fingerprint; copy it with its hyphens")
    if policy.methods_from_files:
        return
    groups = [*ORDINARY, *OF_SINGLE_IMAGES]
    for rule, given, names in (
        ("methods", policy.methods, list(known())),
        ("groups", policy.groups, groups),
        ("never_groups", policy.never_groups, groups),
    ):
        for name in () if given == "any" else given:
            if name not in names:
                advice = hint(name, names) or f"built in are {', '.join(names)}"
                raise BadInput(f"{rule} names {name!r}, which is not built in; {advice}")


def _refused(rule: str, reason: str) -> Refused:
    return Refused(f"policy rule {rule}: {reason}; change policy.toml of this site, or leave the study")


def _listed(allowed: str | tuple[str, ...]) -> str:
    names = (allowed,) if isinstance(allowed, str) else allowed
    return f"allowed: {', '.join(names) or 'none'}"


DEFAULT_TEXT = """\
# policy.toml: what this site lets out. The file belongs to the site; nobody else can change a rule.
# These are the rules that hold where there is no file. What a rule forbids is refused by the rule's name, before
# training where the method's declaration shows it, and in any case before anything is written or sent.

# Methods that may run here: "any", or a list such as ["fedavg", "fedbicross"].
methods = "any"

# Whether a method may come from a Python file and not from the program. Such a file can do anything on this machine.
methods_from_files = false

# Coordinators that this site works with: "any", or the fingerprints of their keys. Compare them on the phone.
coordinators = "any"

# Tensor groups that may leave: a list, or "any". docs/methods.md says what each holds. Left out here are "embeddings"
# (one feature vector for every image, from which a likeness of it can be rebuilt) and "subspace" (blends of images);
# "any" leaves them out, too. Add them by name to say yes.
groups = [
  "parameters", "statistics", "counters", "size", "label_counts", "prototypes", "score", "trace", "fisher",
  "fisher_weights", "sensitivity", "update", "update_left", "update_right", "generator",
]

# Tensor groups that never leave, whatever the rule above says.
never_groups = ["images"]

# The most bytes that may leave in one round, and in the whole study.
max_bytes_per_round = 1_000_000_000
max_bytes_per_study = 20_000_000_000

# Label counts, class means, and whatever else goes class by class leave only if every class that this site has images
# of has at least so many. 0: no such limit.
min_images_per_class = 5

# Whether other sites, and not the coordinator alone, may see what this site sends: its model, or samples of its
# embeddings. What the coordinator makes of all sites together always goes back to them.
seen_by_other_sites = false

# Figures about this site's own results: "none" leave, "all" do, or a list such as ["validation_accuracy"].
metrics = "none"

# Differential privacy that must be promised for anything to leave. A study promises it with privacy.epsilon, for
# methods that docs/privacy.md lists; with these three lines any other study is refused.
# [privacy]
# max_epsilon = 8.0
# max_delta = 1e-5
"""
