"""One rank of a trainer: reads batches from the log, steps, saves, hands weights over.

Runs under torchrun (``torchrun --nproc-per-node 4 -m trainer.distributed.worker PLAN``), which `launch` does for a run
on one machine. All that it needs is on disk: the plan, the model directory, the log of batches, its own saves.
Guarantee: the weights after step n are a function of the plan and the first n batches of the log, wherever and however
often a rank was killed: on one rank bit by bit, on several up to the order of sums. A result is written when the step
is saved, or noted in the log from which it is taken again; published versions never go back.

::

    newest save ─▶ [ wait for batch n ─▶ step ─▶ start save ─▶ encode shards ─▶ saved ─▶ publish ─▶ result n ] ─▶ end

A batch may come with the state of the run after it (`StateLog`), which is then saved with the step. A rank that cannot
continue, and knows why, says so in ``results/`` before it ends; one that was killed or hangs is named by who watches.
"""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rollout.engine import adopted
from rollout.engine.adopted import RoleRecord
from rollout.engine.embedded.model import is_plain
from rollout.weights.versions import VersionRef
from sandbox import durable, structs
from sandbox.errors import Invalid, PagurusError
from trainer.batches.aside import described
from trainer.batches.sample import Probe, Sample, SampleLog
from trainer.distributed.blocks import load_scorer
from trainer.distributed.head import HEAD, HeadClient
from trainer.distributed.mesh import MeshLayout
from trainer.distributed.plans import need_cuttable
from trainer.distributed.ranks import ALONE, Ranks, join, leave
from trainer.distributed.watch import Heart
from trainer.isolate import FAILURES, probed
from trainer.learner import Learner
from trainer.machine import return_freed_memory, trim_memory
from trainer.models.load import Lora, configuration
from trainer.models.scorer import Scorer
from trainer.models.verify import verify_run
from trainer.objectives import Objective, build
from trainer.replay import Replay, SaveInterval, StateLog
from trainer.resume import ResumeState, Saves, ShardCarrier
from trainer.settings import MeshSettings, ObjectiveSettings, OptimiserSettings
from trainer.weights import ModelPublisher, Seconds

POLL = 0.05  # seconds between looks for the next batch


class WorkPlan(msgspec.Struct, kw_only=True):
    """The input of ranks: ``plan.json`` of their directory. Paths are absolute."""

    model: str  # directory that training starts from
    directory: str  # of log/, beats/, results/
    steps: int
    seed: int = 0
    objective: ObjectiveSettings = ObjectiveSettings()
    length: int = 1  # the constant of Dr. GRPO, unless the objective has one
    settings: OptimiserSettings = OptimiserSettings()
    packs: bool = True  # trajectories behind each other; else each by itself: see trainer.models.verify
    shares: bool = True  # and what those of a group begin with alike once
    mesh: MeshSettings = MeshSettings()
    bf16: bool = False
    recompute: bool = False
    offload: bool = False
    lora: Lora | None = None
    save_every: int = 1  # steps; 0: by time alone
    save_seconds: float = 0.0  # 0: by steps alone
    threads: int = 1  # of each rank
    timeout: float = 600.0  # seconds that a collective may take
    saves: str = ""  # directory of the saves; else resume/ of the directory
    weights: str = ""  # directory of published versions; else weights/ of the directory
    versions: int = 0  # that stay for late readers; 0: all
    roles: str = ""  # directory in which ranks are written down, if any
    owner: RoleRecord | None = None  # who gives the batches; ranks end when it has ended

    @property
    def resume(self) -> Path:
        return Path(self.saves or Path(self.directory, "resume"))

    @property
    def published(self) -> Path:
        return Path(self.weights or Path(self.directory, "weights"))

    @property
    def chosen(self) -> Objective:
        return build(self.objective, length=self.length)

    def rate(self, step: int) -> float:
        """Of optimiser step number `step`, counted from 0."""
        return self.settings.rate_at(step, self.steps)

    def critic_only(self, step: int) -> bool:
        return step < self.objective.critic.warm_up


class Result(msgspec.Struct, kw_only=True):
    """rank 0 -> the sender of the batch: step `step` is taken and its weights are published. It is `saved`, or can be
    taken again from the log."""

    step: int
    saved: bool
    stats: dict[str, Any]
    weights: VersionRef | None  # None: it is published already, as are steps after it
    publication: Seconds = msgspec.field(default_factory=Seconds)


class Said(msgspec.Struct, kw_only=True):
    """A rank -> the watcher: why it cannot continue."""

    message: str
    hint: str = ""
    errno: int | None = None
    sample: bool = False  # a part of a batch is what it raised on, or another rank is gone
    at: float = 0.0


class ProbeAnswer(msgspec.Struct, kw_only=True):
    """rank 0 -> the sender: why not, or None."""

    number: int
    reason: str | None


