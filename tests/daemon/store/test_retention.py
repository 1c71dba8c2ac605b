"""Which checkpoints go, and that nothing goes that somebody needs: the rule, the page store, a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.checkpoints.persist import LOST
from daemon.store.retention import new_parents, removable
from sandbox import Client, Conflict, NotFound
from sandbox.content.page_hashes import PAGE
from sandbox.content.pages import PageStore
from sandbox.messages import CheckpointState, Retention, Verdict
from tests.support.daemon_host import ASLEEP, IMAGE, Daemon, asleep, until

STATES = (CheckpointState.DURABLE,) * 6 + (CheckpointState.CAPTURED, CheckpointState.PENDING, CheckpointState.FAILED)


@dataclass(frozen=True, slots=True)
class Node:
    """A checkpoint, as far as the rule looks at it."""

    id: str
    sandbox: str
    number: int  # order of creation
    state: CheckpointState
    parent: str | None = None
    label: str | None = None
    template: object | None = None  # imported


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Node], dict[str, Retention], set[str]]:
    """Trees of up to three sandboxes with forks between them, policies for the living, and what is needed."""
    nodes: list[Node] = []
    for number in range(draw(st.integers(0, 40))):
        complete = [node for node in nodes if node.state is not CheckpointState.FAILED]
        parent = draw(st.sampled_from([None, *(node.id for node in complete)]))
        nodes.append(
            Node(
                id=f"c{number}",
                sandbox=draw(st.sampled_from("abc")),
                number=number,
                state=draw(st.sampled_from(STATES)),
                parent=parent,
                label=draw(st.sampled_from([None, None, "kept"])),
                template=draw(st.sampled_from([None] * 9 + ["imported"])),
            )
        )
    policies = {
        name: Retention(last=draw(st.sampled_from([None, 1, 2, 5])), labelled=draw(st.booleans()), leaves=True)
        for name in draw(st.sets(st.sampled_from("abc")))
    }
    needed = draw(st.sets(st.sampled_from([node.id for node in nodes]))) if nodes else set()
    return nodes, policies, needed


@settings(max_examples=120)
@given(histories())
def test_the_rule_gives_up_nothing_that_is_needed(history: tuple[list[Node], dict[str, Retention], set[str]]) -> None:
    nodes, policies, needed = history
    gone = removable(nodes, policies, needed)
    parents = {node.parent for node in nodes if node.state is not CheckpointState.FAILED}
    for node in nodes:
        policy = policies.get(node.sandbox)
        complete = sorted(
            n.number for n in nodes if n.sandbox == node.sandbox and n.state is not CheckpointState.FAILED
        )
        if node.id not in gone:
            continue
        assert node.id not in needed
        assert node.state is not CheckpointState.PENDING
        assert node.template is None
        if policy is not None:
            assert policy.last is not None
            assert node.number not in complete[-policy.last :]
            assert node.state in (CheckpointState.DURABLE, CheckpointState.FAILED)
            assert node.state is CheckpointState.FAILED or node.id in parents
            assert not (policy.labelled and node.label)


@settings(max_examples=120)
@given(histories())
def test_the_rule_is_finished_after_once_and_keeps_the_tree_whole(
    history: tuple[list[Node], dict[str, Retention], set[str]],
) -> None:
    nodes, policies, needed = history
    gone = removable(nodes, policies, needed)
    heirs = new_parents(nodes, gone)
    left = [
        Node(n.id, n.sandbox, n.number, n.state, heirs.get(n.id, n.parent), n.label, n.template)
        for n in nodes
        if n.id not in gone
    ]
    assert removable(left, policies, needed) == set()
    parent = {node.id: node.parent for node in nodes}
    ids = {node.id for node in left}
    for node in left:
        assert node.parent is None or node.parent in ids
        ancestors = []
        above = parent[node.id]
        while above is not None:
            ancestors.append(above)
            above = parent[above]
        assert node.parent == next((name for name in ancestors if name in ids), None)


def test_a_policy_must_keep_something() -> None:
    with pytest.raises(ValueError, match="at least the last"):
        Retention(last=0)


# ------------------------------------------------------------------- the page store under random histories


class History:
    """A page store and the dumps that somebody refers to, with the content that each must have."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.directory, self.chance = directory, chance
        self.store = PageStore(directory)
        self.dumps: dict[int, tuple[np.ndarray, bytes]] = {}
        self.count = 0

    def pack(self) -> None:
        pages = [self.chance.randrange(400).to_bytes(4, "little") * 1024 for _ in range(self.chance.randrange(1, 150))]
        data = b"".join(pages)
        with self.store.writing():
            numbers = self.store.add(data).numbers
            if self.chance.random() < 0.3:
                self.collect()  # somebody collects before the dump file is there
            self.dumps[self.count] = (numbers, data)
        self.count += 1

    def remove(self) -> None:
        if self.dumps:
            del self.dumps[self.chance.choice(list(self.dumps))]

    def collect(self) -> None:
        if self.store._collecting.locked():
            return

        def marks() -> Iterator[np.ndarray]:
            for numbers, _ in list(self.dumps.values()):
                yield numbers
                if self.chance.random() < 0.2:
                    self.chance.choice((self.pack, self.remove))()

        self.store.collect(marks)

    def killed(self) -> None:
        """The daemon dies between the index and the disk of a collection; the next one opens the store."""

        class Killed(Exception):
            pass

        def die(_: object) -> None:
            raise Killed

        self.store._segments.punch = die  # type: ignore[assignment,method-assign]
        with contextlib.suppress(Killed):
            self.collect()
        self.store.close()
        self.store = PageStore(self.directory)

    def check(self) -> None:
        for numbers, data in self.dumps.values():
            parts: list[bytes] = []
            self.store.read(numbers, parts.append)
            assert b"".join(parts) == data
            self.store.verify(numbers)


