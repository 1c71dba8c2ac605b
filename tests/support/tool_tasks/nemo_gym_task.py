"""NeMo Gym: its public sandbox object over the provider that its registry finds by name."""

import json
import tempfile
from pathlib import Path

from nemo_gym.sandbox.api import Sandbox
from nemo_gym.sandbox.providers import SandboxSpec

spec = SandboxSpec(
    image="debian",
    workdir="/srv",
    env={"CRAB": "hermit"},
    files={"/srv/a.txt": "shell\n"},
    resources={"cpu": 1, "memory_mib": 256},
    ttl_s=600,
)
with Sandbox({"pagurus": {}}, spec) as box:
    box.start()
    result = box.exec("echo $CRAB; cat a.txt; echo no >&2; exit 3")
    result = {"out": result.stdout, "err": result.stderr, "code": result.return_code, "status": str(box.status().value)}
    result["slow"] = box.exec("sleep 60", timeout_s=1).error_type
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "up").write_text("up\n")
        box.upload(Path(place) / "up", "/srv/up")
        box.download("/srv/up", Path(place) / "down")
        result["down"] = (Path(place) / "down").read_text()
print(json.dumps(result))
