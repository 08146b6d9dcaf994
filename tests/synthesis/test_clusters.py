"""Which models belong together: silhouettes by hand, and models that answer noise alike."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from wardround.learn.predictor import Member
from wardround.models import NetSpec, fresh
from wardround.synthesis.clusters import answers_to_noise, central, group, parameters, similarity

SPEC = NetSpec("small", 3, 4, 8, width=2)
CPU = torch.device("cpu")


def points(*rows: Any) -> Any:
    return np.array(rows, dtype=np.float64).reshape(len(rows), -1)


def model(seed: int, bias: list[float] | None = None) -> Member:
    weights = fresh(SPEC, torch.Generator().manual_seed(seed))
    if bias is not None:
        weights["head.weight"] = torch.zeros_like(weights["head.weight"])
        weights["head.bias"] = torch.tensor(bias)
    return Member(SPEC, weights)


@pytest.mark.parametrize("clustering", ["predictions", "hierarchical"])
def test_two_pairs_are_two_clusters_with_the_silhouette_by_hand(clustering: Any) -> None:
    """0, 1 | 10, 11. For the outer points a = 1, b = 10.5; for the inner ones b = 9.5.

    With K = 3 one pair stays, and its points have b = 10 or 9 for the nearer single; singles count 0.
    """
    found = group(points(0, 10, 1, 11), clustering, 0, seed=3)
    assert found.labels == (0, 1, 0, 1)
    assert found.count == 2
    assert list(found.silhouettes) == [2, 3]
    assert found.silhouettes[2] == pytest.approx((9.5 / 10.5 + 8.5 / 9.5) / 2)
    assert found.silhouettes[3] == pytest.approx((9 / 10 + 8 / 9) / 4)


def test_angles_are_distances_already() -> None:
    """Two pairs, 1 apart within and 4 across: (4 − 1) / 4; between the rows of that matrix it would be 0.8."""
    angles = points([0, 1, 4, 4], [1, 0, 4, 4], [4, 4, 0, 1], [4, 4, 1, 0])
    found = group(angles, "subspaces", 0, 0)
    assert found.labels in ((0, 0, 1, 1), (1, 1, 0, 0))
    assert found.silhouettes[2] == pytest.approx(0.75)


def test_three_far_pairs_are_three_clusters() -> None:
    assert group(points(0, 100, 200, 1, 101, 201), "predictions", 0, seed=0).labels == (0, 1, 2, 0, 1, 2)


def test_of_equal_silhouettes_the_fewest_clusters() -> None:
    """The corners of a regular simplex: every split has silhouette 0, as all distances are equal."""
    found = group(np.eye(4), "hierarchical", 0, seed=0)
    assert set(found.silhouettes.values()) == {0.0}
    assert found.count == 2


def test_what_differs_by_rounding_alone_is_equal() -> None:
    corners = np.eye(5) + 1e-9 * np.random.default_rng(12).normal(size=(5, 5))
    found = group(corners, "hierarchical", 0, seed=0)
    assert found.silhouettes[3] > found.silhouettes[2]
    assert found.count == 2


@pytest.mark.parametrize("rows", [[1.0], [1.0, 2.0], [3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0]])
def test_where_nothing_can_be_chosen_all_are_one_cluster(rows: list[float]) -> None:
    found = group(points(*rows), "predictions", 0, seed=0)
    assert (found.labels, found.silhouettes) == ((0,) * len(rows), {})


def test_never_more_clusters_than_distinct_points() -> None:
    twice = points(0, 0, 5, 5 + 1e-9, 9)
    assert group(twice, "predictions", 5, seed=0).labels == (0, 0, 1, 1, 2)
    assert list(group(twice, "predictions", 0, seed=0).silhouettes) == [2, 3]


@pytest.mark.parametrize(("clusters", "count"), [(1, 1), (2, 2), (4, 4)])
def test_a_fixed_number(clusters: int, count: int) -> None:
    assert group(points(0, 1, 10, 12), "predictions", clusters, seed=0).count == count


def test_the_seed_is_all_that_is_random() -> None:
    cloud = np.random.default_rng(0).normal(size=(9, 4))
    assert group(cloud, "predictions", 0, 2**63 - 1) == group(cloud, "predictions", 0, 2**63 - 1)


def test_answers_are_probabilities_probe_by_probe() -> None:
    noise = torch.randn((5, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    members = [model(0, [math.log(3), 0.0, 0.0, 0.0]), model(1, [0.0, 0.0, 0.0, 0.0])]
    found = answers_to_noise(members, noise, CPU)
    assert found.shape == (2, 20)
    np.testing.assert_allclose(found[0], [1 / 2, 1 / 6, 1 / 6, 1 / 6] * 5, rtol=1e-6)
    np.testing.assert_allclose(found[1], [1 / 4] * 20, rtol=1e-6)
    logits = answers_to_noise(members, noise, CPU, "logits")
    np.testing.assert_allclose(logits[0], [math.log(3), 0, 0, 0] * 5, rtol=1e-6)


def test_models_that_answer_alike_are_together() -> None:
    members = [model(0, [6.0, 0, 0, 0]), model(1, [0, 6.0, 0, 0]), model(2, [6.5, 0, 0, 0]), model(3, [0, 6.5, 0, 0])]
    noise = torch.randn((4, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    assert group(answers_to_noise(members, noise, CPU), "predictions", 0, 0).labels == (0, 1, 0, 1)


def test_coordinates_of_parameters_keep_distances_and_ignore_statistics() -> None:
    members = [model(0), model(1), model(2)]
    shifted = {n: t + 5 if "running" in n else t for n, t in members[0].weights.items()}
    found = parameters([*members, Member(SPEC, shifted)])
    assert found.shape == (4, 4)
    names = [n for n in members[0].weights if "running" not in n and "num_batches" not in n]
    apart = math.sqrt(sum(float((members[0].weights[n] - members[1].weights[n]).square().sum()) for n in names))
    assert float(np.linalg.norm(found[0] - found[1])) == pytest.approx(apart, rel=1e-6)
    assert float(np.linalg.norm(found[0] - found[3])) == pytest.approx(0, abs=1e-9)


def test_similarity_by_hand() -> None:
    """Centres 0, 1, 3: squares 1, 4, 9, median 4. Row 1: 1, e^(−1/4), e^(−9/4)."""
    found = similarity(points(-1, 1, 1, 3), [0, 0, 1, 2])
    row = torch.tensor([1.0, math.exp(-1 / 4), math.exp(-9 / 4)], dtype=torch.float64)
    torch.testing.assert_close(found[0], row / row.sum())
    torch.testing.assert_close(found.sum(dim=1), torch.ones(3, dtype=torch.float64))
    assert similarity(points(4, 5), [0, 0]).tolist() == [[1.0]]


def test_the_central_point_by_hand() -> None:
    """0, 2, 7 have the centre 3; without the 2, the 0 is nearest. Of 4 and 6 the first; a cluster may have nobody."""
    of = (0, 0, 0, 1, 1, 2)
    apart = points(0, 2, 7, 4, 6, 50)
    assert central(apart, of, [True] * 6) == [1, 3, 5]
    assert central(apart, of, [True, False, True, False, True, False]) == [0, 4, None]
