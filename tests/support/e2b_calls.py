"""Runs in the environment of an unmodified client of E2B: each call once, and what came of it as lines of JSON.

``python e2b_calls.py`` with E2B_API_KEY, E2B_API_URL and E2B_SANDBOX_URL set, and nothing else. It knows nothing of us.
"""

import json
import threading
import traceback
import urllib.error
import urllib.request

import e2b
from e2b import CommandExitException, PtySize, Sandbox

CALLS = []


def call(function):
    CALLS.append(function)
    return function


class Absent(Exception):
    """This version of the client has no such call."""


class Refused(Exception):
    """The server says by name that it does not do this."""


def method(sandbox, *names):
    for name in names:
        if hasattr(sandbox, name):
            return getattr(sandbox, name)
    raise Absent(names[0])


def refused(kind, act):
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"not refused by {kind}")


@call
def foreground(sandbox):
    result = sandbox.commands.run("echo out; echo err >&2; id -un; pwd; echo $COLOUR")
    assert (result.stdout, result.stderr) == ("out\nuser\n/home/user\nred\n", "err\n"), result
    assert result.exit_code == 0


@call
def exit_codes(sandbox):
    error = refused(CommandExitException, lambda: sandbox.commands.run("echo so far; exit 3"))
    assert (error.exit_code, error.stdout) == (3, "so far\n")


@call
def stream(sandbox):
    observed = []
    sandbox.commands.run("printf 1; printf 2 >&2", on_stdout=observed.append, on_stderr=observed.append)
    assert sorted(observed) == ["1", "2"]


@call
def large_output(sandbox):
    assert len(sandbox.commands.run("head -c 9000000 /dev/zero | tr '\\0' x").stdout) == 9_000_000


@call
def users_and_directories(sandbox):
    assert sandbox.commands.run("id -u", user="root").stdout == "0\n"
    assert sandbox.commands.run("pwd", cwd="/tmp").stdout == "/tmp\n"
    assert sandbox.commands.run("echo $A", envs={"A": "b c"}).stdout == "b c\n"
    refused(e2b.AuthenticationException, lambda: sandbox.commands.run("id", user="nobody-here"))
    assert "does not exist" in str(refused(e2b.SandboxException, lambda: sandbox.commands.run("id", cwd="/none")))


@call
def background_stdin_and_kill(sandbox):
    handle = sandbox.commands.run("cat", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "hello\n")
    listed = {item.pid: item.args[-1] for item in sandbox.commands.list()}
    assert listed[handle.pid] == "cat"
    assert sandbox.commands.run(f"cat /proc/{handle.pid}/comm").stdout == "cat\n"  # the pid is that of inside
    observed = threading.Event()
    reader = threading.Thread(
        target=lambda: refused(Exception, lambda: handle.wait(on_stdout=lambda _: observed.set()))
    )
    reader.start()
    assert observed.wait(60)
    assert sandbox.commands.kill(handle.pid) is True
    reader.join(60)
    assert handle.pid not in {item.pid for item in sandbox.commands.list()}
    assert sandbox.commands.kill(99_999) is False


@call
def disconnect_and_connect(sandbox):
    handle = sandbox.commands.run("until [ -e /tmp/go ]; do sleep 0.05; done; echo late", background=True)
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid)
    sandbox.files.write("/tmp/go", "")
    assert again.wait().stdout == "late\n"


@call
def timeouts(sandbox):
    refused(e2b.TimeoutException, lambda: sandbox.commands.run("sleep 987654", timeout=1))
    while "987654" in str([item.args for item in sandbox.commands.list()]):
        pass  # the client gives up by its own clock, a moment before the server ends it


