"""Which attacks apply to what left, and that each is held against the right images."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiny import CPU, context, drive, federation, study
from wardround.audit.attacks import COMPUTED, Attacker, Effort
from wardround.audit.target import Target, image_hashes, pools
from wardround.data.federation import LocalTest, Site
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle, Envelope
from wardround.learn.device import Device
from wardround.learn.predictor import Member
from wardround.methods.registry import make
from wardround.progress import NO_PROGRESS
from wardround.streams import Streams

EFFORT = Effort(shadows=1, decoder_epochs=1, inversion_steps=1, inversion_images=4, most=40)


def attacker(target: Target) -> Attacker:
    return Attacker(target, 0, EFFORT, Device(CPU, 1), NO_PROGRESS)


def target(groups: dict[str, dict[str, torch.Tensor]], model: Member | None = None, **changes: Any) -> Target:
    site = federation().sites[0]
    envelope = Envelope("answer", "study", "fedmp", site.name, 0)
    return Target(Bundle(envelope, groups), site, study().recipe(0), model, **changes)


def fedmp(upload: int) -> Target:
    data = federation()
    agreed = study(data, method="fedmp")
    ctx, method = context(agreed), make("fedmp", {"upload": upload})
    request = (method.ask(ctx, method.begin(ctx)) or {})["site-1"]
    answer = drive(ctx, method.answer(ctx, data.sites[0], request, method.begin(ctx)))
    return Target(answer.bundle, data.sites[0], agreed.recipe(0), answer.trained.members[0])


def test_some_of_the_embeddings_are_matched_with_their_images() -> None:
    few = fedmp(upload=5)
    sent = few.bundle.groups["embeddings"]
    rows = attacker(few)._rows_of(sent["features"], sent["labels"])
    assert len(rows) == 5
    assert torch.equal(few.site.train.labels[rows], sent["labels"])
    own = attacker(few)._features()[rows]
    torch.testing.assert_close(own, sent["features"], rtol=1e-4, atol=1e-5)
    everything = fedmp(upload=100)
    sent = everything.bundle.groups["embeddings"]
    assert attacker(everything)._rows_of(sent["features"], sent["labels"]).tolist() == list(range(11))


def test_copies_among_synthetic_images_are_found() -> None:
    train = federation().sites[0].train
    found = target({}, synthetic=(train.images[:4].clone(), train.labels[:4]))
    (job,) = attacker(found).jobs()
    assert (job.group, job.name) == (COMPUTED, "synthetic-images")
    done = job.run()
    assert done.attack.figure("min_l2").value == 0.0
    assert "may show a patient's image" in done.attack.findings[0]
    assert torch.equal(done.pictures["pairs"]["computed"], done.pictures["pairs"]["nearest"])


def test_counts_and_images_are_stated_plainly() -> None:
    counts = {
        "label_counts": {"counts": torch.tensor([30, 2, 0, 9])},
        "images": {"train_images": torch.zeros(7, 3, 8, 8)},
    }
    done = {job.name: job.run().attack for job in attacker(target(counts)).jobs()}
    assert done["label-counts"].findings == ("birch has 2 images: single patients",)
    assert done["stated"].findings == ("the images themselves leave the site",)
    assert done["stated"].figures[0].value == 7


def test_what_no_attack_is_made_for_is_said() -> None:
    assert attacker(target({"fisher": {"f": torch.ones(2)}})).unjudged() == ["fisher"]


def test_pools_share_no_image() -> None:
    site = federation().sites[0]
    both = torch.cat([torch.arange(16), torch.arange(16)])  # every test image twice
    twice = Site(site.name, site.train, site.val, LocalTest(site.test.images.take(both), None))
    found = pools(twice, Streams(0), most=100)
    hashes = [image_hashes(images) for images in (found.members, found.others, found.auxiliary)]
    assert [len(part) for part in hashes] == [11, 8, 8]
    assert len({value for part in hashes for value in part}) == 27


@pytest.mark.parametrize(("train", "test", "message"), [(0, 16, "no training images"), (11, 3, "3 test images")])
def test_too_few_images_are_refused(train: int, test: int, message: str) -> None:
    site = federation().sites[0]
    few = Site(
        site.name,
        site.train.take(torch.arange(train)),
        site.val,
        LocalTest(site.test.images.take(torch.arange(test)), None),
    )
    with pytest.raises(BadInput, match=message):
        pools(few, Streams(0), most=100)
