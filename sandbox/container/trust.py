"""A certificate authority of the host's that the programs of a sandbox trust.

Guarantee: it is added to those that are there, none is taken away; written twice it is there once.

A bundle of all authorities lies in one of several places, by distribution; OpenSSL without a bundle looks into
``/etc/ssl/certs`` by a hash of the authority's name; what makes these files again (``update-ca-certificates``,
``update-ca-trust``) begins with what an administrator put aside. Programs that bring authorities of their own are told
of the bundle by variables.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from sandbox.errors import Invalid, NotFound
from sandbox.tree import files
from sandbox.tree.safe_path import SandboxRoot

if TYPE_CHECKING:
    from sandbox.container.container import Container

SUBJECT = "Pagurus credentials of this host"
HASH = "e3d371ec"  # of that name, as `openssl x509 -hash` says
OURS = "/etc/pagurus/authority.pem"  # it alone
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"  # Debian, Alpine, Arch; made where a sandbox has none
BUNDLES = (
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",  # Fedora
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",  # openSUSE
    "/etc/ssl/cert.pem",  # Alpine
    BUNDLE,
)
SOURCES = ("/usr/local/share/ca-certificates", "/etc/pki/ca-trust/source/anchors")
HASHED = "/etc/ssl/certs"
TOUCHED = ("/etc/pagurus", "/etc/ssl", "/etc/pki", *SOURCES)  # where files may change
MAX_BUNDLE = 16 << 20  # bytes
#: For programs with authorities of their own: Python's requests and pip, curl and git of their own build, node, cargo,
#: deno, the tools of AWS.
ENVIRONMENT = {
    "SSL_CERT_FILE": BUNDLE,
    "REQUESTS_CA_BUNDLE": BUNDLE,
    "PIP_CERT": BUNDLE,
    "CURL_CA_BUNDLE": BUNDLE,
    "GIT_SSL_CAINFO": BUNDLE,
    "CARGO_HTTP_CAINFO": BUNDLE,
    "AWS_CA_BUNDLE": BUNDLE,
    "DENO_CERT": OURS,
    "NODE_EXTRA_CA_CERTS": OURS,
}


def trust(container: Container, certificate: bytes) -> bool:
    """Have programs trust this authority (PEM), in each service; whether a file was changed. Blocks."""
    base = container.spec.uid_base
    return any([_trust_below(root, base, certificate) for root in container.roots])


def _trust_below(inside: SandboxRoot, base: int, certificate: bytes) -> bool:
    text = certificate if certificate.endswith(b"\n") else certificate + b"\n"
    changed = _put(inside, base, OURS, text)
    bundles: dict[str, bytes] = {path: data for path in BUNDLES if (data := _read(inside, path)) is not None}
    if BUNDLE not in bundles:  # the variables name it
        bundles[BUNDLE] = next(iter(bundles.values()), b"")
        changed |= _put(inside, base, BUNDLE, bundles[BUNDLE])
    for path in bundles:
        now = _read(inside, path) or b""  # one may be a link to another
        if text not in now:
            changed |= _put(inside, base, path, now + (b"" if not now or now.endswith(b"\n") else b"\n") + text)
    for directory in SOURCES:
        if _exists(inside, directory):
            changed |= _put(inside, base, f"{directory}/pagurus.crt", text)
    for number in range(10):
        there = _read(inside, path := f"{HASHED}/{HASH}.{number}")
        if there in (None, text):
            return changed | _put(inside, base, path, text)
    return changed


def _put(inside: SandboxRoot, base: int, path: str, content: bytes) -> bool:
    if _read(inside, path) == content:
        return False
    files.replace(inside, base, path, content)
    return True


def _read(inside: SandboxRoot, path: str) -> bytes | None:
    """None for what is not there, is no file, or is too long to be a bundle."""
    with contextlib.suppress(NotFound, Invalid):
        data = files.read(inside, path, limit=MAX_BUNDLE)
        return data if len(data) < MAX_BUNDLE else None
    return None


def _exists(inside: SandboxRoot, path: str) -> bool:
    with contextlib.suppress(NotFound, Invalid):  # also where something is mounted
        files.reach(inside, path)
        return True
    return False
