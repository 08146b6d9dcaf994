"""What a site lets out: rules that the site itself writes down, and that the program installed there enforces.

A policy is a TOML file of the site's own; the coordinator never sees it and cannot relax it. It is held against the
method's declaration before any training starts, and against the bundle itself before anything is written or sent, so a
declaration that does not tell the truth is caught. Nothing of a bundle is ever altered to fit: what a rule forbids is
refused, by the rule's name, and the site decides what to do. Only a group that the method declares as optional is left
out whole, and the rest goes.
"""

from wardround.exchange.policy.file import default_policy_text, read_policy
from wardround.exchange.policy.gate import Gate
from wardround.exchange.policy.rules import (
    OF_SINGLE_IMAGES,
    ORDINARY,
    Policy,
    Privacy,
    Refused,
    bundle_bytes,
)

__all__ = [
    "OF_SINGLE_IMAGES",
    "ORDINARY",
    "Gate",
    "Policy",
    "Privacy",
    "Refused",
    "bundle_bytes",
    "default_policy_text",
    "read_policy",
]
