"""Nothing but sandbox/tree/safe_path.py opens what a sandbox may change, and nobody walks a tree by path strings.

Read from the source by syntax.
"""

from __future__ import annotations

import ast
import re

import pytest

from scripts.rooms import Module, modules

PRODUCT = [each for each in modules() if each.name.split(".")[0] in ("sandbox", "daemon", "ebpf", "pagurus")]
OWNER = "sandbox.tree.safe_path"

#: Roots of the host's own programs, of which nothing below a sandbox's root is resolved, by who names them.
MOUNTS = {
    "sandbox.criu.restore": "where a waiting CRIU has its images and the sandbox's mount: the device is asked for",
}
#: Trees that no sandbox writes: ours, the user's on the other side of the SDK.
OWN_TREES = {
    "daemon.checkpoints.capture",
    "daemon.doctor",
    "daemon.startup",
    "daemon.store.imports",
    "sandbox.container.container",
    "sandbox.criu.checkpointer",
    "sandbox.criu.dump",
    "sandbox.criu.recent",
    "sandbox.testing.files",
    "sandbox.testing.wire",
    "pagurus.sandboxes.cp",
}
WALKS = {("os", "walk"), ("os", "fwalk"), ("shutil", "rmtree"), ("shutil", "copytree"), ("shutil", "move")}


def literal(node: ast.JoinedStr) -> str:
    """An f-string, with {} for what is filled in."""
    parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return "".join(str(part) for part in parts)


def strings(module: Module) -> list[str]:
    return [literal(node) for node in ast.walk(module.tree) if isinstance(node, ast.JoinedStr)]


def walks(module: Module) -> set[str]:
    """What of a module walks a tree by path strings."""
    found = set()
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        if (of, node.func.attr) in WALKS or node.func.attr == "rglob":
            found.add(f"{of}.{node.func.attr}")
    return found


def into_upper(module: Module) -> list[str]:
    """Path strings that lead into an upper layer: ``{tree}/upper/...`` or ``... / "upper" / ...``."""
    found = [text for text in strings(module) if re.search(r"upper(/|\{\})", text)]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.BinOp) and ast.unparse(node.left).endswith("/ 'upper'"):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("module", PRODUCT, ids=lambda module: module.name)
def test_one_module_opens_what_a_sandbox_may_change(module: Module) -> None:
    if module.name == OWNER:
        return
    roots = [text for text in strings(module) if re.search(r"/proc/\{\}/root", text)]
    assert not roots or module.name in MOUNTS, f"{roots}: go from `container.inside` or safe_path.root_of"
    assert not into_upper(module), "open the top by safe_path.directory, and go on by descriptors"
    assert not walks(module) or module.name in OWN_TREES, "walk by sandbox/tree/walk.py"


def test_the_test_would_see_one() -> None:
    code = """
def look(pid, tree, path):
    os.stat(f"/proc/{pid}/root{path}"); os.lstat(f"{tree}/upper{path}"); shutil.rmtree(tree); tree.rglob("*")
    return tree / "upper" / path
"""
    seen = Module("x", "x.py", code, False)
    assert strings(seen) == ["/proc/{}/root{}", "{}/upper{}"]
    assert len(into_upper(seen)) == 2
    assert walks(seen) == {"shutil.rmtree", "tree.rglob"}


def test_the_exceptions_are_still_needed() -> None:
    named = {module.name: module for module in PRODUCT}
    assert all(walks(named[name]) for name in OWN_TREES), "take those out that walk no tree any more"
    assert all(any("/root" in text for text in strings(named[name])) for name in MOUNTS)
