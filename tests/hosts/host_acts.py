"""Acts on the host: doctor, command line, gateway, a second daemon, kills and restarts, what is left at the end."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from sandbox import PagurusError, SandboxDead, paths
from sandbox.messages import Gateway, Upstream
from sandbox.sync import Client
from tests.hosts.act import IMAGE, TIMEOUT, Absent, Host, act, output, wait_for
from tests.hosts.sandbox_acts import COUNT, start_counter, text
from tests.support.programs import Program, in_background

PAGURUS = [sys.executable, "-m", "pagurus"]
UNIT = "pagurus.service"


def main_pid() -> int:
    """Of the daemon that the unit runs."""
    return int(output("systemctl", "show", "--value", "--property=MainPID", UNIT))


def _answers(address: str | None = None) -> bool:
    with contextlib.suppress(PagurusError), Client(address, timeout=0) as client:
        return bool(client.health())
    return False


# --------------------------------------------------------------------------- doctor


@act("doctor", "ready")
def _doctor(host: Host) -> None:
    result = {item["name"]: item for item in json.loads(output(*PAGURUS, "doctor", "--json"))}
    assert not [item for item in result.values() if item["level"] == "miss"]
    assert result["inspector"]["fact"].startswith("loaded and attached")
    assert result["criu tcp"]["level"] == result["sandbox"]["level"] == "ok"


@act("doctor", "the inspector lacks nothing")
def _inspector(host: Host) -> None:
    result = {item["name"]: item for item in json.loads(output(*PAGURUS, "doctor", "--json"))}
    _, _, lost = result["inspector"]["fact"].partition("(")
    if lost:
        raise Absent(lost.removesuffix(")"))


@act("doctor", "without privileges: one line that helps")
def _unprivileged(host: Host) -> None:
    confined = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all", *PAGURUS, "doctor"]
    done = subprocess.run(confined, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 1 and not done.stderr
    assert "root without CAP_SYS_ADMIN" in done.stdout.splitlines()[-1]


# --------------------------------------------------------------------------- command line


@act("command line", "run, exec, cp, rm")
def _command_line(host: Host) -> None:
    output(*PAGURUS, "run", "--name", "by-hand", IMAGE)
    try:
        done = subprocess.run(
            [*PAGURUS, "exec", "by-hand", "echo text >/srv/page; exit 4"], timeout=TIMEOUT, check=False
        )
        assert done.returncode == 4
        with tempfile.TemporaryDirectory() as directory:
            output(*PAGURUS, "cp", "by-hand:/srv/page", directory)
            assert Path(directory, "page").read_text() == "text\n"
    finally:
        output(*PAGURUS, "rm", "by-hand")


@act("command line", "checkpoint, diff, restore")
def _rollback(host: Host) -> None:
    name = host.sandbox.id
    output(*PAGURUS, "checkpoint", name, "before")
    text(host.sandbox, "echo 1 >/srv/by-hand")
    assert "/srv/by-hand" in output(*PAGURUS, "diff", name, "before")
    output(*PAGURUS, "restore", name, "before", "--verify")
    assert not host.sandbox.files.exists("/srv/by-hand")


# --------------------------------------------------------------------------- gateway


class _Model(http.server.BaseHTTPRequestHandler):
    """Answers every request as a model would."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", "0")))
        message = {"role": "assistant", "content": "answer"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "scripted"}
        body = json.dumps({**answer, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


AGENT = """
import json, os, time, urllib.request
base = os.environ["OPENAI_BASE_URL"]
for turn in range(3):
    open("/srv/turn", "w").write(str(turn))
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": str(turn)}]}).encode()
    request = urllib.request.Request(base + "/chat/completions", body, {"content-type": "application/json"})
    said = json.load(urllib.request.urlopen(request, timeout=250))["choices"][0]["message"]["content"]
    print(turn, said, flush=True)
    while turn == 1 and not os.path.exists("/srv/go"):
        time.sleep(0.1)
"""


@contextlib.contextmanager
def _model() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@act("gateway", "an agent, killed between two turns and restored")
def _agent(host: Host) -> None:
    with _model() as url:
        host.client.gateway.put("scripted", Upstream(url=url))
        with host.client.create(IMAGE, gateway=Gateway(upstream="scripted")) as sandbox:
            agent = sandbox.processes.start(["python3", "-c", AGENT])
            wait_for(lambda: b"1 answer" in agent.logs().stdout, "the second answer")
            sandbox.checkpoint(wait="durable")
            sandbox.kill()
            sandbox.restore(verify=True)
            sandbox.files.write("/srv/go", "")
            assert agent.wait(TIMEOUT) == 0
            assert agent.logs().stdout.splitlines() == [b"0 answer", b"1 answer", b"2 answer"]
            assert len(sandbox.gateway.exchanges()) == 3


# --------------------------------------------------------------------------- another daemon


@contextlib.contextmanager
def _second_daemon(*, ignoring: bool = False) -> Iterator[tuple[str, Program]]:
    """A daemon with directories of its own; with SIGINT ignored, as after `&` in a script."""
    with tempfile.TemporaryDirectory(dir=paths.state()) as directory:  # /tmp may be an overlay
        state, run = Path(directory, "state"), Path(directory, "run")
        (state / "images").mkdir(parents=True, mode=0o700)
        (state / "images" / IMAGE).symlink_to((paths.state() / "images" / IMAGE).resolve())
        existing = {**os.environ, "PAGURUS_STATE": str(state), "PAGURUS_RUN": str(run)}
        command = [*PAGURUS, "daemon", "--pool-size", "2GiB", "--stop-sandboxes"]
        if ignoring:
            command = in_background(command)
        with Program(command, env=existing, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as daemon:
            try:
                socket = run / "pagurus.sock"
                wait_for(lambda: daemon.poll() is not None or _answers(str(socket)), "the second daemon")
                assert daemon.poll() is None, f"it ended with {daemon.returncode}"
                yield str(socket), daemon
            finally:
                daemon.terminate()
                daemon.wait(TIMEOUT)
                for mount in _mounts(directory):
                    output("umount", mount)


def _mounts(directory: str) -> list[str]:
    """Those below a directory, the innermost first."""
    points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [point for point in reversed(points) if point.startswith(directory)]


@act("second daemon", "a running sandbox moves there, compared")
def _move(host: Host) -> None:
    start_counter(host.sandbox)
    text(host.sandbox, COUNT)
    taken = host.sandbox.checkpoint(wait="durable")
    content = b"".join(host.client.store.stream(taken))
    with _second_daemon() as (address, _), Client(address) as other:
        imported = other.store.receive(_parts(content))
        for child in other.fork(imported.checkpoint, verify=True):
            with child.sandbox as fork:
                assert text(fork, COUNT) == "2"


async def _parts(content: bytes):  # type: ignore[no-untyped-def]
    yield content


@act("second daemon", "ends on SIGTERM though SIGINT was ignored")
def _termination(host: Host) -> None:
    with _second_daemon(ignoring=True) as (_, daemon):
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(TIMEOUT) == 0


# --------------------------------------------------------------------------- recovery


@act("recovery", "the unit runs and is ready")
def _active(host: Host) -> None:
    host.need_systemd()
    assert output("systemctl", "is-active", UNIT).strip() == "active"


@act("recovery", "restart: sandboxes and their memory stay")
def _restart(host: Host) -> None:
    host.need_systemd()
    start_counter(host.sandbox)
    text(host.sandbox, COUNT)
    before = main_pid()
    output("systemctl", "restart", UNIT)
    assert main_pid() != before
    assert text(host.sandbox, COUNT) == "2"


@act("recovery", "kill -9 of the daemon: the next one takes over")
def _kill(host: Host) -> None:
    host.need_systemd()
    if host.sandbox.exec(COUNT).exit_code != 0:
        start_counter(host.sandbox)
    count = int(text(host.sandbox, COUNT))
    before = main_pid()
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: main_pid() not in (0, before) and _answers(), "the next daemon")
    assert text(host.sandbox, COUNT) == str(count + 1)
    assert host.sandbox.restore(host.sandbox.checkpoint(), verify=True).verified


@act("recovery", "kill -9 of the daemon in mid-command: the turn is not lost")
def _kill_in_command(host: Host) -> None:
    host.need_systemd()
    host.sandbox.exec("rm -f /tmp/begun; echo before >/srv/state")
    process = host.sandbox.processes.start("touch /tmp/begun; sleep 5; echo after >/srv/state; exec sleep 1000")
    wait_for(lambda: host.sandbox.files.exists("/tmp/begun"), "the program")
    before = main_pid()
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: main_pid() not in (0, before) and _answers(), "the next daemon")
    wait_for(lambda: host.sandbox.files.read("/srv/state") == b"after\n", "the program's work")
    process.kill()


@act("recovery", "all processes of a sandbox killed: restored")
def _dead(host: Host) -> None:
    host.need_systemd()
    host.sandbox.exec("echo durable >/srv/state")
    host.sandbox.checkpoint(wait="durable")
    host.sandbox.kill()
    try:
        host.sandbox.exec("true")
        raise AssertionError("a dead sandbox ran a command")
    except SandboxDead:
        pass
    assert host.sandbox.restore(verify=True).verified
    assert text(host.sandbox, "cat /srv/state") == "durable"


@act("recovery", "stop and start: SIGTERM ends the unit in time")
def _stop(host: Host) -> None:
    host.need_systemd()
    host.sandbox.exec("echo stays >/srv/state")
    output("systemctl", "stop", UNIT)
    assert output("systemctl", "show", "--value", "--property=Result", UNIT).strip() == "success"
    output("systemctl", "start", UNIT)
    assert text(host.sandbox, "cat /srv/state") == "stays"


# --------------------------------------------------------------------------- what is left


@act("afterwards", "no process, cgroup, mount or network is left")
def _nothing_left(host: Host) -> None:
    made = set()
    for _ in range(3):
        with host.client.create(IMAGE) as sandbox:
            made.add(sandbox.id)
            sandbox.checkpoint(wait="durable")
    host.client.store.collect()
    wait_for(lambda: not _left(made), f"the end of {made}: {_left(made)} is left")
    assert "pagurus-doctor" not in Path("/proc/self/mountinfo").read_text()


def _left(sandboxes: set[str]) -> list[str]:
    """Control groups, processes and mounts of these sandboxes."""
    groups = [str(path) for path in Path("/sys/fs/cgroup").rglob("s-*") if path.name in sandboxes]
    lines = [
        path.read_bytes().decode(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()
    ]
    lines += Path("/proc/self/mounts").read_text().splitlines()
    return groups + [line for line in lines if any(name in line for name in sandboxes)]
