"""A table of files: CSV, or Parquet through `pyarrow` (an extra: `pip install 'wardround[parquet]'`).

One line per file. The columns are found by their exact names: `path` and `label` are needed; `site`, `patient`, `split`
and `slices` may be there; others are not read. Paths are relative to the table. CSV is UTF-8 (a mark in front is
fine), separated by commas, semicolons (a German Excel) or tabs.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from wardround.data.dicom import is_dicom, patient_key
from wardround.data.listing import ALONE, PARTS, Row
from wardround.data.picture import SUFFIXES as PICTURES
from wardround.data.slices import SliceRule
from wardround.errors import BadInput

SUFFIXES = (".csv", ".tsv", ".parquet")
NEEDED, OPTIONAL = ("path", "label"), ("site", "patient", "split", "slices")
MOST_BYTES = 2**28  # a table of millions of lines is smaller


def read_table(path: Path, slices: str | None = None) -> list[Row]:
    """The rows, checked; `slices` is the rule for those that have none of their own.

    Where no column names patients and files are DICOM with a patient's id, rows carry a hash of it.
    """
    table = _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path)
    if not table:
        raise BadInput(f"{path} has no lines; write one line per file under the names of the columns")
    for column in ("site", "patient", "split"):
        _refuse_gaps(path, column, table)
    rows = [_row(path, number, line, slices) for number, line in table.items()]
    _refuse_twice(path, rows)
    return rows if rows[0].patient else with_patient_keys(rows)


def with_patient_keys(rows: Sequence[Row]) -> list[Row]:
    """The same rows with a hashed patient each, where any file is DICOM and says whose it is.

    A file among them that does not say it, or cannot be read, stands alone: that it is of nobody else is a guess, but
    without it one such file would split all the patients who are known.
    """
    keys = [_key_of(row.path) for row in rows]
    if not any(keys):
        return list(rows)
    return [
        Row(**{**vars(row), "patient": key or f"{ALONE}{number}"})
        for number, (row, key) in enumerate(zip(rows, keys, strict=True))
    ]


def _key_of(path: Path) -> str:
    """The hashed patient of a file, or of the first file of a series; empty where there is none."""
    file = path if path.is_file() else next((f for f in sorted(path.glob("*")) if f.is_file()), None)
    if file is None or file.suffix.lower() in PICTURES:  # by name, so that a table of pictures is not opened twice
        return ""
    try:
        return patient_key(file) if is_dicom(file) else ""
    except BadInput:
        return ""  # whoever reads its pixels says so, with every other such file where that is asked for


def _csv(path: Path) -> dict[int, Mapping[str, str]]:
    """Lines by their number in the file."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadInput(f"{path} is larger than 256 MiB, which is no list of files; check that it is the table")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text; save it as 'CSV UTF-8'") from error
    heading = text.partition("\n")[0]
    separator = max(";,\t", key=heading.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    found: dict[int, Mapping[str, str]] = {}
    try:
        names = [name.strip() for name in next(reader, [])]
        _check_columns(path, names)
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue  # Excel leaves lines of separators behind
            if len(cells) != len(names):
                raise BadInput(f"{path} line {reader.line_num} has {len(cells)} cells, not {len(names)}; mend the line")
            found[reader.line_num] = {n: c.strip() for n, c in zip(names, cells, strict=True) if n}
    except csv.Error as error:
        raise BadInput(f"{path} line {reader.line_num} is no CSV (a quote that does not close?); mend it") from error
    return found


def _parquet(path: Path) -> dict[int, Mapping[str, str]]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise BadInput(f"{path} is Parquet, which needs pyarrow: pip install 'wardround[parquet]', or CSV") from error
    try:
        names = parquet.read_schema(path).names
        _check_columns(path, names)
        wanted = [name for name in (*NEEDED, *OPTIONAL) if name in names]
        columns = parquet.read_table(path, columns=wanted).to_pydict()
    except (OSError, ArrowException) as error:
        raise BadInput(f"{path} cannot be read as Parquet; check the path, or write it again") from error
    lines = zip(*(columns[name] for name in wanted), strict=True)
    return {
        number: {name: "" if cell is None else str(cell).strip() for name, cell in zip(wanted, line, strict=True)}
        for number, line in enumerate(lines, 1)
    }


def _check_columns(path: Path, names: Sequence[str]) -> None:
    for name in NEEDED:
        if name not in names:
            near = [n for n in names if n.lower() == name]
            hint = f"rename {near[0]!r}" if near else "name a column so"
            raise BadInput(f"{path} has no column {name!r}; {hint} (columns: {', '.join((*NEEDED, *OPTIONAL))})")
    for name in OPTIONAL:
        near = [n for n in names if n.lower().replace("_", "").replace(" ", "") in (name, f"{name}id")]
        if near and name not in names:  # passed over in silence, it would split patients
            raise BadInput(f"{path} has a column {near[0]!r}; call it {name!r} if it is that, else something else")
    twice = [name for name in (*NEEDED, *OPTIONAL) if list(names).count(name) > 1]
    if twice:
        raise BadInput(f"{path} has two columns {twice[0]!r}; keep one")


def _refuse_gaps(path: Path, column: str, table: Mapping[int, Mapping[str, str]]) -> None:
    """A column is filled in every line or in none: half a split or half the patients would mislead."""
    empty = [number for number, line in table.items() if not line.get(column)]
    if 0 < len(empty) < len(table):
        raise BadInput(f"{path} line {empty[0]} has no {column}, but others have; fill the column or leave it out")


def _row(path: Path, number: int, line: Mapping[str, str], slices: str | None) -> Row:
    where = f"{path} line {number}"
    for name in NEEDED:
        if not line[name]:
            raise BadInput(f"{where} has no {name}; fill it or leave the line out")
    split = line.get("split", "").lower()
    if split and split not in PARTS:
        raise BadInput(f"{where} has split {line['split']!r}; write train, val or test")
    file = path.parent / line["path"].replace("\\", "/")
    if not file.exists():
        raise BadInput(f"{where} names {line['path']}, which does not exist; paths are relative to the table")
    rule = line.get("slices") or slices
    try:
        parsed = SliceRule.parse(rule) if rule else None
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error
    return Row(file, line["label"], line.get("site", ""), line.get("patient", ""), split, parsed, where)


def _refuse_twice(path: Path, rows: Sequence[Row]) -> None:
    first: dict[tuple[Path, SliceRule | None], Row] = {}
    for row in rows:
        other = first.setdefault((row.path, row.rule), row)
        if other is not row:
            raise BadInput(f"{row.where} names the same file as {other.where.removeprefix(f'{path} ')}; keep one")
