"""Calls under a key: carried out once, answered again, also by the next daemon after a kill -9."""

from __future__ import annotations

import asyncio
import io
import json
import stat
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from daemon.api import idempotency
from daemon.api.idempotency import Answers
from sandbox import Client
from sandbox.database import connect
from sandbox.errors import Interrupted
from tests.support.daemon_host import IMAGE, Daemon, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


async def keyed(raw: aiohttp.ClientSession, path: str, key: str, **requested: Any) -> tuple[int, Any, bool]:
    """(status, body, whether it was a kept answer)"""
    async with raw.post(path, json=requested, headers={"Idempotency-Key": key}) as answer:
        return answer.status, await answer.json(), "Idempotency-Replayed" in answer.headers


async def test_a_key_is_carried_out_once_also_by_the_next_daemon(
    daemon: Daemon, host: Client, raw: aiohttp.ClientSession
) -> None:
    status, made, _ = await keyed(raw, "/v1/sandboxes", "make", image=IMAGE)
    assert status == 201
    path = f"/v1/sandboxes/{made['id']}/exec"
    count = "echo x >> /count; wc -l < /count"
    first, together = (
        await keyed(raw, path, "one", command=count),
        await asyncio.gather(*(keyed(raw, path, "two", command=f"sleep 0.2; {count}") for _ in range(4))),
    )
    assert len({json.dumps(body) for _, body, _ in together}) == 1
    assert sorted(replayed for _, _, replayed in together) == [False, True, True, True]
    status, body, _ = await keyed(raw, path, "one", command="true")
    assert (status, body["code"]) == (409, "conflict")
    assert (await keyed(raw, path, "wrong", command=["/nonsense"]))[0] == 422

    long = f"touch /begun; until test -e /go; do sleep 0.05; done; {count}"
    begun = asyncio.ensure_future(keyed(raw, path, "three", command=long))
    sandbox = await host.get(made["id"])
    await sandbox.exec("until test -e /begun; do sleep 0.01; done", ends_turn=False)
    daemon.kill()
    with pytest.raises(aiohttp.ClientError):
        await begun
    daemon.start()

    assert await keyed(raw, path, "one", command=count) == (first[0], first[1], True)
    assert (await keyed(raw, "/v1/sandboxes", "make", image=IMAGE))[1]["id"] == made["id"]
    status, body, _ = await keyed(raw, path, "three", command=long)
    assert (status, body["code"]) == (409, "interrupted")
    # The command of the killed daemon goes on to its end, once: the first, the second, and this one.
    await sandbox.exec("touch /go; until test $(wc -l < /count) -ge 3; do sleep 0.05; done")
    assert (await sandbox.exec("wc -l < /count")).text.strip() == "3"
    await sandbox.remove()


async def test_a_keyed_call_gives_its_stdin_once(daemon: Daemon, host: Client, raw: aiohttp.ClientSession) -> None:
    async with host.create(IMAGE) as sandbox:
        process = await sandbox.processes.start("cat > /got", stdin="pipe")
        path = f"/v1/sandboxes/{sandbox.id}/processes/{process.id}/stdin"
        headers = {"Idempotency-Key": "give", "Content-Type": "application/octet-stream"}
        for _ in range(2):
            async with raw.post(path, data=b"a line\n", headers=headers) as answer:
                assert (answer.status, await answer.json()) == (200, {"written": 7})
        async with raw.post(path, params={"offset": "7"}, data=b"a line\n", headers=headers) as answer:
            assert (answer.status, (await answer.json())["code"]) == (409, "conflict")
        for headers in ({}, {"Idempotency-Key": "large"}):
            async with raw.post(path, data=io.BytesIO(bytes((8 << 20) + 1)), headers=headers) as answer:
                assert (answer.status, (await answer.json())["code"]) == (413, "invalid")
        async with raw.post(path, params={"close": "true"}) as answer:
            assert answer.status == 200
        assert await process.wait() == 0
        assert await sandbox.files.read("/got") == b"a line\n"


