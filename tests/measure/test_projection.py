from pathlib import Path

import numpy as np
import pytest
import torch

from tiny import SIZES, coordinate
from wardround.measure import neighbourhoods, principal_components, project
from wardround.methods.fedavg import FedAvg
from wardround.streams import Streams


def clusters(n: int = 20, width: int = 6) -> torch.Tensor:
    """Two groups of points, far apart."""
    draw = torch.Generator().manual_seed(3)
    points = torch.randn((n, width), generator=draw)
    points[n // 2 :] += 20
    return points


def test_principal_components_are_those_of_scikit_learn() -> None:
    from sklearn.decomposition import PCA

    points = clusters()
    found, shares = principal_components(points)
    other = PCA(2, svd_solver="full").fit(points.double().numpy())
    assert shares == pytest.approx(other.explained_variance_ratio_.tolist())
    theirs = other.transform(points.double().numpy())
    assert np.abs(found.numpy()) == pytest.approx(np.abs(theirs))
    again, _ = principal_components(-points)
    assert torch.allclose(again, -found)  # a component's sign is its loadings', not the solver's


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1), (4, 3)])
def test_few_points_or_features_still_have_a_place(shape: tuple[int, int]) -> None:
    found, shares = principal_components(torch.ones(shape))
    assert found.tolist() == [[0.0, 0.0]] * shape[0]
    assert shares == (0.0, 0.0)


def test_neighbours_stay_together_and_the_picture_is_the_same_every_time() -> None:
    points = clusters()
    found = neighbourhoods(points)
    assert torch.equal(found, neighbourhoods(points))
    inside = torch.cdist(found[:10], found[:10]).max()
    assert torch.cdist(found[:10], found[10:]).min() > inside


def test_points_are_drawn_at_random_within_the_limit_and_carry_site_and_class() -> None:
    features = {"a": clusters(40), "b": clusters(6)}
    labels = {"a": torch.arange(40), "b": torch.full((6,), 99)}
    pca, tsne = project(features, labels, Streams(0), 30)
    assert (pca["way"], tsne["way"]) == ("pca", "tsne")
    assert pca["sites"] == ["a", "b"]
    assert [point[2:] for point in pca["points"]] == [point[2:] for point in tsne["points"]]
    drawn = [int(label) for _, _, site, label in pca["points"] if site == 0]
    assert len(drawn) == 15
    assert drawn != sorted(drawn)
    assert [point[2:] for point in pca["points"][15:]] == [[1, 99]] * 6
    assert max(abs(value) for point in pca["points"] for value in point[:2]) == 1.0
    assert list(project({}, {}, Streams(0), 30)) == []
    assert [p["way"] for p in project({"a": clusters(4)}, {"a": torch.zeros(4)}, Streams(0), 30)] == ["pca"]


def test_a_result_holds_them_where_features_are_compared(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", FedAvg(), evaluate_features=True)
    assert [(p["method"], p["way"], len(p["points"])) for p in result["projections"]] == [
        ("fedavg", "pca", sum(SIZES)),
        ("fedavg", "tsne", sum(SIZES)),
    ]
    assert coordinate(tmp_path / "off", FedAvg())["projections"] == []
