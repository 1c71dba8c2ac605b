"""State equality: a canonical form of a process tree, from CRIU's images.

Guarantee: :func:`differences` of two dumps of the same state is empty, however CRIU numbered its objects; and a change
of anything listed as compared gives at least one readable line.

Compared, per process: parent, group, session, threads; registers, floating point state, signal masks, pending
signals, credentials, capabilities, seccomp, scheduling, name, personality, rlimits, signal actions, umask, current
directory, root, executable, mappings, every memory page by address; every descriptor with its flags, and the
object behind it (path, offset, flags, size; socket addresses, states, options, backlog, peers, queued data; pipe
and FIFO content; epoll interest; eventfd, signalfd; terminals), sharing between descriptors included; deleted-but-
open files with content; file locks; shared memory; System V IPC; host name; id mapping; what CRIU does not carry
(:mod:`sandbox.criu.carried.settings`).

Not compared, with the reason:

- numbers that CRIU or the kernel assigns again (image ids, inode numbers of pipes and sockets, mount and
  namespace ids, device numbers): identity is compared by who shares what instead;
- vDSO and vvar pages: the kernel's own, mapped from the running kernel;
- 16 bytes of each thread's rseq area (cpu and node numbers): the kernel writes where the thread runs;
- of a thread in a system call that was interrupted: how it is taken up again, in `ip`, `ax`, the register of a
  time-out and the 16 bytes that say what is left; the call and its other arguments are compared
  (:mod:`sandbox.criu.carried.waits`);
- of a one-shot entry of epoll that is spent, whether it reports errors and hang-ups, as one that is added does;
- whether a wait for a futex whose word had changed by the dump has ended since (EAGAIN); the word is compared;
- `orig_ax`: says that a system call was interrupted; its restart is encoded in `ip` and `ax`, which are compared;
- `xstate_bv`: whether a register set is in its initial state because it was not used or because it was reset;
  the registers themselves are compared;
- remaining time of timers: time went on; interval, clock and signal are compared, and of a timerfd whether it is set
  or has expired;
- cgroup paths: a fork lives in another cgroup;
- the kernel's own bookkeeping about a task (PF_FORKNOEXEC, PF_SUPERPRIV: did it ever exec, ever use a capability)
  and O_LARGEFILE, which means nothing on 64 bits: CRIU does not bring them back, no program sees them;
- O_TMPFILE and O_DIRECTORY among the flags of a descriptor: a file that never had a name is restored as one that has
  lost it, which linkat() cannot name, and CRIU opens a directory without saying that it must be one;
- the former name of a file without a name, where that name is another file's by now: `.cr_link` is added to it;
- who made a System V object (`cuid`, `cgid`), which cannot be set; whose it is (`uid`, `gid`) is compared;
- with which flags System V shared memory was attached: the protection of the mapping is compared;
- whether a TCP connection that the other side has ended was already reset: the kernel asks the one who is gone;
- IPV6_V6ONLY of a socket with an IPv6 address of its own: the kernel sets it at every bind to one, as CRIU's is;
- windows and timestamps of TCP connections: they change with every segment; their SO_REUSEPORT, which CRIU sets
  to rebuild them and leaves set;
- the name of a connected Unix socket, unless the kernel chose it: an accepted one has its listener's, and CRIU
  binds none of them;
- signals that a running timer of the process made pending: it keeps ticking while the processes are held;
- the settings of a terminal whose other side (CRIU's next odd number) is closed: it is hung up, and cannot be read;
- locked termios bits of terminals, and what follows the 19 control characters: CRIU writes uninitialised memory there;
- how neighbouring mappings of the same thing are split (the kernel merges them as it likes).
"""

from __future__ import annotations

import base64
import os
import re
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from sandbox.criu import image_files, rpc, same_pages, tcp, timers
from sandbox.criu.carried import settings, socket_files, waits
from sandbox.criu.carried.socket_names import CONNECTED
from sandbox.differences import Facts, differences

