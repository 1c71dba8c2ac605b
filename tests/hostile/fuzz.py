"""Fuzzes the API of a real daemon from its own OpenAPI description (schemathesis).

::

    pagurus bench fuzz [--json] [--examples N] [--seed S] [--only TEXT] [--image NAME]

Every operation gets N cases that follow the description and N that break it. Two thirds of all names in paths are those
of a sandbox, a checkpoint or an image that exist, so that the cases reach what lies behind a look-up. A sandbox that
a case kills, breaks or removes is brought back or replaced.

`server_errors`: answers of 500 and above, each with the case that had it; `misfits`: answers that the
description does not allow (status, content type, shape); `crashes`: how often the daemon was gone; `leaks`: what is
left of sandboxes at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import sys
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from bench.harness import aftermath, command
from bench.harness.own_daemon import IMAGE, BenchHost, Census, image
from sandbox.messages.tokens import TokenRequest

TIMEOUT = 60.0  # seconds for one answer
ENDLESS = ("watch", "attach", "events")  # operations whose answers end when something happens
FORKS = 2  # at most, of one call
SECONDS = 1.0  # of one command, at most
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]


@schemathesis.serializer("application/x-tar")
def _tar(_: Any, value: Any) -> bytes:
    """Bytes as they are; most of them are no archive."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@dataclass
class Findings:
    operations: int = 0
    cases: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    server_errors: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    crashes: int = 0
    skipped: list[str] = field(default_factory=list)


class Target:
    """A daemon over TCP with a sandbox that cases are aimed at."""

    def __init__(self, url: str, token: str, image_name: str) -> None:
        self.url = url
        self.image = image_name
        self.headers = {"Authorization": f"Bearer {token}"}
        self.sandbox = ""
        self.checkpoint = ""

    def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = requests.request(method, self.url + path, json=body, headers=self.headers, timeout=TIMEOUT)
        if answer.status_code >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    def ready(self) -> None:
        """The sandbox lives; those that cases made are removed."""
        for info in self.call("GET", "/v1/sandboxes"):
            if info["id"] != self.sandbox:
                self.call("DELETE", f"/v1/sandboxes/{info['id']}")
            elif info["state"] == "dead":
                self.call("POST", f"/v1/sandboxes/{self.sandbox}/restore", {})
        existing = {info["id"]: info for info in self.call("GET", "/v1/sandboxes")}
        if existing.get(self.sandbox, {}).get("state") == "running":
            requests.delete(f"{self.url}/v1/sandboxes/{self.sandbox}/hold", headers=self.headers, timeout=TIMEOUT)
            return
        self.sandbox = self.call("POST", "/v1/sandboxes", {"image": self.image})["id"]
        self.checkpoint = self.call("POST", f"/v1/sandboxes/{self.sandbox}/checkpoints", {})["id"]

    def description(self) -> dict[str, Any]:
        result: dict[str, Any] = self.call("GET", "/v1/openapi.json")
        return result

    def aim(self, case: Any, chance: random.Random) -> None:
        """Make a case meet what exists, and keep it small. The image stays: later cases need sandboxes of it."""
        named = {"id": self.sandbox, "checkpoint": self.checkpoint}
        if case.method != "DELETE":
            named["name"] = self.image
        for name in case.path_parameters or {}:
            if name in named and chance.random() < 2 / 3:
                case.path_parameters[name] = named[name]
        if case.query and "checkpoint" in case.query and chance.random() < 2 / 3:
            case.query["checkpoint"] = self.checkpoint
        if case.query and "timeout" in case.query:
            case.query["timeout"] = SECONDS
        body = case.body
        if not isinstance(body, dict):
            return
        for name, value in (("image", self.image), ("checkpoint", self.checkpoint)):
            if name in body and chance.random() < 2 / 3:
                body[name] = value
        if isinstance(body.get("count"), int):
            body["count"] = min(body["count"], FORKS)
        if "command" in body:
            body["timeout"] = SECONDS


