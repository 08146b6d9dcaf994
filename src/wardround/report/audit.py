"""Privacy: what sites have spent of it, and the attacks on what leaves a site, if someone ran them (`audit.json`)."""

from __future__ import annotations

from pathlib import Path

from wardround.errors import BadInput
from wardround.report.parts import View, tabulate
from wardround.report.values import as_number, as_records, as_text, show

FILE = "audit.json"
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
    """A table for each group of what leaves a site; None where no audit lies beside the result."""
    path = folder / FILE if folder else None
    if path is None or not path.is_file():
        return None
    from wardround.audit.report import Audit  # read only where there is one

    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadInput("it is too large to be a record of an audit")
        audit = Audit.from_json(path.read_bytes())
    except (OSError, BadInput) as error:
        return {"problem": f"{FILE} cannot be shown: {error}.", "groups": [], "about": ""}
    groups = []
    for group in audit.groups:
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
        findings = [f"{attack.name}: {finding}" for attack in group.attacks for finding in attack.findings]
        what = [{"name": attack.name, "text": attack.what} for attack in group.attacks]
        table = tabulate(f"Attacks on {group.group}", ("Figure", "Value", "Cases", "What it is"), rows)
        groups.append({"name": group.group, "table": table, "findings": findings, "attacks": what})
    about = (
        f"What {audit.site} sends in {audit.study} with {audit.method}, attacked with {audit.images:,} of its images."
    )
    return {"problem": "", "groups": groups, "about": about}
