"""Acts in sandboxes: commands, verdicts, files, checkpoints, forks, limits, networks, isolation."""

from __future__ import annotations

import io
import tarfile
import tempfile
import threading
from pathlib import Path

from sandbox import CommandNotFound, Invalid, Limits, Network, Unsupported
from sandbox.sync import Process, Sandbox
from tests.hosts.act import IMAGE, Absent, Host, act, wait_for

# Counts requests in memory: what it answers shows whether its memory came back.
COUNTER = """
import socket
server = socket.socket(); server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", 8080)); server.listen()
print("listening", flush=True)
count = 0
while True:
    peer, _ = server.accept(); count += 1; peer.sendall(str(count).encode()); peer.close()
"""
COUNT = ["python3", "-c", "import socket; print(socket.create_connection(('127.0.0.1', 8080)).recv(9).decode())"]


def start_counter(sandbox: Sandbox) -> Process:
    """A server whose answer is the number of requests."""
    process = sandbox.processes.start(["python3", "-c", COUNTER])
    wait_for(lambda: b"listening" in process.logs().stdout, "the server in the sandbox")
    return process


def text(sandbox: Sandbox, command: str | list[str]) -> str:
    """What a command prints, which must succeed."""
    result = sandbox.exec(command, timeout=300)
    assert result.exit_code == 0, f"{command} exited with {result.exit_code}: {result.stderr.decode()[-200:]}"
    return result.text.strip()


# --------------------------------------------------------------------------- commands


@act("commands", "output, to each stream")
def _output(host: Host) -> None:
    result = host.sandbox.exec("echo out; echo error >&2")
    assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"error\n", 0)


@act("commands", "exit codes 0 to 255")
def _exit_codes(host: Host) -> None:
    for code in (0, 1, 7, 255):
        assert host.sandbox.exec(f"exit {code}").exit_code == code


@act("commands", "exit code of a signal")
def _signal(host: Host) -> None:
    assert host.sandbox.exec("kill -TERM $$").exit_code == 143
    assert host.sandbox.exec("kill -KILL $$").exit_code == 137


@act("commands", "deadline")
def _deadline(host: Host) -> None:
    result = host.sandbox.exec("sleep 1000", timeout=2)
    assert result.timed_out and host.sandbox.exec("! pgrep sleep").exit_code == 0


@act("commands", "input")
def _input(host: Host) -> None:
    assert host.sandbox.exec("wc -c", stdin=b"x" * 100_000).text.strip() == "100000"


@act("commands", "user, directory and variables")
def _user(host: Host) -> None:
    result = host.sandbox.exec("id -u; pwd; echo $NAME", user="nobody", cwd="/tmp", env={"NAME": "value"})
    assert result.text.split() == ["65534", "/tmp", "value"]


@act("commands", "a program that is not there")
def _no_program(host: Host) -> None:
    try:
        host.sandbox.exec(["no-such-program"])
    except CommandNotFound:
        return
    raise AssertionError("it was started")


@act("commands", "stream")
def _stream(host: Host) -> None:
    stream = host.sandbox.stream("for i in 1 2 3; do echo $i; done")
    assert b"".join(chunk.data for chunk in stream if chunk.stream == "stdout") == b"1\n2\n3\n"


@act("commands", "terminal")
def _terminal(host: Host) -> None:
    with host.sandbox.pty(["sh", "-c", "tty; stty size"], rows=30, columns=90) as terminal:
        shown = b"".join(terminal)
    assert b"/dev/pts/" in shown and b"30 90" in shown


@act("commands", "session")
def _session(host: Host) -> None:
    with host.sandbox.sessions.open() as session:
        session.exec("cd /usr; NAME=kept")
        assert session.exec("pwd; echo $NAME").text.split() == ["/usr", "kept"]


@act("commands", "background process, its log and exit code")
def _background(host: Host) -> None:
    process = host.sandbox.processes.start("echo begun; exit 9")
    assert process.wait(300) == 9 and process.logs().stdout == b"begun\n"


@act("commands", "metrics")
def _metrics(host: Host) -> None:
    metrics = host.sandbox.metrics()
    assert metrics.processes >= 1 and metrics.memory_bytes


