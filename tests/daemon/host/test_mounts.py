"""Directories beside the file tree: of the host and scratch, through a real daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.host import mounts
from sandbox import Client, Mount
from sandbox.errors import CheckpointFailed, Invalid
from sandbox.messages import Verdict
from tests.support.daemon_host import ASLEEP, until


@pytest.mark.parametrize(
    "targets",
    [
        ["/"],
        ["relative"],
        ["/a/../b"],
        ["/proc"],
        ["/dev/x"],
        ["/etc"],
        ["/.pagurus/init"],
        ["/a", "/a/b"],
        ["/a/b", "/a"],
        ["/a", "/a"],
        [f"/{number}" for number in range(17)],
    ],
)
def test_targets_that_are_refused(targets: list[str]) -> None:
    with pytest.raises(Invalid):
        mounts.checked([Mount.scratch(target) for target in targets])


@given(st.text(max_size=30))
def test_what_is_accepted_is_below_the_root(target: str) -> None:
    try:
        mounts.checked([Mount.scratch(target)])
    except Invalid:
        return
    assert target.startswith("/") and ".." not in target.split("/") and target.strip("/")


def test_nothing_of_the_daemons_is_mounted(tmp_path: Path) -> None:
    own = tmp_path / "state"
    (own / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(own)
    (tmp_path / "free").mkdir()
    for source in (own, own / "deep", tmp_path, tmp_path / "link", Path("/")):
        with pytest.raises(Invalid, match="belongs to the daemon"):
            mounts.resolved([Mount.read_only(str(source), "/x")], [own])
    for source in (tmp_path / "none", Path("free")):
        with pytest.raises(Invalid, match="not a directory"):
            mounts.resolved([Mount.read_only(str(source), "/x")], [own])
    assert mounts.resolved([Mount.read_only(str(tmp_path / "free"), "/x")], [own])[0].source == str(tmp_path / "free")
    for nonsense in ("/a\0b", "/" + "x" * 5000, "relative", str(tmp_path / "none")):
        with pytest.raises(Invalid, match="not a directory"):
            mounts.resolved([Mount.read_only(nonsense, "/x")], [own])


async def test_mounts_live_through_restores_forks_and_daemons(daemon, host: Client, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/f").write_text("of the host\n")
    target = [Mount.read_only(str(tmp_path / "data"), "/srv/data"), Mount.scratch("/scratch", size="64MiB")]
    async with host.create("debian", mounts=target) as sb:
        first = await sb.exec(
            "cat /srv/data/f; touch /srv/data/x; echo kept > /scratch/k; echo 1 > /state; "
            f"(sleep 999 >/dev/null 2>&1 &); {ASLEEP}"
        )
        assert first.text == "of the host\n" and b"Read-only" in first.stderr
        assert first.verdict is Verdict.BOTH
        await sb.captured(first)
        alone = await sb.exec("echo more >> /scratch/k")
        full = await sb.exec("head -c 100M /dev/zero > /scratch/full; rm -f /scratch/full; echo 2 > /state")
        assert b"No space" in full.stderr or b"quota" in full.stderr
        assert not alone.verdict.processes
        await sb.restore(first.checkpoint, verify=True)
        again = await sb.exec("cat /state /scratch/k; pgrep -c sleep")
        assert again.text == "1\nkept\nmore\n1\n"  # scratch stays as it is
        (fork,) = await sb.fork()
        assert (await fork.sandbox.exec("cat /srv/data/f; ls /scratch; pgrep -c sleep")).text == "of the host\n1\n"
        daemon.kill()
        await asyncio.to_thread(daemon.start)
        assert (await sb.exec("cat /scratch/k /srv/data/f")).text == "kept\nmore\nof the host\n"
        await sb.kill()
        await sb.restore()
        assert (await sb.exec("cat /scratch/k; pgrep -c sleep")).text == "kept\nmore\n1\n"
        await fork.sandbox.remove()
        left = [path.name for path in (daemon.state / "pool/sandboxes").iterdir()]
        assert [name for name in left if "scratch" in name] == [f"{sb.id}.scratch1"]
    trees = daemon.state / "pool/sandboxes"
    await until(lambda: not any("scratch" in path.name for path in trees.iterdir()), "its scratch is gone")


SLEEPER = f"sleep 1000 >/dev/null 2>&1 & {ASLEEP}"


@pytest.mark.parametrize("name", ["plain", "$(printf '\\377\\n odd\\\\134')"])
async def test_a_mount_whose_parent_was_moved_is_refused_until_it_is_back(host: Client, name: str) -> None:
    """Whatever the parent is called now, and whether processes have to be captured or files alone."""
    async with host.create("debian", mounts=[Mount.scratch("/deep/below/scratch")]) as sb:
        await sb.exec(SLEEPER)
        await sb.exec("echo kept > /deep/below/scratch/file")
        for also in ("", SLEEPER):
            moved = await sb.exec(f'mv /deep/below "/deep/{name}"; {also}')
            with pytest.raises(CheckpointFailed, match="a directory above the mount at /deep/below/scratch was moved"):
                await sb.captured(moved)
            made = await sb.captured(await sb.exec(f'mv "/deep/{name}" /deep/below; {also}'))
            assert made.error is None
            await sb.restore(made, verify=True)
            assert (await sb.exec("cat /deep/below/scratch/file")).text == "kept\n"
