"""How files become a project: places of errors, merging, extends, include, profiles, bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.compose.load import load
from sandbox.errors import Invalid, NotFound
from tests.support.compose_files import project, refusal


def write(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        path = directory / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


# --------------------------------------------------------------------------- YAML


def test_anchors_merge_keys_and_extensions(tmp_path: Path) -> None:
    made = project(
        tmp_path,
        """
        x-base: &base
          restart: always
          environment: &env {A: "1", B: "2"}
        services:
          web:
            <<: *base
            image: debian
            environment: {<<: *env, B: "3"}
        """,
    )
    web = made.composition.services["web"]
    assert web.env == {"A": "1", "B": "3"} and web.restart == "always"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services:\n  web:\n    image: [", "compose.yaml:4: no YAML"),
        ("services:\n  a: {image: x}\n  a: {image: y}", "compose.yaml:3: services: a stands there twice"),
        ("", "compose.yaml is empty"),
        ("services: {}", "compose.yaml: there are no services"),
        ("version: '3'", "compose.yaml: there are no services"),
        ("services: {web: {image: !!python/object:os.system x}}", "the tag"),
        ("services: {web: {image: !secret x}}", "the tag !secret is not supported"),
        ("a: &a [*a]\nservices: {web: {image: x}}", "an alias contains itself"),
        (
            "services:\n  web:\n    image: ${NO:?say which}",
            "compose.yaml:3: services.web.image: the variable NO is req",
        ),
        ("services:\n  web:\n    image: $(ls)", "compose.yaml:3: services.web.image: no name"),
        ("services: [a]", "compose.yaml:1: services: a list stands where a mapping belongs"),
        ("[1]", "a list stands where a mapping belongs"),
        ("services: {web: {image: x}}\nwrong: 1", "compose.yaml:2: wrong: this key is not supported"),
        ("services: {web: {}}", "services.web: it has neither `image` nor `build`"),
        ("services: {-x: {image: debian}}", "'-x' is no name of a service"),
    ],
)
def test_what_is_wrong_is_named_by_file_line_and_key(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


def test_a_file_is_bounded(tmp_path: Path) -> None:
    deep = "x: " + "[" * 60 + "]" * 60
    assert "nested more than" in refusal(tmp_path, f"{deep}\nservices: {{web: {{image: x}}}}")
    bomb = "x-0: &a0 [1,1,1,1,1,1,1,1,1,1]\n"
    bomb += "".join(f"x-{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
    assert "values" in refusal(tmp_path, f"{bomb}services: {{web: {{image: x}}}}")
    assert "larger than" in refusal(tmp_path, "#" * ((1 << 20) + 1))
    (tmp_path / "pipe").mkdir()
    with pytest.raises(NotFound):
        load(tmp_path / "pipe")
    with pytest.raises(NotFound):
        load(tmp_path / "no.yaml")


# --------------------------------------------------------------------------- which files


def test_a_directory_has_its_file_and_the_override(tmp_path: Path) -> None:
    write(
        tmp_path,
        compose_yaml="services: {web: {image: one, ports: ['80:80']}}",
        compose_override_yaml="services: {web: {image: two, ports: ['81:81']}}",
        docker__x="",
    )
    made = load(tmp_path)
    assert made.composition.services["web"].image == "two"
    assert [port.published for port in made.composition.services["web"].ports] == [80, 81]
    assert load(tmp_path / "compose.yaml").composition.services["web"].image == "one"


def test_variables_come_from_the_environment_then_from_the_file_beside(tmp_path: Path) -> None:
    write(tmp_path, _env="A=file\nB=${A}-b\nCOMPOSE_PROFILES=extra\n")
    text = "services: {web: {image: debian, environment: {A: $A, B: $B}, profiles: [extra]}}"
    assert project(tmp_path, text).composition.services["web"].env == {"A": "file", "B": "file-b"}
    assert project(tmp_path, text, env={"A": "out"}).composition.services["web"].env == {"A": "out", "B": "out-b"}


def test_a_variable_that_is_not_set_is_noted(tmp_path: Path) -> None:
    assert project(tmp_path, "services: {web: {image: debian, command: '$NO x'}}").notes == [
        "the variable NO is not set"
    ]


def test_the_project_has_a_name(tmp_path: Path) -> None:
    text = "services: {web: {image: debian}}"
    assert project(tmp_path / "shop", text).name == "shop"
    assert project(tmp_path, f"name: one\n{text}").name == "one"
    assert project(tmp_path, f"name: one\n{text}", env={"COMPOSE_PROJECT_NAME": "two"}).name == "two"


# --------------------------------------------------------------------------- merging


BELOW = """
services:
  web:
    image: debian
    command: [a, b]
    entrypoint: x
    environment: [A=1, B=2]
    labels: {l: 1}
    volumes: [one:/data, two:/other]
    depends_on: [db]
    healthcheck: {test: [CMD, a], interval: 5s}
    env_file: a.env
  db: {image: debian}
