"""The static types of ``sandbox.sync``, made from the asynchronous classes that it is a bridge to.

Run it after a change of ``sandbox/sdk``: ``python scripts/sync_stubs.py``; with ``--check`` it only says whether the
file is up to date. The rules are those of the bridge: a coroutine becomes what it returns, an asynchronous iterator or
context manager a plain one, a class of the SDK its proxy of the same name.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from sandbox import sync

PROXIES: dict[type, type] = vars(sync)["_proxies"]
TARGET = Path(sync.__file__).with_suffix(".pyi")
HEAD = '''"""Static types of sandbox.sync. Made by scripts/sync_stubs.py; do not edit."""
'''
BY_HAND = """
class Reader:
    def read(self, n: int = -1) -> bytes: ...
    def readline(self) -> bytes: ...
    def readexactly(self, n: int) -> bytes: ...
    def readuntil(self, separator: bytes = b"\\n") -> bytes: ...
    def at_eof(self) -> bool: ...
    def __iter__(self) -> Iterator[bytes]: ...

class Writer:
    def write(self, data: bytes) -> None: ...
    def writelines(self, data: Iterable[bytes]) -> None: ...
    def drain(self) -> None: ...
    def write_eof(self) -> None: ...
    def can_write_eof(self) -> bool: ...
    def is_closing(self) -> bool: ...
    def close(self) -> None: ...
    def wait_closed(self) -> None: ...
    def get_extra_info(self, name: str, default: Any = None) -> Any: ...
"""
RENAMED = {"Creation": "Sandbox", "AbstractAsyncContextManager": "AbstractContextManager", "list": "builtins.list"}
QUALIFIED = {"asyncio.StreamReader": "Reader", "asyncio.StreamWriter": "Writer"}
PARTS = {"__aenter__": "__enter__", "__aiter__": "__iter__", "__anext__": "__next__"}


class Types(ast.NodeTransformer):
    """An annotation as the bridge changes it."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.parse(RENAMED.get(node.id, node.id), mode="eval").body

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        text = ast.unparse(node)
        return ast.parse(QUALIFIED.get(text, text), mode="eval").body

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return node


def main(arguments: list[str]) -> int:
    made = stub()
    if "--check" in arguments:
        return 0 if TARGET.exists() and TARGET.read_text() == made else 1
    TARGET.write_text(made)
    return 0


def stub() -> str:
    """The whole file."""
    classes = {original: name for name, value in vars(sync).items() for original in _originals(value)}
    body = "".join(_class(original, name) for original, name in classes.items() if original.__module__ != ASYNCIO)
    listed = "".join(f'    "{name}",\n' for name in sync.__all__)
    text = f"{_imports(body + BY_HAND, classes)}\n__all__ = [\n{listed}]\n{_variables(body)}{body}{BY_HAND}"
    return _formatted(HEAD + text)


ASYNCIO = "asyncio.streams"


def _originals(value: Any) -> Iterator[type]:
    yield from (original for original, proxy in PROXIES.items() if proxy is value)


def _class(original: type, name: str) -> str:
    lines = [f"\nclass {name}:", f'    """{_first_line(original)}"""']
    lines += [f"    {attribute}: {kind}" for attribute, kind in _attributes(original)]
    if name == "Client":
        lines.append(_function(original.__init__, name="__init__", returns="None"))  # type: ignore[misc]
    for part, ours in PARTS.items():
        if hasattr(original, part):
            lines.append(_function(getattr(original, part), name=ours))
    if hasattr(original, "__aexit__"):
        lines.append("    def __exit__(self, *error: object) -> None: ...")
    for member, value in inspect.getmembers(original):
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            assert isinstance(value.fget, FunctionType)
            lines += ["    @property", _function(value.fget)]
        elif inspect.isfunction(value):
            lines.append(_function(value))
    return "\n".join(lines) + "\n"


def _first_line(of: Any) -> str:
    """The first line of a docstring as far as its last whole clause."""
    line = (inspect.getdoc(of) or "").partition("\n")[0].replace("async with", "with")
    complete = re.match(r".*[.;:]", line)
    return complete[0].rstrip(".;:") + "." if complete is not None else line


