"""The settings of a run: a small TOML file, options of the command line, or what a run directory remembers.

Guarantee: an unknown key is refused with the nearest known one, a value of the wrong kind with its key; a resumed run
continues under the keys that it began with, but for the number of steps, which may be extended.
"""

from __future__ import annotations

import math
import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollout.config import PlaySettings, RolloutConfig
from rollout.decide.keeping import KeepPlan
from rollout.decide.ranges import Count, Natural, NotNegative
from rollout.engine.client import Sampling
from rollout.engine.launch import NO_EXPERTS
from rollout.environments import directory as task
from rollout.environments import splits
from rollout.environments.base import Environment
from rollout.environments.mixture import Mixture, MixturePart, load_curriculum
from rollout.environments.splits import SHARE, Share
from rollout.episode.spec import EpisodeLimits, PhaseTimeouts
from rollout.experts import need_routers
from rollout.plan import NAME, PoolPlan, RolloutPlan, SharePlan, SuitePlan, read_plan
from rollout.rewards.weighted import RewardPlan, need_rewards
from sandbox import durable
from sandbox.errors import Invalid, NotFound
from trainer import machine, sizing
from trainer.distributed.mesh import MeshLayout
from trainer.distributed.plans import need_cuttable
from trainer.model_directory import model_content, need_embedded, need_model
from trainer.settings import (
    EvaluationSettings,
    HostSettings,
    MeshSettings,
    ObjectiveSettings,
    OptimiserSettings,
    TimeoutSettings,
    flat,
    need_existing,
    overlay,
    override,
    presets,
)

TABLES = {"sampling": Sampling(max_tokens=16)}  # that begin otherwise than their struct


class TrainConfig(PlaySettings, frozen=True, kw_only=True):
    """What `pagurus train` takes, beside what it has in common with its rollout. Keys of the TOML file are these
    names, and so are the options of the command line."""

    task: Path  # directory or file of an environment
    mixture: tuple[MixturePart, ...] = ()  # tables of task, name, weight, rows
    rewards: tuple[RewardPlan, ...] = ()  # tables of name, function or url or model, weight, options
    curriculum: Path | None = None  # a Python file whose `weights(outcomes)` chooses among them
    model: Path | None = None  # the first policy: a Hugging Face directory; else the task's own
    engine: str = "embedded"  # embedded or vllm
    pool: PoolPlan = PoolPlan()  # table [pool]: how many of them, or their urls
    steps: Count = 9  # of the optimiser; a resumed run may change it
    concurrency: Count | None = None  # concurrent sandboxes; else by idle cores
    held_out: Count = 112  # episodes of each evaluation
    held_share: Share = SHARE  # of rows and tasks, held out; 0: evaluate on training data
    evaluate_every: Natural = 0  # steps between evaluations; 0: before and after only
    evaluation: EvaluationSettings = EvaluationSettings()  # how their episodes are played
    suites: tuple[SuitePlan, ...] = ()  # tables of name, task, episodes, samples to evaluate on
    objective: ObjectiveSettings = ObjectiveSettings()  # what is learned; or the name of a preset
    optimiser: OptimiserSettings = OptimiserSettings()
    staleness: Natural | Literal["auto"] = 1  # maximum of trainer version minus oldest policy version
    handover: bool = False  # docs/scheduling/rollpacker.md
    share: SharePlan | None = None  # time-slice machines with other runs
    sampling: Sampling = TABLES["sampling"]  # of answers
    template: dict[str, Any] = {}  # for the chat template: {enable_thinking = false}
    timeouts: TimeoutSettings = TimeoutSettings()
    max_length: Count = 1024  # tokens of a trajectory
    max_observation: int | None = None  # tokens, cut in the middle beyond; else half of max_length
    visit: KeepPlan = KeepPlan(trajectories=16)  # states to visit later
    versions: Natural = 3  # of the weights that stay, the newest; 0: all
    save_every: Natural = 1  # steps between saves; 0: never
    save_seconds: NotNegative = 0.0  # the same in seconds
    ranks: Count = 1  # processes that share the steps, one GPU each; a resumed run may change it
    mesh: MeshSettings = MeshSettings()  # what ranks share
    hosts: HostSettings = HostSettings()  # which machines they are on
    gpus: tuple[int, ...] = ()  # of the ranks, as nvidia-smi counts; else free ones
    stream: bool = False  # compute gradients while the batch is sampled, in any order
    bf16: bool = False  # half precision with fp32 weights
    lora: Natural = 0  # rank of adapters; 0: train the weights
    recompute: bool = False  # activations, for long trajectories
    offload: bool = False  # shards and optimiser state in host memory
    pace: NotNegative | None = None  # minimum seconds per answer
    trackers: tuple[str, ...] = ("tensorboard",)  # also wandb, mlflow
    faults: Natural = 0  # sandboxes killed in the second half, about
    scorers: Count = 2  # concurrent reward functions
    image: str | None = None  # instead of the environment's
    out: Path = Path("runs")
    resume: Path | None = None


