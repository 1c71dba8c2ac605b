"""Acts against a whole daemon: its API for files, its gateway, its command line.

The attacker is what runs in a sandbox, or whoever prepared what somebody else uploads into one. Each act has two
sandboxes of one daemon, attacker and neighbour.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from aiohttp import web

from sandbox import Client, PagurusError, Sandbox
from sandbox.messages import Gateway, Limits, Upstream

LIMITS = Limits(memory="256MiB", processes=64, cpus=1, disk="64MiB")
BOMB = 96 << 20  # bytes; more than the sandbox may have on its disk


@dataclass
class ApiScene:
    """Where an act takes place."""

    host: Client
    attacker: Sandbox
    neighbour: Sandbox
    run: Path  # of the daemon
    secret: Path  # a file of the host

    async def tried(self, code: str) -> str:
        """Run a program as the attacker; "" when it did what it was to do."""
        done = await self.attacker.exec(["python3", "-c", code], timeout=30)
        return "" if done.exit_code == 0 else f"was not tried: {done.stderr[-200:]!r}"

    async def put(self, path: str, archive: bytes) -> str:
        """Upload an archive as it is; the refusal, if there is one."""
        try:
            where = f"/v1/sandboxes/{self.attacker.id}/tree?{urlencode({'path': path})}"
            await self.host.raw("PUT", where, _parts(archive), TAR)
        except PagurusError as error:
            return str(error)
        return ""

    def unharmed(self) -> str:
        """The host's file is as it was."""
        return "" if self.secret.read_bytes() == b"secret" else "the host's file was changed"


OBEYED = ("\x1b[2J", "\x1b]0;", "\x07", "\x9b31m", "\u202e")  # what a terminal obeys
MAX_RSS = 160 << 20  # bytes by which the daemon may grow for one stream: its backlog of 32 MiB, and what holds it
TAR = "application/x-tar"
ApiCheck = Callable[[ApiScene], Awaitable[str]]  # "" when contained, else what went wrong


@dataclass(frozen=True)
class ApiAct:
    name: str
    check: ApiCheck
    gateway: bool = False


API_ACTS: list[ApiAct] = []


def act(name: str, *, gateway: bool = False) -> Callable[[ApiCheck], ApiCheck]:
    def register(check: ApiCheck) -> ApiCheck:
        API_ACTS.append(ApiAct(name, check, gateway))
        return check

    return register


@contextlib.asynccontextmanager
async def scene(act: ApiAct, host: Client, run: Path, image: str) -> AsyncIterator[ApiScene]:
    """Two sandboxes of a daemon, a file of the host, and a model if the act wants one."""
    settings = Gateway(upstream="scripted") if act.gateway else None
    async with contextlib.AsyncExitStack() as undo:
        if act.gateway:
            await undo.enter_async_context(_model(host))
        directory = undo.enter_context(tempfile.TemporaryDirectory(prefix="pagurus-secret-"))
        secret = Path(directory) / "secret"
        secret.write_bytes(b"secret")
        attacker = await undo.enter_async_context(host.create(image, limits=LIMITS, gateway=settings))
        neighbour = await undo.enter_async_context(host.create(image, limits=LIMITS, gateway=settings))
        yield ApiScene(host, attacker, neighbour, run, secret)


