"""Toolsets of `verifiers` (from 0.4 on), whose tools answer calls in this process.

Guarantee: tools are what the toolset registers at its own server (MCP), named as the package's own harness names them;
the server is called without a network. A call that fails is a text, as that server words it. `more_than_tools` says
what cannot be had here: a server at an address, a runtime of its own, state that tools and rewards share, conditions
that stop an episode.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


class Toolbox:
    """``await (await Toolbox.of(sets)).call("shelves_look", '{"shelf": 2}')``. `tools` are as models see them."""

    def __init__(self, dispatch: dict[str, tuple[Any, Any]]):
        self._dispatch = dispatch  # by the tool's whole name: its server, and the tool
        self.tools = [
            {
                "type": "function",
                "function": {"name": name, "description": tool.description or "", "parameters": tool.input_schema},
            }
            for name, (_, tool) in dispatch.items()
        ]

    @classmethod
    async def of(cls, sets: Sequence[Any]) -> Toolbox:
        """Of toolsets that are `ready`."""
        from mcp.server.mcpserver import MCPServer

        dispatch = {}
        for item in sets:
            prefix = item.server_name
            server = MCPServer(prefix or type(item).__name__)
            item.register(server)
            for tool in await server.list_tools():
                dispatch[f"{prefix}_{tool.name}" if prefix else tool.name] = server, tool
        return cls(dispatch)

    async def call(self, name: str, text: str) -> str:
        """What a tool says, also where it fails. `text`: its arguments as JSON."""
        from mcp import Client

        if name not in self._dispatch:
            return f"no tool {name!r}"
        server, tool = self._dispatch[name]
        try:
            arguments = json.loads(text or "{}")
        except (ValueError, RecursionError):
            return f"the arguments of {name} are no JSON"
        if not isinstance(arguments, dict):
            return f"the arguments of {name} are no object"
        async with Client(server) as client:
            result = await client.call_tool(tool.name, arguments)
        return "\n".join(block.text if block.type == "text" else str(block) for block in result.content)


async def ready(sets: Sequence[Any], task: Any = None) -> list[Any]:
    """Toolsets that are set up; for this task, if they are of one."""
    for item in sets:
        await item.setup()
        if task is not None:
            await item.setup_task(task)
    return list(sets)


async def closed(sets: Sequence[Any]) -> None:
    """What they opened is given back, as their own server does."""
    for item in sets:
        await item._exit_stack.aclose()


def more_than_tools(task: Any, sets: Sequence[Any]) -> list[str]:
    """What these toolsets or this task need that is not here."""
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.state import State, state_cls

    configs = [item.config for item in sets]
    needs = ["tools at an address"] if any(getattr(item, "url", None) for item in configs) else []
    plain = all(isinstance(getattr(item, "runtime", SubprocessConfig()), SubprocessConfig) for item in configs)
    needs += [] if plain else ["a runtime for its tools"]
    needs += ["tools with state"] if any(state_cls(type(item)) is not State for item in sets) else []
    return needs + (["conditions that stop it"] if task.hooks("stop") else [])