# --------------------------------------------------------------------------- verdicts


@act("verdicts", "none")
def _none(host: Host) -> None:
    host.sandbox.exec("cat /etc/hostname")  # the first reads of a file may load what later ones have
    result = host.sandbox.exec("cat /etc/hostname; ls / >/dev/null")
    assert result.verdict == "none", result.reason


@act("verdicts", "files")
def _files(host: Host) -> None:
    for command in ("echo text >/srv/file", "chmod 600 /srv/file", "mv /srv/file /srv/other", "rm /srv/other"):
        result = host.sandbox.exec(command)
        assert result.verdict == "files", f"{command}: {result.verdict}, {result.reason}"


@act("verdicts", "made and removed in one turn")
def _temporary(host: Host) -> None:
    result = host.sandbox.exec("echo text >/srv/temporary; rm /srv/temporary")
    assert result.verdict in ("none", "files"), result.reason
    if result.verdict == "files":
        raise Absent("counts as a change")


@act("verdicts", "processes")
def _processes(host: Host) -> None:
    result = host.sandbox.exec("sleep 1000 >/dev/null 2>&1 </dev/null &")
    assert result.verdict == "processes", result.reason


@act("verdicts", "both")
def _both(host: Host) -> None:
    result = host.sandbox.exec("echo text >/srv/both; sleep 1000 >/dev/null 2>&1 </dev/null &")
    assert result.verdict == "both", result.reason


@act("verdicts", "a write through shared memory")
def _mapped(host: Host) -> None:
    host.sandbox.exec("head -c 8192 /dev/zero >/srv/mapped")
    program = "import mmap; f = open('/srv/mapped', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[5000] = 7; m.close()"
    result = host.sandbox.exec(["python3", "-B", "-c", program])
    assert result.verdict in ("files", "both"), result.reason


@act("verdicts", "why a file changed")
def _why(host: Host) -> None:
    before = host.sandbox.checkpoint()
    host.sandbox.exec("echo text >/srv/explained")
    change = next(item for item in host.sandbox.diff(before, why=True) if item.path == "/srv/explained")
    assert change.kind == "added" and change.why, change


# --------------------------------------------------------------------------- files


@act("files", "write, read, append")
def _write(host: Host) -> None:
    data = bytes(range(256)) * 4096
    host.sandbox.files.write("/srv/data/a.bin", data)
    host.sandbox.files.append("/srv/data/a.bin", b"end")
    assert host.sandbox.files.read("/srv/data/a.bin") == data + b"end"


@act("files", "list, move, remove")
def _list(host: Host) -> None:
    files = host.sandbox.files
    files.write("/srv/list/a", "1")
    files.move("/srv/list/a", "/srv/list/b")
    assert [entry.name for entry in files.list("/srv/list")] == ["b"]
    files.remove("/srv/list", recursive=True)
    assert not files.exists("/srv/list")


@act("files", "upload and archive")
def _upload(host: Host) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "sub").mkdir()
        Path(directory, "sub", "file").write_text("content")
        host.sandbox.files.upload(directory, "/srv/up")
    packed = b"".join(host.sandbox.files.archive("/srv/up"))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert any(name.endswith("sub/file") for name in archive.getnames())


# --------------------------------------------------------------------------- checkpoints


@act("checkpoints", "take, until it is durable")
def _checkpoint(host: Host) -> None:
    taken = host.sandbox.checkpoint("first", wait="durable")
    assert taken.state == "durable" and taken.label == "first"


@act("checkpoints", "restore files, compared")
def _restore(host: Host) -> None:
    before = host.sandbox.checkpoint()
    host.sandbox.exec("rm -r /etc/apt; echo changed >/etc/hostname")
    result = host.sandbox.restore(before, verify=True)
    assert result.verified and not result.differences
    text(host.sandbox, "test -d /etc/apt")


@act("checkpoints", "restore memory and a TCP listener, compared")
def _memory(host: Host) -> None:
    start_counter(host.sandbox)
    assert text(host.sandbox, COUNT) == "1"
    before = host.sandbox.checkpoint()
    assert text(host.sandbox, COUNT) == "2"
    assert host.sandbox.restore(before, verify=True).verified
    assert text(host.sandbox, COUNT) == "2"


