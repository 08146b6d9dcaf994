"""Privacy: what sites have spent of it, and the attacks on what leaves them, if someone ran `wardround audit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wardround.errors import BadInput
from wardround.report.parts import View, tabulate
from wardround.report.values import as_number, as_records, as_text, show

if TYPE_CHECKING:
    from wardround.audit.report import AuditRecord, GroupAudit

FILE = "audit/audit.json"  # in a run's directory, where the command puts it
MOST_BYTES = 4_000_000  # a record of figures is far smaller


def spent_view(result: View) -> View:
    """Epsilon and delta of each method and site; empty where no noise was asked for."""
    rows = [
        [
            f"{as_text(entry.get('method'))}, {as_text(entry.get('site'))}",
            *(show(key, as_number(entry.get(key))) for key in ("epsilon", "delta")),
        ]
        for entry in as_records(result.get("privacy"))
    ]
    return tabulate("Differential privacy spent", ("Site", "Epsilon", "Delta"), rows)


def audit_view(folder: Path | None) -> View | None:
    """A table for each group of what leaves a site, the mean where sites are several; None where there is no audit."""
    path = folder / FILE if folder else None
    if path is None or not path.is_file():
        return None
    from wardround.audit.report import AuditRecord  # read only where there is one

    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadInput("it is too large to be a record of an audit")
        record = AuditRecord.from_json(path.read_bytes())
    except (OSError, BadInput) as error:
        return {"problem": f"{FILE} cannot be shown: {error}.", "groups": [], "about": ""}
    shown = record.averaged if len(record.sites) > 1 else [group for audit in record.sites for group in audit.groups]
    images = sum(audit.images for audit in record.sites)
    about = (
        f"What {', '.join(audit.site for audit in record.sites)} sent was attacked with {images:,} training images"
        f"{'; figures are means over these sites' if len(record.sites) > 1 else ''}."
    )
    return {"problem": "", "groups": [_group(record, group) for group in shown], "about": about}


def _group(record: AuditRecord, group: GroupAudit) -> View:
    rows = [
        [
            f"{attack.name}: {figure.name}",
            "–" if figure.value is None else f"{figure.value:.4g}",
            f"{figure.n:,}",
            {"text": figure.definition, "left": True},
        ]
        for attack in group.attacks
        for figure in attack.figures
    ]
    return {
        "name": group.group,
        "table": tabulate(f"Attacks on {group.group}", ("Figure", "Value", "Cases", "What it is"), rows),
        "findings": _findings(record, group.group),
        "attacks": [{"name": attack.name, "text": attack.what} for attack in group.attacks],
    }


def _findings(record: AuditRecord, name: str) -> list[str]:
    """Of every site, since a mean has none."""
    return [
        f"{audit.site}, {attack.name}: {finding}"
        for audit in record.sites
        for group in audit.groups
        if group.group == name
        for attack in group.attacks
        for finding in attack.findings
    ]
