"""The hosts that Pagurus is tried on: Debian's releases with Debian's own kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class System:
    """A kind of host."""

    name: str
    title: str
    suite: str  # of Debian; one image for all systems of a suite
    backports: bool = False  # boots the kernel of the backports
    way: Literal["guest", "chroot", "container"] = "guest"  # the last two: not booted, on the kernel of this machine


SYSTEMS = {
    system.name: system
    for system in (
        System("bookworm", "Debian 12", "bookworm"),
        System("bookworm-backports", "Debian 12 with backports", "bookworm", backports=True),
        System("trixie", "Debian 13", "trixie"),
        System("trixie-backports", "Debian 13, kernel of its backports", "trixie", backports=True),
        System("sid", "Debian sid", "sid"),
        System("chroot", "Debian 12 in a chroot", "bookworm", way="chroot"),
        System("chroot-trixie", "Debian 13 as a root on that kernel", "trixie", way="chroot"),
        System("container", "Debian 13 in Docker", "trixie", way="container"),
    )
}
BACKPORTS = {"bookworm": "bookworm-backports", "trixie": "trixie-backports"}
