"""What class means and counts give away directly."""

import pytest
import torch

from wardround.audit.exposure import exposed_prototypes, label_count_audit, prototype_audit
from wardround.errors import BadInput
from wardround.learn.embeddings import Embeddings
from wardround.learn.prototypes import Prototypes, class_means

CLASSES = ("ash", "birch", "cedar", "durmast")
# One image of ash, three of birch, two of cedar, none of durmast.
OWN = Embeddings(
    torch.tensor([[4.0, 0.0], [1.0, 2.0], [3.0, 2.0], [2.0, 8.0], [0.0, 1.0], [5.0, 5.0]]),
    torch.tensor([0, 1, 1, 1, 2, 2]),
)


def test_the_mean_of_one_image_is_that_image() -> None:
    (case,) = exposed_prototypes(class_means(OWN.features, OWN.labels, 4), OWN)
    assert (case.label, case.images, case.image, case.gap) == (0, 1, 0, 0.0)


def test_equal_images_are_found_and_noised_means_are_not() -> None:
    own = Embeddings(torch.tensor([[1.0, 2.0], [1.0, 2.0], [7.0, 7.0]]), torch.tensor([1, 1, 0]))
    means = class_means(own.features, own.labels, 4)
    assert [(case.label, case.images) for case in exposed_prototypes(means, own)] == [(0, 1), (1, 2)]
    noised = Prototypes(means.means + 0.1, means.known)
    assert exposed_prototypes(noised, own) == []


def test_a_prototype_of_another_sites_class_is_no_case() -> None:
    everything = Prototypes(torch.ones(4, 2), torch.ones(4, dtype=torch.bool))
    assert exposed_prototypes(everything, OWN) == []


def test_the_record_of_prototypes() -> None:
    record = prototype_audit(class_means(OWN.features, OWN.labels, 4), OWN, CLASSES, seed=2)
    assert {figure.name: figure.value for figure in record.figures} == {
        "prototypes_sent": 3,
        "prototypes_of_one_image": 1,
        "prototypes_of_two_images": 1,
    }
    assert record.findings == (
        "the prototype of ash is the embedding of one image (1 in this class)",
        "whoever has one of the two images of cedar can work out the other's embedding",
    )


def test_label_counts_as_sent() -> None:
    record = label_count_audit(torch.tensor([40, 1, 0, 4]), CLASSES, seed=0)
    assert {figure.name: figure.value for figure in record.figures} == {"images": 45, "few": 2, "absent": 1}
    assert record.findings == ("birch has 1 image: single patients", "durmast has 4 images: single patients")
    assert label_count_audit(torch.tensor([10, 10, 10, 10]), CLASSES, seed=0).findings == ()
    assert label_count_audit(torch.tensor([10, 10, 10, 9]), CLASSES, seed=0, few=10).figure("few").value == 1


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match="use the stage that the study names"):
        exposed_prototypes(Prototypes.none(4, 3), OWN)
    with pytest.raises(BadInput, match="do not fit 4 classes; give one for each"):
        label_count_audit(torch.ones(3), CLASSES, 0)
