"""SDK -> daemon: what of a sandbox need not be captured."""

from __future__ import annotations

import msgspec


class IgnoreRules(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What alone makes no checkpoint. Example: ``IgnoreRules(paths=["/var/cache/**"], processes=["tmux: server"])``.

    A checkpoint that is taken for another reason holds all of it nevertheless.

    `paths`: patterns of absolute paths in the sandbox, or of their ends (``**/…``). ``*`` stands for any part of one
    name, ``**`` for any number of directories; ``/d/**`` is the directory and all that lies in it.
    `processes`: a name as `ps -o comm` shows it, of at most 14 bytes (longer ones are cut off by the kernel, so they
    name nothing for certain), or the absolute path of a program.
    """

    paths: list[str] = []
    processes: list[str] = []
