"""What the LLM gateway costs an agent, how much of it the model's thinking hides, and what kill -9 does to it.

::

    pagurus bench gateway [--json] [--parts proxy,turns,kills] [--kills N] [--sandboxes N] [--image NAME]

A scripted model answers after a set time. *proxy*: requests that make no turn, from the host through the gateway and
straight to the model. *turns*: an agent in each sandbox asks, is captured, and asks again; once as a part of its
checkpoints (`inside`), once left out of them (`excluded`: then its files are captured). `answer_ms_p50` is what it
waited beyond the model's own time, `held_ms_mean` what was left of the capture when the answer was ready. *kills*:
agents work while the daemon is killed again and again. Each answer of the model is unique, so at the end it can be told
which one each agent heard in each turn:

`gateway_answers_doubled`: answers that were heard in two turns, or are not the one that the record has.
`gateway_requested_needlessly`: turns in which the model was asked again after an answer that the agent then heard.
`gateway_lost`: sandboxes whose agent did not go on after the last kill.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import socket
import statistics
import sys
import time
from typing import Any

import aiohttp
from aiohttp import web

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost, Census, image
from sandbox import Client, PagurusError, Sandbox
from sandbox.messages import Gateway, Upstream

REQUESTS = 300  # of the proxy part
TURNS = 12  # of each agent in the turns part
THINKING = (0.0, 0.3)  # seconds
PAUSE = (0.1, 0.8)  # seconds that a daemon lives after it serves
AGENT = r"""
import http.client, json, os, sys, time, urllib.request

address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
said, turn, most = [os.environ["NAME"]], 0, int(sys.argv[1])
while turn < most:
    data = json.dumps({"model": "any", "messages": said}).encode()
    began = time.monotonic()
    while True:
        try:
            request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as told:
                answer = json.load(told)["choices"][0]["message"]["content"]
            break
        except (OSError, ValueError, EOFError, http.client.HTTPException):
            time.sleep(0.02)
    with open("/heard", "a") as heard:
        heard.write(json.dumps([turn, answer, time.monotonic() - began]) + "\n")
    said, turn = [*said[-1:], answer, str(turn)], turn + 1
