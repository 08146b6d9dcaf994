"""Votes on pairs of classes, each network heard on the pairs that it has seen both sides of.

A network that never saw class d cannot tell d from c: under label skew most networks are blind on most pairs, and a
mean of their logits or probabilities listens to them all the same. Here every pair (c, d) is decided by those who know
both. With n_kc the images of class c that network k was trained on, π_k its label prior and z_k its logits:

    ℓ_k = (z_k − log π_k) / T                               the prior divided out, and a vote that is not too loud
    h_kcd = 2·n_kc·n_kd / (n_kc + n_kd)                     how much k knows of the pair: the harmonic mean, 0 if blind
    R_cd = (Σ_k h_kcd·σ(ℓ_kc − ℓ_kd) + m·f_cd) / (Σ_k h_kcd + m)
    s_c = Σ_d R_cd                                          the expected number of classes that c wins against

f_cd = S_c / (S_c + S_d) with S_c = Σ_k W_kc·p_k(c), W_kc = n_kc / Σ_j n_jc: where nobody knows a pair, networks that
have seen one side of it are all there is (S is `TINY` at least: of two classes that none thinks of, neither). m images
of doubt weigh it. σ bounds what one network can say, and no network's h or n counts for more than those of all others
together and m: by its own votes one that is wrong, or lies about what it has seen, moves R by a half at most, and f by
its share W of the two classes. Where others know the pair that is about a half in all; where nobody else has seen both,
it is more. A network that answers an image with anything but finite numbers says of it what its prior says: nothing on
any pair. `voices` multiply h and n of a network after these bounds: a site may listen to its own more than to others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TEMPERATURE, DOUBT = 3.0, 100.0
TINY = 1e-9
KNOWERS = 0.75  # of how familiar an image is, what those say who have seen its class


class Tally(NamedTuple):
    """What networks say of n images, summed over them: all that the rule needs to know."""

    won: Tensor  # Σ_k h_kcd·σ(ℓ_kc − ℓ_kd), (n, classes, classes)
    known: Tensor  # Σ_k h_kcd, (classes, classes)
    claims: Tensor  # S, (n, classes)


def pair_scores(
    logits: Tensor, counts: Tensor, log_prior: Tensor, temperature: float, doubt: float, voices: Tensor | None = None
) -> Tensor:
    """Wins s `(n, classes)` from logits `(networks, n, classes)`, counts and log priors `(networks, classes)`."""
    return decided(tallied(logits, counts, log_prior, temperature, doubt, voices), doubt)


def tallied(
    logits: Tensor, counts: Tensor, log_prior: Tensor, temperature: float, doubt: float, voices: Tensor | None = None
) -> Tally:
    """How the votes fall."""
    loud = (counts.new_ones(len(counts)) if voices is None else voices.to(counts)).view(-1, 1, 1)
    logits = _finite(logits, log_prior)
    claims = _claims(logits.softmax(dim=2), counts, doubt, loud[:, 0])
    weights = loud * bounded(harmonic(counts), doubt)
    won = torch.zeros_like(claims).unsqueeze(2)
    for said, weight in zip((logits - log_prior.unsqueeze(1)) / temperature, weights, strict=True):
        won = won + weight * torch.sigmoid(said.unsqueeze(2) - said.unsqueeze(1))
    return Tally(won, weights.sum(dim=0), claims)


def decided(tally: Tally, doubt: float) -> Tensor:
    """Wins s `(n, classes)` by the rule."""
    claims, classes = tally.claims.clamp_min(TINY), tally.claims.shape[1]
    unknown = claims.unsqueeze(2) / (claims.unsqueeze(2) + claims.unsqueeze(1))  # f
    among_others = 1 - torch.eye(classes, dtype=claims.dtype, device=claims.device)
    return ((tally.won + doubt * unknown) / (tally.known + doubt) * among_others).sum(dim=2)


def familiarity(
    logits: Tensor, counts: Tensor, log_prior: Tensor, doubt: float, voices: Tensor | None = None
) -> Tensor:
    """How much an image looks like something seen: max_c ¾·S_c + ¼·mean_k p_k(c|x), `(n,)`.

    It does where those who have seen a class say that it is this, and the more so the fewer others are sure of
    something else. Networks that have seen nothing are not asked.
    """
    probabilities = _finite(logits, log_prior).softmax(dim=2)
    loud = 1.0 if voices is None else voices.to(counts).unsqueeze(1)
    claims = _claims(probabilities, counts, doubt, loud)
    asked = (counts.sum(dim=1) > 0).to(logits)
    plain = (probabilities * asked.view(-1, 1, 1)).sum(dim=0) / asked.sum().clamp_min(1)
    return (KNOWERS * claims + (1 - KNOWERS) * plain).amax(dim=1)


def _claims(probabilities: Tensor, counts: Tensor, doubt: float, loud: Tensor | float) -> Tensor:
    """S `(n, classes)`."""
    return (probabilities * shares(counts, doubt, loud).unsqueeze(1)).sum(dim=0)


def _finite(logits: Tensor, log_prior: Tensor) -> Tensor:
    """What a network says that has NaN or infinity for an answer: that it cannot tell."""
    return torch.where(logits.isfinite().all(dim=2, keepdim=True), logits, log_prior.to(logits).unsqueeze(1))


def harmonic(counts: Tensor) -> Tensor:
    """Knowledge of pairs: h `(networks, classes, classes)`."""
    one, other = counts.unsqueeze(2), counts.unsqueeze(1)
    return 2 * one * other / (one + other).clamp_min(TINY)


def shares(counts: Tensor, doubt: float, voices: Tensor | float = 1.0) -> Tensor:
    """W `(networks, classes)`: each network's share of a class's images; of a class that none has seen, equal ones."""
    seen = voices * bounded(counts, doubt)
    seen = torch.where(seen.sum(dim=0) > 0, seen, torch.ones_like(seen))
    return seen / seen.sum(dim=0)


def bounded(weights: Tensor, doubt: float) -> Tensor:
    """Over the first axis, none more than all others together and `doubt`."""
    return torch.minimum(weights, weights.sum(dim=0, keepdim=True) - weights + doubt)


def pair_wins(logits: Tensor, labels: Tensor, counts: Tensor, log_prior: Tensor, least: float) -> tuple[int, int, int]:
    """How often one network prefers the true class to another, how often it was asked, and on how many images.

    It is asked about pairs that it claims to know: of which it has `least` images by the harmonic mean.
    """
    said = logits - log_prior
    asked = harmonic(counts.unsqueeze(0))[0][labels] >= least
    asked[torch.arange(len(labels)), labels] = False
    won = said.gather(1, labels.unsqueeze(1)) > said
    return int((won & asked).sum()), int(asked.sum()), int(asked.any(dim=1).sum())
