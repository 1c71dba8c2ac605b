"""smolagents' executor: ``CodeAgent(..., executor=PagurusExecutor())``.

Each step ends a turn, so its variables are part of a checkpoint: a step that runs out of time is undone, and
`checkpoint` names the state behind the last one.
"""

from __future__ import annotations

import json
import posixpath
import re
from importlib import resources
from typing import Any

from smolagents.local_python_executor import CodeOutput
from smolagents.remote_executors import RemotePythonExecutor
from smolagents.utils import AgentError

from pagurus.integrations import common
from sandbox import PagurusError

PLACE = "/opt/pagurus/code_server.py"
PORT = 49999
_IMPORT = re.compile(r"import [\w.]+( as \w+)?|from [\w.]+ import [\w, ]+")
TIMEOUT = 300.0  # seconds of one step
CALL = f"""
import sys, urllib.request
request = urllib.request.Request("http://127.0.0.1:{PORT}/execute", sys.stdin.buffer.read())
with urllib.request.urlopen(request) as answer:
    for line in answer:
        sys.stdout.buffer.write(line)
"""
WAIT = f"""
import time, urllib.request
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:{PORT}/health")
        break
    except OSError:
        time.sleep(0.05)
"""


class PagurusExecutor(RemotePythonExecutor):
    """One sandbox with Python in it, removed by `cleanup`, which the agent calls at its end."""

    def __init__(
        self,
        additional_imports: list[str] | None = None,
        logger: Any = None,
        allow_pickle: bool = False,
        *,
        image: str = "debian",
        checkpoint: str | None = None,
        memory_mb: int | None = 2048,
        internet: bool = False,
        timeout: float = TIMEOUT,
    ) -> None:
        super().__init__(additional_imports or [], logger or _Quiet(), allow_pickle)
        self._timeout, self._tolerant = timeout, False
        self.checkpoint: str | None = None  # of the state behind the last step
        self._host: Any = common.connect_blocking()
        try:
            self.box: Any = common.start_blocking(
                self._host,
                tool="smolagents",
                image=image,
                checkpoint=checkpoint,
                limits=common.limits(memory_mb=memory_mb),
                network=common.network(internet),
            )
            if checkpoint is None:  # else the process with its variables is there
                self._begin()
            self.installed_packages = self.install_packages(self.additional_imports)
        except BaseException:
            self.cleanup()
            raise

    def _begin(self) -> None:
        source = resources.files("pagurus.integrations").joinpath("code_server.py").read_bytes()
        self.box.files.mkdir(posixpath.dirname(PLACE))
        self.box.files.write(PLACE, source)
        self.box.processes.start(["python3", PLACE, "--port", str(PORT)])
        self._need(self.box.exec(["python3", "-c", WAIT], timeout=self._timeout))

    def _need(self, result: Any) -> None:
        if result.exit_code != 0 or result.timed_out:
            said = common.text(result.stderr)[-2000:]
            raise AgentError(f"Python in the sandbox does not answer: {said}", self.logger)
        self.checkpoint = result.checkpoint or self.checkpoint

    def send_tools(self, tools: dict[str, Any]) -> None:
        """Their code begins with imports of all that smolagents allows: what the image lacks is no fault of a tool."""
        self._tolerant = True
        try:
            super().send_tools(tools)
        finally:
            self._tolerant = False

    def run_code_raise_errors(self, code: str) -> CodeOutput:
        body = json.dumps({"code": _tolerating(code) if self._tolerant else code}).encode()
        with common.failures_named():
            result = self.box.exec(
                ["python3", "-c", CALL], stdin=body, timeout=self._timeout, output_limit=common.MAX_OUTPUT
            )
            if result.timed_out:
                self.box.restore(self.checkpoint)
                raise AgentError(
                    f"The code took more than {self._timeout:g} seconds. What it did was undone.", self.logger
                )
        self._need(result)
        return self._understood([json.loads(line) for line in common.text(result.stdout).splitlines()])

    def _understood(self, said: list[dict[str, Any]]) -> CodeOutput:
        logs = "".join(item["text"] for item in said if item["type"] in ("stdout", "stderr"))
        output = None
        for item in said:
            if item["type"] == "error" and item["name"] == self.FINAL_ANSWER_EXCEPTION:
                answer = self._deserialize_final_answer(item["final"], allow_pickle=self.allow_pickle)
                return CodeOutput(output=answer, logs=logs, is_final_answer=True)
            if item["type"] == "error":
                text = f"{logs}\nExecuting code yielded an error:\n{item['name']}\n{item['value']}\n{item['traceback']}"
                raise AgentError(text, self.logger)
            if item["type"] == "result" and item["is_main_result"]:
                output = item["text"]
        return CodeOutput(output=output, logs=logs, is_final_answer=False)

    def cleanup(self) -> None:
        """Remove the sandbox."""
        try:
            if hasattr(self, "box"):
                self.box.remove()
        except PagurusError as error:
            raise RuntimeError(common.reason(error)) from error
        finally:
            self._host.close()


def _tolerating(code: str) -> str:
    guarded = "try:\n    {}\nexcept ImportError:\n    pass"
    return "\n".join(guarded.format(line) if _IMPORT.fullmatch(line) else line for line in code.splitlines())


class _Quiet:
    """Where no logger is given: an agent hands over its own only to executors that it makes itself."""

    def log(self, *_: Any, **__: Any) -> None: ...

    def log_error(self, *_: Any, **__: Any) -> None: ...
