"""Tables of files, and folders of DICOM: what is read, how parts are drawn, and each way in which they can be wrong."""

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dicoms import NAME, PATIENT, write_dicom
from wardround.data.federate import federate
from wardround.data.listing import Row, _test_units, read_rows
from wardround.data.sources import load
from wardround.data.table import read_table
from wardround.errors import BadInput


def pictures(folder: Path, n: int = 8) -> list[str]:
    """Files 0.png, 1.png and on, each of one grey value, which is its number."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        Image.new("L", (8, 8), i).save(folder / f"{i}.png")
    return [f"{i}.png" for i in range(n)]


def table(folder: Path, lines: list[str], name: str = "t.csv", encoding: str = "utf-8", newline: str = "\n") -> Path:
    path = folder / name
    path.write_bytes(newline.join(lines).encode(encoding))
    return path


def refusal(path: Path, **more: Any) -> str:
    with pytest.raises(BadInput) as caught:
        load(str(path), path.parent / "data", **more)
    message = str(caught.value)
    assert "\n" not in message
    return message


def values(images: Any) -> list[int]:
    return images.images[:, 0, 0, 0].tolist()  # type: ignore[no-any-return]


def test_a_table_with_everything(tmp_path: Path) -> None:
    pictures(tmp_path / "img")
    split = ["train", "train", "test", "val", "train", "Test", "train", "train"]
    lines = ["note,path,label,site,patient,split"]
    lines += [f"x,img/{i}.png,{'ab'[i % 2]},{['north', 'south'][i // 4]},P-{i // 2},{split[i]}" for i in range(8)]
    data = load(str(table(tmp_path, lines)), tmp_path)
    assert data.name == "t"
    assert data.val is not None
    assert (values(data.train), values(data.val), values(data.test)) == ([0, 1, 4, 6, 7], [3], [2, 5])
    assert data.train.classes == ("a", "b")
    assert data.train.labels.tolist() == [0, 1, 0, 0, 1]
    assert data.train.sites is not None
    assert data.train.sites.tolist() == [0, 0, 1, 1, 1]
    assert data.train.patients is not None
    assert data.train.patients.tolist() == [0, 0, 2, 3, 3]
    assert data.provenance == (
        "t: 5 train, 1 val, 2 test images of 8x8 from 8 files; parts as the table has them; sites 0 = north, 1 = south"
    )
    assert "P-" not in data.provenance


@pytest.mark.parametrize(
    ("separator", "encoding", "newline"), [(",", "utf-8", "\n"), (";", "utf-8-sig", "\r\n"), ("\t", "utf-8", "\r\n")]
)
def test_what_spreadsheets_write(tmp_path: Path, separator: str, encoding: str, newline: str) -> None:
    pictures(tmp_path / "Bilder, alle; 2024")
    quoted = [f'"Bilder, alle; 2024/{i}.png"{separator}"Übergang ""{i % 2}"""' for i in range(8)]
    lines = [f"path{separator}label", *quoted, "", separator]
    rows = read_table(table(tmp_path, lines, encoding=encoding, newline=newline))
    assert len(rows) == 8
    assert {row.label for row in rows} == {'Übergang "0"', 'Übergang "1"'}


