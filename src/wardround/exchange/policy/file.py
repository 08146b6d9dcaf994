"""The file that holds a site's rules: read, checked for slips, and a first one to begin with."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wardround.errors import BadInput
from wardround.exchange.keys import FINGERPRINT
from wardround.exchange.policy.rules import OF_SINGLE_IMAGES, ORDINARY, Policy, Privacy
from wardround.files import read_text
from wardround.methods.registry import known
from wardround.settings import checked, hint, keys


def default_policy_text() -> str:
    """The default rules as a file for a site to begin with, every rule explained."""
    return DEFAULT_TEXT


def read_policy(path: Path | None) -> Policy:
    """The policy in a TOML file; None: the default rules. A file that was named and cannot be used is an error."""
    if path is None:
        return Policy()
    text = read_text(path, "the policy")
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
