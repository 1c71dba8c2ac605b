"""How ``pagurus tree`` draws checkpoints. Pure.

A line of descent stands below one another; only where two or more descend from the same checkpoint do their lines move
to the right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def drawn(parents: Mapping[str, str | None], text: Mapping[str, str]) -> Iterator[str]:
    """A line for each checkpoint. `parents`: the oldest first; a parent that is not among them counts as none.

    >>> print(*drawn({"a": None, "b": "a", "c": "a", "d": "b"}, {}), sep="\\n")
    a
    ├─ b
    │  d
    └─ c
    """
    children: dict[str | None, list[str]] = {}
    for name, parent in parents.items():
        children.setdefault(parent if parent in parents else None, []).append(name)
    pending: list[tuple[str, str, str]] = [(name, "", "") for name in reversed(children.get(None, []))]
    while pending:
        name, first, rest = pending.pop()
        yield first + text.get(name, name)
        pending += reversed(list(_below(children.get(name, []), rest)))


def _below(names: Sequence[str], margin: str) -> Iterator[tuple[str, str, str]]:
    """Of each: its name, what stands before it, and what stands before those that descend from it."""
    for name in names:
        if len(names) == 1:
            yield name, margin, margin
        elif name == names[-1]:
            yield name, f"{margin}└─ ", f"{margin}   "
        else:
            yield name, f"{margin}├─ ", f"{margin}│  "
