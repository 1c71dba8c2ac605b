"""Namespaces of a sandbox that CRIU need not dump, because it runs inside them: host name and System V IPC.

Guarantee: the completed images are those that CRIU would have written from outside (a test compares them); what a
program inside can change is looked at while it is frozen.

From outside, CRIU starts a process for each namespace while the sandbox is frozen. From inside it takes them for its
own: it leaves them out, and could only restore into its own. So the images get two things: the content of the
namespaces, and ids that make CRIU create new ones. A program inside can change neither the host name nor the limits of
IPC (that takes CAP_SYS_ADMIN or a writable /proc/sys), so both are read before the freeze. It can make System V
objects. Where there are some, CRIU stays outside that namespace and dumps them itself.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from sandbox.container.namespaces import IDS, inside
from sandbox.criu import Record, image_files

UNSET = -1  # of a next id that was not set: it cannot be written
ANOTHER = 1000  # added to an id: no namespace of the images has that one


@dataclass
class Inside:
    """What one CRIU process leaves out of its dump. Close it."""

    joined: tuple[str, ...]  # the namespaces that CRIU is in
    hostname: str
    domainname: str
    limits: Record | None  # ipc_var_entry; None: CRIU is not in that of IPC
    objects: list[int]  # descriptors of the lists of System V objects

    def has_objects(self) -> bool:
        """Whether there are System V objects now. Blocks, far below 1 ms."""
        return any(os.pread(fd, 1 << 12, 0).count(b"\n") > 1 for fd in self.objects)

    def complete(self, directory: Path) -> None:
        """Add what CRIU took for its own, and left out, to the images in `directory`. Blocks."""
        kinds = image_files.messages()
        inventory = image_files.read(directory / "inventory.img", kinds.inventory_entry)
        tree = image_files.read(directory / "pstree.img", kinds.pstree_entry)
        assert inventory is not None and tree is not None
        ids = image_files.read(directory / f"ids-{tree.entries[0].pid}.img", kinds.task_kobj_ids_entry)
        assert ids is not None
        outside, own = inventory.entries[0].root_ids, ids.entries[0]
        if outside.uts_ns_id == own.uts_ns_id:
            outside.uts_ns_id += ANOTHER
            names = kinds.utsns_entry(nodename=self.hostname, domainname=self.domainname)
            image_files.new("UTSNS", names).write(directory / f"utsns-{own.uts_ns_id}.img")
        if outside.ipc_ns_id == own.ipc_ns_id:
            outside.ipc_ns_id += ANOTHER
            assert self.limits is not None
            image_files.new("IPC_VAR", self.limits).write(directory / f"ipcns-var-{own.ipc_ns_id}.img")
        inventory.write(directory / "inventory.img")

    def close(self) -> None:
        """Idempotent."""
        while self.objects:
            os.close(self.objects.pop())


def poll(pidfd: int) -> Inside:
    """What there is in the namespaces of a process. Blocks. Raises OSError when it is gone."""
    return inside(pidfd, IDS["uts"] | IDS["ipc"], _poll)


def _poll() -> Inside:
    names = (_sysctl("kernel/hostname"), _sysctl("kernel/domainname"))
    kinds = ("uts", "time") if os.path.exists("/proc/self/ns/time") else ("uts",)
    result = Inside(kinds, *names, None, [])
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as undo:
        undo.callback(result.close)  # also in a kernel without these: whatever else there is, CRIU knows
        for kind in ("shm", "msg", "sem"):
            result.objects.append(os.open(f"/proc/sysvipc/{kind}", os.O_RDONLY | os.O_CLOEXEC))
        result.limits = _limits()
        undo.pop_all()
    if result.objects and not result.has_objects():
        result.joined = (*kinds, "ipc")
    return result


def _limits() -> Record:
    """The variables of this IPC namespace, as CRIU's record."""
    kernel = {
        "msg_ctlmax": "msgmax",
        "msg_ctlmnb": "msgmnb",
        "msg_ctlmni": "msgmni",
        "auto_msgmni": "auto_msgmni",
        "shm_ctlmax": "shmmax",
        "shm_ctlall": "shmall",
        "shm_ctlmni": "shmmni",
        "shm_rmid_forced": "shm_rmid_forced",
    }
    queues = {
        "mq_queues_max": "queues_max",
        "mq_msg_max": "msg_max",
        "mq_msgsize_max": "msgsize_max",
        "mq_msg_default": "msg_default",
        "mq_msgsize_default": "msgsize_default",
    }
    values = {name: int(_sysctl(f"kernel/{path}")) for name, path in kernel.items()}
    values |= {f"{kind}_next_id": int(_sysctl(f"kernel/{kind}_next_id")) for kind in ("msg", "sem", "shm")}
    try:
        values |= {name: int(_sysctl(f"fs/mqueue/{path}")) for name, path in queues.items()}
    except FileNotFoundError:  # a kernel without POSIX queues; the first three are not optional
        values |= dict.fromkeys(("mq_queues_max", "mq_msg_max", "mq_msgsize_max"), 0)
    record: Record = image_files.messages().ipc_var_entry(sem_ctls=map(int, _sysctl("kernel/sem").split()))
    for name, value in values.items():
        if value != UNSET:
            setattr(record, name, value)
    return record


def _sysctl(path: str) -> str:
    return Path(f"/proc/sys/{path}").read_text().strip()
