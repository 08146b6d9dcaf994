"""The same numbers on every transport: each method over parcels, against the in-process run of the same agreement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remote.parties import DEVICE, FIVE, Parties, agreement, predictor_hash
from tiny import deployed, watch_bundles
from wardround.exchange.bundle import Bundle, Envelope
from wardround.methods.registry import known
from wardround.remote.rehearsal import simulate

SOME_SITES: dict[str, Any] = {"rounds": 3, "participants": 0.67}  # two of three in each round
CASES = [
    *((name, {}) for name in known()),
    *((name, SOME_SITES) for name in ("fedavg", "fedper", "ditto", "fedkd")),
    ("fedbicross", {"sites": FIVE}),
]


@pytest.mark.parametrize(("method", "changes"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_parcels_give_the_tensors_of_the_in_process_run(
    method: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreed = agreement(method, **changes)
    parties = Parties(tmp_path, agreed)
    with monkeypatch.context() as patch:
        crossed: list[Bundle] = watch_bundles(patch)
        simulate(agreed, list(parties.sites.values()), tmp_path / "run", DEVICE)
    expected = {b.envelope.site: b.sha256() for b in crossed if b.envelope.kind == "delivery"}
    assert {b.envelope.study for b in crossed} <= {agreed.id}

    deliveries = parties.play()

    assert set(deliveries) == set(parties.sites)
    assert not expected or expected.keys() == parties.sites.keys()
    for name, site in parties.sites.items():
        home = parties.desk(name).take_home(site)
        nothing = Bundle(Envelope("delivery", agreed.id, method, name, 0), {}).sha256()
        assert home.delivery == expected.get(name, nothing)
        assert predictor_hash(home.predictor) == predictor_hash(deployed(tmp_path / "run", name))
