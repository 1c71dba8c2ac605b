"""A model for the example: a policy of a million parameters in the embedded engine, behind OpenAI's chat route.

Owns: the words between chat messages and the text that the policy reads. Does not own: the engine, the policy (that of
:mod:`examples.fix_the_service`, which can repair its service, not each time, and nothing else).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from aiohttp import web

from examples import fit
from rollout.engine.client import Sampling
from rollout.environments.shell import OUTPUT_LIMIT, PROMPT
from trainer.models import policy

ENDED = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # how mini-swe-agent is told that the work is done
TICKET = re.compile(r"want\nport \S+\ndata \S+\ngreet \S+\n")
LONGEST = 24  # tokens of a command


def transcript(messages: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """What the policy reads: the ticket, then its commands (True) and what they printed, in turn."""
    ticket = TICKET.search("\n".join(text for message in messages[:2] for text in [_text(message)]))
    if ticket is None:
        raise web.HTTPBadRequest(text="this model only repairs the service of examples/fix_the_service")
    texts = [(ticket[0] + PROMPT, False)]
    for message in messages[2:]:
        for call in message.get("tool_calls") or ():
            texts.append((json.loads(call["function"]["arguments"])["command"], True))
        if message["role"] == "tool":
            texts.append((_printed(_text(message)), False))
    return texts


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _printed(observation: str) -> str:
    """The output in an observation of mini-swe-agent, as the policy knows outputs."""
    try:
        output = json.loads(observation)["output"]
    except (ValueError, KeyError, TypeError):
        output = observation
    output = output[:OUTPUT_LIMIT]
    return output + ("\n" if output and not output.endswith("\n") else "") + PROMPT


class Chat:
    """``/v1/chat/completions`` over an engine that speaks tokens."""

    def __init__(self, engine: Any, directory: Path) -> None:
        self.engine = engine
        self.tokenizer = policy.load_tokenizer(directory)
        self.requested = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=32 << 20)
        app.router.add_post("/v1/chat/completions", self.complete)
        return app

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requested += 1
        tokens, _ = fit.transcript(transcript(body["messages"]), self.tokenizer)
        sampling = Sampling(max_tokens=LONGEST, temperature=0.0, stop_token_ids=[policy.END_ID])
        generation = await self.engine.generate(tokens, sampling)
        command = self.tokenizer.decode([token for token in generation.token_ids if token != policy.END_ID])
        return web.json_response(self._answer(ENDED if command.strip() == "exit" else command, len(tokens)))

    def _answer(self, command: str, prompt: int) -> dict[str, Any]:
        call = {"name": "bash", "arguments": json.dumps({"command": command})}
        message = {
            "role": "assistant",
            "content": f"I run `{command}`.",
            "tool_calls": [{"id": f"call_{self.requested}", "type": "function", "function": call}],
        }
        return {
            "id": f"chatcmpl-{self.requested}",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": LONGEST, "total_tokens": prompt + LONGEST},
        }
