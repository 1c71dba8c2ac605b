"""Names of files as text that any wire can carry.

A name of a file is bytes, and most names are UTF-8: these are shown as they are. A byte that is no part of valid UTF-8
(0x80 to 0xff) is shown as the character U+EF00 + byte: U+EF80 to U+EFFF, which are for private use. Of a name that
itself holds one of these characters, each of the three bytes of that character is shown so. Guarantee: what was shown
of a name, given back as a path, means that name and no other.
"""

from __future__ import annotations

import re

_BASE = 0xEF00
_UNTOLD = re.compile("[\udc80-\udcff\uef80-\uefff]")  # as os.fsdecode gives them
_UNTELLABLE = re.compile("[\udc80-\udcff]")
_REPORTED = re.compile("[\uef80-\uefff]")


def reported(name: str) -> str:
    """How the name or path `name`, as the os module gives it, is shown.

    >>> [hex(ord(char)) for char in reported("a\\udcff")]
    ['0x61', '0xefff']
    """
    return _UNTOLD.sub(_bytes, name)


def native(path: str) -> str:
    """The path that `path` shows, as the os module takes it.

    >>> native(reported("a\\udcff"))
    'a\\udcff'
    """
    return _REPORTED.sub(lambda result: chr(0xDC00 + ord(result[0]) - _BASE), path)


def printable(text: str) -> str:
    """A sentence that may quote names of the os module, or names that were converted already."""
    return text if text.isascii() else _UNTELLABLE.sub(_bytes, text)


def _bytes(result: re.Match[str]) -> str:
    return "".join(chr(_BASE + byte) for byte in result[0].encode("utf-8", "surrogateescape"))
