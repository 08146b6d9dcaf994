"""A folder of wheels that installs wardround on a machine with no network, and the check that it arrived unharmed.

    python tools/wheelhouse.py build dist/wheelhouse --extras sites,onnx
    python tools/wheelhouse.py verify dist/wheelhouse

The standard library and pip are all it needs. `build` lets pip collect what it would install on this machine, with the
versions of constraints.txt, so the folder is for machines of this kind: this Python, this operating system, and the
build of torch that pip takes here. Beside the wheels lie requirements.txt, which names each with its hash, so that pip
itself refuses any other; INSTALL.txt with the two commands; SHA256SUMS, in the form that `sha256sum -c` reads; and a
copy of this file, to verify with where there is no checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUMS = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64}) [ *]([A-Za-z0-9][A-Za-z0-9._+!-]*)")
WHEEL = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")
INSTALL = """\
{project} {version}{extras}, for Python {python} on {system}.

In the folder that holds this one, on a machine of that kind:

    {interpreter} -m venv wardround-env
    {environment} -m pip install --no-index --find-links {folder} --require-hashes -r {folder}/requirements.txt

Nothing is fetched from a network, and pip refuses a wheel that is not the one that was packed. To check the whole
folder first:

    {interpreter} {folder}/wheelhouse.py verify {folder}
"""


class Refused(Exception):
    """What is wrong, and what to do, in one line."""


# Building -------------------------------------------------------------------------------------------------------------


def build(target: Path, extras: Sequence[str], collect: Callable[[Path], None]) -> str:
    """Make the folder, in place of an older one; the hash of its list. `collect` fills an empty folder with wheels."""
    if target.exists() and not (target / SUMS).is_file():
        raise Refused(f"{target} exists and is no wheelhouse; name a folder that does not exist")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        collect(part)
        describe(part, target.name, extras)
        shutil.copyfile(__file__, part / "wheelhouse.py")
        write_sums(part)
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
    except OSError as error:
        raise Refused(f"{target} cannot be written: {error.strerror or error}; choose another place") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return verify(target)


def known_extras(pyproject: Path = ROOT / "pyproject.toml") -> list[str]:
    """The extras that the project declares."""
    return sorted(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"].get("optional-dependencies", {}))


def chosen(text: str, known: Sequence[str]) -> list[str]:
    """`sites,onnx` as a list; an extra that there is not is refused, where pip would only warn."""
    extras = [extra.strip() for extra in text.split(",") if extra.strip()]
    for extra in extras:
        if extra not in known:
            raise Refused(f"there is no extra {extra!r}; choose from {', '.join(known)}")
    return extras


def pip_wheel(extras: Sequence[str]) -> Callable[[Path], None]:
    """Let pip collect the project and everything it needs as wheels, building those that the registry lacks."""
    what = f".[{','.join(extras)}]" if extras else "."

    def collect(folder: Path) -> None:
        sys.stderr.write("collecting wheels; this may take minutes\n")
        where = ["--wheel-dir", str(folder.resolve()), "--constraint", "constraints.txt"]
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", *where, what]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode  # noqa: S603 - our own words
        if code != 0:
            raise Refused(f"pip could not collect the wheels (exit code {code}); see what it wrote above")

    return collect


def describe(folder: Path, name: str, extras: Sequence[str], project: str = "wardround") -> None:
    """Write requirements.txt and INSTALL.txt for the wheels that are there."""
    wheels = sorted(folder.iterdir())
    versions = dict(name_and_version(wheel.name) for wheel in wheels)
    if len(versions) < len(wheels):
        raise Refused("pip collected two wheels of one package; remove one from the constraints")
    if project not in versions:
        raise Refused(f"pip collected no wheel of {project}; run this in a checkout of it")
    with_extras = f"[{','.join(extras)}]" if extras else ""
    lines = []
    for wheel in wheels:
        package, version = name_and_version(wheel.name)
        wanted = f"{package}{with_extras}" if package == project else package
        lines.append(f"{wanted}=={version} --hash=sha256:{sha256(wheel)}\n")
    _write(folder / "requirements.txt", lines)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    windows = os.name == "nt"
    text = INSTALL.format(
        project=project,
        version=versions[project],
        extras=f" with {', '.join(extras)}" if extras else "",
        python=python,
        system=f"{platform.system()} {platform.machine()}",
        interpreter=f"py -{python}" if windows else f"python{python}",
        environment=r"wardround-env\Scripts\python" if windows else "wardround-env/bin/python",
        folder=name,
    )
    _write(folder / "INSTALL.txt", [text])


def name_and_version(wheel: str) -> tuple[str, str]:
    """What a wheel's file name says."""
    found = WHEEL.fullmatch(wheel)
    if found is None:
        raise Refused(f"{wheel!a} is not the name of a wheel; collect again into an empty folder")
    return re.sub(r"[-_.]+", "-", found["name"]).lower(), found["version"]


