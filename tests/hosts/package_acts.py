"""Acts on the Debian package as it is installed: where it is, who may use it."""

from __future__ import annotations

import shutil
import subprocess
import sys

from tests.hosts.act import TIMEOUT, Absent, Host, act, output
from tests.hosts.host_acts import main_pid
from tests.hosts.sandbox_acts import COUNT, start_counter, text


def _need_package() -> None:
    if not sys.prefix.startswith("/opt/pagurus"):
        raise Absent("not the package")


def _as_user(name: str, *groups: str) -> subprocess.CompletedProcess[str]:
    """What `pagurus ls` says to a user of these groups."""
    output("useradd", "--system", *(f"--groups={item}" for item in groups), name)
    command = ["runuser", "-u", name, "--", "pagurus", "ls"]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)


@act("package", "works without a compiler")
def _no_compiler(host: Host) -> None:
    _need_package()
    assert not [item for item in ("cc", "gcc", "clang", "make") if shutil.which(item)]


@act("package", "a member of its group uses the daemon")
def _member(host: Host) -> None:
    _need_package()
    host.need_systemd()  # its socket unit gives the group the socket
    done = _as_user("member", "pagurus")
    assert done.returncode == 0 and host.sandbox.id in done.stdout, done.stderr


@act("package", "another user may not")
def _stranger(host: Host) -> None:
    _need_package()
    done = _as_user("stranger")
    assert done.returncode == 1 and host.sandbox.id not in done.stdout


@act("package", "its files are as it brought them")
def _files(host: Host) -> None:
    _need_package()
    assert output("dpkg", "--verify", "pagurus") == ""


@act("package", "upgraded, a running sandbox and its memory stay")
def _upgrade(host: Host) -> None:
    """The same version: dpkg does what it does for another one."""
    _need_package()
    host.need_systemd()
    start_counter(host.sandbox)
    text(host.sandbox, COUNT)
    before = main_pid()
    output("dpkg", "--force-unsafe-io", "-i", "/job/pagurus.deb")
    assert main_pid() != before
    assert text(host.sandbox, COUNT) == "2"
