"""What tells one sandbox from its forks: host name, machine id, and what programs of its own must renew.

Owns: the machine id, the fork hooks. Does not own: ids of users, network (the container), when a fork is made.
Guarantee: the machine id of a sandbox is the same for all its life and no other sandbox has it; its file tree does not
hold it. Hooks run in the fork, as its root, before anybody else can run a command there.

`/etc/machine-id` is a link of the runtime layer to the NIS domain name, which the kernel keeps for each UTS namespace
and CRIU brings back like the host name. So a fork gets another id without a change of its files, and a checkpoint
equals what is restored from it. An image's own file is hidden; a sandbox may replace the link by a file, which its
forks then share.

Entropy: the kernel's generator is the host's, so `getrandom` never repeats, and neither does the vDSO's (its state
lies in memory that CRIU leaves out, so that it starts anew). Generators that a program keeps in its own memory
(OpenSSL before 3, Python's `random`, session keys) do repeat in every fork: a hook tells such a program to seed anew.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from sandbox.errors import RestoreFailed
from sandbox.tree.safe_path import NO_LINKS, directory, openat2

if TYPE_CHECKING:
    from sandbox.container.container import Container

HOOKS = "etc/pagurus/fork.d"
TIMEOUT = 10.0  # seconds for all hooks of a fork
SHOWN = 300  # characters of a failed hook's output
_RUN = f'for hook in /{HOOKS}/*; do [ ! -x "$hook" ] || "$hook" || {{ echo "$hook: exit $?" >&2; exit 1; }}; done'


def machine_id(sandbox: str) -> str:
    """The id of a sandbox, as /etc/machine-id holds it: 32 hexadecimal digits.

    >>> len(machine_id("s-0123456789"))
    32
    """
    return blake3(sandbox.encode(), derive_key_context="pagurus 2026 machine id").hexdigest(length=16)


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
        raise RestoreFailed(f"a fork hook {why}", remedy=f"look into /{HOOKS} of the sandbox", sandbox=spec.id)
    return True


def _has_hooks(layer: Path) -> bool:
    """Whether there is such a directory, by no symbolic link: the layer's content is the sandbox's."""
    with contextlib.suppress(OSError), directory(layer) as root:
        os.close(openat2(root, HOOKS, os.O_PATH | os.O_DIRECTORY, resolve=NO_LINKS))
        return True
    return False
