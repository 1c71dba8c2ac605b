"""A request of a sandbox on its way to a host, with the header that the sandbox does not have.

Guarantee: a request gets a header only where the name that its client said in the TLS handshake, the name in its
``Host`` and the host that is connected to are the same, a credential of the sandbox's policy is for this host and port
now, and the host shows a certificate for the name. Redirects are the client's to follow, by another request. An address
is judged as the resolver judges it: a name that points into a private network leads there only where the policy's
`cidrs` name it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from ipaddress import IPv4Address
from weakref import WeakKeyDictionary

import aiohttp
import dns.exception
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from multidict import CIMultiDict
from yarl import URL

from daemon.catalogue import SandboxRow
from daemon.credentials.authority import Authority, server_context
from daemon.credentials.store import HTTPS, CredentialStore, client_context, host_rule
from daemon.gateway.listener import SandboxShare, go_ahead
from daemon.network import names
from daemon.network.policy import canonical, compile_policy, judge_answer
from daemon.network.resolver import UpstreamResolver
from sandbox.errors import Invalid, PagurusError, TooMany
from sandbox.messages.network import Credential

log = logging.getLogger("pagurus.credentials")

CHUNK = 64 << 10
MAX_CONNECTIONS = 64  # to hosts, of one sandbox
CONNECT_TIMEOUT = 15.0  # seconds
IDLE_TIMEOUT = 300.0  # seconds without a byte of an answer
_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "expect",
}  # fmt: skip


class Refused(PagurusError):
    """A request that is not passed on."""

    code, status = "forbidden", 403


class Misdirected(PagurusError):
    """A request for another host than the connection is."""

    code, status = "invalid", 421


class Unreachable(PagurusError):
    """The host gave no answer."""

    code, status = "unavailable", 502


class Passage:
    """What one sandbox's requests pass through."""

    def __init__(
        self, row: SandboxRow, store: CredentialStore, authority: Authority, upstream: Callable[[], UpstreamResolver]
    ) -> None:
        self._row = row
        self._store = store
        self._authority = authority
        self._names: WeakKeyDictionary[ssl.SSLObject, str] = WeakKeyDictionary()  # that clients said
        self._session: aiohttp.ClientSession | None = None
        self._resolver = _JudgedResolver(row, upstream)
        self._share = SandboxShare()
        self.context = server_context()
        self.context.sni_callback = self._greeted

    def find(self, host: str, port: int | None = None) -> tuple[str, Credential] | None:
        """The credential of the sandbox's policy for a host; `port` None: at whatever port."""
        for name in self._row.network.credentials:
            if (credential := self._store.get(self._row.owner, name)) is None:
                continue
            rules = map(host_rule, credential.hosts)
            if any(item.rule.covers(host) and port in (None, item.port) for item in rules):
                return name, credential
        return None

    def ports(self) -> set[int]:
        """Those at which its hosts are reached."""
        existing = [self._store.get(self._row.owner, name) for name in self._row.network.credentials]
        return {HTTPS} | {host_rule(host).port for item in existing if item is not None for host in item.hosts}

    def _greeted(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> int | None:
        """A client says whom it wants to reach: it is shown a certificate of that host."""
        host = canonical(name or "")
        if not host or self.find(host) is None:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        self._names[connection] = host
        connection.context = self._authority.context(host)
        return None

    async def serve(self, request: web.BaseRequest, port: int) -> web.StreamResponse:
        """The answer to a request that came to this port."""
        try:
            with self._share.request():
                return await self._pass(request, port)
        except PagurusError as error:
            log.info("refused: %s", error.message, extra={"sandbox": self._row.id})
            headers = {"Retry-After": "1"} if isinstance(error, TooMany) else {}
            return web.json_response(
                {"error": {"code": error.code, "message": str(error)}}, status=error.status, headers=headers
            )

    async def _pass(self, request: web.BaseRequest, port: int) -> web.StreamResponse:
        connection = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
        host = self._names.get(connection, "") if connection is not None else ""
        if not request.raw_path.startswith("/") or request.headers.get("Upgrade"):
            raise Invalid("only plain requests are passed on to hosts with a credential", hint="no upgrade, no CONNECT")
        if not host or _named(request) != (host, port):
            raise Misdirected(f"this connection is for {host}:{port} alone", hint="open another one")
        if (match := self.find(host, port)) is None:
            raise Refused(
                f"no credential of this sandbox is for {host}:{port} now",
                hint="see `pagurus credential ls`, and `pagurus net` for the sandbox's policy",
            )
        name, credential = match
        await go_ahead(request)
        self._store.count(self._row.owner, name)
        address = host if port == HTTPS else f"{host}:{port}"
        url = URL(f"https://{address}{request.raw_path}", encoded=True)
        headers = _end_to_end(request.headers, frozenset([credential.header.lower()]))
        headers[credential.header] = credential.value
        status = 0
        try:
            answer = await self._carried(request, url, headers, client_context(credential.ca))
            status = answer.status
            return answer
        finally:  # what was asked for is the sandbox's own, and may hold what it keeps to itself
            log.info(
                "credential %s: %s %s: %s", name, request.method, address, status or "none",
                extra={"sandbox": self._row.id},
            )  # fmt: skip

    async def _carried(
        self, request: web.BaseRequest, url: URL, headers: CIMultiDict[str], context: ssl.SSLContext
    ) -> web.StreamResponse:
        body = request.content.iter_chunked(CHUNK) if request.body_exists else None
        response: web.StreamResponse | None = None
        try:
            async with self._open().request(
                request.method, url, headers=headers, data=body, allow_redirects=False, ssl=context
            ) as answer:
                if answer.status < 200:
                    raise Unreachable(f"{url.host} answered {answer.status}, which nobody wanted of it")
                response = web.StreamResponse(status=answer.status, reason=answer.reason)
                response.headers.extend(_end_to_end(answer.headers))
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if response is not None and response.prepared:  # half an answer must not look whole
                if request.transport is not None:
                    request.transport.abort()
                return response
            raise Unreachable(f"{url.host} did not answer: {_why(error)}") from None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(resolver=self._resolver, limit=MAX_CONNECTIONS, use_dns_cache=False),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=IDLE_TIMEOUT),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class _JudgedResolver(AbstractResolver):
    """Where hosts are, as a sandbox may know it."""

    def __init__(self, row: SandboxRow, upstream: Callable[[], UpstreamResolver]) -> None:
        self._row = row
        self._upstream = upstream

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        try:
            answer = await self._upstream().request(host, self._row.owner or self._row.id)
            result = names.read_answer(host, answer)
        except (dns.exception.DNSException, ValueError) as error:
            raise OSError(f"its name is not resolved: {error}") from None
        policy = compile_policy(self._row.network)
        reasons = {address: judge_answer(policy, address) for address in result.addresses}
        if not (fine := [address for address, why in reasons.items() if not why]):
            raise OSError(next(iter(reasons.values()), "it has no address"))
        return [_located(host, address, port) for address in fine]

    async def close(self) -> None:
        """Nothing is open."""