def fuzz(target: Target, *, examples: int, seed: int, only: str = "", alive: Any = lambda: True) -> Findings:
    """Cases for every operation. Deterministic for one seed and one description."""
    findings = Findings()
    target.ready()
    schema = schemathesis.openapi.from_dict(target.description())
    operations: Any = schema.get_all_operations()
    for result in operations:
        operation = result.ok()
        name = operation.definition.raw.get("operationId", operation.label)
        if only not in name or any(word in name.split(".")[-1] for word in ENDLESS):
            findings.skipped.append(name)
            continue
        findings.operations += 1
        print(name, file=sys.stderr, flush=True)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            _try(target, operation, mode, examples, seed, findings)
        if not alive():
            findings.crashes += 1
            return findings
        target.ready()
    return findings


def _try(target: Target, operation: Any, mode: Any, examples: int, seed: int, findings: Findings) -> None:
    chance = random.Random(seed)

    @seeded(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        target.aim(case, chance)
        _judge(target, case, findings)

    try:
        one()
    except schemathesis.errors.InvalidSchema as error:
        findings.misfits.append(f"{operation.label}: {error}")
    except Unsatisfiable:
        if mode is GenerationMode.POSITIVE:
            raise
        # nothing of it can be broken: no parameters, no body


def _judge(target: Target, case: Any, findings: Findings) -> None:
    findings.cases += 1
    try:
        answer = case.call(base_url=target.url, headers=target.headers, timeout=TIMEOUT)
    except requests.exceptions.InvalidHeader:
        return  # never left this process
    except requests.RequestException as error:
        findings.server_errors.append(f"{_said(case)}: no answer: {type(error).__name__}")
        return
    group = f"{answer.status_code // 100}xx"
    findings.statuses[group] = findings.statuses.get(group, 0) + 1
    if answer.status_code == 502 and (case.path.startswith("/v1/images/pull") or case.path.endswith("/push")):
        return  # no registry answers where there is no internet
    if answer.status_code >= 500:
        findings.server_errors.append(f"{_said(case)}: {answer.status_code} {answer.content[:300]!r}")
        return
    try:
        case.validate_response(answer, checks=CHECKS, headers=target.headers)
    except (FailureGroup, Failure) as error:
        failures = getattr(error, "exceptions", [error])
        findings.misfits.append(
            f"{_said(case)}: {answer.status_code} {'; '.join(str(item)[:300] for item in failures)}"
        )


def _said(case: Any) -> str:
    parts = {"path": case.path_parameters, "query": case.query, "body": case.body}
    return f"{case.method} {case.path} {str({k: v for k, v in parts.items() if v})[:300]}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def admin(client: Any) -> str:
    """A token that may do everything."""
    from sandbox.messages.tokens import NewToken

    made = await client.call("POST", "/v1/tokens", NewToken, TokenRequest(name="fuzz", scope="admin"))
    return str(made.text)


def everything(options: argparse.Namespace, host: BenchHost) -> dict[str, Any]:
    port = free_port()
    host.start("--listen", f"127.0.0.1:{port}", "--plain")
    census = Census(host)

    async def token() -> str:
        async with host.client() as client:
            return await admin(client)

    target = Target(f"http://127.0.0.1:{port}", asyncio.run(token()), IMAGE)
    process = host.process
    assert process is not None
    findings = fuzz(
        target,
        examples=options.examples,
        seed=options.seed,
        only=options.only,
        alive=lambda: process.poll() is None,
    )
    if not findings.crashes:
        target.sandbox = ""
        for info in target.call("GET", "/v1/sandboxes"):
            target.call("DELETE", f"/v1/sandboxes/{info['id']}")
        host.stop()
    left = census.leaks()
    return {**vars(findings), "leaks": len(left), "leaked": left[:20]}


def main(arguments: list[str]) -> int:
    parser = command.parser(__name__, __doc__)
    parser.add_argument("--examples", type=int, default=50, help="of each operation and kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="operations whose name holds this")
    parser.add_argument("--image", default="debian")
    options = parser.parse_args(arguments)
    host = BenchHost(aftermath.directory("pagurus-fuzz-", "/var/tmp"), image(options.image))
    try:
        result = everything(options, host)
    finally:
        host.clean()
    command.show(result, options)
    return 1 if result["server_errors"] or result["crashes"] or result["leaks"] or result["misfits"] else 0