@contextlib.asynccontextmanager
async def _model(host: Client) -> AsyncIterator[None]:
    """A model that says the same to everybody."""

    async def answer(_: web.Request) -> web.Response:
        message = {"role": "assistant", "content": "said"}
        return web.json_response({"id": "1", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_route("POST", "/{tail:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        await host.gateway.put("scripted", Upstream(url=f"http://127.0.0.1:{runner.addresses[0][1]}"))
        yield
    finally:
        await runner.cleanup()


# ------------------------------------------------------------------ archives


async def _parts(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1 << 20):
        yield data[start : start + (1 << 20)]


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def member_of(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", device: tuple[int, int] = (0, 0)
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.mode = kind, target, 0o6777
    made.devmajor, made.devminor = device
    return made


@act("tar bomb through upload: more than the disk may hold")
async def _bomb_size(scene: ApiScene) -> str:
    said = await scene.put("/bomb", tar_of((member_of("zeros"), bytes(BOMB))))
    done = await scene.attacker.exec("du -sm /bomb | cut -f1", timeout=20)
    held = int(done.stdout or b"0")
    return ("it was taken" if not said else "") or (f"{held} MiB were written" if held > 70 else "") or scene.unharmed()


@act("tar bomb through upload: declared larger than it is")
async def _bomb_declared(scene: ApiScene) -> str:
    member = member_of("huge")
    member.size = 1 << 50
    said = await scene.put("/bomb", member.tobuf(tarfile.PAX_FORMAT) + bytes(4096))
    return ("it was taken" if not said else "") or scene.unharmed()


@act("tar bomb through upload: endless nesting and many entries")
async def _bomb_nested(scene: ApiScene) -> str:
    deep = await scene.put("/bomb", tar_of((member_of("d/" * 2000 + "f"), b"x")))
    many = tar_of(*((member_of(f"many/{n}"), b"") for n in range(20_000)))
    async with asyncio.timeout(60):
        await scene.put("/bomb", many)  # it may fit; the daemon must go on either way
    health = await scene.host.health()
    return ("nesting was taken" if not deep else "") or ("" if health else "the daemon is ill") or scene.unharmed()


@act("tar bomb through upload: an extended header without end")
async def _bomb_header(scene: ApiScene) -> str:
    member = member_of("f")
    member.pax_headers = {"comment": "x" * (4 << 20)}
    said = await scene.put("/bomb", tar_of((member, b"x")))
    return ("it was taken" if not said else "") or scene.unharmed()


@act("upload an archive that leaves its directory")
async def _traversal(scene: ApiScene) -> str:
    secret = str(scene.secret)
    for name in ("../../../../../.." + secret, "/.." * 20 + secret, "a/../../../.." + secret):
        await scene.put("/in", tar_of((member_of(name), b"overwritten")))
    await scene.put("/in", tar_of((member_of(secret), b"overwritten")))  # an absolute name is one below the directory
    await scene.put(
        "/in",
        tar_of(
            (member_of("out", tarfile.SYMTYPE, str(scene.secret.parent)), b""),
            (member_of("out/secret"), b"overwritten"),
        ),
    )
    await scene.put("/in", tar_of((member_of("hard", tarfile.LNKTYPE, secret), b"")))
    await scene.put(
        "/in", tar_of((member_of("proc", tarfile.SYMTYPE, "/proc/1/root"), b""), (member_of("proc/x"), b"y"))
    )
    result = await scene.attacker.exec("cat /in/hard 2>/dev/null; true")
    return ("the host's file came in" if b"secret" in result.stdout else "") or scene.unharmed()


@act("upload device nodes and set-id programs of another owner")
async def _nodes(scene: ApiScene) -> str:
    await scene.put(
        "/in",
        tar_of(
            (member_of("mem", tarfile.CHRTYPE, device=(1, 1)), b""),
            (member_of("disk", tarfile.BLKTYPE, device=(254, 0)), b""),
            (member_of("suid"), b"#!/bin/sh\n"),
        ),
    )
    done = await scene.attacker.exec("find /in -type b -o -type c; stat -c %u /in/suid")
    if done.stdout.split() != [b"0"]:
        return f"found {done.stdout!r}"
    return scene.unharmed()


# ------------------------------------------------------------------ files


@act("lead the files API out by symlinks and ..")
async def _symlinks(scene: ApiScene) -> str:
    secret = scene.secret
    said = await scene.tried(
        f"import os; os.symlink('{secret}', '/tmp/out'); os.symlink('/..' * 30 + '{secret}', '/tmp/dots');"
        f"os.symlink('{secret.parent}', '/tmp/dir'); os.symlink('/proc/1/root/proc/1/cwd', '/tmp/magic')"
    )
    paths = ["/tmp/out", "/tmp/dots", "/tmp/dir/secret", f"/tmp/magic{secret}", "/" + "../" * 40 + str(secret)]
    for path in paths:
        for attempt in (
            scene.attacker.files.read(path),
            scene.attacker.files.write(path, b"overwritten"),
            scene.attacker.files.remove(path),
            scene.attacker.files.move(path, "/tmp/moved"),
        ):
            with contextlib.suppress(PagurusError):
                if await attempt == b"secret":
                    return f"{path} read the host's file"
    return said or ("it is gone" if not secret.exists() else scene.unharmed())


@act("race the files API with a changing symlink")
async def _race(scene: ApiScene) -> str:
    code = (
        "import ctypes, os; libc = ctypes.CDLL(None); os.makedirs('/race/dir', exist_ok=True)\n"
        "open('/race/dir/secret', 'w').write('mine')\n"
        f"os.symlink('{scene.secret.parent}', '/race/link')\n"
        "for _ in range(2000000): libc.syscall(316, -100, b'/race/dir', -100, b'/race/link', 2)"
    )
    task = asyncio.create_task(scene.attacker.exec(["python3", "-c", code], timeout=4))
    try:
        for _ in range(60):
            with contextlib.suppress(PagurusError):
                if await scene.attacker.files.read("/race/dir/secret") == b"secret":
                    return "the host's file was read"
            with contextlib.suppress(PagurusError):
                await scene.attacker.files.write("/race/dir/secret", b"overwritten")
    finally:
        done = await task
    return ("" if done.timed_out or done.exit_code == 0 else f"was not tried: {done}") or scene.unharmed()


@act("block the files API by a FIFO or a device")
async def _fifo(scene: ApiScene) -> str:
    said = await scene.tried("import os; os.mkfifo('/tmp/fifo')")
    for path in ("/tmp/fifo", "/dev/zero", "/dev/ptmx", "/proc/kmsg", "/proc/self/mem"):
        try:
            async with asyncio.timeout(10):
                data = await scene.attacker.files.read(path, limit=1 << 20)
            return f"{path} was read: {data[:20]!r}"
        except PagurusError:
            continue
        except TimeoutError:
            return f"{path} blocks the daemon"
    return said


@act("a downloaded tree that leads out of where it is unpacked")
async def _download(scene: ApiScene) -> str:
    said = await scene.tried(
        "import os; os.makedirs('/out/d'); os.symlink('/tmp', '/out/abs'); os.symlink('../../..', '/out/up')\n"
        f"os.symlink('{scene.secret}', '/out/d/secret'); os.mkfifo('/out/pipe'); open('/out/d/f', 'w').write('fine')\n"
        "os.mknod('/out/..b', 0o100644); os.symlink('loop', '/out/loop')"
    )
    with tempfile.TemporaryDirectory() as directory:
        try:
            async with asyncio.timeout(30):
                await scene.attacker.files.download("/out", directory)
        except PagurusError as error:
            return said or ("" if error.message else f"refused without a reason: {error}")
        except TimeoutError:
            return "it never ends"
        await asyncio.to_thread(_write_through, Path(directory))
    return said or scene.unharmed()


def _write_through(directory: Path) -> None:
    """What a careless user does next: write into what was downloaded, not following links."""
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.write_bytes(b"touched")


# ------------------------------------------------------------------ output


@act("endless output through the API")
async def _output(scene: ApiScene) -> str:
    done = await scene.attacker.exec("yes", timeout=1, output_limit=1000)
    if len(done.stdout) != 1000 or not done.timed_out:
        return f"kept {len(done.stdout)} bytes"
    keeper = daemon_pid(scene)
    before = limit = rss(keeper)
    observed = parts = 0
    async for chunk in scene.attacker.stream("yes", timeout=4):  # by a reader that is slow
        observed, parts = observed + len(chunk.data), parts + 1
        if chunk.result is not None:
            observed += chunk.result.stdout_dropped
        elif parts <= 40:
            await asyncio.sleep(0.05)
        limit = max(limit, rss(keeper))
    if limit - before > MAX_RSS:
        return f"the daemon grew by {(limit - before) >> 20} MiB"
    return "" if parts > 40 else f"was not tried: {observed} bytes"


def daemon_pid(scene: ApiScene) -> int:
    """The pid of whoever listens on the daemon's socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(scene.run / "pagurus.sock"))
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@act("terminal escapes in names, output and refusals, through the command line")
async def _escapes(scene: ApiScene) -> str:
    said = await scene.tried(
        "import os, sys\n"
        "for n in ('\\x1b[2J', '\\x1b]0;evil\\x07', 'a\\rb', '\\x9b31m', '[bold]x', '\\u202egnp'):\n"
        " os.mkdir('/tmp/' + n); open('/tmp/' + n + '/f', 'w')"
    )
    evil, me = "".join(OBEYED), scene.attacker.id
    saved = await scene.attacker.checkpoint(f"label {evil}")
    first = (await scene.attacker.tree())[0].id
    shown = [["diff", me, first], ["ls"], ["tree", me], ["checkpoint", "ls"], ["image", "ls"], ["net", me]]
    shown += [["diff", "--json", me, first], ["tree", "--json", me], ["checkpoint", "ls", "--json"]]
    refused = [
        ["cp", f"{me}:/tmp/{evil}", "/tmp"],
        ["exec", me, f"/tmp/{evil}"],
        ["exec", "--cwd", f"/tmp/{evil}", me, "true"],
        ["exec", "--user", evil, me, "true"],
        ["shell", me, f"/tmp/{evil}"],
        ["diff", me, evil],
        ["checkpoint", "rm", evil],
        ["run", f"image{evil}"],
        ["rm", f"sandbox{evil}"],
    ]
    reported = ""
    for verb in (*shown, *refused):
        done = await _pagurus(scene, verb)
        printed = done.stdout + done.stderr
        if bool(done.returncode) != (verb in refused):
            return f"was not tried: {verb}: exit {done.returncode}, {done.stderr[-200:]!r}"
        if bad := [sign for sign in OBEYED if sign.encode() in printed]:
            return f"{verb[0]} printed {bad}"
        reported += f"{verb[0]} " if "\N{REPLACEMENT CHARACTER}".encode() in printed else ""
    await scene.host.store.label(saved, None)
    needed = {"diff", "tree", "checkpoint", "cp", "exec", "shell"}  # these had such text to show
    return said or ("" if needed <= set(reported.split()) else f"was not tried: only {reported}told of it")


async def run_program(
    argv: list[str], scene: ApiScene, timeout: float = 60, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """A program of the host's root, which finds the daemon of the scene."""
    return await asyncio.to_thread(
        subprocess.run,
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PAGURUS_RUN": str(scene.run), **environment},
        timeout=timeout,
        check=False,
    )


async def _pagurus(scene: ApiScene, arguments: list[str]) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-m", "pagurus", *arguments]
    return await run_program(argv, scene, TERM="xterm-256color", FORCE_COLOR="1")


# ------------------------------------------------------------------ gateway

_REQUEST = """
import http.client, json, sys
neighbour, token = sys.argv[1:]
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "forged"}]})
here = "/v1/chat/completions"
for path in (here, f"/v1/sandboxes/{neighbour}/chat/completions", f"/{neighbour}{here}"):
    for extra in (
        {}, {"X-Pagurus-Sandbox": neighbour}, {"X-Sandbox": neighbour}, {"Host": neighbour},
        {"Forwarded": f"for={neighbour}"}, {"Authorization": f"Bearer {token}"}, {"x-api-key": token},
        {"X-Forwarded-For": "127.0.0.2"},
    ):
        c = http.client.HTTPConnection("127.0.0.1", 7000, timeout=60)
        c.request("POST", path, body, {"Content-Type": "application/json", **extra})
        print("tried", c.getresponse().status, flush=True)
"""


@act("forged gateway requests for another sandbox", gateway=True)
async def _forged(scene: ApiScene) -> str:
    other = Gateway(upstream="scripted", agent="outside")
    async with scene.host.create(scene.attacker.info.image, limits=LIMITS, gateway=other) as outside:
        token = (await outside.gateway.token()).token
        before = len(await scene.neighbour.gateway.exchanges()), len(await outside.gateway.exchanges())
        done = await scene.attacker.exec(
            ["python3", "-c", _REQUEST, scene.neighbour.id, token], timeout=120, ends_turn=False
        )
        if done.stdout.count(b"tried 200") < 8:
            return f"was not tried: {done.stdout[-200:]!r} {done.stderr[-300:]!r}"
        after = len(await scene.neighbour.gateway.exchanges()), len(await outside.gateway.exchanges())
    return "" if before == after else f"others were charged: {before} became {after}"


async def try_api_act(act: ApiAct, host: Client, run: Path, image: str) -> str:
    """ "" when contained, else what happened. `run`: of the daemon that `host` speaks to."""
    async with scene(act, host, run, image) as where:
        return await act.check(where)
