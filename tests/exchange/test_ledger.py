"""What went up and down: byte-exact, groups apart, and the published figure it must give."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import SIZES, context, coordinate, federation, quick, study, watch_bundles
from wardround.data.federation import Site
from wardround.exchange.bundle import SIZE, Bundle, Envelope
from wardround.exchange.inprocess import InProcess
from wardround.exchange.ledger import Entry, totals
from wardround.methods.base import Answer, Context, Work
from wardround.methods.fedavg import FedAvg
from wardround.methods.fedprox import FedProx
from wardround.methods.registry import known
from wardround.methods.state import State
from wardround.methods.template import Averaging
from wardround.models import spec_layout
from wardround.record.rundir import Log


def test_an_entry_is_the_bundle_in_bytes() -> None:
    groups = {"parameters": {"w": torch.zeros(3)}, "counters": {"n": torch.tensor(1)}}
    bundle = Bundle(Envelope("answer", "study", "toy", "site-2", 4), groups)
    entry = Entry.of(bundle)
    assert (entry.round, entry.site, entry.direction, entry.kind) == (4, "site-2", "up", "answer")
    assert entry.groups == {"parameters": 12, "counters": 8}
    assert entry.overhead == len(bundle.to_bytes()) - 20


@pytest.mark.parametrize(("kind", "direction"), [("request", "down"), ("answer", "up"), ("delivery", "down")])
def test_direction_is_seen_from_the_site(kind: Any, direction: str) -> None:
    assert Entry.of(Bundle(Envelope(kind, "study", "toy", "site-2", 0), {})).direction == direction


def test_totals_keep_groups_and_overhead_apart() -> None:
    rows = [
        {"direction": "up", "groups": {"parameters": 10, "size": 8}, "overhead": 3},
        {"direction": "up", "groups": {"parameters": 5}, "overhead": 4},
        {"direction": "down", "groups": {"parameters": 7}, "overhead": 0},
    ]
    assert totals(rows) == {
        ("down", "overhead"): 0,
        ("down", "parameters"): 7,
        ("up", "overhead"): 7,
        ("up", "parameters"): 15,
        ("up", "size"): 8,
    }


def test_no_rows_no_bytes() -> None:
    assert totals([]) == {}


def test_a_run_of_fedavg_is_counted_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    result = coordinate(tmp_path / "run", FedAvg(), rounds=2)
    rows = list(Log(tmp_path / "run" / "ledger.jsonl").rows())

    kinds = [(bundle.envelope.round, bundle.envelope.site, bundle.envelope.kind) for bundle in crossed]
    sites = [f"site-{i + 1}" for i in range(len(SIZES))]
    asked = [(r, site, kind) for r in (0, 1) for site in sites for kind in ("request", "answer")]
    assert sorted(kinds) == sorted([*asked, *((1, site, "delivery") for site in sites)])

    for row, bundle in zip(rows, crossed, strict=True):
        assert sum(row["groups"].values()) + row["overhead"] == len(bundle.to_bytes())

    network = 4 * spec_layout(study().common_spec).parameter_count
    counted = {(t["direction"], t["group"]): t["bytes"] for t in result["ledger"]["totals"]}
    assert counted["up", "parameters"] == 2 * 3 * network
    assert counted["down", "parameters"] == 3 * 3 * network
    assert counted["up", "size"] == 2 * 3 * 8
    assert ("down", "size") not in counted
    assert sum(counted.values()) == sum(len(bundle.to_bytes()) for bundle in crossed)


@pytest.mark.parametrize("name", list(known()))
def test_every_method_is_counted_to_the_byte(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed = watch_bundles(monkeypatch)
    result = coordinate(tmp_path / "run", quick(name), rounds=1)
    counted = sum(total["bytes"] for total in result["ledger"]["totals"])
    assert counted == sum(len(bundle.to_bytes()) for bundle in crossed)


def test_who_talks_to_nobody_sends_nothing(tmp_path: Path) -> None:
    for name in ("local", "majority"):
        assert coordinate(tmp_path / name, known()[name]())["ledger"] == {"totals": [], "rows": []}


def test_a_site_that_is_not_asked_costs_nothing_but_what_it_takes_home(tmp_path: Path) -> None:
    result = coordinate(tmp_path / "run", FedAvg(), rounds=3, participants=0.34)
    rows = result["ledger"]["rows"]
    for round in range(3):
        asked = set(study(participants=0.34).participants(round))
        assert {r["site"] for r in rows if r["round"] == round and r["kind"] != "delivery"} == asked
    assert sorted(r["site"] for r in rows if r["kind"] == "delivery") == ["site-1", "site-2", "site-3"]


# FedMP's Table 4 ------------------------------------------------------------------------------------------------------


class Echo(Averaging):
    """FedAvg whose sites answer with what they were given: all of its traffic and none of its arithmetic."""

    name = "fedavg"

    def answer(self, ctx: Context, site: Site, request: Bundle, memory: State) -> Work[Answer]:
        groups = {**request.groups, SIZE: {"images": torch.tensor(len(site.train))}}
        return Answer(ctx.bundle("answer", site.name, groups), memory)
        yield


def resnet50_traffic(method: str, rounds: int) -> list[dict[str, Any]]:
    """The ledger of FedMP's setting: three sites, all asked, ResNet-50 with one linear head for two classes."""
    data = federation((2, 2, 2), size=16, classes=2)
    agreed = study(data, method=method, rounds=rounds, model={"name": "resnet50", "width": None, "stem": "imagenet"})
    layout = spec_layout(agreed.common_spec)
    model = {n: torch.zeros((), dtype=layout.dtypes[n]).expand(layout.shapes[n]) for n in layout.names}  # no memory
    rows: list[dict[str, Any]] = []
    transport = InProcess(data, lambda fits: [], lambda bundle: rows.append(Entry.of(bundle).as_row()))
    echo, state = Echo(), State({"model": model})
    for round in range(rounds):
        ctx = context(agreed, round)
        requests = echo.ask(ctx, state)
        assert requests is not None
        transport.exchange(ctx, echo, requests, lambda site: State(), lambda site, memory: None)
    assert echo.ask(context(agreed, rounds), state) is None
    last = context(agreed, rounds - 1)
    for _ in transport.personalise(last, echo, echo.deliver(last, state), lambda site: State()):
        pass
    return rows


