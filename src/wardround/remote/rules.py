"""The rules by which parcels and steps are refused, each with a name that a refusal begins with.

docs/airgap.md has a table of them; whoever is refused something can look up what to do, and ask about it by name.
"""

from __future__ import annotations

from wardround.errors import BadInput

RULES = {
    "another study": "the parcel belongs to another study, or to another version of the study file",
    "another site": "the parcel is meant for another site",
    "another signer": "the parcel speaks for one party and is signed by another",
    "wrong way": "an answer came to a site, or a request or delivery to the hub",
    "revoked key": "the key that signed it, or that a command works with, was revoked on this machine",
    "other version": "the two sides run versions of wardround whose first two numbers differ",
    "withdrawn": "the site has withdrawn from the study",
    "late parcel": "its round is closed",
    "early parcel": "its round is not open yet",
    "beyond the study": "it asks a site for a round beyond those that the study has",
    "old parcel": "the site has answered a later round already, or has a parcel that was made later",
    "not asked": "the round does not ask this site",
    "stale answer": "it answers a request that was replaced when a round was done again",
    "second answer": "the site has answered this round before, with something else",
    "second request": "the site has answered this round before, for another request",
    "quorum": "the round has fewer answers than the study asks for",
    "deadline": "sites that are missing may still answer",
    "no closed round": "there is no round that could be opened again",
}


def refusal(rule: str, text: str) -> BadInput:
    """The error for a rule that is not kept: its name, what happened, and what to do."""
    if rule not in RULES:
        raise KeyError(rule)
    return BadInput(f"{rule}: {text}")
