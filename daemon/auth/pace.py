"""How often the calls of one token may come, and how many of them may act at the same time."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

from daemon.auth.access import Caller
from daemon.auth.quota import Bucket, take
from sandbox.errors import TooMany


class TokenRateLimits:
    """The calls of each token."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}
        self._acting: Counter[str] = Counter()

    def need(self, caller: Caller) -> None:
        """A call came. Raises TooMany, with the seconds to wait, where it came too soon."""
        rate = caller.quota.requests_per_s
        if rate is None:
            return
        self._buckets[caller.token], wait = take(self._buckets.get(caller.token), rate, time.monotonic())
        if wait:
            refused = TooMany(f"more than {rate:g} requests per second", hint=f"again in {wait:.2f} s")
            refused.retry_after = wait
            raise refused

    @contextlib.contextmanager
    def acting(self, caller: Caller) -> Iterator[None]:
        """A call that acts is under way. Raises TooMany where too many are."""
        limit = caller.quota.execs
        if limit is None:
            yield
            return
        if self._acting[caller.token] >= limit:
            raise TooMany(f"{limit} calls of this token are under way", hint="wait until one has ended")
        self._acting[caller.token] += 1
        try:
            yield
        finally:
            self._acting[caller.token] -= 1
