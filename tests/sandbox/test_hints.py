"""Hints name a way that the user has: no `make` where there is no checkout."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sandbox import errors, hints, paths

ROOT = Path(__file__).parent.parent.parent
MAKE = ("make setup", "make native", "make image", "make lock")
PRODUCT = ("sandbox", "ebpf", "daemon", "pagurus", "rollout", "coordinator", "trainer")


def said() -> list[str]:
    return [hints.parts(), hints.parts("native"), hints.image(), hints.training(), hints.vllm()]


def test_in_a_checkout_make_is_the_way() -> None:
    assert paths.is_checkout()
    assert all("make " in hint for hint in said())


@pytest.mark.parametrize(
    ("home", "way"),
    [
        ("opt/pagurus/lib/python3/dist-packages", "apt-get install --reinstall pagurus"),
        ("srv/venv/lib/python3.11/site-packages", "pip install --force-reinstall pagurus-runtime"),
    ],
)
def test_an_installed_package_names_its_own_way(monkeypatch: pytest.MonkeyPatch, home: str, way: str) -> None:
    monkeypatch.setattr(paths, "CHECKOUT", Path("/", home))
    assert way in hints.parts() and way in hints.parts("native")
    assert "pagurus image debootstrap" in hints.image() and hints.training() == "pip install pagurus-rl"
    assert [hint for hint in said() if "make " in hint and "in a checkout" not in hint] == []


def test_no_other_module_says_make() -> None:
    """A message of the product (docstrings and comments apart) that names a target of the Makefile comes from here."""
    wrong = []
    for path in (item for name in PRODUCT for item in (ROOT / name).rglob("*.py")):
        if path.name == "hints.py":
            continue
        tree = ast.parse(path.read_text())
        documented = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in documented else None
            if isinstance(text, str) and any(word in text for word in MAKE):
                wrong.append(f"{path.relative_to(ROOT)}: {text[:60]}")
    assert wrong == []


#: Where a caller adds the hint (:func:`sandbox.errors.hinted`), or the message is the protocol's of another tool.
HINTED = (
    "sandbox/content/transfer.py",
    "sandbox/content/page_",
    "daemon/store/imports.py",
    "daemon/gateway/travel.py",
    "sandbox/image/oci.py",
    "sandbox/image/registry.py",
    "sandbox/image/dockerfile.py",
    "sandbox/tree/archive.py",
    "daemon/e2b/",
    "sandbox/testing/",
)


def test_errors_say_what_to_do() -> None:
    """Few have no hint: those whose message says what is right, and those that only a bug could raise."""
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    bare = []
    for path in (item for name in PRODUCT for item in (ROOT / name).rglob("*.py")):
        if str(path.relative_to(ROOT)).startswith(HINTED):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else None
            if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] not in classes:
                continue
            if not any(keyword.arg in ("hint", None) for keyword in call.keywords):
                bare.append(f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)[:80]}")
    assert len(bare) <= 12, "\n".join(bare)


def test_a_boundary_adds_its_hint_where_there_is_none() -> None:
    @errors.hinted("try another one")
    def refuse(hint: str) -> None:
        raise errors.Invalid("wrong", hint=hint)

    for own, result in (("", "try another one"), ("mine", "mine")):
        with pytest.raises(errors.Invalid) as refused:
            refuse(own)
        assert refused.value.hint == result
