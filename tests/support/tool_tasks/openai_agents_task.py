"""The OpenAI Agents SDK: a session of its sandboxes by our client, stopped, serialised and resumed."""

import asyncio
import io
import json
import pathlib

from agents.sandbox.entries import File
from agents.sandbox.errors import ExecTimeoutError
from agents.sandbox.manifest import Manifest

from pagurus.integrations.openai_agents import PagurusSandboxClient, PagurusSandboxClientOptions


async def main():
    client = PagurusSandboxClient()
    manifest = Manifest(entries={"shell.txt": File(content=b"hermit\n")})
    session = await client.create(manifest=manifest, options=PagurusSandboxClientOptions(image="debian"))
    await session.start()
    result = {"running": await session.running()}
    ran = await session.exec("cat shell.txt; echo no >&2; exit 3")
    result["ran"] = [ran.stdout.decode(), ran.stderr.decode(), ran.exit_code]
    await session.write(pathlib.Path("made.txt"), io.BytesIO(b"made"))
    result["read"] = (await session.read(pathlib.Path("made.txt"))).read().decode()
    result["listed"] = sorted(pathlib.PurePath(entry.path).name for entry in await session.ls("."))
    try:
        await session.exec("sleep 600", timeout=1)
    except ExecTimeoutError as error:
        result["slow"] = type(error).__name__
    await session.exec("setsid sleep 4321 </dev/null >/dev/null 2>&1 &")
    await session.stop()
    await session.shutdown()
    result["stopped"] = await session.running()
    payload = client.serialize_session_state(session.state)
    again = await client.resume(client.deserialize_session_state(json.loads(json.dumps(payload))))
    await again.start()
    ran = await again.exec("cat made.txt; pgrep -x sleep >/dev/null; echo $?")
    result["resumed"] = ran.stdout.decode()
    await client.delete(again)
    result["gone"] = await again.running()
    await client.close()
    print(json.dumps(result))


asyncio.run(main())
