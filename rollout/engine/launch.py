"""How to start each kind of engine server: its command line and environment.

Guarantee: a launched engine listens on the loopback only, unless it was made `reachable`; it serves the token protocol
and the RL routes, and returns log-probabilities of the distribution that it samples from.
"""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from rollout.decide.engines.headroom import Budget
from rollout.decide.engines.options import arguments
from rollout.engine.patches import INSIDE
from rollout.engine.tls import CERTIFICATE, KEY
from sandbox import hints
from sandbox.errors import EngineFailed, Invalid
from sandbox.paths import CHECKOUT

IDLE_EXIT = 900.0  # seconds
START = 600.0  # seconds for a server to be healthy; it takes 3 to 60 of them where cores are free
STREAMED = 8  # tokens of one piece of a stream: each piece costs the server, and us, about as much as a token
NO_EXPERTS = "vLLM reports the experts of tokens on GPUs only"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's --max-lora-rank
VLLM_PYTHON = CHECKOUT / ".venv-vllm" / "bin" / "python"


@dataclass(frozen=True)
class LaunchCommand:
    argv: list[str]
    env: dict[str, str]  # added to ours


@dataclass(frozen=True)
class Launch:
    """A kind of engine. ``command(directory, port)`` starts a server of the model in `directory`."""

    name: str
    command: Callable[[Path, int], LaunchCommand]
    start_timeout: float  # seconds until it must be healthy
    slots: int = 64  # requests at once
    leaves: bool = False  # it ends by itself when it had no request for long: it may outlive who started it
    retained: bool = False  # it does not, and is kept by a process that ends it then (rollout.engine.keep)
    standby: LaunchCommand | None = None  # loads its code, then waits to get its arguments (rollout.engine.standby)
    patches: bool = False  # its workers write changes into their weights
    pulls: bool = False  # it pulls versions of weights by itself; else it reloads a mirror of them
    host: str = "127.0.0.1"  # where it listens
    tls: Path | None = None  # the directory of the certificate that it and its callers have; None: plain HTTP

    def url(self, port: int) -> str:
        return f"{'http' if self.tls is None else 'https'}://{self.host}:{port}"


def embedded(
    *,
    slots: int = 64,
    length: int = 1024,
    threads: int = 1,
    device: str = "cpu",
    dtype: str = "float32",
    paged: bool = False,
    experts: bool = False,
) -> Launch:
    """The embedded torch engine: with a small model ready in three seconds. `dtype`: float32 or bfloat16. `paged`: our
    own small Qwen3 over a paged cache, too. `experts`: answers name those of each token."""

    def command(directory: Path, port: int) -> LaunchCommand:
        argv = [*program, "--model", str(directory), "--port", str(port)]
        argv += ["--slots", str(slots), "--length", str(length), "--idle-exit", str(IDLE_EXIT)]
        argv += ["--threads", str(threads), "--device", device, "--dtype", dtype, *(["--paged"] if paged else [])]
        argv += ["--experts"] if experts else []
        return LaunchCommand(argv, env)

    program = [sys.executable, "-m", "rollout.engine.embedded.server"]
    env = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": _search(CHECKOUT)}
    waiting = LaunchCommand([*program, "--wait"], env)
    return Launch("embedded", command, start_timeout=START, slots=slots, leaves=True, standby=waiting, pulls=True)


def on_gpus(launch: Launch, environment: Mapping[str, str]) -> Launch:
    """The same, with variables that say which GPUs it has (rollout.engine.gpus)."""

    def command(directory: Path, port: int) -> LaunchCommand:
        plain = launch.command(directory, port)
        return replace(plain, env={**plain.env, **environment})

    waiting = launch.standby and replace(launch.standby, env={**launch.standby.env, **environment})
    return replace(launch, command=command, standby=waiting) if environment else launch


def reachable(launch: Launch, host: str, tls: Path) -> Launch:
    """An engine that other machines reach at `host`. It answers who has the key in the directory `tls`
    (rollout.engine.tls), and no other."""

    def command(directory: Path, port: int) -> LaunchCommand:
        plain = launch.command(directory, port)
        argv = [*plain.argv, "--host", host]
        if launch.name == "vllm":
            certificate, key = str(tls / CERTIFICATE), str(tls / KEY)
            argv += ["--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-ca-certs", certificate]
            argv += ["--ssl-cert-reqs", str(int(ssl.CERT_REQUIRED))]
        else:
            argv += ["--tls", str(tls)]
        return replace(plain, argv=argv)

    return replace(launch, command=command, host=host, tls=tls)


def colocated(launch: Launch, users: Budget, *, steps: Path | None = None) -> Launch:
    """An engine that serves users, who were promised so much; requests of a priority above 0 get the rest. `steps`: a
    directory, where it logs each step."""

    def command(directory: Path, port: int) -> LaunchCommand:
        plain = launch.command(directory, port)
        if launch.name == "vllm":
            return LaunchCommand(
                [*plain.argv, *_colocation(users, steps)], {**plain.env, "PYTHONPATH": _search(INSIDE)}
            )
        promised = ["--ttft", str(users.ttft), "--tpot", str(users.tpot), "--margin", str(users.margin)]
        return replace(plain, argv=[*plain.argv, *promised, *(["--steps", str(steps)] if steps else [])])

    return replace(launch, command=command)


