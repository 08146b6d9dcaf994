"""The Flower project of a study, the gate that takes no other, certificates, and the commands that start Flower."""

from __future__ import annotations

import io
import ipaddress
import os
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'wardround[flower]'")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, load_ssh_private_key, load_ssh_public_key
from flwr.cli.build import build_fab_from_disk

from commands import Captured, cli, ok
from remote.parties import KEYS, agreement
from wardround.agreement import write_agreement
from wardround.errors import BadInput
from wardround.remote.flower import gate, launch
from wardround.remote.flower.certificates import CA, CA_KEY, SERVER, SERVER_KEY, make_certificates, make_node_key
from wardround.remote.flower.gate import guarded, refuse_code
from wardround.remote.flower.project import COMPONENTS, CONNECTION, HOME, is_over, wait_for_superlink, write_project
from wardround.remote.hubrecord import HubRecord, Round
from wardround.remote.register import Register

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_agreement(tmp_path / "study.toml", agreement())
    (tmp_path / CA).write_text("a certificate")
    write_project(tmp_path / "app", tmp_path / "study.toml", "host:9443", tmp_path / CA, 60.0, True)
    return tmp_path / "app"


# The project and the gate ---------------------------------------------------------------------------------------------


def test_a_project_is_settings_and_no_code(project: Path, tmp_path: Path) -> None:
    tree = tomllib.loads((project / "pyproject.toml").read_text())
    app = tree["tool"]["flwr"]["app"]
    assert app["components"] == COMPONENTS
    assert app["config"] == {"study": str(tmp_path / "study.toml"), "round-seconds": 60.0, "wait-for-all": True}
    assert tree["project"]["dependencies"] == []
    config = tomllib.loads((project / HOME / "config.toml").read_text())
    assert config["superlink"][CONNECTION] == {"address": "host:9443", "root-certificates": str(tmp_path / CA)}
    bundle = build_fab_from_disk(project)
    assert len(bundle) < 4000
    refuse_code(bundle)


def test_what_flower_builds_of_other_projects_is_refused(project: Path) -> None:
    text = (project / "pyproject.toml").read_text()
    (project / "evil.py").write_text("print('hello')")
    (project / "pyproject.toml").write_text(text.replace('["pyproject.toml"]', '["pyproject.toml", "evil.py"]'))
    with pytest.raises(BadInput, match=r"brings code to this site \('evil.py'\)"):
        refuse_code(build_fab_from_disk(project))
    (project / "evil.py").unlink()
    (project / "pyproject.toml").write_text(text.replace("wardround.remote.flower.client_app:app", "os:system"))
    with pytest.raises(BadInput, match="names another app than wardround's"):
        refuse_code(build_fab_from_disk(project))