def _function(function: Any, *, name: str | None = None, returns: str | None = None) -> str:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    managed = any("asynccontextmanager" in ast.unparse(entry) for entry in node.decorator_list)
    for argument in (*node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg):
        if argument is not None and argument.annotation is not None:
            argument.annotation = Types().visit(argument.annotation)
    node.args.defaults[:] = [_default(entry) for entry in node.args.defaults]
    node.args.kw_defaults[:] = [None if entry is None else _default(entry) for entry in node.args.kw_defaults]
    answer = returns or (ast.unparse(Types().visit(node.returns)) if node.returns is not None else "Any")
    if (match := re.fullmatch(r"Async(?:Iterator|Generator)\[(.*?)(?:, None)?\]", answer)) is not None:
        item = match[1]
        plain = f"Iterator[{item}]" if node.name == "__aiter__" else f"Generator[{item}]"
        answer = f"AbstractContextManager[{item}]" if managed else plain
    first = _first_line(function)
    rest = f'\n        """{first}"""' if first and not node.name.startswith("_") else " ..."
    return f"    def {name or node.name}({ast.unparse(node.args)}) -> {answer}:{rest}"


def _default(value: ast.expr) -> ast.expr:
    """As it is when it is short and clear; numbers may have been octal or a sum."""
    shown = isinstance(value, ast.Constant) and not (isinstance(value.value, int) and value.value > 255)
    return value if shown else ast.Constant(...)


def _attributes(original: type) -> Iterator[tuple[str, str]]:
    """The public attributes that an object has from its beginning, with their types."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(original.__init__))).body  # type: ignore[misc]
    assert isinstance(node, ast.FunctionDef)
    given = {item.arg: item.annotation for item in (*node.args.args, *node.args.kwonlyargs)}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign):
            target: ast.expr = statement.target
            kind = statement.annotation
        elif isinstance(statement, ast.Assign):
            target, value = statement.targets[0], statement.value
            result = given.get(value.id) if isinstance(value, ast.Name) else None
            kind = value.func if isinstance(value, ast.Call) else result or ast.Name("Any")
        else:
            continue
        if isinstance(target, ast.Attribute) and not target.attr.startswith("_"):
            yield target.attr, ast.unparse(Types().visit(kind))


# --------------------------------------------------------------------------- what the annotations name


def _existing(module: ModuleType) -> dict[str, str]:
    """Names that a module imports or defines, and where they come from."""
    result: dict[str, str] = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and node.module:
            result |= {item.name: node.module for item in node.names}
        elif isinstance(node, ast.ClassDef):
            result[node.name] = module.__name__
    return result


def _imports(text: str, classes: dict[type, str]) -> str:
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    existing = {"Generator": "collections.abc", "Iterable": "collections.abc", "TypeVar": "typing", "Any": "typing"}
    existing |= {"Iterator": "collections.abc", "AbstractContextManager": "contextlib"}
    for original in classes:
        for kind in original.__mro__[:-1]:
            if kind.__module__ != ASYNCIO:
                existing = _existing(sys.modules[kind.__module__]) | existing
    target: dict[str, list[str]] = {}
    for name in names - set(classes.values()) - {"Reader", "Writer"}:
        if name in existing:
            target.setdefault(existing[name], []).append(name)
    if "T" in names:
        target.setdefault("typing", []).append("TypeVar")
    complete = sorted(item for item in ("aiohttp", "builtins", "ssl") if f"{item}." in text)
    lines = [f"import {item}" for item in complete]
    return "\n".join(lines + [f"from {module} import {', '.join(sorted(item))}" for module, item in target.items()])


def _variables(text: str) -> str:
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return '\nT = TypeVar("T")\n' if "T" in names else ""


def _formatted(text: str) -> str:
    """As `ruff format` leaves it, imports in order."""
    for command in (["check", "--select", "I", "--fix-only", "-q"], ["format", "-q"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
