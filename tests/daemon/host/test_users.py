"""Who commands, processes, sessions and terminals run as; what of its image's configuration a sandbox honours."""

from __future__ import annotations

import pytest

from sandbox import Client
from sandbox.errors import Invalid
from sandbox.messages import ImageConfig

PEOPLE = """
printf 'crab:x:1000:100:Crab:/home/crab:/bin/sh\\n' >> /etc/passwd
printf 'deck:x:3000:crab\\nhold:x:3001:crab,nobody,root\\n' >> /etc/group
mkdir -p /home/crab /srv/app && chown 1000:100 /home/crab
"""
WHO = 'echo "$(id -u):$(id -g) $(id -G) $HOME"'


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ("crab", "1000:100 100 3000 3001 /home/crab"),
        (1000, "1000:100 100 3000 3001 /home/crab"),
        ("1000", "1000:100 100 3000 3001 /home/crab"),
        ("crab:deck", "1000:3000 3000 /home/crab"),
        ("1000:1000", "1000:1000 1000 /home/crab"),
        ("2000", "2000:0 0 /"),
        ("root", "0:0 0 3001 /root"),
        ("0:0", "0:0 0 /root"),
        ("root:deck", "0:3000 3000 /root"),
        (None, "0:0 0 3001 /root"),
    ],
)
async def test_everything_runs_as_whom_it_is_told(sb, who: int | str | None, said: str) -> None:
    await sb.exec(PEOPLE, ends_turn=False)
    assert (await sb.exec(WHO, user=who, ends_turn=False)).text.strip() == said
    session = await sb.sessions.open(user=who)
    assert (await session.exec(WHO, ends_turn=False)).text.strip() == said
    process = await sb.processes.start(WHO, user=who, ends_turn=False)
    assert await process.wait() == 0 and (await process.logs()).stdout.decode().strip() == said
    async with sb.pty(WHO, user=who) as terminal:
        assert said in b"".join([part async for part in terminal]).decode()


async def test_groups_give_and_take_rights_and_last_through_a_restore(sb) -> None:
    await sb.exec(PEOPLE + "mkdir -m 770 /hold && chgrp 3001 /hold")
    assert (await sb.exec("touch /hold/by-crab", user="crab")).exit_code == 0
    assert (await sb.exec("touch /hold/by-other", user="crab:deck")).exit_code != 0
    session = await sb.sessions.open(user="crab")
    before = await session.exec("cd /hold")
    await sb.captured(before)
    await sb.exec("rm -r /hold")
    await sb.restore(before.checkpoint)
    assert (await session.exec("touch later && id -G")).text == "100 3000 3001\n"


async def test_a_hostile_passwd_is_refused_in_words(sb) -> None:
    for spoil, why in (
        ("rm /etc/passwd", "it has no such file"),
        ("rm -f /etc/passwd; mkfifo /etc/passwd", "not a regular file"),
        ("rm -f /etc/passwd; ln -s /proc/1/environ /etc/passwd", "not part of the sandbox's file tree"),
        ("rm -f /etc/passwd; ln -s /dev/zero /etc/passwd", "not part of the sandbox|not a regular file"),
        ("rm -f /etc/passwd; ln -s passwd /etc/passwd", "symbolic links"),
        ("rm -f /etc/passwd; truncate -s 2G /etc/passwd", "larger than"),
        ("rm -f /etc/passwd; ln -s ../../../../etc/shadow-of-nobody /etc/passwd", "no such file"),
    ):
        await sb.exec(spoil, ends_turn=False)
        with pytest.raises(Invalid, match=f"no user 'crab' in the sandbox's /etc/passwd: .*({why})"):
            await sb.exec("true", user="crab")
        assert (await sb.exec("id -u", user="1000:1000", ends_turn=False)).text == "1000\n"


async def test_a_working_directory_that_its_image_lacks_is_made(host: Client) -> None:
    async with host.create("debian", workdir="/not/there") as sb:
        assert (await sb.exec("pwd; stat -c '%u %g %a' .")).text == "/not/there\n0 0 755\n"
    async with host.create("debian", workdir="/etc/passwd") as sb:
        with pytest.raises(Invalid, match="working directory /etc/passwd"):
            await sb.exec("true")


async def test_an_image_sets_the_defaults_and_the_caller_overrides_them(host: Client, sb) -> None:
    done = await sb.exec(PEOPLE)
    await sb.captured(done)
    config = ImageConfig(env={"COLOUR": "green", "PATH": "/usr/bin:/bin"}, workdir="/srv/app", user="crab:deck")
    await host.images.commit(done.checkpoint, "configured", config=config)
    requested = f"{WHO}; pwd; echo $COLOUR $PATH"
    try:
        async with host.create("configured", env={"SHAPE": "round"}) as child:
            expected = ["1000:3000 3000 /home/crab", "/srv/app", "green /usr/bin:/bin"]
            assert (await child.exec(requested)).text.splitlines() == expected
            assert (await (await child.sessions.open()).exec(requested)).text.splitlines() == expected
            over = await child.exec(requested, user=0, cwd="/", env={"COLOUR": "blue"})
            assert over.text.splitlines() == ["0:0 0 3001 /root", "/", "blue /usr/bin:/bin"]
            (fork,) = await child.fork()
            async with fork.sandbox as twin:
                assert (await twin.exec(requested)).text.splitlines() == expected
        async with host.create("configured", user="1000:100", workdir="/", env={"COLOUR": "red"}) as child:
            assert (await child.exec(requested)).text.splitlines() == [
                "1000:100 100 /home/crab",
                "/",
                "red /usr/bin:/bin",
            ]
        await host.images.commit(done.checkpoint, "haunted", config=ImageConfig(user="ghost"))
        async with host.create("haunted") as child:
            with pytest.raises(Invalid, match="default user of this sandbox: no user 'ghost' in the sandbox's"):
                await child.exec("true")
            with pytest.raises(Invalid, match="ghost"):
                await child.processes.start("true")
            assert (await child.exec("id -u", user="root")).text == "0\n"
        await host.images.remove("haunted")
    finally:
        await host.images.remove("configured")
