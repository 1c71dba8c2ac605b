"""Have CRIU restore the processes of services in the groups of these, so that what they hold counts there.

A dump says nothing of groups. Which service a process belongs to its root says: CRIU is given an image of groups and,
in the record of each such process, the number of its own. It moves a process before it makes its memory. The paths lie
below the groups of the sandbox, which CRIU has in its root (:data:`sandbox.criu.rpc.GROUPS`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from sandbox.container import services
from sandbox.criu import image_files

OUTSIDE = 1  # the number of the groups that CRIU is in


def place(directory: Path, groups: Mapping[str, str], controllers: Collection[str]) -> bool:
    """Change a private copy; whether there is a process for one of the groups. Blocks.

    `groups`: the path of the group of each service. `controllers`: names of directories in CRIU's root.
    """
    members = _members(directory, set(groups))
    if not members or not controllers:
        return False
    kinds = image_files.messages()
    numbers = {service: number for number, service in enumerate(groups, OUTSIDE + 1)}
    image_files.new(
        "CGROUP",
        kinds.cgroup_entry(
            sets=[
                kinds.cg_set_entry(
                    id=numbers[service],
                    ctls=[kinds.cg_member_entry(name=name, path=path) for name in sorted(controllers)],
                )
                for service, path in groups.items()
            ],
            controllers=[kinds.cg_controller_entry(cnames=[name]) for name in sorted(controllers)],
        ),
    ).write(directory / "cgroup.img")
    inventory = image_files.read(directory / "inventory.img", kinds.inventory_entry)
    if inventory is not None and inventory.entries:
        inventory.entries[0].root_cg_set = OUTSIDE
        inventory.write(directory / "inventory.img")
    tree = image_files.read(directory / "pstree.img", kinds.pstree_entry)
    for process in tree.entries if tree is not None else ():
        number = numbers[members[process.pid]] if process.pid in members else 0
        for thread in {process.pid, *process.threads}:
            _assign(directory / f"core-{thread}.img", number)
    return True


def _members(directory: Path, named: Collection[str]) -> dict[int, str]:
    """Of each process in the root of one of these services, the service."""
    kinds = image_files.messages()
    table = image_files.read(directory / "files.img", kinds.file_entry) if named else None
    if table is None:
        return {}
    roots = {}
    for entry in table.entries:
        if entry.HasField("reg") and (name := image_files.text(entry.reg.name)).startswith(services.SERVICES):
            roots[entry.id] = services.owner(f"{name}/.")
    result = {}
    for path in directory.glob("fs-*.img"):
        image = image_files.read(path, kinds.fs_entry)
        service = roots.get(image.entries[0].root_id) if image is not None and image.entries else None
        if service in named and service is not None:
            result[int(path.stem[3:])] = service
    return result


def _assign(path: Path, number: int) -> None:
    image = image_files.read(path, image_files.messages().core_entry)
    if image is None or not image.entries:
        return
    core = image.entries[0]
    if core.HasField("tc"):
        core.tc.cg_set = number
    if core.HasField("thread_core"):
        core.thread_core.cg_set = number
    image.write(path)
