"""TLS of the TCP listener.

Guarantee: TLS 1.2 or newer; a key is readable by the daemon's user only, from the moment it exists.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import socket
import ssl
from pathlib import Path
from typing import Any

from sandbox import durable
from sandbox.errors import Invalid

YEARS = 5


def context(certificate: Path, key: Path) -> ssl.SSLContext:
    """What the listener speaks with. Raises Invalid when the files do not fit."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    try:
        made.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"cannot use {certificate} with {key}: {error}", hint="both are PEM files") from None
    return made


def fingerprint(certificate: Path) -> str:
    """SHA-256 of a certificate, as `Client(ca="sha256:...")` takes it."""
    return "sha256:" + hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.read_text())).hexdigest()


def self_signed(directory: Path, host: str) -> tuple[Path, Path]:
    """(certificate, key) in `directory`, made when they are not there. The certificate is its own authority."""
    certificate, key = directory / "cert.pem", directory / "key.pem"
    if certificate.exists() and key.exists():
        return certificate, key
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    private, public = _make(host)
    durable.publish(key, private, mode=0o600)
    durable.publish(certificate, public, mode=0o600)
    return certificate, key


def _make(host: str) -> tuple[bytes, bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]  # roles of a run have it at both ends
    named = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pagurus")])
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(named)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        .add_extension(x509.SubjectAlternativeName(_names(host)), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)


def _names(host: str) -> list[Any]:
    from cryptography import x509

    names = dict.fromkeys(["localhost", socket.gethostname(), "127.0.0.1", "::1", host])
    result: list[Any] = []
    for name in names:
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            result.append(x509.DNSName(name))
        else:
            if not address.is_unspecified:
                result.append(x509.IPAddress(address))
    return result
