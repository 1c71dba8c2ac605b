"""Loads and feeds what gives the services of a composition their addresses (`addresses.bpf.c`).

Guarantee: the programs stay attached when the daemon ends, with what they know; the next one replaces them without a
moment in between.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ebpf import libbpf
from sandbox import paths
from sandbox.descriptors import closing

#: Program -> enum bpf_attach_type.
_KINDS = {"bind4": 8, "bind6": 9, "connect4": 10, "connect6": 11, "sendmsg4": 14, "sendmsg6": 15}


@dataclass(frozen=True)
class ServiceAddress:
    """What the kernel is to know of a service; addresses are numbers."""

    cgroup: int  # number of the sandbox's control group (v2)
    own: int
    first: int  # that of the sandbox's first service; the others follow
    reaches: int  # bit N: the Nth service of the sandbox
    outside: bool  # whether it may reach what is not the sandbox's own
    gateway: int = 0  # a port of 127.0.0.1 that is the host's
    engine: int = 0  # another one; with it, published ports are found at 127.0.0.1 too


class _Entry(ctypes.Structure):
    _fields_ = [
        ("cgroup", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("own", "first", "reaches", "outside", "gateway", "engine")),
    ]


class _PublishedPort(ctypes.Structure):
    _fields_ = [("cgroup", ctypes.c_uint64), ("port", ctypes.c_uint32), ("unused", ctypes.c_uint32)]


class _PublishedPlace(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint32), ("port", ctypes.c_uint32)]


class Addresses:
    """The programs, loaded. One for a daemon."""

    def __init__(self, loaded: libbpf.Object) -> None:
        self._object = loaded
        self._map = loaded.map_fd("services")
        self._published = loaded.map_fd("published")

    @classmethod
    def load(cls, path: Path | None = None) -> Addresses:
        """Raises OSError with the kernel's words. Blocks, some milliseconds."""
        loaded = libbpf.Object(path or paths.addresses_object())
        try:
            loaded.load()
        except OSError:
            loaded.close()
            raise
        return cls(loaded)

    def announce(self, services: Mapping[int, ServiceAddress]) -> None:
        """Say which service has its root in which mount, by the number of the mount."""
        for number, one in services.items():
            entry = _Entry(one.cgroup, one.own, one.first, one.reaches, int(one.outside), one.gateway, one.engine)
            libbpf.put(self._map, number, entry)

    def forget(self, mounts: Iterable[int]) -> None:
        """Those mounts are gone."""
        for number in mounts:
            libbpf.delete(self._map, number)

    def publish(self, cgroup: int, ports: Mapping[int, tuple[int, int]]) -> None:
        """Have ports of 127.0.0.1 lead to an address and a port of a service, for programs that are in none, or in one
        with an engine."""
        for port, (address, target) in ports.items():
            libbpf.put(self._published, _PublishedPort(cgroup, port, 0), _PublishedPlace(address, target))

    def withdraw(self, cgroup: int, ports: Iterable[int]) -> None:
        """These lead nowhere else any more."""
        for port in ports:
            libbpf.delete(self._published, _PublishedPort(cgroup, port, 0))

    def attach(self, cgroup: Path) -> None:
        """Have all in a control group (v2) obey. Idempotent. Raises OSError."""
        with closing(os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as group:
            for program, kind in _KINDS.items():
                libbpf.attach_to_cgroup(self._object.program_fd(program), group, kind)

    def close(self) -> None:
        """Unload; what is attached stays."""
        self._object.close()
