"""The synchronous SDK offers sessions, processes, terminals, ports and turns by the same bridge."""

from __future__ import annotations

import threading

import pytest

from sandbox.errors import Conflict
from sandbox.sync import Client
from tests.support.daemon_host import Daemon

PERL = r"""
use IO::Socket::INET; $| = 1;
my $s = IO::Socket::INET->new(LocalAddr => '127.0.0.1', LocalPort => 8000, Listen => 5, ReuseAddr => 1) or die;
print "up\n";
while (my $c = $s->accept) { sysread($c, my $d, 9); syswrite($c, "<$d>"); close $c }
"""


def test_everything_at_once(daemon: Daemon) -> None:
    with Client(daemon.socket) as host, host.create("debian", labels={"a": "b"}) as sb:
        with sb.sessions.open() as session:
            session.exec("cd /usr; A=1")
            assert session.exec("pwd; echo $A").text == "/usr\n1\n"
            *chunks, last = session.stream("echo x")
            running = sb.stream("echo up; exec sleep 1000000")
            assert next(running).data == b"up\n"
            running.signal("KILL")
            assert [chunk.result.exit_code for chunk in running] == [137]
            assert (b"".join(chunk.data for chunk in chunks), last.result.exit_code) == (b"x\n", 0)
        with sb.turn() as turn:
            sb.exec("echo a > /a")
            with pytest.raises(Conflict), sb.turn():
                pass
        assert turn.result.checkpoint
        process = sb.processes.start("cat; exit 3", stdin="pipe")
        process.write("hello")
        process.close_stdin()
        assert b"".join(chunk.data for chunk in process.stream()) == b"hello"
        assert process.wait() == 3 and [item.id for item in sb.processes.list()] == [process.id]
        server = sb.processes.start(["perl", "-e", PERL])
        assert next(iter(server.stream())).data == b"up\n"
        reader, writer = sb.ports.connect(8000)
        writer.write(b"one")
        assert reader.read(-1) == b"<one>"
        writer.close()
        with sb.ports.forward(8000) as address:
            assert address.startswith("127.0.0.1:")
        with sb.pty("cat") as passing:
            passing.write("x\n")
            assert b"x" in passing.read()
        assert sb.terminals.list() == []
        with sb.terminals.open("read -r x; echo got $x; exit 4") as terminal:
            threading.Timer(0.1, terminal.write, ["it\n"]).start()
            assert b"got it" in b"".join(terminal)
        assert terminal.exit_code == 4
        assert sb.metrics().processes > 0
        assert [info.id for info in host.sandboxes({"a": "b"})] == [sb.id]
