"""Pins what this environment holds: ``python scripts/lock.py``, run by `make lock`.

A package that no extra asks for is in neither.
"""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
HEAD = "# Exact versions, written by `make lock`: {what}.\n"


def closure(extras: set[str]) -> dict[str, str]:
    """Names and versions of everything that pagurus asks for with these extras, and what that asks for."""
    result: dict[str, str] = {}
    todo = [("pagurus", extras)]
    while todo:
        name, target = todo.pop()
        for text in distribution(name).requires or []:
            item = Requirement(text)
            if item.marker is None or any(item.marker.evaluate({"extra": extra}) for extra in (target or {""})):
                key = canonicalize_name(item.name)
                if key not in result or item.extras:
                    result[key] = distribution(key).version.split("+")[0]
                    todo.append((key, set(item.extras)))
    return result


def main() -> None:
    hosts = closure({"", "daemon", "dev"})
    both = closure({"", "daemon", "dev", "train", "lora", "cluster"})
    locks = {
        "requirements.lock": ("hosts, their daemon, and the tests", hosts),
        "requirements-train.lock": (
            "what training adds. Where there is no GPU, scripts/python.sh installs the CPU build of torch first",
            {name: version for name, version in both.items() if name not in hosts},
        ),
    }
    for name, (what, pins) in locks.items():
        lines = [f"{package}=={version}\n" for package, version in sorted(pins.items())]
        (ROOT / name).write_text(HEAD.format(what=what) + "".join(lines))


if __name__ == "__main__":
    main()
