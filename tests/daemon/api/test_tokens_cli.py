"""``pagurus token``: what people type, and that the token then works over TCP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon_host import Daemon, free_port, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def pagurus(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    existing = {name: value for name, value in os.environ.items() if not name.startswith("PAGURUS_HOST")}
    return subprocess.run(
        [sys.executable, "-m", "pagurus", *arguments],
        env={**existing, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_token_is_made_used_and_revoked(tmp_path: Path) -> None:
    daemon, port = Daemon(tmp_path / "host"), free_port()
    try:
        daemon.start("--listen", f"127.0.0.1:{port}", "--tls-self-signed")
        local = {"PAGURUS_RUN": str(daemon.run)}
        made = pagurus("token", "create", "ci", "--sandboxes", "3", "--memory", "2GiB", "--days", "1", **local)
        assert made.returncode == 0, made.stderr
        text = made.stdout.strip()
        (listed,) = json.loads(pagurus("token", "ls", "--json", **local).stdout)
        assert (listed["name"], listed["scope"]) == ("ci", "exec")
        assert listed["quota"] == {"sandboxes": 3, "memory": 2 << 30}
        assert text.split("_")[1] == listed["id"] and "secret" not in listed
        outside = {
            "PAGURUS_HOST": f"https://127.0.0.1:{port}",
            "PAGURUS_TOKEN": text,
            "PAGURUS_CA": str(daemon.state / "tls/cert.pem"),
        }
        assert pagurus("ls", "--json", **outside).stdout.strip() == "[]"
        refused = pagurus("token", "ls", **outside)
        assert refused.returncode == 1 and "scope" in refused.stderr
        assert pagurus("token", "revoke", listed["id"], **local).returncode == 0
        assert "not valid" in pagurus("ls", **outside).stderr
    finally:
        daemon.clean()
