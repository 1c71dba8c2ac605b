"""The story of one agent's turns in one sandbox, against real parts. Read it from the top.

An agent finds a small service broken. It looks, repairs a file, starts the service in the background
and checks it over loopback. Each turn is judged by what it did to the operating system, and only what
it changed is captured. Then everything is killed, and the sandbox comes back as it was.
"""

from __future__ import annotations

import json

import pytest

from sandbox import SandboxDead, Verdict
from sandbox.messages import CheckpointState
from tests.support.daemon_host import IMAGE, Daemon, kill_everything, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

SERVICE = """
import itertools, json, socket

config = json.load(open("/srv/config.json"))
counter = itertools.count(1)                      # lives in memory only: a restart would begin at 1 again
listener = socket.create_server(("127.0.0.1", config["port"]))
while True:
    peer, _ = listener.accept()
    with peer:
        peer.sendall(f"answer {next(counter)}".encode())
"""

REQUEST = "import socket; print(socket.create_connection(('127.0.0.1', 8080)).recv(99).decode())"


async def test_one_turn(own: Daemon) -> None:
    async with own.client() as host, host.create(IMAGE) as sandbox:
        # The world before the agent: a service whose configuration is wrong.
        await sandbox.files.write("/srv/service.py", SERVICE)
        await sandbox.files.write("/srv/config.json", '{"port": "eighty"}')
        await sandbox.checkpoint("broken")

        # It looks. Nothing in the operating system changed, so nothing is captured.
        poll = await sandbox.exec("cat /srv/config.json; ls /srv")
        assert poll.text == '{"port": "eighty"}config.json\nservice.py\n'
        assert poll.verdict is Verdict.NONE

        # It repairs a file. Files are captured, by a snapshot that freezes nobody.
        repair = await sandbox.exec("""echo '{"port": 8080}' > /srv/config.json""")
        assert repair.verdict is Verdict.FILES

        # It starts the service, which stays when the command has ended: now there are processes to lose.
        start = await sandbox.exec(
            "setsid python3 /srv/service.py >/srv/log 2>&1 & "
            "until grep -q ' 0100007F:1F90 00000000:0000 0A ' /proc/net/tcp; do :; done"
        )
        assert start.exit_code == 0
        assert start.verdict is Verdict.BOTH  # the service, and its log

        # It checks over loopback. The service's memory changed; the files did not.
        check = await sandbox.exec(["python3", "-c", REQUEST])
        assert check.text == "answer 1\n"
        assert check.verdict is Verdict.PROCESSES

        # Each answer came at once, while its checkpoint was taken behind it, in a line.
        infos = [await sandbox.durable(result) for result in (repair, start, check)]
        assert [info.state for info in infos] == [CheckpointState.DURABLE] * 3
        assert [info.verdict for info in infos] == [Verdict.FILES, Verdict.BOTH, Verdict.PROCESSES]
        assert [info.parent for info in infos] == [poll.checkpoint, repair.checkpoint, start.checkpoint]
        assert infos[0].frozen_ms == 0.0 < infos[1].frozen_ms
        assert infos[2].stored_bytes < infos[2].full_bytes / 5  # nearly all pages were known already

        # kill -9 for everything in it.
        kill_everything(sandbox.id)
        with pytest.raises(SandboxDead, match="restore"):
            while True:
                await sandbox.exec("true")

        # It comes back equal to its last checkpoint: compared, not assumed.
        restored = await sandbox.restore(verify=True)
        assert restored.checkpoint == check.checkpoint
        assert restored.differences == []

        # The service goes on counting where it was. Nothing had happened.
        assert (await sandbox.exec(["python3", "-c", REQUEST])).text == "answer 2\n"
        assert json.loads(await sandbox.files.read("/srv/config.json")) == {"port": 8080}

        # And the broken world is still there for whoever wants to try again.
        (child,) = await host.fork(poll.checkpoint)
        async with child.sandbox as again:
            assert await again.files.read("/srv/config.json") == b'{"port": "eighty"}'