def zipped(*entries: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return buffer.getvalue()


def flipped(bundle: bytes, *places: int) -> bytes:
    """With other bits at these places."""
    changed = bytearray(bundle)
    for place in places:
        changed[place] ^= 0xFF
    return bytes(changed)


def locked(bundle: bytes) -> bytes:
    """As if a password were needed."""
    changed = bytearray(bundle)
    for place in (6, bundle.index(b"PK\x01\x02") + 8):
        changed[place] |= 1
    return bytes(changed)


@pytest.mark.parametrize(
    "bundle",
    [
        b"",
        flipped(zipped(("pyproject.toml", b"[tool.flwr.app]\n" * 50)), 50, 52),
        locked(zipped(("pyproject.toml", b"[tool]"))),
        zipped(("pyproject.toml", b"x = " + b"[" * 20_000)),
        b"no archive",
        zipped(),
        zipped(("pyproject.toml", b"\xff")),
        zipped(("pyproject.toml", b"[tool]")),
        zipped(("pyproject.toml", b"tool = 1")),
        zipped(("pyproject.toml", b" " * 2**20)),
        zipped(("wardround/__init__.py", b""), ("pyproject.toml", b"")),
        zipped(("../pyproject.toml", b"")),
    ],
)
def test_hostile_bundles_are_refused(bundle: bytes) -> None:
    with pytest.raises(BadInput, match=r"it is not taken, and the node ends$"):
        refuse_code(bundle)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_files_of_one_name_are_refused(project: Path) -> None:
    content = (project / "pyproject.toml").read_bytes()
    with pytest.raises(BadInput, match="brings code"):
        refuse_code(zipped(("pyproject.toml", b"[tool]"), ("pyproject.toml", content)))


def test_the_gate_stands_where_flower_fetches_a_project(project: Path) -> None:
    from flwr.supercore.fab import Fab
    from flwr.supernode import start_client_internal as internal

    assert "get_fab" in internal._pull_and_store_message.__code__.co_varnames
    fetched: list[Any] = []

    def pull(*, get_fab: Any, state: str) -> str:
        fetched.append(get_fab("hash", 1))
        return state

    def stop(error: BadInput) -> NoReturn:
        raise SystemExit(str(error))

    with pytest.raises(SystemExit, match="cannot be read"):
        guarded(pull, stop)(get_fab=lambda *_: Fab("hash", b"code", {}), state="x")
    assert fetched == []
    fab = Fab("hash", build_fab_from_disk(project), {})
    assert guarded(pull, stop)(get_fab=lambda *_: fab, state="x") == "x"
    assert fetched == [fab]


def test_a_node_looks_for_calls_again_and_returns_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(gate.time, "sleep", waited.append)
    found = iter([None, None, 7])
    assert guarded(lambda **_: next(found), gate.stop_node, 0.5)(get_fab=None) == 7
    assert waited == [0.5, 0.5]


@pytest.mark.parametrize("text", ["", "often", "0", "-1", "nan", "61"])
def test_a_pace_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert gate.poll_seconds() == 1.0
    monkeypatch.setenv(gate.POLL, "0.5")
    assert gate.poll_seconds() == 0.5
    monkeypatch.setenv(gate.POLL, text)
    with pytest.raises(SystemExit) as end:
        gate.main()
    assert end.value.code == 2
    assert capsys.readouterr().out.startswith(f"error: {gate.POLL}={text} is no number of seconds up to 60")


@pytest.mark.parametrize("missing", ["study.toml", CA])
def test_a_project_needs_its_files(project: Path, tmp_path: Path, missing: str) -> None:
    (tmp_path / missing).unlink()
    with pytest.raises(BadInput, match=f"there is no .*{missing}"):
        write_project(project, tmp_path / "study.toml", "host:1", tmp_path / CA, 60.0, True)


# Certificates and node keys -------------------------------------------------------------------------------------------


def test_certificates_name_the_host_and_hold(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["127.0.0.1", "hub.example.org"])
    authority, server = (x509.load_pem_x509_certificate((tmp_path / name).read_bytes()) for name in (CA, SERVER))
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["hub.example.org", "localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("127.0.0.1")]
    make_certificates(tmp_path, ["other.example.org"])  # renewed, under the same authority
    again = x509.load_pem_x509_certificate((tmp_path / SERVER).read_bytes())
    again.verify_directly_issued_by(authority)
    assert again.serial_number != server.serial_number
    assert (tmp_path / CA).read_bytes() == authority.public_bytes(Encoding.PEM)


def test_an_authority_is_never_replaced(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"])
    before = {name: (tmp_path / name).read_bytes() for name in (CA, CA_KEY, SERVER, SERVER_KEY)}
    (tmp_path / CA_KEY).rename(tmp_path / "elsewhere")  # where the advice is to keep it
    with pytest.raises(BadInput, match=r"ca\.crt is here without its key; bring ca\.key back"):
        make_certificates(tmp_path, ["localhost"])
    for damaged in (b"", before[CA]):
        (tmp_path / CA_KEY).write_bytes(damaged)
        with pytest.raises(BadInput, match=r"ca\.crt or ca\.key in .* cannot be read; restore it"):
            make_certificates(tmp_path, ["localhost"])
    assert {name: (tmp_path / name).read_bytes() for name in (CA, SERVER, SERVER_KEY)} == {
        name: data for name, data in before.items() if name != CA_KEY
    }
    (tmp_path / "elsewhere").replace(tmp_path / CA_KEY)
    (tmp_path / CA).unlink()  # as where the first run was stopped before it was written
    make_certificates(tmp_path, ["localhost"])
    authority, server = (x509.load_pem_x509_certificate((tmp_path / name).read_bytes()) for name in (CA, SERVER))
    server.verify_directly_issued_by(authority)
    assert (tmp_path / CA_KEY).read_bytes() == before[CA_KEY]


@pytest.mark.skipif(os.name != "posix", reason="Windows has other permissions")
def test_private_halves_are_their_owners(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"])
    make_node_key(tmp_path / "node.key")
    for name in (CA_KEY, SERVER_KEY, "node.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("host", ["", "a b", "hub/", "ümlaut.org", "a..b"])
def test_a_host_that_is_none(tmp_path: Path, host: str) -> None:
    with pytest.raises(BadInput, match="is neither a host's name nor an address"):
        make_certificates(tmp_path, [host])


def test_a_nodes_key_is_what_flower_wants(tmp_path: Path) -> None:
    public = make_node_key(tmp_path / "node.key")
    private = load_ssh_private_key((tmp_path / "node.key").read_bytes(), None)
    assert private.public_key() == load_ssh_public_key(public.read_bytes())
    with pytest.raises(BadInput, match="exists already"):
        make_node_key(tmp_path / "node.key")
    with pytest.raises(BadInput, match=r"node\.pub exists, and may be the half of another key"):
        make_node_key(tmp_path / "node.pem")
    assert not (tmp_path / "node.pem").exists()


# Commands -------------------------------------------------------------------------------------------------------------


def test_nothing_is_sent_home_or_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    environment = launch.environment(tmp_path)
    assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
    assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert environment["FLWR_HOME"] == str(tmp_path)
    make_certificates(tmp_path, ["localhost"])
    command = launch.superlink(tmp_path, "127.0.0.1", 9443, tmp_path / "db")
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(command)
    assert "--insecure" not in command
    check = "from flwr.supercore import telemetry; print(telemetry.FLWR_TELEMETRY_ENABLED)"
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_a_node_that_waits_does_without_torch() -> None:
    check = "import sys, wardround.remote.flower.gate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_nodes_settings_survive_flowers_parser(project: Path, tmp_path: Path) -> None:
    from flwr.common.config import parse_config_args

    data = r'C:\scans "north" = 1'
    config = launch.write_node_config(
        tmp_path / "x" / "node.toml", tmp_path / "study.toml", data, policy="/etc/my rules.toml"
    )
    make_node_key(tmp_path / "node.key")
    command = launch.node(config, "host:1", tmp_path / CA, tmp_path / "node.key", 9094)
    found = parse_config_args([command[command.index("--node-config") + 1]])
    assert found == {"study": str(tmp_path / "study.toml"), "data": data, "policy": "/etc/my rules.toml"}


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(tmp_path)
    write_agreement(tmp_path / "study.toml", agreement())
    assert "Give every hospital ca.crt" in ok(capsys, "flower", "certificates")
    assert "node.pub" in ok(capsys, "flower", "node-key")
    assert "written: app" in ok(capsys, "flower", "app", "app", "--no-wait-for-all")
    tree = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert tree["tool"]["flwr"]["app"]["config"]["wait-for-all"] is False
    code, _, err = cli(capsys, "flower", "node")
    assert (code, err.startswith("error: this needs your images")) == (2, True)
    code, _, err = cli(capsys, "flower", "node", "--data", "x", "--ca", "nowhere.crt")
    assert (code, err) == (2, "error: there is no nowhere.crt; check the path\n")
    (tmp_path / "ca.crt").touch()
    code, _, err = cli(capsys, "flower", "node", "--data", "x")
    assert (code, err.startswith("error: cannot read site.key: ")) == (2, True)
    KEYS["site-1"].save(tmp_path / "site.key")
    (tmp_path / "policy.toml").write_text("method = 1\n")
    code, _, err = cli(capsys, "flower", "node", "--data", "x")
    assert (code, err.startswith("error: policy.toml: there is no rule 'method'")) == (2, True)
    for seconds in ("0", "-1", "nan", "inf"):
        code, _, err = cli(capsys, "flower", "app", "other", "--round-seconds", seconds)
        assert (code, err.startswith("error: a round cannot wait for ")) == (2, True)
    assert not (tmp_path / "other").exists()
    code, _, err = cli(capsys, "flower", "run", "nowhere")
    assert (code, "write the project with: wardround flower app" in err) == (2, True)
    monkeypatch.setattr(launch.shutil, "which", lambda *_, **__: None)
    for command in (("run", "app"), ("register", "app", "node.pub"), ("superlink",), ("node", "--data", "x")):
        code, _, err = cli(capsys, "flower", *command)
        assert (code, err.endswith("install it with: pip install 'wardround[flower]'\n")) == (2, True)


def test_a_superlink_that_is_not_there(project: Path) -> None:
    with pytest.raises(BadInput, match="nothing answers at host:9443; start it with: wardround flower superlink"):
        wait_for_superlink(project, seconds=0)


def test_a_study_is_over_when_its_hub_says_so(project: Path, tmp_path: Path) -> None:
    assert not is_over(project)
    hub = Register(tmp_path / "hub", HubRecord, "hub.json")
    hub.folder.mkdir()
    for current in (Round(number=0, state="", since="", asked={}), None):
        hub.commit(HubRecord(study="x", current=current))
        assert is_over(project) is (current is None)
