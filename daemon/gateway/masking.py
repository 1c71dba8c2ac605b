"""Keys in what an upstream answers.

Pure. Guarantee: no agent gets a secret that the gateway put into the request of its upstream, though the upstream
echoes its request: as it is, or as JSON, URLs and HTML escape it. A chunk waits for the next one only where it ends
with what may be the beginning of a secret. Limit: an upstream that means to give its key away can encode it in a way of
its own.
"""

from __future__ import annotations

import base64
import html
import re
import urllib.parse
from collections.abc import Iterable

MIN_SECRET = 8  # characters; a shorter value is no secret, and occurs in answers by chance
MASK = b"*"


class SecretMask:
    """Replaces secrets in one answer."""

    def __init__(self, secrets: Iterable[str]) -> None:
        forms = {form for secret in secrets if len(secret) >= MIN_SECRET for form in _forms(secret)}
        self._forms = sorted(forms, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._forms))) if self._forms else None
        self._pending = b""

    def feed(self, chunk: bytes) -> bytes:
        """What may be given out after this chunk; may be nothing."""
        if self._pattern is None:
            return chunk
        data = self._masked(self._pending + chunk)
        cut = len(data) - self._begun(data)
        self._pending = data[cut:]
        return data[:cut]

    def end(self) -> bytes:
        """What is left when the answer has ended."""
        pending, self._pending = self._pending, b""
        return pending

    def text(self, value: str) -> str:
        """A header's value."""
        return self._masked(value.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")

    def _masked(self, data: bytes) -> bytes:
        return data if self._pattern is None else self._pattern.sub(lambda result: MASK * len(result[0]), data)

    def _begun(self, data: bytes) -> int:
        """Bytes at the end of `data` with which a secret may begin."""
        longest = min(len(data), max(map(len, self._forms)) - 1)
        for size in range(longest, 0, -1):
            tail = data[-size:]
            if any(form.startswith(tail) for form in self._forms):
                return size
        return 0


def _forms(secret: str) -> set[bytes]:
    """A secret as an echo may write it."""
    written = {
        secret,
        secret.replace("/", "\\/"),
        "".join(char if char.isalnum() else f"\\u{ord(char):04x}" for char in secret),
        urllib.parse.quote(secret, safe=""),
        html.escape(secret),
        base64.b64encode(secret.encode()).decode().rstrip("="),
    }
    return {form.encode() for form in written}
