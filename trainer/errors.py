"""What can go wrong in a trainer. Like all errors here they say the hint.

::

    PagurusError
    └── TrainerFailed            a step cannot be taken, or must not be kept
        ├── RankLost             a rank died or hangs: names it
        └── SampleFailed         a rank raised on a part of a batch: some sample in it is at fault
"""

from __future__ import annotations

from sandbox.errors import PagurusError


class TrainerFailed(PagurusError):
    code = "trainer_failed"


class RankLost(TrainerFailed):
    code = "rank_lost"


class SampleFailed(TrainerFailed):
    code = "sample_failed"
