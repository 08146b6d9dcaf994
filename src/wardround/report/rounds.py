"""Every measured round of every method as one table: what it had cost by then, and how good the models were."""

from __future__ import annotations

from typing import Any

from wardround.report.parts import View, tabulate
from wardround.report.values import UNDEFINED, as_count, as_number, as_records, as_text, byte_size, show

COLUMNS = {  # field of a point and its heading
    "shared_global_accuracy": "Shared, global",
    "backward_transfer": "Backward transfer",
    "trained_local_accuracy": "After training, local",
    "worst_trained_local_accuracy": "After training, worst",
}
HEAD = ("Round", "Seconds", "Bytes", *COLUMNS.values())


def rounds_view(result: View) -> View:
    """Seconds are those of the work alone, measuring left out; seconds and bytes are from the first round on."""
    table: list[list[Any]] = []
    for point in as_records(result.get("rounds")):
        seconds = as_number(point.get("seconds"))
        bytes_ = as_count(point.get("bytes"))
        cost = [
            UNDEFINED if seconds is None else f"{seconds:,.1f}",
            {"text": byte_size(bytes_), "title": f"{bytes_:,} bytes"},
        ]
        figures = [show(key, as_number(point.get(key))) for key in COLUMNS]
        table.append([f"{as_text(point.get('method'))}, {as_count(point.get('round')) + 1}", *cost, *figures])
    return tabulate("Each round: seconds of work and bytes from the beginning to its end", HEAD, table)
