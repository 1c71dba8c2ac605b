"""Changes of policies, as they wait for each other."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

from daemon.catalogue import SandboxRow
from daemon.network.networks import Networks
from sandbox.messages import Network


async def test_one_owners_changes_wait_for_each_other_and_nobody_else_does() -> None:
    networks = Networks.__new__(Networks)
    networks._locks = {}
    under_way: Counter[str] = Counter()
    limit: Counter[str] = Counter()
    met = set()

    async def fit(row: SandboxRow, *_: object) -> None:
        under_way[row.owner] += 1
        limit[row.owner] = max(limit[row.owner], under_way[row.owner])
        met.add(frozenset(owner for owner, count in under_way.items() if count))
        for _ in range(10):
            await asyncio.sleep(0)
        under_way[row.owner] -= 1

    networks._fit, networks._follow = fit, lambda *_: None  # type: ignore[method-assign]

    async def publish() -> None:
        pass

    rows = [SimpleNamespace(id=f"s-{number}", owner="ab"[number == 9], network=Network.none()) for number in range(10)]
    container = SimpleNamespace()
    await asyncio.gather(*(networks.set(row, container, Network.none(), publish) for row in rows))  # type: ignore[arg-type]
    assert limit == {"a": 1, "b": 1} and frozenset("ab") in met
