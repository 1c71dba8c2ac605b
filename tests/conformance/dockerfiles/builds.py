"""Dockerfiles of the corpus that take more than one instruction: stages, .dockerignore, commands with mounts."""

from __future__ import annotations

from tests.conformance.dockerfiles.cases import Case

MADE = "FROM box AS a\nRUN mkdir -p /o/d && echo x > /o/f && ln /o/f /o/h && ln -s f /o/s && ln -s /o /o/d/up && chmod 4750 /o/f"
STAGES = [
    "FROM plain AS a\nENV X=1\nARG Y=2\nWORKDIR /w\nFROM a\nENV Z=$X$Y",
    "FROM plain AS a\nCOPY app /x\nFROM scratch\nCOPY --from=a / /",
    "FROM plain AS a\nCOPY app /x\nFROM scratch\nCOPY --from=0 --chown=3:4 /x /way /",
    "FROM plain AS a\nONBUILD ENV Q=1\nONBUILD COPY note /ob\nFROM a",
    f"{MADE}\nFROM plain\nCOPY --from=a /o /o",
    f"{MADE}\nFROM plain\nCOPY --from=a /o/ /way/",
    f"{MADE}\nFROM plain\nCOPY --from=a /o/f /o/h /o/s /n/",
    f"{MADE}\nFROM plain\nCOPY --from=a --chown=7:8 /o /o",
    f"{MADE}\nFROM plain\nCOPY --from=a --chmod=755 /o/f /f",
    f"{MADE}\nFROM plain\nCOPY --from=a --chown=app /o/f /f",
    f"{MADE}\nFROM plain\nCOPY --from=a /o/d/up/f /f",
    f"{MADE}\nFROM plain\nCOPY --from=a /o/d /o/d",
    f"{MADE}\nFROM plain\nCOPY --from=a /o/d/up /x",
    f"{MADE}\nFROM plain\nCOPY --from=a /o/d/up /srv/",
    f"{MADE}\nFROM plain\nCOPY --from=a /o/. /x",
    "FROM box AS a\nRUN mkdir -p /d/e && touch -d @5000 /d/e /d && ln -s d /l\nFROM plain\nCOPY --from=a /l /l\nCOPY --from=a /d/. /dot\nCOPY --from=a /l/ /srv/",
    f"{MADE}\nFROM plain\nCOPY --from=a /o/* /g/",
    f"{MADE}\nFROM plain\nCOPY --from=a --parents /o/./d /o/f /p/",
    f"{MADE}\nFROM plain\nCOPY --from=a --exclude=h o /o",
    f'{MADE}\nFROM scratch\nCOPY --from=a /o/f /usr/bin/tool\nENTRYPOINT ["/usr/bin/tool"]',
    f"{MADE}\nFROM plain\nCOPY --from=a nosuch /o",
    "FROM plain\nCOPY --from=nosuch:gone /a /b",
    "FROM plain\nCOPY --from=5 /a /b",
    "FROM plain AS a\nCOPY --from=a /etc /b",
    "FROM plain\nCOPY --from=box /etc/passwd /copied",
    "FROM plain\nCOPY --from=dressed /opt/app /copied",
    "FROM box AS a\nRUN mkfifo /p && chown 5:6 /p && mkdir -m 2775 /d && chgrp 9 /d && touch /d/x\nFROM plain\nCOPY --from=a /p /d /n/",
    "FROM box AS a\nRUN truncate -s 5M /s && echo end >> /s && dd if=/dev/zero of=/z bs=1k count=9\nFROM plain\nCOPY --from=a /s /z /n/",
    "FROM box AS a\nRUN mkdir -p /d/e && touch -d @5000 /d/e/f /d/e /d\nFROM plain\nCOPY --from=a /d /n\nCOPY --from=a /d/e/f /one",
    "FROM plain AS one\nCOPY note /1\nFROM plain AS two\nCOPY --from=one /1 /2\nFROM plain\nCOPY --from=two /2 /3\nCOPY --from=one /1 /4",
    "FROM box AS one\nRUN echo 1 > /1\nFROM box AS two\nRUN echo 2 > /2\nFROM box AS three\nRUN echo 3 > /3\nFROM scratch\nCOPY --from=one /1 /\nCOPY --from=two /2 /\nCOPY --from=three /3 /",
    "FROM plain AS unused\nCOPY nosuch /x\nFROM plain\nENV A=1",
    "FROM plain AS A\nCOPY note /n\nFROM a\nCOPY --from=A /n /m",
    "FROM box AS a\nUSER app\nWORKDIR /h\nRUN id -u > /tmp/u\nFROM a\nRUN id -u > /tmp/v; pwd >> /tmp/v",
    "ARG V=a\nFROM plain AS a\nENV W=a\nFROM plain AS b\nENV W=b\nFROM $V\nENV X=$W",
    "FROM box AS a\nRUN rm -r /srv && mkdir /srv && echo n > /srv/new\nFROM a\nRUN rm /etc/hosts; rm -r /srv/new; ls -a /srv > /ls",
    "FROM box\nRUN mv /srv/file /srv/moved && ln /srv/moved /hard && chmod 700 /etc && rm /way && mkdir /way",
    "FROM box\nRUN echo 1 > /a\nRUN rm /a\nRUN mkdir /a && echo 2 > /a/b\nRUN rm -r /a && ln -s srv /a",
]
IGNORES = [
    "*\n!app/a.py", "**/*.md", "!**/*.py\n", "*\n!**/*.py", "app\n!app/sub", ".dockerignore\nDockerfile", "note*\n!note2",
    "# c\n\n  note  \n", "/note", "./note", "app/", "app/*", "app/**", "**", "**/sub", "*/sub", "a?p", "[a-n]*", "[^a]*", "\\note",
    "\ufeffnote", "note\r\napp\r\n", "!note\nnote", "app/sub/..", "../note", "link", "**/.*", "*\n!app\napp/sub", "*.t??\n*z*", ".*",
    "app\n!app/sub/b.md\n", "*\n!*/\n!note", "with blank", "empty", "app/rel\napp/abs", "[", "a[",
]  # fmt: skip
RUNS = [
    "RUN echo a > /a", "RUN [\"/bin/sh\", \"-c\", \"echo b > /b\"]", "RUN false", "RUN nosuch", "RUN [\"/nosuch\"]", "RUN exit 3 || true",
    "ENV A='x y'\nRUN echo \"$A\" > /a; echo $A $HOME $PATH > /b", "ARG A=x\nRUN echo $A > /a", "ARG A=x\nENV B=y\nRUN env | sort | grep -v -e HOSTNAME -e SHLVL > /env",
    "RUN pwd > /p\nWORKDIR /w\nRUN pwd >> /p; touch here", "USER app\nRUN id > /tmp/id; touch /tmp/mine", "USER 1234\nRUN id -u > /tmp/id; id -g >> /tmp/id",
    "USER 5:6\nRUN id -u > /tmp/id; id -g >> /tmp/id", "USER app:0\nRUN id > /tmp/id", "USER nosuch\nRUN id", "USER app\nWORKDIR /w\nRUN touch x || echo no > /tmp/no",
    "RUN umask > /u; touch /f; mkdir /d", "RUN <<E\necho 1 > /1\necho 2 > /2\nE", "RUN <<'E'\necho $HOME > /1\nE", "RUN <<E sh\necho 1 > /1\nE",
    "RUN cat <<E > /1\n$HOME\nE", "RUN <<E cat > /1\nx $A\nE", "RUN <<-E\n\techo 1 > /1\n\tE", "RUN <<E\n#!/bin/sh\necho \"$0\" | grep -c E > /1\nE",
    "RUN <<A cat > /1 && <<B cat > /2\na\nA\nb\nB", "RUN echo a \\\n  b \\\n# c\n  && echo c > /c", "SHELL [\"/bin/sh\", \"-xc\"]\nRUN echo $0 > /a",
    "RUN --mount=type=bind,target=/b cat /b/note > /n", "RUN --mount=target=/b,source=app ls /b > /n", "RUN --mount=type=bind,source=note,target=/b cat /b > /n",
    "RUN --mount=type=bind,rw,target=/b echo x > /b/new; ls /b | wc -l > /n", "RUN --mount=type=bind,from=plain,source=/srv,target=/b ls /b > /n",
    "RUN --mount=type=cache,target=/c echo 1 > /c/x; ls -a /c > /l", "RUN --mount=type=cache,target=/c,mode=0711,uid=3,gid=4 stat -c '%a %u %g' /c > /l",
    "RUN --mount=type=cache,id=one,target=/c echo 1 > /c/x\nRUN --mount=type=cache,id=one,target=/d cat /d/x > /l", "RUN --mount=type=tmpfs,target=/t touch /t/x; ls /t > /l",
    "RUN --mount=type=tmpfs,target=/srv ls /srv > /l\nRUN ls /srv >> /l", "RUN --mount=type=secret,id=none ls -A /run/secrets > /l 2>&1; true",
    "RUN --mount=type=secret,id=none,required cat /run/secrets/none", "RUN --mount=type=nosuch,target=/x true", "RUN --mount=type=bind true", "RUN --mount=type=bind,target=/b,nosuch=1 true",
    "WORKDIR /w\nRUN --mount=target=rel ls rel > /l", "RUN --network=none echo a > /a", "RUN --network=nosuch echo a", "RUN --security=insecure true", "RUN --nosuch true",
    "RUN mkdir -p /run/x && echo y > /run/x/y", "RUN mkdir -p /var/run/lock/x", "RUN chmod 777 /tmp; echo x > /tmp/x", "RUN rm -rf /tmp /root && mkdir -m 755 /root",
    "RUN mkfifo /f; ln -s /nowhere /l; touch '/a b' /é", "RUN chown -R 5:6 /srv; chmod -R a+rX /srv", "RUN echo $0 $# \"$@\" > /a", "RUN [\"echo\", \"$HOME\"]",
    "RUN exec sh -c 'echo $$ > /dev/null; echo x > /x'", "RUN (sleep 100 &) ; echo x > /x", "RUN cat > /in; echo $? >> /in", "RUN test -t 0 || echo no > /tty", "RUN kill -9 $$",
    "RUN touch -d @5000 /old; mkdir /d; touch -d @6000 /d", "RUN cp /srv/file /c; cp -a /srv /e; mv /e /g", "RUN dd if=/dev/zero of=/z bs=1M count=3 2> /dev/null; truncate -s 1G /hole",
]  # fmt: skip

