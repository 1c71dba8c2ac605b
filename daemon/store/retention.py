"""Which checkpoints may go. Pure: no I/O, no clock.

A checkpoint stays when any of these holds:

- it is needed: a living sandbox is based on it, a fork was made from it, it is being read, taken or packed;
- its sandbox lives, and its policy names it: it is one of the last N, it is labelled, or it is a leaf of the tree
  (nothing descends from it, so nothing else leads back to that state);
- it is not final yet: neither durable nor failed;
- it was imported, until it is removed.

The content of a checkpoint that goes stays for as long as another one shares it. Descendants of what goes are
handed to the nearest ancestor that stays, so that the tree stays one.

Guarantee: :func:`removable` applied again, after its answer was removed, answers nothing; it never names a leaf, a
labelled one, one of the last N or a needed one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from typing import TYPE_CHECKING

from sandbox.messages import CheckpointState, Retention

if TYPE_CHECKING:
    from daemon.catalogue import CheckpointRow

FINALIZED = (CheckpointState.DURABLE, CheckpointState.FAILED)


def removable(nodes: Collection[CheckpointRow], policies: Mapping[str, Retention], needed: Set[str]) -> set[str]:
    """Ids of the checkpoints that may go. `policies` names the living sandboxes; of others only the needed stays."""
    parents = {node.parent for node in nodes if node.state is not CheckpointState.FAILED}
    of_sandbox: dict[str, list[CheckpointRow]] = {}
    for node in nodes:
        of_sandbox.setdefault(node.sandbox, []).append(node)
    gone: set[str] = set()
    for sandbox, mine in of_sandbox.items():
        policy = policies.get(sandbox)
        if policy is None:
            gone.update(node.id for node in mine if node.state is not CheckpointState.PENDING and node.template is None)
        elif policy.last is not None:
            gone.update(_beyond(mine, policy, parents))
    return gone - needed


def _beyond(nodes: list[CheckpointRow], policy: Retention, parents: Set[str | None]) -> Iterable[str]:
    """The checkpoints of one living sandbox that its policy gives up."""
    complete = sorted(node.number for node in nodes if node.state is not CheckpointState.FAILED)
    assert policy.last is not None
    oldest_retained = complete[-policy.last] if len(complete) >= policy.last else 0
    for node in nodes:
        failed = node.state is CheckpointState.FAILED
        retained = (
            node.number >= oldest_retained
            or node.template is not None
            or node.state not in FINALIZED
            or (policy.labelled and node.label is not None)
            or (policy.leaves and node.id not in parents and not failed)
        )
        if not retained:
            yield node.id


def new_parents(nodes: Collection[CheckpointRow], gone: Set[str]) -> dict[str, str | None]:
    """For each checkpoint that stays and whose parent goes: the nearest ancestor that stays, or None."""
    parent = {node.id: node.parent for node in nodes}
    result: dict[str, str | None] = {}
    for node in nodes:
        if node.id in gone or node.parent not in gone:
            continue
        above = node.parent
        while above is not None and above in gone:
            above = parent.get(above)
        result[node.id] = above
    return result
