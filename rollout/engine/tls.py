"""TLS between the roles of one run on several machines: all of them have one certificate, and its key.

Guarantee: a peer without the run's key is neither answered nor believed. The key lies in the run directory, which its
roles share; who reads that reads all that they say anyway.
"""

from __future__ import annotations

import ssl
from pathlib import Path

CERTIFICATE, KEY = "cert.pem", "key.pem"


def directory_of(run: Path) -> Path:
    """Where a run has them, if its roles are on several machines."""
    return run / "roles" / "tls"


def listening(directory: Path) -> ssl.SSLContext:
    return _both(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), directory)


def calling(directory: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # a role may be on any machine; what counts is the key
    return _both(context, directory)


def _both(context: ssl.SSLContext, directory: Path) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(directory / CERTIFICATE, directory / KEY)
    context.load_verify_locations(directory / CERTIFICATE)
    context.verify_mode = ssl.CERT_REQUIRED
    return context
