"""Rows of data files are what their writers wrote."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.environments.rows import read_rows
from sandbox.errors import Invalid, NotFound

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
ROWS = st.lists(st.fixed_dictionaries({"ask": TEXTS, "answer": TEXTS}), min_size=2, max_size=5)


@given(ROWS)
def test_json_lines_hold_any_text(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    assert read_rows(path) == rows


def test_ends_of_lines_of_unicode_end_no_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"a": "x\u2028y\u2029z\x85w\x0b"}\r\n\n{"a": "é"}'.replace("\x0b", "\\u000b").encode())
    assert read_rows(path) == [{"a": "x\u2028y\u2029z\x85w\x0b"}, {"a": "é"}]


def test_fields_of_csv_keep_line_feeds_and_quotes(tmp_path: Path) -> None:
    rows = [{"ask": 'two\nlines\r\nand "quotes"', "answer": "a,b"}, {"ask": "\u2028", "answer": ""}]
    path = tmp_path / "a.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # as a spreadsheet writes it
        writer = csv.DictWriter(file, ["ask", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    assert read_rows(path) == rows


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "a,b\n1,2\n1,2,3\n", "line 3 has not as many fields"),
        ("a.csv", "a,b\n1,2\n1\n", "line 3 has not as many fields"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2"),
        ("a.csv", "a,b,a\n1,2,3\n4,5,6\n", "names a column twice"),
        ("a.jsonl", '{"a": 1}\n[1]\n', r"row 2 of .*a.jsonl is \[1\]"),
        ("a.jsonl", '{"a": 1}\n', "has 1 of 2 rows"),
        ("a.json", '{"a": 1}', "holds one dict, not a list of rows"),
        ("a.parquet", "no parquet", "cannot be read|needs pyarrow"),
    ],
)
def test_what_cannot_be_read_is_named(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(Invalid, match=said):
        read_rows(tmp_path / name)


def test_a_directory_without_a_data_set_and_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="without a data set"):
        read_rows(tmp_path)
    with pytest.raises(NotFound):
        read_rows(tmp_path / "nowhere.parquet")


@pytest.mark.filterwarnings("default")
def test_parquet_and_saved_data_sets(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install pyarrow datasets")
    pyarrow = pytest.importorskip("pyarrow")
    rows: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": "a\u2028b"}]}, {"messages": []}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet") == rows
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    datasets.Dataset.from_list([{"a": 1}, {"a": 2}]).save_to_disk(str(tmp_path / "saved"))
    assert read_rows(tmp_path / "saved") == [{"a": 1}, {"a": 2}]
