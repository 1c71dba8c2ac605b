"""Steps of an E2B template as a Dockerfile."""

from __future__ import annotations

import pytest

from daemon.e2b.steps import MAKE_USER, SHELL, BuildBody, Step, written
from daemon.e2b.template_routes import names_of
from sandbox.errors import Invalid, Unsupported
from sandbox.image.dockerfile import parse

HASH = "a1" * 32


def steps(*made: tuple[str, list[str]]) -> BuildBody:
    return BuildBody(
        steps=[Step(type=kind, args=args, filesHash=HASH if kind == "COPY" else None) for kind, args in made]  # type: ignore[arg-type]
    )


def lines(body: BuildBody, **options: str) -> list[str]:
    """What stands between the beginning and the labels; BuildKit's own parser takes the text."""
    text = written(body, base="debian", **options).text
    parse(text)
    made = text.splitlines()
    return made[made.index("WORKDIR " + options.get("workdir", "/home/user")) + 1 : -1]


def test_a_template_of_an_image_begins_with_its_user() -> None:
    text = written(steps(), base="debian").text
    assert text.splitlines()[:2] == ["FROM debian", "USER root"]
    assert MAKE_USER.split(";")[0] in text and "USER user\nWORKDIR /home/user\n" in text
    assert "RUN" not in written(steps(), base="mine", user="app", workdir="/app").text


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (("ENV", ["A", 'b "c" $d \\']), ['ENV A="b \\"c\\" \\$d \\\\"']),
        (("ENV", ["A", "1", "B", "2"]), ['ENV A="1"', 'ENV B="2"']),
        (("WORKDIR", ["/a b/$c"]), ["WORKDIR /a b/\\$c"]),
        (("USER", ["root"]), ["USER root"]),
        (("COPY", ["src", "/srv", "", ""]), [f'COPY --from=f{HASH} --chown=user ["/src", "/srv"]']),
        (("COPY", [".", "/srv"]), [f'COPY --from=f{HASH} --chown=user ["/", "/srv"]']),
        (
            ("COPY", ["./a", "b", "root:root", "0755"]),
            [f'COPY --from=f{HASH} --chown=root:root --chmod=0755 ["/a", "b"]'],
        ),
    ],
)
def test_what_a_step_means(step: tuple[str, list[str]], expected: list[str]) -> None:
    assert lines(steps(step)) == expected


def test_a_command_is_one_instruction_whatever_it_says() -> None:
    command = 'echo "a\nUSER root" $HOME `id` \\\nRUN x'
    made = lines(steps(("RUN", [command, "root"])))
    assert [line.split()[0] for line in made] == ["USER", "RUN", "USER"]
    assert made[0] == "USER root" and made[2] == "USER user" and SHELL.split()[1] in made[1]


@pytest.mark.parametrize(
    "step",
    [
        ("ENV", ["A\nRUN", "x"]),
        ("ENV", ["A", "x\nRUN y"]),
        ("ENV", ["A"]),
        ("USER", ["user\nRUN x"]),
        ("USER", ["$USER"]),
        ("WORKDIR", ["/a\nRUN x"]),
        ("COPY", ["a\nb", "/srv"]),
        ("COPY", ["a", "/srv", "user --from=b"]),
        ("RUN", []),
    ],
)
def test_what_could_be_another_instruction_is_refused(step: tuple[str, list[str]]) -> None:
    with pytest.raises(Invalid):
        written(steps(step), base="debian")


def test_refusals() -> None:
    with pytest.raises(Unsupported):
        written(BuildBody(fromImageRegistry={"type": "registry"}), base="debian")
    with pytest.raises(Invalid):
        written(BuildBody(steps=[Step(type="COPY", args=["a", "b"])]), base="debian")
    for wrong in ("", "a b", "a:b:c d", "../x"):
        with pytest.raises(Invalid):
            names_of(wrong, [])
