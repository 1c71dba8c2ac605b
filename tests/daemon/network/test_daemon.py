"""Networks of real sandboxes of a real daemon, before an internet of our own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness import own_internet as world
from daemon.network.networks import Networks
from daemon.network.table import nft
from sandbox import Client, Network, Sandbox
from sandbox.errors import Invalid, Unsupported
from tests.support.daemon_host import IMAGE, Daemon, missing, until

#: Run in a sandbox: tries each "host port", prints a JSON object of what came of it.
REACH = """
import json, socket, sys
said = {}
for each in sys.argv[1:]:
    host, port = each.rsplit(" ", 1)
    try:
        with socket.create_connection((host, int(port)), 60) as peer:
            peer.sendall(b"\\n")
            said[each] = peer.makefile().read().split()[-3]
    except OSError as error:
        said[each] = type(error).__name__
print(json.dumps(said))
"""
#: A connection that stays; SIGUSR1 asks whether it still works, the answer goes to /tmp/said.
HOLD = """
import signal, socket, sys, threading
peer = socket.create_connection((sys.argv[1], 8080), 60)
def ask(*_):
    try:
        peer.sendall(b"\\n"); said = peer.makefile().read() or "closed"
    except OSError as error: said = type(error).__name__
    open("/tmp/said", "w").write(said)
signal.signal(signal.SIGUSR1, ask)
open("/tmp/held", "w").write("yes")
while True: signal.pause()
"""
#: What a sandbox that may reach WEB reaches of it, and of the host.
GUARDED = {f"{world.WEB} 80": world.WEB, f"{world.HOST} 22": "ConnectionRefusedError"}


#: Asks for a name again and again.
REQUESTS = """
import socket, time
while True:
    try: socket.getaddrinfo("other.test", 80); print("answered", flush=True)
    except OSError as error: print(error, flush=True)
    time.sleep(0.1)
