"""What clients of E2B take for granted in a sandbox: somebody called ``user`` with a home.

Owns: making them where an image has none. Does not own: how a command runs.
"""

from __future__ import annotations

import asyncio

from daemon.turns.turns import LiveSandbox
from sandbox.container import users
from sandbox.errors import Conflict
from sandbox.messages import ExecRequest

HOME = "/home/user"
# Only what every image with a shell has: no useradd, which differs, or is not there.
_SCRIPT = r"""
set -e
id=1000
while cut -d: -f3 /etc/passwd | grep -qx $id; do id=$((id + 1)); done
echo "user:x:$id:$id::/home/user:$([ -x /bin/bash ] && echo /bin/bash || echo /bin/sh)" >>/etc/passwd
grep -q '^user:' /etc/group || echo "user:x:$id:" >>/etc/group
[ ! -e /etc/shadow ] || echo 'user:*:19000:0:99999:7:::' >>/etc/shadow
[ ! -d /etc/sudoers.d ] || { echo 'user ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/user; chmod 440 /etc/sudoers.d/user; }
mkdir -p /home/user
[ ! -d /etc/skel ] || cp -r /etc/skel/. /home/user
chown -R $id:$id /home/user
"""


async def prepare(live: LiveSandbox) -> None:
    """`live` was just made. Its default user exists from now on."""
    if live.row.user != "user":
        return
    if "user" in await asyncio.to_thread(users.existing_users, live.container.inside):
        return
    made = await live.exec(ExecRequest(command=_SCRIPT, user="root", cwd="/", timeout=60))
    if made.exit_code != 0:
        raise Conflict(
            f"no user could be made in this image: {made.stderr.decode(errors='replace')[:500]}",
            hint="give the image a shell, or a USER of its own",
            sandbox=live.row.id,
        )
