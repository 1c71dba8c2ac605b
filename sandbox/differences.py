"""How two sets of facts about a state differ, in lines that a person reads."""

from __future__ import annotations

from typing import Any

SHOWN = 40  # differences listed

Facts = dict[str, Any]


def differences(before: Facts, after: Facts) -> list[str]:
    """Readable lines, one per fact that differs; at most SHOWN and a count of the rest."""
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, "absent"), after.get(key, "absent")
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            parts = [part for part in sorted(old.keys() | new.keys()) if old.get(part) != new.get(part)]
            lines += [f"{key} {part}: {_short(old.get(part))} became {_short(new.get(part))}" for part in parts]
        else:
            lines.append(f"{key}: {_short(old)} became {_short(new)}")
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:197] + "..."