"""


async def reach(sandbox: Sandbox, *destinations: str) -> dict[str, str]:
    done = await sandbox.exec(["python3", "-c", REACH, *destinations], timeout=240)
    assert done.exit_code == 0, done
    return json.loads(done.stdout)


async def hold(sandbox: Sandbox, host: str) -> None:
    await sandbox.files.write("/tmp/hold.py", HOLD)
    done = await sandbox.exec(
        f"setsid python3 /tmp/hold.py {host} </dev/null >/tmp/log 2>&1 & echo $! >/tmp/pid;"
        " for i in $(seq 3000); do test -e /tmp/held && exit 0; sleep 0.02; done; cat /tmp/log; exit 1"
    )
    assert done.exit_code == 0, done


async def held(sandbox: Sandbox) -> str:
    """What the held connection says now."""
    done = await sandbox.exec(
        "rm -f /tmp/said; kill -USR1 $(cat /tmp/pid);"
        " for i in $(seq 3000); do test -s /tmp/said && break; sleep 0.02; done; cat /tmp/said"
    )
    return done.stdout.decode()


def requested(lines: int) -> str:
    """Shell: until the program that asks for a name has said so many lines."""
    return f"until test $(wc -l </tmp/asked) -ge {lines}; do sleep 0.02; done"


def listening(port: int) -> str:
    """Shell: until something listens there."""
    return f"until grep -q ':{port:04X} .* 0A ' /proc/net/tcp; do sleep 0.02; done"


def links(daemon: Daemon) -> set[str]:
    """Those of its sandboxes: other tests have daemons with links beside it."""
    return {path.name for path in Path("/sys/class/net").glob(f"{Networks(daemon.run).prefix}*")}


def left_behind(name: str, owner: str) -> None:
    """A link as a daemon leaves it that was killed in the middle."""
    subprocess.run(["ip", "link", "add", name, "type", "veth", "peer", "name", f"{name[:8]}p"], check=True)
    subprocess.run(["ip", "link", "set", name, "alias", owner], check=True)


def tables() -> str:
    return subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout


def elements(table: str, name: str) -> str:
    """A set of a table, as nft tells it; "" when there is none."""
    listing = ["nft", "list", "set", "inet", table, name]
    return subprocess.run(listing, capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="module")
def internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[world.Internet]:
    if reason := world.missing():
        pytest.skip(reason)
    with world.internet(tmp_path_factory.mktemp("internet")) as made:
        yield made


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, internet: world.Internet) -> Iterator[Daemon]:
    if reason := missing():
        pytest.skip(reason)
    daemon = Daemon(tmp_path_factory.mktemp("host"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGURUS_RESOLVERS", internet.resolvers)
        try:
            yield daemon.start()
        finally:
            daemon.clean()


async def test_a_sandbox_without_a_network_costs_nothing(host: Client, daemon: Daemon) -> None:

    def made() -> tuple[set[str], list[str]]:
        return links(daemon), [name for name in _tables_of(daemon) if name in tables()]

    before = made()
    async with host.create(IMAGE) as sandbox:
        assert made() == before
        assert await reach(sandbox, "web.test 80", f"{world.WEB} 80") == {
            "web.test 80": "gaierror",
            f"{world.WEB} 80": "OSError",
        }
        status = await sandbox.network.status()
        assert (status.network, status.address) == (Network.none(), None)


async def test_allowed_names_and_networks_and_nothing_else(host: Client, internet: world.Internet) -> None:
    names = ["web.test:80", "*.wild.test", "alias.test", "rebind.test", "half.test", "stray.test", "many.test"]
    network = Network.allow(names=names, cidrs=[f"{world.OTHER}:8080"])
    async with host.create(IMAGE, network=network) as sandbox:
        first = await reach(sandbox, f"{world.WEB} 80", f"{world.OTHER} 8080", f"{world.OTHER} 80")
        assert list(first.values()) == ["ConnectionRefusedError", world.OTHER, "ConnectionRefusedError"]
        assert await reach(sandbox, "web.test 80", "web.test 8080", "a.wild.test 8080", "other.test 80") == {
            "web.test 80": world.WEB,
            "web.test 8080": "ConnectionRefusedError",  # the name opens one port
            "a.wild.test 8080": world.WEB,
            "other.test 80": "gaierror",
        }
        assert await reach(sandbox, "alias.test 80", "half.test 80", "stray.test 80", "rebind.test 80") == {
            "alias.test 80": world.WEB,
            "half.test 80": world.WEB,  # its other address is nobody's to reach
            "stray.test 80": world.WEB,
            "rebind.test 80": "gaierror",
        }
        # What an answer says beside the name that was asked for opens nothing.
        assert (await reach(sandbox, f"{world.OTHER} 80"))[f"{world.OTHER} 80"] == "ConnectionRefusedError"
        many = await sandbox.exec(
            ["python3", "-c", "import socket; print(len(socket.getaddrinfo('many.test', 80, type=1)))"]
        )
        assert many.stdout == b"60\n", "a long answer comes by TCP"

        status = await sandbox.network.status()
        counters = status.counters
        assert counters.packets_refused >= 4 and counters.names_refused >= 2 and counters.names_allowed >= 7
        assert counters.packets_out and counters.packets_in and counters.bytes_in and counters.bytes_out
        refused = f"tcp {world.WEB}:80", f"tcp {world.OTHER}:80"
        await until(lambda: _explained(sandbox, *refused), "refusals are heard of")
        said = {refusal.what: refusal.why for refusal in (await sandbox.network.status()).refusals}
        assert said["name other.test"] == "the policy does not name it"
        assert f"tcp {world.OTHER}:80" in said
        assert "not on the allow list" in said[f"tcp {world.WEB}:80"]
    assert "other.test." not in internet.requested()


async def test_an_open_network_has_its_bounds(host: Client) -> None:
    async with (
        host.create(IMAGE, network=Network.open()) as sandbox,
        host.create(IMAGE, network=Network.open(cidrs=["10.99.0.0/24"])) as other,
    ):
        forbidden = [f"{world.PRIVATE} 80", "169.254.169.254 80", f"{world.HOST} 22", "198.18.0.1 80", "192.0.0.1 80"]
        neighbour = (await other.network.status()).address
        result = await reach(sandbox, f"{world.WEB} 80", "other.test 80", *forbidden, f"{neighbour} 80")
        assert list(result.values()) == [world.WEB, world.OTHER, *["ConnectionRefusedError"] * 6]
        assert set((await reach(other, f"{world.PRIVATE} 80", "private.test 8080")).values()) == {world.PRIVATE}
        assert (await reach(sandbox, "private.test 8080"))["private.test 8080"] == "gaierror"


async def test_a_changed_policy_judges_connections_again(host: Client) -> None:
    async with host.create(IMAGE) as sandbox:
        status = await sandbox.network.set(Network.allow(cidrs=[world.WEB, world.OTHER]))
        assert status.address is not None
        await hold(sandbox, world.WEB)
        await sandbox.network.set(Network.allow(cidrs=[world.WEB]))
        assert "served" in await held(sandbox), "what is still allowed goes on"
        await sandbox.exec("rm /tmp/held; kill $(cat /tmp/pid)")
        await hold(sandbox, world.WEB)
        await sandbox.network.set(Network.allow(cidrs=[world.OTHER]))
        assert await held(sandbox) in ("ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError")
        with pytest.raises(Invalid):
            await sandbox.network.set(Network.allow(cidrs=["169.254.169.254"]))
        assert (await sandbox.network.status()).network == Network.allow(cidrs=[world.OTHER])
        assert (await sandbox.network.set(Network.none())).address is None
        assert (await reach(sandbox, f"{world.OTHER} 80"))[f"{world.OTHER} 80"] == "OSError"


async def test_forks_inherit_the_policy_and_get_an_address_of_their_own(host: Client, daemon: Daemon) -> None:
    before = links(daemon)
    async with host.create(IMAGE, network=Network.allow(names=["web.test"])) as sandbox:
        mine = (await sandbox.network.status()).address
        # A server on the sandbox's own address, which no fork has.
        await sandbox.files.write(
            "/tmp/serve.py", f"import socket, time\ns = socket.create_server(('{mine}', 99))\ntime.sleep(9999)\n"
        )
        await sandbox.exec(f"setsid python3 /tmp/serve.py </dev/null >/dev/null 2>&1 & {listening(99)}")
        forks = [item.sandbox for item in await sandbox.fork(2)]
        observed = {mine}
        for fork in forks:
            assert fork is not None
            status = await fork.network.status()
            assert status.address not in observed and status.network == Network.allow(names=["web.test"])
            observed.add(status.address)
            assert await reach(fork, "web.test 80", f"{mine} 99") == {
                "web.test 80": world.WEB,
                f"{mine} 99": "ConnectionRefusedError",
            }
            served = await fork.exec("cat /proc/net/tcp | grep -c ':0063 .* 0A '")
            assert served.stdout == b"1\n"
            await fork.remove()
    assert links(daemon) == before


async def test_a_restore_closes_what_leads_outside_and_keeps_what_listens(host: Client) -> None:
    network = Network.allow(cidrs=[world.WEB], names=["web.test"])
    async with host.create(IMAGE, network=network) as sandbox:
        address = (await sandbox.network.status()).address
        await sandbox.files.write(
            "/tmp/serve.py",
            "import socket\ns = socket.create_server(('127.0.0.1', 99))\n"
            "while True: c, _ = s.accept(); c.sendall(b'still here\\n'); c.close()\n",
        )
        await sandbox.exec(f"setsid python3 /tmp/serve.py </dev/null >/dev/null 2>&1 & {listening(99)}")
        await hold(sandbox, world.WEB)
        before = await sandbox.checkpoint("connected")
        assert "served" in await held(sandbox)
        await sandbox.restore(before)
        assert await held(sandbox) in ("closed", "BrokenPipeError")
        requested = await sandbox.exec(
            ["python3", "-c", "import socket; print(socket.create_connection(('127.0.0.1', 99)).recv(99))"]
        )
        assert b"still here" in requested.stdout
        assert (await sandbox.network.status()).address == address
        assert await reach(sandbox, "web.test 80") == {"web.test 80": world.WEB}


async def test_the_network_outlives_the_daemon_and_strays_do_not(daemon: Daemon) -> None:
    network = Network.allow(cidrs=[world.WEB], names=["other.test"])
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE, network=network)
        doomed = await host.create(IMAGE, network=Network.open())
        stray = next(
            item
            for item in links(daemon)
            if (Path("/sys/class/net") / item / "ifalias").read_text().strip() == doomed.id
        )
        await hold(sandbox, world.WEB)
        assert await reach(sandbox, "other.test 80") == {"other.test 80": world.OTHER}
        await sandbox.files.write("/tmp/asks.py", REQUESTS)
        patient = {"RES_OPTIONS": "timeout:60"}  # a busy machine takes its time to start a daemon
        await sandbox.exec(
            f"setsid python3 /tmp/asks.py </dev/null >/tmp/asked 2>&1 & echo $! >/tmp/asker; {requested(3)}",
            env=patient,
        )
        await doomed.remove()
        assert stray not in links(daemon)
    daemon.kill()
    left_behind(stray, doomed.id)
    daemon.start()
    assert stray not in links(daemon)
    async with daemon.client() as host:
        again = await host.get(sandbox.id)
        assert "served" in await held(again), "it was not cut"
        # Names that were asked for while no daemon lived were answered late, not refused.
        count = len((await again.files.read("/tmp/asked")).splitlines())
        said = (await again.exec(f"{requested(count + 3)}; kill $(cat /tmp/asker); sort -u /tmp/asked")).text
        assert said == "answered\n"
        assert await reach(again, "other.test 80", f"{world.WEB} 80", f"{world.OTHER} 8080") == {
            "other.test 80": world.OTHER,
            f"{world.WEB} 80": world.WEB,
            f"{world.OTHER} 8080": world.OTHER,  # opened by the name
        }
        await again.remove()


async def test_nobody_takes_the_rules_of_a_running_daemon(host: Client, daemon: Daemon) -> None:
    """What the firewall service of a distribution does at a reload, here to our own table alone."""
    table = Networks(daemon.run).table
    if not table.ownable:
        pytest.skip("before Linux 6.9 no table outlives its owner")
    async with host.create(IMAGE, network=Network.allow(cidrs=[world.WEB])) as sandbox:
        await hold(sandbox, world.WEB)
        with pytest.raises(Unsupported, match="not permitted"):
            nft("delete", "table", "inet", table.name)
        assert await reach(sandbox, f"{world.WEB} 80", f"{world.HOST} 22") == GUARDED
        assert "served" in await held(sandbox)


async def test_rules_flushed_while_no_daemon_runs_come_back(daemon: Daemon) -> None:
    (name,) = _tables_of(daemon)
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE, network=Network.allow(cidrs=[world.WEB]))
        await hold(sandbox, world.WEB)
        # No dump is under way: at its end the kernel asks the other end whether it is there (a window probe), and what
        # is sent without rules is not translated, so that the other end resets the connection.
        await sandbox.checkpoint(wait="durable")
    daemon.kill()
    nft("delete", "table", "inet", name)
    daemon.start()
    async with daemon.client() as host:
        again = await host.get(sandbox.id)
        await until(lambda: world.WEB in elements(name, "cidrs"), "the table is back")
        assert await reach(again, f"{world.WEB} 80", f"{world.HOST} 22") == GUARDED
        assert "served" in await held(again)
        await again.remove()


async def test_nothing_is_left(daemon: Daemon) -> None:
    """Last: a daemon that stops without sandboxes takes its table with it."""
    async with daemon.client() as host:
        sandbox = await host.create(IMAGE, network=Network.open())
        (mine,) = {line.split()[-1] for line in tables().splitlines() if "pagurus_" in line} & _tables_of(daemon)
        await sandbox.remove()
        assert mine in tables()
    daemon.kill()
    daemon.start()
    assert mine not in tables(), "a former daemon left it, for nobody"
    async with daemon.client() as host:
        await (await host.create(IMAGE, network=Network.open())).remove()
        assert mine in tables()
    daemon.stop()
    assert mine not in tables()
    daemon.start()


async def _explained(sandbox: Sandbox, *target: str) -> bool:
    """The kernel tells of refused packets after it has refused them."""
    return set(target) <= {refusal.what for refusal in (await sandbox.network.status()).refusals}


def _tables_of(daemon: Daemon) -> set[str]:
    return {Networks(daemon.run).table.name}
