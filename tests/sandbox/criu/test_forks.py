"""What tells forks apart: host name, machine id, network, and the hooks that programs need."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sandbox.container.container import Container
from sandbox.container.identity import HOOKS, machine_id, run_fork_hooks
from sandbox.errors import RestoreFailed
from tests.support.checkpoint_programs import CHECK, LISTENER
from tests.support.checkpoint_support import Bench, shell


async def fork(bench: Bench, source: Container, *, script: str = "true") -> tuple[Container, Container]:
    await shell(source, script)
    saved = await bench.save(source)
    children = []
    for number in range(2):
        tree = bench.snapshot(saved.tree, readonly=False)
        child = await bench.maker.prepare(tree=tree, hostname=f"child-{number}")
        await bench.checkpointer.restore(child, saved.capture.dir, verify=True, reference=saved.tree)
        children.append(child)
    return children[0], children[1]


async def test_each_fork_has_its_own_identity_and_equal_files(bench: Bench) -> None:
    sb = await bench.maker.create()
    family = [sb, *await fork(bench, sb, script=LISTENER[0])]
    ids = [(await shell(one, "cat /etc/machine-id")).strip() for one in family]
    assert ids == [machine_id(one.spec.id) for one in family]
    assert len(set(ids)) == 3
    assert all(len(one) == 32 and set(one) <= set("0123456789abcdef") for one in ids)
    assert [await shell(one, "hostname") for one in family] == ["crab\n", "child-0\n", "child-1\n"]
    assert len({os.stat(one.netns).st_ino for one in family}) == 3
    assert {await shell(one, CHECK) for one in family} == {"good\n"}  # the same port, thrice
    assert len({await shell(one, "head -c8 /dev/urandom | od -An -tx1") for one in family}) == 3
    saved = await bench.save(sb)
    await bench.kill_and_restore(sb, saved, saved.dump)
    assert (await shell(sb, "cat /etc/machine-id")).strip() == ids[0]


async def test_hooks_of_a_fork_run_once_in_it(bench: Bench) -> None:
    sb = await bench.maker.create()
    hook = (
        f"mkdir -p /{HOOKS} && cd /{HOOKS} && printf '#!/bin/sh\\necho $0 $PAGURUS_SANDBOX $PAGURUS_CHECKPOINT"
        " ${#PAGURUS_SEED} >> /t-hooks\\n' > 10-first && cp 10-first 20-second && chmod +x 10-first 20-second &&"
        " echo exit 1 > 30-not-executable"
    )
    assert not await run_fork_hooks(sb, checkpoint="c-1")
    one, _ = await fork(bench, sb, script=hook)
    assert await run_fork_hooks(one, checkpoint="c-1")
    assert (await shell(one, "cat /t-hooks")).splitlines() == [
        f"/{HOOKS}/10-first {one.spec.id} c-1 64",
        f"/{HOOKS}/20-second {one.spec.id} c-1 64",
    ]
    assert await shell(sb, "ls /t-hooks 2>/dev/null || echo none") == "none\n"
    await shell(one, f"printf '#!/bin/sh\\necho no new key >&2; exit 3\\n' > /{HOOKS}/20-second")
    with pytest.raises(RestoreFailed, match=r"(?s)no new key.*20-second: exit 3") as caught:
        await run_fork_hooks(one, checkpoint="c-1")
    assert HOOKS in caught.value.hint


async def test_a_directory_of_hooks_is_not_looked_for_outside(bench: Bench, tmp_path: Path) -> None:
    sb = await bench.maker.create()
    (tmp_path / "pagurus" / "fork.d").mkdir(parents=True)
    link = sb.tree / "upper" / "etc" / "pagurus"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "pagurus")
    assert stat.S_ISDIR((link / "fork.d").stat().st_mode)  # as the host would follow it
    assert not await run_fork_hooks(sb, checkpoint="c-1")
    link.unlink()
