"""FedMP's decoder attack: shapes of every stage, halves, measures by hand, and a leak that deeper stages reduce."""

from functools import cache

import pytest
import torch
from torch import Tensor

import tiny
from wardround.audit.decoder import Decoder, DecoderTraining, train_decoder
from wardround.audit.frechet import random_network
from wardround.audit.reconstruction import Halves, Rebuilt, decode_prototypes, halves, rebuild, rebuild_from_stage
from wardround.data.imageset import ImageSet
from wardround.data.phantoms import phantoms
from wardround.errors import BadInput, RunFailed
from wardround.learn.fit import Fit, Recipe
from wardround.learn.predictor import Member
from wardround.learn.prototypes import class_means
from wardround.learn.stages import stage_features, stage_name, stage_shape, stage_width
from wardround.learn.trainer import train_one
from wardround.models import NetSpec, fresh
from wardround.streams import Streams

CPU = torch.device("cpu")
UNUSED = Decoder((1,), 1, 12, 1)
QUICK = DecoderTraining(epochs=2, batch=8, width=4)


# The decoder ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "size", "sides"),
    [
        ((64,), 28, [7, 14, 28]),
        ((2048,), 256, [4, 8, 16, 32, 64, 128, 256]),
        ((16, 14, 14), 28, [14, 28]),
        ((64, 4, 4), 28, [4, 7, 14, 28]),
        ((64, 28, 28), 28, [28]),
        ((8, 7, 7), 30, [8, 15, 30]),  # cnn4 rounds down where the ladder rounds up
        ((8, 1, 1), 5, [1, 2, 3, 5]),
    ],
)
def test_a_decoder_climbs_from_any_shape_to_the_image(shape: tuple[int, ...], size: int, sides: list[int]) -> None:
    decoder = Decoder(shape, 3, size, 2)
    assert decoder.sides == sides
    features = torch.zeros(2, torch.Size(shape).numel())
    assert decoder(features).shape == (2, 3, size, size)


@pytest.mark.parametrize("name", ["small", "cnn4", "resnet18", "wrn16-2"])
def test_every_stage_of_a_network_can_be_attacked(name: str) -> None:
    spec, site = NetSpec(name, 3, 4, 9, width=2), tiny.images(12, size=9)
    member = Member(spec, fresh(spec, torch.Generator().manual_seed(0)))
    for stage in (1, 2, 3, None):
        found = rebuild_from_stage(member, site, stage, DecoderTraining(1, 4, 1e-3, 2), Streams(0), CPU)
        assert found.images.shape == found.originals.shape == (6, 3, 9, 9)
        assert 0 <= float(found.images.min()) <= float(found.images.max()) <= 1


