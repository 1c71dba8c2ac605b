"""What the program prints: nothing of it is obeyed by a terminal."""

from __future__ import annotations

import json

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
        raise NotFound(f"no such file: {EVIL}", remedy=EVIL, sandbox=EVIL)

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
