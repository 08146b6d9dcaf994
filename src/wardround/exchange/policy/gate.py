"""A site's boundary as a transport meets it: the rules, and what has left so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from wardround.exchange.bundle import Bundle
from wardround.exchange.payload import Payload
from wardround.exchange.policy.rules import NOTHING, Policy, bundle_bytes
from wardround.methods.base import Method
from wardround.study import Study


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
