"""Small compose files for the tests of their reader."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from sandbox.compose.load import load
from sandbox.compose.project import Project
from sandbox.errors import PagurusError
from sandbox.messages import Service


def project(directory: Path, text: str, *, name: str = "compose.yaml", **options: Any) -> Project:
    """The project of one file of this text."""
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text))
    return load(file, **options)


def service(directory: Path, text: str, **options: Any) -> Service:
    """The service `web` with these fields, besides an image."""
    body = textwrap.indent(textwrap.dedent(text).strip("\n"), "    ")
    made = project(directory, f"services:\n  web:\n    image: debian\n{body}\n", **options)
    return made.composition.services["web"]


def refusal(directory: Path, text: str, **options: Any) -> str:
    """What is said of a file that is refused, without its directory."""
    with pytest.raises(PagurusError) as raised:
        project(directory, text, **options)
    return str(raised.value).replace(f"{directory}/", "")
