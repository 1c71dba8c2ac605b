"""``pagurus cp``: files and trees between this machine and a sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagurus import output
from pagurus.common import call
from sandbox import Client
from sandbox.errors import Invalid

Place = Annotated[str, typer.Argument(help="A local path, or SANDBOX:PATH.")]


def copy(source: Place, target: Place) -> None:
    """Copy a file, or the content of a directory, into a directory on the other side (made when need be)."""
    (origin, taken), (sandbox, into) = _place(source), _place(target)
    if (origin is None) == (sandbox is None):
        raise Invalid("one side must be SANDBOX:PATH, the other one local", remedy="pagurus cp ./dir my-sandbox:/work")
    size = _size(Path(taken)) if origin is None else None
    with output.progress(f"copy {source}", size) as advanced:

        async def work(host: Client) -> int:
            if origin is None:
                return await (await host.get(sandbox or "")).files.upload(taken, into, progress=advanced)
            return await (await host.get(origin)).files.download(taken, into, progress=advanced)

        copied = call(work)
    print(output.size(copied))


def _place(text: str) -> tuple[str | None, str]:
    name, colon, path = text.partition(":")
    if colon and "/" not in name and name:
        return name, path or "/"
    return None, text


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(each.lstat().st_size for each in path.rglob("*") if each.is_file() and not each.is_symlink())
