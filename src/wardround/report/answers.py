"""What the predictors answered at the end: confusion matrices, sensitivity of each class, calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wardround.measure import Bin, effective_trials, wilson
from wardround.report.heat import heat_map
from wardround.report.parts import View, figure, tabulate
from wardround.report.points import Range, intervals, reliability
from wardround.report.svg import Label, keyed
from wardround.report.values import (
    UNDEFINED,
    as_count,
    as_dict,
    as_list,
    as_number,
    as_records,
    as_text,
    as_texts,
    mean_of,
    percent,
    percent_mark,
    plural,
)

MOST_SITES = 12  # matrices of single sites that are listed; all are in the result
SPLITS = {"global": "the global test", "local": "the sites' own tests"}
Matrix = list[list[int]]


@dataclass(frozen=True)
class Counts:
    """The answers of one predictor to one test."""

    site: str
    confusion: Matrix
    bins: list[Bin]
    error: float | None
    in_mix: float | None = None  # the error as the site's own patients are mixed, where its test is the global one

    @property
    def totals(self) -> list[int]:
        """Test images of each class."""
        return [sum(row) for row in self.confusion]


@dataclass(frozen=True)
class Group:
    """The personal predictors of all sites of a method on one kind of test; the shared model's where there are none."""

    method: str
    split: str
    counts: Sequence[Counts]

    @property
    def title(self) -> str:
        """The method and, where it is not the global one, the test."""
        return self.method if self.split == "global" else f"{self.method}, {SPLITS[self.split]}"


def answers_view(result: View, methods: Sequence[str]) -> View:
    """Three lists of figures, one for each method and test."""
    classes = as_texts(as_dict(result.get("data")).get("classes"))
    groups = [g for method in methods for split in SPLITS if (g := _group(result, method, split, len(classes)))]
    return {
        "confusions": [_confusion(i, group, classes) for i, group in enumerate(groups)],
        "sensitivities": [_sensitivity(i, group, classes) for i, group in enumerate(groups)],
        "calibrations": [_calibration(i, group) for i, group in enumerate(groups) if any(c.bins for c in group.counts)],
    }


def _group(result: View, method: str, split: str, classes: int) -> Group | None:
    entries = [
        e for e in as_records(result.get("answers")) if (as_text(e.get("method")), e.get("split")) == (method, split)
    ]
    for model in ("personal", "shared"):
        found = [counts for e in entries if e.get("model") == model and (counts := _counts(e, classes))]
        if found:
            return Group(method, split, found)
    return None


def _counts(entry: View, classes: int) -> Counts | None:
    """None for a matrix that does not fit the classes."""
    confusion = [[as_count(n) for n in as_list(row)] for row in as_list(entry.get("confusion"))]
    if not classes or len(confusion) != classes or any(len(row) != classes for row in confusion):
        return None
    if not any(map(sum, confusion)) or any(n < 0 for row in confusion for n in row):
        return None
    triples = [as_list(found) for found in as_list(entry.get("bins"))]
    bins = [Bin(as_count(t[0]), as_count(t[1]), as_number(t[2]) or 0.0) for t in triples if len(t) == 3]
    errors = (as_number(entry.get(name)) for name in ("calibration_error", "local_calibration_error"))
    return Counts(as_text(entry.get("site")), confusion, bins, *errors)


# Which class for which ------------------------------------------------------------------------------------------------


def _confusion(i: int, group: Group, classes: Sequence[str]) -> View:
    """The mean over sites of each row's shares, as a heat map; the counts as tables."""
    shares = [
        [
            mean_of(c.confusion[t][p] / c.totals[t] if c.totals[t] else None for c in group.counts)
            for p in range(len(classes))
        ]
        for t in range(len(classes))
    ]
    said = _worst_mistake(shares, classes)
    label = Label(
        keyed("confusion", i, group.title),
        f"Confusion matrix of {group.title}",
        f"Rows are true classes, columns answers. {said}",
    )
    svg = heat_map(label, classes, classes, shares, lambda share: f"{100 * share:.0f}")
    rows = [
        [name, *(UNDEFINED if v is None else percent(v) for v in row)]
        for name, row in zip(classes, shares, strict=True)
    ]
    words = f"{said} Mean over {plural(len(group.counts), 'predictor')}, on {SPLITS[group.split]}."
    view = figure(
        group.title, words, svg, tabulate(f"Shares of answers, {group.title}", ("True class", *classes), rows)
    )
    return {**view, "sites": [_site_table(c, group, classes) for c in group.counts[:MOST_SITES]]}


