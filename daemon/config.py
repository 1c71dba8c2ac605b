"""How a daemon is configured: options of the command line over a TOML file over defaults.

::

    # /etc/pagurus/daemon.toml, for `pagurus daemon --config`
    listen = "0.0.0.0:8700"
    tls_cert = "/etc/pagurus/cert.pem"
    tls_key = "/etc/pagurus/key.pem"
"""

from __future__ import annotations

import argparse
import ipaddress
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from daemon.wording import plain
from sandbox.container.cgroup import parse_bytes
from sandbox.errors import Invalid
from sandbox.tree.pool import SMALLEST


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one daemon."""

    socket: Path | None = None  # None: pagurus.sock in `run`
    state: Path = Path("/var/lib/pagurus")
    run: Path = Path("/run/pagurus")
    listen: str | None = None  # HOST:PORT for TCP; None: the socket only
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_self_signed: bool = False  # make a certificate at the first start; its fingerprint is logged
    plain: bool = False  # no TLS, on loopback only
    connections: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 2048  # at once
    gateway_config: Path | None = None  # upstreams of the LLM gateway, see daemon/gateway/upstream.py
    keep_last: Annotated[int, msgspec.Meta(ge=1)] | None = None  # checkpoints of a sandbox that says nothing; None: all
    prove_every: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # seconds between two restores that are tried; 0: none
    pool_size: str | int | None = None  # bytes of the pool's file, or "64GiB"; None: see Pool
    track_memory: bool = True  # captures hold only the pages that were written since the one before, where possible
    share_pages: bool = False  # owners share memory pages on the disk, and may learn what others have
    stop_sandboxes: bool = False
    e2b: bool = True  # serve clients of E2B as well as our own
    e2b_templates: dict[str, str] = {}  # names of templates and the images that they mean
    e2b_domain: str = ""  # of sandboxes' host names, as in 8000-ID.DOMAIN; "": the host that the client called
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def address(self) -> tuple[str, int] | None:
        """Where TCP listens.

        >>> DaemonConfig(listen="[::1]:8700").address
        ('::1', 8700)
        """
        return None if self.listen is None else address_of(self.listen)


def address_of(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise Invalid(f"not an address to listen on: {text!r}", hint="write it as HOST:PORT")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this host reaches it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check(config: DaemonConfig) -> DaemonConfig:
    """`config`, if it fits together. Raises Invalid."""
    if config.pool_size is not None and parse_bytes(config.pool_size) < SMALLEST:
        raise Invalid(f"a pool of {config.pool_size} is too small", hint=f"give it {SMALLEST >> 20}MiB at least")
    given = (config.tls_cert is not None, config.tls_key is not None)
    if any(given) and not all(given):
        raise Invalid("a certificate needs its key", hint="give tls_cert and tls_key")
    ways = [name for name, on in (("tls_cert", all(given)), ("tls_self_signed", config.tls_self_signed)) if on]
    if config.plain:
        ways.append("plain")
    if len(ways) > 1:
        raise Invalid(f"{' and '.join(ways)} exclude each other", hint="give one of them")
    if config.address is None:
        if ways:
            raise Invalid(f"{ways[0]} without listen", hint="say where to listen: listen = HOST:PORT")
        return config
    if not ways:
        raise Invalid(
            f"{config.listen} would be without TLS: tokens and output could be read on the way",
            hint="tls_cert and tls_key, or tls_self_signed; on loopback also plain",
        )
    if config.plain and not is_loopback(config.address[0]):
        raise Invalid(f"plain is for loopback, not for {config.address[0]}", hint="use TLS")
    return config


#: Variables of the environment that stand for an option which is not given otherwise.
VARIABLES = {
    "PAGURUS_STATE": "state",
    "PAGURUS_RUN": "run",
    "PAGURUS_GATEWAY_CONFIG": "gateway_config",
    "PAGURUS_KEEP_LAST": "keep_last",
    "PAGURUS_POOL_SIZE": "pool_size",
    "PAGURUS_TRACK_MEMORY": "track_memory",
}


def parse(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> DaemonConfig:
    """The configuration of this command line. Raises Invalid; exits on --help as argparse does."""
    parser = argparse.ArgumentParser(prog="pagurus daemon", description="Run the sandbox daemon of this host.")
    parser.add_argument("--config", type=Path, help="a TOML file with these options (dashes become underscores)")
    parser.add_argument("--socket", help="API socket (default: pagurus.sock below --run)")
    parser.add_argument("--state", help="directory that survives reboots (PAGURUS_STATE; default: /var/lib/pagurus)")
    parser.add_argument("--run", help="directory that need not (PAGURUS_RUN; default: /run/pagurus)")
    parser.add_argument("--listen", metavar="HOST:PORT", help="listen on TCP too, with TLS and tokens")
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate chain (PEM)")
    parser.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")
    parser.add_argument("--tls-self-signed", action="store_true", help="make a certificate; print its fingerprint")
    parser.add_argument("--plain", action="store_true", help="no TLS: on loopback only")
    parser.add_argument("--connections", type=int, help="most connections at once")
    parser.add_argument("--gateway-config", metavar="FILE", help="upstreams of the LLM gateway (TOML)")
    parser.add_argument("--keep-last", type=int, metavar="N", help="checkpoints kept of sandboxes that say nothing")
    parser.add_argument(
        "--prove-every", type=float, metavar="SECONDS", help="while idle, try whether checkpoints can be restored"
    )
    parser.add_argument("--pool-size", metavar="SIZE", help="of the file that holds all sandboxes, such as 64GiB")
    parser.add_argument(
        "--track-memory",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="capture only pages written since the last capture (PAGURUS_TRACK_MEMORY; default from Linux 6.7 on)",
    )
    parser.add_argument(
        "--share-pages",
        action="store_true",
        help="store equal memory pages of different owners once: less disk, less secrecy",
    )
    parser.add_argument("--stop-sandboxes", action="store_true", help="remove all sandboxes when the daemon stops")
    parser.add_argument("--no-e2b", dest="e2b", action="store_const", const=False, help="serve no clients of E2B")
    parser.add_argument("--e2b-domain", metavar="NAME", help="domain of the host names that E2B's get_host gives")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"])
    given = {
        name: value
        for name, value in vars(parser.parse_args(arguments)).items()
        if value is not None and (value or name in ("e2b", "track_memory"))
    }
    return check(load(given.pop("config", None), given, environment))


def load(file: Path | None, given: dict[str, Any], environment: Mapping[str, str]) -> DaemonConfig:
    """The environment's settings, with the file's over them, and `given` over both."""
    settings: dict[str, Any] = {}
    existing = {field: environment[name] for name, field in VARIABLES.items() if environment.get(name)}
    if file is not None:
        try:
            settings = tomllib.loads(file.read_text())
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise Invalid(f"cannot read {file}: {error}", hint="name a TOML file: --config FILE") from None
    try:
        return msgspec.convert({**existing, **settings, **given}, DaemonConfig, dec_hook=_path, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(
            f"the configuration cannot be taken: {plain(error)}", hint="see `pagurus daemon --help`"
        ) from None


def _path(kind: type, value: object) -> Path:
    if kind is Path and isinstance(value, str) and value:
        return Path(value).absolute()
    raise NotImplementedError(f"a {kind.__name__} from {value!r}")