PAGE = 4096
VMA_VDSO, VMA_ANON_PRIVATE, VMA_ANON_SHARED, VMA_SYSVIPC, VMA_VVAR = 1 << 3, 1 << 9, 1 << 8, 1 << 10, 1 << 12
VMA_FILE = (1 << 6) | (1 << 7)
VMA_MEMFD = 1 << 14
O_LARGEFILE = 0o100000
RSEQ_MASKED = ((0, 8), (20, 28))  # cpu_id_start, cpu_id; node_id, mm_cid
_PRIVATE = select.EPOLLONESHOT | select.EPOLLET | select.EPOLLEXCLUSIVE | 1 << 29  # EPOLLWAKEUP: no events
_AUTOBOUND = re.compile("=00[0-9a-f]{5}")  # in pycriu's spelling: a NUL and five digits, a name of the kernel's choice
ROOTED = "/./"  # at the end of the directory of a socket: it is the root in which its name is one (native/rooted.c)
REUSED = ".cr_link"  # CRIU adds it to the name of a file without a name, where that name is another's
SEGMENTS = "ipcns-shm-"

_KINDS = ("reg", "isk", "nsf", "psk", "nlsk", "efd", "epfd", "sgfd", "tunf", "tfd", "ify", "ffy", "ext", "usk", "fifo",
          "pipe", "tty", "memfd", "bpf", "pidfd")  # fmt: skip
_HANDED_OUT = {"id", "ino", "mnt_id", "ns_id", "pipe_id", "regf_id", "tty_info_id", "inode_id", "peer"}


def _owned(entry: Facts) -> Facts:
    """A System V object without who made it."""
    desc = entry.get("desc", {})
    return entry | {"desc": {k: v for k, v in desc.items() if k not in ("cuid", "cgid")}} if desc else entry


def _flags(value: int) -> int:
    return value & ~(os.O_TMPFILE | O_LARGEFILE)  # O_DIRECTORY is a part of O_TMPFILE


# ---------------------------------------------------------------------------- processes


def processes(directory: Path) -> Facts:
    """The canonical form of the processes in an image directory. Blocks."""
    return _facts(directory, {})


def compared(before: Path, after: Path) -> list[str]:
    """What differs between the processes in two image directories, as `differences` returns it. Blocks.

    Most pages are the same bytes in both: these are compared and not hashed.
    """
    same = same_pages.result(before, after)
    return differences(*(_facts(item, same) for item in (before, after)))


def torn(directory: Path) -> bool:
    """Whether bytes travelled between the dumps of both ends of a connection, whose images then have them nowhere."""

    def load(name: str) -> list[dict[str, Any]]:
        return rpc.load(directory / name) if (directory / name).exists() else []

    sockets = tcp.by_ends(entry["isk"] for entry in load("files.img") if "isk" in entry)
    for ends, one in sockets.items():
        other = sockets.get(ends[::-1], {})
        states = one["state"], other.get("state", tcp.CLOSE)
        if tcp.CLOSE in states:
            continue
        for stream in load(f"tcp-stream-{one['ino']:x}.img"):
            for sender in load(f"tcp-stream-{other['ino']:x}.img"):
                if tcp.missing(stream, sender, states) > sender.get("outq_len", 0):
                    return True
    return False


def _facts(directory: Path, left_out: dict[str, set[int]]) -> Facts:
    return _Canonical(directory, left_out).facts | settings.facts(directory) | socket_files.facts(directory)


