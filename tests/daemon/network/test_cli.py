"""``pagurus net`` and the options of ``pagurus run``: what they mean, and that they work."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pagurus.sandboxes.net import policy
from sandbox import Network, Sandbox
from sandbox.errors import Invalid
from tests.support.daemon_host import Daemon


@pytest.mark.parametrize(
    ("mode", "allow", "meant"),
    [
        (None, [], None),
        ("none", [], Network.none()),
        ("open", [], Network.open()),
        ("open", ["10.0.0.0/8"], Network.open(cidrs=["10.0.0.0/8"])),
        (None, ["*.pypi.org", "1.2.3.4:443"], Network.allow(names=["*.pypi.org"], cidrs=["1.2.3.4:443"])),
        ("allow", [], Network.allow()),
    ],
)
def test_options(mode: str | None, allow: list[str], meant: Network | None) -> None:
    assert policy(mode, allow) == meant


@pytest.mark.parametrize(("mode", "allow"), [("open", ["pypi.org"]), ("none", ["pypi.org"]), ("some", [])])
def test_options_that_contradict(mode: str, allow: list[str]) -> None:
    with pytest.raises(Invalid):
        policy(mode, allow)


async def test_net_shows_and_changes(daemon: Daemon, sb: Sandbox) -> None:
    environment = {**os.environ, "PAGURUS_RUN": str(daemon.run)}

    def pagurus(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pagurus", *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)

    shown = pagurus("net", sb.id, "--json")
    assert shown.returncode == 0 and json.loads(shown.stdout)["network"]["mode"] == "none", shown
    changed = pagurus("net", sb.id, "--allow", "pypi.org:443", "--allow", "10.0.0.0/8", "--json")
    assert json.loads(changed.stdout)["network"]["names"] == ["pypi.org:443"]
    assert "pypi.org:443 10.0.0.0/8" in pagurus("net", sb.id).stdout
    refused = pagurus("net", sb.id, "--allow", "169.254.169.254")
    assert refused.returncode and "no sandbox may reach" in refused.stderr
    assert pagurus("net", sb.id, "--network", "none").returncode == 0
