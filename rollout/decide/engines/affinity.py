"""Which class of servers serves which environment cheapest, learned while it is played. Pure.

Guarantee: with one class nothing is decided here; an environment or a class of which nothing is known is never judged:
requests of the one go to the least loaded server, the other is tried.

Servers of one class (`hardware`) are alike; one class may read prompts faster, another sample faster (RollArt,
arXiv:2512.22560, tags environments by hand). Two things are learned, the newest counting most:

- of an environment, per turn: tokens to be read that no server holds yet, tokens to be sampled;
- of a class: seconds to read a token, seconds of a decoding step, and how much longer it is for each concurrent answer.

A request goes where it adds least to the time that all requests take together: its own seconds, and those by which it
delays the others on that server. So a class that is crowded becomes dear by itself, and is left first by those who
lose least. A trajectory stays where its cache is, unless another server is cheaper by more than `hysteresis` and by the
tokens to be read again.
"""

from __future__ import annotations

import msgspec


class ServerRates(msgspec.Struct, frozen=True, array_like=True):
    """Of one server of a class. Seconds."""

    hardware: str
    read: float  # per token of a prompt
    step: float  # per token of an answer that is alone
    alongside: float  # that each concurrent answer adds to it
    age: int = 0  # answers elsewhere since one of this class was measured


class Crowd(msgspec.Struct, frozen=True, array_like=True):
    """What a server is busy with: requests in all, those of them whose prompt it reads, the tokens of these."""

    answers: int
    readers: int = 0
    reading: int = 0


class TokenDemand(msgspec.Struct, frozen=True, array_like=True):
    """Of a turn, as its environment's turns were."""

    read: float  # tokens
    sampled: float  # tokens


class MeasuredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that was measured."""

    kind: str  # of environment
    hardware: str
    new: int  # tokens of its prompt that no server held
    read: int  # that this one did not hold
    ahead: int  # tokens that the server had to read before
    read_s: float  # until its first piece came
    first: int  # tokens of the first piece
    sampled: int  # tokens in all
    sampled_s: float  # from the first piece to the last
    alongside: float  # other answers on the server, in the mean


def cost(rates: ServerRates, crowd: Crowd, need: TokenDemand, *, redo: float = 0.0) -> float:
    """Seconds that a request adds there: to itself and to the concurrent ones. `redo`: tokens that another server
    holds.

    >>> cost(ServerRates("a", 0.001, 0.02, 0.001), Crowd(10), TokenDemand(100, 50)) == 0.1 + 50 * (0.03 + 0.01)
    True
    """
    read = (crowd.reading + (crowd.readers + 1) * (need.read + redo)) * rates.read
    return read + need.sampled * (rates.step + 2 * rates.alongside * crowd.answers)


class _Mean:
    """Of what was seen, the newest counting most: half of the weight is on the last `half`."""

    def __init__(self, half: float):
        self._keep, self.weight, self._sum = 0.5 ** (1 / half), 0.0, 0.0

    def see(self, value: float) -> None:
        self.weight = self.weight * self._keep + 1
        self._sum = self._sum * self._keep + value

    @property
    def value(self) -> float:
        return self._sum / self.weight if self.weight else 0.0


class _Class:
    """What is known of a class of servers."""

    def __init__(self, half: float):
        self.read, self.tokens = _Mean(half), _Mean(half)
        self.alongside, self.step = _Mean(half), _Mean(half)
        self.squares, self.products = _Mean(half), _Mean(half)
        self.observed_at = 0

    def see(self, answer: MeasuredAnswer, at: int) -> None:
        self.observed_at = at
        self.read.see(answer.read_s)
        self.tokens.see(answer.read + answer.ahead)
        if (rest := answer.sampled - answer.first) > 0:
            step = answer.sampled_s / rest
            self.alongside.see(answer.alongside)
            self.step.see(step)
            self.squares.see(answer.alongside**2)
            self.products.see(answer.alongside * step)

    def rates(self, hardware: str, now: int) -> ServerRates | None:
        """A line through steps by their concurrent answers: least squares, neither part below zero."""
        if not self.step.weight:
            return None
        alongside, step = self.alongside.value, self.step.value
        variance = self.squares.value - alongside**2
        slope = (self.products.value - alongside * step) / variance if variance > 1e-3 else 0.0
        slope = min(max(slope, 0.0), step / alongside if alongside > 0 else 0.0)
        read = self.read.value / self.tokens.value if self.tokens.value else 0.0
        return ServerRates(hardware, read, step - slope * alongside, slope, now - self.observed_at)


class Profiles:
    """``existing.learn(answered)``, then ``existing.need("calculator")`` and ``existing.rates()``"""

    def __init__(self, *, turns: float = 8, answers: float = 64):
        """Half of the weight is on an environment's last `turns`, and on a class's last `answers`."""
        self._turns, self._answers = turns, answers
        self._kinds: dict[str, tuple[_Mean, _Mean]] = {}
        self._classes: dict[str, _Class] = {}
        self._observed = 0

    def learn(self, answer: MeasuredAnswer) -> None:
        self._observed += 1
        read, sampled = self._kinds.setdefault(answer.kind, (_Mean(self._turns), _Mean(self._turns)))
        read.see(answer.new)
        sampled.see(answer.sampled)
        self._classes.setdefault(answer.hardware, _Class(self._answers)).see(answer, self._observed)

    def need(self, kind: str) -> TokenDemand | None:
        existing = self._kinds.get(kind)
        return None if existing is None else TokenDemand(existing[0].value, existing[1].value)

    def rates(self) -> list[ServerRates]:
        """Of the classes of which something is known."""
        result = [existing.rates(name, self._observed) for name, existing in self._classes.items()]
        return [item for item in result if item is not None]
