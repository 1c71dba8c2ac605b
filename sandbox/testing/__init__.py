"""A sandbox host for the tests of your own code: no root, no kernel, no daemon.

Commands do what you script; whatever is not scripted fails with exit code 127 and says so. The repository's contract
tests hold it against a real daemon.

::

    from sandbox.testing import FakeHost

    async with FakeHost() as fake:
        fake.on(r"make test", exit_code=1, stdout="1 failed")
        fake.on(r"echo (\\w+) > (\\S+)", effect=lambda files, found: files.write(found[2], found[1]))
        async with fake.client() as host, host.create("debian") as sb:
            assert (await sb.exec("make test")).exit_code == 1

A sandbox's tree is a directory on this machine; checkpoints are copies of it. Verdicts say ``files`` when the tree
changed, else ``none``.

Missing, and refused with Unsupported: what lives on after a command (background processes, sessions, terminals, ports),
turns of several acts, ``files.watch``, ``metrics``, ``network``, the gateway, builds and other changes of images,
checkpoints as content but for their list (``host.store``), tokens. Limits, networks, mounts, lifetimes and users are
taken and have no effect.
"""

from sandbox.testing.files import FakeFiles
from sandbox.testing.host import FakeHost

__all__ = ["FakeFiles", "FakeHost"]
