"""The settings of a run as one typed tree: its tables, their bounds, and `key=value` for any leaf.

Pure, without torch. Guarantee: a file, the command line, `--dry-run`, the run directory and the documentation name a
setting by the same path, and each of them refuses the same values: bounds stand in the types here and nowhere else.

::

    plan.toml ─▶ tables ─┐
    --options ───────────┼─▶ overlay ─▶ need_known ─▶ msgspec.convert ─▶ TrainConfig ─▶ flat: "objective.clip.high" 0.28
    a.b.c=value ─────────┘
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from rollout.decide.ranges import Count, Decay, Fraction, Natural, NotNegative, Positive
from rollout.engine.client import Sampling
from rollout.episode.spec import PhaseTimeouts
from sandbox.errors import Invalid

Baseline = Literal["none", "group", "leave_one_out", "batch", "critic", "teacher"]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of settings. None means: as the objective's preset has it."""


class ClipSettings(Table, frozen=True, kw_only=True):
    kind: Literal["minimum", "weight"] | None = None  # of PPO, or of CISPO
    low: NotNegative | None = None  # the ratio is clipped below 1 - low
    high: NotNegative | None = None  # and above 1 + high
    dual: NotNegative | None = None  # bound of the ratio where the advantage is negative; 0: none; else 3

    def __post_init__(self) -> None:
        if self.dual and self.dual <= 1.0:
            raise ValueError(f"`dual` is {self.dual}: set more than 1, or 0 for no bound")


class KLSettings(Table, frozen=True, kw_only=True):
    beta: NotNegative | None = None  # coefficient; 0: no term, and no reference model
    kind: Literal["k1", "k2", "k3"] | None = None  # estimator
    place: Literal["loss", "reward"] | None = None  # a term of the loss, or taken from the reward
    weighted: bool = False  # times the ratio: unbiased off-policy


class AdvantageSettings(Table, frozen=True, kw_only=True):
    baseline: Baseline | None = None  # what is subtracted
    scale: Literal["none", "group", "within_groups", "batch"] | None = None  # what the rest is divided by
    credit: Literal["episode", "turns"] | None = None  # turns: a token earns its turn's and later rewards
    discount: Fraction | None = None  # gamma, with a critic
    trace: Fraction | None = None  # lambda of generalised advantage estimation


class CriticSettings(Table, frozen=True, kw_only=True):
    coefficient: NotNegative | None = None  # of the loss of values
    range: Positive | None = None  # clip of value changes
    rate: NotNegative = 0.0  # learning rate; 0: the policy's
    warm_up: Natural = 0  # steps in which only the critic learns


class OverlongSettings(Table, frozen=True, kw_only=True):
    filter: bool = False  # cut episodes bear no gradient; their rewards stay in the group
    penalty: NotNegative = 0.0  # subtracted from `limit` sampled tokens on (DAPO)
    limit: Natural = 0  # tokens
    buffer: Natural = 0  # tokens before `limit` over which the penalty grows

    def __post_init__(self) -> None:
        if self.penalty and not 0 < self.buffer <= self.limit:
            raise ValueError("`penalty` needs `limit`, and `buffer` from 1 to it")


class CorrectionSettings(Table, frozen=True, kw_only=True):
    name: str  # tis, tis_sequence, icepop, sequence_mask, decoupled
    low: NotNegative | None = None  # threshold
    high: Positive | None = None  # threshold


class ObjectiveSettings(Table, frozen=True, kw_only=True):
    """The table ``[objective]``: a published row, and what of it is another. ``objective = "dapo"`` is short for it."""

    preset: str = "pooled"  # a row of the table of objectives
    advantage: AdvantageSettings = AdvantageSettings()
    ratio: Literal["none", "token", "sequence"] | None = None  # importance weight
    clip: ClipSettings = ClipSettings()
    mean: Literal["token", "sequence", "constant"] | None = None  # over what the loss is a mean
    length: Natural = 0  # the constant of Dr. GRPO; 0: max_length
    kl: KLSettings = KLSettings()
    entropy: NotNegative = 0.0  # coefficient of a bonus for entropy
    balance: NotNegative = 0.0  # coefficient of a loss that has experts used evenly
    router_replay: bool = False  # tokens go to the experts that the engine chose for them
    critic: CriticSettings = CriticSettings()
    drop_silent: bool | None = None  # leave out groups with equal rewards
    corrections: list[str | CorrectionSettings] = []  # for data of other policies
    overlong: OverlongSettings = OverlongSettings()
    teacher: str = ""  # model directory for `distill`, with the policy's tokenizer


