"""Privacy: what sites have spent of it, and the attacks on what leaves them, if someone ran `wardround audit`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wardround.errors import BadInput
from wardround.exchange.bundle import LABEL_COUNTS
from wardround.report.parts import View, tabulate
from wardround.report.values import as_dict, as_number, as_records, as_text, show

if TYPE_CHECKING:
    from wardround.audit.report import AuditRecord, GroupAudit

FILE = "audit/audit.json"  # in a run's directory, where the command puts it
MOST_BYTES = 4_000_000  # a record of figures is far smaller


def spent_view(result: View) -> View:
    """Epsilon and delta of each method and site; empty where no training had noise."""
    rows = [
        [_who(entry), *(show(key, as_number(entry.get(key))) for key in ("epsilon", "delta"))]
        for entry in as_records(result.get("privacy"))
        if as_number(entry.get("epsilon")) is not None
    ]
    return tabulate("Differential privacy spent", ("Site", "Epsilon", "Delta"), rows)


def counts_view(result: View) -> View:
    """Epsilon of the label counts where they alone had noise, which the record marks by no epsilon of a site's own.

    Each table that left costs what is set. The ledger knows which did: a policy may have left some out.
    """
    each = as_number(as_dict(as_dict(result.get("settings")).get("privacy")).get("counts_epsilon"))
    left = Counter(
        _who(row)
        for row in as_records(as_dict(result.get("ledger")).get("rows"))
        if row.get("direction") == "up" and LABEL_COUNTS in as_dict(row.get("groups"))
    )
    rows = [
        [who, f"{left[who]:,}", show("epsilon", None if each is None else each * left[who]), "0"]
        for entry in as_records(result.get("privacy"))
        if as_number(entry.get("epsilon")) is None and (who := _who(entry))
    ]
    head = ("Site", "Tables of counts that left", "Epsilon", "Delta")
    return tabulate("Differential privacy of the label counts alone", head, rows)


def _who(entry: View) -> str:
    return f"{as_text(entry.get('method'))}, {as_text(entry.get('site'))}"


def audits_view(folder: Path | None, methods: Sequence[str]) -> list[View]:
    """The audit in a run's directory; of a comparison, which is audited method by method, those of its runs."""
    if folder is None:
        return []
    own = [("", folder)]
    runs = [(method, folder / method) for method in methods if len(methods) > 1 and _is_inside(folder, method)]
    return [_audit(method, place / FILE) for method, place in own + runs if (place / FILE).is_file()]


def _is_inside(folder: Path, method: str) -> bool:
    """A result may come from anyone: what it names is read only where the result itself lies."""
    try:
        return (folder / method).resolve().parent == folder.resolve()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _audit(method: str, path: Path) -> View:
    """A table for each group of what leaves a site, the mean where sites are several."""
    from wardround.audit.report import AuditRecord  # read only where there is one

    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadInput("it is too large to be a record of an audit")
        record = AuditRecord.from_json(path.read_bytes())
    except (OSError, BadInput) as error:
        file = f"{method}/{FILE}" if method else FILE
        return {"problem": f"{file} cannot be shown: {error}.", "groups": [], "about": ""}
    shown = record.averaged if len(record.sites) > 1 else [group for audit in record.sites for group in audit.groups]
    images = sum(audit.images for audit in record.sites)
    about = (
        f"What {', '.join(audit.site for audit in record.sites)} sent{f' for {method}' if method else ''} was attacked "
        f"with {images:,} training images"
        f"{'; figures are means over these sites' if len(record.sites) > 1 else ''}."
    )
    return {"problem": "", "groups": [_group(record, group, method) for group in shown], "about": about}


def _group(record: AuditRecord, group: GroupAudit, method: str) -> View:
    name = f"{group.group} of {method}" if method else group.group
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
        "name": name,
        "table": tabulate(f"Attacks on {name}", ("Figure", "Value", "Cases", "What it is"), rows),
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
