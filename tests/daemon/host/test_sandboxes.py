"""A host's daemon through its SDK, against real containers, real effects, real checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest

from sandbox import (
    Client,
    CommandNotFound,
    Conflict,
    ImageNotFound,
    Invalid,
    Limits,
    NotFound,
    SandboxDead,
    SandboxState,
    Verdict,
    sync,
)
from sandbox.messages import CheckpointState
from tests.support.daemon_host import ASLEEP, IMAGE, Daemon, kill_everything, missing, tasks_of

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

SERVICE = f"setsid sh -c 'echo $$ > /run/pid; exec sleep 1000000' >/dev/null 2>&1 & {ASLEEP}"


# --------------------------------------------------------------------------- commands


async def test_a_command_is_a_result_whatever_it_does(sb) -> None:
    result = await sb.exec("echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert (result.turn, result.verdict) == (1, Verdict.NONE)


async def test_where_and_how_a_command_runs(sb) -> None:
    result = await sb.exec(
        ["sh", "-c", "pwd; echo $COLOUR; cat; id -u"], cwd="/usr", env={"COLOUR": "red"}, stdin=b"in\n"
    )
    assert result.text == "/usr\nred\nin\n0\n"
    assert (await sb.exec("id -u", user=1000)).text == "1000\n"


async def test_bytes_travel_unchanged(sb) -> None:
    data = bytes(range(256)) * 40
    assert (await sb.exec("cat", stdin=data)).stdout == data


async def test_a_hundred_megabytes_of_output_are_counted_not_kept(sb) -> None:
    result = await sb.exec("head -c 100000000 /dev/zero", output_limit=1000)
    assert (len(result.stdout), result.stdout_dropped) == (1000, 100_000_000 - 1000)


async def test_a_command_that_never_ends_is_ended(sb) -> None:
    result = await sb.exec("sleep 1000000", timeout=0.2)
    assert result.timed_out
    assert result.exit_code == 128 + signal.SIGTERM
    assert (await sb.exec("echo on")).text == "on\n"


async def test_a_command_that_does_not_exist(sb) -> None:
    with pytest.raises(CommandNotFound, match="no-such-program"):
        await sb.exec(["no-such-program"])
    assert (await sb.exec("no-such-program")).exit_code == 127


async def test_streamed_output_comes_in_order_and_ends_the_turn(sb) -> None:
    chunks = [chunk async for chunk in sb.stream("echo one; echo two > /made; echo three")]
    assert b"".join(chunk.data for chunk in chunks if chunk.stream == "stdout") == b"one\nthree\n"
    assert chunks[-1].result.verdict is Verdict.FILES
    with pytest.raises(CommandNotFound):
        [chunk async for chunk in sb.stream(["no-such-program"])]


async def test_what_cannot_be_is_refused_with_a_reason(host: Client, sb) -> None:
    with pytest.raises(ImageNotFound, match=IMAGE):
        await host.create("no-such-image")
    with pytest.raises(NotFound, match="s-none"):
        await host.get("s-none")
    with pytest.raises(NotFound):
        await sb.restore("c-none")
    with pytest.raises(Invalid):
        await host.fork((await sb.refresh()).head, 0)
    with pytest.raises(Invalid):
        await sb.exec("true", cwd="/nowhere")
    async with host.create(IMAGE, name="only-one"):
        with pytest.raises(Conflict):
            await host.create(IMAGE, name="only-one")
    assert [info.id for info in await host.sandboxes()] == [sb.id]


# --------------------------------------------------------------------------- files


async def test_files_written_from_the_host_are_part_of_the_next_turn(sb) -> None:
    data = bytes(range(256))
    await sb.files.write("/data/deep/a.bin", data, mode=0o600)
    await sb.files.write("data/deep/a.bin", b"more", append=True)
    assert await sb.files.read("/data/deep/a.bin") == data + b"more"
    assert [(info.name, info.kind, info.size) for info in await sb.files.list("/data/deep")] == [("a.bin", "file", 260)]
    result = await sb.exec("stat -c '%a %u' /data/deep/a.bin")
    assert (result.text, result.verdict) == ("600 0\n", Verdict.FILES)
    await sb.exec("rm -r /data")
    await sb.restore(result.checkpoint)
    assert await sb.files.read("/data/deep/a.bin") == data + b"more"


async def test_the_files_api_never_leaves_the_sandboxs_tree(sb, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host")
    await sb.exec(f"ln -s {tmp_path}/secret /link; ln -s /proc/1/root/etc /etc2; mkfifo /fifo; ln -s / /dir")
    for path in ("/link", f"/../../..{tmp_path}/secret", "/no/such"):
        with pytest.raises(NotFound):
            await sb.files.read(path)
    for path in ("/fifo", "/dev/zero", "/proc/1/environ", "/etc2/passwd", "/dir"):
        with pytest.raises(Invalid):
            await sb.files.read(path)
        with pytest.raises(Invalid):
            await sb.files.write(path, b"x")


async def test_diff_tells_what_changed_since_a_checkpoint(sb) -> None:
    first = await sb.exec("mkdir /w; echo a > /w/a; echo b > /w/b; rm /etc/hostname; true")
    assert await sb.diff(first.checkpoint) == []
    await sb.exec("echo c > /w/c; echo more >> /w/a; rm /w/b; rm -r /usr/share/doc; chmod 700 /root; touch /etc/passwd")
    changes = {change.path: change.kind for change in await sb.diff(first.checkpoint)}
    assert changes["/w/a"] == "modified"
    assert changes["/w/b"] == "removed"
    assert changes["/w/c"] == "added"
    assert changes["/usr/share/doc"] == "removed"
    assert not any(path.startswith("/usr/share/doc/") for path in changes)
    assert "/etc/passwd" not in changes


# --------------------------------------------------------------------------- turns and checkpoints


async def test_each_kind_of_turn_captures_its_kind(sb) -> None:
    poll = await sb.exec("cat /etc/passwd; ls /")
    repair = await sb.exec("echo fixed > /etc/motd")
    service = await sb.exec(f"setsid sleep 1000000 >/dev/null 2>&1 & {ASLEEP}")
    second = "setsid sleep 1000001 >/dev/null 2>&1 & until grep -q '(sleep) S' /proc/$!/stat; do :; done"
    both = await sb.exec(f"echo x > /x; {second}")
    assert poll.verdict is Verdict.NONE
    assert repair.verdict is Verdict.FILES
    assert service.verdict is Verdict.PROCESSES
    assert both.verdict is Verdict.BOTH
    infos = [await sb.durable(result) for result in (repair, service, both)]
    assert [info.state for info in infos] == [CheckpointState.DURABLE] * 3
    assert infos[0].frozen_ms == 0.0
    assert infos[1].frozen_ms > 0.0
    assert [info.parent for info in infos] == [poll.checkpoint, repair.checkpoint, service.checkpoint]
    assert all(0 < info.stored_bytes <= info.full_bytes for info in infos[1:])
    assert infos[2].stored_bytes < infos[2].full_bytes / 2  # most pages are known from the dump before
    turns = await sb.turns()
    assert [turn.checkpoint for turn in turns] == [x.checkpoint for x in (poll, repair, service, both)]


async def test_the_next_command_waits_until_the_turn_is_captured(host: Client, sb) -> None:
    result = await sb.exec("echo x > /x; setsid sleep 1000000 >/dev/null 2>&1 &")
    await sb.exec("true")
    info = await host.checkpoint(result.checkpoint)
    assert info.state in (CheckpointState.CAPTURED, CheckpointState.DURABLE)


async def test_a_labelled_checkpoint_of_an_unchanged_sandbox_shares_its_content(sb) -> None:
    await sb.durable(await sb.exec("echo x > /x"))
    info = await sb.checkpoint("here", wait="durable")
    assert (info.label, info.verdict, info.stored_bytes, info.state) == (
        "here",
        Verdict.NONE,
        0,
        CheckpointState.DURABLE,
    )
    await sb.exec("rm /x")
    await sb.restore(info)
    assert await sb.files.read("/x") == b"x\n"


async def test_any_node_of_the_tree_can_be_restored(sb) -> None:
    results = [await sb.exec(f"echo {number} >> /log") for number in range(3)]
    await sb.restore(results[0].checkpoint)
    assert await sb.files.read("/log") == b"0\n"
    branch = await sb.exec("echo branch >> /log")
    await sb.restore(results[2].checkpoint)
    assert await sb.files.read("/log") == b"0\n1\n2\n"
    parents = {info.id: info.parent for info in await sb.tree()}
    assert parents[branch.checkpoint] == parents[results[1].checkpoint] == results[0].checkpoint


async def test_a_killed_sandbox_says_so_and_comes_back_equal(daemon: Daemon, sb) -> None:
    result = await sb.exec(SERVICE)
    await sb.captured(result)
    pid = (await sb.files.read("/run/pid")).strip()
    kill_everything(sb.id)
    with pytest.raises(SandboxDead, match="pagurus restore"):
        await _until_dead(sb)
    while (await sb.refresh()).state is not SandboxState.DEAD:  # noqa: ASYNC110 - who asked heard of it before it was written down
        await asyncio.sleep(0.01)
    restored = await sb.restore(verify=True)
    assert (restored.checkpoint, restored.differences) == (result.checkpoint, [])
    assert (await sb.exec(f"tr '\\0' ' ' < /proc/{pid.decode()}/cmdline")).text == "sleep 1000000 "


async def test_a_command_whose_sandbox_is_taken_back_under_it_is_told_of_the_death(sb) -> None:
    """Also where it ends while the restore is under way, which others see as a conflict."""
    for _ in range(5):
        running = [asyncio.ensure_future(sb.exec(f"touch /run/{n}; sleep 1000000", ends_turn=False)) for n in range(4)]
        while len(await sb.files.list("/run")) < len(running):  # noqa: ASYNC110 - no word is given of a start
            await asyncio.sleep(0.01)
        kill_everything(sb.id)
        with contextlib.suppress(SandboxDead):
            await _until_dead(sb)
        await sb.restore()
        for ended in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(ended, SandboxDead) or getattr(ended, "exit_code", 0) == 128 + signal.SIGKILL


async def test_restore_works_before_the_first_turn(sb) -> None:
    await sb.kill()
    await sb.restore()
    assert (await sb.exec("echo alive")).text == "alive\n"


async def test_forks_continue_each_on_its_own(host: Client, sb) -> None:
    await sb.exec("echo origin > /who")
    await sb.exec(SERVICE)
    children = [fork.sandbox for fork in await sb.fork(3)]
    try:
        names = {(await child.exec("hostname")).text for child in children}
        assert len(names) == 3
        pid = (await children[0].files.read("/run/pid")).decode().strip()
        for number, child in enumerate(children):
            assert (await child.exec(f"kill -0 {pid} && cat /who")).text == "origin\n"
            await child.exec(f"echo {number} > /who")
        assert [await child.files.read("/who") for child in children] == [b"0\n", b"1\n", b"2\n"]
        assert await sb.files.read("/who") == b"origin\n"
    finally:
        for child in children:
            await child.remove()


async def test_a_fork_outlives_the_sandbox_that_it_came_from(host: Client) -> None:
    async with host.create(IMAGE) as parent:
        await parent.exec("echo kept > /kept")
        child = (await parent.fork(1))[0].sandbox
    async with child:
        await child.exec("rm /kept")
        await child.kill()
        await child.restore(child.info.head)
        assert await child.files.read("/kept") == b"kept\n"


async def test_many_sandboxes_at_once(host: Client) -> None:
    async def life(number: int) -> list[tuple[Verdict | None, str | None]]:
        async with host.create(IMAGE, limits=Limits(memory="256MiB")) as sandbox:
            result = []
            for command in ("true", f"echo {number} > /n", "setsid sleep 100000 >/dev/null 2>&1 &", "cat /n"):
                done = await sandbox.exec(command)
                result.append((done.verdict, done.reason))
            assert await sandbox.files.read("/n") == f"{number}\n".encode()
            return result

    expected = [Verdict.NONE, Verdict.FILES, Verdict.PROCESSES]
    for result in await asyncio.gather(*(life(number) for number in range(8))):
        assert [verdict for verdict, _ in result[:3]] == expected, result


async def test_nothing_that_has_ended_counts_on_when_others_are_made(host: Client, sb) -> None:
    """The look at all tasks of the host that a new sandbox begins with meets tasks that end and begin elsewhere."""
    at_work = True

    async def make() -> None:
        while at_work:
            async with host.create(IMAGE):
                pass

    making = [asyncio.ensure_future(make()) for _ in range(3)]
    try:
        for _ in range(40):
            await sb.exec("true", ends_turn=False)
        effects = (await sb.exec("true")).verdict, (await sb.turns())[-1].effects
    finally:
        at_work = False
        await asyncio.gather(*making)
    assert (effects[0], effects[1].survivors) == (Verdict.NONE, 0), effects


def test_the_synchronous_sdk_does_the_same(daemon: Daemon) -> None:
    with sync.Client(daemon.socket) as host, host.create(IMAGE) as sandbox:
        assert sandbox.exec("echo hi").text == "hi\n"
        sandbox.files.write("/x", "text")
        before = sandbox.checkpoint("before")
        assert [chunk.stream for chunk in sandbox.stream("echo a")] == ["stdout", "result"]
        assert sandbox.files.read("/x") == b"text"
        sandbox.exec("rm /x")
        assert [change.path for change in sandbox.diff(before)] == ["/x"]
        sandbox.restore(before)
        (child,) = sandbox.fork(1)
        with child.sandbox as forked:
            assert forked.files.read("/x") == b"text"
        with pytest.raises(CommandNotFound):
            sandbox.exec(["no-such-program"])


async def test_statistics_count_turns_by_verdict(host: Client, sb) -> None:
    before = await host.statistics()
    await sb.exec("true")
    await sb.durable(await sb.exec("echo x > /x"))
    after = await host.statistics()
    assert after.turns - before.turns == 2
    assert after.verdicts["none"] - before.verdicts["none"] == 1
    assert after.checkpoints["files"] - before.checkpoints["files"] == 1
    assert after.full_bytes > before.full_bytes


async def test_removal_leaves_nothing(daemon: Daemon, host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        await sandbox.durable(await sandbox.exec(SERVICE))
        tasks = tasks_of(sandbox.id)
        assert tasks
    assert not tasks_of(sandbox.id)
    assert not (daemon.run / "sandboxes" / sandbox.id).exists()
    assert not list((daemon.state / "pool" / "sandboxes").glob(f"{sandbox.id}*"))
    with pytest.raises(NotFound):
        await sandbox.exec("true")


# --------------------------------------------------------------------------- help


async def _until_dead(sb) -> None:
    while True:
        await sb.exec("true")
