"""Random programs: drawn by hypothesis, written as text, and made small by it when something of them was missed.

Guarantee: the text of a series says all that it does; a missed program is named by the text up to itself.

A series is one to five programs that run in one sandbox without a reset in between; a program is one to six calls, each
by the main thread, a child or a second thread::

    program in tmpfs: setns main:write.changed child:nothing; exec thread:mkdir.created
               place  way   actor:call
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sandbox.errors import Invalid, Unsupported
from tests.crash.torture.cases import PLACES, WORK, Call, Case, Place, operations

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

PREFIX = "program in "
SERIES, LENGTH = 5, 6  # programs of a series, calls of a program, at most
# The more often it stands here, the more often it is drawn; hypothesis shrinks towards the first.
_WAYS = ("exec", "exec", "setns", "nested")
_ACTORS = ("main", "main", "child", "thread")
_PLACES = (WORK, WORK, WORK, *PLACES.values())
_BATCH = 500  # series of one run of hypothesis: to shrink one, it draws those before it again


# --------------------------------------------------------------------------- what they are


@dataclass(frozen=True)
class Program:
    """Calls, and how the program that makes them comes into the sandbox."""

    way: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join((self.way, *self.words))


@dataclass(frozen=True)
class Series:
    """Programs in one place, one after the other."""

    place: Place
    programs: tuple[Program, ...]

    @property
    def text(self) -> str:
        """Example: ``program in tmpfs: exec main:write.changed``."""
        return f"{PREFIX}{self.place.name}: {'; '.join(program.text for program in self.programs)}"

    def cases(self, group: int = 0) -> list[Case]:
        """What is run: a case each, named by all that ran up to its end."""
        return [
            Case(Series(self.place, self.programs[: n + 1]).text, one.words, (), one.way, self.place, group)
            for n, one in enumerate(self.programs)
        ]

    @staticmethod
    def parse(text: str, vocabulary: Vocabulary) -> Series:
        """The series of this text. Raises Invalid, with what is wrong in it.

        >>> Series.parse("program in tmpfs: exec child:nothing", Vocabulary(("nothing",), (), ())).programs[0].words
        ('child:nothing',)
        """
        where, _, rest = text.removeprefix(PREFIX).partition(": ")
        if where not in PLACES:
            raise Invalid(f"no place {where!r}", hint=f"one of: {', '.join(PLACES)}")
        programs = []
        for part in rest.split(";"):
            way, *words = part.split() or ("",)
            if way not in _WAYS or not words:
                raise Invalid(
                    f"not a program: {part.strip()!r}", hint=f"say WAY CALL ..., WAY one of {', '.join(_WAYS[1:])}"
                )
            for word in words:
                actor, _, name = word.partition(":")
                if actor not in _ACTORS or name not in vocabulary.names:
                    raise Invalid(f"no call {word!r}", hint=f"say ACTOR:CALL, ACTOR one of {', '.join(_ACTORS[1:])}")
            programs.append(Program(way, tuple(words)))
        return Series(PLACES[where], tuple(programs))


@dataclass(frozen=True)
class Vocabulary:
    """Names of calls: those that leave nothing behind, those that change files, those about processes."""

    harmless: tuple[str, ...]
    changing: tuple[str, ...]
    living: tuple[str, ...]  # made by the main thread alone

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return frozenset((*self.harmless, *self.changing, *self.living))

    @classmethod
    def of(cls, result: list[Call]) -> Vocabulary:
        """The operations, and of these calls of the matrix those that can run anywhere, in any order."""
        sections = operations()
        harmless = sections["nothing"] + sections["failures"] + sections["made and gone again"]
        changing = sections["content"] + sections["names"] + sections["metadata"]
        living = [name for name in sections["processes"] if name != "start_spinner"]
        for call in result:
            # Who opens a FIFO by the name that the calls of the matrix share waits for a reader that never comes.
            if call.outcome == "restored" or "mount" in call.name or "fifo" in call.name or call.setup:
                continue
            quiet = call.outcome in ("zero", "orphan", "failed")
            (harmless if quiet else living if call.family == "processes" else changing).append(call.word)
        return cls(tuple(harmless), tuple(changing), tuple(living))


# --------------------------------------------------------------------------- drawing and shrinking


def serieses(vocabulary: Vocabulary) -> SearchStrategy[Series]:
    """All series. They shrink towards one program with one harmless call, by the main thread, in the sandbox's tree."""
    from hypothesis import strategies as st

    single = frozenset(vocabulary.living)

    def word(actor: str, name: str) -> str:
        return f"{'main' if name in single else actor}:{name}"

    def several(names: tuple[str, ...]) -> SearchStrategy[Series]:
        # Few choices a program: hypothesis leaves out only what is a handful of them.
        words = st.builds(word, st.sampled_from(_ACTORS), st.sampled_from(names))
        all_words = st.builds(lambda first, rest: (first, *rest), words, st.lists(words, max_size=LENGTH - 1))
        program = st.builds(Program, st.sampled_from(_WAYS), all_words)
        # Unique: hypothesis likes to repeat what it has drawn, and twice the same says little more.
        programs = st.lists(program, min_size=1, max_size=SERIES, unique=True)
        return st.builds(Series, st.sampled_from(_PLACES), programs.map(tuple))

    quiet, files = vocabulary.harmless, vocabulary.harmless + vocabulary.changing
    everything = files + 8 * vocabulary.living  # there are few of them
    return st.one_of(*(several(names) for names in (quiet, files, files, everything)))


