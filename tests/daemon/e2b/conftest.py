"""A daemon that clients of E2B reach: over TCP on loopback, with a token of an owner."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from daemon.auth.access import e2b_spelling
from sandbox.messages.tokens import NewToken, TokenRequest
from tests.support.daemon_host import Daemon, free_port, missing


@dataclass
class Served:
    daemon: Daemon
    url: str

    def token(self, **request: object) -> str:
        """A new token, as it is printed."""

        async def make() -> str:
            async with self.daemon.client() as host:
                target = TokenRequest(name="test", **request)  # type: ignore[arg-type]
                return (await host.call("POST", "/v1/tokens", NewToken, target)).text

        return asyncio.run(make())

    def restart(self) -> None:
        """kill -9, and another daemon."""
        self.daemon.kill()
        self.daemon.start("--listen", self.url.removeprefix("http://"), "--plain")

    def key(self, **request: object) -> str:
        return e2b_spelling(self.token(**request))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if reason := missing():
        pytest.skip(reason)
    daemon, port = Daemon(tmp_path_factory.mktemp("host")), free_port()
    try:
        daemon.start("--listen", f"127.0.0.1:{port}", "--plain")
        yield Served(daemon, f"http://127.0.0.1:{port}")
    finally:
        daemon.clean()


@pytest.fixture(scope="module")
def key(served: Served) -> str:
    return served.key()
