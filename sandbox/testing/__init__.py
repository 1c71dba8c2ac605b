"""A sandbox host for the tests of your own code: no root, no kernel, no daemon.

Owns: an in-process server that speaks the daemon's wire for the core of the SDK: sandboxes, commands, files,
checkpoints, restore, fork, diff, kill, network policies. Does not own: isolation, or running and connecting anything.
Commands do what you script; whatever is not scripted fails with exit code 127 and says so. The repository's contract
tests hold it against a real daemon.

::

    from sandbox.testing import FakeHost

    async with FakeHost() as fake:
        fake.on(r"make test", exit_code=1, stdout="1 failed")
        fake.on(r"echo (\\w+) > (\\S+)", effect=lambda files, found: files.write(found[2], found[1]))
        async with fake.client() as host, host.create("debian") as sb:
            assert (await sb.exec("make test")).exit_code == 1

``fake.refuse(sb.id, "tcp 10.0.0.1:80")`` lets ``sb.network.status()`` tell of a refusal.

A sandbox's tree is a directory on this machine; checkpoints are copies of it. Verdicts are ``files`` when the tree
changed and ``none`` otherwise: a fake has no processes. Routes beyond the core answer Unsupported.
"""

from sandbox.testing.files import FakeFiles
from sandbox.testing.host import FakeHost

__all__ = ["FakeFiles", "FakeHost"]