def make_learner(plan: WorkPlan, ranks: Ranks) -> Learner:
    """The model of the plan, sharded, with everything that its objective needs."""
    random.seed(plan.seed)
    np.random.seed(plan.seed)
    torch.manual_seed(plan.seed)
    objective = plan.chosen
    directory = Path(plan.model)

    need_cuttable(configuration(directory), ranks.layout or MeshLayout())

    def scorer(lora: Lora | None, *, critic: bool, balance: bool = False, replay: bool = False) -> Scorer:
        return load_scorer(
            directory,
            ranks,
            lora=lora,
            packs=plan.packs,
            offload=plan.offload,
            recompute=plan.recompute,
            critic=critic,
            bf16=plan.bf16,
            shares=plan.shares,
            balance=balance,
            replay=replay,
        )

    policy = scorer(
        plan.lora, critic=objective.value is not None, balance=objective.balance > 0, replay=objective.router_replay
    )
    reference = None if objective.kl is None else scorer(None, critic=False)
    if objective.advantage.baseline == "teacher":
        reference = _teacher(plan, policy.vocabulary, ranks)
    return Learner(policy, objective, plan.settings, reference=reference, ranks=ranks)


def _teacher(plan: WorkPlan, vocabulary: int, ranks: Ranks) -> Scorer:
    """The model that is learned from. It reads the policy's own tokens, so both need one vocabulary."""
    where = Path(plan.objective.teacher)
    content = configuration(where)
    need_cuttable(content, ranks.layout or MeshLayout())
    packs = True if is_plain(content) else verify_run(where).packs
    made = load_scorer(where, ranks, packs=packs, trained=False, offload=plan.offload, bf16=plan.bf16)
    if made.vocabulary < vocabulary:
        raise Invalid(
            f"the teacher {where} has {made.vocabulary} tokens, the policy {vocabulary}",
            hint="name a teacher with the policy's tokenizer",
        )
    return made


class RankWorker:
    """One rank at work. Tests run it in their own process."""

    def __init__(
        self,
        plan: WorkPlan,
        ranks: Ranks = ALONE,
        phase: Callable[[str], None] = lambda _: None,
        *,
        carry: ShardCarrier | None = None,
        apart: bool = False,
    ):
        """`carry`: takes this rank's shards of saves to the host that keeps them; `apart`: hosts share no directory."""
        self.plan, self.ranks, self.phase = plan, ranks, phase
        self.directory = Path(plan.directory)
        self.log = SampleLog(self.directory / "log")
        self.states = StateLog(self.directory / "log")
        self.phase("load")
        self.learner = make_learner(plan, ranks)
        self.learner.on_micro_batch = lambda: phase(f"step {self.step}")
        self.saves = Saves(plan.resume, ranks, carry=carry)
        self.replay = Replay(self.learner, self.saves, self.log, plan)
        self.interval = SaveInterval(plan.save_every, plan.save_seconds)
        self.weights = ModelPublisher(
            self.learner.scorer.model,
            plan.published,
            base=Path(plan.model),
            lora=plan.lora,
            keep=plan.versions,
            ranks=ranks,
            apart=apart,
            first=_first(),
        )
        state = self.saves.load(self.learner)
        self.step = 0 if state is None else state.step
        if state is None and not self.interval.every:
            self.saves.save(self.learner, ResumeState(step=0, ranks=ranks.size))
        self.weights.begin(self.step, self.states.latest(state or ResumeState(step=0)).step)
        self._saved = {"put_aside": {line.name: line.reason for line in state.put_aside}} if state else {}
        self._probe = -1  # that was answered last
        if ranks.rank == 0:
            for note in self.saves.notes:
                print(note, file=sys.stderr, flush=True)

    def run(self) -> None:
        """To the end of the plan. A step that was saved when its rank died is reported again."""
        self.phase("publish")
        self.weights.start(self.step)
        self._report(saved=True, stats=self._saved)
        while self.step < self.plan.steps:
            samples = self._next()
            self.phase(f"step {self.step}")
            stats = self.replay.take(self.step, samples)
            self.step += 1
            self._keep(self._state(samples, stats.put_aside))
            self._report(saved=self.interval.every or self.step == self.plan.steps, stats=stats.items())
        self.weights.close()
        self.phase("end")

    def _keep(self, state: ResumeState) -> None:
        """Saves the step and encodes its weights at the same time; between saves it is noted."""
        due = self.interval.due(self.step, self.plan.steps)
        if self.ranks.any(due and self.ranks.rank == 0):  # by rank 0's clock
            self.phase(f"save step {self.step}")
            self.saves.start_save(self.learner, state)
        self.weights.start(self.step)
        if self.interval.every or self.step == self.plan.steps:
            self.saves.wait_saved()
            return
        self.saves.poll()
        if self.ranks.rank == 0:
            self.states.note(state)

    def _state(self, samples: list[Sample], put_aside: dict[str, str]) -> ResumeState:
        """Of the run after this step."""
        state = self.states.read(self.step)
        named = [*state.put_aside, *described(self.step, samples, put_aside)]
        return msgspec.structs.replace(state, ranks=self.ranks.size, put_aside=named)

    def _answer(self, probe: Probe) -> None:
        """All ranks make the gradient of these samples together, or die of it."""
        self.phase(f"step {self.step}, looking for a sample")
        reason = probed(self.learner, probe.samples)
        if self.ranks.rank == 0:
            answer = msgspec.json.encode(ProbeAnswer(number=probe.number, reason=reason))
            (self.directory / "results").mkdir(exist_ok=True)
            durable.publish(self.directory / "results" / "probed.json", answer, durable=False)
        self._probe = probe.number

    def _next(self) -> list[Sample]:
        """The next batch. Parts of it that come before are fed at once: all of them, on every rank, in their order."""
        self.learner.begin()
        number = 0
        self.phase(f"wait for batch {self.step}")
        while True:
            probe = self.log.read_probe()
            if probe is not None and probe.number != self._probe and probe.step == self.step + 1:
                self._answer(probe)
                continue
            complete = self.log.path(self.step).exists()  # first: a reader that sees the batch then sees every part
            part = self.log.read_part(self.step, number) if self.learner.streams else None
            if part is not None:
                self.phase(f"step {self.step}")
                self.learner.feed(part, last=complete)
                number += 1
                self.phase(f"wait for batch {self.step}, {number} parts done")
            elif complete:
                return self.log.read(self.step)
            else:
                time.sleep(POLL)

    def _report(self, *, saved: bool, stats: dict[str, Any]) -> None:
        """Publishes the weights of this step, and says so."""
        ref = self.weights.wait()
        trim_memory()  # before the wait for a batch
        if self.ranks.rank != 0:
            return
        result = Result(step=self.step, saved=saved, stats=stats, weights=ref, publication=self.weights.seconds)
        directory = self.directory / "results"
        directory.mkdir(exist_ok=True)
        durable.publish(directory / f"step-{result.step:06d}.json", msgspec.json.encode(result), durable=False)