def test_features_are_standardised_channel_by_channel() -> None:
    """Channel 0 is 1 and 3, channel 1 always 5: it is centred, and not divided by nothing."""
    decoder = Decoder((2, 1, 1), 1, 2, 1)
    decoder.standardise(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    assert decoder.get_buffer("mean").flatten().tolist() == [2.0, 5.0]
    assert decoder.get_buffer("deviation").flatten().tolist() == [1.0, 1.0]


def test_a_decoder_belongs_to_its_seed_and_leaves_global_randomness_alone() -> None:
    images, features = tiny.images(12).images, torch.rand(12, 5, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    one, again, other = (train_decoder(features, images, (5,), QUICK, Streams(s), CPU) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.reconstruct(features), again.reconstruct(features))
    assert not torch.equal(one.reconstruct(features), other.reconstruct(features))


def test_it_learns_squared_error_to_the_mean_where_features_say_nothing() -> None:
    """With constant features the best answer is the mean image: black and white halves come out grey."""
    images = torch.cat([torch.zeros(8, 1, 4, 4), torch.full((8, 1, 4, 4), 255)]).to(torch.uint8)
    decoder = train_decoder(torch.ones(16, 2), images, (2,), DecoderTraining(60, 16, 0.02, 2), Streams(0), CPU)
    assert decoder.reconstruct(torch.ones(1, 2)).mean().item() == pytest.approx(0.5, abs=0.05)


def test_what_cannot_be_decoded_is_refused() -> None:
    images, features = tiny.images(4).images, torch.ones(4, 6)
    cases = [
        (features[:3], images, (6,), QUICK, r"3 features of 6 numbers do not fit 4 images and the shape \(6,\)"),
        (features, images, (2, 2, 2), QUICK, r"do not fit 4 images and the shape \(2, 2, 2\)"),
        (features[:1], images[:1], (6,), QUICK, "1 auxiliary images are too few"),
        (features, images, (6,), DecoderTraining(epochs=0), "at least one epoch"),
    ]
    for some, of, shape, how, message in cases:
        with pytest.raises(BadInput, match=message):
            train_decoder(some, of, shape, how, Streams(0), CPU)


def test_a_decoder_that_diverges_says_so() -> None:
    how = DecoderTraining(epochs=3, batch=2, lr=1e30, width=2)
    with pytest.raises(RunFailed, match=r"diverged; use a smaller rate than 1e\+30"):
        train_decoder(torch.rand(6, 3), tiny.images(6).images, (3,), how, Streams(0), CPU)


# Halves ---------------------------------------------------------------------------------------------------------------


def test_halves_are_disjoint_and_bounded() -> None:
    parts = halves(tiny.images(21), Streams(0))
    assert sorted([*parts.auxiliary.tolist(), *parts.attacked.tolist()]) == list(range(21))
    assert (len(parts.auxiliary), len(parts.attacked)) == (11, 10)
    few = halves(tiny.images(21), Streams(0), most=8)
    assert (len(few.auxiliary), len(few.attacked)) == (4, 4)
    assert halves(tiny.images(21), Streams(0), "a").attacked.tolist() != parts.attacked.tolist()


def test_no_patient_is_in_both_halves() -> None:
    plain = tiny.images(24)
    site = ImageSet(plain.images, plain.labels, plain.classes, patients=torch.arange(24) // 3)
    parts = halves(site, Streams(3))
    assert site.patients is not None
    assert not set(site.patients[parts.auxiliary].tolist()) & set(site.patients[parts.attacked].tolist())


def test_too_few_images_to_halve() -> None:
    with pytest.raises(BadInput, match="3 images cannot be halved"):
        halves(tiny.images(3), Streams(0))


# Measures -------------------------------------------------------------------------------------------------------------


def even(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8).reshape(-1, 1, 1, 1).repeat(1, 1, 12, 12)


def test_the_measures_by_hand() -> None:
    """Originals 51, 102, 204 of 255 rebuilt as 0.2, 0.5, 0.5; the attacker's own images are 0 and 255.

    L2 is 0, 0.1 and 0.3, of which one is below 0.1. Nearest originals are 0.2, then 0.4 twice: two of three are right.
    """
    found = Rebuilt(
        even(51, 102, 204), torch.tensor([0.2, 0.5, 0.5]).reshape(3, 1, 1, 1).repeat(1, 1, 12, 12), even(0, 255), UNUSED
    )
    record = found.attack(random_network(1), seed=3)
    value = {figure.name: figure.value for figure in record.figures}
    assert value["min_l2"] == pytest.approx(0, abs=1e-7)
    assert value["mean_l2"] == pytest.approx(0.4 / 3, rel=1e-6)
    assert value["share_below_0.1"] in (pytest.approx(1 / 3), pytest.approx(2 / 3))  # 0.1 itself, give or take rounding
    assert value["identified"] == pytest.approx(2 / 3)
    assert value["max_ssim"] == pytest.approx(1)
    ssims = [1, (2 * 0.4 * 0.5 + 1e-4) / (0.41 + 1e-4), (2 * 0.8 * 0.5 + 1e-4) / (0.89 + 1e-4)]
    assert value["mean_ssim"] == pytest.approx(sum(ssims) / 3, rel=1e-6)
    assert value["control_min_l2"] == pytest.approx(0.2, rel=1e-6)
    assert record.seed == 3
    assert {figure.n for figure in record.figures} == {3}
    assert "not Inception" in record.figure("frechet").definition
    assert "0.1 of the full range" in record.figure("min_l2").definition
    assert "of 3 reconstructions are nearer than 0.1" in record.findings[0]


def test_pictures_are_the_closest_pairs_first() -> None:
    originals = even(0, 100, 200)
    found = Rebuilt(originals, (even(60, 110, 110) / 255), even(9), UNUSED)
    pairs = found.pictures(2)["pairs"]
    assert pairs["original"][:, 0, 0, 0].tolist() == [100, 0]
    assert pairs["reconstruction"][:, 0, 0, 0].tolist() == [110, 60]
    assert pairs["nearest"][:, 0, 0, 0].tolist() == [100, 100]
    assert pairs["l2"].tolist() == pytest.approx([10 / 255, 60 / 255])
    assert pairs["original"].dtype == pairs["reconstruction"].dtype == torch.uint8


# From end to end ------------------------------------------------------------------------------------------------------


@cache
def extractor() -> tuple[Member, ImageSet]:
    site, spec, streams = phantoms(240, 0, 1).train, NetSpec("small", 3, 8, 28, width=8), Streams(0)
    fit = Fit("site", spec, fresh(spec, streams.torch("start")), site, Recipe(3, batch=32, lr=0.05), 1)
    return Member(spec, train_one(fit, CPU).weights), site


def test_early_features_leak_images_and_pooled_ones_do_not() -> None:
    """FedMP's Table 5 in kind: the first stage against the fourth."""
    member, site = extractor()
    how, eye = DecoderTraining(epochs=15, batch=16, lr=4e-3, width=8), random_network(3)
    first, last = (rebuild_from_stage(member, site, s, how, Streams(0), CPU).attack(eye, 0) for s in (1, 4))
    values = {
        name: (first.figure(name).value, last.figure(name).value) for name in ("identified", "mean_l2", "frechet")
    }
    assert values["identified"][0] > 0.9
    assert values["identified"][1] < 0.3
    assert values["mean_l2"][0] < 0.1 < values["mean_l2"][1]
    assert values["frechet"][0] < values["frechet"][1]


def test_the_payload_itself_is_attacked_row_by_row() -> None:
    """Features as sent, with noise that drowns them, give the attacker less than the features themselves."""
    member, site = extractor()
    stage = stage_name(member.spec, 1)
    features = stage_features(member.spec, member.weights, site.images, stage, CPU)
    assert features.shape == (240, stage_width(member.spec, stage))
    parts, how = halves(site, Streams(0)), DecoderTraining(epochs=6, batch=16, lr=4e-3, width=8)
    noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(0)) * 10
    plain, noisy = (
        rebuild(sent, stage_shape(member.spec, stage), site.images, parts, how, Streams(0), CPU).attack(
            random_network(3), 0
        )
        for sent in (features, features + noise)
    )
    shares = [attack.figure("identified").value for attack in (plain, noisy)]
    assert shares[0] is not None
    assert shares[1] is not None
    assert shares[0] > 0.8 > 0.3 > shares[1]


def test_the_prototype_of_one_image_decodes_as_that_image_does() -> None:
    """One cell of class 0 and all of class 1: the decoded mean of the first is the cell's own reconstruction."""
    member, site = extractor()
    one, many = torch.nonzero(site.labels == 0)[:1], torch.nonzero(site.labels == 1)
    few = site.take(torch.cat([one, many]).flatten())
    stage = stage_name(member.spec, 1)
    features = stage_features(member.spec, member.weights, few.images, stage, CPU)
    decoder = rebuild_from_stage(member, site, 1, QUICK, Streams(0), CPU).decoder
    blends, labels = decode_prototypes(decoder, class_means(features, few.labels, 8))
    assert labels.tolist() == [0, 1]
    alone = (decoder.reconstruct(features[:1]) * 255).round().to(torch.uint8)
    assert (blends[:1].int() - alone.int()).abs().max() <= 1


def test_images_of_another_study_are_refused() -> None:
    with pytest.raises(BadInput, match="the network takes 3×28×28 images of 8 classes, and these are 3×8×8 of 4"):
        rebuild_from_stage(extractor()[0], tiny.images(8), 1, QUICK, Streams(0), CPU)


def test_rows_that_do_not_match_are_refused() -> None:
    parts = Halves(torch.arange(3), torch.arange(3, 6))
    with pytest.raises(BadInput, match="give one row per image"):
        rebuild(torch.ones(6, 5), (4,), tiny.images(6).images, parts, QUICK, Streams(0), CPU)