IN_GROUPS = "FROM box\nRUN echo wheel:x:10:root,app,100,1234 >> /etc/group; echo far:x:400:nobody,root >> /etc/group\n"
MEMBERS = [
    f"{IN_GROUPS}{user}\nRUN id -u > /tmp/id; id -g >> /tmp/id; grep Groups /proc/self/status >> /tmp/id; echo $HOME >> /tmp/id"
    for user in (
        "", "USER root", "USER 0", "USER 0:0", "USER root:staff", "USER app", "USER 100", "USER 100:200", "USER app:staff",
        "USER nobody", "USER 1234", "USER :staff", "USER root:", "RUN sed -i s,^root:x:0:0::/root,root:x:0:7::/home, /etc/passwd",
        "RUN sed -i 1itoor:x:0:5::/toor:/bin/sh /etc/passwd", "RUN rm /etc/passwd", "RUN rm /etc/passwd\nUSER root", "RUN rm /etc/group\nUSER app",
        "RUN rm /etc/group /etc/passwd\nUSER 100", "RUN sed -i s/^app:x:100/app:x:0/ /etc/passwd\nUSER app",
    )
]  # fmt: skip

ETC = [
    "FROM locked\nRUN stat -c '%a %u %g %Y' /etc > /s", "FROM locked\nRUN echo x:x:9: >> /etc/group", "FROM locked\nCOPY note /etc/n",
    "FROM locked\nCOPY note /etc/group", "FROM locked\nRUN rm /etc/group", "FROM locked\nUSER 3:4\nRUN cat /etc/group > /tmp/g; id >> /tmp/g",
    "FROM box\nRUN echo x:x:9: >> /etc/group", "FROM box\nCOPY note /etc/group", "FROM box\nRUN touch /etc/new", "FROM locked\nCOPY app /etc",
]  # fmt: skip