def _site_table(counts: Counts, group: Group, classes: Sequence[str]) -> View:
    rows = [[name, *(f"{n:,}" for n in row)] for name, row in zip(classes, counts.confusion, strict=True)]
    who = counts.site or "shared model"
    return tabulate(f"Answers counted: {group.title}, {who}", ("True class", *classes), rows)


def _worst_mistake(shares: Sequence[Sequence[float | None]], classes: Sequence[str]) -> str:
    found = [
        (share, classes[t], classes[p])
        for t, row in enumerate(shares)
        for p, share in enumerate(row)
        if t != p and share
    ]
    if not found:
        return "No answer is wrong."
    share, true, said = max(found, key=lambda mistake: mistake[0])
    return f"Most often mistaken: {true} for {said}, {percent(share)} of its images."


# Sensitivity ----------------------------------------------------------------------------------------------------------


def _sensitivity(i: int, group: Group, classes: Sequence[str]) -> View:
    """The share of each class that is found, mean over predictors, with Wilson's interval of that mean.

    On one test for all sites the same images are answered by each site's predictor: they count once, since counting
    them for every site would make the interval too narrow. Of tests of their own, sites with few images of a class make
    the mean less certain than all images together would be.
    """
    items, rows = [], []
    for t, name in enumerate(classes):
        found = [(c.confusion[t][t], n) for c in group.counts if (n := c.totals[t])]
        share = mean_of(right / n for right, n in found)
        if share is None:
            rows.append([name, UNDEFINED, UNDEFINED, UNDEFINED, "0"])
            continue
        images = [n for _, n in found]
        own = group.split == "local"
        low, high = wilson(min(share, 1.0), effective_trials(images) if own else max(images))
        items.append(Range(name, share, low, high))
        count = sum(images) if own else max(images)
        rows.append([name, percent(share), percent(low), percent(high), f"{count:,}"])
    lowest = min(items, key=lambda item: item.value, default=None)
    said = f"Lowest: {lowest.name}, {percent(lowest.value)}." if lowest else ""
    label = Label(
        keyed("sensitivity", i, group.title),
        f"Sensitivity of each class, {group.title}",
        f"A point on its interval. {said}",
    )
    svg = intervals(label, items, percent, percent_mark)
    head = ("Class", "Sensitivity", "95 % from", "95 % to", "Test images")
    return figure(group.title, said, svg, tabulate(f"Sensitivity by class, {group.title}", head, rows))


# Calibration ----------------------------------------------------------------------------------------------------------


def _calibration(i: int, group: Group) -> View:
    """All sites' answers in one diagram; the error is that of each site, then the mean."""
    pooled: list[tuple[float, float, int]] = []
    rows = []
    counts = [c for c in group.counts if c.bins]
    for b in range(max(len(c.bins) for c in counts)):
        found = [c.bins[b] for c in counts if b < len(c.bins)]
        images, right = sum(f.images for f in found), sum(f.right for f in found)
        if images > 0:
            sure = sum(f.images * f.confidence for f in found) / images
            pooled.append((sure, right / images, images))
            rows.append([percent(sure), percent(right / images), f"{images:,}"])
    said = _errors(group, counts)
    label = Label(
        keyed("calibration", i, group.title), f"Reliability of {group.title}", f"How often right by how sure. {said}"
    )
    table = tabulate(f"Reliability, {group.title}", ("How sure", "How often right", "Answers"), rows)
    return figure(group.title, said, reliability(label, pooled, percent_mark), table)


def _errors(group: Group, counts: Sequence[Counts]) -> str:
    """The calibration error and on which test, in words; what a site was calibrated for is its own mix of patients."""
    error, in_mix = mean_of(c.error for c in counts), mean_of(c.in_mix for c in counts)
    if error is None:
        return ""
    mixed = "" if in_mix is None else f", {percent(in_mix)} as each site's own patients are mixed"
    return f"Calibration error {percent(error)} on {SPLITS[group.split]}{mixed}."
