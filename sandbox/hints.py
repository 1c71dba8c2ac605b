"""What to do where a part of Pagurus is missing: `make` in a checkout, another way where it was installed.

Pure but for looking whether this is a checkout. An installed package has no Makefile, so that a hint to run `make
setup` would lead its user nowhere.
"""

from __future__ import annotations

from pathlib import Path

from sandbox import paths, procfs

DEBIAN_HOME = "/opt/pagurus/"  # where the Debian package lies (packaging/deb.py)
HOST = "`pagurus doctor` says what this host lacks"


def parts(verb: str = "setup") -> str:
    """A built or fetched part of the runtime is missing or of another version; `verb`: what makes it in a checkout."""
    if paths.is_checkout():
        return f"run `make {verb}`"
    if str(paths.CHECKOUT).startswith(DEBIAN_HOME):
        return "run `apt-get install --reinstall pagurus`"
    return "run `pip install --force-reinstall pagurus-runtime`"


def image() -> str:
    """There is no image to start sandboxes from."""
    if paths.is_checkout():
        return "run `make setup`"
    return "run `pagurus image debootstrap debian` as root, or `pagurus image pull`"


def training() -> str:
    """Torch and what else training needs."""
    return "make setup-train" if paths.is_checkout() else "pip install pagurus-rl"


def vllm() -> str:
    """An environment with vLLM, which only a checkout has a place for."""
    return "run `make setup-vllm`" if paths.is_checkout() else "run `make setup-vllm` in a checkout of Pagurus"


def layer(place: Path) -> str:
    """The kernel refused a directory as an idmapped layer of a sandbox: it lies on an overlay, a network share, ..."""
    points = {
        mount.point.replace("\\040", " "): mount.kind for mount in procfs.mounts()
    }  # the last of a point lies above the others
    place = place.resolve()
    kind = next((points[str(item)] for item in (place, *place.parents) if str(item) in points), "a file system")
    other = "ext4, xfs or btrfs (PAGURUS_STATE; in a container a volume)"
    return f"{place} lies on {kind}, whose directories this kernel cannot map into a sandbox: use one on {other}"
