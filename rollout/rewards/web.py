"""A reward function at an address: called by POST, as function platforms such as Knative serve them.

See docs/rewards.md for the contract.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import msgspec

from rollout.rewards.messages import Score, ScorerFailed, Scoring, ScoringRequest
from sandbox import Sandbox

MAX_ANSWER = 1 << 20  # bytes of an answer
START = 60.0  # seconds that a platform may take to start an instance, beyond the limit


class _Answer(Score, frozen=True, kw_only=True):
    id: str


def at(
    url: str, *, forks: bool = False, low: float = 0.0, high: float = 1.0, longest: float = 30.0, **options: Any
) -> Scoring:
    """The function that answers at `url`. With `forks` it learns which sandbox is the fork, and has to reach the
    daemon by itself."""
    return Scoring(url=url, forks=forks, low=low, high=high, longest=longest, options=options)


class Functions:
    """``score, seconds = await functions.run(ask, sandbox)``"""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def run(self, request: ScoringRequest, sandbox: Sandbox | None) -> tuple[Score, float]:
        """One try. Raises ScorerFailed."""
        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=True)
        body = {
            **{name: getattr(request, name) for name in ("id", "seed", "row", "state", "cause", "opening", "limit")},
            "turns": request.turns,
            "options": request.scoring.options,
            "sandbox": None if sandbox is None else sandbox.id,
        }
        began = time.monotonic()
        try:
            async with (
                asyncio.timeout(request.limit + START),
                self._session.post(
                    request.scoring.url, data=msgspec.json.encode(body), headers={"content-type": "application/json"}
                ) as response,
            ):
                raw = await response.content.read(MAX_ANSWER + 1)
                while len(raw) <= MAX_ANSWER and (more := await response.content.read(MAX_ANSWER + 1 - len(raw))):
                    raw += more
                if response.status != 200:
                    raise ScorerFailed(f"{request.scoring.url} answered {response.status}: {raw[:200]!r}")
                answer = msgspec.json.decode(raw[: MAX_ANSWER + 1], type=_Answer)
        except TimeoutError:
            raise ScorerFailed(f"{request.scoring.url} did not answer within {request.limit + START:g} s") from None
        except (aiohttp.ClientError, msgspec.MsgspecError) as error:
            raise ScorerFailed(f"{request.scoring.url}: {error}") from None
        if answer.id != request.id:
            raise ScorerFailed(f"{request.scoring.url} sent an unexpected response")
        return Score(reward=answer.reward, turns=answer.turns, reason=answer.reason), time.monotonic() - began
