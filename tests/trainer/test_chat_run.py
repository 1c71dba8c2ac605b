"""A chat model learns: its folder, two engine servers in a pool, its template, a real daemon, real sandboxes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import local
from rollout.engine.client import Sampling
from rollout.engine.launch import vllm
from rollout.episode.renderer import ChatRenderer
from rollout.messages import Trajectory
from rollout.plan import read_plan
from rollout.pool.started import started
from rollout.store.samples import SampleStore
from rollout.weights.export import export
from sandbox.errors import Invalid
from sandbox.paths import CHECKOUT
from tests.support.chat_models import SMOL, need_models
from tests.support.daemon_host import Daemon
from tests.support.endpoint_engines import NO_VLLM, VLLM, small_chat_model
from trainer import config
from trainer.reports.metrics import read_lines

ENVIRONMENT = Path(__file__).resolve().parents[1] / "support" / "odd_answers.py"
PLAN = """
task = "{task}"
model = "model"
out = "runs"
steps = 2
groups = 2
size = 3
concurrency = 6
held_out = 2
faults = 0
pace = 0.0

[pool]
engines = 2
"""


def test_a_chat_model_is_trained_over_a_pool_token_by_token(daemon: Daemon, tmp_path: Path) -> None:
    need_models()
    model = small_chat_model(tmp_path / "model")
    described = json.loads((model / "tokenizer_config.json").read_bytes())
    described["chat_template"] = (model / "chat_template.jinja").read_text()
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.format(task=ENVIRONMENT))
    run, _ = config.open_run(config.make(config.read(plan)))
    assert read_plan(run).pool.engines == 2
    done = subprocess.run([sys.executable, "-m", "coordinator.local", str(run)], cwd=CHECKOUT, timeout=600)
    assert done.returncode == 0, (run / "rollout.log").read_text()

    assert {"engine-0", "engine-1"} <= {state.name for state in local.states(run)}
    store = SampleStore(run / "rollout")
    batches = [store.batch(step) for step in range(2)]
    store.close()
    renderer = ChatRenderer.load(model)
    trained = [item for batch in batches if batch is not None for g in batch.groups for item in g.trajectories]
    assert len(trained) == 12
    for trajectory in trained:
        exact(renderer, trajectory, "Write one line of shell.")
    assert {version for item in trained for version in item.versions} >= {-1, 0}
    learned = [line for line in read_lines(run / "metrics.jsonl") if "train/mismatch_kl" in line]
    assert len(learned) == 2 and abs(learned[0]["train/mismatch_kl"]) < 1e-4  # weights are published in bfloat16
    assert json.loads((run / "summary.json").read_text())["policy_version"] == 2


def exact(renderer: ChatRenderer, trajectory: Trajectory, system: str) -> None:
    """One sample, laid out by the template; the second prompt extends what was said."""
    assert trajectory.breaks == [] and len(trajectory.turns) == 2
    opening = [
        {"role": "system", "content": system},
        {"role": "user", "content": trajectory.opening},
    ]
    first = renderer.open(opening)
    assert trajectory.tokens[: len(first)] == first and not any(trajectory.mask[: len(first)])
    edges = [at for at, (left, right) in enumerate(pairwise(trajectory.mask), 1) if left != right]
    assert len(edges) == 3 and edges[0] == len(first), "prompt, answer, observation, answer"
    between = renderer.decode(trajectory.tokens[edges[1] : edges[2]])
    complete = trajectory.tokens[edges[1] - 1] in renderer.stops  # or cut at the limit: then its end is put in
    assert between.startswith("\n<|im_start|>user\n" if complete else "<|im_end|>\n<|im_start|>user\n")
    assert between.endswith("<|im_start|>assistant\n")
    assert trajectory.turns[0].observation in between


def smollm2_trained(directory: Path, trajectories: int, **changes: Any) -> Path:
    """The run folder of the example's plan with two steps, and a reward that differs within groups whatever the model
    says; what it trained is exact."""
    need_models()
    content = config.read(CHECKOUT / "examples" / "one_line" / "train.toml")
    content |= {
        "task": str(ENVIRONMENT),
        "out": str(directory / "runs"),
        "held_out": 2,
        "steps": 2,
        "size": 4,
        **changes,
    }
    run, _ = config.open_run(config.make(content))
    done = subprocess.run([sys.executable, "-m", "coordinator.local", str(run)], cwd=CHECKOUT, timeout=1500)
    assert done.returncode == 0, (run / "rollout.log").read_text()

    store = SampleStore(run / "rollout")
    batches = [store.batch(step) for step in range(2)]
    store.close()
    trained = [item for batch in batches if batch is not None for g in batch.groups for item in g.trajectories]
    assert len(trained) == trajectories
    for trajectory in trained:
        exact(ChatRenderer.load(SMOL), trajectory, "Write one line of shell.")
    learned = [line for line in read_lines(run / "metrics.jsonl") if "train/mismatch_kl" in line]
    # Versions are published in bfloat16; the trainer's weights are in fp32.
    assert len(learned) == 2 and all(abs(line["train/mismatch_kl"]) < 1e-3 for line in learned)
    assert any(line["train/tokens"] > 0 and line["train/grad_norm"] > 0 for line in learned)
    assert json.loads((run / "summary.json").read_text())["policy_version"] == 2
    return run


@pytest.mark.long
def test_smollm2_is_trained_over_the_embedded_engine(daemon: Daemon, tmp_path: Path) -> None:
    """Its pages serve what the trainer publishes, by transformers' own names."""
    smollm2_trained(tmp_path, 8, groups=1, concurrency=4, engine="embedded", pool={"engines": 1})


@pytest.mark.long
@NO_VLLM
def test_smollm2_is_trained_over_two_vllm_servers(daemon: Daemon, tmp_path: Path) -> None:
    """What it trained is exported, and transformers and vLLM load it."""
    run, renderer = smollm2_trained(tmp_path, 16, groups=2, concurrency=8), ChatRenderer.load(SMOL)
    directory = tmp_path / "exported"
    assert export(run, directory) == 2
    asyncio.run(serves_what_transformers_computes(directory, renderer, tmp_path))


async def serves_what_transformers_computes(directory: Path, renderer: ChatRenderer, home: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = renderer.open([{"role": "user", "content": "Print the working directory."}])
    async with started([vllm(slots=4, length=512, python=VLLM)], directory, 0, run=home / "serving") as pool:
        said = await pool.generate(prompt, Sampling(max_tokens=12, ignore_eos=True))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    before = AutoModelForCausalLM.from_pretrained(SMOL, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        ids = torch.tensor([prompt + said.token_ids])
        result, old = (torch.log_softmax(item(ids).logits[0, len(prompt) - 1 : -1], dim=-1) for item in (model, before))
    ours, theirs = (item[range(12), said.token_ids].tolist() for item in (result, old))
    assert said.logprobs == pytest.approx(ours, abs=1e-3)
    assert ours != theirs, "the exported model is the trained one"


@pytest.mark.parametrize(
    ("table", "said"),
    [("engines = 0", "engines"), ("engine = 2", "engine"), ('urls = "x"', "urls"), ("engines = 100", "engines")],
)
def test_a_pool_of_nonsense_is_refused_by_name(tmp_path: Path, table: str, said: str) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(f'task = "x"\n[pool]\n{table}\n')
    with pytest.raises(Invalid, match=said):
        config.make(config.read(plan))
