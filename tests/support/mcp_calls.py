"""What an agent does with the tools of ``pagurus mcp``. Prints what came of it. Run by the Python that has `mcp`."""

import asyncio
import json
import os
import sys

from mcp import Client, StdioServerParameters


async def main() -> None:
    stdio = StdioServerParameters(command=sys.argv[1], args=["-m", "pagurus", "mcp"], env=dict(os.environ))
    server = sys.argv[2] if len(sys.argv) > 2 else stdio  # the address of a server that listens
    async with Client(server) as client:

        async def call(name, **arguments):
            result = await client.call_tool(name, arguments)
            if result.is_error:
                return result.content[0].text
            collected = result.structured_content
            return collected["result"] if collected is not None and set(collected) == {"result"} else collected

        collected = {"tools": sorted(tool.name for tool in (await client.list_tools()).tools)}
        await call("write_file", path="/srv/app.conf", content="port 8080\n")
        collected["content"] = await call("read_file", path="/srv/app.conf")
        before = await call("checkpoint", label="before")
        collected["edited"] = await call("run", command="sed -i s/8080/9090/ /srv/app.conf")
        collected["diff"] = await call("diff", since=before["checkpoint"])
        forks = await call("fork", count=2)
        collected["forks"] = [
            (await call("run", command="cat /srv/app.conf", sandbox=fork["sandbox"]))["stdout"] for fork in forks
        ]
        first = collected["edited"]["sandbox"]
        await call("restore", checkpoint=before["checkpoint"], sandbox=first)
        collected["restored"] = await call("read_file", path="/srv/app.conf", sandbox=first)
        collected["labels"] = [item["label"] for item in await call("checkpoints", sandbox=first)]
        collected["failure"] = await call("read_file", path="/nowhere", sandbox=first)
        print(json.dumps(collected))


asyncio.run(main())
