"""``pagurus``: one program for people and scripts.

Each verb parses its arguments and calls one library method; heavy rooms are imported only by the verb that
needs them. Every listing takes ``--json``.

Exit codes: 0 done; 1 the request failed (one line on stderr says what to do); 2 wrong usage; 141 the reader closed
the output any more. ``exec``, ``run`` and ``shell`` exit with the command's own code (128 + signal number when a signal
ended it); 124 when it was cut off by its time limit, 125 when Pagurus failed, 126 when the program cannot be executed,
127 when there is none. docs/cli.md has the table.
"""

from __future__ import annotations

from pagurus.cli import application

_RUNTIME, _RL = "pip install pagurus-runtime", "pip install pagurus-rl"

#: Where a package is that a smaller distribution lacks.
_NEEDS = {
    "daemon": _RUNTIME,
    "ebpf": _RUNTIME,
    "coordinator": _RUNTIME,
    "rollout": _RUNTIME,
    "trainer": _RL,
    "torch": _RL,
    "bench": "benches run in a checkout",
}


def main() -> None:
    """Entry of the console script."""
    try:
        application(prog_name="pagurus")
    except SystemExit:
        raise
    except BrokenPipeError:
        raise SystemExit(141) from None
    except ModuleNotFoundError as error:
        needed = _NEEDS.get((error.name or "").partition(".")[0])
        if needed is None:
            raise
        from pagurus import output

        output.complain(f"{error.name} is not installed here: {needed}")
        raise SystemExit(1) from None
    except _failure() as error:
        from pagurus import output

        output.complain(str(error))
        raise SystemExit(1) from None


def _failure() -> type[Exception]:
    """What is said in one line. Loaded where something failed: not for ``--help``."""
    from sandbox.errors import PagurusError

    return PagurusError


if __name__ == "__main__":
    main()
