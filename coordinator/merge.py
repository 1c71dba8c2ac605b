"""Answers of many hosts as one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MIDDLE = ("_p50", "_p99")  # of these the worst host's counts: they cannot be added


def added(answers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of all hosts together; of text, what the first says.

    >>> added([{"a": 1, "b": {"x": 2}, "c_p99": 3.0}, {"a": 2, "b": {"y": 1}, "c_p99": 1.0}])
    {'a': 3, 'b': {'x': 2, 'y': 1}, 'c_p99': 3.0}
    """
    sums: dict[str, Any] = {}
    for answer in answers:
        for name, value in answer.items():
            existing = sums.get(name)
            if isinstance(value, Mapping):
                sums[name] = added([existing or {}, value])
            elif isinstance(value, bool) or not isinstance(value, int | float) or existing is None:
                sums.setdefault(name, value)
            else:
                sums[name] = max(existing, value) if name.endswith(MIDDLE) else existing + value
    return sums


def joined(answers: Iterable[Iterable[Mapping[str, Any]]], key: str, order: str | None) -> list[Mapping[str, Any]]:
    """The lists of all hosts as one: what has the same `key` once, sorted by `order`."""
    result: dict[Any, Mapping[str, Any]] = {}
    for answer in answers:
        for item in answer:
            result.setdefault(item[key], item)
    return sorted(result.values(), key=lambda item: (item.get(order or key, 0), str(item[key])))


def exposition(texts: Mapping[str, str], counters: Mapping[str, tuple[str, float]]) -> bytes:
    """Prometheus' texts of hosts, each sample with its host as a label; and `counters` by name."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, Metric
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Metric] = {}
    for host, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text):
            one = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {**sample.labels, "host": host}
                one.add_sample(sample.name, labels, sample.value, sample.timestamp, sample.exemplar)
    for name, (what, count) in counters.items():
        families[name] = CounterMetricFamily(name, what, value=count)

    class MergedCollection:
        def collect(self) -> Iterable[Metric]:
            return families.values()

    registry = CollectorRegistry()
    registry.register(MergedCollection())
    return generate_latest(registry)
