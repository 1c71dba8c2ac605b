"""As e2b_calls.py, for templates: each call once, and what came of it as lines of JSON. Knows nothing of us."""

import json
import pathlib
import tempfile
import traceback

from e2b import BuildException, CommandExitException, Sandbox, Template

CALLS = []
NAME = "counter-of-a-test"


def call(function):
    CALLS.append(function)
    return function


def begun(directory):
    template = Template(file_context_path=str(directory))
    return template.from_image("debian")


@call
def build(directory):
    (directory / "src/deep").mkdir(parents=True)
    (directory / "src/deep/a.txt").write_text("from the context")
    (directory / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    template = (
        begun(directory)
        .copy("src", "/srv/src", user="root")
        .copy("tool.sh", "/usr/local/bin/tool", mode=0o755)
        .set_envs({"COLOUR": 'red "and" $blue'})
        .run_cmd("id -un > who; pwd >> who")
        .run_cmd("id -un > /root/who", user="root")
        .set_workdir("/srv")
    )
    lines = []
    Template.build(
        template, f"{NAME}:v1", cpu_count=1, memory_mb=512, on_build_logs=lambda entry: lines.append(str(entry))
    )
    assert any("ready" in line for line in lines), lines


@call
def use(directory):
    with Sandbox.create(f"{NAME}:v1", timeout=600) as sandbox:
        assert sandbox.files.read("/srv/src/deep/a.txt") == "from the context"
        assert sandbox.files.get_info("/srv/src/deep/a.txt").owner == "root"
        assert sandbox.files.read("/home/user/who") == "user\n/home/user\n"
        said = sandbox.commands.run("tool; id -un; pwd; echo $COLOUR").stdout
        assert said == 'tool\nuser\n/srv\nred "and" $blue\n', said
        assert sandbox.commands.run("cat /root/who", user="root").stdout == "root\n"
        assert sandbox.get_info().memory_mb == 512


@call
def cached(directory):
    template = begun(directory).copy("src", "/srv/src", user="root")
    Template.build(template, f"{NAME}:v2")


@call
def failing_step(directory):
    template = begun(directory).run_cmd("true").run_cmd("echo broken >&2; exit 7")
    try:
        Template.build(template, f"{NAME}-broken")
    except BuildException as error:
        assert "7" in str(error), error
        return
    raise AssertionError("the build did not fail")


@call
def start_command(directory):
    template = begun(directory).set_start_cmd(
        "i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done", "test -s /tmp/count"
    )
    Template.build(template, f"{NAME}-started")
    with Sandbox.create(f"{NAME}-started", timeout=600, envs={"A": "1"}) as sandbox:
        sandbox.commands.run("b=$(cat /tmp/count); until [ $(cat /tmp/count) -gt $b ]; do :; done", timeout=60)
        assert sandbox.commands.run("echo $A").stdout == "1\n"


@call
def from_template(directory):
    template = Template(file_context_path=str(directory)).from_template(f"{NAME}:v1").run_cmd("pwd > /tmp/where")
    Template.build(template, f"{NAME}-child")
    with Sandbox.create(f"{NAME}-child", timeout=600) as sandbox:
        assert sandbox.files.read("/tmp/where") == "/srv\n"


@call
def tags(directory):
    if not hasattr(Template, "assign_tags"):
        raise LookupError("assign_tags")
    Template.assign_tags(f"{NAME}:v1", ["stable"])
    assert {item.tag for item in Template.get_tags(NAME)} == {"v1", "v2", "stable"}
    Template.remove_tags(NAME, ["stable"])
    assert {item.tag for item in Template.get_tags(NAME)} == {"v1", "v2"}


@call
def exists(directory):
    known = getattr(Template, "exists", None) or getattr(Template, "alias_exists", None)
    if known is None:
        raise LookupError("exists")
    assert known(f"{NAME}:v1") is True
    assert known("no-such-template") is False


def main():
    with tempfile.TemporaryDirectory() as directory:
        for item in CALLS:
            outcome = "passed"
            try:
                item(pathlib.Path(directory))
            except LookupError as error:
                outcome = f"absent: {error}"
            except (Exception, CommandExitException):  # noqa: BLE001 - whatever it is, it is told
                outcome = traceback.format_exc()
            print(json.dumps({"call": item.__name__, "outcome": outcome}), flush=True)


main()