@act("checkpoints", "beside a running command")
def _alongside(host: Host) -> None:
    host.sandbox.exec("rm -f /tmp/ready /tmp/go; mkfifo /tmp/go")
    results = []
    command = "echo 1 >/tmp/ready; read line </tmp/go; exit 5"
    runner = threading.Thread(target=lambda: results.append(host.sandbox.exec(command, timeout=600)))
    runner.start()
    wait_for(lambda: host.sandbox.files.exists("/tmp/ready"), "the command")
    taken = host.sandbox.checkpoint(wait="durable")
    host.sandbox.processes.start("echo >/tmp/go", ends_turn=False)
    runner.join(300)
    assert [result.exit_code for result in results] == [5]
    assert host.sandbox.restore(taken, verify=True).verified


@act("checkpoints", "roll back two turns")
def _rollback(host: Host) -> None:
    taken = []
    for number in range(3):
        result = host.sandbox.exec(f"echo {number} >/srv/number")
        taken.append(host.sandbox.captured(result))
    host.sandbox.restore(taken[0])
    assert text(host.sandbox, "cat /srv/number") == "0"


@act("checkpoints", "kill and restore")
def _kill(host: Host) -> None:
    with host.client.create(IMAGE) as sandbox:
        start_counter(sandbox)
        text(sandbox, COUNT)
        sandbox.checkpoint(wait="durable")
        sandbox.kill()
        assert sandbox.restore(verify=True).verified
        assert text(sandbox, COUNT) == "2"


@act("checkpoints", "fork two, compared")
def _fork(host: Host) -> None:
    with host.client.create(IMAGE) as sandbox:
        start_counter(sandbox)
        text(sandbox, COUNT)
        names = set()
        for child in sandbox.fork(2, verify=True):
            with child.sandbox as fork:
                assert text(fork, COUNT) == "2"
                names.add(text(fork, "cat /etc/machine-id"))
        assert len(names) == 2, "forks share an identity"


@act("checkpoints", "descent")
def _tree(host: Host) -> None:
    taken = [host.sandbox.checkpoint(f"step {number}") for number in range(2)]
    assert {item.id for item in taken} <= {item.id for item in host.sandbox.tree()}


@act("checkpoints", "the store is whole")
def _store(host: Host) -> None:
    taken = host.sandbox.checkpoint(wait="durable")
    reports = host.client.store.verify(taken)
    assert reports and not [report.damage for report in reports if report.damage], reports


# --------------------------------------------------------------------------- limits


@act("limits", "processes")
def _process_limit(host: Host) -> None:
    with host.client.create(IMAGE, limits=Limits(processes=20)) as sandbox:
        result = sandbox.exec("for i in $(seq 40); do sleep 100 & done; kill $(jobs -p)", timeout=60)
        assert b"fork" in result.stderr, result.stderr


@act("limits", "memory")
def _memory_limit(host: Host) -> None:
    with host.client.create(IMAGE, limits=Limits(memory="128MiB")) as sandbox:
        result = sandbox.exec(["python3", "-c", "b'x' * (400 << 20)"], timeout=300)
        assert result.oom_killed and result.exit_code == 137


@act("limits", "disk")
def _disk_limit(host: Host) -> None:
    try:
        sandbox = host.client.create(IMAGE, limits=Limits(disk="64MiB"))
        with sandbox as limited:
            result = limited.exec("head -c 200M /dev/zero >/srv/large", timeout=300)
            assert b"space" in result.stderr or b"quota" in result.stderr, result.stderr
    except Unsupported as refused:
        raise Absent(refused.message) from None


SERVICES = """
services:
  free: {image: debian, command: sleep infinity}
  small: {image: debian, command: sleep infinity, mem_limit: 64m}
"""