KEYS = tuple(name for name in TrainConfig.__struct_fields__ if name != "resume")
RENEWABLE = ("steps", "ranks", "out", "resume")  # that a resumed run may have otherwise
STALEST = 4  # versions, where the bound is chosen during the run
ENGINES = ("embedded", "vllm")
TRACKERS = ("tensorboard", "wandb", "mlflow")


def read(path: Path) -> dict[str, Any]:
    """The keys of a TOML file, checked by name. Paths in it are relative to it."""
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise NotFound(f"no configuration {path}", hint="name a .toml file or a task directory") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} is no TOML: {error}", hint="see docs/training.md") from None
    content = presets(content)
    need_existing(str(path), {name: value for name, value in content.items() if name != "resume"}, TrainConfig)
    _resolve(content, ("task", "out", "model", "curriculum"), path)
    for part in _tables(content, "mixture"):
        need_existing(f"{path}: [[mixture]]", part, MixturePart)
        _resolve(part, ("task", "rows", "held_out"), path)
    for part in _tables(content, "suites"):
        need_existing(f"{path}: [[suites]]", part, SuitePlan)
        _resolve(part, ("task",), path)
    for part in _tables(content, "rewards"):
        need_existing(f"{path}: [[rewards]]", part, RewardPlan)
        _resolve(part, ("model", *(["function"] if ".py:" in str(part.get("function")) else [])), path)
    return content


