"""OpenHands: its workspace's commands, files, git and pause."""

import json
import tempfile
from pathlib import Path

from openhands.sdk.workspace import BaseWorkspace

from pagurus.integrations.openhands import PagurusWorkspace

with PagurusWorkspace(working_dir="/srv/work") as workspace:
    assert isinstance(workspace, BaseWorkspace)
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "up").write_text("shell\n")
        up = workspace.file_upload(Path(place) / "up", "a.txt")
        down = workspace.file_download("a.txt", Path(place) / "down")
        content = (Path(place) / "down").read_text()
        lost = workspace.file_download("nowhere", Path(place) / "lost")
    ran = workspace.execute_command("pwd; cat a.txt; exit 3")
    slow = workspace.execute_command("sleep 60", timeout=1.0)
    workspace.execute_command("echo before > b.txt; sleep 600 & echo $! > pid")
    workspace.pause()
    workspace.resume()
    alive = workspace.execute_command("kill -0 $(cat pid) && cat b.txt")
result = {
    "moved": [up.success, down.success, content, lost.success],
    "ran": [ran.exit_code, ran.stdout],
    "slow": slow.timeout_occurred,
    "alive": [alive.exit_code, alive.stdout],
}
print(json.dumps(result))
