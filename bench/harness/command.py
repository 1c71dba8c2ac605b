"""What all benches have in common as programs: their parser, and how figures are printed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping


def parser(module: str, text: str | None) -> argparse.ArgumentParser:
    """Of the bench in this module, with the first line of its text as help."""
    words = argparse.ArgumentParser(
        prog=f"pagurus bench {module.rpartition('.')[2]}", description=(text or "").partition("\n")[0]
    )
    words.add_argument("--json", action="store_true", help="print one JSON object last")
    return words


def show(metrics: Mapping[str, object], options: argparse.Namespace) -> None:
    """One JSON object; for people one figure a line."""
    if options.json:
        print(json.dumps(metrics))
    else:
        print(*(f"{name}: {value}" for name, value in metrics.items()), sep="\n")
