"""Where the services of a composition lie in the one sandbox that they are, and by which names they find each other.

Pure. Each has a directory as its root, in which proc, sys and dev of the sandbox are mounted, and an address of the
loopback network, so that two may listen on the same port (`ebpf/addresses.bpf.c`).

::

    /services/NAME    root of a service: the tree of its image
    /volumes/NAME     a volume, mounted wherever services want it
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import PurePosixPath

from sandbox.messages.services import Composition, Service

SERVICES, VOLUMES = "/services", "/volumes"
ALONE = "none."  # how a network begins in which a container is alone, for it is to have none
#: What of the sandbox each service has, with all that is mounted there: masks over proc, control groups, terminals.
SHARED = ("/proc", "/sys", "/dev")
FIRST = int(IPv4Address("127.1.0.2"))
RESOLV_CONF = b"nameserver 127.0.0.53\noptions timeout:2 attempts:5\n"


@dataclass(frozen=True)
class Join:
    """A directory or file that the sandbox has at a second place too."""

    source: str  # in the sandbox, absolute
    target: str
    read_only: bool = False
    recursive: bool = False  # with what is mounted in it


def root(service: str) -> str:
    """
    >>> root("db")
    '/services/db'
    """
    return f"{SERVICES}/{service}"


def below(service: str, path: str) -> str:
    """A path of a service, as the sandbox knows it.

    >>> below("db", "/var/lib")
    '/services/db/var/lib'
    """
    return str(PurePosixPath(root(service)) / path.lstrip("/"))


def owner(path: str) -> str | None:
    """The service in whose root a path of the sandbox lies.

    >>> owner("/services/db/etc/passwd"), owner("/volumes/data")
    ('db', None)
    """
    parts = PurePosixPath(path).parts
    return parts[2] if len(parts) > 2 and parts[:2] == ("/", "services") else None


def slot(composition: Composition, service: str) -> int:
    """The number of a service's address among those of its sandbox."""
    own = composition.services[service].slot
    return list(composition.services).index(service) if own is None else own


def address(composition: Composition, service: str) -> str:
    """IPv4 address of a service, in the loopback network of the sandbox.

    >>> from sandbox.messages import Composition, Service
    >>> address(Composition(services={"web": Service(image="a"), "db": Service(image="b")}, main="web"), "db")
    '127.1.0.3'
    """
    return str(IPv4Address(FIRST + slot(composition, service)))


def reaches(composition: Composition, service: str) -> list[str]:
    """The services with which one shares a network, itself among them."""
    own = set(composition.services[service].networks)
    return [
        name for name, other in composition.services.items() if name == service or not own.isdisjoint(other.networks)
    ]


def goes_outside(composition: Composition, service: str) -> bool:
    """Whether a service may reach what the sandbox may reach: one of its networks is not internal."""
    return any(not composition.networks[name].internal for name in composition.services[service].networks)


def joins(composition: Composition | None) -> tuple[Join, ...]:
    """What is mounted in the root of each service, in order."""
    if composition is None:
        return ()
    return tuple(join for name in composition.services for join in joins_of(composition, name))


def joins_of(composition: Composition, name: str) -> list[Join]:
    """Likewise of one."""
    service = composition.services[name]
    own = [
        *(Join(volume(one.name), below(name, one.target), one.read_only) for one in service.volumes),
        *(Join(one.source, below(name, one.target), one.read_only) for one in service.trees),
    ]
    return [
        Join(root(name), root(name)),  # a mount of its own: what `df` and `findmnt` look for
        *(Join(shared, below(name, shared), recursive=True) for shared in SHARED),
        *sorted(own, key=lambda join: join.target.count("/")),
    ]


def volume(name: str) -> str:
    """Where a volume lies."""
    return f"{VOLUMES}/{name}"


def mount_point(service: Service, target: str) -> tuple[str, str]:
    """What of the sandbox is to have a place for what a service has at `target`: the volume, directory of the sandbox
    or directory of the host in which that lies, or "", its own root; and the path in there.

    >>> from sandbox.messages.services import Volume
    >>> mount_point(Service(image="a", volumes=[Volume(name="v", target="/data")]), "/data/sub")
    ('/volumes/v', '/sub')
    """
    places = {one.target: volume(one.name) for one in service.volumes}
    places |= {one.target: one.source for one in service.trees}
    places |= {one.target: one.source for one in service.mounts}
    for outer in map(str, PurePosixPath(target).parents):
        if outer in places:
            return places[outer], target.removeprefix(outer)
    return "", target


def overlap(service: Service, *, reserved: Collection[str] = ()) -> tuple[str, str] | None:
    """Two places of a service of which one lies in the other and cannot: volumes and mounts may, as they are mounted.

    `reserved`: more places with nothing in them.
    """
    mounted = [one.target for one in service.volumes]
    mounted += [*(one.target for one in service.trees), *(one.target for one in service.mounts)]
    other = [*service.tmpfs, *reserved]
    for outer, inner in itertools.permutations([*mounted, *other], 2):
        apart = outer in other or inner in other or outer == inner
        if apart and PurePosixPath(inner).is_relative_to(outer):
            return outer, inner
    return None


def hosts(composition: Composition, service: str) -> bytes:
    """The /etc/hosts of a service, but for the line of the sandbox's host name."""
    own = composition.services[service]
    lines = ["127.0.0.1\tlocalhost", "::1\tlocalhost ip6-localhost ip6-loopback"]
    for name in reaches(composition, service):
        other = composition.services[name]
        names = [name]
        for network, aliases in other.networks.items():
            if network in own.networks or name == service:
                names += aliases
        if name == service and own.hostname:
            names.append(own.hostname)
        lines.append(f"{address(composition, name)}\t{' '.join(dict.fromkeys(names))}")
    lines += [f"{where}\t{name}" for name, where in own.extra_hosts.items()]
    return "\n".join(lines).encode() + b"\n"
