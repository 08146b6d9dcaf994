"""What happened, in three sentences and one picture, for a reader who treats patients and trains no networks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from wardround.report.index import EVERYONE, OWN, Index, at_the_end
from wardround.report.parts import View, figure, tabulate
from wardround.report.points import Strip, strips
from wardround.report.svg import Label
from wardround.report.values import (
    as_count,
    as_dict,
    as_list,
    as_records,
    as_text,
    as_texts,
    byte_size,
    mean_of,
    percent,
    percent_mark,
    plural,
    show,
)

POOLED = "centralised"  # the one method that is no federated one
OF_100 = "of 100 images"
Scores = Mapping[str, float]  # by site


def overview_view(result: View, methods: Sequence[str], index: Index) -> View:
    """Empty where no personal predictor was measured."""
    own = {m: _known(at_the_end(index, m, OWN)) for m in methods}
    everyone = {m: _known(at_the_end(index, m, EVERYONE)) for m in methods}
    own = {m: scores for m, scores in own.items() if scores}
    if not own:
        return {"sentences": [], "picture": None}
    federated = [m for m in own if m != POOLED] or [POOLED]
    best = max(federated, key=lambda m: (_mean(own[m]), -methods.index(m)))
    sentences = [_what(result, methods), _how_good(best, own, everyone), _beware(result, best, own[best])]
    one = len(own) == 1
    return {"sentences": sentences, "picture": _of_one(best, own, everyone) if one else _of_many(own)}


def _what(result: View, methods: Sequence[str]) -> str:
    data = as_dict(result.get("data"))
    sites, classes = as_records(data.get("sites")), as_texts(data.get("classes"))
    images = [as_count(site.get("train")) for site in sites]
    who = plural(len(sites), "site") if sites else "Sites"
    size = f"{min(images):,} to {max(images):,}" if len({*images}) > 1 else f"{max(images, default=0):,}"
    holding = f", holding {size} training images each," if len(images) > 1 else ""
    task = f" to tell {len(classes)} classes apart" if classes else ""
    ways = "with one method" if len(methods) == 1 else f"in {len(methods)} ways"
    kept = "and no site’s images were shown to another"
    if POOLED in methods:
        kept = f"and only {POOLED}, which is there to compare with, took the images of all sites together"
    return f"{who}{holding} learned{task} {ways}, {kept}."


def _how_good(best: str, own: Mapping[str, Scores], everyone: Mapping[str, Scores]) -> str:
    said = f"With {best}, the model that a site would use is right on {_of_100(_mean(own[best]))} like its own"
    if everyone.get(best):
        said += f" and on {_hundredths(_mean(everyone[best]))} of 100 from all sites together"
    if best != "local" and "local" in own:
        said += f"; a site that trains alone is right on {_hundredths(_mean(own['local']))} of 100 like its own"
    others = [m for m in own if m not in (best, "local", POOLED)]
    if others:
        second = max(others, key=lambda m: _mean(own[m]))
        said += f", and with {second}, the best of the others, on {_hundredths(_mean(own[second]))}"
    if best != POOLED and POOLED in own:
        said += f"; with all images in one place ({POOLED}) it would be {_hundredths(_mean(own[POOLED]))}"
    return f"{said}."


def _beware(result: View, best: str, own: Scores) -> str:
    worst = min(own, key=lambda site: own[site])
    seeds = {as_count(row.get("seed")) for row in as_records(result.get("rows"))}
    draws = "this is one draw, so small differences mean nothing" if len(seeds) < 2 else f"over {len(seeds)} draws"
    same = _constant(result, best)
    if same:
        draws += f". Beware: at {plural(same, 'site')} its model gives every image the same answer, whatever it shows"
    served = (
        f"The site served worst is {worst}, with {_of_100(own[worst])} right" if len(own) > 1 else "One site was tested"
    )
    return f"{served}; {_left(result, best)}; {draws}."


def _left(result: View, best: str) -> str:
    """What left the sites with one method and, where others sent more, how much with the one that sent most."""
    sent: dict[str, int] = {}
    for row in as_records(as_dict(result.get("ledger")).get("totals")):
        if row.get("direction") == "up":
            method = as_text(row.get("method"))
            sent[method] = sent.get(method, 0) + as_count(row.get("bytes"))
    own = sent.pop(best, 0)
    what = "images" if best == POOLED else "model data"
    said = f"{byte_size(own)} of {what} left all sites together" if own else "nothing left a site"
    if len(as_texts(result.get("methods"))) < 2:
        return said
    most = max(sent, key=lambda method: sent[method], default=best)
    more = f", with {most} {byte_size(sent.get(most, 0))} of {'images' if most == POOLED else 'model data'}"
    return f"with {best} {said}{more if sent.get(most, 0) > own else ''}"


def _constant(result: View, method: str) -> int:
    """At how many sites a method's model calls all test images the same."""
    answers = [e for e in as_records(result.get("answers")) if as_text(e.get("method")) == method]
    personal = [e for e in answers if e.get("model") == "personal" and e.get("split") == "global"]
    matrices = ([as_list(row) for row in as_list(e.get("confusion"))] for e in personal)
    return sum(len({p for row in rows for p, count in enumerate(row) if as_count(count)}) == 1 for rows in matrices)


def _of_many(own: Mapping[str, Scores]) -> View:
    rows = [_strip(method, scores) for method, scores in own.items()]
    said = "; ".join(f"{r.name} {show('accuracy', r.mean)}" for r in rows)
    label = Label(
        "overview", "Accuracy at each site by method", f"A row for each method, a ring for each site; means: {said}."
    )
    words = (
        "Each ring is one site: how often the model it would use is right on images like its own. The upright line and "
        "the number are the mean over sites; the site served worst is named."
    )
    table = tabulate("Local accuracy by method", ("Method", "Mean", "Lowest", "Highest", "Sites"), _rows(own))
    return figure("How well each site is served", words, strips(label, rows, percent, percent_mark), table)


def _of_one(method: str, own: Mapping[str, Scores], everyone: Mapping[str, Scores]) -> View:
    tests = {"own images": own[method], "all images": everyone.get(method) or {}}
    rows = [_strip(name, scores) for name, scores in tests.items() if scores]
    said = "; ".join(f"{r.name} {show('accuracy', r.mean)}" for r in rows)
    label = Label("overview", "Accuracy at each site", f"A row for each test, a ring for each site; means: {said}.")
    words = (
        "Each ring is the model that one site would use: how often it is right on images like the site’s own, and on "
        "images of all sites. The upright line and the number are the mean; the site served worst is named."
    )
    table = tabulate("Accuracy by test", ("Test", "Mean", "Lowest", "Highest", "Sites"), _rows(tests))
    return figure("How well each site is served", words, strips(label, rows, percent, percent_mark), table)


def _strip(name: str, scores: Scores) -> Strip:
    differ = len(set(scores.values())) > 1
    return Strip(name, scores, _mean(scores), min(scores, key=lambda site: scores[site]) if differ else "")


def _rows(tests: Mapping[str, Scores]) -> list[list[str]]:
    return [
        [name, *(percent(v) for v in (_mean(s), min(s.values()), max(s.values()))), str(len(s))]
        for name, s in tests.items()
        if s
    ]


def _known(scores: Mapping[str, float | None]) -> dict[str, float]:
    return {site: value for site, value in scores.items() if value is not None}


def _mean(scores: Scores) -> float:
    return mean_of(scores.values()) or 0.0


def _hundredths(share: float) -> str:
    return f"{100 * share:.0f}"


def _of_100(share: float) -> str:
    return f"{_hundredths(share)} {OF_100}"
