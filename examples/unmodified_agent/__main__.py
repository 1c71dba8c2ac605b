"""``python -m examples.unmodified_agent``: mini-swe-agent repairs a service, is killed half-way, and ends all the same.

Needs a daemon (`pagurus daemon`) and `make setup-agents`. Its model is a tiny policy in the embedded engine.

::

    mini-swe-agent ─▶ 127.0.0.1:7000 in the sandbox ─▶ gateway ─▶ chat route of this program ─▶ embedded engine
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from aiohttp import web

from examples.fix_the_service.scenario import FOLDER, Scenario, scenario
from examples.unmodified_agent.model import Chat, fitted
from rollout.engine.launch import embedded
from rollout.engine.supervisor import EngineSupervisor
from sandbox import Client, Limits, NotFound, PagurusError, Sandbox, paths
from sandbox.messages import Gateway, Upstream

HOME = paths.CHECKOUT / "runs" / "unmodified_agent"
SETTINGS = {
    "PYTHONPATH": "/opt/agents",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
AGENT = 'python3 -m minisweagent.run.mini -y --exit-immediately -t "$0" -m openai/policy -o /out.json </dev/null'


async def main(seed: int) -> int:
    folder = await asyncio.to_thread(fitted, HOME)
    async with EngineSupervisor(embedded(), folder, 0, log=HOME / "engine.log") as engine, Client() as host:
        chat = Chat(engine, folder)
        runner = web.AppRunner(chat.application(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            port = runner.addresses[0][1]
            await host.gateway.put("embedded", Upstream(url=f"http://127.0.0.1:{port}"))
            async with host.create("agents", limits=Limits(memory="2GiB"), gateway=Gateway(upstream="embedded")) as sb:
                solved = await _episode(sb, scenario(seed), chat)
            await host.gateway.drop("embedded")
        finally:
            await runner.cleanup()
    print("the service answers as it should" if solved else "the service was not repaired")
    return 0 if solved else 1


async def _episode(sb: Sandbox, case: Scenario, chat: Chat) -> bool:
    """Break the service, let the agent repair it, kill everything after its second answer."""
    await sb.exec(case.install, cwd=FOLDER)
    print(f"sandbox {sb.id}: broken is the {case.breakage}; mini-swe-agent starts")
    command = f"(setsid sh -c '{AGENT} >/said 2>&1; echo $? >/done' \"$TASK\") &"
    await sb.exec(command, env={**SETTINGS, "TASK": case.ticket}, cwd=FOLDER, ends_turn=False)
    await chat.second.wait()
    await sb.kill()
    print(f"killed after {chat.asked} requests; restored to {(await sb.restore()).checkpoint}")
    while not await _exists(sb, "/done"):  # noqa: ASYNC110 - it is a process in a sandbox
        await asyncio.sleep(0.2)
    for exchange in await sb.gateway.exchanges():
        heard = "from the record" if exchange.from_record else "from the model"
        print(f"  turn {exchange.turn}: asked {exchange.asked}x, heard {heard}, checkpoint {exchange.checkpoint}")
    answer = await sb.exec(case.verify, cwd=FOLDER)
    return answer.text == case.answer + "\n"


async def _exists(sb: Sandbox, path: str) -> bool:
    try:
        return bool(await sb.files.read(path))
    except NotFound:
        return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.unmodified_agent", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="which breakage (default: 1)")
    try:
        sys.exit(asyncio.run(main(parser.parse_args().seed)))
    except PagurusError as error:
        print(f"{error}", file=sys.stderr)
        sys.exit(1)
