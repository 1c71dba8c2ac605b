"""One engine server without a pool, noted as a pool notes its servers."""

from __future__ import annotations

from pathlib import Path

from rollout.engine.client import Generation, PublishResult, Sampling
from rollout.engine.supervisor import EngineSupervisor
from rollout.pool.member import Note, PoolMember


class SingleServerEngine:
    """``SingleServerEngine("engine", server, log.note)``, of a server that serves."""

    def __init__(self, name: str, server: EngineSupervisor, note: Note):
        self.server, self._member = server, PoolMember(name, server, note=note)
        self._member.state = "serving"
        server.on_serving = self._serves

    def _serves(self, serves: bool) -> None:
        self._member.state = "serving" if serves else "starting"

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, request_id: str = "") -> Generation:
        self._member.load += 1
        try:
            return await self.server.generate(prompt_ids, sampling, request_id=request_id)
        finally:
            self._member.load -= 1

    async def publish(self, weights: Path | str, version: int) -> PublishResult:
        self._member.state = "updating"
        try:
            return await self.server.publish(weights, version)
        finally:
            if self._member.state == "updating":  # else it died since
                self._member.state = "serving"
