"""A host of a trainer that is not rank 0's: starts its ranks, brings them batches, takes their shards of saves away.

Run as ``python -m trainer.distributed.agent --head http://10.0.0.1:7010 --directory /var/lib/pagurus-trainer``, with
the token in PAGURUS_TRAINER_TOKEN and, for https, a directory of cert.pem and key.pem in PAGURUS_TRAINER_TLS.
Guarantee: ranks see a batch after everything that was given before it, with the content that the head named; no rank of
an earlier start lives when those of the next one begin, and none without this process.

::

    threads: [ signs ─▶ news ]   [ a new start? end ranks ─▶ model, save ─▶ torchrun │ else: new log entries ]  repeated
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from rollout.engine import tls
from rollout.engine.keep import die_with_parent
from sandbox import private, structs
from sandbox.errors import EngineFailed
from trainer.distributed.head import TLS, TOKEN, HeadAddress, HeadClient, LogEntry, digest_of
from trainer.distributed.hosts import HostAnswer, Order, Signs
from trainer.distributed.torchrun import NodePlace, Torchrun
from trainer.distributed.watch import read
from trainer.distributed.worker import Said, WorkPlan

END_TIMEOUT = 2.0  # seconds for what is under way when it is ended
POLL_INTERVAL = 0.1  # seconds between signs, which the head holds for a while
RELAY_TIMEOUT = 120.0  # seconds for the server of weights to listen


class HostAgent:
    """``HostAgent(client, "host-2", directory).run()``"""

    def __init__(self, client: HeadClient, name: str, directory: Path, *, address: str, serve: bool = True):
        """`address` of this host, at which other ranks and readers of weights reach it. `serve` weights there."""
        self.client, self.name, self.directory, self.address, self.serve = client, name, directory, address, serve
        self.torchrun: Torchrun | None = None
        self.relay: subprocess.Popen[bytes] | None = None
        self.weights = ""
        self._start = -1
        self._order: Order | None = None  # the newest
        self._listing: tuple[str, list[LogEntry]] = ("", [])  # of the head's log, with its mark
        self._lock = threading.Lock()  # of the ranks and their start
        self._stop = threading.Event()
        self._log: dict[str, str] = {}  # digests of what is in the local log

    def run(self) -> None:
        """Until the process is ended. A head that does not answer is tried again."""
        acts = {"signs": self._send_signs, "ranks": self._turn}  # signs also while a model is fetched
        threads = [
            threading.Thread(target=self._repeat, args=(act,), name=name, daemon=True) for name, act in acts.items()
        ]
        for one in threads:
            one.start()
        try:
            while all(one.is_alive() for one in threads):
                time.sleep(POLL_INTERVAL)  # a signal ends it, here alone: elsewhere it could leave a lock taken
        finally:
            self._stop.set()
            for one in threads:
                one.join(END_TIMEOUT)
            self.close()
        raise EngineFailed("the agent failed", hint="see the output of this process")

    def _repeat(self, act: Callable[[], None]) -> None:
        last = ""
        while not self._stop.is_set():
            try:
                act()
            except (OSError, EngineFailed) as error:
                if str(error) != last:
                    print(error, file=sys.stderr, flush=True)
                last = str(error)
            self._stop.wait(POLL_INTERVAL)

    def close(self) -> None:
        if self.torchrun is not None:
            self.torchrun.stop()
        if self.relay is not None:
            self.relay.kill()
            self.relay.wait()

    def _send_signs(self) -> None:
        answer = self.client.put(f"/signs/{self.name}", self._signs(), HostAnswer)
        if answer.log is not None:
            self._listing = answer.mark, answer.log
        self._order = answer.order or self._order

    def _turn(self) -> None:
        order = self._order
        if order is not None and order.start != self._start:
            self._begin(order)
        elif self.torchrun is not None:
            self._mirror_log()

    def _signs(self) -> Signs:
        with self._lock:
            ordered = -1 if self._order is None else self._order.start
            signs = Signs(start=self._start, ordered=ordered, log=self._listing[0], weights=self.weights)
            if self.torchrun is None:
                return signs
            ended = self.torchrun.cause() if self.torchrun.poll() else ""
            results = self.directory / "results"
            said = [msgspec.json.decode(path.read_bytes(), type=Said) for path in results.glob("said-*.json")]
            beats = read(self.directory / "beats")
            return msgspec.structs.replace(signs, beats=beats, said=said, ended=ended)

    def _begin(self, order: Order) -> None:
        """The ranks of another start, or none."""
        with self._lock:
            old, self.torchrun = self.torchrun, None
        if old is not None:
            old.stop()
        if order.node < 0:
            self._start = order.start
            return
        plan = self._prepared(order)
        if self.serve and self.relay is None:
            self._serve_weights(plan.published)
        place = NodePlace(
            node=order.node,
            nodes=order.nodes,
            address=order.address,
            port=order.port,
            own=self.address,
            head=self.client.url,
        )
        with self._lock:
            self.torchrun, self._start = Torchrun(plan, ranks=order.ranks), order.start
            self.torchrun.start(place)

    def _prepared(self, order: Order) -> WorkPlan:
        """The plan with directories of this host, whose content is here."""
        directory = self.directory
        plan = msgspec.structs.replace(
            order.plan,
            directory=str(directory),
            model=str(directory / "model"),
            saves=str(directory / "resume"),
            weights=str(directory / "weights"),
            roles="",
        )
        self._fetch("model", order.model, Path(plan.model))
        for old in plan.resume.glob("*"):
            if old.name != order.save:
                shutil.rmtree(old, ignore_errors=True)
        plan.resume.mkdir(parents=True, exist_ok=True)
        if order.save:
            small = [entry for entry in order.save_files if not entry.name.endswith(".distcp")]
            self._fetch("save", small, plan.resume / order.save)  # each rank fetches what it reads of the shards
        shutil.rmtree(directory / "log", ignore_errors=True)
        self._log.clear()
        self._mirror_log()
        return plan

    def _fetch(self, area: str, files: list[LogEntry], target: Path) -> None:
        """What is not here yet."""
        target.mkdir(parents=True, exist_ok=True)
        for entry in files:
            path = target / entry.name
            if not path.exists() or digest_of(path) != entry.digest:
                self.client.fetch(area, entry, path)

    def _mirror_log(self) -> None:
        log = self.directory / "log"
        log.mkdir(parents=True, exist_ok=True)
        _, entries = self._listing
        for name in self._log.keys() - {entry.name for entry in entries}:
            (log / name).unlink(missing_ok=True)
            del self._log[name]
        for entry in entries:
            if self._log.get(entry.name) != entry.digest:
                self.client.fetch("log", entry, log / entry.name)
                self._log[entry.name] = entry.digest

    def _serve_weights(self, directory: Path) -> None:
        """What the ranks of this host publish, to engines and relays."""
        directory.mkdir(parents=True, exist_ok=True)
        port = self.directory / "relay.port"
        port.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "rollout.weights.relay", "--directory", str(directory), "--host", self.address]
        if self.client.tls is not None:
            argv += ["--certificate", str(self._both(Path(os.environ[TLS])))]
        self.relay = subprocess.Popen(
            [*argv, "--port-file", str(port)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PAGURUS_WEIGHTS_TOKEN": self.client.token},
            preexec_fn=die_with_parent,
        )
        deadline = time.monotonic() + RELAY_TIMEOUT
        while not port.exists():
            if self.relay.poll() is not None or time.monotonic() > deadline:
                raise EngineFailed("the server of weights does not listen", hint="see the output of this process")
            time.sleep(0.05)
        scheme = "http" if self.client.tls is None else "https"
        self.weights = f"{scheme}://{self.address}:{port.read_text().strip()}"

    def _both(self, certificate: Path) -> Path:
        """Certificate and key in one file, as the server of weights reads them."""
        path = self.directory / "relay.pem"
        private.file(path)
        path.write_bytes((certificate / tls.CERTIFICATE).read_bytes() + (certificate / tls.KEY).read_bytes())
        return path


def adopt(join: Path, directory: Path) -> str:
    """URL of the head; its token and certificate are in the environment then, for ranks too."""
    head = msgspec.json.decode(join.read_bytes(), type=HeadAddress)
    os.environ[TOKEN] = head.token
    if head.certificate:
        place = directory / "tls"
        private.directory(place, ours=(tls.CERTIFICATE, tls.KEY))
        for name, content in ((tls.CERTIFICATE, head.certificate), (tls.KEY, head.key)):
            private.file(place / name)
            (place / name).write_text(content)
        os.environ[TLS] = str(place)
    return head.url


def own_address(head: str) -> str:
    """Of this host, as it reaches the head."""
    parts = urlsplit(head)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return str(probe.getsockname()[0])


def end(*_: object) -> None:
    """A handler of SIGTERM: ends the main thread, once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.distributed.agent", description="A host of a trainer.")
    there = parser.add_mutually_exclusive_group(required=True)
    there.add_argument("--head", help="address of the trainer's own host")
    there.add_argument("--join", type=Path, help="roles/hosts.json of the run, which has address, token, certificate")
    parser.add_argument("--directory", type=Path, required=True, help="for the model, batches and weights; this host's")
    parser.add_argument("--name", default=socket.gethostname())
    parser.add_argument("--address", help="of this host; else that from which the head is reached")
    options = parser.parse_args(argv)
    structs.learn()
    signal.signal(signal.SIGTERM, end)  # ranks and server end with it
    options.directory.mkdir(parents=True, exist_ok=True)
    client = HeadClient.of_environment(options.head or adopt(options.join, options.directory.resolve()))
    HostAgent(
        client, options.name, options.directory.resolve(), address=options.address or own_address(client.url)
    ).run()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
