"""What a disk and an editor of Windows would do to a study, as far as another system can tell.

Parcels, records and folders are carried between machines; so every name that is written must be one there, too, and no
record may say where it lay.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path, PureWindowsPath

import pytest

from remote.parties import KEYS, SITES, Parties, agreement
from wardround.agreement import fits_every_disk, read_agreement, write_agreement
from wardround.errors import BadInput
from wardround.exchange.bundle import NAME
from wardround.remote.cli import key_text

FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f]|[. ]$')
LONGEST = 120  # of the 260 characters that Windows takes by default, half are left for where the folder is


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everyone's folders at the end of a study, with the model that a site takes home."""
    root = tmp_path_factory.mktemp("played")
    parties = Parties(root, agreement("ditto"))
    parties.play()
    desk, site = parties.desk(SITES[0]), parties.sites[SITES[0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "onnx", None)  # tests/deploy has ONNX; making it takes seconds
        desk.deploy(site, desk.take_home(site))
    return root


def test_every_name_that_is_written_is_one_on_windows(played: Path) -> None:
    files = [path.relative_to(played) for path in played.rglob("*")]
    assert {"hub.json", "desk.json", "model.safetensors"} <= {path.name for path in files}
    for path in files:
        assert not any(FORBIDDEN.search(part) for part in path.parts), path
        assert all(fits_every_disk(part) for part in path.parts), path
        assert PureWindowsPath(*path.parts).parts == path.parts
        assert len(str(path)) <= LONGEST
    assert max(Counter(str(path).lower() for path in files).values()) == 1, "two differ in capitals only"


def test_no_record_says_where_it_lies_so_a_folder_may_be_moved(played: Path) -> None:
    texts = [path for path in played.rglob("*") if path.suffix in (".json", ".toml", ".md", ".parcel")]
    assert len(texts) > 10
    for path in texts:
        assert str(played).encode() not in path.read_bytes(), path


@pytest.mark.parametrize("name", ["con", "NUL", "aux.north", "com1", "Lpt9.x", "north."])
def test_names_that_windows_cannot_write(name: str) -> None:
    assert NAME.fullmatch(name)
    with pytest.raises(BadInput, match=f"'{re.escape(name)}' is no name for a site"):
        agreement(sites=()).with_site(name, KEYS[SITES[0]].public.text())
    assert not fits_every_disk(name)


@pytest.mark.parametrize("name", ["con", "blood."])
def test_studies_that_windows_cannot_write(name: str, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    write_agreement(path, agreement())
    path.write_text(path.read_text().replace('name = "tiny"', f'name = "{name}"'))
    with pytest.raises(BadInput, match="no folder of Windows can have this name"):
        read_agreement(path)


@pytest.mark.parametrize("name", ["console", "nulls", "com", "com10", "north.con", "site-1", "lpt"])
def test_names_that_only_look_so(name: str) -> None:
    assert fits_every_disk(name)


def test_an_editor_of_windows_changes_nothing(tmp_path: Path) -> None:
    path, agreed = tmp_path / "study.toml", agreement()
    write_agreement(path, agreed)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_agreement(path) == agreed
    public = KEYS[SITES[0]].public.text()
    (tmp_path / "site.pub").write_bytes(public.strip().encode() + b"\r\n")
    assert key_text(str(tmp_path / "site.pub")) == public
