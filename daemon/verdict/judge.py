"""Effects of a sandbox since its last checkpoint -> what the next checkpoint must capture.

=======================================================  ===========  ==========================================
seen since the last checkpoint                           verdict      why
=======================================================  ===========  ==========================================
lost or unknown information                              both         the safest; `safest` is set
content, names, metadata, io_uring requests              files        the upper layer changed
a task born since that still lives                       processes
an older task that ran, or ended                         processes    a survivor is not what was dumped
a signal to, or memory of, an older task changed         processes
a FIFO or socket touched while older tasks live          processes    they may hold the other end
IPC objects, mounts, files of a tmpfs                    processes    they live in the dump, not in the upper layer
a change of what survivors hold in the file tree         both         descriptor, name and content belong together
files made and removed, children that ended              none         nothing is left of them
=======================================================  ===========  ==========================================

Guarantee: monotone. More effects never lower a verdict, and a verdict of `none` means that every row above is absent.
Ignore rules (:mod:`daemon.verdict.ignore`) take ignored processes out of the effects before; where they name paths, a
comparison of the files (:mod:`daemon.verdict.compare`) may turn `files` into `none` after.
:mod:`daemon.verdict.assess` holds the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.messages import Effects, Verdict


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the judge must know beyond the effects.

    held_changed: what survivors hold by a name, and is no longer as the last dump has it (sandbox/criu/open_files.py).
    """

    held_changed: Sequence[str] = ()


@dataclass(frozen=True)
class Judgement:
    """A verdict, the reason in words, and whether it was chosen for lack of information."""

    verdict: Verdict
    reason: str
    safest: bool = False


def judge(effects: Effects, options: Options | None = None) -> Judgement:
    """What the next checkpoint must capture. Example: ``judge(Effects(data_writes=1)).verdict is Verdict.FILES``."""
    if effects.overflow or effects.unknown:
        what = "a task could not be recorded" if effects.overflow else "something unknown happened"
        return Judgement(Verdict.BOTH, f"{what}: the safest verdict", safest=True)
    files = _file_reasons(effects)
    processes = _process_reasons(effects)
    if files and options is not None and options.held_changed:
        processes.append(f"held by a process that lives on: {options.held_changed[0]}")
    verdict = Verdict.of(files=bool(files), processes=bool(processes))
    return Judgement(verdict, "; ".join(files + processes) or "nothing is left of what it did")


def _file_reasons(effects: Effects) -> list[str]:
    result = [
        _counted(effects.data_writes, "file written", "files written"),
        _counted(effects.name_changes, "name changed", "names changed"),
        _counted(effects.metadata_changes, "change of metadata", "changes of metadata"),
        _counted(effects.uring_requests, "io_uring request", "io_uring requests"),
        effects.must_files,
    ]
    return [reason for reason in result if reason]


def _process_reasons(effects: Effects) -> list[str]:
    older = effects.survivors - effects.survivors_new
    result = [
        _counted(effects.survivors_new, "new task lives on", "new tasks live on"),
        _counted(effects.survivors_ran, "older task ran", "older tasks ran"),
        _counted(effects.survivors_gone, "older task ended", "older tasks ended"),
        _counted(effects.signals, "signal to an older task", "signals to older tasks"),
        _counted(effects.foreign_writes, "change of another process", "changes of other processes"),
        _counted(effects.ipc_changes, "change of IPC objects", "changes of IPC objects"),
        _counted(effects.mounts, "change of mounts or namespaces", "changes of mounts or namespaces"),
        _counted(effects.tmpfs_writes, "change on a tmpfs", "changes on a tmpfs"),
        effects.must_processes,
    ]
    if older > 0:
        result.append(_counted(effects.channels, "channel to an older task", "channels to older tasks"))
    return [reason for reason in result if reason]


def _counted(count: int, one: str, many: str) -> str:
    return "" if count <= 0 else f"1 {one}" if count == 1 else f"{count} {many}"
