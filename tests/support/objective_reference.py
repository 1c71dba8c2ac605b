"""Objectives in numpy, trajectory by trajectory and token by token, written from the papers and not from `trainer`.

A batch is a list of trajectories (dicts). Every function returns the loss of the batch as a function of `new`, the list
of log-probabilities of the policy; `frozen` are those of the same policy where the formula lets no gradient through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Batch = list[dict[str, Any]]
Log = list[np.ndarray]


def rewards_of(batch: Batch, group: int) -> np.ndarray:
    return np.array([item["reward"] for item in batch if item["group"] == group])


def advantage_grpo(batch: Batch) -> list[float]:
    result = []
    for item in batch:
        peers = rewards_of(batch, item["group"])
        result.append((item["reward"] - peers.mean()) / (peers.std(ddof=1) + 1e-6))
    return result


def advantage_centred(batch: Batch) -> list[float]:
    return [item["reward"] - rewards_of(batch, item["group"]).mean() for item in batch]


def advantage_rloo(batch: Batch) -> list[float]:
    result = []
    for i, item in enumerate(batch):
        others = [o["reward"] for j, o in enumerate(batch) if o["group"] == item["group"] and j != i]
        result.append(item["reward"] - sum(others) / len(others))
    return result


def advantage_lite(batch: Batch) -> list[float]:
    everything = np.array([item["reward"] for item in batch])
    return [value / (everything.std(ddof=1) + 1e-6) for value in advantage_centred(batch)]


def advantage_pooled(batch: Batch) -> list[float]:
    centred = advantage_centred(batch)
    speaking = [
        value for item, value in zip(batch, centred, strict=True) if np.ptp(rewards_of(batch, item["group"])) > 0
    ]
    return [value / np.sqrt(np.mean(np.square(speaking))) for value in centred]


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def grpo(batch: Batch, new: Log, frozen: Log) -> float:
    total = 0.0
    for item, logs, advantage in zip(batch, new, advantage_grpo(batch), strict=True):
        inner = 0.0
        for t, log in enumerate(logs):
            kl = np.exp(item["reference"][t] - log) - (item["reference"][t] - log) - 1
            inner += clipped(np.exp(log - item["engine"][t]), advantage, 0.2, 0.2) + 0.04 * kl
        total += inner / len(logs)
    return total / len(batch)


def dr_grpo(batch: Batch, new: Log, frozen: Log) -> float:
    total = 0.0
    for item, logs, advantage in zip(batch, new, advantage_centred(batch), strict=True):
        for t, log in enumerate(logs):
            total += clipped(np.exp(log - item["engine"][t]), advantage, 0.2, 0.2)
    return total / (len(batch) * 32)


def token_mean(batch: Batch, new: Log, advantages: list[float], high: float) -> float:
    total, count = 0.0, 0
    for item, logs, advantage in zip(batch, new, advantages, strict=True):
        for t, log in enumerate(logs):
            total += clipped(np.exp(log - item["engine"][t]), advantage, 0.2, high)
            count += 1
    return total / count


def dapo(batch: Batch, new: Log, frozen: Log) -> float:
    retained = [i for i, item in enumerate(batch) if np.ptp(rewards_of(batch, item["group"])) > 0]
    part = [batch[i] for i in retained]
    return token_mean(part, [new[i] for i in retained], advantage_grpo(part), 0.28)


def gspo(batch: Batch, new: Log, frozen: Log) -> float:
    total = 0.0
    for item, logs, advantage in zip(batch, new, advantage_grpo(batch), strict=True):
        ratio = np.prod(np.exp(logs - item["engine"])) ** (1 / len(logs))
        total += clipped(ratio, advantage, 3e-4, 4e-4)
    return total / len(batch)


def reinforce_plus_plus(batch: Batch, new: Log, frozen: Log) -> float:
    flat = []
    for item, before in zip(batch, frozen, strict=True):
        penalties = 0.001 * (before - item["reference"])
        flat += [item["reward"] - penalties[t:].sum() for t in range(len(before))]
    result = (np.array(flat) - np.mean(flat)) / (np.std(flat, ddof=1) + 1e-6)
    return tokenwise(batch, new, result)


def tokenwise(batch: Batch, new: Log, advantages: np.ndarray) -> float:
    flat_new, flat_engine = np.concatenate(new), np.concatenate([item["engine"] for item in batch])
    losses = [clipped(np.exp(n - e), a, 0.2, 0.2) for n, e, a in zip(flat_new, flat_engine, advantages, strict=True)]
    return float(np.mean(losses))


def rloo(batch: Batch, new: Log, frozen: Log) -> float:
    return -sum(a * logs.sum() for a, logs in zip(advantage_rloo(batch), new, strict=True)) / len(batch)


def ppo(batch: Batch, new: Log, frozen: Log) -> float:
    """Without the value loss: `ppo_value` has it."""
    return tokenwise(batch, new, normalised(np.concatenate(ppo_advantages(batch, frozen))))


def normalised(values: np.ndarray) -> np.ndarray:
    return (values - values.mean()) / (values.std(ddof=1) + 1e-6)


def ppo_advantages(batch: Batch, frozen: Log) -> Log:
    """A_t as the double sum of its definition, γ = 1, λ = 0.95."""
    result = []
    for item, before in zip(batch, frozen, strict=True):
        values = np.append(item["value_before"], 0.0)
        earned = -0.001 * (before - item["reference"])
        earned[-1] += item["reward"]
        delta = earned + values[1:] - values[:-1]
        length = len(delta)
        result.append(np.array([sum(0.95**k * delta[t + k] for k in range(length - t)) for t in range(length)]))
    return result


def ppo_value(batch: Batch, frozen: Log) -> float:
    total, count = 0.0, 0
    for item, advantages in zip(batch, ppo_advantages(batch, frozen), strict=True):
        for value, old, advantage in zip(item["value"], item["value_before"], advantages, strict=True):
            goal = advantage + old
            near = old + np.clip(value - old, -0.2, 0.2)
            total += 0.5 * max((value - goal) ** 2, (near - goal) ** 2) / 2
            count += 1
    return total / count


def lite_ppo(batch: Batch, new: Log, frozen: Log) -> float:
    return token_mean(batch, new, advantage_lite(batch), 0.2)


def pooled(batch: Batch, new: Log, frozen: Log) -> float:
    return token_mean(batch, new, advantage_pooled(batch), 0.28)


def cispo(batch: Batch, new: Log, frozen: Log) -> float:
    total, count = 0.0, 0
    rows = zip(batch, new, frozen, advantage_grpo(batch), strict=True)
    for item, logs, before, advantage in rows:
        for t, log in enumerate(logs):
            total += -min(np.exp(before[t] - item["engine"][t]), 5.0) * advantage * log
            count += 1
    return total / count


def corrected(factor: Callable[[np.ndarray], np.ndarray]) -> Callable[[Batch, Log, Log], float]:
    """DAPO's loss against π_prox, each token weighed by `factor(k)` of its trajectory, k = π_prox / μ."""

    def loss(batch: Batch, new: Log, frozen: Log) -> float:
        retained = [i for i, item in enumerate(batch) if np.ptp(rewards_of(batch, item["group"])) > 0]
        part = [batch[i] for i in retained]
        total, count = 0.0, 0
        for i, item, advantage in zip(retained, part, advantage_grpo(part), strict=True):
            weights = factor(np.exp(item["proximal"] - item["engine"]))
            for log, before, weight in zip(new[i], item["proximal"], weights, strict=True):
                total += weight * clipped(np.exp(log - before), advantage, 0.2, 0.28)
                count += 1
        return total / count

    return loss


