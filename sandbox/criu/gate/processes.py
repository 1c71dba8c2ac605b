"""What the images of a sandbox's processes may say of tasks: identities, namespaces, capabilities, limits, memory.

Guarantee: pure. Of images that pass, CRIU makes ids and restrictions as our own shim does, never weaker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sandbox.criu import Record
from sandbox.criu.gate.images import IDS, MAX_FILES, OPEN_FLAGS, PAGE, PIDS, REG, CriuImages, need, raw

MAX_TASKS = 1 << 15
MAX_ADDRESS = (1 << 47) - 4096
CAPABILITIES = 0xA80425FB  # native/confine.c: `retained`
PERSONALITIES = frozenset({0, 0x8, 0x20000, 0x20008})  # native/confine.c
POLICIES = frozenset({0, 3, 5})  # SCHED_OTHER, SCHED_BATCH, SCHED_IDLE: what needs no capability
GUARD = 1 << 16  # of the status of a mapping
RESET_ON_FORK = 0x40000000  # an additional flag
SECCOMP_FILTER, TSYNC = 2, 1
LIMIT_CORE = 4  # its number; where core_pattern pipes, any other than 1 starts its program on the host
DEAD = frozenset({2, 6})  # states of a task that will not run


def task_tree(images: CriuImages) -> dict[int, list[int]]:
    """Processes and their threads."""
    entries = images.table("pstree.img", "pstree_entry")
    need(0 < len(entries) <= MAX_TASKS, f"{len(entries)} processes")
    tasks: dict[int, list[int]] = {}
    observed: set[int] = set()
    for number, entry in enumerate(entries):
        threads = list(entry.threads)
        if f"mm-{entry.pid}.img" not in images and len(threads) <= 1:
            threads = [entry.pid]  # a zombie: CRIU writes any number
        need(entry.pid in threads, f"process {entry.pid} has no thread of its own number")
        need(all(0 < one < PIDS for one in threads), "a number of a thread that no kernel gives")
        need(not observed.intersection(threads) and len(set(threads)) == len(threads), "two threads of one number")
        observed.update(threads)
        need(entry.pgid < PIDS and entry.sid < PIDS, "a group or session that no kernel gives")
        first = number == 0
        need((entry.pid == 1) == first, "the first process is not pid 1")
        need(entry.ppid == 0 if first else entry.ppid in tasks, f"process {entry.pid} has no parent")
        tasks[entry.pid] = threads
    return tasks


def check_namespaces(images: CriuImages, tasks: Iterable[int]) -> None:
    """New namespaces of every kind but those of the network and of time, and one id range."""
    inventory = images.one("inventory.img", "inventory_entry")
    need(inventory.img_version == 2, f"images of version {inventory.img_version}")
    need(not inventory.plugins_entry.plugins, "images made with plugins of CRIU")
    need(not inventory.lsmtype, "images of another security module")
    need(inventory.fdinfo_per_id and inventory.ns_per_id, "images of an old CRIU")
    need(not inventory.pre_dump_mode and not inventory.tcp_close, "images of another kind of dump")
    host = inventory.root_ids
    first = images.one("ids-1.img", "task_kobj_ids_entry")
    for kind in ("pid", "ipc", "uts", "mnt", "user", "cgroup"):
        own = getattr(first, f"{kind}_ns_id")
        need(own and own != getattr(host, f"{kind}_ns_id"), f"processes without a {kind} namespace of their own")
    need(first.net_ns_id == host.net_ns_id, "processes in a network namespace that is not the sandbox's")
    for pid in tasks:
        name = f"ids-{pid}.img"
        if name not in images:
            continue  # a zombie
        ids = images.one(name, "task_kobj_ids_entry")
        for kind in ("pid", "net", "ipc", "uts", "mnt", "user", "cgroup", "time"):
            field = f"{kind}_ns_id"
            need(getattr(ids, field) == getattr(first, field), f"process {pid} in another {kind} namespace")
    need({number for number, _ in images.of("userns")} == {first.user_ns_id}, "another user namespace")
    users = images.one(f"userns-{first.user_ns_id}.img", "userns_entry")
    ranges = [[(one.first, one.lower_first, one.count) for one in kind] for kind in (users.uid_map, users.gid_map)]
    lower = ranges[0][0][1] if ranges[0] else 0
    need(ranges == [[(0, lower, IDS)]] * 2, "user ids beyond those of one sandbox")
    need(IDS <= lower <= (1 << 32) - 2 * IDS, "user ids of the host")
    need({number for number, _ in images.of("mountpoints")} == {first.mnt_ns_id}, "another mount namespace")
    for number, name in images.of("utsns"):
        names = images.one(name, "utsns_entry")
        need(number == first.uts_ns_id and len(names.nodename) <= 64 and len(names.domainname) <= 64, "a host name")
    for stem in ("ipcns-var", "ipcns-shm", "ipcns-msg", "ipcns-sem"):
        need(all(number == first.ipc_ns_id for number, _ in images.of(stem)), "another IPC namespace")


def check_task(images: CriuImages, pid: int, threads: list[int], files: Mapping[int, Record]) -> None:
    core = images.one(f"core-{pid}.img", "core_entry")
    need(core.mtype == 1 and core.HasField("tc"), f"process {pid} is of another kind of machine")
    need(core.tc.personality in PERSONALITIES, f"process {pid} has personality {core.tc.personality:#x}")
    need(len(raw(core.tc.comm)) <= 15, f"the name of process {pid}")
    if core.tc.task_state in DEAD:
        return
    need(core.tc.oom_score_adj >= 0, f"process {pid} is spared by the OOM killer")
    limits = core.tc.rlimits.rlimits
    need(len(limits) == 16 and all(one.cur <= one.max for one in limits), f"the limits of process {pid}")
    core_limit = limits[LIMIT_CORE]
    need(core_limit.cur == core_limit.max <= 1, f"process {pid} may dump core to a program of the host")
    for thread in threads:
        one = core if thread == pid else images.one(f"core-{thread}.img", "core_entry")
        need(one.HasField("thread_core"), f"thread {thread} has no state")
        _thread(thread, one.thread_core)
    memory = images.one(f"mm-{pid}.img", "mm_entry")
    program = files.get(memory.exe_file_id)
    need(program, f"process {pid} runs no file")
    need(
        program is not None and program.type == REG,
        f"process {pid} runs a program from memory (memfd_create), which CRIU cannot bring back",
        "run the program from a file",
    )
    _memory(pid, memory, files)
    check_pagemap(images, f"pagemap-{pid}.img", MAX_ADDRESS)
    place = images.one(f"fs-{pid}.img", "fs_entry")
    for number in (place.cwd_id, place.root_id):
        need(number in files and files[number].type == REG, f"process {pid} is in no directory")
    ids = images.one(f"ids-{pid}.img", "task_kobj_ids_entry")
    for entry in images.table(f"fdinfo-{ids.files_id}.img", "fdinfo_entry"):
        file = files.get(entry.id)
        need(file is not None and file.type == entry.type, f"process {pid} holds a file that there is not")
        need(entry.fd < MAX_FILES, f"descriptor {entry.fd} of process {pid}")


def _thread(thread: int, core: Record) -> None:
    who = f"thread {thread}"
    need(core.HasField("creds"), f"{who} has no credentials")
    creds = core.creds
    numbers = (creds.uid, creds.euid, creds.suid, creds.fsuid, creds.gid, creds.egid, creds.sgid, creds.fsgid)
    need(max(numbers) < IDS and all(group < IDS for group in creds.groups), f"{who} has ids beyond its sandbox's")
    for kind in ("inh", "prm", "eff", "bnd", "amb"):
        held = sum(word << 32 * place for place, word in enumerate(getattr(creds, f"cap_{kind}")))
        need(not held & ~CAPABILITIES, f"{who} has capabilities that no sandbox has")
    need(creds.no_new_privs in (0, 1), f"{who} has no setting of no_new_privs")
    need(not creds.lsm_profile and not creds.lsm_sockcreate and not creds.apparmor_data, f"{who} has a profile")
    need(core.sched_nice >= 0 and core.sched_nice < 20, f"{who} goes before the host's")
    need(core.sched_policy & ~RESET_ON_FORK in POLICIES and not core.sched_prio, f"{who} has real-time scheduling")


def _memory(pid: int, memory: Record, files: Mapping[int, Record]) -> None:
    end = 0
    for area in memory.vmas:
        start, status = area.start, area.status
        guard = bool(status & GUARD)  # lies inside another one
        good = (guard or end <= start) and start < area.end and not start % PAGE and not area.end % PAGE
        end = end if guard else area.end
        # The page of the vsyscall is where no process can have anything.
        need(good and (area.end <= MAX_ADDRESS or status & 4), f"process {pid} has memory where no process can have it")
        need(not status >> 18, f"process {pid} has memory of an unknown kind")
        if status & 0xC0 and not status & (1 << 14):  # of a file that is not a memfd
            file = files.get(area.shmid)
            need(file is not None and file.type == REG, f"process {pid} maps a file that there is not")
            need(not area.fdflags & ~OPEN_FLAGS, f"process {pid} maps a file with flags {area.fdflags:#o}")


def check_pagemap(images: CriuImages, name: str, end: int) -> None:
    """The pages that a map says lie in the file of pages, page for page."""
    entries = images.table(name, "pagemap_head", "pagemap_entry")
    need(entries, f"{name} is missing")
    pages = f"pages-{entries[0].pages_id}.img"
    total, above = 0, 0
    for entry in entries[1:]:
        count = entry.nr_pages or entry.compat_nr_pages
        need(entry.vaddr >= above and not entry.vaddr % PAGE and count <= end // PAGE, f"{name} has no order")
        above = entry.vaddr + count * PAGE
        need(above <= end, f"{name} reaches too far")
        need(not entry.in_parent and not entry.flags & 1, f"{name} refers to other images")
        if not entry.HasField("flags") or entry.flags & 4:
            total += count
    need(images.sizes.get(pages, 0) == total * PAGE, f"{pages} has not the pages of {name}")


def confined(images: CriuImages, program: bytes, *, piped: bool) -> None:
    """Refuse processes that are not held by the system-call filter `program`, which each sandbox of ours begins with.

    `piped`: a program of the host takes core dumps, and only a limit of 1 keeps it from being started.
    What was dumped here cannot have lost it; images that come from elsewhere may say anything.
    """
    filters = [one for entry in images.table("seccomp.img", "seccomp_entry") for one in entry.seccomp_filters]
    for pid, threads in task_tree(images).items():
        core = images.one(f"core-{pid}.img", "core_entry")
        if core.tc.task_state in DEAD:
            continue
        limit = core.tc.rlimits.rlimits[LIMIT_CORE]
        need(limit.max == 1 or not piped, f"process {pid} may dump core to a program of the host")
        chain = chain_of(core.thread_core, filters)
        need(chain and bytes(chain[-1].filter) == program, f"process {pid} is not held by the filter of system calls")
        for thread in threads:
            own = chain_of(images.one(f"core-{thread}.img", "core_entry").thread_core, filters)
            shared = all(one.flags & TSYNC for one in chain)  # CRIU gives the leader's filters to all threads
            good = bytes(own[-1].filter) == program if own else shared
            need(good, f"thread {thread} is not held by the filter of system calls")


def unprivileged(images: CriuImages) -> None:
    """Refuse processes for which set-user-ID programs would work: of a sandbox that has `no_new_privs`."""
    for pid, threads in task_tree(images).items():
        core = images.one(f"core-{pid}.img", "core_entry")
        for thread in threads if core.tc.task_state not in DEAD else ():
            one = core if thread == pid else images.one(f"core-{thread}.img", "core_entry")
            need(one.thread_core.creds.no_new_privs == 1, f"thread {thread} may gain privileges")


def chain_of(core: Record, filters: list[Record]) -> list[Record]:
    """The filters of a thread, its first one last; [] when it has none of its own."""
    chain: list[Record] = []
    place = core.seccomp_filter if core.seccomp_mode == SECCOMP_FILTER else -1
    while 0 <= place < len(filters) and len(chain) <= len(filters):
        chain.append(filters[place])
        place = filters[place].prev if filters[place].HasField("prev") else -1
    return chain
