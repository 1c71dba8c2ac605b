"""How many engines go over from decoding to gradients before all answers are there. Pure.

Guarantee: those that stay have a slot for every answer, and their decoding step takes at most `SLOWER` times as long.

Where the same GPUs roll out and train, most engines serve a few long answers for the second half of a rollout, while
groups that are whole wait for the trainer. After a fifth of the answers the first engines go, at the latest after half
of them (RollPacker, arXiv:2509.21009).
"""

from __future__ import annotations

from rollout.decide.view import Rest, RolloutView

EARLIEST, LATEST = 0.2, 0.5  # share of answers that have ended
SLOWER = 1.1  # what is measured of a step next to other work is not known much better


def staying(engines: int, answers: int, done: float, *, base: float, item: float, slots: int) -> int:
    """Engines that keep decoding: all of them, as long as nothing is won.

    `answers`: on their way, over all engines. `done`: share of the rollout's answers that have ended. A decoding step
    of an engine takes `base + each * answers` seconds.

    >>> staying(8, 128, 0.4, base=0.02, each=0.00001, slots=64)
    2
    """
    if not EARLIEST <= done <= LATEST or not answers:
        return engines

    def step(among: int) -> float:
        return base + item * -(-answers // among)

    fit = (n for n in range(1, engines) if answers <= n * slots and step(n) <= SLOWER * step(engines))
    return next(fit, engines)


def rest(view: RolloutView) -> Rest | None:
    """The same for a live run: where its trainer waits for a batch, and no engine rests yet."""
    fleet = view.fleet
    if fleet is None or fleet.rested or not fleet.base + fleet.item or not view.requested or view.training:
        return None
    members = [member for group in view.running for member in group.members]
    on_way = sum(member.state in ("waiting", "running") for member in members)
    ended = len(members) - on_way + sum(len(group.oldest) for group in view.buffered)
    done = ended / max(1, ended + on_way)
    stay = staying(fleet.engines, on_way, done, base=fleet.base, item=fleet.item, slots=fleet.slots)
    return None if stay == fleet.engines else Rest(stay)
