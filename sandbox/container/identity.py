"""What distinguishes a sandbox from its forks: host name, machine id, and what programs of its own must renew.

Guarantee: the machine id of a sandbox is the same for all its life and no other sandbox has it; its file tree does not
hold it. Hooks run in the fork, as its root, before anybody else can run a command there.

`/etc/machine-id` is a link of the runtime layer to the NIS domain name, which the kernel keeps for each UTS namespace
and CRIU brings back like the host name. So a fork gets another id without a change of its files, and a checkpoint
equals what is restored from it. An image's own file is hidden; a sandbox may replace the link by a file, which its
forks then share.

The host name resolves by a line of `/etc/hosts`, which a new sandbox gets, as in Docker. The file is part of the tree,
so that a program's own changes to it are in every checkpoint; a fork's line is given its own name before anything runs
there.

Entropy: the kernel's generator is the host's, so `getrandom` never repeats, and neither does the vDSO's (its state
lies in memory that CRIU leaves out, so that it starts afresh). Generators that a program keeps in its own memory
(OpenSSL before 3, Python's `random`, session keys) do repeat in every fork: a hook makes such a program seed again.
"""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import re
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from sandbox.container import services
from sandbox.errors import Invalid, NotFound, RestoreFailed
from sandbox.messages import Composition
from sandbox.tree import files
from sandbox.tree.safe_path import NO_LINKS, as_sandbox_root, directory, openat2, opened

if TYPE_CHECKING:
    from sandbox.container.container import Container

HOOKS = "etc/pagurus/fork.d"
HOSTS = "/etc/hosts"
MAX_HOSTS = 1 << 20  # bytes; a longer one is left as it is
_LOCAL_NAMES = b"127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"  # of an image without the file
_OWN_LINE = re.compile(rb"^127\.0\.1\.1\t\S+\t# this sandbox$\n?", re.M)
TIMEOUT = 10.0  # seconds for all hooks of a fork
SHOWN = 300  # characters of a failed hook's output
_RUN = f'for hook in /{HOOKS}/*; do [ ! -x "$hook" ] || "$hook" || {{ echo "$hook: exit $?" >&2; exit 1; }}; done'


def machine_id(sandbox: str) -> str:
    """The id of a sandbox, as /etc/machine-id holds it: 32 hexadecimal digits.

    >>> len(machine_id("s-0123456789"))
    32
    """
    return blake3(sandbox.encode(), derive_key_context="pagurus 2026 machine id").hexdigest(length=16)


def hosts_for(text: bytes, hostname: str, *, fresh: bool) -> bytes:
    """What /etc/hosts is for a sandbox of this name. Without our line it is one that the sandbox has made its own,
    unless it is `fresh`.

    >>> hosts_for(b"127.0.0.1 localhost", "crab", fresh=True)
    b'127.0.0.1 localhost\\n127.0.1.1\\tcrab\\t# this sandbox\\n'
    >>> hosts_for(b"127.0.1.1\\tcrab\\t# this sandbox\\n", "fork", fresh=False)
    b'127.0.1.1\\tfork\\t# this sandbox\\n'
    """
    line = b"127.0.1.1\t%s\t# this sandbox\n" % hostname.encode()
    changed, result = _OWN_LINE.subn(lambda _: line, text)
    if result or not fresh:
        return changed
    text = text or _LOCAL_NAMES
    return text + (b"" if text.endswith(b"\n") else b"\n") + line


def name_host(container: Container, *, fresh: bool) -> None:
    """Have the host name resolve; `fresh`: nothing has run in its tree yet. Blocks. Nothing may run during it."""
    inside, base, text = container.inside, container.spec.uid_base, b""
    with contextlib.suppress(NotFound):
        text = files.read(inside, HOSTS, limit=MAX_HOSTS)
    changed = hosts_for(text, container.spec.hostname[:64], fresh=fresh)
    if changed != text and len(text) < MAX_HOSTS:
        if fresh:
            files.replace(inside, base, HOSTS, changed)
        else:  # programs may have it open, or watch it
            files.write(inside, base, HOSTS, io.BytesIO(changed))
    if fresh:
        _show_directory(container)


