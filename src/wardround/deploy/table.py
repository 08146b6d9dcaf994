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

    Text is quoted and cannot be taken for a formula; JSON has file names to the letter.
    """
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(["file", "predicted", *(f"p({visible(name)})" for name in found.record.task.classes)])
    for row in found.rows:
        writer.writerow([cell(row.file), cell(row.predicted), *(round(p, DIGITS) for p in row.probabilities)])
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
                }
                for row in found.rows
            ],
            "failures": [{"file": failure.file, "reason": failure.reason} for failure in found.failures],
            "notes": found.notes,
        },
        indent=1,
        allow_nan=False,
    )