class _Canonical:
    def __init__(self, directory: Path, left_out: dict[str, set[int]]):
        """`left_out`: pages by pagemap and address that are no facts."""
        self._directory = directory
        self._left_out = left_out
        self.facts: Facts = {}
        self._files = {entry["id"]: entry for entry in self._load("files.img")}
        self._seccomp: list[dict[str, Any]] | None = None
        self._labels: dict[int, str] = {}  # file id -> who referred to it first
        self._pipes: dict[int, str] = {}
        self._shared: dict[int, str] = {}
        self._users: dict[int, str] = {}  # id of a file that is no descriptor's own -> who uses it
        sockets = (entry["isk"] for entry in self._files.values() if "isk" in entry)
        self._connected = tcp.by_ends(sockets)
        self._nameless = {entry["orig_id"] for entry in self._load("remap-fpath.img")}
        self._sockets = {e["usk"]["ino"]: i for i, e in self._files.items() if "usk" in e}
        self._tty = {entry["id"]: entry for entry in self._load("tty-info.img")}
        self._memfd = {entry["inode_id"]: entry for entry in self._load("memfd.img")}
        self._waits = {(one.process, one.thread): one for one in waits.read(directory)}
        tree = sorted(self._load("pstree.img"), key=lambda entry: entry["pid"])
        for entry in tree:
            self._descriptors(entry["pid"])
        for entry in tree:
            self._process(entry)
        for number in list(self._labels):
            self._object(number)
        self._contents()
        self._host()

    def _load(self, name: str) -> list[dict[str, Any]]:
        path = self._directory / name
        if not path.exists():
            return []
        return rpc.load(path)

    # ---- per process

    def _descriptors(self, pid: int) -> None:
        ids = self._load(f"ids-{pid}.img")
        if not ids:
            return
        for entry in sorted(self._load(f"fdinfo-{ids[0]['files_id']}.img"), key=lambda entry: entry["fd"]):
            label = self._label(entry["id"], f"{pid}/{entry['fd']}")
            self.facts[f"process {pid} descriptor {entry['fd']}"] = (label, entry["type"], entry["flags"])

    def _label(self, number: int, reference: str) -> str:
        return self._labels.setdefault(number, reference)

    def _process(self, entry: dict[str, Any]) -> None:
        pid, who = entry["pid"], f"process {entry['pid']}"
        for key in ("ppid", "pgid", "sid"):
            self.facts[f"{who} {key}"] = entry.get(key)
        # CRIU lists uninitialised memory as the threads of a zombie, which has no memory of its own.
        zombie = not (self._directory / f"mm-{pid}.img").exists()
        threads = [pid] if zombie else sorted(entry.get("threads", []))
        self.facts[f"{who} threads"] = threads
        masked = []
        for thread in threads or [pid]:
            core = self._load(f"core-{thread}.img")
            wait = self._waits.get((pid, thread))
            if core:
                area = self._core(f"{who} thread {thread}", core[0], wait)
                masked += [(area + at, area + end) for at, end in RSEQ_MASKED if area]
            if wait is not None:
                at, size = wait.written
                masked.append((at, at + size))
        for place in self._load(f"fs-{pid}.img"):
            self.facts[f"{who} cwd"] = self._path(place.get("cwd_id"), f"{who} cwd")
            self.facts[f"{who} root"] = self._path(place.get("root_id"), f"{who} root")
            self.facts[f"{who} umask"] = place.get("umask")
        for index, action in enumerate(self._load(f"sigacts-{pid}.img")):
            self.facts[f"{who} signal action {index}"] = action
        self._memory(pid, who, masked)

    def _core(self, who: str, core: dict[str, Any], wait: waits.InterruptedWait | None) -> int:
        """Facts of a thread; returns the address of its rseq area."""
        info, thread = core.get("thread_info", {}), core.get("thread_core", {})
        registers = info.get("gpregs", {})
        for name, value in (waits.returned(registers) if wait is None else wait.registers(registers)).items():
            if name != "orig_ax":
                self.facts[f"{who} register {name}"] = value
        for name, value in info.get("fpregs", {}).items():
            if isinstance(value, dict):
                value = {field: content for field, content in value.items() if field != "xstate_bv"}
            self.facts[f"{who} floating point {name}"] = value
        self.facts[f"{who} tls"] = (info.get("clear_tid_addr"), info.get("tls"))
        for name, value in thread.items():
            if name == "cg_set":
                continue
            self.facts[f"{who} {name}"] = self._filters(value) if name == "seccomp_filter" else value
        for name, value in core.get("tc", {}).items():
            if name in ("cg_set", "flags"):
                continue
            if name == "timers":
                value = timers.comparable(value, core["tc"].get("signals_s", {}))
            elif name == "old_seccomp_filter":
                value = self._filters(value)
            elif name == "signals_s":
                value = timers.other_signals(value)
            self.facts[f"{who} task {name}"] = value
        return int(thread.get("rseq_entry", {}).get("rseq_abi_pointer", 0))

    def _filters(self, number: int) -> list[str]:
        """The chain of seccomp filters of a thread; CRIU numbers them in the order in which it meets them."""
        if self._seccomp is None:
            self._seccomp = [f for entry in self._load("seccomp.img") for f in entry.get("seccomp_filters", [])]
        chain: list[str] = []
        following: int | None = number
        while following is not None and following < len(self._seccomp):
            one = self._seccomp[following]
            chain.append(_hash((one.get("filter"), one.get("flags"))))
            following = one.get("prev")
        return chain

    def _path(self, number: int | None, user: str) -> str:
        """The name of the file `number`, which `user` has: a place, a mapping, or an object next to a descriptor."""
        number = number or 0
        self._users.setdefault(number, user)
        if "reg" not in (entry := self._files.get(number, {})):
            return f"object {self._labels.get(number)}"
        return self._name(number, entry["reg"])

    def _name(self, number: int, file: dict[str, Any]) -> str:
        name = str(file["name"])
        return name.removesuffix(REUSED) if number in self._nameless else name

    # ---- memory

    def _memory(self, pid: int, who: str, masked: list[tuple[int, int]]) -> None:
        for mm in self._load(f"mm-{pid}.img"):
            for name, value in mm.items():
                if name == "exe_file_id":
                    self.facts[f"{who} executable"] = self._path(value, f"{who} executable")
                elif name != "vmas":
                    self.facts[f"{who} {name}"] = value
            vmas = mm.get("vmas", [])
            for vma in _merged(vmas):
                self._mapping(pid, who, vma)
            skipped = [(v["start"], v["end"]) for v in vmas if v["status"] & (VMA_VDSO | VMA_VVAR)]
            anonymous = [(v["start"], v["end"]) for v in vmas if v["status"] & VMA_ANON_PRIVATE]
            for address, page in self._pages(f"pagemap-{pid}.img"):
                if _within(address, skipped):
                    continue
                content = _mask(address, page, masked)
                if not any(content) and _within(address, anonymous):
                    continue  # a page of zeros and a page never touched are the same memory
                self.facts[f"{who} page {address:#x}"] = blake3(content).hexdigest()

    def _mapping(self, pid: int, who: str, vma: dict[str, Any]) -> None:
        fact = {key: vma.get(key) for key in ("end", "prot", "flags", "status", "madv", "fdflags")}
        if vma["status"] & (VMA_VDSO | VMA_VVAR):
            fact = {"kernel": True}
        elif vma["status"] & (VMA_FILE | VMA_MEMFD) and not vma["status"] & VMA_ANON_SHARED:
            fact["file"] = self._path(vma["shmid"], f"{who} mapping {vma['start']:#x}")
            fact["pgoff"] = vma.get("pgoff")
        elif vma["status"] & (VMA_ANON_SHARED | VMA_SYSVIPC):
            number = vma["shmid"]
            fact["shared with"] = self._shared.setdefault(number, f"{pid}/{vma['start']:#x}")
            fact["pgoff"] = vma.get("pgoff")
            if vma["status"] & VMA_SYSVIPC:
                fact.pop("fdflags")
        self.facts[f"{who} mapping {vma['start']:#x}"] = fact

    def _pages(self, name: str) -> Iterator[tuple[int, bytes]]:
        """(address, content) of each page that a pagemap lists, but for those that are left out."""
        entries, left_out = self._load(name), self._left_out.get(name, set())
        if not entries:
            return
        with open(self._directory / f"pages-{entries[0]['pages_id']}.img", "rb") as pages:
            for start, count in same_pages.runs(entries):
                data = pages.read(count * PAGE)
                for index in range(count):
                    if (address := start + index * PAGE) not in left_out:
                        yield address, data[index * PAGE : (index + 1) * PAGE]

    # ---- objects

    def _object(self, number: int) -> None:
        entry, label = self._files.get(number), f"object {self._labels[number]}"
        if entry is None:
            self.facts[label] = "not in files.img"
            return
        kind = next((kind for kind in _KINDS if kind in entry), "?")
        body = entry.get(kind, {})
        self.facts[f"{label} kind"] = kind
        for name, value in body.items():
            if name not in _HANDED_OUT:
                self.facts[f"{label} {name}"] = _flags(value) if name == "flags" else value
        if kind == "reg":
            self.facts[f"{label} name"] = self._name(number, body)
        elif kind == "pipe":
            shared = self._pipes.setdefault(body["pipe_id"], self._labels[number])
            self.facts[f"{label} pipe"] = shared
        elif kind == "fifo":
            self.facts[f"{label} pipe"] = self._pipes.setdefault(body["pipe_id"], self._labels[number])
            self.facts[f"{label} path"] = self._path(body.get("regf_id"), f"object {self._labels[number]}")
        elif kind == "usk":
            if body.get("name_dir", "").endswith(ROOTED):
                self.facts.pop(f"{label} name_dir", None)
            if socket_files.load(self._directory):  # they say more
                self.facts.pop(f"{label} deleted", None)
            peer = self._sockets.get(body.get("peer", 0))
            self.facts[f"{label} peer"] = self._labels.get(peer, "unaccepted") if peer is not None else None
            if body.get("state") != tcp.LISTEN:  # elsewhere it is memory of what was sent, by the sender
                self.facts.pop(f"{label} backlog", None)
            if body.get("peer") and body["type"] in CONNECTED and not _AUTOBOUND.fullmatch(body.get("name", "")):
                self.facts[f"{label} name"] = ""
                self.facts.pop(f"{label} file_perms", None)
        elif kind == "epfd":
            self.facts[f"{label} tfd"] = _interest(body.get("tfd", []))  # absent where it is empty
        elif kind == "ify":
            watches = [(w["wd"], w["mask"], w.get("f_handle", {}).get("path")) for w in body.get("wd", [])]
            self.facts[f"{label} wd"] = sorted(watches, key=repr)
        elif kind == "tfd":
            for name in ("vsec", "vnsec", "ticks"):
                self.facts.pop(f"{label} {name}", None)
            # It runs while the processes are held, and may have expired by now.
            self.facts[f"{label} set or expired"] = any(body.get(name) for name in ("vsec", "vnsec", "ticks"))
        elif kind == "tty":
            info = self._tty.get(body["tty_info_id"], {})
            unset = {"id", "rdev", "dev", "termios_locked"}
            if info.get("type") == "PTY" and not body["tty_info_id"] & 1 and body["tty_info_id"] | 1 not in self._tty:
                unset |= {"termios", "winsize"}
            retained = {k: v for k, v in info.items() if k not in unset}
            if "termios" in retained:
                retained["termios"] = {**retained["termios"], "c_cc": _control_characters(retained["termios"]["c_cc"])}
            self.facts[f"{label} terminal"] = retained
        elif kind == "memfd":
            info = self._memfd.get(body["inode_id"], {})
            self.facts[f"{label} memory file"] = {k: v for k, v in info.items() if k not in ("inode_id", "shmid")}
        elif kind == "isk":
            other = self._connected.get(tcp.ends(body)[::-1], {})
            streams = [self._load(f"tcp-stream-{one.get('ino', 0):x}.img") for one in (body, other)]
            unset, made = tcp.comparable(body, streams[0], streams[1], other.get("state", tcp.CLOSE))
            for name in unset:
                self.facts.pop(f"{label} {name}", None)
            self.facts.update((f"{label} {name}", value) for name, value in made.items())

    def _contents(self) -> None:
        """What is queued in pipes and sockets, in deleted files and in shared memory."""
        for name in ("pipes-data.img", "fifo-data.img"):
            for entry in self._load(name):
                owner = self._pipes.get(entry["pipe_id"], "?")
                self.facts[f"pipe {owner} content"] = (entry.get("size"), _hash(entry.get("extra")))
        queued: dict[str, list[Any]] = {}
        for entry in self._load("sk-queues.img"):
            queued.setdefault(self._labels.get(entry["id_for"], "?"), []).append(_hash(entry.get("extra")))
        for owner, packets in queued.items():
            self.facts[f"object {owner} queue"] = packets
        for entry in self._load("remap-fpath.img"):
            if (label := self._labels.get(entry["orig_id"])) is not None:
                owner = f"object {label}"
            else:
                owner = self._users.get(entry["orig_id"], "?")
            for name, value in _deleted(self._load(f"ghost-file-{entry['remap_id']:x}.img")).items():
                self.facts[f"{owner} deleted {name}"] = value
        shared = {item["desc"]["id"]: f"segment {item['desc']['id']}" for item in self._segments()} | self._shared
        for number, owner in shared.items():
            for address, page in self._pages(f"pagemap-shmem-{number}.img"):
                if any(page):
                    self.facts[f"shared memory {owner} page {address:#x}"] = blake3(page).hexdigest()
        for index, lock in enumerate(sorted(self._load("filelocks.img"), key=repr)):
            self.facts[f"file lock {index}"] = lock

    def _host(self) -> None:
        for pattern in ("utsns-*.img", "userns-*.img", "ipcns-*.img"):
            for path in sorted(self._directory.glob(pattern)):
                if not path.name.startswith(SEGMENTS):
                    self.facts[f"namespace {path.stem.rsplit('-', 1)[0]}"] = [
                        _owned(entry) for entry in self._load(path.name)
                    ]
        for segment in self._segments():
            self.facts[f"shared memory segment {segment['desc']['id']}"] = _owned(segment)

    def _segments(self) -> list[dict[str, Any]]:
        """System V shared memory. Its content lies next to it, where pycriu does not look for it."""
        result = []
        for path in sorted(self._directory.glob(f"{SEGMENTS}*.img")):
            image = image_files.read(path, image_files.messages().ipc_shm_entry)
            result += [rpc.as_dictionary(entry) for entry in (image.entries if image is not None else ())]
        return result


