"""What a run's trainer and trajectories did when: lanes over time, out of what the rollout has written down.

Owns: which spans there are, their lanes, the page. Does not own: samples and decisions (rollout.store).
Guarantee: the page holds all that it shows, and nothing of it is executed: texts of trajectories are not in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import msgspec

from rollout.decide.view import Decision, Wait
from rollout.messages import Trajectory
from rollout.store import decisions
from rollout.store.samples import SampleStore

COLOURS = {
    "trains": "#3b6fb6",
    "waits for a batch": "#d9d9d9",
    "prepared": "#b39bc8",
    "samples": "#e0912f",
    "command": "#4f9d69",
    "held for a checkpoint": "#c0504d",
    "scored": "#8c6d46",
}
WIDTH, HEIGHT = 1600, 12  # pixels of the whole, and of a lane
PAGE = """<!doctype html><meta charset="utf-8"><title>{run}</title>
<style>body{{font:13px sans-serif}} td{{padding-right:1em}} i{{display:inline-block;width:1em;height:1em}}</style>
<h1>{run}</h1>
<p>{seconds:.0f} s. The first lane is the trainer's; each of the others holds one trajectory at a time.</p>
<table>{rows}</table>
<svg viewBox="0 0 {width} {height}" width="100%">{drawn}</svg>
"""


class Bar(msgspec.Struct, frozen=True):
    """Something went on from `begin` to `end`, in seconds since the epoch."""

    kind: str
    begin: float
    end: float
    who: str


def of_trainer(logged: Iterable[Decision]) -> list[Bar]:
    """When it trained, and when it waited for a batch, for what."""
    bars: list[Bar] = []
    before: tuple[str, float, str] | None = None
    for each in logged:
        view = each.view
        kind = "trains" if view.training else "waits for a batch" if view.asked else ""
        why = next((action.reason for action in each.actions if isinstance(action, Wait)), f"version {view.version}")
        if before is not None and (before[0] != kind or kind == "waits for a batch"):
            if before[0] and each.now > before[1]:
                bars.append(Bar(before[0], before[1], each.now, before[2]))
            before = None
        before = before or (kind, each.now, why)
    return bars


def of_trajectory(played: Trajectory) -> list[Bar]:
    """What it did in its turns, its preparation before, its scoring after."""
    name, bars = f"{played.prompt}/{played.index}", list[Bar]()
    for turn in played.turns[played.inherited :]:
        who = f"{name}, turn {turn.index}"
        if not bars:
            bars.append(Bar("prepared", played.started_at, turn.gen_start, who))
        said = f"{who}, {turn.tokens} tokens, version {turn.version}"
        bars.append(Bar("samples", turn.gen_start, turn.gen_end, said))
        bars.append(Bar("held for a checkpoint", turn.gen_end, turn.gen_end + turn.waited_s, who))
        bars.append(Bar("command", turn.exec_start, turn.exec_end, f"{who}, {turn.verdict}"))
    bars.append(Bar("scored", played.finished_at, played.scored_at, name))
    return [bar for bar in bars if 0 < bar.begin < bar.end]


def lanes(rows: Iterable[Sequence[Bar]]) -> list[list[Bar]]:
    """Each row into the first lane that is free when it begins."""
    found: list[list[Bar]] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for row in sorted((row for row in rows if row), key=lambda row: row[0].begin):
        while busy and busy[0][0] <= row[0].begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            found.append([])
            free = [len(found) - 1]
        lane = heapq.heappop(free)
        found[lane] += row
        heapq.heappush(busy, (max(bar.end for bar in row), lane))
    return found


def shares(bars: Iterable[Bar], since: float, until: float, lanes: int) -> dict[str, float]:
    """Of the time of so many lanes; what is left is `nothing`."""
    whole = max(1e-9, (until - since) * max(1, lanes))
    seconds = dict.fromkeys(COLOURS, 0.0)
    for bar in bars:
        seconds[bar.kind] += max(0.0, min(bar.end, until) - max(bar.begin, since))
    found = {kind: spent / whole for kind, spent in seconds.items() if spent}
    return found | {"nothing": max(0.0, 1 - sum(found.values()))}


def page(run: str, trainer: Sequence[Bar], played: Sequence[Sequence[Bar]], seconds: float) -> str:
    """HTML of the newest `seconds`."""
    every = [*trainer, *(bar for row in played for bar in row)]
    until = max((bar.end for bar in every), default=0.0)
    since = max(until - seconds, min((bar.begin for bar in every), default=0.0))
    shown = [list(trainer), *lanes([bar for bar in row if bar.end > since] for row in played)]
    drawn = "".join(_drawn(bar, n, since, until) for n, lane in enumerate(shown) for bar in lane if bar.end > since)
    of = {"trainer": shares(trainer, since, until, 1)}
    of["trajectories"] = shares((bar for lane in shown[1:] for bar in lane), since, until, len(shown) - 1)
    rows = "".join(
        f"<tr><td>{who}<td><i style='background:{COLOURS.get(kind, '#fff')}'></i> {kind}<td>{share:.1%}"
        for who, each in of.items()
        for kind, share in each.items()
    )
    height = HEIGHT * len(shown)
    return PAGE.format(run=escape(run), seconds=until - since, rows=rows, drawn=drawn, width=WIDTH, height=height)


def _drawn(bar: Bar, lane: int, since: float, until: float) -> str:
    scale = WIDTH / max(1e-9, until - since)
    left = (max(bar.begin, since) - since) * scale
    width = max(0.5, (bar.end - max(bar.begin, since)) * scale)
    said = escape(f"{bar.who}: {bar.kind}, {bar.end - bar.begin:.2f} s")
    place = f"x='{left:.1f}' y='{lane * HEIGHT}' width='{width:.1f}' height='{HEIGHT - 2}'"
    return f"<rect {place} fill='{COLOURS[bar.kind]}'><title>{said}</title></rect>"


def chart(folder: Path, run: str, seconds: float) -> str:
    """The page of a rollout's folder."""
    trainer = of_trainer(each for path in sorted(folder.glob(decisions.PATTERN)) for _, each in decisions.read(path))
    store = SampleStore(folder)
    try:
        played = [of_trajectory(store.sample(prompt, member)) for prompt, member, _, _ in store.samples()]
    finally:
        store.close()
    return page(run, trainer, played, seconds)
