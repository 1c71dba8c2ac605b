"""What each room of the house holds: ``python scripts/rooms.py [--json] [--before REVISION] [REVISION]``.

Per room: modules, median and largest size in lines, functions over 60 lines, broad excepts per 1,000 lines,
parameters and attributes typed `Any`; for the whole: modules that import each other in a circle, lines of product and
of tests, class names that several modules share. With REVISION the same of that commit, read from git; with
`--before` the lines of both. What is too much is tests/test_layering.py's.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeGuard

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("sandbox", "ebpf", "daemon", "rollout", "trainer", "coordinator", "pagurus")
BESIDE = ("bench", "examples", "scripts", "tests")
LONG = 60  # lines of a function
PARTICIPLE = re.compile(
    r"_?(?!Feed)(?:[A-Z][a-z]+ed|Told|Held|Kept|Left|Gone|Lost|Sent|Known|Found|Seen|Taken|Given|Written|Begun)"
)
_WORDS = """
anew ask asked asks beside blows book books crew desk door doors each figures folder folders found heard kept
known least lend lending lends lent look looks meanwhile most owed patience remedies remedy room seat seats
seen settled slack somebody spare spares strike strikes struck tell tip tips told wanted whole
"""
PRIVATE = frozenset(_WORDS.split())  # the field has another word for each: see CONTRIBUTING.md
ENGLISH = re.compile(  # these are its own, or a library's
    r"last_seen|LastSeen|make_room|look_up|NotFound|LookupError|parse_known|since_seen|most_common|at_least_one|EACH_WAY|WATCHES_EACH|^tell$"
)
PROSE = re.compile(  # words and phrases in comments and docstrings that have a standard term: see CONTRIBUTING.md
    r"\b(?:anew|asked|beside|come back|comes back|crew|desk|folders?|goes on|go on|heard|lend|lends|lent|meanwhile|owed"
    r"|patience|remed(?:y|ies)|settled|somebody|nobody|stands? (?:still|on)|struck|tells?|told|whoever)\b",
    re.IGNORECASE,
)
SPLIT = ("sandbox", "daemon", "rollout", "trainer", "coordinator", "pagurus")  # rooms that have rooms


@dataclass
class Module:
    """One Python file: its dotted name, text and syntax tree."""

    name: str
    path: str
    text: str
    package: bool

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def room(self) -> str:
        parts = self.path.split("/")[:-1]
        return "/".join(parts[:2]) if parts and parts[0] in SPLIT else parts[0] if parts else "."


TASKS = "examples/harbor_tasks/"  # what is in there is the agents' work, broken on purpose


@cache
def modules(revision: str = "") -> list[Module]:
    """Every Python file that git knows, in the working tree or at `revision`."""
    listing = ["ls-tree", "-r", "--name-only", revision] if revision else ["ls-files", "-co", "--exclude-standard"]
    found = []
    for path in _git(*listing).split("\n"):
        if path.endswith(".py") and path.split("/")[0] in (*PRODUCT, *BESIDE):
            if path.startswith(TASKS) or (not revision and not (ROOT / path).exists()):
                continue
            text = _git("show", f"{revision}:{path}") if revision else (ROOT / path).read_text()
            package = path.endswith("/__init__.py")
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            found.append(Module(name, path, text, package))
    return found


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def functions(module: Module) -> Iterator[tuple[str, int]]:
    """Name and length in lines of each function of a module."""
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def broad_excepts(module: Module) -> int:
    """`except Exception`, `except BaseException` and bare ones."""
    names = {"Exception", "BaseException"}
    handlers = [node for node in module.nodes if isinstance(node, ast.ExceptHandler)]
    return sum(each.type is None or getattr(each.type, "id", "") in names for each in handlers)


def anys(module: Module) -> int:
    """Parameters and attributes whose whole type is `Any`, but for `*args` and `**kwargs`."""
    count = 0
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            count += sum(_is_any(each.annotation) for each in every)
        elif isinstance(node, ast.AnnAssign):
            count += _is_any(node.annotation)
    return count


def _is_any(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def imports(every: list[Module]) -> dict[str, set[str]]:
    """Which module imports which of the others, at any place in it; imports for the type checker alone do not count."""
    names = {module.name for module in every}
    return {module.name: set(_imported(module.tree, names)) - {module.name} for module in every}


def _imported(node: ast.AST, names: set[str]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                if inner in names:
                    yield inner
                elif child.module in names:
                    yield child.module
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names if alias.name in names)
        else:
            yield from _imported(child, names)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that reach each other by imports (strongly connected components, Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    sys.setrecursionlimit(10_000)
    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


def class_names(product: list[Module]) -> dict[str, set[str]]:
    """By the name of a class, the modules that define one."""
    names: dict[str, set[str]] = {}
    for module in product:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                names.setdefault(node.name, set()).add(module.name)
    return names


def participle_classes(product: list[Module]) -> list[str]:
    """Classes called by one bare participle, errors left out: ``Told``, ``_Held``; not ``Closed(PagurusError)``."""
    found = []
    for module in product:
        for node in module.nodes:
            if not isinstance(node, ast.ClassDef) or not PARTICIPLE.fullmatch(node.name):
                continue
            if not any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases):
                found.append(f"{module.name}.{node.name}")
    return found


def private_words(product: list[Module]) -> dict[str, int]:
    """Identifiers that hold a word of `PRIVATE`, and how often each stands there."""
    names: Counter[str] = Counter()
    for module in product:
        for token in module.tokens:
            if token.type == tokenize.NAME:
                names[token.string] += 1
    parts = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
    return {
        name: count
        for name, count in sorted(names.items())
        if not PRIVATE.isdisjoint(part.lower() for part in parts.findall(ENGLISH.sub("", name)))
    }


def private_words_in_prose(product: list[Module]) -> dict[str, int]:
    """How often a word of `PROSE` stands in comments and docstrings, by the word."""
    words: Counter[str] = Counter()
    for module in product:
        texts = [ast.get_docstring(node, clean=False) or "" for node in module.nodes if _documented(node)]
        texts += [token.string for token in module.tokens if token.type == tokenize.COMMENT]
        words.update(word.lower() for text in texts for word in PROSE.findall(text))
    return dict(words.most_common())


def _documented(node: ast.AST) -> TypeGuard[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    return isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)


def directory_circles(product: list[Module]) -> list[list[str]]:
    """Directories below a room that import each other; what lies in the room itself puts them together."""
    rooms = {module.name: module.room for module in product if "/" in module.room}
    graph: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for name, others in imports(product).items():
        if name in rooms:
            graph[rooms[name]] |= {rooms[other] for other in others if other in rooms} - {rooms[name]}
    return circles(graph)


def words_of_docs() -> int:
    """Words of all pages that git knows, in the working tree."""
    return sum(len((ROOT / path).read_text().split()) for path in _git("ls-files", "*.md").split())


def report(every: list[Module]) -> dict[str, Any]:
    """The figures of a tree, as one JSON object."""
    rooms: dict[str, dict[str, Any]] = {}
    for room in sorted({module.room for module in every if module.path.split("/")[0] not in ("tests",)}):
        inside = [module for module in every if module.room == room]
        sizes = [module.lines for module in inside if not (module.package and module.lines < 20)] or [0]
        rooms[room] = {
            "modules": len(inside),
            "median_lines": int(statistics.median(sizes)),
            "largest_lines": max(sizes),
            "functions_over_60": sum(length > LONG for module in inside for _, length in functions(module)),
            "broad_excepts_per_1000": round(1000 * sum(map(broad_excepts, inside)) / max(1, sum(sizes)), 2),
            "any": sum(map(anys, inside)),
        }
    product = [module for module in every if module.path.split("/")[0] in PRODUCT]
    prose = private_words_in_prose(product)
    names = class_names(product)
    return {
        "rooms": rooms,
        "any_in_sandbox_and_daemon": sum(anys(each) for each in every if each.path.startswith(("sandbox/", "daemon/"))),
        "broad_excepts_per_1000": round(1000 * sum(map(broad_excepts, product)) / sum(m.lines for m in product), 2),
        "functions_over_60": sorted(
            f"{module.path}:{name}" for module in product for name, length in functions(module) if length > LONG
        ),
        "any_in_rollout_trainer_coordinator": sum(
            map(anys, (each for each in every if each.path.startswith(("rollout/", "trainer/", "coordinator/"))))
        ),
        "circles": circles(imports(product)),
        "directory_circles": directory_circles(product),
        "shared_class_names": sorted(name for name, where in names.items() if len(where) > 1),
        "shared_class_names_percent": round(
            100 * sum(len(where) > 1 for where in names.values()) / max(1, len(names)), 1
        ),
        "participle_classes": participle_classes(product),
        "private_words": private_words(product),
        "private_words_in_prose": sum(prose.values()),
        "private_words_in_prose_by_word": prose,
        "product_lines": sum(module.lines for module in product),
        "sandbox_half_lines": sum(m.lines for m in product if m.room.split("/")[0] in ("sandbox", "ebpf", "daemon")),
        "bench_lines": sum(module.lines for module in every if module.room == "bench"),
        "test_lines": sum(module.lines for module in every if module.path.startswith("tests/")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision", nargs="?", default="", help="a commit; without one the working tree")
    parser.add_argument("--before", metavar="REVISION", help="also tell the lines that this commit had")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = report(modules(options.revision))
    if not options.revision:
        figures["words_of_docs"] = words_of_docs()
    if options.before:
        lines = {name: value for name, value in report(modules(options.before)).items() if name.endswith("_lines")}
        figures |= {f"{name}_before": value for name, value in lines.items()}
    if options.json:
        print(json.dumps(figures))
        return
    columns = ("modules", "median_lines", "largest_lines", "functions_over_60", "broad_excepts_per_1000", "any")
    print(f"{'room':24}" + "".join(f"{name.replace('_', ' '):>24}" for name in columns))
    for room, row in figures["rooms"].items():
        print(f"{room:24}" + "".join(f"{row[name]:>24}" for name in columns))
    for name, value in figures.items():
        if name != "rooms":
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
