"""Runs in TensorBoard and MLflow: what was written there is read back with the tools themselves."""

from __future__ import annotations

import importlib.util
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from commands import cli, empty_place, read
from wardround.errors import BadInput
from wardround.progress import Silent
from wardround.run import begin_comparison, begin_run, read_result
from wardround.tracking import follow
from wardround.tracking.follow import track
from wardround.tracking.mlflow_sink import MlflowSink

ROUNDS = 3


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: socket.socket, address: Any) -> None:
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    tiny.give_tiny_data(monkeypatch)
    yield from empty_place(tmp_path, monkeypatch)


@pytest.fixture
def run(place: Path) -> Path:
    """A finished run with a note."""
    settings = tiny.settings(method="fedavg", rounds=ROUNDS, participants=0.1, train={"lr": 0.125})
    begin_run(settings, place / "runs/mine", Silent()).finish()
    return place / "runs/mine"


def expected(run: Path) -> Counter[tuple[str, int, float]]:
    """Every figure of a finished run, once each."""
    result = read_result(run)
    figures: Counter[tuple[str, int, float]] = Counter()
    for row in result["rows"]:
        if row["value"] is not None:
            parts = [row["metric"], row["split"], row["model"], row["site"]]
            figures["/".join(part for part in parts if part), row["round"] + 1, round(row["value"], 5)] += 1
    for headline in result["headlines"]:
        if headline["value"] is not None:
            figures[f"headline/{headline['key']}", 0, round(headline["value"], 5)] += 1
    for way in ("up", "down"):
        total = sum(row["bytes"] for row in result["ledger"]["totals"] if row["direction"] == way)
        figures[f"bytes/{way}", 0, round(total, 5)] += 1
    (seconds,) = result["seconds"].values()
    figures["seconds", 0, round(seconds, 5)] += 1
    return figures


