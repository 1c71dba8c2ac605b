"""The SDK's surface: what it exports, what importing it loads, and the errors that cross the wire."""

from __future__ import annotations

import ast
import asyncio
import errno
import inspect
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

import sandbox
from sandbox import Client, NoDaemon, errors, messages, sync


def test_each_public_name_is_there_and_known_to_type_checkers() -> None:
    tree = ast.parse(inspect.getsource(sandbox))
    typed = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert {*sandbox.__all__} == {*typed} - {"annotations", "TYPE_CHECKING", "Any"}
    assert all(hasattr(sandbox, name) for name in sandbox.__all__)


def test_every_error_crosses_the_wire_as_itself() -> None:
    for kind in errors.TABLE.values():
        sent = kind("what", hint="do", sandbox="s-1", turn=4)
        got = errors.from_body(msgspec.msgpack.decode(msgspec.msgpack.encode(sent.body()), type=errors.ErrorBody))
        assert (type(got), str(got)) == (kind, str(sent))


@pytest.fixture
async def server(tmp_path: Path):
    """A real HTTP server on a Unix socket whose only route answers what the test puts into `answer`."""
    answer: dict[str, web.Response] = {}

    async def reply(_: web.Request) -> web.StreamResponse:
        return answer["response"]

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s.sock")).start()
    async with sandbox.Client(tmp_path / "s.sock") as client:
        yield client, answer
    await runner.cleanup()


async def test_an_error_body_becomes_its_class(server) -> None:
    client, answer = server
    body = errors.SandboxDead("gone", hint="restore", sandbox="s-1", turn=2).body()
    answer["response"] = web.Response(status=410, body=msgspec.msgpack.encode(body))
    with pytest.raises(sandbox.SandboxDead, match="s-1 turn 2: gone \\(restore\\)"):
        await client.get("s-1")


async def test_a_code_outside_the_table_is_no_class_of_the_peers_choice(server) -> None:
    client, answer = server
    answer["response"] = web.Response(status=500, body=msgspec.msgpack.encode({"code": "SystemExit", "message": "x"}))
    with pytest.raises(sandbox.PagurusError) as caught:
        await client.statistics()
    assert type(caught.value) is sandbox.PagurusError


@pytest.mark.parametrize("body", [b"", b"\xff\xff", b"<html>", msgspec.msgpack.encode({"sandboxes": "many"})])
async def test_an_answer_that_cannot_be_read_is_a_protocol_error(server, body: bytes) -> None:
    client, answer = server
    answer["response"] = web.Response(body=body)
    with pytest.raises(sandbox.Protocol):
        await client.statistics()


async def test_no_daemon_says_how_to_start_one(tmp_path: Path) -> None:
    async with sandbox.Client(tmp_path / "none.sock") as client:
        with pytest.raises(sandbox.PagurusError, match="pagurus daemon"):
            await client.sandboxes()


async def test_a_closed_client_says_so(tmp_path: Path) -> None:
    client = sandbox.Client(tmp_path / "none.sock")
    await client.close()
    await client.close()
    with pytest.raises(sandbox.Closed):
        await client.sandboxes()


@pytest.mark.parametrize("name", ["Client", "Sandbox", "Files", "Fork"])
def test_the_synchronous_classes_have_the_same_methods(name: str) -> None:
    original, proxy = getattr(sandbox, name), getattr(sync, name)
    methods = {key for key, value in vars(original).items() if inspect.isfunction(value) and not key.startswith("_")}
    assert methods <= set(vars(proxy))
    for method in methods:
        assert not inspect.iscoroutinefunction(getattr(proxy, method))
    if name in ("Client", "Sandbox"):
        assert hasattr(proxy, "__enter__")


def test_the_synchronous_client_raises_the_same_errors(tmp_path: Path) -> None:
    with sync.Client(tmp_path / "none.sock") as host, pytest.raises(sandbox.PagurusError, match="pagurus daemon"):
        host.sandboxes()


def test_verdicts_know_their_halves() -> None:
    for verdict in messages.Verdict:
        assert messages.Verdict.of(files=verdict.files, processes=verdict.processes) is verdict


async def test_no_daemon_is_one_clear_error(tmp_path: Path) -> None:
    async with Client(tmp_path / "nothing.sock") as host:
        with pytest.raises(NoDaemon, match=r"no daemon answers at .*nothing\.sock: nothing is there") as caught:
            await host.sandboxes()
    assert "sudo pagurus daemon" in caught.value.hint
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


async def test_a_socket_of_another_user_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    async with Client(tmp_path / "roots.sock") as host:
        monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", refused)
        with pytest.raises(NoDaemon, match="another user"):
            await host.sandboxes()


INFO = messages.SandboxInfo(id="s-1", image="debian", state=messages.SandboxState.RUNNING, created_at=0.0)


async def test_what_cannot_be_a_command_or_content_is_said_at_once() -> None:
    async with sandbox.Client("/nowhere.sock") as client:
        made = sandbox.Sandbox(client, INFO)
        with pytest.raises(TypeError, match="a command is a string or a sequence of strings, not int"):
            await made.exec(5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="bytes or text, not int"):
            await made.files.write("/a", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["ftp://host", "host:8700", "127.0.0.1:80"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(errors.Invalid, match="is no address of a daemon"):
        Client(address)


async def test_a_removal_that_failed_can_be_tried_again(server) -> None:
    client, answer = server
    answer["response"] = web.Response(status=500, body=msgspec.msgpack.encode(errors.PagurusError("busy").body()))
    made = sandbox.Sandbox(client, INFO)
    with pytest.raises(errors.PagurusError, match="busy"):
        await made.remove()
    answer["response"] = web.Response(body=msgspec.msgpack.encode({}))
    await made.remove()
