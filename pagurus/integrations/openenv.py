"""OpenEnv's container provider: ``EnvClient.from_docker_image(image, provider=PagurusContainerProvider())``.

``PagurusContainerProvider(checkpoint=ID)`` restores a container that has started already instead of starting one.
"""

from __future__ import annotations

import contextlib
import time
import urllib.request
from typing import Any

from openenv.core.containers.runtime.providers import ContainerProvider

from pagurus.integrations import common
from sandbox import Invalid

PORT = 8000
POLL = 0.05  # seconds between two looks at /health


class PagurusContainerProvider(ContainerProvider):
    """The container of one environment."""

    def __init__(
        self,
        *,
        command: list[str] | None = None,
        checkpoint: str | None = None,
        cpus: float | None = None,
        memory_mb: int | None = 2048,
        internet: bool = False,
    ) -> None:
        self._command, self._checkpoint = command, checkpoint
        self._options: dict[str, Any] = {
            "limits": common.limits(cpus=cpus, memory_mb=memory_mb),
            "network": common.network(internet),
        }
        self._stack = contextlib.ExitStack()
        self.box: Any = None

    def start_container(
        self, image: str, port: int | None = None, env_vars: dict[str, str] | None = None, **_: Any
    ) -> str:
        host: Any = self._stack.enter_context(common.connect_blocking())
        self.box = common.start_blocking(
            host, tool="openenv", image=image, checkpoint=self._checkpoint, env=env_vars or {}, **self._options
        )
        self._stack.callback(self.box.remove)
        if self._checkpoint is None:
            command = self._command or _own_command(host, image)
            self.box.processes.start(command)
        address = self._stack.enter_context(self.box.ports.forward(port or PORT))
        return f"http://{address}"

    def stop_container(self) -> None:
        self._stack.close()
        self.box = None

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            if _is_healthy(base_url):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{base_url}/health did not answer within {timeout_s:g} s")
            time.sleep(POLL)


def _is_healthy(base_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base_url}/health", timeout=5.0) as answer:
            return bool(answer.status == 200)
    except OSError:  # nothing listens yet, or it says no
        return False


def _own_command(host: Any, image: str) -> list[str]:
    config = host.images.get(image).config
    words = [*config.entrypoint, *config.cmd]
    if not words:
        raise Invalid(f"the image {image} names no command", hint="PagurusContainerProvider(command=[...])")
    return words
