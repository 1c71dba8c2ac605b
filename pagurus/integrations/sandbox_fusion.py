"""``POST /run_code`` as SandboxFusion answers it, for verl, SkyRL and others: each call in a fork of a warm sandbox.

Guarantee: each call has a sandbox of its own, which is removed before it is answered; at most `AT_ONCE` run at a time,
and what comes beyond `MAX_WAITING` is said to come again (429), so that nothing is dropped.

A failure of the platform is ``status: SandboxError``, a failure of the code ``Failed``: a reward can separate them
apart.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import posixpath
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from aiohttp import web

from pagurus.integrations import common
from sandbox import Client, ExecResult, PagurusError, Sandbox

AT_ONCE = 2 * (os.cpu_count() or 1)
MAX_WAITING = 1000
MAX_FILES = 100
MAX_BODY = 64 << 20
MAX_SAID = 4 << 20  # bytes of each output
PLACE = "/tmp/run"
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]


class Request(msgspec.Struct):
    code: str
    language: str
    stdin: str | None = None
    compile_timeout: Seconds = 10.0
    run_timeout: Seconds = 10.0
    memory_limit_MB: float = -1  # as SandboxFusion has it: below zero is none
    files: dict[str, str | None] = {}
    fetch_files: Annotated[list[str], msgspec.Meta(max_length=MAX_FILES)] = []


@dataclass(frozen=True)
class Language:
    file: str
    run: str
    compile: str = ""


LANGUAGES = {
    "python": Language("main.py", "python3 main.py"),
    "pytest": Language("test_main.py", "python3 -m pytest -q test_main.py"),
    "bash": Language("main.sh", "bash main.sh"),
    "nodejs": Language("main.js", "node main.js"),
    "cpp": Language("main.cpp", "./main", "g++ -std=c++17 -O1 main.cpp -o main"),
    "c": Language("main.c", "./main", "gcc -O1 main.c -o main -lm"),
    "go": Language("main.go", "./main", "go build -o main main.go"),
    "java": Language("Main.java", "java -cp . Main", "javac Main.java"),
    "rust": Language("main.rs", "./main", "rustc -O main.rs -o main"),
    "perl": Language("main.pl", "perl main.pl"),
    "ruby": Language("main.rb", "ruby main.rb"),
    "lua": Language("main.lua", "lua main.lua"),
    "R": Language("main.R", "Rscript main.R"),
    "php": Language("main.php", "php main.php"),
}


class CodeRunner:
    """Runs code in forks of one warm sandbox. `image`: has the programs of the languages that are requested."""

    def __init__(self, host: Client, image: str, internet: bool) -> None:
        self._host, self._image, self._internet = host, image, internet
        self._warm: str | None = None
        self._preparing = asyncio.Lock()
        self._places = asyncio.Semaphore(AT_ONCE)
        self.waiting = 0

    async def _fork(self) -> Sandbox:
        """A sandbox of its own, from the warm one."""
        async with self._preparing:
            if self._warm is None:
                box = await common.start(
                    self._host,
                    tool="sandbox-fusion",
                    image=self._image,
                    limits=common.limits(memory_mb=2048),
                    network=common.network(self._internet),
                    workdir="/",
                )
                await box.files.mkdir(PLACE)
                self._warm = (await box.checkpoint("warm")).id
        children = await self._host.fork(self._warm, labels=await common.marks("sandbox-fusion"))
        return children[0].sandbox

    async def answer(self, request: Request) -> dict[str, Any]:
        """SandboxFusion's answer. What is wrong with the request is an answer as well."""
        if request.language not in LANGUAGES:
            there = ", ".join(LANGUAGES)
            return _refused(f"language {request.language[:40]!r} is not run here; these are: {there}")
        self.waiting += 1
        try:
            async with self._places:
                box = await self._fork()
                try:
                    return await self._run(box, request, LANGUAGES[request.language])
                finally:
                    await asyncio.shield(box.remove())
        except (PagurusError, ValueError) as error:
            return _refused(common.reason(error) if isinstance(error, PagurusError) else str(error))
        finally:
            self.waiting -= 1

    async def _run(self, box: Sandbox, request: Request, language: Language) -> dict[str, Any]:
        for name, content in {**request.files, language.file: _encoded(request.code)}.items():
            if content is not None:
                await box.files.write(posixpath.join(PLACE, name), _decoded(name, content))
        limit = int(request.memory_limit_MB * 1024)
        bound = f"ulimit -v {limit}; " if limit > 0 else ""
        compiled = None
        if language.compile:
            compiled = await self._exec(box, language.compile, request.compile_timeout, "")
        ran = None
        if compiled is None or _finished(compiled):
            ran = await self._exec(box, f"{bound}{language.run}", request.run_timeout, request.stdin or "")
        files = {name: await _fetched(box, name) for name in request.fetch_files}
        last = ran or compiled
        return {
            "status": "Success" if last is not None and _finished(last) else "Failed",
            "message": "",
            "compile_result": compiled and _reported(compiled),
            "run_result": ran and _reported(ran),
            "executor_pod_name": box.id,
            "files": {name: content for name, content in files.items() if content is not None},
        }

    async def _exec(self, box: Sandbox, command: str, timeout: float, stdin: str) -> tuple[ExecResult, float]:
        began = asyncio.get_running_loop().time()
        words = ["/bin/sh", "-c", command]
        result = await box.exec(
            words, cwd=PLACE, timeout=timeout, stdin=stdin.encode(), output_limit=MAX_SAID, ends_turn=False
        )
        return result, asyncio.get_running_loop().time() - began


