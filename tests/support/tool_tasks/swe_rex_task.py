"""SWE-ReX: a deployment, a session that keeps its state, commands and files."""

import asyncio
import json

from swerex.exceptions import BashIncorrectSyntaxError, CommandTimeoutError, NonZeroExitCodeError
from swerex.runtime.abstract import (
    BashAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    WriteFileRequest,
)

from pagurus.integrations.swe_rex import PagurusDeployment


async def main() -> None:
    deployment = PagurusDeployment(image="debian")
    await deployment.start()
    try:
        runtime, result = deployment.runtime, {}
        result["alive"] = bool(await deployment.is_alive())
        await runtime.create_session(CreateBashSessionRequest())
        await runtime.run_in_session(BashAction(command="cd /srv && export CRAB=hermit"))
        await runtime.write_file(WriteFileRequest(path="/srv/shell.txt", content="empty\n"))
        result["session"] = (await runtime.run_in_session(BashAction(command="echo $CRAB; cat shell.txt"))).output
        for name, command, timeout, error in (
            ("failed", "exit_with() { return $1; }; exit_with 3", None, NonZeroExitCodeError),
            ("broken", "if true; then", None, BashIncorrectSyntaxError),
            ("slow", "sleep 60", 1.0, CommandTimeoutError),
        ):
            try:
                await runtime.run_in_session(BashAction(command=command, timeout=timeout))
            except error:
                result[name] = True
        result["after"] = (await runtime.run_in_session(BashAction(command="pwd"))).output
        result["executed"] = (await runtime.execute(Command(command=["wc", "-c", "/srv/shell.txt"]))).stdout
        result["read"] = (await runtime.read_file(ReadFileRequest(path="/srv/shell.txt"))).content
        await runtime.close_session(CloseBashSessionRequest())
    finally:
        await deployment.stop()
    print(json.dumps(result))


asyncio.run(main())
