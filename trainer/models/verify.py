"""Does the trainer compute what a model computes? Tested by the model's own behaviour, before it is trained.

Guarantee: a model is trained in a way in which its log-probabilities were seen to equal those of transformers' own
forward pass, trajectory by trajectory, within `TOLERANCE`; where no way does, it is refused with the numbers. Of a
large model the first layers of each kind are compared.

::

    directory ─▶ transformers' own logits, one probe at a time, without gradients ─────────────┐ compared with
          ├▶ packed: probes one after another, attention exchanged, recomputed, a beginning shared │
          └▶ alone:  each probe through the model's own forward pass, ready for gradients      ┘
    packed equals ─▶ "packed" │ only alone equals ─▶ "alone" │ neither ─▶ "refused"
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from rollout.engine.embedded.model import is_plain
from sandbox import durable
from sandbox.errors import Invalid
from trainer.batches.pack import pack
from trainer.batches.plan import common
from trainer.batches.sample import Sample
from trainer.models.first_layers import shorten
from trainer.models.load import configuration, load
from trainer.models.scorer import Scorer

TOLERANCE = 1e-4  # nats, in fp32
STEEP = 1e-3  # of gradients, as a share of their norm
LENGTHS = (7, 33, 19)  # tokens of the probes
WARMTH = (1.0, 1.0, 0.7)
MAX_PROBE = 8192  # tokens: no probe is longer
FILE = "model.json"

Way = Literal["packed", "alone", "refused"]


class Verification(msgspec.Struct, kw_only=True):
    """Largest differences in nats from the model's own log-probabilities; None: it could not be computed.

    Example: ``Verification(model="PhiForCausalLM", way="packed", packed=1e-6, ...)``
    """

    model: str
    way: Way
    packed: float | None = None  # packed behind each other
    shared: float | None = None  # packed, a common beginning read once
    single: float | None = None  # by the same attention, one in a batch
    recompute: float | None = None  # packed, activations computed again
    alone: float | None = None  # by its own forward pass
    slope: float | None = None  # of the gradient in the chosen way, as a share of its norm
    reason: str = ""  # why it is not packed, or is refused
    layers: int | None = None  # of a large model, so many of its first ones were compared; None: all

    @property
    def packs(self) -> bool:
        return self.way == "packed"

    @property
    def shares(self) -> bool:
        """Whether a common beginning of packed trajectories is read once."""
        return self.packs and (self.shared is None or self.shared <= TOLERANCE)


def probes(vocabulary: int, positions: int | None, *, longer: int = 0) -> list[Sample]:
    """Trajectories of random tokens, the last two with a common beginning. `longer`: one more of so many tokens,
    before the others."""
    lengths = [min(length, positions or length) for length in ((longer,) if longer else ()) + LENGTHS]
    warmth = (1.0, *WARMTH) if longer else WARMTH
    draw = torch.Generator().manual_seed(20_26)
    tokens = [torch.randint(vocabulary, (length,), generator=draw).tolist() for length in lengths]
    tail = torch.randint(vocabulary, (lengths[-1],), generator=draw).tolist()
    tokens.append(tokens[-1][: lengths[-1] // 2] + tail)
    return [
        Sample(tokens=item, mask=[0] + [1] * (len(item) - 1), logprobs=[0.0] * len(item), temperature=temperature)
        for item, temperature in zip(tokens, (*warmth, 1.0), strict=True)
    ]


def verify(directory: Path) -> Verification:
    """Of a model directory. Its weights are loaded once for the reference and once for each way."""
    content = configuration(directory)
    with _one_thread_of_chance():
        samples = probes_of(content)
        target = reference(directory, samples)
        result = Verification(model=(content.get("architectures") or ["?"])[0], way="refused")
        packed = _attempt(result, lambda: _packed(directory, samples, target, result))
        if packed is None:
            result.way = "packed"
            return result
        result.reason = f"cannot be packed: {packed}"
        if not (is_plain(content) and (directory / "model.safetensors").exists()):
            alone = _attempt(result, lambda: _alone(directory, samples, target, result))
            if alone is None:
                result.way = "alone"
                return result
            result.reason += f"; alone: {alone}"
    return result


def verify_run(directory: Path) -> Verification:
    """As :func:`verify`; of a large model by its first layers, which have one of each kind."""
    with tempfile.TemporaryDirectory(prefix="pagurus-verify-") as place:
        layers = shorten(directory, Path(place))
        result = verify(directory if layers is None else Path(place))
        result.layers = layers
        return result


def probes_of(content: dict[str, Any]) -> list[Sample]:
    """For what `config.json` says: rotations that change beyond a length are tried beyond it."""
    text = content.get("text_config") or content
    positions = text.get("max_position_embeddings") or text.get("n_positions")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    before = text.get("original_max_position_embeddings") or (rope or {}).get("original_max_position_embeddings")
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "dynamic":
        before = before or positions
        positions = None
    longer = int(before) + 8 if before else 0
    longer = longer if longer <= min(MAX_PROBE, positions or MAX_PROBE) else 0
    return probes(int(text["vocab_size"]), positions, longer=longer)


def reference(directory: Path, samples: Sequence[Sample]) -> list[Tensor]:
    """Transformers' own log-probabilities: one trajectory at a time, evaluation mode, its default attention."""
    from transformers import AutoModelForCausalLM  # seconds to import

    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    except (OSError, ValueError, KeyError) as error:
        raise Invalid(f"transformers cannot load {directory}: {error}", hint="try it there first") from None
    result = []
    with torch.no_grad():
        for sample in samples:
            tokens = torch.tensor(sample.tokens)
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].double() / sample.temperature
            result.append(logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0])
    return result


