"""A model for the example: a policy of a million parameters in the embedded engine, behind OpenAI's chat route.

Owns: fitting it to scripted repairs (a minute on one core), and the words between chat messages and the text that the
policy reads. Does not own: the engine. It is an example's model: it can repair the service of
:mod:`examples.fix_the_service` and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from examples.fix_the_service.demonstrations import demonstrate
from examples.fix_the_service.environment import OUTPUT_LIMIT, PROMPT
from examples.fix_the_service.scenario import WORDS
from rollout.engine.client import Sampling
from trainer import sft
from trainer.models import policy
from trainer.publish import path_of, publish, versions

ENDED = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # how mini-swe-agent is told that the work is done
TICKET = re.compile(r"want\nport \S+\ndata \S+\ngreet \S+\n")
LONGEST = 24  # tokens of a command


def fitted(home: Path, *, seed: int = 0, steps: int = 220) -> Path:
    """The published weights of the policy; fitted first, if they are not there."""
    weights = home / "weights"
    if 0 in versions(weights):
        return path_of(weights, 0)
    torch.set_num_threads(1)  # two threads make these small products many times slower
    model = policy.make(home / "base", WORDS, seed=seed)
    recipe = sft.Recipe(clean_steps=steps, sloppy_steps=0)

    def report(step: int, steps: int, loss: float) -> None:
        if step % 20 == 0:
            print(f"  step {step} of {steps}, loss {loss:.3f}", flush=True)

    sft.fit(model, demonstrate, policy.load_tokenizer(home / "base"), seed=seed, recipe=recipe, report=report)
    return publish(model, weights, 0, tokenizer=home / "base")


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

    def __init__(self, engine: Any, folder: Path) -> None:
        self.engine = engine
        self.tokenizer = policy.load_tokenizer(folder)
        self.asked = 0
        self.second = asyncio.Event()  # it was asked twice

    def application(self) -> web.Application:
        app = web.Application(client_max_size=32 << 20)
        app.router.add_post("/v1/chat/completions", self.complete)
        return app

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked += 1
        if self.asked == 2:
            self.second.set()
        tokens, _ = sft.transcript(transcript(body["messages"]), self.tokenizer)
        sampling = Sampling(max_tokens=LONGEST, temperature=0.0, stop_token_ids=[policy.END_ID])
        generation = await self.engine.generate(tokens, sampling)
        command = self.tokenizer.decode([token for token in generation.token_ids if token != policy.END_ID])
        return web.json_response(self._answer(ENDED if command.strip() == "exit" else command, len(tokens)))

    def _answer(self, command: str, prompt: int) -> dict[str, Any]:
        call = {"name": "bash", "arguments": json.dumps({"command": command})}
        message = {
            "role": "assistant",
            "content": f"I run `{command}`.",
            "tool_calls": [{"id": f"call_{self.asked}", "type": "function", "function": call}],
        }
        return {
            "id": f"chatcmpl-{self.asked}",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": LONGEST, "total_tokens": prompt + LONGEST},
        }
