"""Where Pagurus keeps things on a host.

=============  =======================  ==============================================
what           default                  override
=============  =======================  ==============================================
prefix         ``<checkout>/.prefix``   ``PAGURUS_PREFIX``  built parts: criu, shim, BPF object
state          ``/var/lib/pagurus``     ``PAGURUS_STATE``   btrfs pool, images, catalogue, checkpoints
run            ``/run/pagurus``         ``PAGURUS_RUN``     sockets, captured-not-yet-durable dumps
=============  =======================  ==============================================

An installed package has no checkout: there the prefix is ``pagurus_runtime`` next to this package.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sandbox.errors import Invalid

_LAYER = re.compile(r"[0-9a-f]{32}")
CHECKOUT = Path(__file__).resolve().parent.parent  # of an installed package: site-packages
PREBUILT = CHECKOUT / "pagurus_runtime"  # parts that a package brings


def prefix() -> Path:
    """Directory of the built parts: what ``make setup`` made in a checkout, or what a package brought."""
    named = os.environ.get("PAGURUS_PREFIX")
    if named:
        return Path(named)
    return PREBUILT if PREBUILT.is_dir() else CHECKOUT / ".prefix"


def is_checkout() -> bool:
    """Whether this runs from a checkout, where `make` is the way to every part; not from an installed package."""
    return (CHECKOUT / "Makefile").is_file()


def state() -> Path:
    """Directory that must survive a reboot."""
    return Path(os.environ.get("PAGURUS_STATE", "/var/lib/pagurus"))


def run() -> Path:
    """Directory that need not survive a reboot."""
    return Path(os.environ.get("PAGURUS_RUN", "/run/pagurus"))


def cache() -> Path:
    """Directory of this user for what can be made again (XDG base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagurus"


def api_socket() -> Path:
    """Unix socket of the local daemon's API."""
    return run() / "pagurus.sock"


def criu() -> Path:
    """The CRIU program (a launcher script when it lives in a private prefix)."""
    return prefix() / "criu" / "bin" / "criu"


def criu_plugins() -> Path:
    """Directory of our plugins for CRIU, all of which it loads."""
    return prefix() / "criu-plugins"


def written() -> Path:
    """Library that has a dumping CRIU leave out pages which were not written (native/written.c)."""
    return prefix() / "lib" / "written.so"


def terminals() -> Path:
    """Library that has a restoring CRIU write unread bytes of terminals as they are (native/terminals.c)."""
    return prefix() / "lib" / "terminals.so"


def rooted() -> Path:
    """Library that has a restoring CRIU bind sockets in the roots of services (native/rooted.c)."""
    return prefix() / "lib" / "rooted.so"


def frozen() -> Path:
    """Library that has threads continue in calls which the freezer interrupted (native/frozen.c)."""
    return prefix() / "lib" / "frozen.so"


def shim() -> Path:
    """The per-sandbox helper that creates containers and starts processes in them."""
    return prefix() / "bin" / "pagurus-shim"


def runtime_layer(name: str = "") -> Path:
    """Overlay layer of a sandbox above its image: /.pagurus/init, device nodes, mount points.

    `name` is a digest of its content, which never changes: a restored process must find the program that it was
    dumped with, also after an upgrade. "": of new sandboxes. Raises Invalid for what is no name of a layer.
    """
    if not name:
        return (runtime_home() / "layer").resolve()
    if not _LAYER.fullmatch(name):
        raise Invalid(
            f"no name of a runtime layer: {name[:64]!r}",
            hint="import the checkpoint where its runtime layer is: the same version of Pagurus",
        )
    return runtime_home() / "layers" / name


def runtime_home() -> Path:
    """Where runtime layers lie: in the prefix of a checkout; in the state where a package brought the parts."""
    return prefix() if (prefix() / "layer").is_dir() else state() / "runtime"


def runtime_programs() -> Path:
    """The programs of which a runtime layer is made: ``init``, ``attend`` and ``relay``."""
    return prefix() / "runtime"


def page() -> Path:
    """The built page for people: what ``make setup`` made in a checkout where node is, or what the package brought."""
    return CHECKOUT / "pagurus" / "page" / "built"


def addresses_object() -> Path:
    """The BPF object behind the addresses of services."""
    return prefix() / "bpf" / "addresses.bpf.o"


def inspector_object() -> Path:
    """The compiled eBPF inspector."""
    return prefix() / "bpf" / "inspector.bpf.o"