def test_parquet_says_the_same_as_csv(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: the extra parquet")
    from pyarrow import parquet

    names = pictures(tmp_path)
    columns = {"path": names, "label": [i % 2 for i in range(8)], "site": ["n"] * 8, "age": [1.5] * 8}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    csv = table(tmp_path, ["path,label,site", *(f"{n},{i % 2},n" for i, n in enumerate(names))])
    assert [r.path for r in read_table(tmp_path / "t.parquet")] == [r.path for r in read_table(csv)]
    one, other = load(str(tmp_path / "t.parquet"), tmp_path), load(str(csv), tmp_path)
    assert one.train.sha256() == other.train.sha256()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    assert "cannot be read as Parquet" in refusal(tmp_path / "bad.parquet")


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert "pip install 'wardround[parquet]'" in refusal(tmp_path / "t.parquet")


def test_numbered_classes_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    names = pictures(tmp_path, 6)
    lines = ["path,label", *(f"{name},{label}" for name, label in zip(names, [10, 2, 10, 2, 1, 1], strict=True))]
    assert load(str(table(tmp_path, lines)), tmp_path).train.classes == ("1", "2", "10")


@settings(max_examples=60)
@given(
    units=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 1), st.integers(0, 2)), min_size=30, max_size=60),
    share=st.floats(0.05, 0.9),
    seed=st.integers(0, 99),
)
def test_a_drawn_test_part_splits_no_patient_and_has_every_class(
    units: list[tuple[int, int, int]], share: float, seed: int
) -> None:
    patients, labels, sites = (np.array(column) for column in zip(*units, strict=True))
    try:
        tested = _test_units("t", patients, labels, ("a", "b"), sites, share, seed, True)
    except BadInput as error:
        assert "two are needed" in str(error)  # noqa: PT017 - a draw may have one patient of a class
        return
    held = np.isin(patients, tested)
    assert not set(patients[held].tolist()) & set(patients[~held].tolist())
    assert set(labels[held].tolist()) == set(labels[~held].tolist()) == {0, 1}
    rarest = np.bincount(labels, minlength=2).argmin()
    members = np.unique(patients[labels == rarest])
    expected = min(max(int(share * len(members) + 0.5), 1), len(members) - 1)
    assert np.isin(members, tested).sum() == expected


def test_patients_who_have_every_class_are_shared_out_whole() -> None:
    tested = _test_units("t", np.repeat(np.arange(10), 4), np.tile([0, 1], 20), ("a", "b"), None, 0.2, 0, True)
    assert len(tested) == 2


def test_the_share_is_spread_over_the_sites() -> None:
    sites = np.repeat([0, 1, 2, 3, 4], 20)
    tested = _test_units("t", np.arange(100), np.tile([0, 1], 50), ("a", "b"), sites, 0.2, 0, False)
    assert np.bincount(sites[tested]).tolist() == [4, 4, 4, 4, 4]


def test_site_and_patient_columns_make_a_federation(tmp_path: Path) -> None:
    names = pictures(tmp_path, 40)
    lines = ["path;label;site;patient"]
    lines += [f"{name};{'ab'[i // 2 % 2]};{'xyz'[i % 3]};{i % 3}-{i // 4}" for i, name in enumerate(names)]
    data = load(str(table(tmp_path, lines)), tmp_path)
    assert data.train.patients is not None
    assert data.test.patients is not None
    assert not set(data.train.patients.tolist()) & set(data.test.patients.tolist())
    federation, _ = federate(data, rule="natural", sites=0, by_patient=True, test="natural")
    assert len(federation.sites) == 3
    assert "no patient in two parts" in federation.provenance


def test_a_site_that_is_only_tested_is_named_as_the_table_names_it(tmp_path: Path) -> None:
    names = pictures(tmp_path)
    lines = ["path,label,site,split"]
    lines += [f"{name},{'ab'[i % 2]},north,{'test' if i < 2 else 'train'}" for i, name in enumerate(names[:6])]
    lines += [f"{name},{'ab'[i % 2]},south,test" for i, name in enumerate(names[6:])]
    data = load(str(table(tmp_path, lines)), tmp_path)
    assert data.site_names == ("north", "south")
    with pytest.raises(
        BadInput, match=r"^site south has no training images; add some, remove its images, or set data\.test"
    ):
        federate(data, rule="natural", sites=2, test="natural")


def test_sixteen_bits(tmp_path: Path) -> None:
    ramp = np.linspace(1000, 3000, 64, dtype=np.uint16).reshape(8, 8)
    lines = ["path,label"]
    for i in range(4):
        Image.fromarray(ramp).save(tmp_path / f"{i}.tif")
        Image.fromarray(ramp).save(tmp_path / f"{i}.png")
        lines += [f"{i}.tif,{i % 2}", f"{i}.png,{i % 2}"]
    data = load(str(table(tmp_path, lines)), tmp_path)
    assert data.train.images.shape[1:] == (1, 8, 8)
    first = data.train.images[0, 0]
    assert (first[0, 0], first[7, 7]) == (0, 255)
    assert (data.train.images == first).all()


def test_grey_and_colour_become_colour_and_sizes_one(tmp_path: Path) -> None:
    names = pictures(tmp_path, 4)
    Image.new("RGB", (20, 10), (9, 8, 7)).save(tmp_path / "c.jpg", quality=100)
    lines = ["path,label", *(f"{name},{i % 2}" for i, name in enumerate(names)), "c.jpg,0"]
    data = load(str(table(tmp_path, lines)), tmp_path, size=8)
    assert data.train.images.shape[1:] == (3, 8, 8)
    assert "c.jpg is 20x10, not a square; set data.size" in refusal(table(tmp_path, lines))


