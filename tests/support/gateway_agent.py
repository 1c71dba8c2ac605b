"""An agent for the tests of the gateway, in a sandbox that has nothing but Python. Not a test module.

It asks its model as many times as it is told, with a conversation that grows, asks again when its connection breaks,
and writes what it heard to /heard, a JSON object a line.
"""

from __future__ import annotations

import json
from typing import Any

from sandbox import PagurusError, Sandbox
from tests.support.daemon_host import until

AGENT = r"""
import json, os, sys, time, urllib.error, urllib.request

said = [{"role": "user", "content": "begin"}]
ballast = os.urandom(int(sys.argv[2]) << 20) if len(sys.argv) > 2 else b""

def ask(body):
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    while True:
        try:
            request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", data, headers)
            with urllib.request.urlopen(request) as answer:
                return answer.headers, json.load(answer)
        except urllib.error.HTTPError:
            time.sleep(0.05)
        except (OSError, ValueError, EOFError):
            time.sleep(0.05)

for turn in range(int(sys.argv[1])):
    headers, answer = ask({"model": "any", "messages": said})
    text = answer["choices"][0]["message"]["content"]
    entry = {"turn": turn, "text": text, "at": time.time()}
    entry.update((k[10:].lower(), v) for k, v in headers.items() if k.lower().startswith("x-pagurus-"))
    with open("/heard", "a") as heard:
        heard.write(json.dumps(entry) + "\n")
    said += [{"role": "assistant", "content": text}, {"role": "user", "content": f"go on {turn}"}]
open("/done", "w").write("done")
"""


async def start(sandbox: Sandbox, turns: int, ballast: int = 0) -> None:
    """The agent in the background; `ballast` in MiB makes its checkpoints slow."""
    await sandbox.files.write("/agent.py", AGENT)
    command = f"setsid python3 /agent.py {turns} {ballast} >/out 2>&1 &"
    await sandbox.exec(command, ends_turn=False)


async def last_seen(sandbox: Sandbox) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (await sandbox.files.read("/heard")).splitlines()]
    except PagurusError:
        return []


async def done(sandbox: Sandbox, seconds: float = 240.0) -> list[dict[str, Any]]:
    """All that the agent heard, once it has ended."""

    async def ended() -> bool:
        try:
            return await sandbox.files.read("/done") == b"done"
        except PagurusError:
            return False

    await until(ended, "the agent ends", seconds)
    return await last_seen(sandbox)
