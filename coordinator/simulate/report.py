"""One HTML page of a scenario: its figures, its inputs, its plot. It needs no other file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from coordinator.simulate.plot import Plot
from sandbox.errors import Unsupported

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>
body {{ font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222; }}
td {{ padding: 0.15em 1.5em 0.15em 0; border-bottom: 1px solid #ddd; }} td + td {{ text-align: right; }}
svg {{ width: 100%; height: auto; }}
</style></head><body>
<h1>{name}</h1><p>{what}</p>
<h2>{title}</h2>{drawing}
<h2>Figures</h2><table>{rows}</table>
<h2>Inputs</h2><p>{inputs}</p>
<p>All of it again: <code>pagurus simulate {name} --seed {seed}</code></p>
</body></html>
"""
HINT = "pip install pagurus-rl"
STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "pagurus", "text.parse_math": False, "font.size": 10}


def page(name: str, what: str, seed: int, metrics: Mapping[str, Any], plot: Plot) -> str:
    """`what`: a sentence on the scenario."""
    rows = "".join(
        f"<tr><td>{escape(figure)}</td><td>{escape(value)}</td></tr>" for figure, value in flat(metrics)
    )  # fmt: skip
    return PAGE.format(
        name=escape(name), what=escape(what), title=escape(plot.title), drawing=drawn(plot), rows=rows, seed=seed,
        inputs=escape(str(metrics.get("inputs", "All of them are drawn: see the scenario's code."))),
    )  # fmt: skip


def flat(metrics: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """All but the inputs, with the names of those that they are in.

    >>> list(flat({"7B": {"ratio": 1.9}, "control": 1.0}))
    [('7B: ratio', '1.9'), ('control', '1.0')]
    """
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}: ")
        elif name != "inputs":
            yield f"{before}{name}", str(value)


def drawn(plot: Plot) -> str:
    """As an SVG element."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise Unsupported("a report needs matplotlib, which is not installed", hint=HINT) from None
    with rc_context(STYLE):
        rows = len({span.row for span in plot.spans})
        figure = Figure(figsize=(9, max(4.0, 0.3 * rows + 1.2)), layout="constrained")
        axes = figure.subplots()
        _lines(axes, plot)
        _spans(axes, plot)
        axes.set(xlabel=plot.x, ylabel=plot.y)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    return svg[svg.index("<svg") :]


def _lines(axes: Axes, plot: Plot) -> None:
    for name, (xs, ys) in plot.lines.items():
        if plot.drawn_as == "points":
            axes.plot(xs, ys, "o", label=name)
        else:
            axes.plot(xs, ys, label=name, drawstyle="steps-post" if plot.drawn_as == "steps" else "default")
    if plot.lines:
        axes.set_ylim(bottom=0)


def _spans(axes: Axes, plot: Plot) -> None:
    """Rows from above, in the order in which they are named."""
    rows = {row: number for number, row in enumerate(dict.fromkeys(span.row for span in plot.spans))}
    for number, kind in enumerate(dict.fromkeys(span.kind for span in plot.spans)):
        mine = [span for span in plot.spans if span.kind == kind]
        axes.barh(
            [rows[span.row] for span in mine], [span.end - span.begin for span in mine],
            left=[span.begin for span in mine], height=0.7, color=f"C{number % 10}", label=kind,
        )  # fmt: skip
    if rows:
        axes.set_yticks(list(rows.values()), list(rows))
        axes.invert_yaxis()