def name_services(container: Container, composition: Composition, *, fresh: bool) -> None:
    """Likewise in the root of each service, where its file also names the others. Blocks."""
    base, hostname = container.spec.uid_base, container.spec.hostname[:64]
    for name in composition.services:
        inside = container.inside.below(services.root(name))
        if fresh:
            text = hosts_for(services.hosts(composition, name), hostname, fresh=True)
            files.replace(inside, base, HOSTS, text)
            files.replace(inside, base, "/etc/resolv.conf", services.RESOLV_CONF)
            continue
        with contextlib.suppress(
            NotFound, Invalid
        ):  # a service has made its file something else: the others have theirs
            text = files.read(inside, HOSTS, limit=MAX_HOSTS)
            changed = hosts_for(text, hostname, fresh=False)
            if changed != text and len(text) < MAX_HOSTS:
                files.write(inside, base, HOSTS, io.BytesIO(changed))


def _show_directory(container: Container) -> None:
    """Give /etc the owner, mode and times that its image has: the runtime layer has one of its own above that."""
    name, base = posixpath.dirname(HOSTS), container.spec.uid_base
    flags = os.O_RDONLY | os.O_DIRECTORY
    with directory(container.spec.image) as image, opened(image, name, flags, resolve=NO_LINKS) as etc:
        status = os.fstat(etc)
    with container.inside.opened() as root, as_sandbox_root(base), opened(root, name, flags) as etc:
        os.fchown(etc, base + status.st_uid, base + status.st_gid)
        os.fchmod(etc, stat.S_IMODE(status.st_mode))
        os.utime(etc, ns=(status.st_atime_ns, status.st_mtime_ns))


def without_host(layer: Path, upper: Path | None, below: Path) -> bool:
    """Fill an empty directory with what hides the line of a sandbox in its tree, as one more layer on top of it: an
    image belongs to no sandbox. `below`: the tree of its own image. False: there is nothing to hide.

    A file that differs from the image's in that line alone is again what it was there, times included.
    """
    etc, name = posixpath.split(HOSTS)
    with contextlib.ExitStack() as stack, contextlib.suppress(NotFound, Invalid):
        if upper is None:
            return False

        def part(top: Path, path: str) -> int:
            return stack.enter_context(opened(stack.enter_context(directory(top)), path, os.O_RDONLY, resolve=NO_LINKS))

        changed, dir_path = part(upper, HOSTS), part(upper, etc)
        text = os.read(changed, MAX_HOSTS)
        rest = _OWN_LINE.sub(b"", text)
        if rest == text or len(text) == MAX_HOSTS:
            return False
        made = layer / etc.lstrip("/")
        made.mkdir()
        (made / name).write_bytes(rest)
        status = os.fstat(changed)
        times = [(made / name, status), (made, os.fstat(dir_path))]
        for path, former in times:
            os.chown(path, former.st_uid, former.st_gid)
            path.chmod(stat.S_IMODE(former.st_mode))
        with contextlib.suppress(NotFound, Invalid):
            old = part(below, HOSTS)
            if os.read(old, MAX_HOSTS) == rest:
                times[0] = made / name, os.fstat(old)
        for path, former in times:
            os.utime(path, ns=(former.st_atime_ns, former.st_mtime_ns))
        return True
    return False


async def run_fork_hooks(container: Container, *, checkpoint: str) -> bool:
    """Run the executables in /etc/pagurus/fork.d in their order; False: there are none. A failing one fails the fork.

    They get PAGURUS_SANDBOX, PAGURUS_CHECKPOINT (what was forked) and PAGURUS_SEED (64 hexadecimal digits, fresh).
    """
    spec = container.spec
    if not any(_has_hooks(layer) for layer in (container.tree / "upper", spec.image)):
        return False
    done = await container.exec(
        ["/bin/sh", "-c", _RUN],
        env={"PAGURUS_SANDBOX": spec.id, "PAGURUS_CHECKPOINT": checkpoint, "PAGURUS_SEED": secrets.token_hex(32)},
        timeout=TIMEOUT,
    )
    if done.exit_code:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-SHOWN:]
        why = f"took more than {TIMEOUT:g} s" if done.timed_out else f"failed: {said}"
        raise RestoreFailed(f"a fork hook {why}", hint=f"look into /{HOOKS} of the sandbox", sandbox=spec.id)
    return True


def _has_hooks(layer: Path) -> bool:
    """Whether there is such a directory, by no symbolic link: the layer's content is the sandbox's."""
    with contextlib.suppress(OSError), directory(layer) as root:
        os.close(openat2(root, HOOKS, os.O_PATH | os.O_DIRECTORY, resolve=NO_LINKS))
        return True
    return False