def _write_down(roles: Path, rank: int, log: str) -> None:
    """For `pagurus roles`."""
    name, pid = f"rank-{rank}", os.getpid()
    last = adopted.read(roles, name)
    generation = 1 if last is None else last.generation + 1
    role = RoleRecord(
        name=name, pid=pid, started=adopted.started(pid) or 0, at=time.time(), generation=generation, log=log
    )
    adopted.write(roles, role)


def _say(directory: Path, rank: int, error: Exception) -> None:
    """On a full disk even this may not be written; who watches looks at the disk as well."""
    said = Said(message=f"{type(error).__name__}: {error}".splitlines()[0], sample=True, at=time.time())
    if isinstance(error, PagurusError):
        said = Said(message=error.message, hint=error.hint, at=said.at)
    elif isinstance(error, OSError):
        said = Said(message=str(error), errno=error.errno, at=said.at)
    (directory / "results").mkdir(exist_ok=True)
    durable.publish(directory / "results" / f"said-{rank}.json", msgspec.json.encode(said), durable=False)


def _hosts() -> int:
    """That torchrun connects."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))


def _first() -> bool:
    """Of the ranks on this host."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _carrier() -> ShardCarrier | None:
    """On another host than the one that keeps the saves."""
    head = os.environ.get(HEAD)
    if not head:
        return None
    client = HeadClient.of_environment(head)
    return ShardCarrier(client.upload, client.part, first=_first())


def main(argv: list[str]) -> int:
    """``python -m trainer.distributed.worker PLAN``, as one rank of torchrun's, or alone."""
    if len(argv) != 1:
        raise Invalid("one argument: the plan", hint="plan.json of a run")
    structs.learn()
    plan = msgspec.json.decode(Path(argv[0]).read_bytes(), type=WorkPlan)
    torch.set_num_threads(plan.threads)
    return_freed_memory()
    directory, rank = Path(plan.directory), int(os.environ.get("RANK", "0"))
    with Heart(directory / "beats", rank, owner=plan.owner) as heart:
        if plan.roles:
            _write_down(Path(plan.roles), rank, str(directory / "ranks.log"))
        ranks = join(timeout=plan.timeout, **msgspec.structs.asdict(plan.mesh))
        try:
            RankWorker(plan, ranks, heart.phase, carry=_carrier(), apart=_hosts() > 1).run()
        except (PagurusError, OSError, *FAILURES) as error:
            _say(directory, rank, error)
            sys.stderr.write(traceback.format_exc())
            sys.stderr.flush()
            if isinstance(error, FAILURES) and not isinstance(error, PagurusError):
                os._exit(1)  # others are in a collective that does not end: nothing here may wait for them
            raise
        finally:
            leave()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
