"""The models behind the gateway, by name.

Guarantee: a key is read from its file on the host for each request and put into that request alone; it is in no
message, log or error, and an upstream that sends it back has it masked. What an agent put into `Authorization` or a
cookie is never sent on. One owner's requests leave an eighth of an upstream's slots to others.

The configuration is a TOML file (``pagurus daemon --gateway-config FILE``)::

    listen = "127.0.0.1:7070"            # for agents outside; none by default
    # tls_cert = "/etc/pagurus/cert.pem" # with tls_key, or proxy = "https://...": on anything but loopback

    [upstreams.pool]
    url = "http://10.0.0.5:8000"         # what comes before /v1
    [upstreams.openai]
    url = "https://api.openai.com"
    key_file = "/etc/pagurus/openai.key"
    headers = { "OpenAI-Organization" = "org-1" }
"""

from __future__ import annotations

import asyncio
import contextlib
import tomllib
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec
from multidict import CIMultiDict

from daemon.auth.owner_slots import OwnerSlots
from daemon.config import address_of, is_loopback
from daemon.gateway.masking import SecretMask
from daemon.gateway.wire import AgentRequest, credential, location_inside, reported
from daemon.wording import plain
from sandbox.errors import EngineFailed, Invalid, NotFound, PagurusError, Timeout
from sandbox.messages import Upstream, UpstreamInfo

CONNECT = 30.0  # seconds
MAX_KEY = 64 << 10  # bytes of a key file
RESERVED_PART = 8  # one of so many slots of an upstream is reserved for owners that have few
FORBIDDEN = frozenset({"host", "content-length", "transfer-encoding", "connection"})


File = Annotated[str, msgspec.Meta(pattern=r"^/[^\0]*$", max_length=4096)]


class GatewayConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The configuration file."""

    listen: str | None = None  # HOST:PORT
    tls_cert: File | None = None  # certificate chain (PEM) of the listener
    tls_key: File | None = None  # its key (PEM)
    proxy: Annotated[str, msgspec.Meta(pattern=r"^https://[^\s/]+$")] | None = None  # ends TLS in front of the listener
    upstreams: dict[str, Upstream] = {}

    @classmethod
    def load(cls, path: Path | None) -> GatewayConfig:
        if path is None:
            return cls()
        try:
            config = msgspec.convert(tomllib.loads(path.read_text()), cls)
        except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise Invalid(
                f"the gateway's configuration {path} cannot be read: {plain(error)}",
                hint="correct the file: the page about the gateway has an example",
            ) from None
        for name, upstream in config.upstreams.items():
            checked(name, upstream)
        config.check()
        return config

    def check(self) -> None:
        """Raises Invalid if the listener's settings do not fit together."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise Invalid("the gateway's certificate needs its key", hint="give tls_cert and tls_key")
        if self.tls_cert is not None and self.proxy is not None:
            raise Invalid("tls_cert and proxy exclude each other", hint="leave one of them out")
        address = self.address()
        if address is None:
            if self.tls_cert is not None or self.proxy is not None:
                raise Invalid("the gateway listens nowhere", hint="say where: listen = HOST:PORT")
        elif self.tls_cert is None and self.proxy is None and not is_loopback(address[0]):
            raise Invalid(
                f"the gateway on {self.listen} would be without TLS: tokens and conversations could be read on the way",
                hint='tls_cert and tls_key; or proxy = "https://...", the address of a proxy that ends TLS',
            )

    def base_url(self) -> str | None:
        """Where agents outside find the listener."""
        if self.listen is None:
            return None
        return self.proxy or f"{'http' if self.tls_cert is None else 'https'}://{self.listen}"

    def address(self) -> tuple[str, int] | None:
        """Where agents outside connect to."""
        if self.listen is None:
            return None
        return address_of(self.listen)


def checked(name: str, upstream: Upstream) -> Upstream:
    """`upstream`, or why it cannot be used."""
    for header, value in upstream.headers.items():
        if (
            header.lower() in FORBIDDEN
            or not header.isascii()
            or not header.replace("-", "").replace("_", "").isalnum()
        ):
            raise Invalid(
                f"upstream {name}: no header may be called {header!r}", hint="leave it out; `key_file` sets the key"
            )
        if not value.isprintable() or not value.isascii():
            raise Invalid(
                f"upstream {name}: header {header} has a value that cannot be sent", hint="use printable ASCII"
            )
    return upstream


