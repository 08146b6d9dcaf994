"""The values of a result: read tolerantly, and shown the same way everywhere on the page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

UNDEFINED = "–"
MOST = 2.0**64  # no count, seed or time of ours is as large; what is can neither be added up nor drawn


def as_dict(value: Any) -> dict[str, Any]:
    """A dict, empty where there is none."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """A list, empty where there is none."""
    return value if isinstance(value, list) else []


def as_records(value: Any) -> list[dict[str, Any]]:
    """The dicts of a list."""
    return [item for item in as_list(value) if isinstance(item, dict)]


def as_texts(value: Any) -> list[str]:
    """The items of a list as texts."""
    return [as_text(item) for item in as_list(value)]


def as_text(value: Any) -> str:
    """A value as text, empty for None."""
    return "" if value is None else str(value)


def as_number(value: Any) -> float | None:
    """A number of a size that can be shown, or None: JSON has no NaN, and Python writes one all the same."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -MOST < value < MOST else None


def as_count(value: Any) -> int:
    """A whole number, to its last digit (a seed may have nineteen); 0 where there is none."""
    return 0 if as_number(value) is None else int(value)


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are defined."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def is_share(name: str) -> bool:
    """Whether a figure of this name is a share, or a difference of shares, shown in per cent."""
    shares = "accuracy" in name or name.startswith("balance") or name.endswith(("consistency", "transfer"))
    return shares or name.startswith("deviation_")


def is_ranked(name: str) -> bool:
    """Whether more is better, as far as this version knows."""
    return name.endswith("auc") or (is_share(name) and not name.startswith("deviation_"))


def show(name: str, value: float | None) -> str:
    """A figure as its name wants it: shares in per cent, areas under a curve to three places, others short."""
    if value is None:
        return UNDEFINED
    if is_share(name):
        return percent(value)
    if name.endswith("auc"):
        return f"{value:.3f}"
    return f"{value:,.0f}" if value.is_integer() else f"{value:.4g}"


def percent(value: float) -> str:
    """0.9137 as 91.4%."""
    return f"{100 * value:.1f}%"


def percent_mark(value: float) -> str:
    """A mark on an axis: 0.8 as 80%, 0.925 as 92.5%."""
    return f"{round(100 * value, 2):g}%"


def byte_size(size: float) -> str:
    """Decimal units, as networks and disks are sold: 1,117,736 is 1.12 MB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.999995 * scale:  # what would round to 1,000.00 of the unit below
            return f"{size / scale:,.2f} {unit}"
    return f"{size:.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds as a person says them: 41 s, 3 min 20 s, 2 h 5 min."""
    if seconds is None:
        return UNDEFINED
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def unit_of_time(seconds: float) -> float:
    """The unit in which marks over so many seconds are round: a second, a minute or an hour."""
    return 3600.0 if seconds >= 7200 else 60.0 if seconds >= 120 else 1.0


def moment(stamp: str) -> str:
    """An ISO time as a date a person reads, in UTC; as it is where it is no ISO time."""
    try:
        when = datetime.fromisoformat(stamp)
        if when.tzinfo is None:
            return f"{when.day} {when:%B %Y, %H:%M}"
        when = when.astimezone(UTC)
    except (ValueError, OverflowError):  # the second: there is no such day in UTC
        return stamp
    return f"{when.day} {when:%B %Y, %H:%M} UTC"


def humanise(key: str) -> str:
    """`balanced_accuracy` as Balanced accuracy."""
    spaced = key.replace("_", " ").replace("auc", "AUC").strip()
    return spaced[:1].upper() + spaced[1:]


def plural(n: int, one: str, many: str = "") -> str:
    """1 site, 2 sites."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def dotted(value: Any, prefix: str = "") -> dict[str, Any]:
    """A nested dict as one, by dotted keys."""
    found: dict[str, Any] = {}
    for key, item in as_dict(value).items():
        found |= dotted(item, f"{prefix}{key}.") if isinstance(item, dict) and item else {f"{prefix}{key}": item}
    return found


def flat(value: Any) -> list[list[str]]:
    """A nested dict as rows of (dotted name, value as JSON)."""
    return [
        [key, item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)]
        for key, item in dotted(value).items()
    ]