def write_sums(folder: Path) -> None:
    """List every file with its hash."""
    _write(folder / SUMS, [f"{sha256(file)}  {file.name}\n" for file in sorted(folder.iterdir())])


# Verifying ------------------------------------------------------------------------------------------------------------


def verify(folder: Path) -> str:
    """Refuse a folder that is not exactly what its list says; the hash of the list, to compare by telephone.

    A file that is not listed is refused, too: pip would take a wheel of a higher version.
    """
    listed = read_sums(folder)
    there = {entry.name for entry in folder.iterdir()} - {SUMS}
    for name in sorted(listed.keys() - there):
        raise Refused(f"{name} is listed in {SUMS} and not there; copy the folder again")
    for name in sorted(there - listed.keys()):
        raise Refused(f"{name!a} is not listed in {SUMS}; remove it, or copy the folder again")
    for name, expected in listed.items():
        file = folder / name
        if file.is_symlink() or not file.is_file():
            raise Refused(f"{name} is no ordinary file; copy the folder again")
        if sha256(file) != expected:
            raise Refused(f"{name} is not what was packed: its hash differs; copy it again, and do not install it")
    return sha256(folder / SUMS)


def read_sums(folder: Path) -> dict[str, str]:
    """The list, by file name; a line that is none, or names something outside the folder, is refused."""
    path = folder / SUMS
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read ({error}); give the folder that `build` made") from error
    listed: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        found = LINE.fullmatch(line)
        if found is None or found[2] in (*listed, SUMS):
            raise Refused(f"line {number} of {path} is not a hash and a new file's name; copy the folder again")
        listed[found[2]] = found[1]
    if not listed:
        raise Refused(f"{path} is empty; copy the folder again")
    return listed


def sha256(file: Path) -> str:
    """Read in pieces: torch alone may be 800 MB."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(path: Path, parts: Iterable[str]) -> None:
    path.write_bytes("".join(parts).encode())  # bytes: the hash must not depend on a system's line ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line."""
    parser = argparse.ArgumentParser(prog="wheelhouse.py", description="Make or check a folder of wheels.")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("build", help="collect wheels for this Python and system (needs a registry)")
    making.add_argument("folder", type=Path)
    making.add_argument("--extras", default="sites,onnx", help="with commas between them (default: sites,onnx)")
    checking = commands.add_parser("verify", help="compare a folder with its list (needs no network)")
    checking.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    try:
        if given.command == "build":
            extras = chosen(given.extras, known_extras())
            fingerprint = build(given.folder, extras, pip_wheel(extras))
        else:
            fingerprint = verify(given.folder)
    except Refused as refusal:
        sys.stderr.write(f"error: {refusal}\n")
        return 2
    files = [file for file in given.folder.iterdir() if file.suffix == ".whl"]
    size = sum(file.stat().st_size for file in files) / 1e6
    sys.stdout.write(
        f"{given.folder}: {len(files)} wheels, {size:,.0f} MB, as listed; hash of the list: {fingerprint}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
