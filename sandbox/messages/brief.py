"""What the structs of the wire look like printed: on one screen, whatever they hold."""

from __future__ import annotations

from typing import Any

import msgspec

TEXT = 72  # characters of a text, bytes of an output
ITEMS = 3  # of a list or a mapping


class Brief(msgspec.Struct):
    """A struct with a short ``repr``."""

    def __repr__(self) -> str:
        reported = (
            f"{field.name}={shortened(getattr(self, field.name))}"
            for field in msgspec.structs.fields(self)
            if not _default(field, getattr(self, field.name))
        )
        return f"{type(self).__name__}({', '.join(reported)})"


def _default(field: msgspec.structs.FieldInfo, value: Any) -> bool:
    if field.default_factory is not msgspec.NODEFAULT:
        return bool(value == field.default_factory())
    return field.default is not msgspec.NODEFAULT and bool(value == field.default)


def shortened(value: Any) -> str:
    """A value's own form, cut.

    >>> shortened(b"x" * 1000)[-18:], shortened([1, 2, 3, 4])
    ("x'... (1000 bytes)", '[1, 2, 3, ... (4)]')
    """
    if isinstance(value, bytes | str) and len(value) > TEXT:
        return f"{value[:TEXT]!r}... ({len(value)} {'bytes' if isinstance(value, bytes) else 'characters'})"
    if isinstance(value, str):
        return repr(str(value))
    if isinstance(value, list | tuple):
        parts = [shortened(item) for item in value[:ITEMS]]
        return f"[{', '.join([*parts, *_more(value)])}]"
    if isinstance(value, dict):
        parts = [f"{name!r}: {shortened(value[name])}" for name in [*value][:ITEMS]]
        return f"{{{', '.join([*parts, *_more(value)])}}}"
    return repr(value)


def _more(value: Any) -> list[str]:
    return [f"... ({len(value)})"] if len(value) > ITEMS else []
