"""What to do where CRIU refuses to dump: a table from its words. No I/O."""

from __future__ import annotations

import re

#: CRIU's words -> what to do about it. First match wins.
HINTS: tuple[tuple[str, str], ...] = (
    (r"VM id", "two processes share their memory: make the child without CLONE_VM"),
    (r"FS id", "two processes share their working directory: make the child without CLONE_FS"),
    (r"PIDFD_THREAD", "a descriptor of a thread is open: open the pidfd of its process, without PIDFD_THREAD"),
    (r"packetized mode", "a pipe keeps packets apart: make it without O_DIRECT"),
    (r"Zombies with threads", "the first thread of a program has ended before its others: end them as well"),
    (r"secretmem", "secret memory is mapped: do without memfd_secret"),
    (r"corked dgram", "a datagram is half written: end it by switching UDP_CORK off"),
    (r"netlink: The socket has data", "a netlink socket holds an answer: read the answer"),
    (r"bound to groups but not to portid", "a netlink socket listens to groups without an address: bind it"),
    (r"Control messages in queue", "a message with its sender or time waits in a Unix socket: read the message"),
    (r"Non-empty write queue on an in-flight|In-flight connection", "a connection waits to be accepted: accept it"),
    (
        r"Too many open files|daemon is trimmed|Command 66 for daemon",
        "a process has as many open files as it may (ulimit -n): close some, or raise its limit",
    ),
    (
        r"remote mmap\(\) failed|remote_mprotect failed|rmap memfd",
        "a process has as many mappings as the host allows (vm.max_map_count): end it, or have it map less",
    ),
    (
        r"Dump eventpoll",
        "an epoll watches a descriptor that is closed there and open in another process: remove it from the epoll"
        " (EPOLL_CTL_DEL) before it is closed",
    ),
    (r"io_uring", "io_uring cannot be checkpointed: run the program without it"),
    (r"inotify|fanotify|fsnotify", "a watched file cannot be found again: close the watch before the checkpoint"),
    (
        r"Disk quota exceeded",
        "the sandbox has reached its disk limit: remove files, and checkpoints that hold removed ones; close those"
        " whose name is gone",
    ),
    (r"[Gg]host", "a deleted file that is still open is too large: close it"),
    (r"No space left", "the memory for captures is full: make checkpoints durable or raise its limit"),
    (
        r"too cut",
        "a Unix socket was bound by a relative name that leads through '.', '..' or a link: bind it by its whole path",
    ),
    (
        r"External socket|half of (stream|seqpacket)|unix:",
        "a Unix socket is connected to outside the sandbox: close it",
    ),
    (r"tty:|pts|ptmx", "a terminal has one end outside the sandbox: run the program without a terminal"),
    (
        r"lookup mount|mount point",
        "a process holds a message queue, or a file or mount from outside the sandbox: close it",
    ),
    (r"[Ss]ession leader|leader .*outside|\bsid\b", "a process belongs to a session outside: start it with setsid"),
    (r"trac(ed|er)|ptrace|[Uu]n?seiz", "a process is being traced: detach the debugger"),
    (r"soccr.*recv failed", "a TCP socket with SO_PEEK_OFF has unread bytes: read them, or set SO_PEEK_OFF to -1"),
    (r"socket|\bsk-|inet", "a socket of a kind that cannot be checkpointed is open: close it"),
)


def hint_for(words: str) -> str:
    """What to do about what CRIU and its log say."""
    return next((hint for pattern, hint in HINTS if re.search(pattern, words)), "the sandbox keeps running")
