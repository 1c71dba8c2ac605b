"""What Prometheus reads at ``/metrics``.

Guarantee: the number of series is bounded by the code (routes, statuses, states, stages); no label ever holds the id of
a sandbox, a checkpoint or a caller.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from daemon.checkpoints.schedule import CheckpointStage
from sandbox.messages import SandboxState

if TYPE_CHECKING:
    from daemon.catalogue import CheckpointRow
    from daemon.host.host import Host

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60)
_SLOW = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)

_requests = Counter("pagurus_api_requests", "Requests by route and status.", ("route", "status"), registry=REGISTRY)
_request_seconds = Histogram(
    "pagurus_api_request_seconds", "Time to the end of the answer.", ("route",), buckets=_FAST, registry=REGISTRY
)
replays = Counter("pagurus_api_replays", "Calls answered from a kept answer.", registry=REGISTRY)
_exec = Histogram("pagurus_exec_seconds", "Commands, from start to end.", buckets=_FAST, registry=REGISTRY)
_exposed = Histogram(
    "pagurus_checkpoint_exposed_seconds",
    "Time for which a command waited for the checkpoint before it.",
    buckets=_FAST,
    registry=REGISTRY,
)
_frozen = Histogram(
    "pagurus_checkpoint_frozen_seconds",
    "Time for which a sandbox could not run.",
    ("verdict",),
    buckets=_FAST,
    registry=REGISTRY,
)
_captured = Histogram(
    "pagurus_checkpoint_captured_seconds",
    "From the verdict to captured.",
    ("verdict",),
    buckets=_SLOW,
    registry=REGISTRY,
)
_durable = Histogram(
    "pagurus_checkpoint_durable_seconds", "From the verdict to durable.", buckets=_SLOW, registry=REGISTRY
)
comparisons = Histogram(
    "pagurus_comparison_seconds",
    "Comparisons of the files with the last snapshot, for ignored paths and scratch; equal ones save a checkpoint.",
    ("outcome",),  # equal, different or unknown
    buckets=_FAST,
    registry=REGISTRY,
)
restores = Histogram("pagurus_restore_seconds", "Restores in place.", buckets=_SLOW, registry=REGISTRY)
gateway_requests = Counter(
    "pagurus_gateway_requests",
    "Requests of agents: of the main loop, outside it (side), that call no model (other), or not understood (none).",
    ("kind", "result"),  # answered, recorded, upstream_error, refused or gone
    registry=REGISTRY,
)
gateway_held = Histogram(
    "pagurus_gateway_held_seconds",
    "Time for which an answer of the main loop was ready and waited for its checkpoint.",
    buckets=_FAST,
    registry=REGISTRY,
)
upstream_errors = Counter(
    "pagurus_gateway_upstream_errors",
    "Answers that a model did not give: it could not be reached, broke off, or said no (status).",
    ("cause",),  # unreachable, or status
    registry=REGISTRY,
)
exchanges_stored = Counter("pagurus_gateway_exchanges_stored", "Whole answers that were journalled.", registry=REGISTRY)
tokens_rejected = Counter("pagurus_gateway_tokens_rejected", "Tokens of no sandbox, shown outside.", registry=REGISTRY)


def request(route: str, status: int, seconds: float) -> None:
    _requests.labels(route, str(status)).inc()
    _request_seconds.labels(route).observe(seconds)


def command(seconds: float, waited: float) -> None:
    """A command has ended; 0 seconds: a process was started, which runs on."""
    if seconds:
        _exec.observe(seconds)
    _exposed.observe(waited)


def captured(row: CheckpointRow) -> None:
    """A checkpoint (its row) was captured."""
    _frozen.labels(row.verdict.value).observe(row.frozen_ms / 1000)
    if row.captured_at is not None:
        _captured.labels(row.verdict.value).observe(max(0.0, row.captured_at - row.created_at))


def durable(row: CheckpointRow) -> None:
    if row.durable_at is not None:
        _durable.observe(max(0.0, row.durable_at - row.created_at))


def exposition(host: Host) -> bytes:
    """The text that Prometheus reads."""
    scrape = CollectorRegistry()
    scrape.register(_Host(host))
    return generate_latest(REGISTRY) + generate_latest(scrape)


class _Host:
    """The counts that the host keeps itself."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def collect(self) -> Iterable[Metric]:
        services = self._host.services
        tally, queue = services.tally, services.queue
        states = Count(live.row.state for live in self._host.live_sandboxes.values())
        yield _by("pagurus_sandboxes", "Sandboxes by state.", "state", {s.value: states[s] for s in SandboxState})
        yield _by("pagurus_turns", "Turns by verdict.", "verdict", tally.verdicts, counter=True)
        yield _by("pagurus_checkpoints", "Checkpoints by verdict.", "verdict", tally.checkpoints, counter=True)
        yield CounterMetricFamily("pagurus_checkpoints_failed", "Checkpoints that failed.", tally.checkpoints_failed)
        yield CounterMetricFamily("pagurus_restores", "Restores in place.", tally.restores)
        yield CounterMetricFamily("pagurus_stored_bytes", "Bytes that checkpoints added.", tally.stored_bytes)
        yield CounterMetricFamily("pagurus_full_bytes", "Bytes that full dumps would have added.", tally.full_bytes)
        yield _by(
            "pagurus_queue_length", "Jobs that wait.", "stage", {s.value: queue.queued(s) for s in CheckpointStage}
        )
        yield _by(
            "pagurus_queue_running", "Jobs under way.", "stage", {s.value: queue.running(s) for s in CheckpointStage}
        )
        if (gateway := self._host.gateway) is not None:
            text = "Bytes of the records of sandboxes that called a model since the daemon started."
            yield GaugeMetricFamily("pagurus_gateway_journal_bytes", text, gateway.statistics().journal_bytes)
            yield GaugeMetricFamily(
                "pagurus_gateway_asking", "Calls of models in progress.", len(gateway.handler.answers)
            )
        networks = self._host.networks
        yield GaugeMetricFamily("pagurus_networks", "Sandboxes with a network.", networks.count)
        requested = dict(zip(("allowed", "refused"), networks.names(), strict=True))
        yield _by("pagurus_names_asked", "Names that sandboxes queried.", "verdict", requested, counter=True)
        for name, value in services.inspector.statistics().items():
            if isinstance(value, int | float):
                yield GaugeMetricFamily(f"pagurus_inspector_{name}", f"The inspector's {name}.", value)


def _by(name: str, text: str, label: str, values: dict[str, int], *, counter: bool = False) -> Metric:
    family = (CounterMetricFamily if counter else GaugeMetricFamily)(name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric((str(key),), value)
    return family
