"""Mounts that images may say a service has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox.criu import image_files
from sandbox.criu.gate import file_rules
from sandbox.criu.gate.file_rules import check_mounts
from sandbox.criu.gate.gate import look_up
from sandbox.criu.gate.images import CriuImages, GateLookups, ImageRefused
from sandbox.descriptors import closing

PROC, SYSFS, DEVPTS, OVERLAY, CGROUP = 1, 2, 6, 17, 23
#: Mount point -> file system, root, parent, key.
PLAIN: dict[str, tuple[int, str, str, str]] = {
    "/": (OVERLAY, "/", "", ""),
    "/proc": (PROC, "/", "/", ""),
    "/proc/keys": (OVERLAY, "/dev/null", "/proc", ""),
    "/proc/sys": (PROC, "/sys", "/proc", ""),
    "/sys": (SYSFS, "/", "/", "pagurus-view-sys"),
    "/sys/fs/cgroup": (CGROUP, "/", "/sys", "pagurus-view-cgroup"),
    "/sys/firmware": (OVERLAY, "/.pagurus/empty", "/sys", ""),
    "/dev/pts": (DEVPTS, "/", "/", ""),
}
SERVICE: dict[str, tuple[int, str, str, str]] = {
    "/services/db": (OVERLAY, "/services/db", "/", ""),
    "/services/db/proc": (PROC, "/", "/services/db", ""),
    "/services/db/proc/keys": (OVERLAY, "/dev/null", "/services/db/proc", ""),
    "/services/db/proc/sys": (PROC, "/sys", "/services/db/proc", ""),
    "/services/db/sys": (SYSFS, "/", "/services/db", ""),
    "/services/db/sys/fs/cgroup": (CGROUP, "/", "/services/db/sys", ""),
    "/services/db/sys/firmware": (OVERLAY, "/.pagurus/empty", "/services/db/sys", ""),
    "/services/db/dev": (OVERLAY, "/dev", "/services/db", ""),
    "/services/db/dev/pts": (DEVPTS, "/", "/services/db/dev", ""),
    "/services/db/data": (OVERLAY, "/volumes/v", "/services/db", ""),
    "/services/db/given": (0, "/", "/services/db", "pagurus-mount-0"),
}
Mounts = dict[str, tuple[int, str, str, str]]


def test_kinds_have_the_numbers_of_criu() -> None:
    kinds = image_files.messages()
    assert (PROC, DEVPTS, OVERLAY) == (file_rules.PROC, file_rules.DEVPTS, file_rules.OVERLAY)
    assert (kinds.PROC, kinds.SYSFS, kinds.DEVPTS, kinds.OVERLAYFS, kinds.CGROUP2) == (
        PROC, SYSFS, DEVPTS, OVERLAY, CGROUP,
    )  # fmt: skip
    assert {kinds.SYSFS, kinds.TMPFS, kinds.CGROUP, kinds.CGROUP2} == file_rules.VIEW_KINDS


def check(mounts: Mounts) -> GateLookups:
    kinds = image_files.messages()
    numbers = {point: 10 + number for number, point in enumerate(mounts)}
    entries = [
        kinds.mnt_entry(
            fstype=kind, mnt_id=numbers[point], root_dev=1, parent_mnt_id=numbers.get(parent, 1), flags=0, root=root,
            mountpoint=point, source="none", options="", **({"ext_key": key} if key else {}),
        )
        for point, (kind, root, parent, key) in mounts.items()
    ]  # fmt: skip
    images = CriuImages({"mountpoints-12.img": 1}, lambda _: b"")
    images._parsed["mountpoints-12.img"] = entries
    target = GateLookups()
    check_mounts(images, target)
    return target


def test_the_mounts_of_a_service_pass() -> None:
    target = check(PLAIN | SERVICE)
    assert target.mounts == ["/services/db/given"]
    assert target.in_tree(b"/services/db/data/x", "/services/db/data") == (b"/volumes/v/x", "/")
    assert target.in_tree(b"/services/db/etc/passwd", "/services/db") == (b"/services/db/etc/passwd", "/")
    assert target.in_tree(b"/services/db/given/x", "/services/db/given") == (
        b"/services/db/given/x",
        "/services/db/given",
    )


def test_a_service_may_have_any_part_of_the_tree(tmp_path: Path) -> None:
    """But through no link: who wrote the images wrote the tree, too."""
    mounts = PLAIN | SERVICE
    changed("/services/db/data", root="/data/here")(mounts)
    changed("/services/db/given", kind=OVERLAY, root="/", key="")(mounts)
    target = check(mounts)
    assert target.in_tree(b"/services/db/data/x", "/services/db/data") == (b"/data/here/x", "/")
    assert target.in_tree(b"/services/db/given/x", "/services/db/given") == (b"/x", "/")
    for place in ("data/here", "services/db", "dev"):
        (tmp_path / place).mkdir(parents=True)
    with closing(os.open(tmp_path, os.O_PATH)) as root:
        look_up(target, {"/": root})
        (tmp_path / "data").rename(tmp_path / "real")
        with pytest.raises(ImageRefused, match="not there"):
            look_up(target, {"/": root})
        (tmp_path / "data").symlink_to("real")
        with pytest.raises(ImageRefused, match="not there"):
            look_up(target, {"/": root})


def changed(point: str, **values: Any) -> Callable[[Mounts], None]:
    def edit(mounts: Mounts) -> None:
        names = ("kind", "root", "parent", "key")
        mounts[point] = tuple({**dict(zip(names, mounts[point], strict=True)), **values}.values())  # type: ignore[assignment]

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        lambda mounts: mounts.pop("/services/db/proc/keys"),  # what the sandbox does not see
        lambda mounts: mounts.pop("/services/db/sys/firmware"),
        changed("/services/db/proc/keys", kind=PROC, root="/keys/.."),
        changed("/services/db/proc", root="/1"),
        changed("/services/db/proc", parent="/"),
        changed("/services/db", root="/etc"),
        changed("/services/db", kind=PROC),
        changed("/services/db", parent="/proc"),
        changed("/services/db/data", root="/volumes/v/../.."),
        changed("/services/db/data", root="etc"),
        changed("/services/db/data", kind=SYSFS, root="/volumes/v"),
        changed("/services/db/dev", root="/etc"),
        changed("/services/db/sys", root="/kernel"),
        changed("/services/db/sys", kind=0),
        changed("/services/db/sys", key="pagurus-view-sys"),
        changed("/services/db/dev/pts", kind=OVERLAY, root="/etc"),
        lambda mounts: mounts.update({"/data": (OVERLAY, "/volumes/v", "/", "")}),
        lambda mounts: mounts.update({"/services/other/proc": (PROC, "/", "/", "")}),  # of no service
        lambda mounts: mounts.update({"/services/db/more": (0, "/", "/services/db", "pagurus-mount-7")}),
    ],
)
def test_others_are_refused(edit: Callable[[Mounts], None]) -> None:
    mounts = PLAIN | SERVICE
    edit(mounts)
    with pytest.raises(ImageRefused):
        check(mounts)
