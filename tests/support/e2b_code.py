"""As e2b_calls.py, for the code interpreter of E2B: each call once, and what came of it as lines of JSON."""

import json
import traceback

from e2b_code_interpreter import Sandbox

CALLS = []


def call(function):
    CALLS.append(function)
    return function


@call
def run_code(sandbox):
    seen = []
    made = sandbox.run_code("x = 20\nprint('out')\nx + 1", on_stdout=lambda message: seen.append(message.line))
    assert (made.text, "".join(made.logs.stdout), made.error) == ("21", "out\n", None), made
    assert "".join(seen) == "out\n"
    assert sandbox.run_code("x").text == "20"


@call
def errors(sandbox):
    made = sandbox.run_code("1 / 0")
    assert made.error.name == "ZeroDivisionError" and "division" in made.error.value
    assert "Traceback" in made.error.traceback


@call
def contexts(sandbox):
    context = sandbox.create_code_context(cwd="/tmp")
    sandbox.run_code("y = 5", context=context)
    assert sandbox.run_code("import os; (y, os.getcwd())", context=context).text == "(5, '/tmp')"
    assert sandbox.run_code("y").error.name == "NameError"
    assert context.id in {item.id for item in sandbox.list_code_contexts()}
    sandbox.restart_code_context(context)
    assert sandbox.run_code("y", context=context).error.name == "NameError"
    sandbox.remove_code_context(context)
    assert context.id not in {item.id for item in sandbox.list_code_contexts()}


@call
def results(sandbox):
    code = "class Page:\n    def _repr_html_(self):\n        return '<b>'\ndisplay(Page())\nPage()"
    made = sandbox.run_code(code)
    assert [(item.html, item.is_main_result) for item in made.results] == [("<b>", False), ("<b>", True)]


@call
def environment_and_shell(sandbox):
    assert sandbox.run_code("import os; os.environ['A']", envs={"A": "b"}).text == "'b'"
    assert "".join(sandbox.run_code("echo $A; id -un", language="bash", envs={"A": "b"}).logs.stdout) == "b\nuser\n"
    assert sandbox.run_code("!echo shell").logs.stdout == ["shell\n"]


@call
def timeouts(sandbox):
    try:
        sandbox.run_code("z = 1\nimport time\ntime.sleep(600)", timeout=2)
    except Exception as error:  # noqa: BLE001 - whatever it is called in this version
        assert "imeout" in type(error).__name__, error
    else:
        raise AssertionError("it was not cut off")
    assert sandbox.run_code("z", timeout=120).text == "1"


@call
def variables_survive_a_fork_and_a_pause(sandbox):
    sandbox.run_code("kept = 'here'")
    (child,) = sandbox.fork(count=1, timeout=600)
    child = getattr(child, "sandbox", child)
    again = Sandbox.connect(child.sandbox_id)
    assert again.run_code("kept").text == "'here'"
    again.kill()
    sandbox.pause()
    assert Sandbox.connect(sandbox.sandbox_id, timeout=600).run_code("kept").text == "'here'"


def main():
    sandbox = Sandbox.create(timeout=1200)
    for item in CALLS:
        outcome = "passed"
        try:
            item(sandbox)
        except Exception:  # noqa: BLE001 - whatever it is, it is reported
            outcome = traceback.format_exc()
        print(json.dumps({"call": item.__name__, "outcome": outcome}), flush=True)
    sandbox.kill()


main()