def gigabytes(rows: Iterable[dict[str, Any]]) -> str:
    """Parameters alone, up and down, in decimal gigabytes as the table prints them."""
    return f"{sum(count for (_, group), count in totals(rows).items() if group == 'parameters') / 1e9:.2f}"


def test_resnet50_has_as_many_parameters_as_fedmp_counts() -> None:
    data = federation((2, 2, 2), size=16, classes=2)
    agreed = study(data, model={"name": "resnet50", "width": None, "stem": "imagenet"})
    assert spec_layout(agreed.common_spec).parameter_count == 23_512_130


@pytest.mark.parametrize(("method", "rounds", "printed"), [("fedavg", 65, "36.68"), ("fedprox", 60, "33.86")])
def test_table_4_of_fedmp(method: str, rounds: int, printed: str) -> None:
    """Rounds alone: what the sites take home after the last one is a delivery, not a round."""
    rows = resnet50_traffic(method, rounds)
    assert gigabytes(row for row in rows if row["kind"] != "delivery") == printed
    deliveries = [row for row in rows if row["kind"] == "delivery"]
    assert len(deliveries) == 3
    assert totals(deliveries)["down", "parameters"] == 3 * 4 * 23_512_130


def test_fedprox_sends_what_fedavg_sends() -> None:
    """So that the echo above may stand for both."""
    agreed = study(method="fedprox")
    assert FedProx().payload(agreed, "site-1") == FedAvg().payload(agreed, "site-1")
