"""What a turn did and how it was judged: inspector -> judge -> everybody."""

from __future__ import annotations

import enum

from sandbox.messages.brief import Brief


class Verdict(enum.StrEnum):
    """The judged class of a turn: what must be captured so that nothing is lost."""

    NONE = "none"
    FILES = "files"
    PROCESSES = "processes"
    BOTH = "both"

    @property
    def files(self) -> bool:
        return self in (Verdict.FILES, Verdict.BOTH)

    @property
    def processes(self) -> bool:
        return self in (Verdict.PROCESSES, Verdict.BOTH)

    @classmethod
    def of(cls, *, files: bool, processes: bool) -> Verdict:
        return {
            (False, False): cls.NONE,
            (True, False): cls.FILES,
            (False, True): cls.PROCESSES,
            (True, True): cls.BOTH,
        }[files, processes]


class Effects(Brief, kw_only=True, omit_defaults=True):
    """inspector -> judge: what a sandbox did since its mark. Counts saturate, never wrap.

    `overflow` or `unknown` true means that the counts are a lower bound: judge the safest verdict.
    """

    data_writes: int = 0  # inodes whose content was dirtied in the persistent tree
    name_changes: int = 0  # create, unlink, rename, link, mkdir, symlink, mknod
    metadata_changes: int = 0  # chmod, chown, utimes, xattr, truncate
    mounts: int = 0
    forks: int = 0
    execs: int = 0
    exits: int = 0
    ipc_changes: int = 0  # System V and POSIX shared memory, queues, semaphores
    listens: int = 0
    foreign_writes: int = 0  # memory of another process written
    signals: int = 0  # signals sent to tasks that survive the turn
    survivors: int = 0  # tasks alive at the read, pid 1 excluded
    survivors_new: int = 0  # of these, started since the mark
    survivors_ran: int = 0  # of these, older than the mark and made progress since
    survivors_gone: int = 0  # alive at the mark, gone now
    temporary: int = 0  # files created and removed again since the mark
    overflow: bool = False
    unknown: bool = False
    lost_events: int = 0  # explanations that did not fit the ring buffer
    reasons: list[str] = []  # explanations, newest last, at most 16
    channels: int = 0  # FIFOs opened, sockets connected to or written: a survivor may hold the other end
    tmpfs_writes: int = 0  # files of a tmpfs changed: they live in the process dump
    uring_requests: int = 0  # io_uring requests that may change something
    must_files: str = ""  # why the owner wants the file half captured whatever was seen
    must_processes: str = ""  # the same for the process half
    times_set: int = 0  # time stamps, lengths, allocations and flags set on purpose: not to be seen in the bytes
    excluded: int = 0  # tasks alive that are the agent's own: among no other count of tasks
    ignored: int = 0  # tasks alive that an ignore rule names: the same
    times_now: int = 0  # times set to the present, of a directory, or of what a path led to: like those of a name made