def _finished(ran: tuple[ExecResult, float]) -> bool:
    return ran[0].exit_code == 0 and not ran[0].timed_out


def _reported(ran: tuple[ExecResult, float]) -> dict[str, Any]:
    result, seconds = ran
    return {
        "status": "TimeLimitExceeded" if result.timed_out else "Finished",
        "execution_time": round(seconds, 4),
        "return_code": None if result.timed_out else result.exit_code,
        "stdout": common.text(result.stdout),
        "stderr": common.text(result.stderr),
    }


def _refused(message: str) -> dict[str, Any]:
    return {
        "status": "SandboxError",
        "message": message,
        "compile_result": None,
        "run_result": None,
        "executor_pod_name": None,
        "files": {},
    }


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decoded(name: str, content: str) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error:
        raise ValueError(f"files[{name[:100]!r}] is no base64") from None


async def _fetched(box: Sandbox, name: str) -> str | None:
    try:
        return base64.b64encode(await box.files.read(posixpath.join(PLACE, name))).decode()
    except PagurusError:  # it was not made
        return None


def application(image: str, internet: bool) -> web.Application:
    """What answers. It asks for no token."""
    app = web.Application(client_max_size=MAX_BODY)
    host = common.connect()
    runner = CodeRunner(host, image, internet)

    async def run_code(request: web.Request) -> web.Response:
        if runner.waiting >= MAX_WAITING:
            return web.json_response({"detail": "too many at once"}, status=429, headers={"Retry-After": "1"})
        try:
            target = msgspec.json.decode(await request.read(), type=Request)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            return web.json_response({"detail": str(error)}, status=422)
        return web.json_response(await runner.answer(target))

    async def ping(_: web.Request) -> web.Response:
        return web.Response(text='"pong"', content_type="application/json")

    async def closed(_: web.Application) -> None:
        await host.close()

    app.router.add_post("/run_code", run_code)
    app.router.add_get("/v1/ping", ping)
    app.on_cleanup.append(closed)
    return app


def serve(*, host: str, port: int, image: str, internet: bool) -> None:
    """Serve until Ctrl-C."""
    web.run_app(application(image, internet), host=host, port=port, print=None, access_log=None)
