"""What `pagurus view RUN` answers below ``/v1/run``.

Fields are append-only with defaults.
"""

from __future__ import annotations

import msgspec

from rollout.gantt.drawing import Lane
from rollout.messages import Ancestor


class RunRow(msgspec.Struct, kw_only=True):
    """A trajectory that is kept."""

    prompt: str
    member: int  # of its group
    status: str
    reward: float
    blame: str = ""  # policy, environment or platform: whose doing it was that it is not `completed`
    cause: str = ""  # of that, with the phase


class RunGrid(msgspec.Struct, kw_only=True):
    """All trajectories that are kept; and prompts that were given up, each with the reason."""

    rows: list[RunRow]
    given_up: dict[str, str]


class RunMember(RunRow, kw_only=True, omit_defaults=True):
    """A trajectory among those of its prompt."""

    start: int = 0  # which attempt at this member it is
    turns: int = 0
    lineage: list[Ancestor] = []  # of a branch: whose its first turns are, oldest first


class RunState(msgspec.Struct, kw_only=True):
    """A state of a trajectory from which a sandbox can continue."""

    turn: int  # before which it was; of all turns: its end
    checkpoint: str


class RunStates(msgspec.Struct, kw_only=True, omit_defaults=True):
    """All of them; `reason`: why there is none."""

    states: list[RunState] = []
    reason: str = ""


class RunPieces(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What each token of a trajectory adds to its text; none where the run has no tokenizer."""

    pieces: list[str] = []
    reason: str = ""


class TimeShare(msgspec.Struct, kw_only=True):
    """What some of the time went to."""

    kind: str
    seconds: float
    share: float


class TimePart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Lanes of one kind, such as engines, and what their time went to."""

    title: str
    lanes: list[Lane] = []
    shares: list[TimeShare] = []
    said: str = ""


class RunTimes(msgspec.Struct, kw_only=True):
    """Where the time of a run went, between two moments in seconds since the epoch."""

    since: float
    until: float
    parts: list[TimePart]
    colours: dict[str, str]
    left_out: int  # bars that lie before, so that a browser can draw the others