LINES = ["path,label", "0.png,a", "1.png,b", "2.png,a", "3.png,b"]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "has no column 'path'"),
        (["path,label"], "has no lines"),
        (["Path,label", "0.png,a"], "rename 'Path'"),
        (["path,label,label", "0.png,a,b"], "two columns 'label'"),
        (["path,label,Patient", "0.png,a,7"], "has a column 'Patient'; call it 'patient' if it is that"),
        (["path,label,patient_id", "0.png,a,7"], "has a column 'patient_id'; call it 'patient' if it is that"),
        (["path,label,Split", "0.png,a,test"], "has a column 'Split'; call it 'split' if it is that"),
        ([*LINES, "9.png,a"], "line 6 names 9.png, which does not exist"),
        ([*LINES, "0.png"], "line 6 has 1 cells, not 2"),
        ([*LINES, "4.png,"], "line 6 has no label"),
        ([*LINES, ",a"], "line 6 has no path"),
        ([*LINES, "0.png,b"], "line 6 names the same file as line 2"),
        ([*LINES, '"4.png,a'], "is no CSV"),
        ([*LINES[:4]], "has too few files of class b: two are needed"),
        (["path,label,split", "0.png,a,train", "1.png,b,holdout"], "line 3 has split 'holdout'; write train, val or"),
        (["path,label,split", "0.png,a,train", "1.png,b,"], "line 3 has no split, but others have"),
        (["path,label,patient", "0.png,a,", "1.png,b,7"], "line 2 has no patient, but others have"),
        (["path,label,split", "0.png,a,train", "1.png,b,train"], "has no test images"),
        (["path,label,slices", "0.png,a,third"], "line 2: 'third' is no rule for slices"),
        (["path,label", "t.csv,a", "0.png,b", "1.png,a", "2.png,b"], "is no PNG, JPEG, BMP, TIFF, DICOM or NIfTI"),
    ],
)
def test_a_table_that_is_wrong(tmp_path: Path, lines: list[str], says: str) -> None:
    pictures(tmp_path)
    assert says in refusal(table(tmp_path, lines))


def test_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    pictures(tmp_path)
    assert "not UTF-8" in refusal(table(tmp_path, ["path,label", "0.png,ä"], encoding="latin-1"))
    assert "cannot be read" in refusal(tmp_path / "none.csv")
    (tmp_path / "0.png").write_bytes(b"broken")
    assert "0.png cannot be read as a picture" in refusal(table(tmp_path, LINES))


# DICOM ----------------------------------------------------------------------------------------------------------------