open("/done", "w").close()
"""


class Model:
    """A model that says another word each time, after `thinking` seconds."""

    def __init__(self) -> None:
        self.thinking = 0.0
        self.requested: list[tuple[str, str]] = []  # conversation, answer
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        word = f"w{len(self.requested)}"
        self.requested.append((json.dumps(body["messages"]), word))
        if self.thinking:
            await asyncio.sleep(self.thinking)
        message = {"role": "assistant", "content": word}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


async def _start(client: Client, number: int, turns: int, gateway: Gateway, *, excluded: bool = False) -> Sandbox:
    sandbox = await client.create(IMAGE, gateway=gateway)
    await sandbox.files.write("/agent.py", AGENT)
    name = {"NAME": f"agent {number}"}
    if excluded:
        await sandbox.processes.start(["python3", "/agent.py", str(turns)], env=name, excluded=True)
    else:
        await sandbox.exec(f"setsid python3 /agent.py {turns} >/out 2>&1 &", env=name, ends_turn=False)
    return sandbox


async def _last_seen(sandbox: Sandbox) -> list[tuple[int, str, float]]:
    try:
        return [tuple(json.loads(line)) for line in (await sandbox.files.read("/heard")).splitlines()]
    except PagurusError:
        return []


async def _until_last_seen(sandbox: Sandbox, count: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while len(await _last_seen(sandbox)) < count:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


# --------------------------------------------------------------------------- parts


async def proxy_part(host: BenchHost, model: Model, options: argparse.Namespace) -> dict[str, Any]:
    model.thinking = 0.0
    async with host.client() as client, client.create(IMAGE, gateway=Gateway(upstream="m", agent="outside")) as sandbox:
        token = await sandbox.gateway.token()
        through = await _rate(f"{token.base_url}/v1/chat/completions", token.token)
    straight = await _rate(f"{options.model}/v1/chat/completions", "")
    return {
        "proxy_ms_p50": round(1000 * statistics.median(through), 2),
        "straight_ms_p50": round(1000 * statistics.median(straight), 2),
        "proxy_overhead_ms_p50": round(1000 * (statistics.median(through) - statistics.median(straight)), 2),
    }


async def _rate(address: str, token: str) -> list[float]:
    """Seconds of each of many requests that make no turn."""
    took = []
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
        for number in range(REQUESTS):
            body = {"model": "m", "max_tokens": 1, "messages": [str(number)]}
            began = time.monotonic()
            async with session.post(address, json=body) as answer:
                await answer.read()
                answer.raise_for_status()
            took.append(time.monotonic() - began)
    return took


async def turns_part(host: BenchHost, model: Model, options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for shape, thinking in itertools.product(("inside", "excluded"), THINKING):
        model.thinking = thinking
        async with host.client() as client:
            before = await client.gateway.statistics()
            made = [
                await _start(client, n, TURNS, Gateway(upstream="m"), excluded=shape == "excluded")
                for n in range(options.sandboxes)
            ]
            for sandbox in made:
                await _until_last_seen(sandbox, TURNS, 120)
            waits = [wait for sandbox in made for turn, _, wait in await _last_seen(sandbox) if turn]
            after = await client.gateway.statistics()
            for sandbox in made:
                await sandbox.remove()
        name = f"{shape}_thinking_{1000 * thinking:.0f}_ms"
        result[f"{name}_answer_ms_p50"] = round(1000 * (statistics.median(waits) - thinking), 1)
        result[f"{name}_held_ms_mean"] = round((after.held_ms - before.held_ms) / (after.main - before.main), 1)
    return result


async def kills_part(host: BenchHost, model: Model, options: argparse.Namespace) -> dict[str, Any]:
    model.thinking = 0.05
    chance = random.Random(1)
    async with host.client() as client:
        made = [await _start(client, n, 10**6, Gateway(upstream="m")) for n in range(options.sandboxes)]
        for _ in range(options.kills):
            await asyncio.sleep(chance.uniform(*PAUSE))
            await asyncio.to_thread(host.kill)
            await asyncio.to_thread(host.start)
        lost = 0
        for sandbox in made:
            lost += not await _until_last_seen(sandbox, len(await _last_seen(sandbox)) + 2, 90)
        verdicts = [await _judge(sandbox, model) for sandbox in made]
        for sandbox in made:
            await sandbox.remove()
    words = [word for last_seen, _, _ in verdicts for word in last_seen]
    return {
        "gateway_kills": options.kills,
        "gateway_sandboxes": options.sandboxes,
        "gateway_turns": len(words),
        "gateway_model_asked": len(model.requested),
        "gateway_answers_doubled": len(words) - len(set(words)) + sum(wrong for _, wrong, _ in verdicts),
        "gateway_asked_needlessly": sum(needless for _, _, needless in verdicts),
        "gateway_lost": lost,
    }


async def _judge(sandbox: Sandbox, model: Model) -> tuple[list[str], int, int]:
    """(answers heard, those that the record has otherwise, turns asked again though the first answer was heard)"""
    last_seen = [word for _, word, _ in await _last_seen(sandbox)]
    exchanges = [item for item in await sandbox.gateway.exchanges(10_000) if item.main]
    wrong = needless = 0
    for word, exchange in zip(last_seen, exchanges, strict=False):
        content = await sandbox.gateway.exchange(exchange)
        said = json.loads(content.response)["choices"][0]["message"]["content"] if content.response else ""
        wrong += said != word
        conversation = json.dumps(json.loads(content.request)["messages"])
        answers = [answer for requested, answer in model.requested if requested == conversation]
        needless += len(answers) > 1 and answers[-1] != word
    return last_seen, wrong + max(0, len(last_seen) - len(exchanges)), needless


# --------------------------------------------------------------------------- all of it


async def everything(options: argparse.Namespace, host: BenchHost) -> dict[str, Any]:
    parts = {"proxy": proxy_part, "turns": turns_part, "kills": kills_part}
    result: dict[str, Any] = {"load": round(os.getloadavg()[0], 1), "cores": os.cpu_count()}
    model = Model()
    options.model = await model.start()
    await asyncio.to_thread(host.start)
    census = Census(host)
    try:
        async with host.client() as client:
            await client.gateway.put("m", Upstream(url=options.model))
        for name in options.parts.split(","):
            print(f"{name} ...", file=sys.stderr, flush=True)
            result |= await parts[name](host, model, options)
        async with host.client() as client:
            for _ in range(100):
                if not await client.sandboxes() and not os.listdir(host.state / "pool" / "checkpoints"):
                    break
                await asyncio.sleep(0.1)
        await asyncio.to_thread(host.stop)
        left = await asyncio.to_thread(census.leaks)
        result["leaks"], result["leaked"] = len(left), left[:20]
    finally:
        await model.close()
    return result


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The parts that `options` ask for, with a daemon of their own."""
    directory = aftermath.directory("pagurus-gateway-", "/var/tmp")
    config = directory / "gateway.toml"
    config.write_text(f'listen = "127.0.0.1:{_free_port()}"\n')
    former = os.environ.get("PAGURUS_GATEWAY_CONFIG")
    os.environ["PAGURUS_GATEWAY_CONFIG"] = str(config)
    host = BenchHost(directory, image(options.image) if isinstance(options.image, str) else options.image)
    try:
        return asyncio.run(everything(options, host))
    finally:
        host.clean()
        if former is None:
            del os.environ["PAGURUS_GATEWAY_CONFIG"]
        else:
            os.environ["PAGURUS_GATEWAY_CONFIG"] = former


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--parts", default="proxy,turns,kills", help="which, separated by commas")
    parser.add_argument("--sandboxes", type=int, default=4)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--image", default="debian")
    options = parser.parse_args(arguments)
    result = run(options)
    command.show(result, options)
    bad = ("leaks", "gateway_answers_doubled", "gateway_asked_needlessly", "gateway_lost")
    return 1 if any(result.get(name) for name in bad) else 0