def _colocation(users: Budget, steps: Path | None) -> list[str]:
    """vLLM with our scheduler, which decides before each step: so none is decided while the one before it runs."""
    log = {"pagurus_steps": str(steps)} if steps else {}
    promise = msgspec.json.encode({"pagurus_colocation": users, **log}).decode()
    argv = ["--scheduler-cls", "pagurus_colocation.ColocationScheduler", "--no-async-scheduling"]
    argv += ["--additional-config", promise, "--middleware", "pagurus_colocation.Telling"]
    return [*argv, "--stream-interval", "1"]  # users get each token when it is there


def vllm(
    *,
    python: Path = VLLM_PYTHON,
    slots: int = 64,
    length: int = 1024,
    threads: int = 1,
    lora: int = 0,
    transfer: bool = False,
    parallel: int = 1,
    gpu: bool = False,
    dtype: str = "auto",
    experts: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Launch:
    """A real vLLM server (the CPU build on hosts without a GPU) with token routes and RL routes.

    `transfer`: on GPUs, in bfloat16: workers write changes into their weights in place. `parallel`: GPUs of a server.
    `lora`: the rank of adapters that it is given, version by version, next to the model; 0: none. `gpu`: it computes on
    one, with CUDA graphs; the CPU build runs eagerly. `dtype`: auto is bfloat16 on GPUs, else float32. `options`:
    others, as vLLM names them. `experts`: answers name those of each token, on GPUs alone.

    Raises EngineFailed when it is not installed, Invalid for experts on a CPU.
    """
    if not python.exists():
        raise EngineFailed(f"vLLM is not installed: no {python}", hint=hints.vllm())
    if experts and not gpu:
        raise Invalid(NO_EXPERTS, hint="leave out objective.router_replay, or choose --engine embedded")
    precision = dtype if dtype != "auto" else "bfloat16" if gpu or transfer else "float32"

    def command(directory: Path, port: int) -> LaunchCommand:
        argv = [str(python), "-m", "vllm.entrypoints.openai.api_server"]  # the `vllm` script fails on its metadata
        argv += ["--model", str(directory), "--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--dtype", precision, *([] if gpu else ["--enforce-eager"])]
        argv += ["--enable-scale-out", "--disable-uvicorn-access-log"]
        argv += ["--max-model-len", str(length), "--max-num-seqs", str(slots)]
        argv += ["--scheduling-policy", "priority"]
        argv += ["--stream-interval", str(STREAMED)]
        argv += ["--logprobs-mode", "processed_logprobs"]  # of the sampled distribution, after the temperature
        if parallel > 1:
            argv += ["--tensor-parallel-size", str(parallel)]
        else:  # as on a GPU; the CPU build computes in a second process, for which the first one waits in a busy loop
            argv += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
        if transfer:
            argv += ["--weight-transfer-config", '{"backend": "pagurus"}']
            argv += ["--worker-extension-cls", "pagurus_vllm.WorkerExtension"]
        if lora:  # two at once: requests in flight continue with the version that they began with
            argv += ["--enable-lora", "--max-lora-rank", str(_allowed(lora)), "--max-loras", "2"]
            argv += ["--max-cpu-loras", "5"]  # as many versions as a run may be stale, and the newest
        argv += ["--enable-return-routed-experts"] if experts else []
        argv += arguments(options or {})
        env = _vllm_environment(python, threads, lora=bool(lora), transfer=transfer)
        if experts:  # which need this runner, and it needs Triton
            env["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        return LaunchCommand(argv, env)

    return Launch("vllm", command, start_timeout=START, slots=slots, retained=True, patches=transfer)


def _vllm_environment(python: Path, threads: int, *, lora: bool, transfer: bool) -> dict[str, str]:
    env = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": str(lora),
        "VLLM_SERVER_DEV_MODE": "1",  # the RL routes
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # s; after its five a client that was held up writes into what it closes
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all servers of a host compute on its first core
    }
    if transfer:
        env["PYTHONPATH"] = _search(INSIDE)
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        env["LD_PRELOAD"] = str(openmp)
    return env


def _search(directory: Path) -> str:
    """Python's modules of a directory, before others."""
    return os.pathsep.join(part for part in (str(directory), os.environ.get("PYTHONPATH")) if part)


def _allowed(rank: int) -> int:
    """The least of the ranks for which vLLM has room that is enough."""
    for capacity in LORA_RANKS:
        if rank <= capacity:
            return capacity
    raise Invalid(f"vLLM has no adapters of rank {rank}", hint=f"train adapters of rank {LORA_RANKS[-1]} or less")


KINDS: dict[str, Callable[..., Launch]] = {"embedded": embedded, "vllm": vllm}