@pytest.mark.parametrize("seed", range(6))
def test_no_random_history_loses_a_page_that_a_dump_refers_to(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    history = History(tmp_path / "pages", chance)
    for _ in range(40):
        chance.choices((history.pack, history.remove, history.collect, history.killed), (5, 4, 3, 1))[0]()
        if chance.random() < 0.2:
            history.check()
    history.check()
    history.dumps.clear()
    history.store.collect(list)
    assert history.store.statistics()["blocks"] == 0
    assert sum(path.stat().st_blocks for path in (tmp_path / "pages").glob("*.segment")) * 512 <= 4 * PAGE
    history.store.close()


# ------------------------------------------------------------------- a real daemon


@pytest.fixture
def daemon(own: Daemon) -> Daemon:
    return own


async def test_a_policy_thins_the_tree_while_everything_else_goes_on(daemon: Daemon) -> None:
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE, retention=Retention(last=2))
        server = "python3 -c 'import time; x=bytearray(3<<20); time.sleep(1e6)' >/dev/null 2>&1 &"
        first = await sandbox.durable(await sandbox.exec(f"echo 1 > /n; setsid {server} {asleep('python3')}"))
        labelled = await sandbox.checkpoint("kept", wait="durable")
        (child,) = [fork.sandbox for fork in await host.fork(first, 1)]
        assert child is not None
        infos = [await sandbox.durable(await sandbox.exec("echo 2 > /n"))]
        await host.store.label(infos[0], "stays until somebody stands on it")
        infos += [await sandbox.durable(await sandbox.exec(f"echo {n} > /n")) for n in range(3, 8)]
        branch = await sandbox.restore(infos[0])
        assert branch.checkpoint == infos[0].id
        await host.store.label(infos[0], None)
        last = [await sandbox.durable(await sandbox.exec(f"echo b{n} > /n")) for n in range(4)]
        # Kept: what it was created from, the fork's origin, the labelled one, the leaf that was left, the last two.
        retained = {labelled.id, first.id, infos[-1].id, last[-2].id, last[-1].id}

        # Content is kept under one name: of one that had processes too, a later one may need the dump.
        alone = {info.id for info in (*infos, *last) if info.verdict is Verdict.FILES}

        async def thinned() -> bool:  # rows go first, content follows
            left = {info.id for info in await sandbox.tree() if info.label != "created"}
            return left == retained and not {path.name for path in snapshots.iterdir()} & (alone - retained)

        snapshots = daemon.state / "pool" / "checkpoints"

        await until(thinned, "the policy was applied")
        tree = {info.id: info for info in await sandbox.tree()}
        assert tree[last[-2].id].parent == labelled.id  # handed to the nearest ancestor that is left
        with pytest.raises(NotFound):
            await host.checkpoint(infos[1])
        for info, text in ((infos[-1], "7\n"), (first, "1\n"), (last[-2], "b2\n")):
            await sandbox.restore(info, verify=True)
            assert await sandbox.files.read("/n") == text.encode()
        await child.remove()
        await sandbox.remove()
    await _nothing_left(daemon)


