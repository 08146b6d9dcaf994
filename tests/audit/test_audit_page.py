"""The example of docs/audit.md runs, and the page's figures are those of the records."""

import re
from pathlib import Path
from typing import Any

from wardround.audit.report import Audit

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")


def test_the_example_runs_and_names_every_figure() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    space: dict[str, Any] = {}
    exec(code, space)  # noqa: S102
    record = Audit.from_json(space["text"])
    assert record == space["record"]
    assert [group.group for group in record.groups] == ["parameters", "embeddings", "prototypes", "label_counts"]
    embeddings = record.groups[1].attacks[0]
    named = set(re.findall(r"`(\w[\w.]*)`", PAGE))
    assert {figure.name for figure in embeddings.figures if not figure.name.startswith("control_")} <= named
    assert {"auc", "tpr_at_fpr_0.001", "smallest_fpr", "believed", "classmates_closer"} <= named
    assert set(space["pictures"]["pairs"]) == {"original", "reconstruction", "nearest", "l2"}
    for group in record.groups:
        for attack in group.attacks:
            assert attack.what
            assert all(figure.definition and figure.n > 0 for figure in attack.figures)
