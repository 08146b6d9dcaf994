"""Model inversion and likeness: whose image is it, the class's or a patient's?"""

import pytest
import torch
from torch import Tensor

import tiny
from wardround.audit.inversion import Inverted, invert, likeness
from wardround.data.imageset import ImageSet
from wardround.errors import BadInput
from wardround.learn.evaluate import network_outputs
from wardround.learn.fit import Fit, Recipe
from wardround.learn.predictor import Member
from wardround.learn.trainer import train_one
from wardround.models import NetSpec, fresh
from wardround.streams import Streams
from wardround.synthesis.inversion import Inversion

CPU = torch.device("cpu")


def even(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8).reshape(-1, 1, 1, 1).repeat(1, 1, 12, 12)


TRAINING = ImageSet(even(0, 51, 255, 100, 151), torch.tensor([0, 0, 0, 1, 1]), ("a", "b", "c"))


def test_likeness_by_hand() -> None:
    """Class a has 0, 51 and 255, class b 100 and 151: classmates are 51, 51, 204, 51 and 51 apart (of 255).

    A computed a of 60 is 9 from its nearest, a computed b of 60 is 40 from its nearest; classes do not mix.
    """
    found = likeness(even(60, 60), torch.tensor([0, 1]), TRAINING, Streams(0))
    assert found.nearest[:, 0, 0, 0].tolist() == [51, 100]
    assert found.distance.tolist() == pytest.approx([9 / 255, 40 / 255])
    assert found.classmates.tolist() == pytest.approx([0.2, 0.2, 0.8, 0.2, 0.2])
    record = found.attack(4, "model-inversion", "words")
    value = {figure.name: figure.value for figure in record.figures}
    assert value["min_l2"] == pytest.approx(9 / 255)
    assert value["mean_l2"] == pytest.approx(24.5 / 255)
    assert value["control_min_l2"] == pytest.approx(0.2)
    assert value["control_mean_l2"] == pytest.approx(1.6 / 5)
    a, b = 60 / 255, 51 / 255
    assert value["max_ssim"] == pytest.approx((2 * a * b + 1e-4) / (a * a + b * b + 1e-4))
    a, b = 151 / 255, 100 / 255
    assert value["control_max_ssim"] == pytest.approx((2 * a * b + 1e-4) / (a * a + b * b + 1e-4))
    assert value["classmates_closer"] == 0
    assert (record.figure("min_l2").n, record.figure("control_min_l2").n, record.seed) == (2, 5, 4)
    assert record.findings[0].startswith("2 of 2 images are nearer to a training image than 99% of the training images")


def test_an_image_of_the_class_is_not_called_a_patients() -> None:
    """111 is 60 from 51: four of five training images have a classmate nearer than that."""
    record = likeness(even(111), torch.tensor([0]), TRAINING, Streams(0)).attack(0, "x", "words")
    assert record.figure("classmates_closer").value == pytest.approx(2 / 3)
    assert record.findings == ()


def test_duplicates_among_training_images_do_not_hide_a_copy() -> None:
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (210, 1, 12, 12), generator=draw, dtype=torch.uint8)
    pixels[1] = pixels[0]
    training = ImageSet(pixels, torch.zeros(210, dtype=torch.int64), ("a", "b"))
    found = likeness(pixels[5:6], torch.tensor([0]), training, Streams(0)).attack(0, "x", "words")
    assert found.figure("classmates_closer").value == pytest.approx(2 / 210)
    assert found.findings[0].startswith("1 of 1 images are nearer")


def test_a_copy_of_an_image_outside_the_draw_is_found() -> None:
    pixels = torch.randint(0, 256, (40, 1, 12, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    training = ImageSet(pixels, torch.zeros(40, dtype=torch.int64), ("a", "b"))
    found = likeness(pixels, training.labels, training, Streams(0), most=5)
    assert found.distance.max() == 0
    assert found.similarity.tolist() == pytest.approx([1.0] * 40)
    assert len(found.classmates) == 5
    assert found.classmates.min() > 0.2
    assert found.attack(0, "x", "words").findings[0].startswith("40 of 40 images")


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(
        BadInput, match=r"images of \(1, 8, 8\) cannot be held against training images of \(1, 12, 12\)"
    ):
        likeness(even(3)[..., :8, :8], torch.tensor([0]), TRAINING, Streams(0))


def test_training_images_are_bounded() -> None:
    found = likeness(even(60), torch.tensor([0]), TRAINING, Streams(0), most=5)
    assert len(found.classmates) == 3
    with pytest.raises(BadInput, match="no class has both a computed image and two training images"):
        likeness(even(60), torch.tensor([0]), TRAINING, Streams(0), most=1)
    with pytest.raises(BadInput, match="no class has both"):
        likeness(even(60), torch.tensor([2]), TRAINING, Streams(0))


def test_pictures_are_nearest_first() -> None:
    pairs = likeness(even(60, 99), torch.tensor([0, 1]), TRAINING, Streams(0)).pictures(1)["pairs"]
    assert [pairs[name][0, 0, 0, 0].item() for name in ("computed", "nearest")] == [99, 100]
    assert pairs["l2"].tolist() == pytest.approx([1 / 255])


def trained(name: str) -> tuple[Member, ImageSet]:
    site, spec = tiny.images(64), NetSpec(name, 3, 4, 8, width=4)
    fit = Fit("site", spec, fresh(spec, Streams(0).torch("start")), site, Recipe(40, batch=16, lr=0.03), 1)
    return Member(spec, train_one(fit, CPU).weights), site


@pytest.mark.parametrize(("name", "weight"), [("small", 0.05), ("cnn4", 10.0)])
def test_inverted_images_are_what_the_model_takes_for_its_classes(name: str, weight: float) -> None:
    """With batch norm and without; in so small a network the label must not be drowned by statistics."""
    member, site = trained(name)
    how = Inversion(steps=60, batch=32, jitter=0, bn_weight=weight)
    found = invert(member, how, Streams(0), CPU)
    assert found.images.shape == (32, 3, 8, 8)
    assert found.images.dtype == torch.uint8
    assert found.labels.tolist() == [0, 1, 2, 3] * 8
    assert torch.equal(found.said, network_outputs(member.spec, member.weights, found.images, CPU).logits.argmax(dim=1))
    assert (found.said == found.labels).float().mean() > 0.5  # chance is a quarter
    assert torch.equal(found.images, invert(member, how, Streams(0), CPU).images)
    assert not torch.equal(found.images, invert(member, how, Streams(1), CPU).images)
    record = found.attack(likeness(found.images, found.labels, site, Streams(0)), seed=0)
    assert record.name == "model-inversion"
    assert record.figures[0].name == "believed"
    assert not any("weak" in finding for finding in record.findings)


@pytest.mark.parametrize(("name", "used"), [("small", True), ("cnn4", False)])
def test_statistics_are_used_where_there_are_some(name: str, used: bool) -> None:
    member, _ = trained(name)
    with_them, without = (
        invert(member, Inversion(steps=3, batch=4, bn_weight=weight), Streams(0), CPU).images for weight in (10, 0)
    )
    assert torch.equal(with_them, without) is not used


def test_an_inversion_that_did_not_work_says_so() -> None:
    near = likeness(even(111), torch.tensor([0]), TRAINING, Streams(0))
    weak = Inverted(even(111), torch.tensor([0]), torch.tensor([1])).attack(near, 0)
    assert weak.figure("believed").value == 0
    assert weak.findings[0].startswith("the model believes only 0% of the computed images")
