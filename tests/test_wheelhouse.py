"""The folder of wheels: what is in it, what is refused, and (in the soak test) that it installs without a network."""

import base64
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from wardround import __version__

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools" / "wheelhouse.py"
spec = importlib.util.spec_from_file_location("wheelhouse", SCRIPT)
assert spec is not None
assert spec.loader is not None
wheelhouse = importlib.util.module_from_spec(spec)
spec.loader.exec_module(wheelhouse)

TORCH = "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"


def a_wheel(folder: Path, name: str, needs: str = "") -> Path:
    """A real wheel of one empty module, without extras or a network."""
    module, version = name.split("-")[:2]
    info = f"{module}-{version}.dist-info"
    described = f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\nProvides-Extra: sites\n"
    files = {
        f"{module}.py": "",
        f"{info}/METADATA": described + needs,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text)}\n")
    files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"])
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return folder / name


def collect(*more: str) -> Callable[[Path], None]:
    """Two wheels of which one needs the other, and more."""

    def into(folder: Path) -> None:
        a_wheel(folder, "wardround-0.1.0-py3-none-any.whl", "Requires-Dist: tiny_dependency; extra == 'sites'\n")
        a_wheel(folder, "tiny_dependency-2.0-py3-none-any.whl")
        for name in more:
            (folder / name).write_bytes(name.encode())

    return into


@pytest.fixture
def made(tmp_path: Path) -> Path:
    wheelhouse.build(tmp_path / "wheels", ["sites"], collect(TORCH))
    return tmp_path / "wheels"


def refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which the folder is refused."""
    assert wheelhouse.main(["verify", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return str(err)


# Building -------------------------------------------------------------------------------------------------------------


def test_what_is_in_the_folder(made: Path) -> None:
    others = {"INSTALL.txt", "SHA256SUMS", "requirements.txt", "wheelhouse.py"}
    wheels = {"wardround-0.1.0-py3-none-any.whl", "tiny_dependency-2.0-py3-none-any.whl", TORCH}
    assert {file.name for file in made.iterdir()} == wheels | others
    assert [file.name for file in made.parent.iterdir()] == ["wheels"]
    assert (made / "wheelhouse.py").read_bytes() == SCRIPT.read_bytes()


def test_requirements_name_every_wheel_with_its_hash(made: Path) -> None:
    def digest(name: str) -> str:
        return hashlib.sha256((made / name).read_bytes()).hexdigest()

    assert (made / "requirements.txt").read_text().splitlines() == [
        f"tiny-dependency==2.0 --hash=sha256:{digest('tiny_dependency-2.0-py3-none-any.whl')}",
        f"torch==2.13.0+cpu --hash=sha256:{digest(TORCH)}",
        f"wardround[sites]==0.1.0 --hash=sha256:{digest('wardround-0.1.0-py3-none-any.whl')}",
    ]


def test_the_sums_are_as_sha256sum_writes_them(made: Path) -> None:
    listed = (made / "SHA256SUMS").read_text().splitlines()
    files = sorted(file.name for file in made.iterdir() if file.name != "SHA256SUMS")
    assert listed == [f"{hashlib.sha256((made / name).read_bytes()).hexdigest()}  {name}" for name in files]


def test_the_instructions_name_this_python_and_the_folder(made: Path) -> None:
    text = (made / "INSTALL.txt").read_text()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert text.startswith(f"wardround 0.1.0 with sites, for Python {python} on ")
    assert "-m pip install --no-index --find-links wheels --require-hashes -r wheels/requirements.txt\n" in text
    assert str(made.parent) not in text


def test_without_extras_the_core_alone(tmp_path: Path) -> None:
    wheelhouse.build(tmp_path / "wheels", [], collect())
    assert "\nwardround==0.1.0 --hash" in (tmp_path / "wheels" / "requirements.txt").read_text()
    assert "wardround 0.1.0, for Python" in (tmp_path / "wheels" / "INSTALL.txt").read_text()


def test_building_again_replaces_the_folder(made: Path) -> None:
    old = (made / "SHA256SUMS").read_bytes()
    wheelhouse.build(made, ["sites"], collect())
    assert not (made / TORCH).exists()
    assert (made / "SHA256SUMS").read_bytes() != old


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "photographs").mkdir()
    (tmp_path / "photographs" / "dear.jpg").write_bytes(b"")
    with pytest.raises(wheelhouse.Refused, match="exists and is no wheelhouse; name a folder that does not exist"):
        wheelhouse.build(tmp_path / "photographs", [], collect())
    assert (tmp_path / "photographs" / "dear.jpg").exists()


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ("torch-2.12.0-py3-none-any.whl", "two wheels of one package"),
        ("source-1.0.tar.gz", "'source-1.0.tar.gz' is not the name of a wheel"),
    ],
)
def test_what_cannot_be_one_wheel_a_package_leaves_what_was_there(more: str, complaint: str, made: Path) -> None:
    before = {file.name: file.read_bytes() for file in made.iterdir()}
    with pytest.raises(wheelhouse.Refused, match=complaint):
        wheelhouse.build(made, [], collect(TORCH, more))
    assert {file.name: file.read_bytes() for file in made.iterdir()} == before
    assert [file.name for file in made.parent.iterdir()] == ["wheels"]


def test_a_folder_without_the_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wheelhouse.Refused, match="no wheel of wardround"):
        wheelhouse.build(tmp_path / "wheels", [], lambda folder: a_wheel(folder, "other-1.0-py3-none-any.whl"))


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(wheelhouse.Refused, match="cannot be written"):
        wheelhouse.build(tmp_path / "file" / "wheels", [], collect())


def test_pip_that_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(wheelhouse.Refused, match=r"pip could not collect the wheels \(exit code 1\)"):
        wheelhouse.build(tmp_path / "wheels", [], wheelhouse.pip_wheel([]))
    assert not list(tmp_path.iterdir())


def test_an_extra_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert wheelhouse.main(["build", str(tmp_path / "wheels"), "--extras", "dev,sights"]) == 2
    assert "error: there is no extra 'sights'; choose from dev" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert wheelhouse.chosen(" sites,onnx ,", ["onnx", "sites"]) == ["sites", "onnx"]
    assert wheelhouse.chosen("", ["onnx"]) == []


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (TORCH, ("torch", "2.13.0+cpu")),
        ("scikit_learn-1.9.1-cp311-cp311-win_amd64.whl", ("scikit-learn", "1.9.1")),
        ("a.B_c-1.0-2build-py3-none-any.whl", ("a-b-c", "1.0")),
    ],
)
def test_names_and_versions(file: str, expected: tuple[str, str]) -> None:
    assert wheelhouse.name_and_version(file) == expected


# Verifying ------------------------------------------------------------------------------------------------------------


def test_a_good_folder_is_accepted_with_the_hash_of_its_list(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wheelhouse.main(["verify", str(made)]) == 0
    digest = hashlib.sha256((made / "SHA256SUMS").read_bytes()).hexdigest()
    assert capsys.readouterr().out == f"{made}: 3 wheels, 0 MB, as listed; hash of the list: {digest}\n"


@pytest.mark.parametrize("name", [TORCH, "requirements.txt", "INSTALL.txt", "wheelhouse.py"])
def test_one_changed_bit_is_refused_by_name(name: str, made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((made / name).read_bytes())
    data[len(data) // 2] ^= 1
    (made / name).write_bytes(data)
    assert f"error: {name} is not what was packed" in refusal(made, capsys)


def test_a_missing_and_an_added_wheel_are_refused(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made / "torch-99.0-py3-none-any.whl").write_bytes(b"")
    assert "'torch-99.0-py3-none-any.whl' is not listed" in refusal(made, capsys)
    (made / "torch-99.0-py3-none-any.whl").unlink()
    (made / TORCH).unlink()
    assert f"{TORCH} is listed in SHA256SUMS and not there" in refusal(made, capsys)


def test_an_added_name_with_control_characters_is_shown_escaped(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made / "\x1b[2J.whl").write_bytes(b"")
    assert "\x1b" not in refusal(made, capsys)


def test_a_link_and_a_folder_are_no_files(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = (made / TORCH).rename(made.parent / "elsewhere.whl")
    (made / TORCH).symlink_to(moved)
    assert f"{TORCH} is no ordinary file" in refusal(made, capsys)
    (made / TORCH).unlink()
    (made / TORCH).mkdir()
    assert f"{TORCH} is no ordinary file" in refusal(made, capsys)


GOOD = f"{'0' * 64}  a.whl"


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (f"{'0' * 64}  ../a.whl", "line 1 "),
        (f"{'0' * 64}  /etc/passwd", "line 1 "),
        (f"{'0' * 64}  c:a.whl", "line 1 "),
        (f"{'0' * 64}  .hidden", "line 1 "),
        (f"{'0' * 64}  SHA256SUMS", "line 1 "),
        (f"{GOOD}\n{GOOD}", "line 2 "),
        (f"{GOOD}\nnonsense", "line 2 "),
        (f"{'0' * 63}  a.whl", "line 1 "),
        ("", "is empty"),
        ("é", "cannot be read"),
    ],
)
def test_a_list_that_is_none_is_refused(
    lines: str, complaint: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (made / "SHA256SUMS").write_text(lines, encoding="utf-8")
    assert complaint in refusal(made, capsys)


def test_a_folder_without_a_list_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "SHA256SUMS cannot be read" in refusal(tmp_path, capsys)
    assert "SHA256SUMS cannot be read" in refusal(tmp_path / "nowhere", capsys)


# Installing -----------------------------------------------------------------------------------------------------------


def offline(**more: str) -> dict[str, str]:
    """An environment whose pip has no settings of this machine's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}


