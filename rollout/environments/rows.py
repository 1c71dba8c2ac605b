"""Rows of data files: JSON lines, a JSON list, CSV, Parquet, a data set on disk.

Guarantee: a value is what the writer wrote: lines end at a line feed and nowhere else, a field of CSV keeps its line
feeds, and what cannot be read is named with its line.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from sandbox.errors import Invalid, NotFound

KINDS = ".jsonl, .json (a list), .csv with a head, .parquet, or a directory that `datasets` saved"
MAX_FIELD = 1 << 26  # characters of one CSV field


def read_rows(path: Path, *, minimum: int = 2) -> list[dict[str, Any]]:
    """All rows of a file. `minimum`: fewer are refused."""
    if not path.exists():
        raise NotFound(f"no rows {path}", hint=f"name a file: {KINDS}")
    try:
        if path.is_dir():
            rows: Any = _saved(path)
        elif path.suffix == ".parquet":
            rows = _parquet(path)
        else:
            rows = _text(path, path.read_bytes().decode("utf-8-sig"))
    except (ValueError, csv.Error, RecursionError) as error:
        raise Invalid(f"{path} cannot be read: {error}", hint=KINDS) from None
    if not isinstance(rows, list):
        raise Invalid(f"{path} holds one {type(rows).__name__}, not a list of rows", hint=KINDS)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise Invalid(f"row {number} of {path} is {row!r:.60}", hint="a row has names and values: {...}")
    if len(rows) < minimum:
        raise Invalid(f"{path} has {len(rows)} of {minimum} rows", hint="one is held out, one trained on")
    return rows


def _text(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        return json.loads(text)
    return _csv(text) if path.suffix == ".csv" else _lines(text)


def _lines(text: str) -> list[Any]:
    """JSON may hold U+2028 and other ends of lines of Unicode: only a line feed ends a row."""
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return rows


def _csv(text: str) -> list[dict[str, str]]:
    limit = csv.field_size_limit(MAX_FIELD)
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        if len(set(reader.fieldnames or ())) < len(reader.fieldnames or ()):
            raise ValueError(f"its head names a column twice: {', '.join(reader.fieldnames or ())}")
        rows = []
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(f"line {reader.line_num} has not as many fields as the head")
            rows.append(row)
        return rows
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path) -> list[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise Invalid(f"{path} is Parquet, which needs pyarrow", hint="pip install pyarrow") from None
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise ValueError(str(error)) from None
    return rows


def _saved(path: Path) -> list[Any]:
    """A data set of Hugging Face's `datasets`; of one with splits that named train."""
    if not (path / "dataset_info.json").exists() and not (path / "dataset_dict.json").exists():
        raise Invalid(f"{path} is a directory without a data set", hint=KINDS)
    try:
        from datasets import load_from_disk
    except ImportError:
        raise Invalid(f"{path} is a data set, which needs the package datasets", hint="pip install datasets") from None
    result = load_from_disk(str(path))
    if isinstance(result, dict):
        if "train" not in result:
            raise Invalid(f"{path} has the splits {', '.join(result)}", hint="name one: DIRECTORY/SPLIT")
        result = result["train"]
    rows: list[Any] = list(result)
    return rows
