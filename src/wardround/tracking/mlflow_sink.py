"""A run in MLflow: by default in one SQLite file beside the runs, with no server and no network.

Where `MLFLOW_TRACKING_URI` is set, that store is used: whoever set it asked for it. MLflow's own reports about its use
are switched off before it is loaded.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from wardround.record.plain import json_object, read
from wardround.record.rundir import write_json
from wardround.tracking.sink import plain_name

EXPERIMENT = "wardround"
RECORD = "tracking.json"  # in the run's folder: which run of which store it is
MOST_METRICS, MOST_PARAMETERS, LONGEST = 1000, 100, 5000  # what MLflow takes at once, and the longest text


class MlflowSink:
    """One run of an MLflow store."""

    def __init__(self, run: Path, name: str) -> None:
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        beside = run.resolve().parent
        if (beside / "comparison.json").is_file():  # the runs of a comparison are kept with all others
            beside = beside.parent
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{beside / 'mlflow.db'}"
        self.place = f"mlflow ui --backend-store-uri {uri}"
        self.seen: set[tuple[str, int]] = set()
        self._client = MlflowClient(uri)
        self._waiting: list[Metric] = []
        self._run = self._known(run, uri) or self._begin(run, uri, name, beside)

    def settings(self, values: Mapping[str, object]) -> None:
        """As parameters; a value that is there already stays."""
        parameters = [Param(plain_name(key), _text(value)[:LONGEST]) for key, value in values.items()]
        for i in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[i : i + MOST_PARAMETERS])

    def figure(self, name: str, step: int, value: float) -> None:
        """As a metric."""
        self._waiting.append(Metric(name, value, int(1000 * time.time()), step))

    def texts(self, values: Mapping[str, str]) -> None:
        """As the description that MLflow shows, and a tag each."""
        description = "\n\n".join(f"**{title}**\n\n{text}" for title, text in values.items())
        self._client.set_tag(self._run, "mlflow.note.content", description[:LONGEST])
        for title, text in values.items():
            self._client.set_tag(self._run, f"wardround.{title}", text[:LONGEST])

    def flush(self) -> None:
        """To the store."""
        for i in range(0, len(self._waiting), MOST_METRICS):
            self._client.log_batch(self._run, metrics=self._waiting[i : i + MOST_METRICS])
        self._waiting = []

    def close(self, is_finished: bool) -> None:
        """A run that may still go on is `KILLED`, as MLflow calls it, until it does."""
        self.flush()
        self._client.set_terminated(self._run, "FINISHED" if is_finished else "KILLED")

    def _known(self, run: Path, uri: str) -> str | None:
        """The run as it was begun earlier, with what it holds; None where this store has none."""
        try:
            number = json_object(read(run / RECORD))["mlflow"][uri]
            metrics = self._client.get_run(number).data.metrics
        except (KeyError, TypeError, MlflowException):
            return None
        for name in metrics:
            self.seen |= {(name, metric.step) for metric in self._client.get_metric_history(number, name)}
        self._client.update_run(number, "RUNNING")
        return str(number)

    def _begin(self, run: Path, uri: str, name: str, beside: Path) -> str:
        experiment = self._client.get_experiment_by_name(EXPERIMENT)
        if experiment is None:
            files = (beside / "mlflow-files").as_uri() if uri.startswith("sqlite:") else None
            number = self._client.create_experiment(EXPERIMENT, artifact_location=files)
        else:
            number = experiment.experiment_id
        made = str(self._client.create_run(number, run_name=name).info.run_id)
        write_json(run / RECORD, {"mlflow": {uri: made}})
        return made


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