def pip_install(folder: Path, target: Path) -> "subprocess.CompletedProcess[str]":
    """What INSTALL.txt says, into a folder in place of an environment."""
    (line,) = re.findall(r"^ +\S+ -m pip (install .*)$", (folder / "INSTALL.txt").read_text(), re.MULTILINE)
    command = [sys.executable, "-m", "pip", *shlex.split(line), "--target", str(target)]
    return subprocess.run(command, cwd=folder.parent, env=offline(), capture_output=True, text=True, check=False)


def test_pip_installs_what_was_packed_and_nothing_else(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheelhouse.build(wheels, ["sites"], collect())
    done = pip_install(wheels, tmp_path / "good")
    assert done.returncode == 0, done.stderr
    assert {file.name for file in (tmp_path / "good").glob("*.py")} == {"wardround.py", "tiny_dependency.py"}
    a_wheel(wheels, "tiny_dependency-2.0-py3-none-any.whl", "Summary: another\n")
    refused = pip_install(wheels, tmp_path / "bad")
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not (tmp_path / "bad").exists()


def without_network() -> list[str]:
    """A prefix for a command that must reach nothing; none where the system has no such thing."""
    prefix = ["unshare", "--map-root-user", "--net"]
    usable = shutil.which("unshare") and subprocess.run([*prefix, "true"], check=False).returncode == 0
    return prefix if usable else []


def in_shell(commands: str, folder: Path, environment: Mapping[str, str]) -> str:
    """The output of a block of commands, run one after the other until one fails."""
    command = [*without_network(), "sh", "-e", "-c", commands]
    done = subprocess.run(command, cwd=folder, env=dict(environment), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.soak
def test_a_real_one_installs_without_a_network(tmp_path: Path) -> None:
    """The commands of docs/offline-install.md as they are, with the Python of these tests, and a tiny run."""
    made = subprocess.run([sys.executable, str(SCRIPT), "build", str(tmp_path / "wheelhouse")], check=False)
    assert made.returncode == 0
    page = (ROOT / "docs" / "offline-install.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (commands,) = (block for block in blocks if "venv" in block)
    environment = offline(PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    try:
        printed = in_shell(commands, tmp_path, environment).splitlines()
        assert printed[-1] == __version__
        study = "--data phantoms:96 --sites 3 --rounds 1 --epochs 1 --device cpu --set model.width=2 --out run --quiet"
        in_shell(f"wardround-env/bin/wardround run {study}", tmp_path, environment)
        assert (tmp_path / "run" / "report.html").exists()
        in_shell("wardround-env/bin/python -c 'import cryptography, onnx'", tmp_path, environment)
        assert "wardround-env/bin/python -m pip install" in (tmp_path / "wheelhouse" / "INSTALL.txt").read_text()
    finally:
        for folder in ("wheelhouse", "wardround-env"):  # 2 GB that nobody needs any more
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