class OptimiserSettings(Table, frozen=True, kw_only=True):
    """The table ``[optimiser]``."""

    kind: Literal["adamw", "muon", "adamw8bit"] = "adamw"  # muon: matrices; the rest by AdamW
    rate: Positive = 2e-4  # learning rate
    betas: tuple[Decay, Decay] = (0.9, 0.95)  # of AdamW
    epsilon: Positive = 1e-8  # of AdamW
    momentum: Decay = 0.95  # of Muon
    decay: NotNegative = 0.0  # of weights
    max_norm: Positive = 1.0  # of the gradient
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # how the rate falls
    warm_up: Natural = 0  # steps in which it rises first
    final_share: Fraction = 0.05  # of the rate, reached at the last step
    budget: Count = 8192  # tokens of a micro-batch
    updates: Count = 1  # optimiser steps per batch

    def rate_at(self, step: int, steps: int) -> float:
        """Of optimiser step number `step`, counted from 0, of `steps`."""
        if step < self.warm_up:
            return self.rate * (step + 1) / (self.warm_up + 1)
        done = min(1.0, (step - self.warm_up) / max(1, steps - self.warm_up))
        if self.schedule == "constant":
            return self.rate
        if self.schedule == "cosine":
            return self.rate * (self.final_share + (1 - self.final_share) * (1 + math.cos(math.pi * done)) / 2)
        return self.rate * max(self.final_share, 1 - done)


class MeshSettings(Table, frozen=True, kw_only=True):
    """The table ``[mesh]``: what ranks share besides shards. Their product divides the number of ranks."""

    replicate: Count = 1  # copies of the sharded weights
    context: Count = 1  # ranks that share the tokens of a micro-batch
    tensor: Count = 1  # ranks that share each matrix
    expert: Count = 1  # ranks that share the experts of a layer


class HostSettings(Table, frozen=True, kw_only=True):
    """The table ``[hosts]``: machines that share the ranks evenly, and no directory."""

    count: Count = 1  # with the trainer's own
    agents: tuple[str, ...] = ()  # their names, preferred first; else any
    standby: Natural = 0  # more of them for `pagurus submit` to place
    address: str = ""  # of the trainer's machine; else by its route
    port: Natural | None = None  # there; 0: a free one; else 7010, or a free one of a job
    tls: str = ""  # directory of cert.pem and key.pem
    wait: NotNegative = 120.0  # seconds, before fewer take part


class TimeoutSettings(PhaseTimeouts, frozen=True, kw_only=True):
    """The table ``[timeouts]``, in seconds: after these what waits gives up, or names who does not answer."""

    refused: Positive = 900.0  # of a host or engine that refuses everything
    host: Positive = 300.0  # that a running run waits for its host
    rollout: Positive = 300.0  # that the trainer waits for a rollout
    rank_silent: Positive = 30.0  # until a stopped rank is named
    rank_stuck: Positive = 300.0  # until a rank that hangs is named
    collective: Positive = 600.0  # of one exchange between ranks


class EvaluationSettings(Table, frozen=True, kw_only=True):
    """The table ``[evaluation]``: how held-out episodes are played, where it is not as in training."""

    temperature: NotNegative | None = None  # 0: greedy
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    top_k: Natural | None = None
    max_tokens: Count | None = None  # of an answer
    samples: Count = 1  # episodes of each seed; more than 1 also gives pass@k
    background: bool = False  # during training, by its own engine
    concurrency: Count = 4  # sandboxes at once of those
    best: str = ""  # a metric such as reward_held_out: its best version stays in RUN/best

    def of(self, sampling: Sampling) -> Sampling:
        """What an evaluation samples by, where training samples by `sampling`."""
        names = ("temperature", "top_p", "top_k", "max_tokens")
        set_here = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return msgspec.structs.replace(sampling, **set_here)


# --------------------------------------------------------------------- overrides


def override(content: dict[str, Any], text: str) -> None:
    """Sets one leaf of a tree of tables, in place. Example: ``override(content, "objective.clip.high=0.28")``."""
    path, sign, value = text.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not sign or not all(keys):
        raise Invalid(f"{text!r} is no setting", hint="write key=value, such as optimiser.rate=1e-6")
    overlay(content, keys, parsed(value.strip()))


def overlay(content: dict[str, Any], keys: Sequence[str], value: object) -> None:
    table = content
    for done, key in enumerate(keys[:-1], 1):
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise Invalid(f"{'.'.join(keys[:done])} is {inner!r}, no table", hint="leave it out, or set it alone")
        table[key] = table = dict(inner)
    table[keys[-1]] = value


