"""A page of lanes over time: bars, and below them a table of what the lanes' time went to. Pure.

Guarantee: the page holds all that it shows, and a browser executes nothing of it: every text is escaped, and the page
itself forbids scripts and addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import msgspec

WIDTH = 1600  # pixels
PALETTE = (
    "#3b6fb6", "#e0912f", "#4f9d69", "#8c6d46", "#7d5ba6", "#c0504d", "#2a9d8f", "#b5651d", "#5c7cfa", "#d16ba5",
    "#6a994e", "#bc6c25", "#457b9d", "#9a031e", "#b39bc8", "#708090",
)  # fmt: skip
PAGE = """<!doctype html><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>body{{font:13px sans-serif}} td,th{{padding-right:1em;text-align:left}} text{{font:9px sans-serif}}
i{{display:inline-block;width:1em;height:1em}} svg{{background:#f4f4f4}}</style>
<h1>{title}</h1>
<p>{seconds:.0f} s, from left to right. The name under the mouse says what a bar is.</p>
{parts}
"""


class Bar(msgspec.Struct, frozen=True):
    """Something went on from `begin` to `end`, in seconds since the epoch."""

    kind: str
    begin: float
    end: float
    who: str
    full: float = 1.0  # part of the lane's height


class Lane(msgspec.Struct, frozen=True):
    name: str
    bars: Sequence[Bar]


class LaneGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Lanes of one kind. `spent`: seconds of all of them together by what they went to; what is left is `rest`."""

    title: str
    lanes: Sequence[Lane]
    spent: Mapping[str, float]
    rest: str = "nothing"
    said: str = ""
    height: int = 12  # pixels of a lane


def spent(bars: Iterable[Bar], since: float, until: float) -> dict[str, float]:
    """Seconds of each kind of bar between two moments."""
    result: dict[str, float] = {}
    for bar in bars:
        seconds = min(bar.end, until) - max(bar.begin, since)
        if seconds > 0:
            result[bar.kind] = result.get(bar.kind, 0.0) + seconds
    return result


def shares(part: LaneGroup, since: float, until: float) -> list[tuple[str, float, float]]:
    """Of the time of its lanes: what it went to, seconds, share. The largest first, and last what is left."""
    complete = max(1e-9, (until - since) * max(1, len(part.lanes)))
    rows = sorted(part.spent.items(), key=lambda item: -item[1])
    left = max(0.0, complete - sum(part.spent.values()))
    return [(kind, seconds, seconds / complete) for kind, seconds in [*rows, (part.rest, left)]]


def page(title: str, parts: Sequence[LaneGroup], since: float, until: float, colours: Mapping[str, str]) -> str:
    """HTML of what lies between two moments. Kinds without a colour get one of `PALETTE`."""
    kinds = [kind for part in parts for kind in [*part.spent, *(bar.kind for lane in part.lanes for bar in lane.bars)]]
    others = [kind for kind in dict.fromkeys(kinds) if kind not in colours]
    existing = {kind: PALETTE[n % len(PALETTE)] for n, kind in enumerate(others)} | dict(colours)
    drawn = "".join(_part(part, since, until, existing) for part in parts if part.lanes)
    return PAGE.format(title=escape(title), seconds=until - since, parts=drawn)


def _part(part: LaneGroup, since: float, until: float, colours: Mapping[str, str]) -> str:
    lanes = "".join(
        _lane(lane, n * part.height, part.height, since, until, colours) for n, lane in enumerate(part.lanes)
    )
    rows = "".join(
        f"<tr><td><i style='background:{colours.get(kind, '#f4f4f4')}'></i> {escape(kind)}"
        f"<td>{seconds:.1f} s<td>{share:.1%}"
        for kind, seconds, share in shares(part, since, until)
    )
    box = f"viewBox='0 0 {WIDTH} {part.height * len(part.lanes)}' width='100%'"
    said = f"<p>{escape(part.said)}</p>" if part.said else ""
    return f"<h2>{escape(part.title)}</h2>{said}\n<svg {box}>{lanes}</svg>\n<table>{rows}</table>\n"


def _lane(lane: Lane, top: int, height: int, since: float, until: float, colours: Mapping[str, str]) -> str:
    shown = (bar for bar in lane.bars if bar.end > since and bar.begin < until)
    bars = "".join(_bar(bar, top, height - 2, since, until, colours) for bar in shown)
    return bars + (f"<text x='2' y='{top + 9}'>{escape(lane.name)}</text>" if lane.name else "")


def _bar(bar: Bar, top: int, height: int, since: float, until: float, colours: Mapping[str, str]) -> str:
    scale = WIDTH / max(1e-9, until - since)
    begin, tall = max(bar.begin, since), height * min(1.0, max(0.0, bar.full))
    place = f"x='{(begin - since) * scale:.1f}' y='{top + height - tall:.1f}'"
    size = f"width='{max(0.5, (min(bar.end, until) - begin) * scale):.1f}' height='{tall:.1f}'"
    said = escape(f"{bar.who}: {bar.kind}, {bar.end - bar.begin:.2f} s")
    return f"<rect {place} {size} fill='{colours[bar.kind]}'><title>{said}</title></rect>"