def _interest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    left_out = ("id", "dev", "inode", "pos")
    watched = [{k: v for k, v in t.items() if k not in left_out} | {"events": _armed(t["events"])} for t in entries]
    return sorted(watched, key=repr)


def _armed(events: int) -> int:
    """What epoll waits for. A spent one-shot entry says nothing, and errors and hang-ups once it is added again.

    >>> _armed(select.EPOLLONESHOT) == _armed(select.EPOLLONESHOT | select.EPOLLERR | select.EPOLLHUP)
    True
    """
    alone = events & select.EPOLLONESHOT and not events & ~(_PRIVATE | select.EPOLLERR | select.EPOLLHUP)
    return events & _PRIVATE if alone else events


def _merged(vmas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring mappings of the same thing as one: the kernel splits and merges them as it likes."""
    merged: list[dict[str, Any]] = []
    for vma in sorted(vmas, key=lambda vma: vma["start"]):
        last = merged[-1] if merged else None
        if last is not None and last["end"] == vma["start"] and _continues(last, vma):
            last["end"] = vma["end"]
        else:
            merged.append(dict(vma))
    return merged


def _continues(last: dict[str, Any], vma: dict[str, Any]) -> bool:
    if any(last.get(key) != vma.get(key) for key in ("prot", "flags", "status", "madv", "fdflags", "shmid")):
        return False
    if vma["status"] & VMA_ANON_PRIVATE:
        return True
    return bool(last.get("pgoff", 0) + last["end"] - last["start"] == vma.get("pgoff", 0))


def _within(address: int, ranges: list[tuple[int, int]]) -> bool:
    return any(start <= address < end for start, end in ranges)


def _mask(address: int, page: bytes, spans: list[tuple[int, int]]) -> bytes:
    """The page without the bytes of these spans, in which the kernel or a restore writes."""
    for first, last in spans:
        if first < address + PAGE and last > address:
            changed = bytearray(page)
            start, end = max(0, first - address), min(PAGE, last - address)
            changed[start:end] = bytes(end - start)
            page = bytes(changed)
    return page


def _deleted(ghost: list[dict[str, Any]]) -> dict[str, Any]:
    """What a file without a name is, and its content: runs of data, which CRIU cuts into parts as it finds them."""
    facts: dict[str, Any] = {}
    runs: list[tuple[int, bytearray]] = []
    for part in ghost:
        content = base64.b64decode(part.get("extra", ""))
        start = part.get("off", 0)
        if runs and "off" in part and runs[-1][0] + len(runs[-1][1]) == start:
            runs[-1][1].extend(content)
        elif content:
            runs.append((start, bytearray(content)))
        facts |= {k: v for k, v in part.items() if k not in ("dev", "ino", "atim", "extra", "off", "len", "chunks")}
    facts["content"] = [(start, blake3(content).hexdigest()) for start, content in runs]
    return facts


def _control_characters(words: list[int]) -> bytes:
    return np.array(words, dtype="<u4").tobytes()[:19]


def _hash(value: object) -> str:
    return blake3(repr(value).encode()).hexdigest()
