"""A run as TensorBoard's files, in its own folder: `tensorboard --logdir runs` then finds every run below `runs`.

Written with TensorBoard's own writer, so that neither TensorFlow nor torch's wrapper is needed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2
from tensorboard.plugins.text import metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

FOLDER = "tensorboard"


class TensorBoardSink:
    """Event files under a run's folder."""

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER
        self.place = f"tensorboard --logdir {run.parent}"
        values = list(_written(self.folder))
        self.seen = {(value.tag, step) for step, value in values}
        self._texts = {value.tag: value.tensor.string_val[0].decode() for _, value in values if value.tensor.string_val}
        self._has_settings = any(value.metadata.plugin_data.plugin_name == "hparams" for _, value in values)
        self._writer: EventFileWriter | None = None

    def settings(self, values: Mapping[str, object]) -> None:
        """For the page HPARAMS."""
        if not self._has_settings:
            plain = {key: v if isinstance(v, bool | int | float | str) else json.dumps(v) for key, v in values.items()}
            self._add(summary_v2.hparams_pb(plain, trial_id=self.folder.parent.name), 0)
            self._has_settings = True

    def figure(self, name: str, step: int, value: float) -> None:
        """For the page SCALARS."""
        self._add(Summary(value=[Summary.Value(tag=name, simple_value=value)]), step)

    def texts(self, values: Mapping[str, str]) -> None:
        """For the page TEXT; written again only where it has changed."""
        for title, text in values.items():
            if self._texts.get(title) != text:
                value = Summary.Value(
                    tag=title,
                    tensor=make_tensor_proto([text.encode()]),
                    metadata=metadata.create_summary_metadata(display_name=title, description=""),
                )
                self._add(Summary(value=[value]), 0)
                self._texts[title] = text

    def flush(self) -> None:
        """To the disk."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, is_finished: bool) -> None:
        """The files have no word for a run's end."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, summary: Any, step: int) -> None:
        if self._writer is None:  # a file only where there is something to write
            self._writer = EventFileWriter(str(self.folder))
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _written(folder: Path) -> Iterator[tuple[int, Any]]:
    """Everything in the files that are there, by step; a record that a kill cut short is passed over."""
    for file in sorted(folder.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                yield event.step, value
