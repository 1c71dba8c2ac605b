"""A sandbox host for the tests of your own code: no root, no kernel, no daemon.

Owns: an in-process server that speaks the daemon's wire for the core of the SDK: sandboxes, labels, commands, sessions,
background processes, turns of several acts, files and trees, checkpoints, restore, fork, diff, kill, metrics, network
policies. Does not own: isolation, or running and connecting anything.
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

A sandbox's tree is a directory on this machine; checkpoints are copies of it, and hold the programs that ran. Verdicts
say ``files`` when the tree changed, ``processes`` when sessions or background processes began or ended, ``both``,
``none``. A background process carries out its script and writes its outputs when it starts, and ends after the script's
`delay` (``math.inf``: never by itself) or by a signal. A session runs scripted commands too: it has no variables, no
directory and no jobs of its own.

Missing, and refused with Unsupported: terminals (``pty``), ports, ``files.watch``, stdin of background processes, the
gateway, builds and other changes of images, checkpoints as content but for their list (``host.store``), tokens. Limits,
mounts, lifetimes and users are taken and have no effect; `metrics` knows processes and bytes only.
"""

from sandbox.testing.files import FakeFiles
from sandbox.testing.host import FakeHost

__all__ = ["FakeFiles", "FakeHost"]