class UpstreamResponse:
    """What an upstream answers, without the secrets of its request."""

    def __init__(self, response: aiohttp.ClientResponse, secrets: Iterable[str], base: str) -> None:
        self.status = response.status
        self._response = response
        self._mask = SecretMask(secrets)
        self.headers = {name: self._mask.text(value) for name, value in reported(response.headers).items()}
        if (location := self.headers.get("location")) is not None:
            self.headers["location"] = location_inside(location, base)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Its body, as it comes."""
        async for chunk in self._response.content.iter_any():
            if masked := self._mask.feed(chunk):
                yield masked
        if rest := self._mask.end():
            yield rest


class Upstreams:
    """All upstreams of a host. Those of the configuration file win over those that the API made."""

    def __init__(self, fixed: Mapping[str, Upstream], added: Mapping[str, Upstream]) -> None:
        self.fixed = dict(fixed)
        self.added = dict(added)
        self._session: aiohttp.ClientSession | None = None
        self._slots: dict[str, OwnerSlots] = {}
        self._in_flight: dict[str, int] = {}

    def get(self, name: str) -> Upstream:
        result = self.fixed.get(name) or self.added.get(name)
        if result is None:
            existing = ", ".join(sorted({*self.fixed, *self.added})) or "none"
            raise NotFound(f"no such upstream: {name}", hint=f"known are: {existing}")
        return result

    def list(self) -> list[UpstreamInfo]:
        return [
            UpstreamInfo(
                name=name,
                url=upstream.url,
                has_key=upstream.key_file is not None,
                headers=sorted(upstream.headers),
                in_flight=self._in_flight.get(name, 0),
            )
            for name, upstream in sorted({**self.added, **self.fixed}.items())
        ]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @contextlib.asynccontextmanager
    async def request(self, name: str, requested: AgentRequest, owner: str) -> AsyncIterator[UpstreamResponse]:
        """Send a request on; yields the response when its head has come. Raises EngineFailed or Timeout.

        `owner`: with whose requests it counts.
        """
        upstream = self.get(name)
        secrets = await self._secrets(name, upstream, requested)
        own = {**secrets, "accept-encoding": "identity"}
        data = sent_body(requested) if requested.route.has_body else None
        if data is not None:
            own["content-type"] = "application/json"
        sent = CIMultiDict(((name, value) for name, value in requested.headers if name not in own))
        sent.extend(own)
        async with self._slots_of(name, upstream).slot(owner):
            self._in_flight[name] = self._in_flight.get(name, 0) + 1
            try:
                async with self._open().request(
                    requested.route.method,
                    _address(upstream, requested.path),
                    data=data,
                    headers=sent,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(
                        total=upstream.timeout, sock_connect=min(CONNECT, upstream.timeout), sock_read=upstream.idle
                    ),
                ) as response:
                    shown = (value.removeprefix("Bearer ") for value in secrets.values())
                    yield UpstreamResponse(response, shown, upstream.url)
            except TimeoutError as error:
                raise Timeout(
                    f"upstream {name} gave no complete answer in time",
                    hint="raise the upstream's `timeout`, or limit max_tokens of the request",
                ) from error
            except (aiohttp.ClientError, ConnectionError) as error:
                raise EngineFailed(
                    f"upstream {name} cannot be reached: {type(error).__name__}",
                    hint="check the upstream's `url`, and that its server runs",
                ) from error
            finally:
                self._in_flight[name] -= 1

    def _slots_of(self, name: str, upstream: Upstream) -> OwnerSlots:
        slots = self._slots.setdefault(name, OwnerSlots(0, 0))
        slots.resize(upstream.at_once, upstream.at_once // RESERVED_PART)
        return slots

    async def _secrets(self, name: str, upstream: Upstream, requested: AgentRequest) -> dict[str, str]:
        headers = {header.lower(): value for header, value in upstream.headers.items()}
        if upstream.key_file is not None:
            key = await asyncio.to_thread(_read_key, name, Path(upstream.key_file))
            headers.update(credential(requested.route.family, key))
        return headers

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=30), cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session


def sent_body(requested: AgentRequest) -> bytes:
    """The model's request: the agent's body with the model's name replaced, volatile fields included."""
    return msgspec.json.encode(requested.body)


def _address(upstream: Upstream, path: str) -> str:
    base = upstream.url.rstrip("/")
    return base.removesuffix("/v1") + path


def _read_key(name: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            key = file.read(MAX_KEY).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PagurusError(
            f"the key of upstream {name} cannot be read: {type(error).__name__}", hint=f"see {path} on the host"
        ) from None
    if not key or not key.isprintable() or " " in key:
        raise PagurusError(f"the key file of upstream {name} holds no key", hint=f"see {path} on the host")
    return key
