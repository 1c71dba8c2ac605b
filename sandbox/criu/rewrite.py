"""Fit a private copy of a dump's images to the sandbox that they are restored into.

Guarantee: the images that were given stay as they are; only files of the private copy are replaced. Every image is
parsed at most once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from sandbox.container import services
from sandbox.content import layers
from sandbox.content.layers import SpreadPages
from sandbox.criu import Record, image_files, tcp
from sandbox.criu.carried import controlling, locks, socket_files
from sandbox.criu.carried.locks import Lock
from sandbox.criu.carried.memory import Fill
from sandbox.criu.carried.socket_names import CONNECTED
from sandbox.criu.equality import ROOTED

O_ACCMODE = os.O_ACCMODE
SHM_DEST = 0o1000
TASK_ALIVE, TASK_STOPPED = 1, 3
ESTABLISHED = 1


@dataclass
class AdaptedImages:
    """What an adapted copy in `directory` needs and lost."""

    directory: Path  # for CRIU
    own_network: bool = False  # connections are restored, which repair mode does only in a namespace of their own
    ports: set[int] = field(default_factory=set)  # of TCP, that its sockets are bound to
    pipes: list[int] = field(default_factory=list)  # see `outside_pipes`
    closed: list[str] = field(default_factory=list)  # other ends of the connections that are restored closed
    recreated: list[str] = field(default_factory=list)  # paths whose times CRIU does not bring back
    removed_segments: list[int] = field(default_factory=list)  # ids of shared memory that goes with its last user
    locks: list[Lock] = field(default_factory=list)  # POSIX locks, which CRIU may lose
    stopped: dict[int, int] = field(default_factory=dict)  # pid in the sandbox -> signal; see `wake`
    grouped: bool = False  # CRIU moves processes into the groups of their services
    fill: Fill | None = None  # memory that `directory` lacks and that is written after CRIU
    release: Callable[[], None] = lambda: None  # lets go of what the copy was made from; blocks


def copy(directory: Path, into: Path, *, later: bool = False) -> dict[str, SpreadPages]:
    """A private copy whose files are hard links; :func:`adapt` replaces the ones it changes. Blocks.

    `later`: see :func:`layers.complete`.
    """
    into.mkdir(parents=True)
    for entry in os.scandir(directory):
        if entry.name.endswith(".log") or entry.name.startswith("stats-") or entry.name == layers.BELOW:
            continue
        layers.link(Path(entry.path), into / entry.name)
    return layers.complete(directory, into, later=later)


def adapt(directory: Path, *, uid_base: int, hostname: str, machine: str, address: str | None = None) -> AdaptedImages:
    """Fit a private copy to the container, whose address in the network (if any) is `address`. Blocks."""
    adapted = AdaptedImages(directory, locks=locks.pending(directory))
    kinds = image_files.messages()
    for path in directory.glob("userns-*.img"):
        _change(path, kinds.userns_entry, lambda entry: _shift(entry, uid_base))
    for path in directory.glob("utsns-*.img"):
        _change(path, kinds.utsns_entry, lambda entry: _rename(entry, hostname, machine))
    for path in directory.glob("ipcns-shm-*.img"):
        segments = image_files.read(path, kinds.ipc_shm_entry)
        result = [entry.desc for entry in (segments.entries if segments is not None else ())]
        adapted.removed_segments += [one.id for one in result if one.mode & SHM_DEST]
    table = image_files.read(directory / "files.img", kinds.file_entry)
    if table is None:
        return adapted
    adapted.pipes = _outside(table)
    moved = _keep_apart(table, adapted.pipes)
    unnamed = _unname(table)
    rooted = _root_names(directory, table)
    retained = socket_files.keep(directory, table)
    renamed = controlling.prepare(directory, table)
    if tcp.readdress(table.entries, address) or moved or unnamed or rooted or retained or renamed:
        table.write(directory / "files.img")
    alive, adapted.closed = _sever(directory, table, address is not None)
    adapted.own_network = bool(alive)
    adapted.ports = tcp.ports(table.entries)
    if alive:
        # With another id than the external one CRIU creates the namespace itself, below the user namespace.
        _change(directory / "inventory.img", kinds.inventory_entry, _detach_network)
    adapted.recreated = _recreated(directory, table)
    return adapted


def wake(directory: Path) -> dict[int, int]:
    """Have the stopped processes of a private copy restored as if they ran; returns what stopped them. Blocks."""
    stopped: dict[int, int] = {}

    def change(entry: Record) -> bool:
        if entry.tc.task_state != TASK_STOPPED:
            return False
        stopped[pid] = entry.tc.stop_signo or signal.SIGSTOP
        entry.tc.task_state = TASK_ALIVE
        entry.tc.ClearField("stop_signo")
        return True

    kinds = image_files.messages()
    tree = image_files.read(directory / "pstree.img", kinds.pstree_entry)
    for process in tree.entries if tree is not None else ():
        pid = process.pid
        _change(directory / f"core-{pid}.img", kinds.core_entry, change)
    return stopped


def outside_pipes(content: bytes) -> list[int]:
    """Pipes, of a files.img, that processes write to and of which no process in the sandbox holds the reading end."""
    return _outside(image_files.files(content)) if content else []


def _outside(table: image_files.CriuImageFile) -> list[int]:
    ends: dict[int, set[int]] = {}
    for entry in table.entries:
        if entry.HasField("pipe"):
            ends.setdefault(entry.pipe.pipe_id, set()).add(entry.pipe.flags & O_ACCMODE)
    return sorted(pipe for pipe, modes in ends.items() if modes == {os.O_WRONLY})


def _keep_apart(table: image_files.CriuImageFile, pipes: list[int]) -> bool:
    """CRIU takes any open file by the name of a pipe to the outside for that pipe: spell those otherwise.

    Returns whether there were some.
    """
    keys = {f"/pipe:[{pipe}]" for pipe in pipes}
    result = [entry.reg for entry in table.entries if entry.HasField("reg") and entry.reg.name in keys]
    for file in result:
        file.name = "/." + file.name
    return bool(result)


def _unname(table: image_files.CriuImageFile) -> bool:
    """CRIU removes the files of all Unix sockets to bind these again, which it does not do with connected ones.

    Returns whether there were some that are bound to a file.
    """
    result = [entry.usk for entry in table.entries if entry.HasField("usk") and _is_connected_by_path(entry.usk)]
    for one in result:
        one.name = b""
        one.ClearField("name_dir")
        one.ClearField("file_perms")
    return bool(result)


def _root_names(directory: Path, table: image_files.CriuImageFile) -> bool:
    """Have sockets that services bound by absolute paths bound again in their roots (native/rooted.c).

    Returns whether there were some.
    """
    result = [entry.usk for entry in table.entries if entry.HasField("usk") and entry.usk.name.startswith(b"/")]
    if not result:
        return False
    points: dict[int, str] = {}
    for path in directory.glob("mountpoints-*.img"):
        mounts = image_files.read(path, image_files.messages().mnt_entry)
        points.update((one.mnt_id, image_files.text(one.mountpoint)) for one in (mounts.entries if mounts else ()))
    rooted = [(one, services.owner(points.get(one.mnt_id, "") + "/.")) for one in result]
    for one, service in rooted:
        if service is not None:
            one.name_dir = services.root(service) + ROOTED
    return any(service is not None for _, service in rooted)


def _is_connected_by_path(entry: Record) -> bool:
    connected = entry.type in CONNECTED and entry.state == ESTABLISHED
    return connected and entry.name.rstrip(b"\0") != b"" and not entry.name.startswith(b"\0")


def _change(path: Path, kind: type[Record], change: Callable[[Record], bool]) -> None:
    """Change the first record of an image; `change` says whether it did."""
    image = image_files.read(path, kind)
    if image is not None and image.entries and change(image.entries[0]):
        image.write(path)


def _shift(entry: Record, uid_base: int) -> bool:
    extents = [*entry.uid_map, *entry.gid_map]
    if not extents or extents[0].lower_first == uid_base:
        return False
    offset = uid_base - min(extent.lower_first for extent in extents)
    for extent in extents:
        extent.lower_first += offset
    return True


def _rename(entry: Record, hostname: str, machine: str) -> bool:
    if (entry.nodename, entry.domainname) == (hostname, machine):
        return False
    entry.nodename, entry.domainname = hostname, machine
    return True


def _detach_network(entry: Record) -> bool:
    entry.root_ids.net_ns_id += 1000
    return True


def _sever(directory: Path, table: image_files.CriuImageFile, connected: bool) -> tuple[int, list[str]]:
    """Close what leads outside; returns how many connections are restored, and the other ends of the closed ones.

    `connected`: whether the sandbox has a network now.
    """
    sockets = {isk.ino: isk for isk in tcp.of(table.entries)}
    result = connections(directory, table.entries)
    closed = tcp.to_close(result)
    for one in closed:
        tcp.close(sockets[one.ino])
        (directory / f"tcp-stream-{one.ino:x}.img").unlink(missing_ok=True)
    gone = {one.ino for one in closed}
    for one in result:
        if one.unsent and one.ino not in gone:
            _count_as_sent(directory / f"tcp-stream-{one.ino:x}.img")
    retained = tcp.of(table.entries)
    moved = [tcp.keep_inside(isk) for isk in retained] if not connected else []
    if closed or any(moved):
        table.write(directory / "files.img")
    severed = [tcp.readable(one.remote) for one in closed if one.state != tcp.CLOSE]  # the others were over before
    return len(retained), severed


def connections(directory: Path, entries: Sequence[Record]) -> list[tcp.Connection]:
    """The TCP connections of an image directory, whose table of files has these entries."""
    result = []
    for isk in tcp.of(entries):
        unread, unsent = _queued(directory, isk.ino)
        local, remote = tcp.address(isk.src_addr, isk.src_port), tcp.address(isk.dst_addr, isk.dst_port)
        result.append(tcp.Connection(isk.ino, isk.state, local, remote, unread, unsent))
    return result


def _queued(directory: Path, ino: int) -> tuple[int, int]:
    """Bytes unread and unsent of a connection. Behind the record lies their content: only the record is read."""
    try:
        with open(directory / f"tcp-stream-{ino:x}.img", "rb") as file:
            size = int.from_bytes(file.read(12)[8:], "little")
            record = image_files.messages().tcp_stream_entry.FromString(file.read(size))
    except FileNotFoundError:
        return 0, 0
    return int(record.inq_len), int(record.unsq_len)


def _count_as_sent(path: Path) -> None:
    """Have CRIU restore bytes that wait to be sent as if they were under way: the kernel sends those again.

    It would send them at once, and the other end, which is not restored yet, would end the connection.
    """
    content = path.read_bytes()
    end = 12 + int.from_bytes(content[8:12], "little")
    record = image_files.messages().tcp_stream_entry.FromString(content[12:end])
    record.unsq_len = 0
    changed = record.SerializeToString()
    path.unlink()
    path.write_bytes(content[:8] + len(changed).to_bytes(4, "little") + changed + content[end:])


def _recreated(directory: Path, table: image_files.CriuImageFile) -> list[str]:
    """Bound sockets and their directories, and the directories above deleted-but-open files."""
    paths = set()
    for entry in table.entries:
        if entry.HasField("usk") and entry.usk.name.rstrip(b"\0") and not entry.usk.name.startswith(b"\0"):
            name, base = os.fsdecode(entry.usk.name.rstrip(b"\0")), image_files.text(entry.usk.name_dir)
            rooted = name.startswith("/") and base.endswith(ROOTED)
            path = base.removesuffix("/") + name if rooted else os.path.join("/", base, name)
            paths |= {path, os.path.join(os.path.dirname(path), ".")}  # the directory itself, where links lead to it
    for file in socket_files.load(directory).values():
        for path in map(os.fsdecode, file.names):
            paths |= {path, os.path.join(os.path.dirname(path), ".")}
    remaps = image_files.read(directory / "remap-fpath.img", image_files.messages().remap_file_path_entry)
    remapped = {remap.orig_id for remap in remaps.entries} if remaps is not None else set()
    for entry in table.entries:
        if entry.id in remapped and entry.HasField("reg"):
            name = image_files.text(entry.reg.name)
            paths |= set(map(str, PurePosixPath("/" + name.lstrip("/")).parents))
    return sorted(paths)
