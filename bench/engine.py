"""How fast an engine server answers, and how long a change of weights holds it.

::

    pagurus bench engine [--json] [--engine embedded|vllm] [--batch 64] [--paged]
    pagurus bench engine --roofline [--model FOLDER] [--device cuda] [--dtype bfloat16] [--threads 2] [--json]

`tokens_per_s`: sampled tokens over the wall time of `batch` requests at once (60 tokens in, 128 out), through HTTP.
`turn_tokens_per_s`: the same for second turns, whose prompt repeats the first turn (prefix reuse).
`publish_ms`, `paused_ms`: median of five publications while the batch is in flight: in all, and without sampling.
`--paged`: the embedded engine keeps a paged cache for the small model, too. `--roofline`: without a server, how near
the embedded engine is to what the device does at best (bench/harness/roofline.py).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from pathlib import Path

from bench.harness import aftermath, command
from rollout.engine.client import Generation, Sampling
from rollout.engine.launch import KINDS
from rollout.engine.supervisor import EngineSupervisor

PROMPT, OUTPUT, EXTRA, PUBLICATIONS = 60, 128, 20, 5
VOCABULARY = 320  # a multiple of 64


def publish(directory: Path) -> Path:
    """Two versions of random weights of the demo's size, 0.95 M parameters."""
    from tokenizers import Tokenizer, models

    from rollout.engine.embedded.model import ModelConfig, Qwen3
    from rollout.weights.store import VersionStore
    from trainer.weights import Publisher

    policy = Qwen3(ModelConfig(vocab_size=VOCABULARY))
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0")).to_str()
    files = {"config.json": json.dumps(policy.config.to_json()).encode(), "tokenizer.json": tokenizer.encode()}
    publisher = Publisher(VersionStore(directory), complete_every=1000)
    for version in range(2):
        policy.initialise(version)
        publisher.publish(version, policy.state_dict(), files)
    publisher.close()
    return directory


async def request(engine: EngineSupervisor, prompts: list[list[int]]) -> tuple[list[Generation], float]:
    """All prompts at once; answers and tokens per second."""
    sampling = Sampling(max_tokens=OUTPUT, ignore_eos=True)
    began = time.perf_counter()
    answers = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
    return list(answers), sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - began)


async def measure(kind: str, batch: int, root: Path, **options: bool) -> dict[str, float | int | str]:
    weights = publish(root / "weights")
    launch = KINDS[kind](slots=batch, length=1024, **options)
    dice = random.Random(0)
    prompts = [[dice.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(batch)]
    async with EngineSupervisor(launch, weights, 0, log=root / "engine.log") as engine:
        await request(engine, prompts[:4])  # warm
        answers, first = await request(engine, prompts)
        turns = [
            [*prompt, *answer.token_ids, *(dice.randrange(VOCABULARY) for _ in range(EXTRA))]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        _, second = await request(engine, turns)
        flights = asyncio.ensure_future(request(engine, prompts))
        published = []
        for number in range(PUBLICATIONS):
            published.append(await engine.publish(weights, (number + 1) % 2))
        await flights
    return {
        "engine": kind,
        "batch": batch,
        "tokens_per_s": round(first),
        "turn_tokens_per_s": round(second),
        "publish_ms": round(1000 * statistics.median(one.seconds for one in published), 1),
        "paused_ms": round(1000 * statistics.median(one.paused_s for one in published), 1),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--paged", action="store_true", help="of the embedded engine: pages instead of rows")
    parser.add_argument("--roofline", action="store_true", help="the embedded engine against what its device can do")
    parser.add_argument("--model", type=Path, help="with --roofline: a Hugging Face folder; else the demo's size")
    parser.add_argument("--device", default="cpu", help="with --roofline")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="with --roofline")
    parser.add_argument("--threads", type=int, default=1, help="with --roofline")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="with --roofline: tokens of each prompt")
    parser.add_argument("--output", type=int, default=OUTPUT, help="with --roofline: tokens of each answer")
    options = parser.parse_args(arguments)
    if options.roofline:
        from bench.harness.roofline import main as roofline

        names = ("batch", "prompt", "output", "device", "dtype", "threads", "paged")
        command.show(roofline(options.model, **{name: getattr(options, name) for name in names}), options)
        return 0
    paged = {"paged": True} if options.paged else {}
    with aftermath.TemporaryDirectory("pagurus-bench-") as root:
        result = asyncio.run(measure(options.engine, options.batch, Path(root), **paged))
    command.show(result, options)
    return 0
