"""`pagurus doctor` on the real host: every probe runs, and what it says is what the kernel does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from daemon import doctor
from tests.support.daemon_host import missing

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the probes need root")


@pytest.fixture(scope="module")
def findings() -> dict[str, doctor.DoctorFinding]:
    return {finding.name: finding for finding in doctor.examine()}


def test_every_probe_reports(findings: dict[str, doctor.DoctorFinding]) -> None:
    assert set(findings) == {name for name, _, _ in doctor.PROBES}
    assert all(finding.fact for finding in findings.values())


def test_what_is_missing_comes_with_a_hint(findings: dict[str, doctor.DoctorFinding]) -> None:
    assert all(finding.hint for finding in findings.values() if finding.level == "miss")


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_host_that_was_set_up_is_sound(findings: dict[str, doctor.DoctorFinding]) -> None:
    assert [f for f in findings.values() if f.level == "miss"] == []
    assert findings["inspector"].fact.startswith("loaded and attached")
    assert findings["criu tcp"].fact == "dumps and restores a TCP listener"


@pytest.mark.alone
def test_the_probes_leave_nothing_behind(findings: dict[str, doctor.DoctorFinding]) -> None:
    loops = subprocess.run(["losetup", "--list", "--noheadings"], capture_output=True, text=True, check=True).stdout
    with open("/proc/self/mountinfo") as mounts:
        assert "pagurus-doctor" not in loops + mounts.read()


def test_json_is_one_document() -> None:
    done = subprocess.run([sys.executable, "-m", "pagurus", "doctor", "--json"], capture_output=True, check=False)
    assert {entry["level"] for entry in json.loads(done.stdout)} <= {"ok", "miss", "note"}


def test_a_probe_that_fails_is_a_finding() -> None:
    def broken() -> str:
        raise FileNotFoundError(2, "No such file or directory", "criu")

    finding = doctor._probe("criu", True, broken)
    assert finding.level == "miss" and "criu" in finding.fact and "make setup" in finding.hint
    assert not doctor.sound([finding])
    assert doctor.sound([doctor._probe("gpu", False, broken)])


def test_the_last_line_says_ready_or_what_to_do() -> None:
    fine, optional = (
        doctor.DoctorFinding("root", "ok", "as root"),
        doctor.DoctorFinding("vllm", "note", "not here", "get it"),
    )
    bad = doctor.DoctorFinding("criu", "miss", "CRIU 3", "run `make setup`")
    assert doctor.conclusion([fine, optional]) == "ready: start the daemon with `pagurus daemon`"
    said = doctor.conclusion([fine, bad, optional])
    assert said == "not ready, criu missing: run `make setup`, then `pagurus doctor` again"


DOCKER = "chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,net_bind_service,net_raw,sys_chroot,mknod"


@pytest.mark.parametrize("capabilities", ["-all", "-all," + ",".join(f"+{item}" for item in DOCKER.split(","))])
def test_without_privileges_one_line_says_what_helps(capabilities: str) -> None:
    """As root of a container: what is missing is read first, and no probe tries what cannot succeed."""
    command = [
        "setpriv",
        f"--bounding-set={capabilities}",
        "--inh-caps=-all",
        sys.executable,
        "-m",
        "pagurus",
        "doctor",
    ]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    result = {entry["name"]: entry for entry in json.loads(done.stdout)}
    assert (done.returncode, done.stderr) == (1, "")
    assert "CAP_SYS_ADMIN" in result["root"]["fact"] and "--privileged" in result["root"]["hint"]
    assert set(result) == {"root", *doctor.UNPRIVILEGED}
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()[-1]
    assert said.startswith("not ready, root without CAP_SYS_ADMIN and") and "docker run --privileged" in said


def test_a_daemon_without_privileges_says_in_one_line_what_helps() -> None:
    """Of `docker run` without --privileged: it once ended with a traceback of its thread pool."""
    confined = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-m", "daemon"]
    done = subprocess.run(confined, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "root without CAP_SYS_ADMIN" in done.stderr and "docker run --privileged" in done.stderr


def test_workers_of_a_daemon_that_gives_way_start_without_cap_sys_nice() -> None:
    program = "from daemon.precedence import ordinary; ordinary(); import os; print(os.getpriority(os.PRIO_PROCESS, 0))"
    confined = ["setpriv", "--bounding-set=-sys_nice", "--inh-caps=-all", sys.executable, "-c", program]
    done = subprocess.run(["nice", "-n", "19", *confined], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr
