"""Rewards: functions that score the final state of an episode, concurrently with the rollout, in a fork of that
state."""

from rollout.rewards.messages import Final, Score, ScoredTurn, Scoring
from rollout.rewards.registry import reward
from rollout.rewards.weighted import model, weighted

__all__ = ["Final", "Score", "ScoredTurn", "Scoring", "model", "reward", "weighted"]
