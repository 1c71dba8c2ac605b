"""The walls of the house: which room may import which, and which modules are pure.

Read from the source by syntax, so that an import inside a function counts as well.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from typing import Any

import pytest

import bench
from scripts.rooms import ROOT, Module, circles, imports, modules, private_words, private_words_in_prose, report

# What each top-level room may import. `pagurus` is the program: it may import every room.
ARROWS = {
    "sandbox": set(),
    "ebpf": {"sandbox"},
    "daemon": {"sandbox", "ebpf"},
    "rollout": {"sandbox"},
    "trainer": {"sandbox", "rollout"},
    "coordinator": {"sandbox", "rollout", "daemon"},
}
PROGRAMS = {"pagurus", "bench", "examples", "scripts", "tests"}

# Modules that decide: no I/O, no clock, no environment, no torch. The live system and a simulator share them.
PURE = [
    "coordinator.merge",
    "daemon.auth.access",
    "daemon.auth.quota",
    "daemon.checkpoints.schedule",
    "daemon.gateway.replay",
    "daemon.gateway.wire",
    "daemon.host.create",
    "daemon.host.expiry",
    "daemon.network.elements",
    "daemon.network.names",
    "daemon.network.policy",
    "daemon.network.ruleset",
    "daemon.states",
    "daemon.store.retention",
    "daemon.verdict.explain",
    "daemon.verdict.ignore",
    "daemon.verdict.judge",
    "daemon.wording",
    "pagurus.sandboxes.descent",
    "rollout.engine.embedded.blocks",
    "rollout.engine.embedded.scheduler",
    "sandbox.content.joined",
    "sandbox.content.transfer",
    "sandbox.image.dockerfile",
    "sandbox.sdk.plan",
    "trainer.distributed.mesh",
    "trainer.distributed.plans",
]
PURE_PACKAGES = ["coordinator.decide", "rollout.decide"]
IMPURE = {
    "aiohttp", "asyncio", "ctypes", "fcntl", "glob", "http", "mmap", "multiprocessing", "os", "pyroute2", "random",
    "select", "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "torch",
}  # fmt: skip
IMPURE_NAMES = {"open", "print", "input"}


EVERY = modules()
PRODUCT = [each for each in EVERY if each.name.split(".")[0] in {*ARROWS, "pagurus"}]
NAMED = {each.name: each for each in EVERY}


@functools.cache
def figures() -> dict[str, Any]:
    return report(EVERY)


def imported_roots(module: Module) -> set[str]:
    found: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("room", sorted(ARROWS))
def test_arrows_between_rooms_point_one_way(room: str) -> None:
    ours = {*ARROWS, *PROGRAMS}
    crossing = {
        f"{module.name} imports {other}"
        for module in PRODUCT
        if module.name.split(".")[0] == room
        for other in imported_roots(module) & ours
        if other not in ARROWS[room] | {room}
    }
    assert crossing == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(imports(PRODUCT)) == []


def test_no_rooms_of_the_daemon_need_each_other_in_a_circle() -> None:
    """Those below daemon/. What lies in daemon/ itself puts them together, or is needed by all of them."""
    rooms = {module.name: module.room for module in PRODUCT if module.room.startswith("daemon/")}
    graph: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for name, others in imports(PRODUCT).items():
        if name in rooms:
            graph[rooms[name]] |= {rooms[other] for other in others if other in rooms} - {rooms[name]}
    assert "daemon/store" in graph["daemon/host"] and circles(graph) == []


def test_the_rooms_keep_their_figures() -> None:
    """Types to the core, no function that does not fit on a page, exceptions named."""
    assert figures()["any_in_sandbox_and_daemon"] <= 10
    assert figures()["any_in_rollout_trainer_coordinator"] <= 60
    assert figures()["broad_excepts_per_1000"] <= 1
    assert figures()["functions_over_60"] == []


def test_a_class_name_stands_in_one_module() -> None:
    """So that "go to symbol" and grep find the one that is meant; the facade of the SDK repeats its own."""
    assert figures()["shared_class_names_percent"] <= 3, figures()["shared_class_names"]
    assert figures()["participle_classes"] == []


def test_identifiers_use_the_words_of_the_field() -> None:
    assert figures()["private_words"] == {}
    assert private_words([Module("m", "m.py", "kept = each_path = not_found = NotFound = last_seen\n", False)]) == {
        "each_path": 1,
        "kept": 1,
        "not_found": 1,
    }


def test_prose_uses_the_words_of_the_field() -> None:
    """Comments and docstrings: who acts is named, and what a word of our own means has its standard term."""
    assert figures()["private_words_in_prose"] <= 20, figures()["private_words_in_prose_by_word"]
    docstring = Module("m", "m.py", '"""A folder that nobody reads goes on meanwhile."""\n', False)
    assert private_words_in_prose([docstring]) == {"folder": 1, "nobody": 1, "goes on": 1, "meanwhile": 1}


def test_no_directories_import_each_other() -> None:
    assert figures()["directory_circles"] == []


def pure_modules() -> list[str]:
    """Those above, those of the pure packages, and whoever calls itself pure."""
    inside = {name for name in NAMED if any(name.startswith(f"{package}.") for package in PURE_PACKAGES)}
    claims = {
        module.name
        for module in PRODUCT
        if not module.package and re.search(r"\bPure[.:,]", ast.get_docstring(module.tree) or "")
    }
    return sorted({*PURE, *inside, *claims})


@pytest.mark.parametrize("name", pure_modules())
def test_what_decides_touches_nothing(name: str) -> None:
    module = NAMED[name]
    tensors = {"torch"} if name.startswith("trainer.") else set()
    assert imported_roots(module) & IMPURE - tensors == set()
    called = {node.func.id for node in module.nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert called & IMPURE_NAMES == set()


def test_programs_that_tests_start_end_with_them() -> None:
    """By tests.support.programs.Program, whose end has a bound."""
    found = []
    proofs = {ROOT / directory for directory in bench.PROOFS}  # their processes end with bench.harness.aftermath
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if proofs & set(path.parents) and not path.name.startswith("test_"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "subprocess.Popen":
                found.append(str(path.relative_to(ROOT)))
    assert found == ["tests/support/reward_functions.py"]  # its child is to be found hanging


def test_the_walls_are_seen() -> None:
    """The tests above can fail: a module that opens a file and reads the clock is noticed."""
    text = "import time\nfrom daemon.app import main\ndef now():\n    open('x')\n    return time.time()\n"
    module = Module("sandbox.bad", "sandbox/bad.py", text, package=False)
    assert imported_roots(module) & IMPURE == {"time"}
    assert "daemon" in imported_roots(module)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("imported", "heavy"),
    [
        ("from sandbox import *", "torch ebpf daemon rollout trainer numpy google pycriu docker pyroute2"),
        ("import sandbox.sdk.brief, sandbox.sdk.build", "aiohttp yarl email"),  # a build that finds all kept is short
        ("import rollout, rollout.engine.supervisor", "torch daemon ebpf"),
        ("import pagurus.page.schema", "torch transformers tokenizers"),  # `make setup` has none of them
        ("import coordinator.app", "torch transformers tokenizers ray rollout trainer"),  # runs where hosts are, too
    ],
)
def test_imports_stay_light(imported: str, heavy: str) -> None:
    program = f"{imported}; import sys; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not set(heavy.split()) & set(ran.stdout.split())