def _located(host: str, address: IPv4Address, port: int) -> ResolveResult:
    return ResolveResult(
        hostname=host, host=str(address), port=port, family=socket.AF_INET, proto=0, flags=socket.AI_NUMERICHOST
    )


def _named(request: web.BaseRequest) -> tuple[str, int] | None:
    """The host and port that a request is for; None where it does not say so, or says it twice."""
    said = request.headers.getall("Host", [])
    if len(said) != 1:
        return None
    host, colon, port = said[0].partition(":")
    if colon and not (port.isascii() and port.isdigit() and len(port) <= 5):
        return None
    name = canonical(host)
    return None if not name else (name, int(port) if colon else HTTPS)


def _end_to_end(headers: Mapping[str, str], without: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    existing = CIMultiDict(headers)
    named = {item.strip().lower() for line in existing.getall("Connection", []) for item in line.split(",")}
    dropped = _HOP | named | without
    return CIMultiDict((name, value) for name, value in existing.items() if name.lower() not in dropped)


def _why(error: Exception) -> str:
    """In words without the request, which holds the value."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not valid: {getattr(error.certificate_error, 'verify_message', '')}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    if isinstance(error, asyncio.TimeoutError | TimeoutError):
        return "it took too long"
    return str(error) if isinstance(error, OSError) else type(error).__name__
