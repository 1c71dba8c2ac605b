"""A model folder behind an address, from its files to an answer."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import pytest

from rollout.engine.launch import embedded
from rollout.pool.serve import of_model, serving
from sandbox.errors import NotFound
from tests.support.chat_models import need_models
from tests.support.endpoint_engines import small_chat_model
from tests.support.programs import END_TIMEOUT, Program, in_background
from tests.support.rollout_engines import publish

pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.filterwarnings("default")


async def test_a_model_folder_is_served_to_agents_by_two_engines(tmp_path: Path) -> None:
    need_models()
    model = small_chat_model(tmp_path / "small")
    launch = embedded(slots=4, length=256)
    async with (
        serving(model, launch, tmp_path / "home", engines=2, length=256) as endpoints,
        aiohttp.ClientSession() as http,
    ):
        url = f"http://{endpoints.host}:{endpoints.port}"
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0, "seed": 1}
        async with http.post(url + "/v1/chat/completions", json=body) as got:
            answer = await got.json()
            assert got.status == 200, answer
        async with http.get(url + "/v1/models") as got:
            assert (await got.json())["data"][0]["id"] == "small"
    assert answer["usage"]["completion_tokens"] == 12 and answer["choices"][0]["finish_reason"] == "length"
    (sample,) = endpoints.recorder.session("default").samples
    assert sample.versions[-12:] == [0] * 12 and sum(sample.mask) == 12
    assert not (model / "manifest.json").exists(), "somebody else's folder is left as it is"


@pytest.mark.parametrize("started", [list, in_background])
def test_the_engines_of_the_program_end_with_it(tmp_path: Path, started: Callable[[Sequence[str]], list[str]]) -> None:
    """Also when it is asked to end by something else than a terminal, and was started with SIGINT ignored."""
    need_models()
    model = small_chat_model(tmp_path / "small")
    words = ["serve", str(model), "--engine", "embedded", "--length", "256", "--port", "0"]
    command = started([sys.executable, "-m", "pagurus", *words])
    with Program(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None and "/v1 serves small" in served.stdout.readline()  # into a pipe, at once
        assert engines_of(model)
        served.terminate()
        assert served.communicate(timeout=END_TIMEOUT)[0] == "ended\n"
    assert served.returncode == 0 and not engines_of(model)


def engines_of(model: Path) -> list[int]:
    """Processes that serve this folder."""
    result = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = command.read_bytes().decode(errors="replace").split("\0")
            if "rollout.engine.embedded.server" in words and str(model) in words:
                result.append(int(command.parent.name))
    return result


def test_a_run_is_served_by_its_newest_version_and_nonsense_is_refused(tmp_path: Path) -> None:
    for version in (3, 12):
        publish(tmp_path / "run" / "weights", version)
    assert of_model(tmp_path / "run", tmp_path / "home") == (tmp_path / "home" / "model", 12)
    assert (tmp_path / "home" / "model" / "model.safetensors").exists()
    with pytest.raises(NotFound, match=r"config\.json"):
        of_model(tmp_path, tmp_path / "home")
