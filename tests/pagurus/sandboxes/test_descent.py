"""The picture that `pagurus tree` draws: a line of descent is not indented, a fork in it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagurus.sandboxes.descent import drawn


def test_a_line_of_descent_is_not_indented() -> None:
    assert list(drawn({"a": None, "b": "a", "c": "b"}, {"b": "B"})) == ["a", "B", "c"]


def test_branches_are_and_what_descends_from_them_stands_below_them() -> None:
    parents = {"a": None, "b": "a", "c": "a", "d": "b", "e": "d", "f": "d", "g": "c"}
    assert list(drawn(parents, {})) == ["a", "├─ b", "│  d", "│  ├─ e", "│  └─ f", "└─ c", "   g"]


@given(st.lists(st.integers(min_value=-1, max_value=30), max_size=31))
def test_each_is_drawn_once_and_below_its_parent(choices: list[int]) -> None:
    names = [f"c{number}" for number in range(len(choices))]
    parents = {
        name: names[choice] if 0 <= choice < number else None
        for number, (name, choice) in enumerate(zip(names, choices, strict=True))
    }
    lines = [line.split()[-1] for line in drawn(parents, {})]
    assert sorted(lines) == sorted(names)
    assert all(parent is None or lines.index(parent) < lines.index(name) for name, parent in parents.items())
