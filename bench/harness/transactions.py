"""pgbench through pgbouncer to postgres, each a service, through checkpoints, kills and restores (`bench compose`)."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import own_daemon
from sandbox import Client, Sandbox
from sandbox.errors import PagurusError
from sandbox.messages import Composition, CreateRequest, Limits, Network, SandboxInfo, Service, UpRequest
from sandbox.messages.services import Condition, Dependency, Probe, ServiceInfo, Volume

IMAGE = "databases"
LIMITS = Limits(memory="3GiB", processes=1000)
CLIENTS = 8
_DOCKERFILE = f"""
FROM {own_daemon.IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends postgresql postgresql-contrib pgbouncer
"""
_POSTGRES = r"""
bin=$(ls -d /usr/lib/postgresql/*/bin); data=/var/lib/postgresql/data
if [ ! -s $data/PG_VERSION ]; then
    mkdir -p $data; chown postgres $data; chmod 700 $data
    su postgres -c "$bin/initdb -D $data -A trust" >/dev/null; echo 'host all all all trust' >>$data/pg_hba.conf
fi
exec su postgres -c "exec $bin/postgres -D $data -c listen_addresses='*' -c shared_buffers=32MB"
"""
_POOL = r"""
cat >/tmp/pool.ini <<E
[databases]
* = host=db user=postgres
[pgbouncer]
listen_addr = 0.0.0.0
listen_port = 6432
auth_type = any
pool_mode = transaction
unix_socket_dir =
E
exec su -s /bin/sh postgres -c 'exec pgbouncer /tmp/pool.ini'
"""
_PGBENCH = "exec $(ls -d /usr/lib/postgresql/*/bin)/pgbench -h pool -p 6432 -U postgres "
_FIGURES = {
    "transactions": r"transactions actually processed: (\d+)",
    "failed": r"failed transactions: (\d+)",
    "tps": r"tps = ([\d.]+)",
}


def _shell(line: str, **more: Any) -> Service:
    return Service(image=IMAGE, entrypoint=[], command=["/bin/sh", "-c", line], **more)


def composition() -> Composition:
    data = Volume(name="data", target="/var/lib/postgresql/data")
    check = Probe(test=["pg_isready", "-h", "localhost"], interval=0.3, retries=100)
    services = {
        "client": _shell("exec sleep 1000000", depends_on={"pool": Dependency()}),
        "pool": _shell(_POOL, depends_on={"db": Dependency(condition=Condition.HEALTHY)}),
        "db": _shell(_POSTGRES, healthcheck=check, volumes=[data]),
    }
    return Composition(services=services, main="client")


async def _through(sandbox: Sandbox, process: Any, kill_every: float) -> dict[str, Any]:
    """Checkpoint every second, kill and restore now and then, until the program has ended."""
    checkpoints, kills, refused, killed_at = 0, 0, list[str](), time.monotonic()
    while (await process.refresh()).exit_code is None:
        try:
            await sandbox.checkpoint()
            checkpoints += 1
            if kill_every and time.monotonic() - killed_at > kill_every:
                await sandbox.kill()
                await sandbox.restore(verify=True)
                kills, killed_at = kills + 1, time.monotonic()
        except PagurusError as error:
            refused.append(error.message[:200])
        await asyncio.sleep(1)
    return {"checkpoints": checkpoints, "kills": kills, "refused": refused[:5]}


async def measure(host: Client, seconds: int, kill_every: float) -> dict[str, Any]:
    """`failed`: transactions of which a client saw an error."""
    request = CreateRequest(image="", composition=composition(), limits=LIMITS)
    info = await host.call("POST", "/v1/sandboxes", SandboxInfo, request, keyed=True)
    sandbox = await host.get(info.id)
    path = f"/v1/sandboxes/{sandbox.id}/services/up"
    await host.call("POST", path, list[ServiceInfo], UpRequest(), keyed=True, timeout=400)
    made = await sandbox.exec(f"sleep 1; {_PGBENCH} -i -s 5 postgres", timeout=120)
    assert made.exit_code == 0, made.stderr
    line = f"{_PGBENCH} -c {CLIENTS} -j 2 -T {seconds} postgres"
    process = await sandbox.processes.start(line)
    result = await _through(sandbox, process, kill_every)
    logs = await process.logs()
    said = (logs.stdout + logs.stderr).decode("utf-8", "replace")
    for name, pattern in _FIGURES.items():
        figure = re.search(pattern, said)
        result[name] = float(figure[1]) if figure is not None else None
    result["exit_code"] = process.info.exit_code
    await sandbox.remove()
    return result


async def build_image(host: Client) -> None:
    """Build the image of the three services: Debian with its packages of postgres and pgbouncer."""
    with tempfile.TemporaryDirectory() as directory:
        await asyncio.to_thread(Path(directory, "Dockerfile").write_text, _DOCKERFILE)
        await host.images.build(IMAGE, directory, network=Network.open())
