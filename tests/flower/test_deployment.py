"""A real SuperLink and three real SuperNodes, with TLS and authentication: the numbers of the in-process run."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'wardround[flower]'")

from flower.deployment import PATIENCE, Deployment, deployed, until
from remote.parties import DEVICE, FIVE, SITES, Parties, agreement, predictor_hash
from soak import times
from tiny import deployed as in_process
from tiny import watch_bundles
from wardround.agreement import Agreement
from wardround.deploy.model_file import read_model
from wardround.exchange.bundle import Bundle, Envelope
from wardround.learn.predictor import Predictor
from wardround.methods.registry import known
from wardround.record.rundir import lock_directory
from wardround.remote.rehearsal import simulate
from wardround.sitedata import read_site

ONE, TWO, THREE = SITES
IN_EVERY_TEST = ("fedavg", "ditto", "fedbicross")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(tmp_path_factory.mktemp("lab"), agreement()) as deployment:
        yield deployment


def compare(lab: Deployment, agreed: Agreement, run: Path) -> None:
    """What every hospital has now is, to the last bit, what the in-process run of the agreement gives."""
    sites = [read_site(agreed, name, str(lab.images(name))) for name in lab.sites]
    with pytest.MonkeyPatch.context() as patch:
        crossed: list[Bundle] = watch_bundles(patch)
        simulate(agreed, sites, run, DEVICE)
    expected = {b.envelope.site: b.sha256() for b in crossed if b.envelope.kind == "delivery"}
    for name in lab.sites:
        nothing = Bundle(Envelope("delivery", agreed.id, agreed.settings.method, name, 0), {}).sha256()
        assert delivered(lab, name) == expected.get(name, nothing)
        assert predictor_hash(model(lab, name)) == predictor_hash(in_process(run, name))


def delivered(lab: Deployment, name: str) -> str:
    record = json.loads((lab.root / name / "desk" / "desk.json").read_text())
    return str(record["delivery"]["sha256"])


def model(lab: Deployment, name: str) -> Predictor:
    file = lab.root / name / "models" / "tiny" / "model.safetensors"
    return read_model(file.read_bytes(), name)[1]


@pytest.mark.parametrize("method", IN_EVERY_TEST[1:])
def test_flower_gives_the_tensors_of_the_in_process_run(lab: Deployment, method: str, tmp_path: Path) -> None:
    agreed = agreement(method)
    lab.begin(agreed)
    said = lab.run(method)
    for name in SITES:
        assert f"is {name}" in said
        assert f"{name} has taken its parcel home" in said
    assert "study tiny is over" in said
    compare(lab, agreed, tmp_path / "run")


def test_a_coordinator_that_was_killed_does_not_ask_again_who_has_answered(lab: Deployment, tmp_path: Path) -> None:
    agreed = agreement("fedavg")
    lab.begin(agreed)
    desk = lab.root / THREE / "desk"
    desk.mkdir()
    with lock_directory(desk):  # this site cannot answer for now, so the round stays open
        lab.launch("first")
        until(lambda: "site-3: it cannot; its log says why" in lab.said("first"), "the third site's excuse")
        until(lambda: lab.said("first").count("stored: ") == 2, "the answers of the others")
        lab.kill_server_app("first")
    said = lab.run("second")
    first_round, second_round = said.split("round 2:")
    assert "round 1: 2 of 3 answers are here" in first_round
    assert re.findall("asking (.*) to answer", first_round) == [THREE]
    assert re.findall("stored: (.*), round 1", first_round) == [THREE]
    assert sorted(re.findall("asking (.*) to answer", second_round)) == list(SITES)
    compare(lab, agreed, tmp_path / "run")


def test_a_node_that_is_killed_is_named_and_the_quorum_goes_on(lab: Deployment, tmp_path: Path) -> None:
    """The last test of this lab: Flower lets a killed node join again only after a minute."""
    agreed = agreement("fedavg", quorum=2, rounds=1)
    lab.begin(agreed, wait_for_all=False)
    helpers = lab.helpers(THREE)
    heard = lab.said(THREE).count("Receiving: query")
    for pid in helpers:
        os.kill(pid, signal.SIGSTOP)  # the third site hears the call and stays in the round
    run = lab.launch("killed")
    until(lambda: lab.said(THREE).count("Receiving: query") > heard, "the call at the third site")
    lab.kill(THREE)
    for pid in helpers:
        with suppress(ProcessLookupError):  # stopped and without a parent, it may have been hung up on
            os.kill(pid, signal.SIGCONT)
    run.wait(PATIENCE)
    said = lab.said("killed")
    assert "site-3 did not answer round 1: nothing came" in said
    assert "site-3 has not taken its parcel home" in said
    assert "study tiny is over" in said

    sites = {name: read_site(agreed, name, str(lab.images(name))) for name in (ONE, TWO)}
    parties = Parties(tmp_path, agreed)
    for name, site in sites.items():
        parties.hub().collect(parties.desk(name).train(site))
    parties.step(now=True)
    for name, site in sites.items():
        home = parties.desk(name).take_home(site)
        assert delivered(lab, name) == home.delivery
        assert predictor_hash(model(lab, name)) == predictor_hash(home.predictor)


@pytest.mark.soak
def test_fedbicross_between_five_sites_and_apps_in_processes_of_their_own(tmp_path: Path) -> None:
    agreed = agreement("fedbicross", sites=FIVE)
    with deployed(tmp_path, agreed, is_plain=True) as lab:
        said = lab.run("five")
        assert sorted(re.findall("stored: (.*), round 1", said)) == list(FIVE)
        assert sorted(re.findall("(site-.) has taken its parcel home", said)) == list(FIVE)
        compare(lab, agreed, tmp_path / "run")


@pytest.mark.soak
def test_a_node_that_was_killed_joins_again_and_answers(tmp_path: Path) -> None:
    """As docs/flower.md says: it is started again until Flower has noticed and lets it in."""
    agreed = agreement("fedavg", rounds=1)
    with deployed(tmp_path, agreed, is_plain=True) as lab:
        run = lab.launch("rejoined")
        until(lambda: "Received successfully" in lab.said(THREE), "the call at the third site")
        lab.kill(THREE)
        until(lambda: stays(lab, THREE), "the third site's node to be let in again")
        assert run.wait(PATIENCE) == 0
        assert "study tiny is over" in lab.said("rejoined")
        compare(lab, agreed, tmp_path / "run")


def stays(lab: Deployment, name: str) -> bool:
    """Start a node; whether it is let in."""
    lab.join(name)
    until(lambda: lab.started[name].poll() is not None or "SuperNode ID" in lab.said(name), "Flower's word")
    return lab.started[name].poll() is None


@pytest.mark.soak
def test_nodes_end_when_a_run_would_bring_code(tmp_path: Path) -> None:
    with deployed(tmp_path, agreement("fedavg", rounds=1), is_plain=True) as lab:
        file = lab.project / "pyproject.toml"
        (lab.project / "evil.py").write_text("open('evil', 'w')")
        file.write_text(file.read_text().replace('["pyproject.toml"]', '["pyproject.toml", "evil.py"]'))
        lab.launch("evil")
        for name in SITES:
            assert lab.started[name].wait(PATIENCE) == 2
            assert "error: the run brings code to this site ('evil.py')" in lab.said(name)
            assert not list((lab.root / f"{name}.home").rglob("evil*"))


@pytest.mark.soak
def test_every_other_method(tmp_path: Path) -> None:
    others = [name for name in known() if name not in IN_EVERY_TEST]
    others = others[: times(len(others))]
    with deployed(tmp_path, agreement(others[0])) as lab:
        for method in others:
            agreed = agreement(method)
            lab.begin(agreed)
            assert "study tiny is over" in lab.run(method), method
            compare(lab, agreed, tmp_path / f"run-{method}")