@act("limits", "memory of one service, also after a restore")
def _service_limit(host: Host) -> None:
    large = ["python3", "-c", "b'x' * (100 << 20)"]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "compose.yaml")
        file.write_text(SERVICES)
        with host.client.compose(file) as sandbox:
            for _ in range(2):
                assert sandbox.exec(large, service="free", timeout=300).exit_code == 0
                assert sandbox.exec(large, service="small", timeout=300).oom_killed
                sandbox.restore(sandbox.checkpoint(), verify=True)


@act("limits", "open files")
def _open_files(host: Host) -> None:
    with host.client.create(IMAGE, limits=Limits(open_files=64)) as sandbox:
        assert text(sandbox, "ulimit -n") == "64"


@act("limits", "a wrong one is refused")
def _wrong_limit(host: Host) -> None:
    try:
        host.client.create(IMAGE, limits=Limits(memory="lots")).__enter__()
    except Invalid:
        return
    raise AssertionError("it was taken")


# --------------------------------------------------------------------------- network


@act("network", "none: loopback alone")
def _no_network(host: Host) -> None:
    assert text(host.sandbox, "ls /proc/sys/net/ipv4/conf | grep -vx 'all\\|default' | xargs") == "lo"
    assert host.sandbox.exec("ip route get 10.1.2.3").exit_code != 0


@act("network", "open: private addresses are refused, and noted")
def _refusal(host: Host) -> None:
    with host.client.create(IMAGE, network=Network.open()) as sandbox:
        connect = "import socket; socket.create_connection(('10.1.2.3', 80), timeout=20)"
        assert sandbox.exec(["python3", "-c", connect], timeout=60).exit_code != 0
        assert sandbox.network.status().address
        wait_for(
            lambda: any("10.1.2.3" in item.what for item in sandbox.network.status().refusals), "the note of a refusal"
        )


@act("network", "change of the policy")
def _policy(host: Host) -> None:
    with host.client.create(IMAGE) as sandbox:
        sandbox.network.set(Network.allow(cidrs=["10.2.0.0/16"]))
        assert sandbox.network.status().network.cidrs == ("10.2.0.0/16",)


@act("network", "forwarded port")
def _forward(host: Host) -> None:
    import socket

    with host.client.create(IMAGE) as sandbox:
        start_counter(sandbox)
        with sandbox.ports.forward(8080) as address:
            name, _, port = address.rpartition(":")
            with socket.create_connection((name, int(port)), timeout=60) as peer:
                assert peer.recv(9) == b"1"


# --------------------------------------------------------------------------- isolation


@act("isolation", "no way to the host's processes and devices")
def _isolation(host: Host) -> None:
    refused = {
        "mount": "mount -t tmpfs none /mnt",
        "device": "mknod /srv/disk b 254 0",
        "namespace": "unshare -m true",
        "module": "test -e /proc/kcore && head -c 1 /proc/kcore | grep -q .",
        "sysfs": "echo always >/sys/kernel/mm/transparent_hugepage/enabled",
        "its own limits": "echo max >/sys/fs/cgroup/pids.max || echo max >/sys/fs/cgroup/pids/pids.max",
    }
    allowed = [what for what, command in refused.items() if host.sandbox.exec(command).exit_code == 0]
    assert not allowed, allowed
    assert int(text(host.sandbox, "ls /proc | grep -c '^[0-9]'")) < 10


@act("isolation", "its own user ids, filter and capabilities")
def _confined(host: Host) -> None:
    lines = text(host.sandbox, "cat /proc/self/status").splitlines()
    status = {name: value for name, _, value in (line.partition(":") for line in lines)}  # some have no value
    assert status["Seccomp"].strip() == "2"
    assert not int(status["CapBnd"], 16) >> 21 & 1, "CAP_SYS_ADMIN"
    inside, outside, length = text(host.sandbox, "cat /proc/self/uid_map").split()
    assert inside == "0" and int(outside) >= 65536 and length == "65536"


@act("isolation", "two sandboxes do not see each other")
def _neighbours(host: Host) -> None:
    with host.client.create(IMAGE) as other:
        start_counter(other)
        host.sandbox.exec("rm -rf /srv/mine")
        other.exec("touch /srv/mine")
        assert not host.sandbox.files.exists("/srv/mine")
        assert host.sandbox.exec(COUNT).exit_code != 0
