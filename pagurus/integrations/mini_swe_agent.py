"""mini-swe-agent's environment: ``environment_class: pagurus.integrations.mini_swe_agent.PagurusEnvironment``.

Each command is a turn, so the sandbox of a run has a tree to go back in: `sandbox` and `checkpoint` of the last command
stand in the trajectory.
"""

from __future__ import annotations

import os
import platform
import weakref
from typing import Any

from minisweagent.exceptions import Submitted
from minisweagent.utils.serialize import recursive_merge
from pydantic import BaseModel

from pagurus.integrations import common
from sandbox import PagurusError

FINISHED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class PagurusEnvironmentConfig(BaseModel):
    """What stands below ``environment:`` in a configuration of mini."""

    image: str = "debian"
    checkpoint: str | None = None  # start from this one instead of an image
    cwd: str = "/"
    env: dict[str, str] = {}
    forward_env: list[str] = []
    timeout: int = 30  # seconds of a command
    interpreter: list[str] = ["bash", "-lc"]
    cpus: float | None = None
    memory_mb: int | None = 2048
    internet: bool = False
    keep: bool = False  # leave the sandbox when the run has ended


class PagurusEnvironment:
    """One sandbox, removed at the end."""

    def __init__(self, *, config_class: type = PagurusEnvironmentConfig, **options: Any) -> None:
        self.config = config_class(**options)
        self.last_checkpoint: str | None = None
        self._host: Any = common.connect_blocking()
        self._box: Any = common.start_blocking(
            self._host,
            tool="mini-swe-agent",
            image=self.config.image,
            checkpoint=self.config.checkpoint,
            limits=common.limits(cpus=self.config.cpus, memory_mb=self.config.memory_mb),
            network=common.network(self.config.internet),
            keep=self.config.keep,
        )
        # Also at the end of the interpreter, while the client's thread still runs; `__del__` would be called too late.
        self.cleanup = weakref.finalize(self, _end, self._host, self._box, self.config.keep)

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run a command; both of its outputs are one."""
        passed = {name: os.environ[name] for name in self.config.forward_env if name in os.environ}
        command = [*self.config.interpreter, action.get("command", "")]
        seconds = timeout or self.config.timeout
        try:
            # One pipe for both, so that lines keep their order.
            merged = ["/bin/sh", "-c", 'exec "$@" 2>&1', "sh", *command]
            result = self._box.exec(
                merged,
                timeout=seconds,
                cwd=cwd or self.config.cwd,
                env={**passed, **self.config.env},
                output_limit=common.MAX_OUTPUT,
            )
        except PagurusError as error:
            return _failed("", common.reason(error), type(error).__name__)
        self.last_checkpoint = result.checkpoint or self.last_checkpoint
        said = common.text(result.stdout)
        if result.timed_out:
            return _failed(said, f"the command took more than {seconds} seconds", "TimeoutExpired")
        lines = said.lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == FINISHED and result.exit_code == 0:
            extra = {"exit_status": "Submitted", "submission": "".join(lines[1:])}
            raise Submitted({"role": "exit", "content": extra["submission"], "extra": extra})
        return {"output": said, "returncode": result.exit_code, "exception_info": ""}

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        return recursive_merge(self.config.model_dump(), platform.uname()._asdict(), more)

    def serialize(self) -> dict[str, Any]:
        existing = {
            "environment": self.config.model_dump(mode="json"),
            "environment_type": f"{type(self).__module__}.{type(self).__name__}",
        }
        where = {"sandbox": self._box.id, "checkpoint": self.last_checkpoint}
        return {"info": {"config": existing, "pagurus": where}}


def _end(host: Any, box: Any, keep: bool) -> None:
    if not keep:
        box.remove()
    host.close()


def _failed(output: str, why: str, kind: str) -> dict[str, Any]:
    text = f"An error occurred while executing the command: {why}"
    return {"output": output, "returncode": -1, "exception_info": text, "extra": {"exception_type": kind}}
