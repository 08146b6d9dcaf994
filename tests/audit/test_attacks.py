"""Which attacks apply to what left, and that each is held against the right images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tiny import CPU, context, drive, federation, study
from wardround.audit.attacks import COMPUTED, Attacker, Effort
from wardround.audit.membership import loss_threshold
from wardround.audit.reconstruction import Halves
from wardround.audit.target import Target, image_hashes, pools
from wardround.data.federation import LocalTest, Site
from wardround.data.imageset import ImageSet, merge
from wardround.data.phantoms import phantoms
from wardround.errors import BadInput
from wardround.exchange.bundle import Bundle, Envelope
from wardround.learn.device import Device
from wardround.learn.predictor import Member, Predictor
from wardround.methods.registry import make
from wardround.models import NetSpec, fresh
from wardround.privacy.features import clipped
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
    short = clipped(sent["features"], 1e-3)
    assert torch.equal(attacker(few)._rows_of(short, sent["labels"]), rows)
    everything = fedmp(upload=100)
    sent = everything.bundle.groups["embeddings"]
    assert attacker(everything)._rows_of(sent["features"], sent["labels"]).tolist() == list(range(11))


def test_an_image_that_two_noisy_rows_look_like_is_in_one_half_only(monkeypatch: pytest.MonkeyPatch) -> None:
    few = fedmp(upload=5)
    attack = attacker(few)
    rows = torch.tensor([3, 3, 5, 7, 8])
    monkeypatch.setattr(attack, "_rows_of", lambda features, labels: rows)
    seen: list[Halves] = []

    def noted(features: Any, shape: Any, images: Any, parts: Halves, *rest: Any) -> None:
        seen.append(parts)

    monkeypatch.setattr("wardround.audit.attacks.rebuild", noted)
    attack._rebuilt_as_sent()
    known, attacked = (set(rows[half].tolist()) for half in (seen[0].auxiliary, seen[0].attacked))
    assert not known & attacked
    assert known | attacked == {3, 5, 7, 8}
    assert len(seen[0].auxiliary) + len(seen[0].attacked) == 5


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


def site_of(train: ImageSet, test: ImageSet) -> Site:
    return Site("site-1", train, train.take(torch.arange(0)), LocalTest(test, None))


def test_pools_share_no_image() -> None:
    site = federation().sites[0]
    both = torch.cat([torch.arange(16), torch.arange(16)])  # every test image twice
    found = pools(site_of(site.train, site.test.images.take(both)), Streams(0), most=100)
    hashes = [image_hashes(images) for images in (found.members, found.others, found.auxiliary)]
    assert len(hashes[0]) == len(hashes[1]) > 1
    assert len(hashes[2]) == 8
    assert len({value for part in hashes for value in part}) == sum(map(len, hashes))


def test_an_image_that_was_trained_on_is_in_no_other_pool_even_where_it_was_not_drawn() -> None:
    drawn = phantoms(n_train=200, n_test=40)
    tested = merge([drawn.test, drawn.train.take(torch.arange(200))])
    found = pools(site_of(drawn.train, tested), Streams(0), most=120)
    trained_on = set(image_hashes(drawn.train))
    assert not trained_on & {*image_hashes(found.others), *image_hashes(found.auxiliary)}


def test_a_model_that_only_knows_which_classes_a_site_has_is_no_leak() -> None:
    """A site of two classes, tested on eight: its model's loss tells the classes apart, and no member."""
    drawn = phantoms(n_train=400, n_test=400)
    own = drawn.train.take(torch.nonzero(drawn.train.labels < 2).flatten())
    found = pools(site_of(own, drawn.test), Streams(0), most=1000)
    assert torch.equal(found.members.counts(), found.others.counts())
    assert found.others.counts()[2:].sum() == 0
    spec = NetSpec("cnn4", 3, 8, 28, width=2)
    weights = {name: torch.zeros_like(t) for name, t in fresh(spec, Streams(0).torch("start")).items()}
    weights["head.bias"] = torch.tensor([4.0, 2.0] + [0.0] * 6)
    blind = Predictor(8, (Member(spec, weights),))
    assert loss_threshold(blind, found.members, found.others, Device(CPU, 1)).curve.auc == 0.5


def test_no_patient_is_among_the_others_and_the_attackers_images() -> None:
    drawn = phantoms(n_train=80, n_test=80)
    held = replace(drawn.test, patients=torch.arange(80) // 8)
    found = pools(site_of(drawn.train, held), Streams(0), most=100)
    assert found.others.patients is not None
    assert found.auxiliary.patients is not None
    assert not set(found.others.patients.tolist()) & set(found.auxiliary.patients.tolist())


def test_a_test_without_the_sites_classes_is_refused() -> None:
    drawn = phantoms(n_train=80, n_test=80)
    own = drawn.train.take(torch.nonzero(drawn.train.labels == 0).flatten())
    other = drawn.test.take(torch.nonzero(drawn.test.labels != 0).flatten())
    with pytest.raises(BadInput, match="hardly a test image of the classes"):
        pools(site_of(own, other), Streams(0), most=100)


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
