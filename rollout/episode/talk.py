"""How an episode's texts become tokens and its answers texts: by the environment's own layout, or as a chat.

Guarantee (I8): sampled tokens are never tokenised again. Where a template rewrites history, the trajectory has a break:
a new sample begins there, with its whole prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rollout.chat_families import calls_in, report_tools
from rollout.engine.chat import Characters
from rollout.environments.base import Environment, Observation, Tokenizer
from rollout.episode.renderer import Message, Renderer
from rollout.messages import Trajectory


class LastSeen(NamedTuple):
    """Tokens that an observation becomes. `redo`: they are the whole prompt of a new sample."""

    ids: list[int]
    redo: bool = False


NOT_EXECUTED = "not executed: only the first call of an answer is"


class Talk(Protocol):
    def count(self, text: str) -> int:
        """Tokens of a text in an observation."""

    def open(self, trajectory: Trajectory, first: Observation) -> None:
        """Puts the prompt."""

    def hear(self, trajectory: Trajectory, observation: Observation) -> LastSeen:
        """What follows the last answer. Nothing is put."""

    def read(self, ids: list[int], prompt: list[int], *, complete: bool) -> str:
        """The action in sampled tokens, of which the last one is the end if they are `complete`."""

    def recall(self, trajectory: Trajectory, *, last_seen: bool) -> None:
        """Become what another was that had this trajectory; `last_seen`: also what followed its last answer."""


def talk_of(env: Environment, tokenizer: Tokenizer, renderer: Renderer | None) -> Talk:
    if renderer is not None:
        return Chat(env, renderer)
    return ChatTranscript(env, tokenizer) if isinstance(tokenizer, Characters) else PlainTranscript(env, tokenizer)


class PlainTranscript:
    """Texts one after the other."""

    def __init__(self, env: Environment, tokenizer: Tokenizer):
        self.env, self.tokenizer = env, tokenizer

    def open(self, trajectory: Trajectory, first: Observation) -> None:
        trajectory.put(self.env.encode_observation(self.tokenizer, first, True))

    def hear(self, trajectory: Trajectory, observation: Observation) -> LastSeen:
        return LastSeen(self.env.encode_observation(self.tokenizer, observation, False))

    def count(self, text: str) -> int:
        return len(self.env.encode_observation(self.tokenizer, Observation(text), False))

    def read(self, ids: list[int], prompt: list[int], *, complete: bool) -> str:
        return self.env.decode_action(self.tokenizer, ids[:-1] if complete else ids)

    def recall(self, trajectory: Trajectory, *, last_seen: bool) -> None:
        """Nothing is kept here."""


class ChatTranscript(PlainTranscript):
    """Texts for a model behind an address: first what the environment says to its model, with its tools."""

    def __init__(self, env: Environment, tokenizer: Characters):
        super().__init__(env, tokenizer)
        self._characters = tokenizer

    def open(self, trajectory: Trajectory, first: Observation) -> None:
        words: list[Message] = [{"role": "system", "content": self.env.system}] if self.env.system else []
        for message in report_tools(words, self.env.tools):
            trajectory.put(self._characters.report(message["content"]))
        super().open(trajectory, first)

    def read(self, ids: list[int], prompt: list[int], *, complete: bool) -> str:
        action = super().read(ids, prompt, complete=complete)
        content, calls, _ = calls_in(action) if self.env.tools else (action, [], [])
        return self.env.read_action(content, calls) if calls else action


class Chat:
    """Messages: the system's words and the first observation, then answers and observations in turn.

    An observation answers the call of a tool, where the answer was one, and is a user's message otherwise.
    """

    def __init__(self, env: Environment, renderer: Renderer):
        self.env, self.renderer = env, renderer
        self.history: list[Message] = []

    def open(self, trajectory: Trajectory, first: Observation) -> None:
        self._begin(first.text)
        trajectory.put(self.renderer.open(self.history, self.env.tools))

    def _begin(self, text: str) -> None:
        self.history = [{"role": "system", "content": self.env.system}] if self.env.system else []
        self.history.append({"role": "user", "content": text})

    def read(self, ids: list[int], prompt: list[int], *, complete: bool) -> str:
        action = self.renderer.parse(ids, prompt, self.env.tools)
        number = len(self.history)
        self.history.append(action.message([f"call_{number}_{n}" for n in range(len(action.calls))]))
        return self.env.read_action(action.content, [(call.name, call.arguments) for call in action.calls])

    def hear(self, trajectory: Trajectory, observation: Observation) -> LastSeen:
        ids, new = trajectory.sample, self._answer(observation.text, observation.results)
        longer = self.renderer.bridge(ids, self.history, new, self.env.tools)
        self.history += new
        if longer is None:
            return LastSeen(self.renderer.open(self.history, self.env.tools), redo=True)
        return LastSeen(longer[len(ids) :])

    def count(self, text: str) -> int:
        return len(self.renderer.encode(text))

    def recall(self, trajectory: Trajectory, *, last_seen: bool) -> None:
        self._begin(trajectory.opening)
        answers = sampled(trajectory)
        for number, (record, (start, prompt, end)) in enumerate(zip(trajectory.turns, answers, strict=True)):
            self.read(trajectory.tokens[prompt:end], trajectory.tokens[start:prompt], complete=True)
            if last_seen or number + 1 < len(answers):
                self.history += self._answer(record.observation, record.results)

    def _answer(self, text: str, results: Sequence[str]) -> list[Message]:
        """A message for each call: its own result, or that it was not carried out."""
        calls = self.history[-1].get("tool_calls") or ()
        if not calls:
            return [{"role": "user", "content": text}]
        said = list(results) or [text]
        said += [NOT_EXECUTED] * (len(calls) - len(said))
        if len(said) > len(calls):  # more results than calls: nothing is lost
            said[len(calls) - 1 :] = ["\n".join(said[len(calls) - 1 :])]
        return [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": content}
            for call, content in zip(calls, said, strict=True)
        ]


def sampled(trajectory: Trajectory) -> list[tuple[int, int, int]]:
    """Of each answer: where its sample begins, where it begins, where it ends."""
    result: list[tuple[int, int, int]] = []
    edges: Sequence[int] = [0, *trajectory.breaks, len(trajectory.tokens)]
    at = 0
    while at < len(trajectory.mask):
        if not trajectory.mask[at]:
            at += 1
            continue
        end = at
        while end < len(trajectory.mask) and trajectory.mask[end]:
            end += 1
        result.append((max(edge for edge in edges if edge <= at), at, end))
        at = end
    return result
