"""What is wrong with a migration: a pure function of its seed.

Owns: the program that migrates, the table, the kinds of faults, the words. Does not own: running anything.
Guarantee: the same seed is the same scenario in every process; one fault at least is silent (the migration goes
through and spoils a column), one at least is loud (it stops); every word of every repair stands in the ticket or in
what a look shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Fault = Literal["target", "source", "missing"]  # of a step: renames to a wrong name, from a wrong name, is not there
LOUD: tuple[Fault, ...] = ("source", "missing")

DIRECTORY = "/srv"
STEPS = ("1", "2", "3")
ROWS = 8


def _words(text: str) -> list[str]:
    return text.split()


OLD = _words("amber ash azure beige black blue brown coral cream cyan gold green grey indigo khaki lemon")
NEW = _words("bach berg bizet brahms chopin elgar faure gluck grieg handel haydn holst liszt mahler mozart ravel")
WRONG = _words("anvil awl axle bolt brace chisel clamp crank drill file forge gauge gear hammer hinge jack")

# Applies the steps that are not done yet, in order. A failed step stops it, and its lock stays.
MIGRATE = r"""#!/usr/bin/perl
sub get { open(my $f, "<", $_[0]) or return undef; local $/; my $text = <$f>; return defined $text ? $text : "" }
sub put { open(my $f, ">", $_[0]) or die; print $f $_[1] }
if (-e "lock") { print "locked\n"; exit 1 }
put("lock", "");
for my $n (1, 2, 3) {
  my $done = get("done");
  next if $done =~ /^$n$/m;
  my $step = get("steps/$n");
  unless (defined $step) { print "$n missing\n"; exit 1 }
  unless ($step =~ /\A\d (\w+) (\w+)\n\z/) { print "$n unreadable\n"; exit 1 }
  my ($from, $to) = ($1, $2);
  my ($schema, $rows) = (get("schema"), get("rows"));
  unless (defined $schema && defined $rows && $schema =~ s/^$n $from$/$n $to/m) { print "$n no $from\n"; exit 1 }
  $rows =~ s/^$n $from /$n $to /mg;
  put("schema", $schema);
  put("rows", $rows);
  put("done", "$done$n\n");
  print "$n ok\n";
}
unlink "lock";
"""

# What stands in each column of the rows, if no migration is under way.
CHECK = r"""#!/usr/bin/perl
if (-e "lock") { print "locked\n"; exit 1 }
open(F, "<", "rows") or exit 1;
while (<F>) { /^(\d) (\w+) \w+$/ and !$seen{"$1 $2"}++ and push @found, "$1 $2\n" }
print sort @found;
"""

# $1 migrate, $2 check, $3 schema, $4 rows, $5 the number of the step that is missing or -, $6 its text, $7 "lock" or -;
# then number and text of each step.
INSTALL = """mkdir -p steps spare &&
printf %s "$1" >migrate && printf %s "$2" >check && chmod 755 migrate check &&
printf %s "$3" >schema && printf %s "$4" >rows && : >done &&
{ [ "$5" = - ] || printf %s "$6" >"spare/$5"; } && { [ "$7" = - ] || : >lock; } && shift 7 &&
while [ $# -gt 0 ]; do printf %s "$2" >"steps/$1"; shift 2; done
"""

ACTIONS = (
    "cat ", "steps/", "steps/*", "schema", "sed -i ", "s/", "/", " ", "cp ", "spare/", "rm ", "lock", "./migrate",
    "./check", "exit", *STEPS,
)  # fmt: skip
OUTPUTS = ("want\n", "\n", "$ ", " ok\n", "locked\n", " no ", " missing\n", " unreadable\n", *(f"{n} " for n in STEPS))
WORDS: tuple[str, ...] = tuple(dict.fromkeys([*ACTIONS, *OUTPUTS, *OLD, *NEW, *WRONG]))


@dataclass(frozen=True, slots=True)
class Scenario:
    """One migration of three steps; step n renames column n from `old` to `new`."""

    old: tuple[str, str, str]
    new: tuple[str, str, str]
    faults: tuple[Fault | None, Fault | None, Fault | None]
    wrong: tuple[str, str, str]  # what stands in a faulty step
    locked: bool  # an earlier migration has left its lock
    values: tuple[str, ...]  # of the rows, column by column

    @property
    def ticket(self) -> str:
        return f"want\n{self.target}"

    @property
    def target(self) -> str:
        """The schema after the migration."""
        return "".join(f"{n} {name}\n" for n, name in zip(STEPS, self.new, strict=True))

    @property
    def schema(self) -> str:
        """The schema before it."""
        return "".join(f"{n} {name}\n" for n, name in zip(STEPS, self.old, strict=True))

    @property
    def rows(self) -> str:
        return self._rows(self.old)

    @property
    def rows_after(self) -> str:
        return self._rows(self.new)

    def _rows(self, names: tuple[str, str, str]) -> str:
        return "".join(f"{STEPS[at % 3]} {names[at % 3]} {value}\n" for at, value in enumerate(self.values))

    def step(self, index: int) -> str:
        """The text of a step as it should be, or with its fault."""
        old, new = self.old[index], self.new[index]
        if self.faults[index] == "source":
            old = self.wrong[index]
        if self.faults[index] == "target":
            new = self.wrong[index]
        return f"{STEPS[index]} {old} {new}\n"

    def repair(self, index: int) -> str:
        """The command that mends a faulty step."""
        n = STEPS[index]
        if self.faults[index] == "missing":
            return f"cp spare/{n} steps/{n}"
        right = self.old[index] if self.faults[index] == "source" else self.new[index]
        return f"sed -i s/{self.wrong[index]}/{right}/ steps/{n}"

    @property
    def install(self) -> list[str]:
        """The command that lays it down in a fresh sandbox."""
        standby = self.faults.index("missing") if "missing" in self.faults else None
        spared = ("-", "") if standby is None else (STEPS[standby], self.step(standby))
        lock = "lock" if self.locked else "-"
        steps = [text for at, n in enumerate(STEPS) if at != standby for text in (n, self.step(at))]
        given = [MIGRATE, CHECK, self.schema, self.rows, *spared, lock, *steps]
        return ["/bin/sh", "-c", INSTALL, "install", *given]


def scenario(seed: int) -> Scenario:
    """The scenario of a seed. Example: ``scenario(7).faults == ("missing", None, "target")`` or the like."""
    rng = random.Random(f"finish the migration {seed}")
    faults: list[Fault | None] = ["target", rng.choice(LOUD), rng.choice((None, None, "target", "source"))]
    rng.shuffle(faults)

    def three(names: list[str]) -> tuple[str, str, str]:
        first, second, third = rng.sample(names, 3)
        return first, second, third

    return Scenario(
        old=three(OLD),
        new=three(NEW),
        faults=(faults[0], faults[1], faults[2]),
        wrong=three(WRONG),
        locked=rng.random() < 0.5,
        values=tuple(f"v{rng.randrange(1000)}" for _ in range(3 * ROWS)),
    )