def _packed(directory: Path, samples: Sequence[Sample], target: Sequence[Tensor], result: Verification) -> str | None:
    """None, or why not."""
    model = load(directory)
    scorer = Scorer(model)
    with torch.no_grad():
        result.single = max(
            _apart([scorer(pack([sample])).new], [right]) for sample, right in zip(samples, target, strict=True)
        )
    together = pack(samples)
    result.packed = _apart([scorer(together).new], target)
    again = Scorer(model, recompute=True)
    result.recompute = _apart([again(together).new], target)
    for name, value in (
        ("alone in a batch", result.single),
        ("packed", result.packed),
        ("recomputed", result.recompute),
    ):
        if not value <= TOLERANCE:
            return f"{name} its log-probabilities differ by {value:.2g} nat from those of transformers"
    with torch.no_grad():
        result.shared = _apart([scorer(pack(samples, _shared(samples))).new], target)
    if slope := _slopes(directory, again, samples, result):
        return slope
    return None


def _shared(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """The last two probes as a family."""
    return [(1, 0)] * (len(samples) - 2) + [(2, common([sample.tokens for sample in samples[-2:]]))]


def _alone(directory: Path, samples: Sequence[Sample], target: Sequence[Tensor], result: Verification) -> str | None:
    scorer = Scorer(load(directory, packs=False), packs=False)
    # Twice: rotations of some families depend on what was computed before.
    result.alone = worst = max(_apart([scorer(pack(samples)).new], target) for _ in range(2))
    if not worst <= TOLERANCE:
        return f"its log-probabilities differ by {worst:.2g} nat from those of transformers"
    return _slopes(directory, scorer, samples, result)


def _slopes(directory: Path, scorer: Scorer, samples: Sequence[Sample], result: Verification) -> str | None:
    """Compares the gradient of the sum of all log-probabilities with that of the model's own forward pass."""
    if is_plain(configuration(directory)):
        return None  # our own definition: its gradient is torch's
    own = Scorer(load(directory, packs=False), packs=False)
    own.model.eval()
    for item in (own, scorer):
        item(pack(samples)).new.sum().backward()
    theirs = {name: parameter.grad for name, parameter in own.named_parameters() if parameter.grad is not None}
    ours = {name: parameter.grad for name, parameter in scorer.named_parameters() if parameter.grad is not None}
    norm = sum(float(grad.square().sum()) for grad in theirs.values()) ** 0.5
    missing = theirs.keys() ^ ours.keys()
    if missing:
        return f"{sorted(missing)[0]} has a gradient in one way alone"
    apart = sum(float((grad - ours[name]).square().sum()) for name, grad in theirs.items()) ** 0.5
    result.slope = apart / max(norm, 1e-12)
    if not result.slope <= STEEP:
        return f"its gradient differs by {result.slope:.2g} of its norm"
    return None


def _apart(result: Sequence[Tensor], target: Sequence[Tensor]) -> float:
    difference = torch.cat(list(result)).detach().double() - torch.cat(list(target))
    return float(difference.abs().max().nan_to_num(nan=float("inf")))


def _attempt(result: Verification, call: Callable[[], str | None]) -> str | None:
    """None, or why this way is none. Another author's model may raise anything."""
    try:
        said: str | None = call()
    except (Invalid, RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError,
            AssertionError, ImportError) as error:  # fmt: skip
        text = (error.message if isinstance(error, Invalid) else str(error)).strip() or type(error).__name__
        return text.splitlines()[0]
    return said


@contextlib.contextmanager
def _one_thread_of_chance() -> Iterator[None]:
    """What a model draws here changes nothing of the caller's generators."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def begin(directory: Path, run: Path) -> Verification:
    """The way in which a run trains its model: found out once, written into the run directory. Raises Invalid."""
    path = run / FILE
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Verification)
    content = configuration(directory)
    if is_plain(content):
        result = Verification(model="Qwen3ForCausalLM", way="packed")
    else:
        result = verify_run(directory)
    if result.way == "refused":
        raise Invalid(f"{result.model} cannot be trained: {result.reason}", hint="see `pagurus verify-model`")
    durable.publish(path, msgspec.json.encode(result))
    return result


def way_of(run: Path) -> Verification:
    """The way in which this run trains."""
    path = run / FILE
    if not path.exists():
        return Verification(model="", way="packed")
    return msgspec.json.decode(path.read_bytes(), type=Verification)
