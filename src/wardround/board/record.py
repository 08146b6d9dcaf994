"""The few parts of a run's record that a list of runs shows, without reading the rest.

A `result.json` holds every row of every round, some hundred kilobytes; the list needs a few lines of it. wardround
writes one key of the record a line, indented by one space, and JSON allows no line break inside a text. So the parts
can be told apart by their line beginnings alone, and only those that are wanted are parsed. A file that is laid out
otherwise is parsed whole.
"""

from __future__ import annotations

import json
from typing import Any

from wardround.record.plain import json_object
from wardround.report.values import as_count, as_dict, as_number, as_records, as_text, as_texts

WANTED = ("schema_version", "kind", "created", "methods", "settings", "data", "headlines", "seconds")
FIGURES = ("local_accuracy", "global_accuracy", "balance", "worst_site_accuracy", "shared_global_accuracy")


def part(text: bytes, key: str, indent: int = 1, begin: int = 0) -> bytes | None:
    """The value of a key as it is written, from `begin` on; None where there is no such line."""
    mark = b'\n%s"%s": ' % (b" " * indent, key.encode())
    start = text.find(mark, begin)
    if start < 0:
        return None
    start += len(mark)
    end = text.find(b'\n%s"' % (b" " * indent), start)
    return text[start : end if end >= 0 else text.rfind(b"}")].rstrip().removesuffix(b",")


def read_summary(text: bytes) -> dict[str, Any] | None:
    """What a list shows of a `result.json`; None where this is none, or one of another version."""
    record = _in_parts(text) or json_object(text)
    return record if record.get("schema_version") == 1 else None


def _in_parts(text: bytes) -> dict[str, Any]:
    """The wanted parts of a record; empty where it is not laid out as ours are."""
    found = {key: value for key in WANTED if (value := part(text, key)) is not None}
    totals = part(text, "totals", indent=2, begin=max(text.find(b'\n "ledger": '), 0))
    try:
        record = {key: json.loads(value) for key, value in found.items()}
        record["ledger"] = {"totals": json.loads(totals)} if totals is not None else {}
    except (ValueError, RecursionError):
        return {}
    return record if "schema_version" in record else {}


def figures(record: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """The headline figures of each method."""
    found: dict[str, dict[str, float | None]] = {method: {} for method in as_texts(record.get("methods"))}
    for headline in as_records(record.get("headlines")):
        if (key := as_text(headline.get("key"))) in FIGURES:
            found.setdefault(as_text(headline.get("method")), {})[key] = as_number(headline.get("value"))
    return found


def sent(record: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes up and down of each method."""
    found: dict[str, dict[str, int]] = {}
    for row in as_records(as_dict(record.get("ledger")).get("totals")):
        ways = found.setdefault(as_text(row.get("method")), {"up": 0, "down": 0})
        direction = as_text(row.get("direction"))
        ways[direction] = ways.get(direction, 0) + as_count(row.get("bytes"))
    return found
