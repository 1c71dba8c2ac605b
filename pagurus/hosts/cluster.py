"""``pagurus cluster``: hosts that work as one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagurus import output
from pagurus.common import PASSED_ON, Json, call
from sandbox.errors import NotFound

if TYPE_CHECKING:
    from sandbox.messages.cluster import HostChange, HostInfo, PhaseInfo

application = typer.Typer(help="Hosts that work as one.", no_args_is_help=True)

HostName = Annotated[str, typer.Argument(metavar="HOST", help="Its name in the cluster.")]
Labels = Annotated[list[str] | None, typer.Option("--label", "-l", help="NAME=VALUE; NAME= removes it.")]


@application.command("up", context_settings=PASSED_ON, add_help_option=False)
def up(context: typer.Context) -> None:
    """Run the coordinator in the foreground."""
    from coordinator.app import main

    raise typer.Exit(main(context.args))


@application.command("add")
def add(
    host: HostName,
    address: Annotated[str, typer.Argument(help="URL of its daemon, or the path of its socket.")],
    token_file: Annotated[Path | None, typer.Option(help="File with a token of scope admin.")] = None,
    ca: Annotated[str | None, typer.Option(help="Its daemon's certificate or fingerprint.")] = None,
    label: Labels = None,
) -> None:
    """Add a host, or change how it is reached."""
    from sandbox.messages.cluster import HostInfo, HostRequest

    request = HostRequest(
        address=address,
        token=None if token_file is None else token_file.read_text().strip(),
        ca=ca,
        labels={name: value for name, value in _labels(label).items() if value is not None},
    )
    call(lambda cluster: cluster.call("PUT", f"/v1/cluster/hosts/{host}", HostInfo, request))


@application.command("ls")
def list_hosts(json: Json = False) -> None:
    """The hosts, what they have, how busy they are."""
    from sandbox.messages.cluster import HostInfo

    result = call(lambda cluster: cluster.call("GET", "/v1/cluster/hosts", list[HostInfo]))
    if json:
        output.as_json(result)
        return
    output.table(
        ("host", "state", "sandboxes", "load", "cpus", "memory free", "disk free", "labels", ""), map(_row, result)
    )


@application.command("drain")
def drain(host: HostName) -> None:
    """Give it no new sandboxes. With `--replicate`, move away those that it has."""
    from sandbox.messages.cluster import HostChange

    _change(host, HostChange(draining=True))


@application.command("resume")
def resume(host: HostName) -> None:
    """Give it new sandboxes again."""
    from sandbox.messages.cluster import HostChange

    _change(host, HostChange(draining=False))


@application.command("label")
def label(host: HostName, labels: Annotated[list[str], typer.Argument(help="NAME=VALUE; NAME= removes it.")]) -> None:
    """Label it. A sandbox with the label on.zone=a runs on a host with zone=a."""
    from sandbox.messages.cluster import HostChange

    _change(host, HostChange(labels=_labels(labels)))


@application.command("rm")
def remove(host: HostName) -> None:
    """Forget a host. Its sandboxes keep running there."""
    call(lambda cluster: cluster.call("DELETE", f"/v1/cluster/hosts/{host}", dict))


@application.command("where")
def where(json: Json = False) -> None:
    """On which host each sandbox is."""
    from sandbox.messages.cluster import PlaceInfo

    result = call(lambda cluster: cluster.call("GET", "/v1/cluster/places", list[PlaceInfo]))
    if json:
        output.as_json(result)
    else:
        output.table(("sandbox", "host"), [(item.sandbox, item.host) for item in result])


@application.command("turns")
def turns(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that have left, for 30 days.")] = False,
    gantt: Annotated[Path | None, typer.Option(help="Write a page of what each machine did when.")] = None,
    seconds: Annotated[float, typer.Option(help="So much of the newest time, on that page.")] = 3600.0,
    json: Json = False,
) -> None:
    """Jobs that take turns on the machines of `--share`. Who works, who waits for what, what each has used."""
    from sandbox.messages.cluster import PhaseInfo

    if gantt is not None:
        _draw_turns(gantt, seconds)
        return
    result = call(lambda cluster: cluster.call("GET", "/v1/cluster/phases", list[PhaseInfo]))
    result = [item for item in result if everything or item.state != "left"]
    if json:
        output.as_json(result)
        return
    head = ("job", "group", "phase", "", "rollout machine-h", "training machine-h", "cost", "because")
    output.table(head, map(_turn_row, result))


def _turn_row(job: PhaseInfo) -> tuple[object, ...]:
    group = "-" if job.group is None else job.group
    cost = "-" if job.cost is None else f"{job.cost:.2f}"
    used = f"{job.rollout_hours:.2f}", f"{job.train_hours:.2f}"
    return job.job, group, f"{job.kind} {job.number}", job.state, *used, cost, job.reason


def _draw_turns(file: Path, seconds: float) -> None:
    from coordinator.gantt import chart
    from sandbox.messages.cluster import PastPhase

    result = call(lambda cluster: cluster.call("GET", "/v1/cluster/phases/past", list[PastPhase]))
    if not result:
        raise NotFound("no job has taken a turn yet", hint="a plan's table [share] lets its run take turns")
    file.write_text(chart(result, time.time(), seconds))
    output.say(str(file))


def _change(host: str, change: HostChange) -> None:
    from sandbox.messages.cluster import HostInfo

    call(lambda cluster: cluster.call("PATCH", f"/v1/cluster/hosts/{host}", HostInfo, change))


def _labels(given: list[str] | None) -> dict[str, str | None]:
    pairs = [item.partition("=") for item in given or []]
    return {name: value or None for name, _, value in pairs}


def _row(host: HostInfo) -> tuple[object, ...]:
    labels = " ".join(f"{name}={value}" for name, value in sorted(host.labels.items()))
    if not host.cpus:  # known to nobody yet, or not to this token
        return host.name, host.state, host.sandboxes, "", "", "", "", labels, host.error
    memory, disk = output.size(host.memory_free), output.size(host.disk_free)
    return host.name, host.state, host.sandboxes, f"{host.load:.1f}", host.cpus, memory, disk, labels, host.error
