"""Hosts of a trainer as network namespaces behind links of a set rate, with a directory each; what `bench trainer
--hosts` runs on them.

::

    bench ─┬ ip netns exec host 0: this module ─▶ HostFleet ─▶ torchrun ─▶ ranks      a line of JSON for each event
           ├ ip netns exec host 1: trainer.distributed.agent ─▶ torchrun ─▶ ranks     one of them is killed
           └ a reader of the published weights, behind the same links
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from bench.harness import aftermath
from rollout.engine.embedded.model import ModelConfig, Qwen3, save_model
from rollout.weights.mirror import Mirror
from rollout.weights.puller import Puller
from rollout.weights.source import source_of
from trainer.batches.sample import Sample, SampleLog
from trainer.distributed.head import TOKEN
from trainer.distributed.host_fleet import HostFleet
from trainer.distributed.worker import RankWorker, Result, WorkPlan
from trainer.errors import RankLost
from trainer.estimate import estimate, ghostly
from trainer.models.load import Lora, empty
from trainer.resume import ResumeState, weights_of
from trainer.settings import OptimiserSettings

PREFIX = "10.96.77"
PORT, WEIGHTS_PORT = 7010, 7011
RANKS, STEPS, KILLED_IN = 2, 5, 3  # ranks of a host; the step in which a host is killed, counted from 0
READ = 2  # the version that is read, and the step after which memory is looked at; of a shorter run its last one
TIMEOUT = 900.0  # seconds for anything, on a machine that may be very busy
SECRET = "bench"
SHARD = 18  # bytes of a trained weight: fp32 weight, gradient, two moments, the published copy in bf16
LOADED = 6  # of one that has taken no step: fp32 weight, the published copy
FROZEN = 4  # of one that is frozen, under adapters


class TrainerHostsCase(msgspec.Struct, kw_only=True):
    """What host 0 is to do."""

    plan: WorkPlan
    hosts: int
    batches: list[list[Sample]]


class Namespaces:
    """``with Namespaces(3, "1gbit") as spaces: spaces.run(0, [...])``: each with a link to a bridge."""

    def __init__(self, count: int, rate: str):
        self.count, self.rate, self.tag = count, rate, f"pt{secrets.token_hex(2)}"
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Namespaces:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        aftermath.note(command=["ip", "link", "del", self.tag])
        _ip("link", "add", self.tag, "type", "bridge")
        _ip("addr", "add", f"{PREFIX}.254/24", "dev", self.tag)
        _ip("link", "set", self.tag, "up")
        for number in range(self.count):
            name, link = self.name(number), self.link(number)
            aftermath.note(command=["ip", "netns", "del", name])
            _ip("netns", "add", name)
            _ip("link", "add", link, "type", "veth", "peer", "name", "up0", "netns", name)
            _ip("link", "set", link, "master", self.tag, "up")
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "up0")
            _ip("-n", name, "link", "set", "up0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            shape = ["root", "tbf", "rate", self.rate, "burst", "256k", "latency", "50ms"]
            for place, device in (([], link), (["-n", name], "up0")):
                subprocess.run(["tc", *place, "qdisc", "add", "dev", device, *shape], check=True)

    def __exit__(self, *_: object) -> None:
        for number in range(self.count):
            self.kill(number)
            subprocess.run(["ip", "netns", "del", self.name(number)], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.tag], capture_output=True, check=False)
        for process in self.processes:
            process.kill()
            process.wait()

    def name(self, number: int) -> str:
        return f"{self.tag}n{number}"

    def link(self, number: int) -> str:
        return f"{self.tag}v{number}"

    def address(self, number: int) -> str:
        return f"{PREFIX}.{number + 1}"

    def run(self, number: int, argv: list[str], log: Path, *, piped: bool = False) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name(number), sys.executable, *argv],
                env={**os.environ, TOKEN: SECRET, "PAGURUS_WEIGHTS_TOKEN": SECRET},
                stdout=subprocess.PIPE if piped else output,
                stderr=output,
            )
        self.processes.append(process)
        return process

    def pids(self, number: int) -> list[int]:
        ran = subprocess.run(["ip", "netns", "pids", self.name(number)], capture_output=True, text=True, check=False)
        return [int(pid) for pid in ran.stdout.split()]

    def kill(self, number: int) -> None:
        """All that the host is, at once."""
        while pids := self.pids(number):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def moved(self) -> int:
        """Bytes that hosts have sent, headers included."""
        return sum(
            int(Path(f"/sys/class/net/{self.link(number)}/statistics/rx_bytes").read_text())
            for number in range(self.count)
        )


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def measure(
    config: ModelConfig,
    hosts: int,
    batches: list[list[Sample]],
    *,
    budget: int,
    rate: str,
    library: bool = False,
    lora: Lora | None = None,
) -> dict[str, Any]:
    """One run on these hosts with a batch a step. One of `STEPS` has its last host killed and is compared with one
    rank's. `library`: transformers defines the model; `lora`: only adapters are trained."""
    with aftermath.TemporaryDirectory("pagurus-hosts-") as place, Namespaces(hosts, rate) as spaces:
        directory = Path(place)
        base = directory / "base"
        model = Qwen3(config)
        model.initialise(0)
        save_model(model, base)
        if library:
            _index(base)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        del model
        longest = max((len(sample.tokens) for batch in batches for sample in batch), default=1)
        with ghostly():
            expected = estimate(
                empty(base, lora=lora), budget=budget, longest=longest, tokens=budget, recompute=False, flops=1e10,
                ranks=RANKS * hosts,
            ).peak  # fmt: skip
        settings = OptimiserSettings(budget=budget, rate=1e-6)
        steps = max(1, len(batches))  # without a batch: ranks load, and wait for one
        made = WorkPlan(model=str(base), directory=str(directory / "host-0"), steps=steps, settings=settings, lora=lora)
        case = directory / "case.json"
        case.write_bytes(msgspec.json.encode(TrainerHostsCase(plan=made, hosts=hosts, batches=batches)))
        driver = spaces.run(
            0, ["-u", "-m", "bench.harness.trainer_hosts", str(case)], directory / "driver.log", piped=True
        )
        for number in range(1, hosts):
            argv = ["-m", "trainer.distributed.agent", "--head", f"http://{spaces.address(0)}:{PORT}"]
            argv += ["--directory", str(directory / f"host-{number}"), "--name", f"host-{number}"]
            spaces.run(number, argv, directory / f"agent-{number}.log")
        served = ["-m", "rollout.weights.relay", "--directory", str(made.published), "--host", spaces.address(0)]
        made.published.mkdir(parents=True)
        spaces.run(0, [*served, "--port", str(WEIGHTS_PORT)], directory / "relay.log")
        result = _followed(spaces, driver, directory / "driver.log", directory / "mirror")
        weights = result.pop("weights")
        if len(batches) == STEPS:
            one = _alone(msgspec.structs.replace(made, directory=str(directory / "alone")), batches)
            result["difference_to_one_rank"] = max(
                float((left - weights[name]).norm() / left.norm()) for name, left in one.items()
            )
    if changes := result.get("changed_bytes"):
        result |= {
            "published_to_changed": round(result["read_bytes"] / changes, 3),
            "link_to_changed": round(result["link_bytes"] / changes, 3),
        }
    held = FROZEN if lora is not None else SHARD if batches else LOADED
    result |= {"shard_bytes": held * parameters // (RANKS * hosts), "estimate_bytes": expected}
    return {"hosts": hosts, "ranks": hosts * RANKS, "parameters": parameters, **result}


def _index(base: Path) -> None:
    """Names the file of weights in an index, as for models of several files, which transformers reads."""
    path = base / "model.safetensors"
    with safe_open(path, "pt") as file:
        names = list(file.keys())
    part = path.rename(base / "model-00001-of-00001.safetensors")
    content = {"metadata": {}, "weight_map": dict.fromkeys(names, part.name)}
    (base / "model.safetensors.index.json").write_text(json.dumps(content))


def _followed(spaces: Namespaces, driver: subprocess.Popen[bytes], log: Path, mirror: Path) -> dict[str, Any]:
    """What the driver says, and what is done to its hosts."""
    result: dict[str, Any] = {}
    assert driver.stdout is not None
    for line in driver.stdout:
        event = json.loads(line)
        print(line.decode().strip()[:300], file=sys.stderr)
        if event["event"] == "given" and event["step"] == KILLED_IN and "killed" not in result:
            result["killed"] = spaces.count - 1
            spaces.kill(spaces.count - 1)
        elif event["event"] == "look":
            result |= _memory(spaces)
            if event["step"]:
                result |= {"changed_bytes": event["changed"]}
                result |= asyncio.run(_read(spaces, event["sources"], mirror, event["step"]))
            (Path(event["directory"]) / "go").touch()
        elif event["event"] == "lost":
            result |= {"named": event["reason"], "lost_steps": event["step"] - event["saved"]}
        elif event["event"] == "end":
            result |= {"weights": weights_of(Path(event["save"])) if event["save"] else {}, **event["took"]}
    if driver.wait() != 0 or "weights" not in result:
        raise RuntimeError(f"host 0 ended: {log.read_text()[-2000:]}")
    return result


async def _read(spaces: Namespaces, sources: str, mirror: Path, version: int) -> dict[str, Any]:
    """As an engine reads this version, which has the one before; bytes of content, and of the links."""
    puller = Puller(source_of(sources, token=SECRET), Mirror(mirror), name="reader")
    await puller.pull(version - 1)
    before = spaces.moved()
    pulled = await puller.pull(version)
    moved = spaces.moved() - before
    await puller.close()
    return {"read_bytes": pulled.spent.bytes, "link_bytes": moved}


def _memory(spaces: Namespaces) -> dict[str, list[int]]:
    """Bytes of each rank, while they wait for a batch: `rank_pss`, in which what it shares with others counts in parts,
    and `rank_peak`, resident at most until then."""
    result: dict[str, list[int]] = {"rank_pss": [], "rank_peak": []}
    for number in range(spaces.count):
        for pid in spaces.pids(number):
            with contextlib.suppress(OSError):
                if b"trainer.distributed.worker" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    continue
                if b"torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    continue
                for name, file, key in (("rank_pss", "smaps_rollup", "Pss:"), ("rank_peak", "status", "VmHWM:")):
                    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
                    result[name].append(next(int(line.split()[1]) << 10 for line in lines if line.startswith(key)))
    return result


def _alone(made: WorkPlan, batches: list[list[Sample]]) -> dict[str, Tensor]:
    """The weights after the same steps on one rank, in this process."""
    torch.set_num_threads(1)
    log = SampleLog(Path(made.directory, "log"))
    for step, batch in enumerate(batches):
        log.write(step, batch)
    RankWorker(made).run()
    return weights_of(made.resume / f"step-{STEPS:06d}")


def main(path: str) -> None:
    """Host 0, in its namespace."""
    case = msgspec.json.decode(Path(path).read_bytes(), type=TrainerHostsCase)
    address = f"{PREFIX}.1"
    fleet = HostFleet(
        case.plan,
        ranks=RANKS,
        hosts=case.hosts,
        address=address,
        token=SECRET,
        port=PORT,
        join_timeout=TIMEOUT,
        silent=TIMEOUT,
        stuck=TIMEOUT,
    )
    seconds: list[float] = []
    lost_at = recovery = 0.0
    with fleet:
        first = fleet.wait(0)
        if not case.batches:
            _look(fleet, first, address)
        for step, batch in enumerate(case.batches):
            began = time.monotonic()
            fleet.give(batch, ResumeState(step=step + 1, version=step + 1))
            _say("given", step=step)
            while True:
                try:
                    result = fleet.wait(step + 1)
                    break
                except RankLost as lost:
                    lost_at = time.monotonic()
                    saved = max(int(item.name[5:]) for item in case.plan.resume.glob("step-*"))
                    _say("lost", step=step + 1, saved=saved, reason=lost.message)
                    fleet.join_timeout = 0.0
                    fleet.start()
            seconds.append(time.monotonic() - began)
            recovery = time.monotonic() - lost_at if lost_at and not recovery else recovery
            _say("taken", step=step + 1)
            if step + 1 == min(READ, len(case.batches)):
                _look(fleet, result, address)
        save = case.plan.resume / f"step-{STEPS:06d}"
        took = {"step_s": round(sorted(seconds)[len(seconds) // 2], 2)} if seconds else {}
        took |= {"recovery_s": round(recovery, 2)} if recovery else {}
        _say("end", save=str(save) if save.exists() else "", took=took)


def _look(fleet: HostFleet, result: Result, address: str) -> None:
    """While ranks wait for a batch: has the bench look at them, and read what they published."""
    sources = ",".join([f"http://{address}:{WEIGHTS_PORT}", *fleet.sources.split(",")[1:]])
    what = {"changed": result.publication.bytes, "sources": sources, "directory": str(fleet.directory)}
    _say("look", step=result.step, **what)
    while not (fleet.directory / "go").exists():
        fleet.check()
        time.sleep(0.05)


def _say(event: str, **what: object) -> None:
    print(json.dumps({"event": event, **what}), flush=True)


def need_tools() -> None:
    """Raises SystemExit where there can be no namespaces."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise SystemExit(f"the program {program} is missing: install iproute2")


if __name__ == "__main__":
    main(sys.argv[1])