def _tables(content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The tables of a list of them; what is anything else is refused by its type later."""
    value = content.get(name)
    return [part for part in value if isinstance(part, dict)] if isinstance(value, list | tuple) else []


def _resolve(content: dict[str, Any], names: Sequence[str], path: Path) -> None:
    for name in names:
        if isinstance(content.get(name), str):
            content[name] = str((path.parent / content[name]).resolve())


def gather(
    what: Path, options: Mapping[str, Any], settings: Sequence[str] = (), *, resume: Path | None = None
) -> TrainConfig:
    """A configuration of a file or a task, options that overrule it, and settings as `key=value` that overrule both.
    `resume`: of that run, which keeps its own."""
    if resume is not None:
        return _continued(resume, what, options, settings)
    content: dict[str, Any] = read(what) if what.suffix == ".toml" else {"task": what}
    for name, value in options.items():
        overlay(content, ("objective", "preset") if name == "objective" else (name,), value)
    for text in settings:
        override(content, text)
    return make(content)


def _continued(run: Path, what: Path, options: Mapping[str, Any], settings: Sequence[str]) -> TrainConfig:
    """The configuration of a run, with the steps and ranks that are requested. Refuses any other change."""
    _, stored = _resumed(run)
    if what != Path() and "=" not in what.name:
        made = _absolute(gather(what, options, settings))
    else:
        content = msgspec.to_builtins(stored, enc_hook=str)
        for name, value in options.items():
            overlay(content, ("objective", "preset") if name == "objective" else (name,), value)
        for text in [*([str(what)] if what != Path() else []), *settings]:
            override(content, text)
        made = _absolute(make(content))
    now, before = dict(flat(made)), dict(flat(stored))
    names = (name for name in now | before if now.get(name) != before.get(name))
    if changed := sorted(name for name in names if name not in RENEWABLE):
        raise Invalid(
            f"a resumed run keeps its settings, and of {', '.join(changed)} it has others",
            hint="change steps and ranks alone; or export its weights and begin a new run with --model",
        )
    return msgspec.structs.replace(made, resume=run)


def make(content: Mapping[str, Any]) -> TrainConfig:
    """A configuration of these keys. Says which key is wrong, and how."""
    content = presets(content)
    need_existing("configuration", content, TrainConfig)
    for name in TABLES:
        if isinstance(content.get(name), dict):
            content[name] = msgspec.to_builtins(TABLES[name]) | content[name]
    if parts := _tables(content, "mixture"):
        content.setdefault("task", parts[0].get("task", ""))
    if "task" not in content:
        raise Invalid("no task is named", hint='task = "examples/fix_the_service"')
    if isinstance(content.get("held_out"), str | Path):
        raise Invalid(
            f"held_out counts episodes, and is {str(content['held_out'])!r}",
            hint="a file of rows to evaluate on is `held_out` of a part: [[mixture]]",
        )
    try:
        made = msgspec.convert(content, TrainConfig, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise Invalid(f"configuration: {error}", hint="see docs/settings.md") from None
    for name, value in flat(made):
        if isinstance(value, float) and not math.isfinite(value):
            raise Invalid(f"configuration: {name} is {value}", hint="set a finite number")
    if made.tail and not 1.0 < made.tail <= 4.0:
        raise Invalid(f"configuration: tail is {made.tail}", hint="set 1.25, or 0 for none")
    if made.tail_resumes and not made.tail:
        raise Invalid("configuration: tail_resumes resumes what tail defers", hint="set tail, such as 1.25")
    return _agreeing(made)


def _agreeing(config: TrainConfig) -> TrainConfig:
    """The same. Refuses keys that do not go together, and unknown names."""
    if config.max_observation is not None and not 16 <= config.max_observation <= config.max_length:
        raise Invalid(
            f"max_observation is {config.max_observation}, max_length {config.max_length}",
            hint="set it from 16 to max_length, or leave it out",
        )
    if config.engine not in ENGINES:
        raise Invalid(f"no engine {config.engine!r}", hint=" or ".join(ENGINES))
    for tracker in config.trackers:
        if tracker not in TRACKERS:
            raise Invalid(f"no tracker {tracker!r}", hint=f"there are: {', '.join(TRACKERS)}")
    if config.curriculum is not None and not config.mixture:
        raise Invalid("a curriculum chooses among the parts of a mixture", hint="name them: [[mixture]]")
    if config.share is not None and (config.staleness != 0 or config.stream):
        raise Invalid(
            "a run that takes turns with others rolls out, then trains: never both",
            hint="set staleness = 0 and leave out stream, or leave out [share]",
        )
    if config.handover:
        _need_handover(config)
    _need_evaluation(config)
    if config.sampling.temperature == 0:
        raise Invalid(
            "sampling.temperature = 0 gives every trajectory of a group the same answers",
            hint="raise it; evaluation.temperature = 0 is of evaluations alone",
        )
    if config.branching is not None and config.objective.overlong.penalty:
        raise Invalid("segments of a tree have no length of their own", hint="leave out objective.overlong.penalty")
    if not config.sampling.complete:
        raise Invalid(
            "top_p and top_k sample from another distribution than the policy's, which cannot be learned from",
            hint="set sampling.top_p = 1 and top_k = 0; evaluation.top_p is of evaluations alone",
        )
    mesh_layout(config)
    _need_hosts(config)
    if config.optimiser.kind == "muon" and config.ranks > 1:
        raise Invalid("Muon needs whole matrices, and ranks have shards of them", hint="set ranks = 1, or adamw")
    if config.branching is not None and config.tail:
        raise Invalid("[branching] and tail choose the members of a group", hint="leave out one of them")
    if config.branching is not None and config.branching.roots >= config.size:
        raise Invalid(
            f"branching.roots is {config.branching.roots}: of a group of {config.size} nothing is left to branch",
            hint="lower branching.roots, or raise size",
        )
    return config


def mesh_layout(config: TrainConfig) -> MeshLayout:
    """Of the ranks. Raises Invalid where they do not make up the mesh."""
    return MeshLayout(ranks=config.ranks, **msgspec.structs.asdict(config.mesh))


def _need_hosts(config: TrainConfig) -> None:
    """Refuses machines that do not share the ranks evenly, and too few names of agents."""
    hosts = config.hosts
    if config.ranks % hosts.count:
        raise Invalid(
            f"{hosts.count} hosts do not share {config.ranks} ranks evenly",
            hint=f"set ranks to a multiple of {hosts.count}, or hosts.count to a divisor of {config.ranks}",
        )
    if hosts.agents and len(hosts.agents) < hosts.count - 1:
        raise Invalid(
            f"hosts.agents has {len(hosts.agents)} names, and hosts.count = {hosts.count} needs {hosts.count - 1}",
            hint="name more agents, or none: then all that connect may take part",
        )


def _need_evaluation(config: TrainConfig) -> None:
    """Refuses evaluations that have no machine, suites that nobody plays, and two of one name."""
    background = config.evaluation.background
    if background and (config.handover or config.share is not None):
        raise Invalid(
            "evaluations in the background need an engine while others take turns on the machines",
            hint="leave out evaluation.background, or handover and [share]",
        )
    if config.suites and not background:
        raise Invalid("suites are played in the background", hint="set evaluation.background = true")
    if len({suite.name for suite in config.suites}) < len(config.suites):
        raise Invalid("two suites have one name", hint="give each a `name` of its own")


def _need_handover(config: TrainConfig) -> None:
    """Refuses a run that has no engine to spare, or whose trainer cannot use one."""
    if max(config.pool.engines, len(config.pool.urls)) < 2:
        raise Invalid("handover needs two engines: one rests while the other continues", hint="[pool] engines = 2")
    if config.staleness != 0:
        raise Invalid(
            "handover requires staleness = 0",
            hint="set staleness = 0, or leave out handover",
        )
    if config.stream or config.share is not None:
        raise Invalid("handover says when gradients begin", hint="leave out stream and [share], or handover")
    if config.optimiser.updates > 1:
        raise Invalid("several updates need the whole batch first", hint="leave out optimiser.updates or handover")


def need_objective(config: TrainConfig) -> None:
    """Refuses a name that is in no table, and an objective that cannot do what is requested."""
    from trainer.objectives import build  # with torch: a resumed run needs none

    objective = build(config.objective)
    if objective.advantage.baseline == "teacher" and not (Path(config.objective.teacher) / "config.json").is_file():
        raise Invalid(
            f"{config.objective.preset} needs a teacher, and {config.objective.teacher!r} is no model",
            hint="set objective.teacher = DIRECTORY",
        )
    if objective.advantage.baseline == "teacher" and objective.kl is not None:
        raise Invalid("distillation has one reference, its teacher", hint="leave out objective.kl")
    if config.size < 2 and objective.advantage.baseline in ("group", "leave_one_out"):
        raise Invalid(
            f"{config.objective.preset} compares the trajectories of a group, and size is {config.size}: "
            "every advantage would be 0",
            hint='set size = 2 or more, or objective = "reinforce++"',
        )
    if config.branching is not None and objective.advantage.baseline != "group":
        raise Invalid(
            f"{config.objective.preset} does not compare with the mean of a group, which is what branches need",
            hint='objective = "pooled", or leave out [branching]',
        )
    if config.branching is not None and objective.advantage.credit == "turns":
        raise Invalid("branches have credit of their own", hint="leave out objective.advantage.credit or [branching]")
    if (config.stream or config.handover) and not objective.streams:
        raise Invalid(f"{config.objective.preset} needs the whole batch first", hint="leave out stream and handover")


def open_run(config: TrainConfig, *, steps: int | None = None, ranks: int | None = None) -> tuple[Path, TrainConfig]:
    """The run directory, new or resumed, and the configuration that it runs under. A resumed run may get another number
    of steps, and of ranks."""
    if config.resume is not None:
        return _resumed(config.resume, steps=steps, ranks=ranks)
    begin, chosen = need_startable(_agreeing(config))
    config = _absolute(config)
    planned = rollout_plan(config, begin)  # refuses a machine with too few GPUs, or too little memory of them
    directory = config.out.resolve() / time.strftime("%Y%m%d-%H%M%S")
    while directory.exists():
        directory = directory.with_name(directory.name + "b")
    directory.mkdir(parents=True)
    splits.write(directory, chosen)
    _remember(directory, config, planned)
    latest = directory.parent / ".latest.new"
    latest.unlink(missing_ok=True)
    latest.symlink_to(directory.name)
    os.replace(latest, directory.parent / "latest")
    return directory, config


def need_startable(config: TrainConfig) -> tuple[Path, list[splits.Split]]:
    """Refuses what a run would fail on, before there is one. The policy to begin with, and what is held out."""
    need_objective(config)
    begin = config.model or task.load(config.task).start
    parts = config.mixture or (MixturePart(task=str(config.task)),)
    chosen = Mixture(parts, share=config.held_share).splits
    if config.curriculum is not None:
        load_curriculum(config.curriculum)
    need_rewards(config.rewards)
    for kind in environments(config):
        task.need_scorable(kind, config.rewards, image=config.image)
    if begin is None:
        raise Invalid(
            f"{config.task} has no policy to begin with", hint="name one: --model FOLDER (a small Qwen3, say)"
        )
    need_model(begin, *environments(config), length=config.max_length)
    if config.engine == "embedded":
        need_embedded(begin)
    need_cuttable(model_content(begin), mesh_layout(config), adapters=config.lora > 0)
    need_mixture(config, begin)
    return begin, chosen


def environments(config: TrainConfig) -> list[type[Environment]]:
    """Those that a run of this configuration plays."""
    played = [Path(part.task) for part in config.mixture] or [config.task]
    return [task.load(place).environment for place in (*played, *(Path(suite.task) for suite in config.suites))]


def unfinished(config: TrainConfig) -> Path | None:
    """The last run, if it has this plan, has begun to learn, and has no summary yet."""
    directory = (config.out / "latest").resolve()
    if not (directory / NAME).exists() or (directory / "summary.json").exists():
        return None
    if not (directory / "rollout").exists():
        return None
    _, plan = _resumed(directory)
    target = msgspec.structs.replace(_absolute(config), out=plan.out, resume=plan.resume)
    return directory if plan == target else None


def _absolute(config: TrainConfig) -> TrainConfig:
    suites = tuple(msgspec.structs.replace(one, task=str(Path(one.task).resolve())) for one in config.suites)
    model = config.model and config.model.resolve()
    return msgspec.structs.replace(config, task=config.task.resolve(), model=model, suites=suites)


def _resumed(run: Path, *, steps: int | None = None, ranks: int | None = None) -> tuple[Path, TrainConfig]:
    directory = run.resolve()
    try:
        stored = (directory / NAME).read_bytes()
    except FileNotFoundError:
        raise NotFound(f"{run} is not a run directory", hint="name a directory below runs/") from None
    try:
        config = msgspec.json.decode(stored, type=TrainConfig, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise Invalid(f"{directory / NAME} is no plan of this version: {error}", hint="begin a new run") from None
    changed = msgspec.structs.replace(config, steps=steps or config.steps, ranks=ranks or config.ranks)
    if changed != config:
        plan = read_plan(directory)
        if changed.ranks != config.ranks:
            devices = machine.resized(changed, plan.devices, directory / "policy")
            plan = msgspec.structs.replace(plan, devices=devices)
        config = _agreeing(changed)
        _remember(directory, config, msgspec.structs.replace(plan, steps=config.steps))
    return directory, config


def _remember(directory: Path, config: TrainConfig, rollout: RolloutPlan) -> None:
    plan = {name: getattr(config, name) for name in KEYS} | {"rollout": rollout}
    durable.publish(directory / NAME, msgspec.json.format(msgspec.json.encode(plan, enc_hook=str), indent=1))


def rollout_plan(config: TrainConfig, begin: Path) -> RolloutPlan:
    """The rollout's part of it, for the machine as it is now. `begin`: the policy to begin with."""
    from rollout.episode.renderer import end_tokens

    fitting = sizing.choose(machine.cores(), machine.busy(), concurrency=config.concurrency, pace=config.pace)
    stops = sorted({*end_tokens(begin), *config.sampling.stop_token_ids})
    timeouts = common(config.timeouts, PhaseTimeouts)
    played = RolloutConfig(
        **common(config, PlaySettings)
        | {
            "concurrency": fitting.concurrency,
            "staleness": STALEST if config.staleness == "auto" else config.staleness,
            "adaptive": config.staleness == "auto",
            "sampling": msgspec.structs.replace(config.sampling, stop_token_ids=stops),
            "limits": EpisodeLimits(**timeouts, max_length=config.max_length, max_observation=config.max_observation),
            "timeout": config.timeouts.refused,
        }
    )
    plan = RolloutPlan(
        **common(config, RolloutPlan)
        | {
            "task": str(config.task),
            "config": played,
            "mixture": list(config.mixture),
            "rewards": list(config.rewards),
            "curriculum": None if config.curriculum is None else str(config.curriculum),
            "host_timeout": config.timeouts.host,
            "devices": machine.devices(config, begin)[0],
            "router_replay": config.objective.router_replay,
            "pace": fitting.pace,
            "nice": fitting.nice,
            "sizing": fitting.reason,
        }
    )
    if plan.router_replay and plan.engine == "vllm" and not (plan.devices.engines or plan.pool.urls):
        raise Invalid(NO_EXPERTS, hint="leave out objective.router_replay, or choose --engine embedded")
    return plan


def need_mixture(config: TrainConfig, begin: Path) -> None:
    """Refuses objectives about experts for a model whose routers are not known."""
    for key in ("router_replay", "balance"):
        if getattr(config.objective, key):
            need_routers(str(model_content(begin).get("model_type")), f"objective.{key}")


def common(settings: msgspec.Struct, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The settings that `kind` has as well, by name."""
    names = set(settings.__struct_fields__) & set(kind.__struct_fields__)
    return {name: getattr(settings, name) for name in kind.__struct_fields__ if name in names}


def _path(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)
