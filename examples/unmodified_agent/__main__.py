"""``python -m examples.unmodified_agent``: mini-swe-agent repairs a service, is killed half-way, and ends all the same.

Needs a daemon (`pagurus daemon`) and `make setup-agents`. `--upstream URL --model NAME` asks any model that speaks
OpenAI's protocol; its key lies in the file that `--key-file` names, on the host. Without, a tiny policy answers in
the embedded engine (`make setup-train`): it knows this repair alone, and not on every seed.

::

    mini-swe-agent ─▶ 127.0.0.1:7000 in the sandbox ─▶ gateway ─▶ --upstream URL
                                                              └─▶ chat route of this program ─▶ embedded engine
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from examples.fix_the_service.scenario import DIRECTORY, Scenario, scenario
from sandbox import Client, Limits, NotFound, PagurusError, Sandbox, paths
from sandbox.messages import Gateway, Upstream

HOME = paths.CHECKOUT / "runs" / "unmodified_agent"
NAME = "example"  # of the upstream, while this program runs
SETTINGS = {
    "PYTHONPATH": "/opt/agents",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
AGENT = 'python3 -m minisweagent.run.mini -y --exit-immediately -t "$0" -m openai/policy -o /out.json </dev/null'
TASK = f"""Repair the service in {DIRECTORY}: ./serve reads app.conf, opens data/NAME and listens; spare/ has spare
data.
Look first, repair one thing, start it in the background (./serve >log 2>&1 &), and check it: ./ask PORT

"""


@contextlib.asynccontextmanager
async def embedded_model() -> AsyncIterator[str]:
    """The policy of examples/fix_the_service behind OpenAI's chat route; its address."""
    from aiohttp import web

    from examples.fit import Example
    from examples.unmodified_agent.model import Chat
    from rollout.engine.launch import embedded
    from rollout.engine.supervisor import EngineSupervisor

    HOME.mkdir(parents=True, exist_ok=True)
    start = Example.of("fix_the_service").start
    async with EngineSupervisor(embedded(), start, 0, log=HOME / "engine.log") as engine:
        runner = web.AppRunner(Chat(engine, start).application(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def given(url: str) -> AsyncIterator[str]:
    yield url.removesuffix("/").removesuffix("/v1")


async def main(seed: int, url: str | None, model: str | None, key_file: str | None) -> int:
    async with given(url) if url else embedded_model() as place, Client() as host:
        await host.gateway.put(NAME, Upstream(url=place, key_file=key_file))
        try:
            gateway = Gateway(upstream=NAME, model=model)
            async with host.create("agents", limits=Limits(memory="2GiB"), gateway=gateway) as sb:
                solved = await _episode(sb, scenario(seed))
        finally:
            await host.gateway.drop(NAME)
    print("the service answers as it should" if solved else "the service was not repaired")
    return 0 if solved else 1


async def _episode(sb: Sandbox, case: Scenario) -> bool:
    """Break the service, let the agent repair it, kill everything after its second answer."""
    await sb.exec(case.install, cwd=DIRECTORY)
    print(f"sandbox {sb.id}: broken is the {case.breakage}; mini-swe-agent starts", flush=True)
    command = f"(setsid sh -c '{AGENT} >/said 2>&1; echo $? >/done' \"$TASK\") &"
    await sb.exec(command, env={**SETTINGS, "TASK": TASK + case.ticket}, cwd=DIRECTORY, ends_turn=False)
    while len(await sb.gateway.exchanges()) < 2 and not await _exists(sb, "/done"):  # noqa: ASYNC110 - in a sandbox
        await asyncio.sleep(0.2)
    await sb.kill()
    print(f"killed in its second turn; restored to {(await sb.restore()).checkpoint}", flush=True)
    while not await _exists(sb, "/done"):  # noqa: ASYNC110 - it is a process in a sandbox
        await asyncio.sleep(0.2)
    for exchange in await sb.gateway.exchanges():
        last_seen = "from the record" if exchange.from_record else "from the model"
        print(
            f"  turn {exchange.turn}: asked {exchange.requested}x, heard {last_seen}, checkpoint {exchange.checkpoint}"
        )
    answer = await sb.exec(case.verify, cwd=DIRECTORY)
    return answer.text == case.answer + "\n"


async def _exists(sb: Sandbox, path: str) -> bool:
    try:
        return bool(await sb.files.read(path))
    except NotFound:
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.unmodified_agent", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="which breakage (default: 1)")
    parser.add_argument("--upstream", metavar="URL", help="a model that speaks OpenAI's protocol")
    parser.add_argument("--model", metavar="NAME", help="what the upstream calls the model")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="holds the upstream's key")
    chosen = parser.parse_args()
    if bool(chosen.upstream) != bool(chosen.model):
        parser.error("--upstream and --model go together")
    key = str(chosen.key_file.absolute()) if chosen.key_file else None
    try:
        sys.exit(asyncio.run(main(chosen.seed, chosen.upstream, chosen.model, key)))
    except PagurusError as error:
        print(f"{error}", file=sys.stderr)
        sys.exit(1)
