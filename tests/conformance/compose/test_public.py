"""Compose files in the shapes of public projects come up as docker compose brings them up, or are refused by line.

`x-expect` of a file says what of it is compared: `services` by name; `logs`, what each printed first; `run`, a shell
line in a service and what is in its output; `env`, the variables around it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sandbox import Client
from sandbox.compose.load import load
from sandbox.errors import Invalid

HERE = Path(__file__).parent / "public"
TIMEOUT = 120.0  # seconds
#: What such files hold that no sandbox has: a service's lines, and what is said of which line.
REFUSED = (
    (["cap_add: [IPC_LOCK]"], "4: services.a.cap_add: no service gets more capabilities"),
    (["sysctls:", "  - net.core.somaxconn=1024"], "5: services.a.sysctls: services do not change"),
    (["privileged: true"], "4: services.a.privileged: no service is privileged"),
    (["network_mode: service:b"], "4: services.a.network_mode: services share one network"),
    (["network_mode: host"], "4: services.a.network_mode: services share one network"),
    (["pid: host"], "4: services.a.pid: the processes of the host"),
    (["devices: [/dev/fuse]"], "4: services.a.devices: services have no devices"),
    (["networks: {n: {ipv4_address: 172.20.0.5}}"], "4: services.a.networks.n.ipv4_address: addresses are given"),
    (["volumes:", "  - /var/run/docker.sock:/var/run/docker.sock"], "5: services.a.volumes[0]: the socket of the host"),
    (["volumes:", "  - ./:/src"], "5: services.a.volumes[0]: the host directory"),
    (["deploy:", "  resources:", "    reservations:", "      devices: [{driver: nvidia}]"], "7: services.a.deploy."),
)


def about(directory: Path) -> dict[str, Any]:
    """What a directory's file expects."""
    (file,) = (path for path in directory.iterdir() if path.stem in ("compose", "docker-compose"))
    expected: dict[str, Any] = yaml.load(file.read_text(), yaml.BaseLoader)["x-expect"]
    return expected


@pytest.mark.parametrize("directory", sorted(HERE.iterdir()), ids=lambda path: path.name)
async def test_a_public_shape(host: Client, directory: Path) -> None:
    expected = about(directory)
    async with host.compose(directory, env=expected.get("env", {}), copy_binds=True, timeout=TIMEOUT) as sb:
        infos = {info.name: info for info in await sb.services.list()}
        assert sorted(infos) == sorted(expected.get("services", infos))
        for info in infos.values():
            assert info.state == "running" or info.exit_code == 0, info
        for name, text in expected.get("logs", {}).items():
            service = await sb.services.get(name)
            said = b""
            async for chunk in service.stream():
                said += chunk.data
                if len(said) >= len(text):
                    break
            assert said.decode().startswith(text)
        for name, (line, text) in expected.get("run", {}).items():
            done = await sb.exec(["sh", "-c", line], service=name)
            assert text in done.text, (name, done.text, done.stderr)


@pytest.mark.parametrize(("lines", "said"), REFUSED, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_what_a_sandbox_has_not_is_refused_by_line(tmp_path: Path, lines: list[str], said: str) -> None:
    body = "\n".join(f"    {line}" for line in lines)
    file = tmp_path / "compose.yaml"
    file.write_text(f"services:\n  a:\n    image: debian\n{body}\n  b: {{image: debian}}\nnetworks: {{n: }}\n")
    with pytest.raises(Invalid) as refused:
        load(file)
    assert f"{file}:{said}" in str(refused.value) and refused.value.hint
