"""The page for people, as a server hands it out: its files, their headers, and the login of a browser.

Guarantee: a browser shows two things with each call, a cookie that no script can read, and a key that only this origin
can read and that no other site can make it send. Cookies know no ports: what listens at another port of the same host
gets the cookie, and it is worth nothing without the key.

::

    token ──POST /v1/login──▶ cookie  (HttpOnly, SameSite=Strict; the server signed whose it is and until when)
                              key     (an HMAC of the cookie; kept by the page, sent as a header, or to a WebSocket
                                       as its second protocol)
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from aiohttp import hdrs, web

from sandbox import durable, hints, paths

# Before the path of what `pagurus view` passes on for a port of a sandbox. No API has it: a server that does not know
# ports by the name of the host refuses it, rather than take it for a call of the user who started `pagurus view`.
PORTS = "/.pagurus/port"
KEY_HEADER = "X-Pagurus-Page"
PROTOCOL = "pagurus"  # of a WebSocket; the key follows it
LIFETIME = 30 * 86_400.0  # seconds of a login; a token that ends earlier ends it
MIN_KEY = 16  # bytes
_COOKIE = re.compile(r"([A-Za-z0-9-]{1,32})\.([0-9]{1,12})\.([0-9a-f]{64})", re.ASCII)
ASSETS = "/page/assets/"
_ASSET = ASSETS + "{name:[A-Za-z0-9_.-]+}"

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "font-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_ABSENT = (
    "<!doctype html><title>Pagurus</title><p>There is no built page: install node and npm, then {}. "
    "The API answers below <code>/v1</code>."
)


# --------------------------------------------------------------------------- files


def wants_page(request: web.Request) -> bool:
    """Whether a browser asks, rather than a program."""
    return "text/html" in request.headers.get(hdrs.ACCEPT, "")


async def index(request: web.Request) -> web.StreamResponse:
    """The page, for a browser; other clients get what a path without a route gives."""
    if not wants_page(request):
        raise web.HTTPNotFound()
    file = paths.page() / "index.html"
    headers = {**HEADERS, hdrs.CACHE_CONTROL: "no-cache", hdrs.VARY: hdrs.ACCEPT}
    if not file.is_file():
        return web.Response(text=_ABSENT.format(hints.parts()), content_type="text/html", headers=headers)
    return web.FileResponse(file, headers=headers)


async def asset(request: web.Request) -> web.StreamResponse:
    """A file that the page names. The name holds a hash of its content."""
    file = paths.page() / "assets" / request.match_info["name"]
    if not file.is_file():
        raise web.HTTPNotFound()
    return web.FileResponse(file, headers={**HEADERS, hdrs.CACHE_CONTROL: "public, max-age=31536000, immutable"})


def add_page(app: web.Application) -> None:
    """Serve the page at ``/`` of `app`."""
    app.router.add_get("/", index)
    app.router.add_get(_ASSET, asset)


# --------------------------------------------------------------------------- logins


def key_file(path: Path) -> bytes:
    """The secret in this file, which is made when it is missing. Blocks."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    made = secrets.token_bytes(32)
    durable.publish(path, made, mode=0o600)
    return made


@dataclass(frozen=True)
class Login:
    """What a browser gets that has logged in."""

    cookie: str
    key: str
    end: int  # seconds since the epoch

    def put_into(self, request: web.Request, response: web.Response) -> None:
        """Have the answer carry the cookie."""
        lifetime, secure = max(0, int(self.end - time.time())), request.secure
        response.set_cookie(
            cookie_name(request), self.cookie, max_age=lifetime, httponly=True, samesite="Strict", secure=secure
        )


class Logins:
    """The logins that one server has given out. None is stored: each is signed with `secret`, which stays here."""

    def __init__(self, secret: bytes) -> None:
        assert len(secret) >= MIN_KEY
        self._secret = secret

    def begin(self, subject: str, until: float | None) -> Login:
        """A login of `subject`, such as the id of a token, that ends with it."""
        end = int(min(until or float("inf"), time.time() + LIFETIME))
        signed = f"{subject}.{end}"
        cookie = f"{signed}.{self._mac('cookie', signed)}"
        return Login(cookie=cookie, key=self._mac("key", cookie), end=end)

    def end(self, request: web.Request, response: web.StreamResponse) -> None:
        """The browser forgets its cookie."""
        response.del_cookie(cookie_name(request), httponly=True, samesite="Strict", secure=request.secure)

    def subject(self, request: web.Request) -> str | None:
        """Whose login the browser shows, with both halves; None where it shows none that is good."""
        result = _COOKIE.fullmatch(cookie := request.cookies.get(cookie_name(request), ""))
        if result is None or int(result[2]) < time.time():
            return None
        if not hmac.compare_digest(self._mac("cookie", f"{result[1]}.{result[2]}"), result[3]):
            return None
        if not hmac.compare_digest(self._mac("key", cookie).encode(), shown_key(request).encode()):
            return None
        return result[1]

    def _mac(self, purpose: str, text: str) -> str:
        return hmac.new(self._secret, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()


def cookie_name(request: web.Request) -> str:
    """Of this server: two of them on one host share their cookies, but not their ports."""
    port = request.host.rpartition(":")[2]
    return f"pagurus-{port}" if port.isascii() and port.isdigit() else "pagurus"


def shown_key(request: web.Request) -> str:
    """The key that comes with a request; "" for none."""
    if (key := request.headers.get(KEY_HEADER)) is not None:
        return key
    protocols = [item.strip() for item in request.headers.get(hdrs.SEC_WEBSOCKET_PROTOCOL, "").split(",")]
    return protocols[1] if len(protocols) == 2 and protocols[0] == PROTOCOL else ""
