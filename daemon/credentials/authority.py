"""The authority of this host: what sandboxes with a credential trust, and the certificates that it signs.

All sandboxes of a host trust the same one: a checkpoint has its certificate among its files, and a fork of it need not
be changed. What it signs convinces sandboxes of this host of this host, which holds all of their connections anyway.
"""

from __future__ import annotations

import datetime
import os
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox import durable
from sandbox.container.trust import SUBJECT
from sandbox.descriptors import closing

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

YEARS = 10
LEAF_DAYS = 30
RENEWED = 86_400.0  # seconds after which a host gets another certificate
MAX_CONTEXTS = 256
DAY = datetime.timedelta(days=1)


class Authority:
    """The authority whose files are `directory`. Made when it is not there."""

    def __init__(self, directory: Path) -> None:
        self._contexts: dict[str, tuple[float, ssl.SSLContext]] = {}
        self._directory = directory
        self._loaded: tuple[bytes, x509.Certificate, ec.EllipticCurvePrivateKey] | None = None

    @property
    def pem(self) -> bytes:
        """Its certificate. Blocks the first time."""
        return self._load()[0]

    def _load(self) -> tuple[bytes, x509.Certificate, ec.EllipticCurvePrivateKey]:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        if self._loaded is None:
            key_file, file = self._directory / "authority.key", self._directory / "authority.pem"
            if not (key_file.exists() and file.exists()):
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                made, key = _authority()
                durable.publish(key_file, _private(key), mode=0o600)
                durable.publish(file, made, mode=0o600)
            pem = file.read_bytes()
            signer = load_pem_private_key(key_file.read_bytes(), None)
            assert isinstance(signer, ec.EllipticCurvePrivateKey)
            self._loaded = pem, x509.load_pem_x509_certificate(pem), signer
        return self._loaded

    def context(self, host: str) -> ssl.SSLContext:
        """What speaks TLS as this host, a name that was judged. Takes a millisecond the first time."""
        made, now = self._contexts.pop(host, None), time.monotonic()
        if made is None or now - made[0] > RENEWED:
            made = now, self._make(host)
        self._contexts[host] = made
        while len(self._contexts) > MAX_CONTEXTS:
            del self._contexts[next(iter(self._contexts))]
        return made[1]

    def _make(self, host: str) -> ssl.SSLContext:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding
        from cryptography.x509.oid import ExtendedKeyUsageOID

        _, authority, signer = self._load()
        key = ec.generate_private_key(ec.SECP256R1())
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        leaf = (
            _builder(x509.Name([]), authority.subject, key, LEAF_DAYS)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(identifier, critical=False)
            .sign(signer, hashes.SHA256())
        )
        made = server_context()
        with closing(os.memfd_create("certificate")) as file:  # the key is on no disk
            os.write(file, leaf.public_bytes(Encoding.PEM) + _private(key))
            made.load_cert_chain(f"/proc/self/fd/{file}")
        return made


def server_context() -> ssl.SSLContext:
    """What speaks TLS to a sandbox; without a certificate yet."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    return made


def _authority() -> tuple[bytes, ec.EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    key = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, SUBJECT)])
    certificate = (
        _builder(named, named, key, 365 * YEARS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(digital_signature=False, key_cert_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM), key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - DAY).not_valid_after(now + days * DAY)


def _usage(**set_to: bool) -> Any:
    from cryptography import x509

    names = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{name: set_to.get(name, False) for name in names})


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