@call
def files(sandbox):
    assert sandbox.files.make_dir("tree/deep") is True
    assert sandbox.files.make_dir("tree/deep") is False
    written = sandbox.files.write("tree/deep/a", "text")
    assert (written.name, written.path) == ("a", "/home/user/tree/deep/a")
    assert sandbox.files.read("tree/deep/a") == "text"
    sandbox.files.write("/tmp/bytes", b"\0\1" * 1000)
    assert bytes(sandbox.files.read("/tmp/bytes", format="bytes")) == b"\0\1" * 1000
    assert b"".join(sandbox.files.read("/tmp/bytes", format="stream")) == b"\0\1" * 1000
    several = getattr(sandbox.files, "write_files", sandbox.files.write)
    assert [item.path for item in several([{"path": "m", "data": "1"}, {"path": "/tmp/n", "data": "2"}])] == [
        "/home/user/m",
        "/tmp/n",
    ]
    assert {item.path for item in sandbox.files.list("tree", depth=2)} == {
        "/home/user/tree/deep",
        "/home/user/tree/deep/a",
    }
    entry = sandbox.files.get_info("tree/deep/a")
    assert (entry.owner, entry.group, entry.permissions, entry.size) == ("user", "user", "-rw-r--r--", 4), entry
    assert sandbox.files.rename("tree/deep/a", "tree/b").path == "/home/user/tree/b"
    assert (sandbox.files.exists("tree/deep/a"), sandbox.files.exists("tree/b")) == (False, True)
    sandbox.files.remove("tree")
    assert not sandbox.files.exists("tree")
    refused(e2b.NotFoundException, lambda: sandbox.files.read("/none"))
    refused(e2b.InvalidArgumentException, lambda: sandbox.files.read("/tmp"))


@call
def signed_addresses(sandbox):
    sandbox.files.write("/tmp/signed", "for all")
    address = sandbox.download_url("/tmp/signed", use_signature_expiration=600)
    assert urllib.request.urlopen(address).read() == b"for all"
    other = address.replace("signed&", "bytes&")
    assert other != address
    assert refused(urllib.error.HTTPError, lambda: urllib.request.urlopen(other)).code == 401


@call
def watch(sandbox):
    sandbox.files.make_dir("/tmp/watched")
    handle = sandbox.files.watch_dir("/tmp/watched")
    sandbox.files.write("/tmp/watched/f", "1")
    observed = []
    while "write" not in {item.type.value for item in observed}:
        observed += handle.get_new_events()
    assert {item.name for item in observed} == {"f"}
    handle.stop()


@call
def pty(sandbox):
    observed = bytearray()
    handle = sandbox.pty.create(PtySize(rows=24, cols=80))
    sandbox.pty.resize(handle.pid, PtySize(rows=31, cols=101))
    sandbox.pty.send_stdin(handle.pid, b"stty size; tty; exit 4\n")
    error = refused(CommandExitException, lambda: handle.wait(on_pty=observed.extend))
    assert error.exit_code == 4
    assert b"31 101" in observed and b"/dev/pts/" in observed, bytes(observed)


@call
def time_and_info(sandbox):
    before = sandbox.get_info()
    sandbox.set_timeout(3000)
    after = sandbox.get_info()
    assert (after.end_at - before.end_at).total_seconds() > 1000
    assert after.metadata == {"purpose": "a test, of calls", "x": "1"}
    assert after.sandbox_id == sandbox.sandbox_id and "-" not in after.sandbox_id
    assert sandbox.is_running() is True


@call
def list_sandboxes(sandbox):
    query = e2b.SandboxQuery(metadata={"purpose": "a test, of calls"})
    assert sandbox.sandbox_id in {item.sandbox_id for item in Sandbox.list(query=query).next_items()}
    assert Sandbox.list(query=e2b.SandboxQuery(metadata={"purpose": "another"})).next_items() == []


@call
def connect_by_id(sandbox):
    again = Sandbox.connect(sandbox.sandbox_id)
    assert again.commands.run("echo same").stdout == "same\n"


@call
def metrics(sandbox):
    [sample] = sandbox.get_metrics()
    assert sample.mem_used > 0 and sample.disk_total > 0