def parsed(text: str) -> Any:
    """As TOML has it; else a word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def presets(content: Mapping[str, Any]) -> dict[str, Any]:
    """``objective = "dapo"`` is the table with that preset."""
    made = dict(content)
    if isinstance(made.get("objective"), str):
        made["objective"] = {"preset": made["objective"]}
    return made


# --------------------------------------------------------------------- what is known


# What other trainers call a setting, where difflib does not find it.
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "lr"), "optimiser.rate"),
    **dict.fromkeys(("num_generations", "group_size", "rollouts_per_example", "n_samples_per_prompt"), "size"),
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), "groups (prompts), size"),
    **dict.fromkeys(("max_completion_length", "max_new_tokens", "max_response_length"), "sampling.max_tokens"),
    **dict.fromkeys(("max_prompt_length", "max_seq_length", "max_model_len", "seq_len"), "max_length"),
    **dict.fromkeys(("max_steps", "num_train_epochs", "total_training_steps", "epochs"), "steps"),
    **dict.fromkeys(("epsilon", "clip_ratio"), "objective.clip.low"),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high"), "objective.clip.high"),
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "kl_beta"), "objective.kl.beta"),
    **dict.fromkeys(("dataset", "dataset_name", "train_files", "rows"), "mixture (rows of a [[mixture]])"),
    **dict.fromkeys(("model_name_or_path", "model_name"), "model"),
    **dict.fromkeys(("lora_r", "lora_rank", "peft_config"), "lora"),
    **dict.fromkeys(("async_level", "max_async_level", "max_off_policy_steps"), "staleness"),
    "num_iterations": "optimiser.updates", "ppo_epochs": "optimiser.updates", "loss_type": "objective",
    "report_to": "trackers", "output_dir": "out", "save_steps": "save_every", "eval_steps": "evaluate_every",
    "gradient_checkpointing": "recompute", "reward_funcs": "rewards", "weight_decay": "optimiser.decay",
    "max_grad_norm": "optimiser.max_norm", "warmup_steps": "optimiser.warm_up", "resume_from_checkpoint": "resume",
}  # fmt: skip


def need_existing(source: str, content: Mapping[str, Any], kind: type[msgspec.Struct], path: str = "") -> None:
    """Refuses keys that are in no table, with the nearest one that is."""
    existing = tables(kind)
    for key, value in content.items():
        if key not in existing:
            near = [ELSEWHERE[key]] if key in ELSEWHERE and re.split(r"\W", ELSEWHERE[key])[0] in existing else []
            near = near or [*difflib.get_close_matches(key, existing, n=1), *_below(kind, key)]
            said = f"nearest: {', '.join(near)}; " if near else ""
            raise Invalid(f"{source}: unknown key {path + key!r}", hint=f"{said}there are: {', '.join(existing)}")
        inner = existing[key]
        if inner is not None and isinstance(value, dict):
            need_existing(source, value, inner, f"{path}{key}.")


def _below(kind: type[msgspec.Struct], key: str, path: str = "") -> list[str]:
    """Where in the tables below there is a key of this name. Example: "rate" is in "optimiser.rate"."""
    result = []
    for name, inner in tables(kind).items():
        if path and name == key:
            result.append(path + name)
        if inner is not None:
            result += _below(inner, key, f"{path}{name}.")
    return result


def tables(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Names of the settings of a table; of those that are tables themselves, their class."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType | msgspec.inspect.DataclassType)
    return {item.name: _table(item.type) for item in info.fields}


def _table(kind: msgspec.inspect.Type) -> Any:
    if isinstance(kind, msgspec.inspect.StructType):
        return kind.cls
    if isinstance(kind, msgspec.inspect.UnionType):
        return next((result for item in kind.types if (result := _table(item)) is not None), None)
    return None


_FIELD = re.compile(r"^    (\w+): .*?(?:  # (.*))?$")


def descriptions(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Of each field, the comment behind it: in the order of the fields, those of a base first."""
    result: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        if issubclass(part, msgspec.Struct) and part is not msgspec.Struct:
            lines = inspect.getsource(part).splitlines()
            result |= {hit[1]: hit[2] or "" for line in lines if (hit := _FIELD.match(line))}
    return {name: result.get(name, "") for name in kind.__struct_fields__}


def flat(tree: msgspec.Struct, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf by its path. Example: ``("objective.clip.high", 0.28)``."""
    for name in tree.__struct_fields__:
        value = getattr(tree, name)
        if isinstance(value, msgspec.Struct):
            yield from flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
