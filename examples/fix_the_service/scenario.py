"""What is broken in an episode: a pure function of its seed.

Owns: the service, its configuration, the kinds of breakage, the words. Does not own: running anything.
Guarantee: the same seed is the same scenario in every process; exactly one thing is broken; repairing it
takes one command whose every word stands in the ticket or in what a look shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal, get_args

Breakage = Literal["port", "data", "greet", "comment", "missing"]
BREAKAGES: tuple[Breakage, ...] = get_args(Breakage)


def _words(text: str) -> list[str]:
    return text.split()


DIRECTORY = "/srv"
PORTS = [str(port) for port in range(8100, 8132)]
STALE_PORTS = [str(port) for port in range(9100, 9132)]
DATA = _words(
    "acorn aspen birch cedar clover daisy fern fig hazel heath iris ivy laurel lilac lime lotus maple mint moss "
    "myrtle oak olive orchid palm peony pine poppy reed rose sage thyme willow"
)
STALE_DATA = _words(
    "basalt beryl chalk cobalt copper flint garnet gneiss granite gypsum iron jade jasper lead marble mica nickel "
    "onyx opal pearl quartz ruby salt sand shale silver slate steel talc tin topaz zinc"
)
GREETINGS = _words(
    "adder badger bear bison bobcat crane crow deer dove eagle egret falcon ferret finch fox gecko hare hawk "
    "heron jay lark lynx marten mole newt otter owl quail raven robin stoat wren"
)
STALE_GREETINGS = _words(
    "anvil awl axle bellows bolt brace chisel clamp crank dowel drill file forge gauge gear hammer hinge jack "
    "lathe lever mallet nail pliers pulley rasp rivet saw screw spade vise wedge wrench"
)

# The service: reads its configuration once, opens its data, answers every connection with one line.
SERVE = """#!/usr/bin/perl
use Socket;
open C, "app.conf";
while (<C>) { $c{$1} = $2 if /^(\\w+) (\\S+)/ }
close C;
unless (open D, "data/$c{data}") { print "no data\\n"; exit 1 }
chomp($d = <D>);
close D;
socket S, PF_INET, SOCK_STREAM, 0;
setsockopt S, SOL_SOCKET, SO_REUSEADDR, 1;
unless (bind S, sockaddr_in($c{port} || 8000, INADDR_LOOPBACK)) { print "busy\\n"; exit 1 }
listen S, 8;
$| = 1;
print "ready\\n";
while (accept A, S) { print A "$c{greet} $d\\n"; close A }
"""

# Asks over loopback. A service that was started a moment ago may not listen yet: wait for it, and only for it.
REQUEST = """#!/bin/bash
starting() {
  for comm in /proc/[0-9]*/comm; do
    read -r name <"$comm" && [ "$name" = serve ] && return 0
  done
  return 1
}
for try in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  if exec 3<>/dev/tcp/127.0.0.1/$1; then cat <&3; exit 0; fi
  [ $try -lt 5 ] || starting || break
  sleep 0.05
done 2>/dev/null
echo refused
exit 1
"""

# $1 app.conf, $2 serve, $3 ask, $4 the spare data file, the rest: data files that are in place.
INSTALL = """mkdir -p data spare &&
printf %s "$1" >app.conf && printf %s "$2" >serve && printf %s "$3" >ask && chmod 755 serve ask &&
echo "$4" >"spare/$4" && shift 4 && for name; do echo "$name" >"data/$name"; done
"""

ACTIONS = (
    "cat ", "app.conf", "ls ", "data", "sed -i ", "s/", "/", "cp ", "spare/", "data/", "./serve", " >log 2>&1",
    " >/dev/null 2>&1", " &", "./ask ", "exit",
)  # fmt: skip
OUTPUTS = (
    "want\n", "port ", "#port ", "data ", "greet ", "\n", " ", "$ ", "#", "port", "refused", "timed out", "ready",
    "log",
)  # fmt: skip
WORDS: tuple[str, ...] = tuple(
    dict.fromkeys([*ACTIONS, *OUTPUTS, *PORTS, *STALE_PORTS, *DATA, *STALE_DATA, *GREETINGS, *STALE_GREETINGS])
)  # every text that deserves a token of its own; anything else is spelt in bytes


@dataclass(frozen=True, slots=True)
class Scenario:
    """One broken service. `port`, `data` and `greet` are what the ticket wants."""

    breakage: Breakage
    port: str
    data: str
    greet: str
    stale: str  # the wrong value, where the breakage is one
    others: tuple[str, ...]  # data files that have nothing to do with it

    @property
    def ticket(self) -> str:
        return f"want\nport {self.port}\ndata {self.data}\ngreet {self.greet}\n"

    @property
    def configuration(self) -> str:
        """app.conf as the agent finds it."""
        values = {"port": self.port, "data": self.data, "greet": self.greet}
        if self.breakage in values:
            values[self.breakage] = self.stale
        mark = "#" if self.breakage == "comment" else ""
        return f"{mark}port {values['port']}\ndata {values['data']}\ngreet {values['greet']}\n"

    @property
    def present(self) -> tuple[str, ...]:
        """Data files in place at the start."""
        return self.others if self.breakage == "missing" else tuple(sorted((self.data, *self.others)))

    @property
    def repair(self) -> str:
        """The one command that repairs it."""
        if self.breakage == "missing":
            return f"cp spare/{self.data} data/{self.data}"
        if self.breakage == "comment":
            return "sed -i s/#port/port/ app.conf"
        right = {"port": self.port, "data": self.data, "greet": self.greet}[self.breakage]
        return f"sed -i s/{self.stale}/{right}/ app.conf"

    @property
    def answer(self) -> str:
        """What the repaired service says."""
        return f"{self.greet} {self.data}"

    @property
    def install(self) -> list[str]:
        """The command that breaks a fresh sandbox in this way."""
        return ["/bin/sh", "-c", INSTALL, "install", self.configuration, SERVE, REQUEST, self.data, *self.present]

    @property
    def verify(self) -> list[str]:
        """The command that asks the service without trusting anything in the sandbox that an agent may edit."""
        return ["/bin/bash", "-c", REQUEST, "ask", self.port]


def scenario(seed: int) -> Scenario:
    """The scenario of a seed. Example: ``scenario(7).repair == "sed -i s/9107/8122/ app.conf"`` or the like."""
    rng = random.Random(f"fix the service {seed}")
    breakage = rng.choice(BREAKAGES)
    stale = {"port": STALE_PORTS, "data": STALE_DATA, "greet": STALE_GREETINGS}.get(breakage, [""])
    data, *others = rng.sample(DATA, 3)
    return Scenario(
        breakage=breakage,
        port=rng.choice(PORTS),
        data=data,
        greet=rng.choice(GREETINGS),
        stale=rng.choice(stale),
        others=tuple(sorted(others)),
    )
