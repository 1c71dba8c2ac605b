"""The embedded engine names the experts of each token, in vLLM's own words; rollouts keep each token's first."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine import protocol as wire
from rollout.engine.client import Delta, EngineClient, Generation, Sampling, TurnSampling, WeightSpan
from rollout.engine.launch import VLLM_PYTHON, embedded, vllm
from rollout.engine.supervisor import EngineSupervisor
from rollout.experts import RoutedExperts, extend, within
from rollout.messages import Trajectory
from rollout.pool.answer import PartialGeneration
from sandbox.errors import Invalid

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.rollout.test_paged import made  # noqa: E402

PYTHON = Path(os.environ.get("PAGURUS_TEST_VLLM", VLLM_PYTHON))
NO_VLLM = pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM is not installed ({PYTHON}); run `make setup-vllm`")
PROMPT = [5, 9, 70, 31, 8, 8, 120, 17]
SAMPLING = Sampling(max_tokens=12, ignore_eos=True, seed=3)


def choices(count: int, first: int = 0, top: int = 250) -> np.ndarray[Any, Any]:
    """[count, 2, 2], different for each token."""
    return (np.arange(count * 4).reshape(count, 2, 2) + first) % top


# --------------------------------------------------------------------------- pieces


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 12), st.integers(0, 12), st.sampled_from([200, 60_000]))
def test_what_lies_within_is_what_was_there(start: int, count: int, first: int, last: int, top: int) -> None:
    original = choices(count, top - 3, top)
    part = RoutedExperts.of(start, original)
    assert part.end == start + count and np.array_equal(part.choices, original)
    assert RoutedExperts.read(part.written(), start) == part
    some = part.within(first, last)
    assert {some.start + n: row.tolist() for n, row in enumerate(some.choices)} == {
        start + n: row.tolist() for n, row in enumerate(original) if first <= start + n < last
    }


def test_nothing_but_numbers_is_read() -> None:
    for text in ("", "AAAA", "no base64!"):
        with pytest.raises(ValueError, match=r"."):
            RoutedExperts.read(text, 0)
    for wrong in (np.array([1.5]), np.zeros((2, 2)), np.array([[[-1]]]), np.array([["a"]])):
        with pytest.raises(ValueError, match=r"shape"):
            RoutedExperts.read(_npy(wrong), 0)


def _npy(array: np.ndarray[Any, Any]) -> str:
    import base64
    import io

    content = io.BytesIO()
    np.save(content, array)
    return base64.b64encode(content.getvalue()).decode()


def answered(count: int, experts: RoutedExperts | None) -> Generation:
    return Generation(
        token_ids=[7] * count,
        logprobs=[-1.0] * count,
        spans=[WeightSpan(3, 0, count)],
        finish_reason="stop",
        experts=experts,
    )


def test_a_trajectory_keeps_the_first_report_of_each_token() -> None:
    trajectory = Trajectory()
    trajectory.put([1, 2, 3])
    trajectory.sampled(answered(2, RoutedExperts.of(0, choices(4))))  # the last token has not been read yet
    assert trajectory.routed == 4
    trajectory.put([4])
    trajectory.sampled(answered(2, RoutedExperts.of(0, choices(7, first=100))))
    assert [(part.start, part.end) for part in trajectory.experts] == [(0, 4), (4, 7)]
    assert trajectory.experts[1].choices[0].tolist() == choices(7, first=100)[4].tolist()
    trajectory.breaks.append(8)  # the agent forgot: a new sample begins
    trajectory.put([1, 2])
    trajectory.sampled(answered(1, RoutedExperts.of(0, choices(2, first=50))))
    assert [(part.start, part.end) for part in trajectory.experts] == [(0, 4), (4, 7), (8, 10)]
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(trajectory), type=Trajectory)
    assert again == trajectory


def test_an_answer_without_a_report_leaves_a_hole() -> None:
    trajectory = Trajectory()
    trajectory.put([1, 2, 3])
    trajectory.sampled(answered(2, None))
    assert trajectory.experts == [] and trajectory.routed == 0
    trajectory.sampled(answered(1, RoutedExperts.of(0, choices(5))))  # the next one reports it all
    assert [(part.start, part.end) for part in trajectory.experts] == [(0, 5)]


def test_a_successor_gets_those_of_the_turns_that_it_takes_over() -> None:
    parts: list[RoutedExperts] = []
    extend(parts, RoutedExperts.of(0, choices(4)), 0, 4)
    extend(parts, RoutedExperts.of(0, choices(9)), 0, 9)
    trajectory = Trajectory()
    trajectory.append(0, [1] * 5, [0] * 5, [0.0] * 5, [-1] * 5, within(parts, 0, 4))
    trajectory.append(5, [1] * 5, [0] * 5, [0.0] * 5, [-1] * 5, within(parts, 4, 9))
    assert trajectory.experts == parts
    trajectory.append(5, [2] * 3, [0] * 3, [0.0] * 3, [-1] * 3, [])  # the second turn was another one
    assert np.concatenate([part.choices for part in trajectory.experts]).tolist() == choices(5).tolist()


def test_a_report_of_tokens_that_were_dropped_is_no_report() -> None:
    """A server ends an answer while it takes another version, and the next one breaks off."""
    answer = PartialGeneration(Sampling(max_tokens=6))
    answer.begin(3)
    answer.doubt()
    answer.add(Delta(token_ids=[1, 2], logprobs=[-1.0, -1.0], experts=RoutedExperts.of(0, choices(4))))
    answer.begin(4)
    assert answer.token_ids == []
    answer.add(Delta(token_ids=[5, 6], logprobs=[-1.0, -1.0]))
    assert answer.generation.token_ids == [5, 6] and answer.generation.experts is None


# --------------------------------------------------------------------------- engines


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("mixture") / "weights", "Qwen3Moe")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineClient]:
    launch = embedded(slots=8, length=256, experts=True)
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    async with EngineSupervisor(launch, mixture, 0, log=log) as supervisor:
        yield await supervisor.wait_serving()


def expected(mixture: Path, tokens: list[int]) -> np.ndarray[Any, Any]:
    """[tokens, layers, 2], sorted, as transformers itself chooses."""
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture)
    layers: list[Any] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, given, result: layers.append(result[2]))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return np.sort(torch.stack(layers, 1).numpy(), axis=-1)


def sorted_choices(report: RoutedExperts | None) -> np.ndarray[Any, Any]:
    assert report is not None
    return np.sort(report.choices, axis=-1)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_answer_names_the_experts_of_each_token_but_the_last(engine: EngineClient, mixture: Path) -> None:
    answer = await engine.generate(PROMPT, SAMPLING)
    exact = expected(mixture, PROMPT + answer.token_ids)[:-1]
    assert np.array_equal(sorted_choices(answer.experts), exact)
    streamed = [delta async for delta in engine.stream(PROMPT, SAMPLING)]
    assert [delta.experts is not None for delta in streamed] == [False] * (len(streamed) - 1) + [True]
    assert np.array_equal(sorted_choices(streamed[-1].experts), exact)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_known_of_the_prompt_is_left_out(engine: EngineClient, mixture: Path) -> None:
    """Also of a prompt that the engine has in its cache."""
    first = await engine.generate(PROMPT, SAMPLING)
    prompt = [*PROMPT, *first.token_ids, 44, 45]
    assert first.experts is not None
    covered = first.experts.end
    second = await engine.generate(prompt, TurnSampling.of(SAMPLING, routed=covered))
    assert second.experts is not None and second.experts.start == covered
    assert np.array_equal(sorted_choices(second.experts), expected(mixture, prompt + second.token_ids)[covered:-1])
    whole = await engine.generate(prompt, SAMPLING)
    assert whole.experts is not None and whole.experts.start == 0
    assert np.array_equal(sorted_choices(whole.experts), expected(mixture, prompt + whole.token_ids)[:-1])


@pytest.mark.asyncio(loop_scope="module")
async def test_more_than_the_prompt_is_not_known(engine: EngineClient) -> None:
    with pytest.raises(Invalid, match="routed_experts_prompt_start"):
        await engine.generate(PROMPT, TurnSampling.of(SAMPLING, routed=len(PROMPT) + 1))


OWN_WORDS = """
import json, sys
import numpy as np
from vllm import SamplingParams
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensStreamChoice, GenerateTokensChoice
from vllm.utils.serial_utils import numpy2base64
SamplingParams(routed_experts_prompt_start=5)
for kind, top in ((GenerateTokensChoice, 200), (GenerateTokensStreamChoice, 60000)):
    choices = (np.arange(24) + top).astype(np.uint8 if top < 256 else np.uint16).reshape(3, 4, 2)
    made = kind(index=0, finish_reason="stop", token_ids=[3], routed_experts=numpy2base64(choices))
    print(json.dumps([made.model_dump(), choices.tolist()]))
"""


@NO_VLLM
def test_what_vllm_writes_is_read() -> None:
    """Its server reports experts on GPUs only; these are its own structs and its own encoding."""
    done = subprocess.run([PYTHON, "-c", OWN_WORDS], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    assert len(lines) == 2
    for line in lines:
        choice, exact = msgspec.json.decode(line.encode(), type=tuple[wire.Choice, list[list[list[int]]]])
        assert choice.routed_experts is not None
        assert RoutedExperts.read(choice.routed_experts, 7).choices.tolist() == exact


@NO_VLLM
def test_vllm_on_a_cpu_is_refused() -> None:
    with pytest.raises(Invalid, match="GPUs only"):
        vllm(python=PYTHON, experts=True)
    argv = vllm(python=PYTHON, experts=True, gpu=True).command(Path("/model"), 1)
    assert "--enable-return-routed-experts" in argv.argv and argv.env["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_a_model_without_experts_is_refused_by_the_embedded_engine(tmp_path: Path) -> None:
    from rollout.engine.embedded.core import Core

    with pytest.raises(Invalid, match="mixture of experts"):
        Core(made(tmp_path / "llama", "Llama"), version="0", slots=2, length=64, experts=True)