CASES = [
    *(Case(text) for text in (*STAGES, *MEMBERS, *ETC)),
    *(Case("FROM scratch\nCOPY . /c/", {".dockerignore": text}) for text in IGNORES),
    Case("FROM scratch\nCOPY note /", {".dockerignore": "note"}),
    Case("FROM scratch\nCOPY note* app/a* /x/", {".dockerignore": "note\napp/a.py"}),
    Case("FROM scratch\nCOPY app /x", {".dockerignore": "app"}),
    Case(
        "FROM scratch\nCOPY . /",
        {"Dockerfile.dockerignore": "*\n!note", ".dockerignore": "note"},
        title="own-dockerignore",
    ),
    *(Case(f"FROM box\n{text}") for text in RUNS),
    Case(
        "FROM box\nRUN --mount=type=secret,id=k cat /run/secrets/k > /k; stat -c '%a %u' /run/secrets/k > /s",
        secrets={"k": "s3"},
    ),
    Case(
        "FROM box\nRUN --mount=type=secret,id=k,target=/x/key,mode=0444,uid=5 cat /x/key > /k; stat -c '%a %u' /x/key > /s",
        secrets={"k": "s3"},
    ),
    Case("FROM box\nRUN --mount=type=secret,id=k,env=KEY echo $KEY > /k", secrets={"k": "s3"}),
    Case(
        "FROM box\nRUN --mount=type=secret,id=k,env=KEY,target=/kk cat /kk > /k; echo $KEY >> /k", secrets={"k": "s3"}
    ),
    Case("FROM plain AS a\nCOPY note /a\nFROM plain AS b\nCOPY note /b\nFROM plain\nCOPY note /c", target="b"),
    Case("FROM plain AS a\nCOPY note /a\nFROM plain AS b\nCOPY note /b", target="0"),
    Case("FROM plain AS a\nCOPY note /a", target="nosuch"),
    Case("FROM plain AS a\nARG TARGETSTAGE\nENV T=$TARGETSTAGE\nFROM plain", target="a"),
    Case("FROM plain\nCOPY --from=other / /o\nCOPY --from=other a.py /p", contexts={"other": "app"}),
    Case("FROM plain\nCOPY --from=other --chown=5 --exclude=*.md sub /o", contexts={"other": "app"}),
    Case("FROM plain AS a\nCOPY note /n\nFROM plain\nCOPY --from=a / /o", contexts={"a": "app"}),
    Case("FROM box\nRUN --mount=from=other,target=/o ls /o > /l", contexts={"other": "app"}),
    Case(
        "FROM plain\nCOPY --from=other / /o",
        {"own/.dockerignore": "x", "own/x": "x", "own/y": "y"},
        contexts={"other": "own"},
    ),
]
