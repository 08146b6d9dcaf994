import hashlib
import itertools
import random

import numpy as np
import torch

from wardround.streams import Streams


def test_the_number_of_a_purpose_is_pinned() -> None:
    """A change here changes every result that was ever recorded."""
    assert Streams(0).number("init") == 8345358967191929023
    assert Streams(0).number("shuffle", index=3) == 2196971281785981696
    assert Streams(7).number("fit", "site-2", 4) == 690819198280064780


def test_the_number_is_the_first_63_bits_of_a_hash() -> None:
    digest = hashlib.sha256(b"wardround|7|fit|site-2|4|0").digest()
    little = sum(byte << (8 * place) for place, byte in enumerate(digest[:8]))
    assert Streams(7).number("fit", "site-2", 4) == little // 2


def test_the_draws_of_both_libraries_are_pinned() -> None:
    assert torch.randperm(6, generator=Streams(0).torch("shuffle")).tolist() == [2, 5, 0, 3, 4, 1]
    assert Streams(0).numpy("participants").integers(0, 100, 5).tolist() == [62, 99, 39, 90, 96]


def test_every_ingredient_gives_another_stream() -> None:
    purposes, sites, numbers = ("fit", "shuffle", "augment"), ("", "site-1", "site-11"), (0, 1, 11)
    keys = list(itertools.product((0, 1, 2**62), purposes, sites, numbers, numbers))
    found = {Streams(seed).number(purpose, site, round, index) for seed, purpose, site, round, index in keys}
    assert len(found) == len(keys)
    assert all(0 <= number < 2**63 for number in found)


def test_a_stream_does_not_depend_on_what_was_drawn_before() -> None:
    streams = Streams(3)
    first = torch.rand(4, generator=streams.torch("fit", "a"))
    torch.rand(100, generator=streams.torch("fit", "b"))
    streams.numpy("fit", "a").random(100)
    assert torch.equal(torch.rand(4, generator=streams.torch("fit", "a")), first)
    assert np.array_equal(streams.numpy("x").random(3), streams.numpy("x").random(3))


def test_no_global_generator_is_read_or_set() -> None:
    def states() -> tuple[object, ...]:
        return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()  # noqa: NPY002

    before = states()
    torch.rand(4, generator=Streams(3).torch("a"))
    Streams(3).numpy("a").random(4)
    assert states() == before


def test_torch_generators_are_on_the_cpu() -> None:
    assert Streams(0).torch("a").device == torch.device("cpu")