async def test_the_sdk_sends_again_what_can_do_no_harm(daemon: Daemon, host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        daemon.kill()
        again = asyncio.ensure_future(sandbox.exec("echo x >> /count; cat /count"))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(daemon.start)
        assert (await again).text == "x\n"


async def test_what_a_killed_daemon_had_begun(tmp_path: Path) -> None:
    clock = 1000.0
    answers = Answers(tmp_path / "answers", clock=lambda: clock)
    assert await answers.claim("a", b"asked", "redo") == (None, False)
    assert await answers.claim("b", b"asked", "again") == (None, False)
    answers.finalize("b", 200, "k", b"done")
    assert await answers.claim("c", b"asked", "once") == (None, False)
    answers.release("c")
    assert stat.S_IMODE((tmp_path / "answers").stat().st_mode) == 0o600
    answers.close()

    after = Answers(tmp_path / "answers", clock=lambda: clock)
    assert await after.claim("a", b"asked", "redo") == (None, True)
    retained, _ = await after.claim("b", b"asked", "again")
    assert retained is not None and (retained.status, retained.answer) == (200, b"done")
    assert await after.claim("c", b"asked", "once") == (None, False)
    for number in range(300):  # a sweep comes by now and then
        clock += 1000
        await after.claim(f"n{number}", b"asked", "once")
        after.finalize(f"n{number}", 200, "k", b"")
    assert await after.claim("b", b"other", "again") == (None, False)
    after.close()


async def test_what_is_too_much_is_forgotten_but_never_what_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MAX_BYTES", 2000)
    answers = Answers(tmp_path / "answers")
    await answers.claim("first", b"asked", "once")
    for number in range(600):
        await answers.claim(f"n{number}", b"asked", "once")
        answers.finalize(f"n{number}", 200, "k", bytes(10))
    retained, _ = await answers.claim("n599", b"asked", "once")
    assert retained is not None and retained.answer == bytes(10)
    assert await answers.claim("n0", b"other", "once") == (None, False)
    answers.finalize("first", 200, "k", b"done")
    answers.close()

    after = Answers(tmp_path / "answers")
    retained, _ = await after.claim("first", b"asked", "once")
    assert retained is not None and retained.answer == b"done"
    with pytest.raises(Interrupted):
        await after.claim("n0", b"other", "once")
    after.close()


async def test_nobodys_calls_make_the_daemon_forget_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MAX_BYTES", 10_000)
    monkeypatch.setattr(idempotency, "MAX_COUNT", 500)
    answers = Answers(tmp_path / "answers")
    await answers.claim("mine", b"asked", "once", "me")
    answers.finalize("mine", 200, "k", b"done")
    limit = 0
    for number in range(2000):
        await answers.claim(f"n{number}", b"asked", "once", "greedy")
        answers.finalize(f"n{number}", 200, "k", bytes(number % 2 * 3000))
        held = answers._rooms["greedy"]
        limit = max(limit, held.size)
        assert held.count <= 500 + idempotency._SWEEP
    assert limit <= 10_000
    retained, _ = await answers.claim("mine", b"asked", "once", "me")
    assert retained is not None and retained.answer == b"done"
    answers.close()

    after = Answers(tmp_path / "answers")
    retained, _ = await after.claim("mine", b"asked", "once", "me")
    assert retained is not None and after._rooms["me"].count == 1 and after._rooms["greedy"].size <= 10_000
    after.close()


async def test_a_former_daemons_keys_name_no_caller(tmp_path: Path) -> None:
    """Its file is one column short."""
    former = connect(tmp_path / "answers", idempotency.SCHEMA)
    former.execute("INSERT INTO calls VALUES (1, 'a', 1e12, x'61', 200, 'k', x'62')")
    former.close()
    answers = Answers(tmp_path / "answers")
    retained, _ = await answers.claim("a", b"a", "once", "me")
    assert retained is not None and retained.answer == b"b"
    answers.close()
