"""Predictions as a table: CSV for people and spreadsheets, JSON for programs."""

from __future__ import annotations

import csv
import io
import json

from wardround.deploy.escape import cell, visible
from wardround.deploy.predict import Predictions

DIGITS = 6


def as_csv(found: Predictions) -> str:
    """A line per image: its file, the class with the largest probability, and the probability of each class.

    Where the model can tell, `unfamiliar` is 1 for an image unlike what it was trained on. Text is quoted and cannot be
    taken for a formula; JSON has file names to the letter.
    """
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    tells = any(row.unfamiliar is not None for row in found.rows)
    last = ["unfamiliar"] if tells else []
    writer.writerow(["file", "predicted", *(f"p({visible(name)})" for name in found.record.task.classes), *last])
    for row in found.rows:
        marked = [int(bool(row.unfamiliar))] if tells else []
        probabilities = [round(p, DIGITS) for p in row.probabilities]
        writer.writerow([cell(row.file), cell(row.predicted), *probabilities, *marked])
    return text.getvalue()


def as_json(found: Predictions) -> str:
    """The same with where the model comes from, and the images that could not be read."""
    classes = found.record.task.classes
    return json.dumps(
        {
            "model": found.record.model_dump(mode="json"),
            "predictions": [
                {
                    "file": row.file,
                    "predicted": row.predicted,
                    "probabilities": {
                        name: round(p, DIGITS) for name, p in zip(classes, row.probabilities, strict=True)
                    },
                    **({} if row.unfamiliar is None else {"unfamiliar": row.unfamiliar}),
                }
                for row in found.rows
            ],
            "failures": [{"file": failure.file, "reason": failure.reason} for failure in found.failures],
            "notes": found.notes,
        },
        indent=1,
        allow_nan=False,
    )