def dicoms(folder: Path, n: int = 12, **more: Any) -> None:
    """Patients of three files each; classes a and b in turn."""
    for i in range(n):
        grey = np.full((8, 8), i, np.uint8)
        write_dicom(folder / "ab"[i // 3 % 2] / f"IM{i:04}", grey, **{"PatientID": f"{PATIENT}-{i // 3}", **more})


def test_a_folder_of_dicom_keeps_patients_together(tmp_path: Path) -> None:
    dicoms(tmp_path / "scans")
    data, again = (load(str(tmp_path / "scans"), tmp_path) for _ in range(2))
    assert data.train.patients is not None
    assert data.test.patients is not None
    assert not set(data.train.patients.tolist()) & set(data.test.patients.tolist())
    assert (len(data.train), len(data.test)) == (6, 6)
    assert data.train.patients.equal(again.train.patients)  # type: ignore[arg-type]
    for secret in (NAME, PATIENT):
        assert secret not in data.provenance


def test_without_patient_ids_files_are_drawn(tmp_path: Path) -> None:
    dicoms(tmp_path / "scans", PatientID="")
    data = load(str(tmp_path / "scans"), tmp_path)
    assert data.train.patients is None
    assert (len(data.train), len(data.test)) == (10, 2)


def test_one_file_without_a_patient_does_not_split_the_others(tmp_path: Path) -> None:
    dicoms(tmp_path / "scans")
    write_dicom(tmp_path / "scans" / "a" / "anonymous", np.full((8, 8), 99, np.uint8), PatientID="")
    Image.new("L", (8, 8), 77).save(tmp_path / "scans" / "b" / "photo.png")
    data = load(str(tmp_path / "scans"), tmp_path)
    assert data.train.patients is not None
    assert data.test.patients is not None
    assert not set(data.train.patients.tolist()) & set(data.test.patients.tolist())
    assert len({*data.train.patients.tolist(), *data.test.patients.tolist()}) == 4 + 2
    assert "no patient in two parts (files that do not say whose they are: 2), " in data.provenance


def test_one_id_for_everybody_says_how_to_go_on(tmp_path: Path) -> None:
    dicoms(tmp_path / "scans", PatientID="ANONYMOUS")
    assert "too few patients of class a: two are needed" in refusal(tmp_path / "scans")
    assert "set data.by_patient=false" in refusal(tmp_path / "scans")
    assert len(load(str(tmp_path / "scans"), tmp_path, by_patient=False).test) == 2


def test_an_index_beside_the_classes_is_passed_over(tmp_path: Path) -> None:
    dicoms(tmp_path / "scans")
    (tmp_path / "scans" / "DICOMDIR").write_bytes(b"")
    assert len(load(str(tmp_path / "scans"), tmp_path).train) == 6


def test_the_folder_may_have_parts(tmp_path: Path) -> None:
    dicoms(tmp_path / "scans" / "train")
    dicoms(tmp_path / "scans" / "test", 6, PatientID="other")
    (tmp_path / "scans" / "DICOMDIR").write_bytes(b"")
    data = load(str(tmp_path / "scans"), tmp_path)
    assert (len(data.train), len(data.test)) == (12, 6)
    (tmp_path / "scans" / "more").mkdir()
    assert "holds more beside train and test" in refusal(tmp_path / "scans")


def test_folders_that_are_wrong(tmp_path: Path) -> None:
    dicoms(tmp_path / "scans")
    write_dicom(tmp_path / "scans" / "loose.dcm", np.zeros((8, 8), np.uint8))
    assert "loose.dcm lies beside the class folders" in refusal(tmp_path / "scans")
    (tmp_path / "scans" / "loose.dcm").unlink()
    (tmp_path / "scans" / "c").mkdir()
    assert "c holds no files" in refusal(tmp_path / "scans")


def test_a_series_in_a_table_is_one_patient_even_without_a_name(tmp_path: Path) -> None:
    lines = ["path,label,slices"]
    for i in range(4):
        for z in range(4):
            write_dicom(
                tmp_path / str(i) / f"{z}.dcm", np.full((8, 8), 10 * i + z, np.uint8), PatientID="",
                ImagePositionPatient=[0, 0, z], ImageOrientationPatient=[1, 0, 0, 0, 1, 0], InstanceNumber=z,
            )  # fmt: skip
        lines.append(f"{i},{'ab'[i % 2]},every 2 axial")
    data = load(str(table(tmp_path, lines)), tmp_path)
    assert sorted(values(data.train) + values(data.test)) == [0, 2, 10, 12, 20, 22, 30, 32]
    assert data.train.patients is not None
    assert len(set(data.train.patients.tolist())) == 2


def test_a_folder_of_series_by_a_rule(tmp_path: Path) -> None:
    for i in range(4):
        for z in range(4):
            write_dicom(
                tmp_path / "s" / "ab"[i % 2] / f"study{i}" / "ser" / f"{z}.dcm", np.full((8, 8), 10 * i + z, np.uint8),
                ImagePositionPatient=[0, 0, z], ImageOrientationPatient=[1, 0, 0, 0, 1, 0], PatientID=str(i),
            )  # fmt: skip
    data = load(str(tmp_path / "s"), tmp_path, slices="middle axial")
    assert sorted(values(data.train) + values(data.test)) == [2, 12, 22, 32]
    assert len(load(str(tmp_path / "s"), tmp_path).train) == 8


def test_rows_of_a_rule_for_all(tmp_path: Path) -> None:
    pictures(tmp_path)
    rows = read_table(table(tmp_path, LINES), slices="middle")
    assert all(row.rule is not None for row in rows)
    assert read_rows("t", rows, None, tmp_path / "cache").train.size == 8
    assert Row(tmp_path, "a").patient == ""
