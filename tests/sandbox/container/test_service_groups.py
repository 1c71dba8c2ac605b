"""Groups of services below those of a sandbox, on this host's hierarchies."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.container.cgroup import Cgroup
from sandbox.container.service_groups import ServiceGroups, limited
from sandbox.messages import Composition, Limits, Service
from sandbox.messages.services import ServiceLimits
from tests.support.daemon_host import missing

SANDBOX = Limits(cpus=1.0, memory="256MiB", processes=100)


def composed(**limits: ServiceLimits) -> Composition:
    services = {name: Service(image="debian", limits=one) for name, one in limits.items()}
    return Composition(services=services, main=next(iter(services), ""))


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    if reason := missing():
        pytest.skip(reason)
    made = Cgroup(f"test-{secrets.token_hex(4)}")
    if made.pure:
        pytest.skip("services have no groups of their own on v2")
    made.create()
    made.apply(SANDBOX)
    try:
        yield made
    finally:
        for place in (made.path, *made.v1.values()):
            for group, _, _ in os.walk(place, topdown=False):
                Path(group).rmdir()


FILES = {"memory": "memory.limit_in_bytes", "cpu": "cpu.cfs_quota_us", "pids": "pids.max"}


def read(groups: dict[str, Path]) -> list[str]:
    return [(groups[controller] / file).read_text().strip() for controller, file in FILES.items()]


def test_services_with_limits_have_groups(cgroup: Cgroup) -> None:
    own = ServiceLimits(cpus=0.5, memory="64MiB", processes=10)
    composition = composed(plain=ServiceLimits(), own=own, greedy=ServiceLimits(cpus=8.0))
    assert set(limited(composition)) == {"own", "greedy"} and limited(None) == {}
    groups = ServiceGroups(cgroup, None)
    assert groups.of("own") == {}
    groups.divide(composition, SANDBOX)
    assert groups.of("plain") == {} and set(groups.paths()) == {"own", "greedy"}
    limits = [str(64 << 20), "50000", "10"]
    assert read(groups.of("own")) == limits
    assert read(groups.of("greedy"))[1] == "100000"  # no more than the sandbox
    groups.lift()
    memory, *rest = read(groups.of("own"))
    assert int(memory) > 1 << 60 and rest == ["-1", "max"]
    groups.apply(SANDBOX)
    assert read(groups.of("own")) == limits


def test_groups_go_with_their_services(cgroup: Cgroup) -> None:
    one = ServiceLimits(processes=5)
    groups = ServiceGroups(cgroup, None)
    groups.divide(composed(a=one, b=one), SANDBOX)
    places = [*groups.of("a").values(), *groups.of("b").values()]
    groups.divide(composed(a=ServiceLimits(), b=one), SANDBOX)
    assert groups.of("a") == {} and set(groups.of("b").values()) < set(places)
    assert [path.is_dir() for path in places] == ["service-b" in path.name for path in places]
    again = ServiceGroups(cgroup, composed(b=one))  # of another daemon
    assert again.of("b") == groups.of("b") != {}


def test_a_process_joins_by_what_is_opened(cgroup: Cgroup) -> None:
    groups = ServiceGroups(cgroup, None)
    groups.divide(composed(a=ServiceLimits(processes=5)), SANDBOX)
    for root in ("", "/elsewhere", "/services/b"):
        with groups.opened(root) as opened:
            assert opened == []
    with groups.opened("/services/a") as opened:
        if not (child := os.fork()):
            try:
                for descriptor in opened:
                    os.write(descriptor, b"0")
                lines = Path("/proc/self/cgroup").read_text().split()
                os._exit(sum("/service-a" in line for line in lines) != len(opened))
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