def tensorboard_values(run: Path) -> list[tuple[int, Any]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    files = sorted((run / "tensorboard").iterdir())
    return [(e.step, value) for file in files for e in EventFileLoader(str(file)).Load() for value in e.summary.value]


def in_tensorboard(run: Path) -> Counter[tuple[str, int, float]]:
    from tensorboard.util.tensor_util import make_ndarray

    return Counter(
        (value.tag, step, round(float(make_ndarray(value.tensor)), 5))
        for step, value in tensorboard_values(run)
        if value.metadata.plugin_data.plugin_name == "scalars"
    )


def mlflow_runs(folder: Path) -> tuple[Any, list[Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("wardround")
    return client, list(client.search_runs([experiment.experiment_id], order_by=["attributes.run_name"]))


def in_mlflow(folder: Path, number: int = 0) -> Counter[tuple[str, int, float]]:
    client, runs = mlflow_runs(folder)
    return Counter(
        (metric.key, metric.step, round(metric.value, 5))
        for name in runs[number].data.metrics
        for metric in client.get_metric_history(runs[number].info.run_id, name)
    )


def test_a_finished_run_is_in_tensorboard_whole_and_once(run: Path) -> None:
    assert track(run, "tensorboard") == [f"tensorboard --logdir {run.parent}"]
    assert in_tensorboard(run) == expected(run)
    assert track(run, "tensorboard") == [f"tensorboard --logdir {run.parent}"]
    assert len(list((run / "tensorboard").iterdir())) == 1  # nothing new: not even a file
    texts = {
        value.tag: value.tensor.string_val[0].decode()
        for _, value in tensorboard_values(run)
        if value.tensor.string_val
    }
    assert texts["notes"].startswith("- participants = 0.1 of 3 sites rounds to none; one site is asked in each round")
    assert texts["report"] == str(run / "report.html")


def test_settings_are_tensorboard_s_parameters(run: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    track(run, "tensorboard")
    (found,) = (
        HParamsPluginData.FromString(value.metadata.plugin_data.content)
        for _, value in tensorboard_values(run)
        if value.metadata.plugin_data.plugin_name == "hparams"
    )
    parameters = found.session_start_info.hparams
    assert parameters["train.lr"].number_value == 0.125
    assert parameters["method"].string_value == "fedavg"
    assert parameters["data.capped"].bool_value is True
    assert parameters["model.width"].number_value == 2


def test_a_finished_run_is_in_mlflow_whole_and_once(run: Path) -> None:
    (place,) = track(run, "mlflow")
    assert place == f"mlflow ui --backend-store-uri sqlite:///{run.parent / 'mlflow.db'}"
    assert in_mlflow(run.parent) == expected(run)
    assert track(run, "mlflow") == [place]
    assert in_mlflow(run.parent) == expected(run)
    _, (found,) = mlflow_runs(run.parent)
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert {key: found.data.params[key] for key in ("train.lr", "method", "data.capped", "rounds", "name")} == {
        "train.lr": "0.125",
        "method": "fedavg",
        "data.capped": "true",
        "rounds": str(ROUNDS),
        "name": "null",
    }
    assert found.data.tags["wardround.report"] == str(run / "report.html")
    assert "rounds to none; one site is asked in each round" in found.data.tags["mlflow.note.content"]
    assert sorted(path.name for path in run.parent.iterdir()) == ["mine", "mlflow.db"]


def cut_to_round(run: Path, number: int) -> Callable[[], None]:
    """Take a finished run back to the checkpoint after a round, with a little more in its log; gives the way back."""
    text, result = (run / "events.jsonl").read_text(), (run / "result.json").read_text()
    certain = 0
    for line in text.splitlines(keepends=True):
        certain += len(line)
        if f'"kind": "round", "round": {number - 1},' in line:
            break
    (run / "result.json").unlink()
    (run / "checkpoint.json").write_text(f'{{"events_bytes": {certain}}}')
    (run / "events.jsonl").write_text(text[: certain + 400])

    def back() -> None:
        (run / "events.jsonl").write_text(text)
        (run / "result.json").write_text(result)

    return back


@pytest.mark.parametrize("tool", ["tensorboard", "mlflow"])
def test_a_run_that_goes_on_is_gone_on_with(run: Path, tool: str) -> None:
    whole = expected(run)
    back = cut_to_round(run, 1)
    track(run, tool)
    found = in_tensorboard(run) if tool == "tensorboard" else in_mlflow(run.parent)
    assert found
    assert found == Counter({key: n for key, n in whole.items() if key[1] == 1 and "personal" not in key[0]})
    if tool == "mlflow":
        assert mlflow_runs(run.parent)[1][0].info.status == "KILLED"
    back()
    track(run, tool)
    assert (in_tensorboard(run) if tool == "tensorboard" else in_mlflow(run.parent)) == whole
    if tool == "mlflow":
        (found_run,) = mlflow_runs(run.parent)[1]
        assert found_run.info.status == "FINISHED"


def test_a_tensorboard_file_that_a_kill_cut_short_is_completed(run: Path) -> None:
    track(run, "tensorboard")
    (file,) = (run / "tensorboard").iterdir()
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    before = in_tensorboard(run)
    assert 0 < sum(before.values()) < sum(expected(run).values())
    file.rename(file.with_name("events.out.tfevents.1.earlier"))  # as a process of another second would have named it
    track(run, "tensorboard")
    assert in_tensorboard(run) == expected(run)


def test_a_kill_between_two_batches_of_mlflow_logs_nothing_twice(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    real, calls = MlflowClient.log_batch, []

    def killed(self: MlflowClient, *arguments: Any, **named: Any) -> None:
        calls.append(named)
        if sum("metrics" in call for call in calls) == 3:
            raise KeyboardInterrupt
        real(self, *arguments, **named)

    monkeypatch.setattr("wardround.tracking.mlflow_sink.MOST_METRICS", 4)
    monkeypatch.setattr(MlflowClient, "log_batch", killed)
    with pytest.raises(KeyboardInterrupt):
        track(run, "mlflow")
    monkeypatch.setattr(MlflowClient, "log_batch", real)
    assert sum(in_mlflow(run.parent).values()) == 8
    track(run, "mlflow")
    assert in_mlflow(run.parent) == expected(run)


def test_every_method_of_a_comparison_is_a_run_of_its_own(place: Path) -> None:
    path = place / "runs/both"
    begin_comparison(tiny.settings(rounds=2), [("fedavg", {}), ("local", {})], path, Silent()).finish()
    track(path, "mlflow")
    track(path, "tensorboard")
    assert [found.info.run_name for found in mlflow_runs(place / "runs")[1]] == ["both/fedavg", "both/local"]
    for number, method in enumerate(("fedavg", "local")):
        assert in_mlflow(place / "runs", number) == expected(path / method)
        assert in_tensorboard(path / method) == expected(path / method)


def test_a_run_of_the_command_is_followed(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "EVERY", 0.01)
    arguments = ("--data", "phantoms:96", "--rounds", "3", "--set", "model.width=2", "--out", "runs/a")
    code, out, err = cli(capsys, "run", *arguments, "--track", "tensorboard", "--track", "mlflow")
    assert code == 0
    assert "tracked: tensorboard --logdir runs" in err
    assert "tracked: mlflow ui --backend-store-uri sqlite:///" in err
    assert in_tensorboard(place / "runs/a") == in_mlflow(place / "runs") == expected(place / "runs/a")
    assert "tracked" not in out
    code, out, err = cli(capsys, "track", "runs/a", "--to", "tensorboard")
    assert (code, out, err) == (0, "tensorboard --logdir runs\n", "")
    code, out, err = cli(capsys, "run", *arguments[:-1], "runs/b", "--track", "tensorboard", "--quiet")
    assert (code, err) == (0, "")
    assert in_tensorboard(place / "runs/b") == expected(place / "runs/b")


def test_no_tool_makes_a_run_fail(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("the store is away")

    monkeypatch.setattr(MlflowSink, "figure", broken)
    arguments = (
        "--data",
        "phantoms:96",
        "--rounds",
        "2",
        "--set",
        "model.width=2",
        "--out",
        "runs/a",
        "--track",
        "mlflow",
    )
    code, _, err = cli(capsys, "run", *arguments, "--quiet")
    assert code == 0
    assert read("runs/a/result.json")["methods"] == ["fedavg"]
    assert err == (
        "warning: mlflow could not follow the run (OSError: the store is away); afterwards try: "
        "wardround track runs/a --to mlflow\n"
    )


@pytest.mark.parametrize("command", [("run", "--track"), ("compare", "fedavg", "--track"), ("track", "runs/a", "--to")])
def test_a_tool_that_is_unknown_or_missing_is_told_before_anything_is_done(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    code, _, err = cli(capsys, *command, "wandb")
    assert (code, err) == (2, "error: runs cannot be tracked with 'wandb'; use tensorboard or mlflow\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = cli(capsys, *command, "mlflow")
    assert (code, err) == (2, "error: mlflow is not installed; install it with: pip install 'wardround[tracking]'\n")
    assert list(place.iterdir()) == []


def test_what_is_no_run_is_told(place: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere is not the directory of a run: it has no settings\.json"):
        track(place / "nowhere", "tensorboard")


def test_a_store_that_was_asked_for_is_used(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    uri = f"sqlite:///{tmp_path / 'elsewhere/mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert track(run, "mlflow") == [f"mlflow ui --backend-store-uri {uri}"]
    assert in_mlflow(tmp_path / "elsewhere") == expected(run)
    assert not (run.parent / "mlflow.db").exists()
