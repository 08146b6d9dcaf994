"""Official MedMNIST files from Zenodo, checked against their published MD5 sums before they get their name.

Record 10519652 holds every set at 28, 64, 128 and 224 pixels; the sums are those of MedMNIST's `info.py`, version
3.0.2. A file arrives under a hidden temporary name in the same folder and is renamed only when its sum is right, so a
file that we put under its proper name is always whole.
"""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from wardround.data.medmnist import official_name, refuse_multi_label
from wardround.errors import BadInput

ADDRESS = "https://zenodo.org/records/10519652/files"
TIMEOUT = 30.0  # seconds without an answer or a byte
CHUNK = 1 << 20
SIZES = (28, 64, 128, 224)

# In the order of SIZES.
MD5 = {
    "pathmnist": (
        "a8b06965200029087d5bd730944a56c1", "55aa9c1e0525abe5a6b9d8343a507616",
        "ac42d08fb904d92c244187169d1fd1d9", "2c51a510bcdc9cf8ddb2af93af1eadec",
    ),
    "dermamnist": (
        "0744692d530f8e62ec473284d019b0c7", "b70a2f5635c6199aeaa28c31d7202e1f",
        "2defd784463fa5243564e855ed717de1", "8974907d8e169bef5f5b96bc506ae45d",
    ),
    "octmnist": (
        "c68d92d5b585d8d81f7112f81e2d0842", "e229e9440236b774d9f0dfef9d07bdaf",
        "0a97e76651ace45c5d943ee3f65b63ae", "abc493b6d529d5de7569faaef2773ba3",
    ),
    "pneumoniamnist": (
        "28209eda62fecd6e6a2d98b1501bb15f", "8f4eceb4ccffa70c672198ea285246c6",
        "05b46931834c231683c68f40c47b2971", "d6a3c71de1b945ea11211b03746c1fe1",
    ),
    "retinamnist": (
        "bd4c0672f1bba3e3a89f0e4e876791e4", "afda852cc34dcda56f86ad2b2457dbcc",
        "e48e916a24454daf90583d4e6efb1a18", "eae7e3b6f3fcbda4ae613ebdcbe35348",
    ),
    "breastmnist": (
        "750601b1f35ba3300ea97c75c52ff8f6", "742edef2a1fd1524b2efff4bd7ba9364",
        "363e4b3f8d712e9b5de15470a2aaadf1", "b56378a6eefa9fed602bb16d192d4c8b",
    ),
    "bloodmnist": (
        "7053d0359d879ad8a5505303e11de1dc", "2b94928a2ae4916078ca51e05b6b800b",
        "adace1e0ed228fccda1f39692059dd4c", "b718ff6835fcbdb22ba9eacccd7b2601",
    ),
    "tissuemnist": (
        "ebe78ee8b05294063de985d821c1c34b", "123ece2eba09d0aa5d698fda57103344",
        "61b955355d7425a89687b06cca3ce0c2", "b077128c4a949f0a4eb01517f9037b9c",
    ),
    "organamnist": (
        "68e3f8846a6bd62f0c9bf841c0d9eacc", "2dcccc29b88e6da5a01161ef20cda288",
        "eeae80d0a227a8d099027e1b3cfd3b60", "50747347e05c87dd3aaf92c49f9f3170",
    ),
    "organcmnist": (
        "b9ceb9546e10131b32923c5bbeaea2b1", "3ce34a8724ea6f548e6db4744d03b6a9",
        "773c1f009daa3fe5d9a2a201b2a7ed94", "050f5e875dc056f6768abf94ec9995d1",
    ),
    "organsmnist": (
        "9ab87b696fb54e2a387ebe992d6ed5f1", "53a6d115339d874c25e309a994ff46d3",
        "ded0c5fa01a95dc4978b956f613e9b8e", "b354719e553fbbb2513d5533f52a4cb1",
    ),
}  # fmt: skip

Progress = Callable[[int, int], None]  # bytes so far, bytes in all; the latter 0 where the server does not say


def file_name(name: str, size: int = 28) -> str:
    """What the official file of a set is called: `bloodmnist.npz`, `bloodmnist_64.npz`."""
    return f"{name}.npz" if size == 28 else f"{name}_{size}.npz"


def fetch(
    name: str,
    folder: Path,
    size: int = 28,
    *,
    progress: Progress | None = None,
    opener: Callable[..., Any] = urllib.request.urlopen,
) -> Path:
    """The path of the official file in `folder`, downloaded unless it is there already.

    `opener(url, timeout=seconds)` answers as `urllib.request.urlopen` does; a hospital with its own way out passes one.
    """
    name = official_name(name)
    refuse_multi_label(name)
    if name not in MD5:
        raise BadInput(f"MedMNIST has no set {name} that wardround reads; it has {', '.join(MD5)}")
    if size not in SIZES:
        raise BadInput(f"{name} comes in {', '.join(map(str, SIZES))} pixels, not {size}; choose one of these sizes")
    path, expected = folder / file_name(name, size), MD5[name][SIZES.index(size)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            return _checked(path, expected)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            found = _save(_chunks(f"{ADDRESS}/{path.name}?download=1", folder, opener, progress), part)
            if found != expected:
                raise BadInput(
                    f"{path.name} arrived with MD5 {found} instead of {expected} and was removed; try again, and if it "
                    "happens again ask whether your network changes downloads"
                )
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(
            f"{path} cannot be written ({error.strerror}); check the disk's space and permissions"
        ) from error
    return path


def _checked(path: Path, expected: str) -> Path:
    """The file that is there, if it is the official one; it is never overwritten, for it may be somebody's own."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, _md5).hexdigest()
    if found != expected:
        raise BadInput(
            f"{path} is there but is not the official file (MD5 {found}, not {expected}); use it as it is, or move it "
            "away to download the official one"
        )
    return path


def _save(chunks: Iterator[bytes], part: Path) -> str:
    """Write what arrives; returns its MD5."""
    digest = _md5()
    with part.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
    return digest.hexdigest()


def _md5() -> "hashlib._Hash":
    """MD5 finds accidents, which is its use here; it is what MedMNIST publishes."""
    return hashlib.md5(usedforsecurity=False)


def _chunks(url: str, folder: Path, opener: Callable[..., Any], progress: Progress | None) -> Iterator[bytes]:
    """The bytes at an address. What the network does wrong ends as BadInput here, so that OSError means the disk."""
    by_hand = f"try again later, or copy the file by hand into {folder}"
    done = 0
    try:
        with opener(url, timeout=TIMEOUT) as response:
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else 0
            while chunk := response.read(CHUNK):
                done += len(chunk)
                if progress:
                    progress(done, total)
                yield chunk
    except urllib.error.HTTPError as error:
        raise BadInput(f"{url} answered {error.code} {error.reason}; {by_hand}") from error
    except urllib.error.URLError as error:
        raise BadInput(f"the network cannot be reached ({error.reason}): tried {url}; {by_hand}") from error
    except (OSError, http.client.HTTPException) as error:
        raise BadInput(f"the connection broke after {done} bytes ({error!r}) of {url}; {by_hand}") from error
    if done < total:
        raise BadInput(f"{url} broke off after {done} of {total} bytes; {by_hand}")