volumes: {one: , two: , three: }
"""
ABOVE = """
services:
  web:
    command: c d
    environment: {B: 3, C: 4}
    volumes: ["three:/data:ro"]
    depends_on: {db: {condition: service_completed_successfully}}
    healthcheck: {test: b}
    env_file: [b.env]
    labels: [m=2]
"""


def test_files_are_merged_by_the_rules_of_compose(tmp_path: Path) -> None:
    write(tmp_path, a_yaml=BELOW, b_yaml=ABOVE, a_env="E=1\nF=1\n", b_env="F=2\n")
    web = load([tmp_path / "a.yaml", tmp_path / "b.yaml"]).composition.services["web"]
    assert (web.command, web.entrypoint) == (["c", "d"], ["x"])
    assert web.env == {"A": "1", "B": "3", "C": "4", "E": "1", "F": "2"}
    assert [(one.name, one.target, one.read_only) for one in web.volumes] == [
        ("three", "/data", True),
        ("two", "/other", False),
    ]
    assert web.depends_on["db"].condition == "service_completed_successfully"
    assert web.healthcheck is not None
    assert (web.healthcheck.test, web.healthcheck.interval) == (["/bin/sh", "-c", "b"], 5)
    assert web.labels == {"l": "1", "m": "2"}


@pytest.mark.parametrize(
    ("above", "env", "command"),
    [
        ("environment: !reset null", {}, ["a"]),
        ("environment: !reset {}\n    command: !reset []", {}, None),
        ("environment: !override {B: '2'}", {"B": "2"}, ["a"]),
        ("environment: {A: !reset null}", {}, ["a"]),
        ("environment:\n    command:", {"A": "1"}, ["a"]),
    ],
)
def test_values_are_reset_and_overridden(tmp_path: Path, above: str, env: dict[str, str], command: object) -> None:
    below = "services: {web: {image: debian, command: [a], environment: {A: 1}}}"
    write(tmp_path, a_yaml=below, b_yaml=f"services:\n  web:\n    {above}\n")
    web = load([tmp_path / "a.yaml", tmp_path / "b.yaml"]).composition.services["web"]
    assert (web.env, web.command) == (env, command)


def test_the_paths_of_several_files_begin_at_the_first(tmp_path: Path) -> None:
    write(tmp_path, a_yaml="services: {web: {image: x}}", sub__b_yaml="services: {web: {env_file: e.env}}", e_env="A=1")
    assert load([tmp_path / "a.yaml", tmp_path / "sub/b.yaml"]).composition.services["web"].env == {"A": "1"}


# --------------------------------------------------------------------------- extends, include


def test_a_service_extends_another(tmp_path: Path) -> None:
    write(
        tmp_path,
        other__base_yaml=(
            "services:\n  base: {image: debian, environment: {A: 1, B: 1}, env_file: e.env, extends: root}\n"
            "  root: {restart: always, image: none}\n"
        ),
        other__e_env="E=1\n",
    )
    made = project(
        tmp_path,
        """
        services:
          web:
            extends: {service: base, file: other/base.yaml}
            environment: {B: 2}
          again:
            extends: web
            image: other
        """,
    ).composition.services
    assert made["web"].env == {"A": "1", "B": "2", "E": "1"} and made["web"].restart == "always"
    assert (made["again"].image, made["again"].env) == ("other", made["web"].env)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services:\n  a: {extends: b}\n  b: {extends: a}", "extend each other in a circle"),
        ("services:\n  a: {extends: b}", "there is no service b"),
        ("services:\n  a: {extends: {service: b, file: no.yaml}}", "there is no compose file no.yaml"),
        ("include: [compose.yaml]\nservices: {a: {image: x}}", "include each other in a circle"),
    ],
)
def test_extends_and_include_that_cannot_be(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


def test_a_file_includes_another_with_its_own_variables_and_paths(tmp_path: Path) -> None:
    write(
        tmp_path,
        db__compose_yaml="services: {db: {image: $IMAGE, env_file: x.env, volumes: ['data:/d']}}\nvolumes: {data: }",
        db___env="IMAGE=postgres\n",
        db__x_env="A=1\n",
    )
    made = project(tmp_path, "include: [db/compose.yaml]\nservices: {web: {image: debian, depends_on: [db]}}")
    assert made.composition.services["db"].image == "postgres" and made.composition.services["db"].env == {"A": "1"}
    said = refusal(tmp_path, "include: [db/compose.yaml]\nservices: {db: {image: debian}}")
    assert "compose.yaml:1: include[0]: services.db is in this file as well" in said


# --------------------------------------------------------------------------- profiles, main


PROFILES = """
services:
  web: {image: debian}
  debug: {image: debian, profiles: [debug, all]}
  test: {image: debian, profiles: [test]}