def drawn(vocabulary: Vocabulary, seed: int, count: int) -> dict[Series, str]:
    """Series with `count` different programs in all, each with the batch that it is of.

    The same seed, calls and version of hypothesis give the same ones.
    """
    result: dict[Series, str] = {}
    observed: set[tuple[Place, Program]] = set()
    for number in itertools.count():
        if len(observed) >= count:
            break
        before, batch = len(observed), f"{seed}/{number}"
        collected: list[Series] = []
        _explore(vocabulary, batch, collected.append)
        for series in collected:
            if len(observed) < count:
                result.setdefault(series, batch)
                observed.update((series.place, program) for program in series.programs)
        if len(observed) == before:  # there are no others
            break
    return result


def minimal(vocabulary: Vocabulary, series: Series, batch: str, missed: Callable[[Series], bool]) -> Series | None:
    """Let hypothesis shrink a series of this batch, of which `missed` is asked again and again. Blocks.

    The batch is drawn anew up to the series; what follows are attempts of hypothesis to make it smaller. None: the
    series was not missed again.
    """
    from hypothesis.errors import Flaky

    result: list[Series] = []
    met = False

    def attempt(one: Series) -> None:
        nonlocal met
        met = met or one == series
        if (result or one == series) and missed(one):
            result.append(one)
            raise _Missed

    with contextlib.suppress(_Missed, Flaky):
        _explore(vocabulary, batch, attempt, shrink=True)
    if not met and missed(series):  # other programs are drawn than before: a module with constants came in between
        return series
    # Where a miss is a race, the last one need not be the smallest.
    return min(reversed(result), key=_size, default=None)


class _Missed(Exception):
    """What hypothesis is told of a miss."""


def _size(series: Series) -> tuple[int, ...]:
    words = [word for program in series.programs for word in program.words]
    plain = sum(word.startswith("main:") for word in words) + sum(one.way == "exec" for one in series.programs)
    return len(series.programs), len(words), series.place is not WORK, -plain


def _explore(vocabulary: Vocabulary, seed: str, visit: Callable[[Series], None], *, shrink: bool = False) -> None:
    """Show `visit` the series of a seed; with `shrink` also smaller ones of the first with which it raises."""
    try:
        import hypothesis
    except ImportError as error:
        hint = "`make setup`, or go without them: --programs 0"
        raise Unsupported("random programs are drawn by hypothesis, which is not installed", hint=hint) from error

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=_BATCH,
        phases=[hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])],
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    @hypothesis.given(serieses(vocabulary))
    def show(series: Series) -> None:
        visit(series)

    show()
