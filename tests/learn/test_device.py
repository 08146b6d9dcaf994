import os

import pytest
import torch

from wardround.errors import BadInput
from wardround.learn import device as module
from wardround.learn.device import SITES_AT_ONCE_ON_GPU, Device, find_device, one_thread_per_worker, worker_pool


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that says it has two GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return monkeypatch


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_auto_is_the_cpu_with_a_worker_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert find_device() == find_device("cpu") == Device(torch.device("cpu"), 3)
    assert find_device("cpu", 7).workers == 7
    assert not find_device().is_cuda


def test_where_affinity_is_unknown_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert module._cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert module._cores() == 1


@pytest.mark.usefixtures("gpus")
def test_with_gpus_auto_is_the_first_and_a_number_chooses() -> None:
    assert find_device() == find_device("cuda") == Device(torch.device("cuda", 0), SITES_AT_ONCE_ON_GPU)
    assert find_device("cuda:1", 4) == Device(torch.device("cuda", 1), 4)
    assert find_device("cuda:1").is_cuda
    assert find_device("cpu").torch == torch.device("cpu")


def test_on_a_gpu_nothing_is_left_to_what_was_fastest_that_day(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.backends.cudnn, "benchmark", True)
    gpus.setattr(torch.backends.cudnn, "deterministic", False)
    gpus.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    find_device("cpu")
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == (True, False)
    find_device("cuda")
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == (False, True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    gpus.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    find_device("cuda")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", ["cuda:2", "cuda:128", "cuda:256", "cuda:99999"])
def test_a_gpu_that_is_not_there_is_refused(name: str) -> None:
    """Torch keeps the number of a device in a byte: it takes cuda:256 for cuda:0."""
    with pytest.raises(BadInput, match=r"is not there \(2 CUDA devices found\); use --device cpu"):
        find_device(name)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_cuda_without_a_gpu_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=r"is not there \(0 CUDA devices found\)"):
        find_device(name)


@pytest.mark.parametrize(
    "name", ["", "gpu", "CPU", "cpu:3", "cuda:", "cuda:-1", "cuda:1.5", "cuda:١", "mps", "meta", "cuda:" + "9" * 5000]
)
def test_any_other_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(BadInput, match="is unknown; use auto, cpu, cuda or cuda:N") as refusal:
        find_device(name)
    assert "\n" not in str(refusal.value)


def test_a_device_says_what_it_is(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    assert str(Device(torch.device("cpu"), 2)) == "cpu (2 sites at once)"
    assert str(find_device("cuda:1")) == "cuda:1 (H200)"


def _interrupted_work() -> None:
    with one_thread_per_worker():
        assert torch.get_num_threads() == 1
        raise KeyboardInterrupt


def test_the_number_of_threads_comes_back() -> None:
    torch.set_num_threads(3)
    try:
        with one_thread_per_worker():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(KeyboardInterrupt):
            _interrupted_work()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


def test_a_worker_computes_with_one_thread_whenever_it_was_started() -> None:
    """Started while the main thread computes with three, and kept for the whole process."""
    torch.set_num_threads(3)
    try:
        pool = worker_pool(5)
        assert set(pool.map(lambda _: torch.get_num_threads(), range(20))) == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert worker_pool(5) is pool