"""


@pytest.mark.parametrize(
    ("chosen", "names"),
    [((), ["web"]), (("debug",), ["web", "debug"]), (("all", "test"), ["web", "debug", "test"]), (("*",), None)],
)
def test_services_of_a_profile_are_chosen(tmp_path: Path, chosen: tuple[str, ...], names: list[str] | None) -> None:
    made = project(tmp_path, PROFILES, profiles=chosen)
    assert [*made.composition.services] == (names or ["web", "debug", "test"])


@pytest.mark.parametrize(
    ("text", "main"),
    [
        ("a: {image: x}\n  main: {image: x}\n  default: {image: x}", "main"),
        ("a: {image: x}\n  default: {image: x}", "default"),
        ("a: {image: x}\n  b: {image: x, x-default: true}", "b"),
        ("b: {image: x}\n  a: {image: x}", "b"),
        ("b: {image: x, scale: 3}\n  a: {image: x}", "b-1"),
    ],
)
def test_one_service_is_the_main_one(tmp_path: Path, text: str, main: str) -> None:
    assert project(tmp_path, f"services:\n  {text}\n").composition.main == main


def test_the_main_service_is_given(tmp_path: Path) -> None:
    text = "services: {a: {image: x}, main: {image: x}}"
    assert project(tmp_path, text, main="a").composition.main == "a"
    assert "there is no service c" in refusal(tmp_path, text, main="c")


def test_a_dependency_must_be_there(tmp_path: Path) -> None:
    text = "services:\n  a:\n    image: x\n    depends_on:\n      b: {required: %s}\n  b: {image: x, profiles: [p]}\n"
    assert project(tmp_path, text % "false").composition.services["a"].depends_on == {}
    assert "compose.yaml:5: services.a.depends_on.b: there is no service b" in refusal(tmp_path, text % "true")
    circle = "services: {a: {image: x, depends_on: [b]}, b: {image: x, depends_on: [a]}}"
    assert "in a circle: a -> b -> a" in refusal(tmp_path, circle)


def test_there_are_at_most_so_many_services(tmp_path: Path) -> None:
    assert "33 services" in refusal(tmp_path, "services: {a: {image: x, deploy: {replicas: 33}}}")
    with pytest.raises(Invalid, match="no compose file is given"):
        load([])
