"""A model behind OpenAI's chat route as an engine of text: what plays an environment without being trained.

Here an id is a character: those that the model wrote lie in a range of their own, so that a conversation can be
recovered from its ids. Nothing of it may be learned from.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from rollout.engine.client import Generation, Sampling, WeightSpan
from sandbox.errors import EngineFailed

WRITTEN = 1 << 21  # added to the characters that the model wrote; Unicode ends before it
END = 1 << 22  # behind an answer that is complete
REPORTED = 1 << 23  # added to the characters of what the environment says to its model first
VERSION = -1  # of no policy of ours
ATTEMPTS = 4
PAUSE = 1.0  # seconds before the second attempt; twice as long before each further one
AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504})
SYSTEM = (
    "You act in an environment, mostly a Linux system. Each of your messages is one action, taken exactly as you write "
    "it; the answer shows what it did. Write the action alone: no explanation, no formatting."
)


class Characters:
    """Text as ids, without loss. ``Characters().decode([104, 105]) == "hi"``"""

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(one % WRITTEN) for one in ids if one != END)

    def report(self, text: str) -> list[int]:
        """The system's words."""
        return [REPORTED + ord(char) for char in text]


def conversation(ids: Sequence[int], system: str | None) -> list[dict[str, str]]:
    """The messages that these ids are. `system`: said first; None: what the environment says, or else `SYSTEM`.

    >>> conversation([REPORTED + ord("s"), ord("?"), WRITTEN + ord("a"), END, ord("!")], None)[:2]
    [{'role': 'system', 'content': 's'}, {'role': 'user', 'content': '?'}]
    """
    text = Characters()
    said = [(role, text.decode(list(run))) for role, run in itertools.groupby(ids, _role)]
    reported = SYSTEM if system is None else system
    if said and said[0][0] == "system":
        reported = said.pop(0)[1] if system is None else system
    return [
        {"role": role, "content": words} for role, words in [("system", reported), *said] if role != "system" or words
    ]


def _role(one: int) -> str:
    return "system" if one >= REPORTED else "assistant" if one >= WRITTEN else "user"


def action(text: str) -> str:
    """What is meant by an answer: without blanks around it, and without a fence around all of it.

    >>> action("```sh\\nls -l\\n```"), action(" ls ")
    ('ls -l', 'ls')
    """
    lines = text.strip().splitlines()
    if len(lines) > 1 and lines[0].startswith("```") and lines[-1] == "```":
        return "\n".join(lines[1:-1]).strip()
    return text.strip()


class ChatEngine:
    """``async with ChatEngine("http://127.0.0.1:8000", "qwen") as engine``: give it to an `EpisodeManager`."""

    def __init__(self, url: str, model: str, *, key: str = "", system: str | None = None) -> None:
        self.url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        self.model = model
        self.system = system
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"<ChatEngine {self.model} at {self.url}>"

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def first_model(self) -> str:
        """The model that the server names first."""
        result = (await self._requested("GET", "/models")).get("data") or []
        if not result or not isinstance(result[0].get("id"), str):
            raise EngineFailed(f"{self.url} names no model", hint="say --name")
        return str(result[0]["id"])

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        """The next message of the conversation."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": conversation(prompt_ids, self.system),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed & 0x7FFFFFFF
        answered = await self._requested("POST", "/chat/completions", body)
        try:
            choice = answered["choices"][0]
            text = action(choice["message"].get("content") or "")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise EngineFailed(
                f"{self.url} answered without a message: {str(answered)[:200]}",
                hint="check the model and the log of that server",
            ) from None
        cut = choice.get("finish_reason") == "length"
        ids = [WRITTEN + ord(char) for char in text] + ([] if cut else [END])
        spans = [WeightSpan(VERSION, 0, len(ids))]
        return Generation(
            token_ids=ids, logprobs=[0.0] * len(ids), spans=spans, finish_reason="length" if cut else "stop"
        )

    async def _requested(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request; again, after a pause, where the server is busy or away."""
        assert self._session is not None, "enter it first: async with ChatEngine(...)"
        said, pause = "", PAUSE
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(pause)
                pause *= 2
            try:
                async with self._session.request(method, self.url + path, json=body) as response:
                    raw = await response.read()
                    if response.status == 200:
                        return msgspec.json.decode(raw, type=dict[str, Any])
                    said = f"status {response.status}: {raw[:200].decode(errors='replace')}"
                    if response.status not in AGAIN:
                        break
            except (aiohttp.ClientError, OSError) as error:
                said = f"{type(error).__name__}: {error}"
            except (msgspec.MsgspecError, UnicodeError, RecursionError):
                said = "the answer is no JSON object"
                break
        raise EngineFailed(f"{self.url}{path}: {said}", hint="is this the address of an OpenAI-compatible server?")
