"""tinker-cookbook: its sandbox protocol, and a sandbox as its Harbor recipe makes it."""

import asyncio
import json
import pathlib
import tempfile

from tinker_cookbook.sandbox.sandbox_interface import SandboxInterface, SandboxTerminatedError

from pagurus.integrations.tinker_cookbook import sandbox_factory


async def main():
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        (folder / "Dockerfile").write_text("FROM debian\nWORKDIR /app\nRUN echo shells > /app/what\n")
        box = await sandbox_factory(folder, 600)
        result = {"protocol": isinstance(box, SandboxInterface)}
        ran = await box.run_command("cat what; echo no >&2; exit 3")
        result["ran"] = [ran.stdout, ran.stderr, ran.exit_code]
        result["slow"] = (await box.run_command("sleep 600", timeout=1)).exit_code
        await box.write_file("/app/tool", "#!/bin/sh\necho tool", executable=True)
        result["tool"] = (await box.run_command("/app/tool", workdir="/")).stdout
        result["read"] = (await box.read_file("/app/what", max_bytes=3)).stdout
        result["missing"] = (await box.read_file("/nowhere")).exit_code
        await box.send_heartbeat()
        await box.cleanup()
        other = await sandbox_factory(folder, 600)
        await other.box.remove()
        try:
            await other.send_heartbeat()
        except SandboxTerminatedError as error:
            result["gone"] = str(error).partition(":")[0]
        await other._host.close()
        print(json.dumps(result))


asyncio.run(main())