async def _nothing_left(daemon: Daemon) -> None:
    async def empty() -> bool:
        return not list((daemon.state / "pool" / "checkpoints").iterdir()) and not list(
            (daemon.state / "checkpoints").iterdir()
        )

    await until(empty, "nothing is left")


async def test_what_is_removed_by_hand_frees_its_pages_while_the_daemon_runs(daemon: Daemon) -> None:
    async with daemon.client() as host, host.create(IMAGE) as sandbox:
        noise = 'python3 -c \'import os,time; x=os.urandom(8<<20); open("/up","w"); time.sleep(1e6)\' >/dev/null 2>&1'
        info = await sandbox.durable(
            await sandbox.exec(f"setsid {noise} & while [ ! -e /up ]; do sleep 0.01; done; {asleep('python3')}")
        )
        with pytest.raises(Conflict, match="stands on it"):
            await host.store.remove(info)
        await sandbox.exec("pkill python3; while pgrep python3; do sleep 0.01; done; rm /up")
        after = await sandbox.checkpoint("after", wait="durable")
        segments = list((daemon.state / "pages").glob("*.segment"))
        before = sum(path.stat().st_blocks for path in segments) * 512
        assert before > 8 << 20
        await host.store.remove(info)
        await host.store.collect()
        segments = list((daemon.state / "pages").glob("*.segment"))
        assert sum(path.stat().st_blocks for path in segments) * 512 < before - (8 << 20)
        assert (await host.store.label(after, "renamed")).label == "renamed"
        await sandbox.restore(after, verify=True)


@pytest.mark.parametrize("round_", range(2))
async def test_killed_while_checkpoints_are_removed_nothing_is_torn(daemon: Daemon, round_: int) -> None:
    """kill -9 at random instants of thinning and collecting: every checkpoint that is left is whole."""
    chance = random.Random(round_)
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE, retention=Retention(last=3))
        started = await sandbox.exec(f"setsid sleep 1000000 >/dev/null 2>&1 & {ASLEEP}")
        await sandbox.durable(started)
    observed: set[str] = set()  # these were durable
    for inject in range(3):
        with contextlib.suppress(Exception):  # the daemon dies in the middle of it
            async with daemon.client(timeout=0) as host:
                await _turns_until_killed(host, sandbox.id, daemon, chance.uniform(2.0, 3.5), observed)
        if daemon.process is not None:
            daemon.kill()
        await asyncio.to_thread(daemon.start)
        async with daemon.client() as host:
            sandbox = await host.get(sandbox.id)
            tree = await sandbox.tree()
            complete = [i for i in tree if i.state in (CheckpointState.CAPTURED, CheckpointState.DURABLE)]
            assert not [i for i in tree if (i.error or "").startswith(LOST)]
            assert not [i for i in tree if i.id in observed and i.state is not CheckpointState.DURABLE]
            assert observed & {i.id for i in complete}, "the newest one stays"
            report = await host.store.verify(*complete)
            assert [item.damage for item in report if item.damage] == [], inject
    async with daemon.client() as host:
        await (await host.get(sandbox.id)).remove()
    await _nothing_left(daemon)


async def _turns_until_killed(host: Client, name: str, daemon: Daemon, after: float, observed: set[str]) -> None:
    sandbox = await host.get(name)
    while True:
        observed.add((await sandbox.durable(await sandbox.exec("date +%N > /n"))).id)
        if after:  # of the first one that is durable
            asyncio.get_running_loop().call_later(after, daemon.kill)
            after = 0.0
