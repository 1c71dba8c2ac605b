"""The networks, links, ports and addresses of one service, and which host port is published by which."""

from __future__ import annotations

import ipaddress
import re

from sandbox.compose.resources import NAME, Resources
from sandbox.compose.values import Value
from sandbox.messages.services import PublishedPort

FIRST_FREE = 32_768  # of the numbers that ports get which name none
_PORT = re.compile(
    r"(?:(?P<address>\[[0-9a-fA-F:.]+\]|\d+(?:\.\d+){3}):)?(?:(?P<published>\d+(?:-\d+)?)?:)?(?P<target>\d+(?:-\d+)?)"
    r"(?:/(?P<protocol>[a-z]+))?"
)
_HOST_GATEWAY = "host-gateway"
_REFUSED_MODES = "services share one network; this mode is not supported"


def networks(name: str, service: Value, resources: Resources) -> tuple[dict[str, list[str]], dict[str, bool]]:
    """The networks of a service with its other names there, and whether each is internal."""
    mode, said = service.get("network_mode"), service.get("networks")
    if mode is not None and not said:
        if mode.text() == "none":
            return {f"none-{name}"[:63]: []}, {f"none-{name}"[:63]: True}
        if mode.text() not in ("bridge", "default"):
            raise mode.refuse(_REFUSED_MODES, "remove it, or use networks")
    if mode is not None and said is not None:
        raise mode.refuse("it excludes `networks`", "remove one of the two")
    result: dict[str, list[str]] = {}
    internal: dict[str, bool] = {}
    for network, options in said.map().items() if said is not None and said.map() else [("default", None)]:
        use = options if options is not None else service
        internal[network] = resources.network(use, network)
        result[network] = _aliases(options, resources) if options is not None else []
    if (container := service.get("container_name")) is not None:
        _need_name(container)
        result = {network: [*names, container.name()] for network, names in result.items()}
    return result, internal


def _aliases(options: Value, resources: Resources) -> list[str]:
    for key, value in options.map().items():
        if key in ("ipv4_address", "ipv6_address", "link_local_ips") and not value.is_empty:
            raise value.refuse("addresses are given by the sandbox", "remove it, and use the name of the service")
        if key in ("mac_address", "driver_opts", "interface_name") and not value.is_empty:
            resources.note(value, "services share one network interface")
    options.only(
        "aliases", "priority", "gw_priority", "ipv4_address", "ipv6_address", "link_local_ips", "mac_address",
        "driver_opts", "interface_name",
    )  # fmt: skip
    names = options.get("aliases")
    return [_need_name(item) for item in names.items()] if names is not None else []


def _need_name(value: Value) -> str:
    if NAME.fullmatch(value.name()) is None:
        raise value.refuse(f"{value.text()!r} is no name", "letters, digits, _, . and -, at most 63")
    return value.text()


def links(service: Value) -> list[tuple[str, str, Value]]:
    """Which other services it names how: target, alias, and where that stands."""
    result = []
    said = service.get("links")
    for item in said.items() if said is not None else []:
        target, _, alias = item.name().partition(":")
        if NAME.fullmatch(alias or target) is None:
            raise item.refuse(f"{item.text()!r} is no link", "SERVICE or SERVICE:ALIAS")
        result.append((target, alias or target, item))
    return result


def extra_hosts(service: Value, resources: Resources) -> dict[str, str]:
    """Names with the addresses that the file gives them."""
    result: dict[str, str] = {}
    said = service.get("extra_hosts")
    for name, value in said.entries("=:").items() if said is not None else ():
        address = value.text().strip("[]")
        if address == _HOST_GATEWAY:
            resources.note(value, f"the host is not reached from a sandbox: {name} is not set")
            continue
        try:
            result[name] = str(ipaddress.ip_address(address))
        except ValueError:
            raise value.refuse(f"{value.text()!r} is no address", "such as 10.0.0.7") from None
        if NAME.fullmatch(name) is None:
            raise value.refuse(f"{name!r} is no name", "letters, digits, _, . and -, at most 63")
    return result


class Ports:
    """The published ports of a project: no number is given twice."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._taken: dict[int, str] = {}
        self._pending: list[tuple[str, int, range, Value]] = []  # those that may have one of several numbers
        self._result: dict[str, list[PublishedPort]] = {}

    def take(self, name: str, service: Value) -> None:
        """The ports of a service; what leaves the number open gets one in :meth:`of`, once all are taken."""
        said = service.get("ports")
        for item in said.items() if said is not None else []:
            targets, published, protocol = _short(item) if isinstance(item.data, str) else _long(item)
            if protocol != "tcp":
                self._resources.note(item, f"{protocol} ports are reached by services only")
                continue
            if published is None:
                self._pending += [(name, target, range(target, target + 1), item) for target in targets]
            elif len(published) == len(targets):
                for target, number in zip(targets, published, strict=True):
                    self._publish(name, target, number, item)
            elif len(targets) == 1:
                self._pending.append((name, targets[0], published, item))
            else:
                raise item.refuse("the two ranges have different lengths", "8000-8005:9000-9005")

    def of(self) -> dict[str, list[PublishedPort]]:
        """All of them, by service."""
        for name, target, numbers, item in self._pending:
            free = next((number for number in numbers if number not in self._taken), None)
            if free is None and len(numbers) > 1:
                raise item.refuse("no number of this range is free", "name a larger one")
            if free is None:
                free = next(number for number in range(FIRST_FREE, 65_536) if number not in self._taken)
            self._publish(name, target, free, item)
        self._pending = []
        return self._result

    def _publish(self, name: str, target: int, number: int, item: Value) -> None:
        if (other := self._taken.setdefault(number, name)) != name:
            raise item.refuse(f"{other} publishes the port {number} as well", "choose another number for one of them")
        one = PublishedPort(target=target, published=number)
        if any(earlier.published == number and earlier != one for earlier in self._result.get(name, [])):
            raise item.refuse(f"the port {number} is published twice", "choose another number for one of them")
        if one not in self._result.setdefault(name, []):
            self._result[name].append(one)


def _short(item: Value) -> tuple[range, range | None, str]:
    match = _PORT.fullmatch(item.name())
    if match is None:
        raise item.refuse(f"{item.text()!r} is no port", "PUBLISHED:PORT, such as 8080:80")
    published = match["published"]
    return (
        _range(item, match["target"]),
        None if published in (None, "0") else _range(item, published),
        match["protocol"] or "tcp",
    )


def _long(item: Value) -> tuple[range, range | None, str]:
    item.only("target", "published", "host_ip", "protocol", "mode", "app_protocol", "name")
    target, published, protocol = item.get("target"), item.get("published"), item.get("protocol")
    if target is None:
        raise item.refuse("it has no target", "give the port of the service")
    number = published.text() if published is not None else ""
    return (
        _range(target, target.text()),
        None if number in ("", "0") or published is None else _range(published, number),
        protocol.text() if protocol is not None else "tcp",
    )


def _range(value: Value, text: str) -> range:
    low, _, high = text.partition("-")
    try:
        result = range(int(low), int(high or low) + 1)
    except ValueError:
        raise value.refuse(f"{text!r} is no port") from None
    if not result or result[0] < 1 or result[-1] > 65_535 or len(result) > 1000:
        raise value.refuse(f"{text!r} is no port or range of at most 1,000", "1 to 65535")
    return result