def distill(batch: Batch, new: Log, frozen: Log) -> float:
    """Each token's advantage is what the teacher (`reference`) thinks of it beyond the student that sampled it."""
    total, count = 0.0, 0
    for item, logs in zip(batch, new, strict=True):
        for t, log in enumerate(logs):
            advantage = item["reference"][t] - item["engine"][t]
            total += clipped(np.exp(log - item["engine"][t]), advantage, 0.2, 0.28)
            count += 1
    return total / count


LOSSES: dict[str, Callable[[Batch, Log, Log], float]] = {
    "grpo": grpo, "dr_grpo": dr_grpo, "dapo": dapo, "gspo": gspo, "reinforce++": reinforce_plus_plus, "rloo": rloo,
    "ppo": ppo, "lite_ppo": lite_ppo, "pooled": pooled, "cispo": cispo, "distill": distill,
}  # fmt: skip

FACTORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tis": lambda k: np.minimum(k, 2.0),
    "tis_sequence": lambda k: np.full(len(k), min(np.prod(k), 2.0)),
    "icepop": lambda k: np.array([value if 0.5 <= value <= 5.0 else 0.0 for value in k]),
    "sequence_mask": lambda k: np.full(len(k), 1.0 if 0.99 <= np.prod(k) ** (1 / len(k)) <= 1.01 else 0.0),
    "decoupled": lambda k: np.minimum(k, 5.0),
}
