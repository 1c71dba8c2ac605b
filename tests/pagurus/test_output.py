"""What the program prints: nothing of it is obeyed by a terminal."""

from __future__ import annotations

import json
import sys

import pytest

from pagurus import __main__ as program
from pagurus import output
from sandbox.errors import NotFound

EVIL = "\x1b[2J\x1b]0;evil\x07 \x9b31m \r\x7f \u202egnp \U000e0001"


def harmless(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


def test_errors_are_printed_without_what_a_terminal_obeys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: object) -> None:
        raise NotFound(f"no such file: {EVIL}", hint=EVIL, sandbox=EVIL)

    monkeypatch.setattr(program, "application", refuse)
    with pytest.raises(SystemExit) as ended:
        program.main()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and harmless(said) and "no such file" in said


def test_json_is_the_same_document_but_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"name": EVIL, "plain": "é \N{GRINNING FACE}", EVIL: [EVIL]}
    output.as_json(value)
    said = capsys.readouterr().out
    assert harmless(said) and json.loads(said) == value and "é \N{GRINNING FACE}" in said


def test_tables_and_lines_are_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("name",), [(EVIL,), ("[bold]x",)])
    assert "[bold]x" in (said := capsys.readouterr().out) and harmless(said)
    assert harmless(output.line(EVIL + "\n")) and "\n" not in output.line("\n") and output.line("[x]") == "[x]"


def test_a_log_has_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert not sys.stderr.isatty()
    with output.progress("pull app", None) as advanced:
        advanced(1)
    assert capsys.readouterr().err == ""  # it has just begun
    monkeypatch.setattr(output, "PAUSE", 0.0)
    with output.progress(f"pull {EVIL}", None) as advanced:
        advanced(1 << 20)
        advanced(3 << 19, 4 << 20)
    with output.progress("pull app", None, quiet=True) as advanced:
        advanced(1)
    said = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in said] == ["1.0 MiB", "1.5 MiB of 4.0 MiB"] and harmless("".join(said))


def test_tables_are_aligned_and_never_broken_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    output.table(("sandbox", "text"), [("s-1", "é" * 100 + " 字b"), ("s-22", None)])
    first, *rows = capsys.readouterr().out.splitlines()
    assert first == "sandbox  text" and rows == ["s-1      " + "é" * 100 + " 字b", "s-22"]
