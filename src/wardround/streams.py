"""Randomness as an argument: every draw comes from a stream derived from (seed, purpose, site, round).

Because a stream depends on what it is for and on nothing else, the order in which sites run, the number of workers and
a resume in the middle cannot change a result. No code in this package reads or sets a global generator.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Streams:
    """The random streams of one study."""

    seed: int

    def number(self, purpose: str, site: str = "", round: int = 0, index: int = 0) -> int:
        """A 63-bit number that belongs to this purpose, site, round and index alone."""
        text = f"wardround|{self.seed}|{purpose}|{site}|{round}|{index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    def torch(self, purpose: str, site: str = "", round: int = 0, index: int = 0) -> torch.Generator:
        """A torch generator; on the CPU always, so that every device sees the same draws."""
        return torch.Generator().manual_seed(self.number(purpose, site, round, index))

    def numpy(self, purpose: str, site: str = "", round: int = 0, index: int = 0) -> np.random.Generator:
        """A numpy generator."""
        return np.random.default_rng(self.number(purpose, site, round, index))
