"""``pagurus weights``: the published versions of a run's policy.

No daemon is used.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from pagurus import output
from pagurus.common import Json
from sandbox.errors import PagurusError

application = typer.Typer(help="The published versions of a run's policy.", no_args_is_help=True)
Run = Annotated[Path, typer.Argument(help="A run directory, or a directory of published weights.", metavar="RUN")]
Version = Annotated[int, typer.Argument(help="Number of a version.")]


@application.command("ls")
def list_versions(run: Run, json: Json = False) -> None:
    """Versions, what each takes, and who reads them. Bytes as changes and as a whole image."""
    from rollout.weights.export import store_of

    store = store_of(run)
    rows = [(ref, store.manifest(ref)) for ref in store.versions()]
    readers = store.readers()
    if json:
        output.as_json(
            {
                "versions": [
                    {
                        "version": ref.version,
                        "created": manifest.created,
                        "step_bytes": manifest.step_bytes if "step" in ref.ways else None,
                        "total_bytes": manifest.total_bytes if "complete" in ref.ways else None,
                        "manifest": ref.manifest.digest,
                    }
                    for ref, manifest in rows
                ],
                "readers": {name: {"version": lease.version} for name, lease in readers.items()},
            }
        )
        return
    output.table(
        ("version", "published", "changes", "whole image", "manifest"),
        [
            (
                ref.version,
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created)),
                "" if manifest.step_bytes is None or "step" not in ref.ways else output.size(manifest.step_bytes),
                "" if manifest.total_bytes is None or "complete" not in ref.ways else output.size(manifest.total_bytes),
                ref.manifest.digest[:12],
            )
            for ref, manifest in rows
        ],
    )
    newest = rows[-1][0].version if rows else None
    for name, lease in sorted(readers.items()):
        behind = "" if newest is None or lease.version < 0 else f", {newest - lease.version} behind"
        output.say(f"{name} has version {lease.version}{behind}" if lease.version >= 0 else f"{name} has none yet")


@application.command()
def verify(run: Run) -> None:
    """Read every version that is listed. Content by its hash, and every piece of the weights after its changes."""
    import tempfile

    from rollout.weights.export import put_together, store_of

    store = store_of(run)
    failed = 0
    with tempfile.TemporaryDirectory(prefix=".verify-", dir=store.directory) as place:
        for ref in store.versions():
            try:
                put_together(store, Path(place), ref.version)
                output.say(f"version {ref.version} is whole")
            except PagurusError as error:
                failed += 1
                output.say(f"version {ref.version}: {error}")
    if failed:
        raise typer.Exit(1)


@application.command()
def diff(run: Run, one: Version, other: Version, json: Json = False) -> None:
    """How many elements of each tensor differ between two versions."""
    import tempfile

    import numpy as np

    from rollout.weights.export import put_together, store_of

    store = store_of(run)
    with tempfile.TemporaryDirectory(prefix=".diff-", dir=store.directory) as place:
        tables = [put_together(store, Path(place) / str(number), number).tables() for number in (one, other)]
        counts = {
            name: (int(np.count_nonzero(table != tables[1][name])), table.size)
            for name, table in tables[0].items()
            if name in tables[1] and tables[1][name].shape == table.shape
        }
    if json:
        output.as_json({name: {"changed": changed, "words": words} for name, (changed, words) in counts.items()})
        return
    changed, words = (sum(pair[index] for pair in counts.values()) for index in range(2))
    rows = [(name, item, f"{item / of:.4%}") for name, (item, of) in counts.items() if item]
    output.table(("tensor", "words changed", "share"), rows)
    output.say(f"{changed} of {words} 16-bit words differ ({changed / words:.4%})")


@application.command()
def gc(run: Run, keep: Annotated[int, typer.Option(help="Newest versions that stay.")] = 3) -> None:
    """Remove what neither the newest versions nor any reader needs."""
    from rollout.weights.export import store_of

    store = store_of(run)
    done = store.collect(keep=max(1, keep))
    output.say(f"removed {done.versions} versions, {output.size(done.bytes)} in {done.chunks} files")


@application.command()
def rollback(run: Run, version: Version) -> None:
    """Publish this version as the newest again. Those after it are withdrawn, readers go back."""
    from rollout.weights.export import store_of

    store = store_of(run)
    store.version(version)
    store.withdraw(version)
    output.say(f"version {version} is the newest now")
