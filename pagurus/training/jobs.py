"""``pagurus submit``, ``jobs``, ``logs`` and ``cancel``: training runs that wait for room in the cluster."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagurus import output
from pagurus.common import AUTHORITY, HOST, TOKEN, Json, call, item, needs_training
from pagurus.training.options import given, settings_command
from sandbox.errors import Invalid, NotFound

if TYPE_CHECKING:
    from sandbox import Client
    from sandbox.messages.cluster import JobInfo

verbs = typer.Typer()

JobName = Annotated[str, typer.Argument(metavar="JOB", help="Its id or how that begins.")]
FOLLOW_INTERVAL = 0.5  # seconds


@verbs.command(cls=settings_command("trainer.config", "TrainConfig", excluded=("task", "resume")))
def submit(
    context: typer.Context,
    what: Annotated[Path, typer.Argument(help="A .toml file or a directory like examples/fix_the_service.")] = Path(),
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="key=value of any setting, as optimiser.rate=1e-6."),
    ] = None,
    needs: Annotated[str, typer.Option(help="Resources of one machine, by Ray's names: CPU=2,GPU=1.")] = "CPU=2",
    trainer_needs: Annotated[
        str, typer.Option(help="Of the trainer, on machines of its own: hosts.count of them share it.")
    ] = "",
    engine_needs: Annotated[
        str, typer.Option(help="Of each engine of the plan, to have Ray find each a machine.")
    ] = "",
    priority: Annotated[int, typer.Option(help="Higher ones come first.")] = 0,
    resume: Annotated[Path | None, typer.Option(help="Continue this run.")] = None,
    fresh: Annotated[bool, typer.Option(help="New run, even if the last one of this plan has not ended.")] = False,
    json: Json = False,
) -> None:
    """Queue a training run at the cluster. Its sandboxes are made where PAGURUS_HOST says.

    The run directory must be readable and writable under the same path on every machine of Ray.
    """
    with needs_training():
        from coordinator.jobs.keeper import parse_needs
        from coordinator.jobs.parts import make_key
        from coordinator.jobs.supervisor import remember
        from rollout.plan import read_plan
        from trainer import config as configuration
        from trainer.prepare import prepare
    from sandbox.messages.cluster import JobInfo, JobRequest

    amounts, trainer, engine = (parse_needs(item) if item else {} for item in (needs, trainer_needs, engine_needs))
    run = prepare(configuration.gather(what, given(context), settings or [], resume=resume), fresh=fresh)
    if run is None:
        raise typer.Exit(1)
    # How its processes reach the sandboxes: as this command does.
    remember(run.resolve(), {name: os.environ[name] for name in (HOST, TOKEN, AUTHORITY) if name in os.environ})
    pool = read_plan(run).pool
    if engine and pool.urls:
        raise Invalid("the plan names engines that others run", hint="leave out --engine-needs, or [pool] urls")
    if trainer or engine:
        make_key(run)
    request = JobRequest(
        run=str(run.resolve()),
        needs=amounts,
        **_trainer(run, trainer),
        engine_needs=engine,
        engines=pool.engines if engine else 0,
        priority=priority,
    )
    made = call(lambda cluster: cluster.call("POST", "/v1/cluster/jobs", JobInfo, request, keyed=True))
    if json:
        output.as_json(made)
    else:
        print(f"{made.id}  {made.run}\nlook at it with: pagurus logs --follow {made.id}")


def _trainer(run: Path, needs: Mapping[str, float]) -> dict[str, Any]:
    """What a job's trainer needs of each of its machines, and how many these are."""
    from trainer.config import TrainConfig, open_run

    hosts = open_run(TrainConfig(task=Path(), resume=run))[1].hosts
    if hosts.count > 1 and not needs:
        raise Invalid(f"the plan's trainer has {hosts.count} hosts", hint="--trainer-needs GPU=16: of all of them")
    return {"trainer_needs": shared(needs, hosts.count), "trainer_hosts": hosts.count + hosts.standby}


def shared(needs: Mapping[str, float], hosts: int) -> dict[str, float]:
    """Of each of so many machines. Raises Invalid for whole things that they cannot share evenly.

    >>> shared({"GPU": 32, "CPU": 48}, 4)
    {'GPU': 8.0, 'CPU': 12.0}
    """
    for name, amount in needs.items():
        if amount % hosts and amount > 1:
            raise Invalid(f"{hosts} hosts cannot share {name}={amount:g} evenly", hint=f"a multiple of {hosts}")
    return {name: amount / hosts for name, amount in needs.items()}


@verbs.command("jobs")
def list_jobs(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that have ended.")] = False,
    json: Json = False,
) -> None:
    """The jobs of the cluster."""
    from sandbox.messages.cluster import JobInfo

    result = call(lambda cluster: cluster.call("GET", "/v1/cluster/jobs", list[JobInfo]))
    result = [item for item in result if everything or item.ended_at is None]
    if json:
        output.as_json(result)
    else:
        output.table(("job", "state", "priority", "needs", "owner", "age", "cost", "run", ""), map(_row, result))


def _row(job: JobInfo) -> tuple[object, ...]:
    trainers = "trainer " if job.trainer_hosts == 1 else f"{job.trainer_hosts} trainer hosts, each "
    parts = [("", job.needs), (trainers, job.trainer_needs), (f"{job.engines} engines, each ", job.engine_needs)]
    needs = "; ".join(
        title + ",".join(f"{name}={amount:g}" for name, amount in amounts.items())
        for title, amounts in parts
        if amounts
    )
    age = f"{time.time() - job.submitted_at:.0f} s"
    cost = "-" if job.cost is None else f"{job.cost:.2f}"
    return job.id, job.state, job.priority, needs, job.owner, age, cost, job.run, job.reason


@verbs.command()
def logs(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB|SANDBOX|SERVICE]",
            help="A job; or a sandbox of services, or one of the services of this directory's compose file.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until it has ended.")] = False,
    service: Annotated[str | None, typer.Option(help="Of a sandbox that `pagurus up` made.", metavar="NAME")] = None,
) -> None:
    """What a job says, or the services of a sandbox."""

    async def work(host: Client) -> None:
        from pagurus.sandboxes.compose import show_logs

        if target is None or service is not None or not await _show_job(host, target, follow):
            await show_logs(host, target, service, follow)

    call(work)


async def _show_job(cluster: Client, job: str, follow: bool) -> bool:
    """What a job says. False: there is none of this id."""
    import asyncio

    from sandbox.messages.cluster import JobInfo

    begin = 0
    while True:
        try:
            over = (await cluster.call("GET", f"/v1/cluster/jobs/{job}", JobInfo)).ended_at is not None
        except (Invalid, NotFound):  # Invalid: a daemon has no such route, only a coordinator has
            return False
        while said := await cluster.raw("GET", f"/v1/cluster/jobs/{job}/log?from={begin}", None, ""):
            sys.stdout.buffer.write(said)
            sys.stdout.buffer.flush()
            begin += len(said)
        if over or not follow:
            return True
        await asyncio.sleep(FOLLOW_INTERVAL)


@verbs.command()
def cancel(jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids or how they begin.")]) -> None:
    """End jobs, or take them out of the queue. `pagurus submit --resume RUN` continues it."""

    async def act(cluster: Client, job: str) -> None:
        from sandbox.messages.cluster import JobInfo

        print((await cluster.call("DELETE", f"/v1/cluster/jobs/{job}", JobInfo)).id)

    item(jobs, act)