@call
def ports(sandbox):
    sandbox.files.write("/tmp/www/page", "from inside")
    server = "cd /tmp/www && exec python3 -m http.server 8123"
    sandbox.commands.run(server, background=True)
    waiting = "until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8123))'; do :; done"
    sandbox.commands.run(f"{waiting} 2>/dev/null")
    host = sandbox.get_host(8123)
    assert host.startswith(f"8123-{sandbox.sandbox_id}.")
    headers = {"Host": host, "E2b-Traffic-Access-Token": sandbox.traffic_access_token}
    address = f"{sandbox.connection_config.get_sandbox_url(sandbox.sandbox_id, '')}/page"
    requested = urllib.request.Request(address, headers=headers)
    assert urllib.request.urlopen(requested).read() == b"from inside"
    stranger = urllib.request.Request(address, headers={"Host": host})
    assert refused(urllib.error.HTTPError, lambda: urllib.request.urlopen(stranger)).code == 401
    closed = urllib.request.Request(address, headers={**headers, "Host": host.replace("8123-", "8124-")})
    error = refused(urllib.error.HTTPError, lambda: urllib.request.urlopen(closed))
    assert error.code == 502 and "port is not open" in json.loads(error.read())["message"]


@call
def pause_and_resume(sandbox):
    sandbox.commands.run("sleep 4321", background=True)
    method(sandbox, "pause", "beta_pause")()
    assert "paused" in {
        item.state.value for item in Sandbox.list().next_items() if item.sandbox_id == sandbox.sandbox_id
    }
    again = Sandbox.connect(sandbox.sandbox_id, timeout=3000)
    assert "sleep 4321" in {item.args[-1] for item in again.commands.list()}


@call
def snapshots(sandbox):
    sandbox.files.write("/tmp/state", "saved")
    snapshot = method(sandbox, "create_snapshot")()
    sandbox.files.write("/tmp/state", "later")
    assert snapshot.snapshot_id in {item.snapshot_id for item in Sandbox.list_snapshots().next_items()}
    child = Sandbox.create(snapshot.snapshot_id, timeout=600)
    assert child.files.read("/tmp/state") == "saved"
    assert child.commands.run("pgrep -f 'sleep 4321' >/dev/null; echo $?").stdout == "0\n"
    child.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) is True


@call
def fork(sandbox):
    children = method(sandbox, "fork")(count=2, timeout=600)
    assert len(children) == 2
    for child in children:
        assert child.files.read("/tmp/state") == "later"
        child.kill()


@call
def no_volumes(sandbox):
    refusal("volume", volume_mounts={"/data": "mine"})


@call
def no_mcp(sandbox):
    refusal("mcp", mcp={"exa": {"apiKey": "none"}})


def refusal(word, **options):
    """The creation is refused, and what is refused is named."""
    try:
        error = refused(e2b.SandboxException, lambda: Sandbox.create(timeout=60, **options))
    except TypeError:
        raise Absent(word) from None
    assert word in str(error).lower(), error
    raise Refused(word)


@call
def kill(sandbox):
    assert sandbox.kill() is True
    assert sandbox.kill() is False
    refused(Exception, lambda: sandbox.commands.run("true"))
    assert sandbox.is_running() is False


def main():
    metadata = {"purpose": "a test, of calls", "x": "1"}
    sandbox = Sandbox.create(timeout=1200, metadata=metadata, envs={"COLOUR": "red"}, allow_internet_access=False)
    for item in CALLS:
        outcome = "passed"
        try:
            item(sandbox)
        except Absent as error:
            outcome = f"absent: {error}"
        except Refused as error:
            outcome = f"refused: {error}"
        except Exception:  # noqa: BLE001 - whatever it is, it is told
            outcome = traceback.format_exc()
        print(json.dumps({"call": item.__name__, "outcome": outcome}), flush=True)


main()
