"""Dockerfiles of the corpus, instruction by instruction: flags against kinds of sources and targets, words, lines."""

from __future__ import annotations

from tests.conformance.dockerfiles.cases import Case

FLAGS = (
    "--chown=7:8", "--chown=app", "--chown=app:staff", "--chown=9", "--chown=:staff", "--chown=nobody:0", "--chmod=600",
    "--chmod=u+x,go-r", "--chmod=4755", "--chmod=0", "--chmod=a=rX", "--link", "--exclude=*.md", "--exclude=**/*.md",
    "--exclude=sub --exclude=a*", '--chown="7:8"', "--chown=1:2 --chmod=751 --link", "--parents", "--chown=5:6 --parents",
)  # fmt: skip
PATHS = (
    "note /new/x", "note /new/d/", "app /new", "app /srv/", "app/ /tmp", "note /way", "note /way/", "note /bin/",
    "note /tmp", "link /l", "flink /f", "app/* /s/", "note zeros /m/", ". /all/", "app /dangling", "note2 note /h/",
    "note /dangling", "app/sub /way/deep", "note ../up", "./note ./", "/note /", "empty /e", "empty /srv/deep",
    "*.t?z *.md /g/", "[pr]*[zd] /g/", "app/rel app/abs /lk/", "link/sub /x/", "note /srv/file", "note /circle",
    "note /srv/file/", "app /srv/file", "nothing /x", "no*thing /x/", "note zeros /m", "note app /mixed/", "../note /x",
    "app/../note /y", "note /etc/../z", "app/sub/ app/sub /two/", "'note' /q", "note /run/x", "note /var/run/", "app /run",
    "app/run /usr/bin/run", "link /srv/", "app/. /dot", "link/. /dot", "./link/ /l/", "app/sub/.. /up", "app/./sub /x", "note /a/b/c/d/e/f", "note \"/with blank/\"", "note /proc/x",
)  # fmt: skip
FLAGGED = ("note /new/x", "app /new", "app /srv/", "app/* /s/", "note /way/", "app note /deep/er/", ". /all/")

COPIES = [f"FROM plain\nCOPY {path}" for path in PATHS]
COPIES += [f"FROM plain\nCOPY {flag} {path}" for flag in FLAGS for path in FLAGGED[: 7 if "*" in flag else 4]]
COPIES += [f"FROM plain\nWORKDIR /w/d\nCOPY {path}" for path in ("note .", "app x", "note ../x/", "app ./", ". .")]
COPIES += [
    'FROM plain\nCOPY ["with blank", "/b/"]',
    'FROM plain\nCOPY ["note", "app/a.py", "/c d/"]',
    "FROM plain\nCOPY --parents app/sub/b.md app/a.py /p/",
    "FROM plain\nCOPY --parents ./app/./sub/b.md /p/",
    "FROM plain\nCOPY --parents **/*.md /p/",
    "FROM plain\nCOPY --parents --chmod=700 app/sub /p/",
    "FROM plain\nUSER app\nCOPY note /n\nWORKDIR /made",
    "FROM plain\nCOPY --chown=$U --chmod=$M note /n",
    "FROM plain\nARG U=3:4\nARG M=751\nCOPY --chown=$U --chmod=$M note /n",
    "FROM plain\nCOPY --chown=nosuch note /n",
    "FROM plain\nCOPY --chown=1:nosuch note /n",
    "FROM plain\nCOPY --chmod=999 note /n",
    "FROM plain\nCOPY note",
    "FROM plain\nCOPY --nosuch note /n",
    "FROM plain\nCOPY --chown note /n",
    "FROM scratch\nCOPY note /",
    "FROM scratch\nCOPY --chmod=777 --chown=1:1 app /a/b",
    "FROM scratch\nCOPY . /",
    "FROM scratch\nCOPY app /etc",
    "FROM scratch\nCOPY --chown=app note /n",
    "FROM scratch\nWORKDIR /w\nCOPY note .",
]
ADDS = [
    f"FROM {base}\nADD {rest}"
    for base in ("plain", "scratch")
    for rest in (
        "p.tgz /u/", "p.tgz zeros /u/", "zeros /z", "p.tgz /way/", "--chown=7:8 p.tgz /u", "--unpack=false p.tgz /u/",
        "note /n",
    )
]  # fmt: skip
ADDS += [
    f"FROM plain\nADD {rest}"
    for rest in (
        "p.tar /u", "p.txz /u", "p.tzst /u", "plain.gz /u/", "--chmod=700 p.tgz /u/", "app /a", "p.tgz /srv/file",
        "--exclude=*.md . /all/", "*.t?? /u/", "--checksum=sha256:00 note /n", "--link p.tgz /u/", "p.tgz /dangling",
        "--unpack=true p.tar /v", "empty /e/",
    )
]  # fmt: skip

SETTINGS = [
    "WORKDIR /a/b\nWORKDIR ../c", "USER app\nWORKDIR /a/b", "WORKDIR a\nWORKDIR b", "WORKDIR /way/x", "WORKDIR /a//b/./c/",
    "WORKDIR /srv/file", "WORKDIR /dangling/x", 'WORKDIR "/q r"', "WORKDIR /a b", "WORKDIR $NOTHING", "WORKDIR /",
    "ENV D=/d/e\nWORKDIR ${D}\nWORKDIR f", "USER 1:2\nWORKDIR w", "USER app:staff", "USER $NOTHING", "ARG U=9\nUSER $U",
    "EXPOSE 80 90/udp 1-3", "EXPOSE 80/TCP", "ARG P=8080\nEXPOSE $P ${P}/udp", "EXPOSE x", "EXPOSE 70000", "EXPOSE 5-3",
    'VOLUME /a ["/b"]', 'VOLUME ["/a","/b"]', "VOLUME /a /b\nVOLUME /a", 'VOLUME [""]', "ENV V=/vol\nVOLUME $V/x",
    "HEALTHCHECK --interval=1m CMD x y", "HEALTHCHECK NONE", 'HEALTHCHECK CMD ["a", "b"]', "HEALTHCHECK --retries=3 CMD x",
    "HEALTHCHECK --interval=1h2m3.5s --timeout=2s --start-period=1m --start-interval=5s --retries=4 CMD curl -f x || exit 1",
    "HEALTHCHECK --interval=0.5ms CMD x", "HEALTHCHECK --interval=x CMD x", "HEALTHCHECK --retries=-1 CMD x",
    "HEALTHCHECK --retries=0 CMD x", "HEALTHCHECK CMD", "HEALTHCHECK NONE x", "HEALTHCHECK FOO", "HEALTHCHECK --interval=0s CMD x",
    "HEALTHCHECK CMD a\nHEALTHCHECK CMD b", "STOPSIGNAL 9", "STOPSIGNAL SIGKILL", "STOPSIGNAL nonsense", "STOPSIGNAL RTMIN+3",
    "STOPSIGNAL 99", "ARG S=TERM\nSTOPSIGNAL $S", 'SHELL ["/bin/bash","-c"]\nCMD x', "SHELL /bin/sh", "SHELL []",
    'SHELL ["/s"]\nENTRYPOINT a b\nCMD c', "CMD a b\nENTRYPOINT [\"c\"]", 'ENTRYPOINT c\nCMD ["a"]', "CMD []", "ENTRYPOINT []",
    "CMD", "ENTRYPOINT", 'CMD ["a", "b"]', "CMD ['a', 'b']", 'CMD [ "a" , "b" ]', 'CMD ["a" "b"]', "CMD echo $HOME \"q\"",
    'CMD ["$A", "é\\u00e9"]', "CMD a\nCMD b", 'CMD ["sh", "-c", "a && b"]', "CMD exec \\\n  a \\\n  b",
    "MAINTAINER me you", "MAINTAINER $A <a@b>", "LABEL a=b 'c d'=\"e f\"", "LABEL a b c", 'LABEL a="x\\\ny" b=', "LABEL =x",
    "ARG V=1\nLABEL version=$V v.$V=x", "LABEL a='$b' c=\"$d\"", "LABEL a=1 a=2\nLABEL b=3", "LABEL com.x.y=z\\ w", "LABEL a",
    "ONBUILD COPY a b\nONBUILD RUN x", "ONBUILD ENV A=$B", "ONBUILD FROM x", "ONBUILD ONBUILD ENV A=1", "ONBUILD", "ONBUILD NOSUCH x",
    "onbuild  workdir   /x", "NOSUCH x", "env A=1\nworkdir /W", "ENV", "ENV A", "ENV =x", "ENV A=1 B", "EXPOSE", "COPY", "FROM",
]  # fmt: skip
WORDS = [
    "ENV A=1 B=$A\nENV C=${A:-x} D='$A' E=\"$B\" F=${V:-${A}}", "ENV A b  c", "ENV A b=c d", "ENV A=a\\ b B=c\\\n\n# x\n C=d",
    "ENV V=a.tar.gz\nENV X=${V%.*} Y=${V#*.} Z=${V/a/b} W=${V//./_} U=${V%%.*} T=${V##*.}",
    "ENV V=a.b\nENV A=${V#?} B=${V%?} C=${V#a\\.} D=${V/\\//x} E=${V//[ab]/x} F=${V/b} G=${V//}",
    "ENV V=a*b\nENV A=${V#a\\*} B=${V/\\*/-}", "ENV V=éàé\nENV A=${V%é} B=${V//é/e}", "ENV V=\nENV A=${V-x} B=${V:-x} C=${V+x} D=${V:+x}",
    "ENV A=${N-x} B=${N:-x} C=${N+x} D=${N:+x} E=${N}", "ENV A=${N:?gone}", "ENV A=${N?}", "ENV V=\nENV A=${V?x}", "ENV A=${V",
    "ENV A=${V!x}", "ENV A=${}", "ENV A=$ B=$$ C=a$", "ENV A=\\$V B='\\$V' C=\"\\$V\"", "ENV A='it''s' B=\"a 'b' c\" C='x\"y'", "ENV A='x",
    'ENV A="x\\ny" B="a\\\\b" C=a\\nb', "ENV A=$1 B=${2} C=$A_B D=${A}_B", "ARG A=1\nENV A=$A\nARG A=2\nENV B=$A", "ARG A\nENV B=$A.",
    "ARG A=1 B=$A C\nENV X=$A$B$C", "ENV A=1\nARG A=2\nENV B=$A", "ARG A=x\nARG B=${A:+y}\nENV C=$B", "ENV PATH=/x:$PATH", "ENV A=a=b=c",
    "ARG TARGETARCH\nARG TARGETOS TARGETPLATFORM BUILDPLATFORM TARGETVARIANT\nENV T=$TARGETARCH$TARGETOS.$TARGETPLATFORM.$BUILDPLATFORM.$TARGETVARIANT",
    "ENV T=$TARGETARCH.", "ARG TARGETSTAGE\nENV T=$TARGETSTAGE", "ENV A=${A:-${B:-${C:-d}}}", "ENV A='${B}' B=\"${C:-'x'}\"", "ENV A=~ B=* C=?",
    "ENV A=a#b #c", "ENV A=1\\\n  B=2 \\\n  # c\n  C=3", "ENV \"A B\"=c", "ENV A=\"b\"c'd'e", "LABEL x=\"a\\\"b\"", "ENV A=\ttab\tx",
    "ENV abc=hello\nENV abc=bye def=$abc\nENV ghi=$abc", "ENV A=${B:-a b} C=d", "ENV A=\"${B:-a b}\" C=d", "ARG A=\"x y\"\nENV B=$A C=\"$A\"",
]  # fmt: skip
LINES = [
    "COPY <<E /d\n$PATH '$X' \\$Y\nE", "COPY <<'E' <<-F /d/\n$PATH\nE\n\tx\n\tF", "COPY <<\"E F\" /d/\nx\nE F", "COPY <<E note /d/\nx\nE",
    "COPY --chmod=711 --chown=3:4 <<s.sh /d/\n#!/bin/sh\ns.sh", "ADD <<E /d\nx\nE", "COPY <<E /d\nE", "COPY <<E /d\nx", "COPY <<-E /d\n\t\tx\n\t y\n\tE",
    "ARG A=1\nCOPY <<E /d\n${A}${B:-x} \"$A\" '$A'\n\nE", "# comment\n\n   # c\nENV A=1\n#ENV B=2", "ENV A=1 \\\n# in between\n\n B=2", "ENV A=1 \\",
    "ENV A=1 \\ \n B=2", "  ENV   A=1   ", "ENV A=1\\\nB=2", "ENV\tA=1", "CMD a \\\n# c\n b", "RUN", "LABEL a=\"one\\\ntwo\"", "ENV A=`x`",
    "HEALTHCHECK \\\n --interval=1s \\\n CMD x", "COPY \\\n  note \\\n  /x",
]  # fmt: skip
DIRECTIVES = [
    "# escape=`\nFROM plain\nENV A=a`\n  B=c`$d E=\\x\nCOPY note C:\\x", "\ufeffFROM plain\nENV A=1\n", "FROM plain\r\nENV A=1 \\\r\n  B=2\r\nCOPY <<E /d\r\nx\r\nE\r\n",
    "# check=skip=all\nFROM plain\nENV A=1", "# escape=\\\n# check=error=true\nFROM plain\nENV A=1", "# a comment\n# escape=`\nFROM plain\nENV A=a\\ b",
    "ARG B=plain\nFROM $B", "ARG B=plain\nFROM ${B:-x}\nARG B\nENV A=$B", "ARG B=plain\nFROM plain\nENV A=$B.", "ARG A=pl\nARG B=${A}ain\nFROM $B",
    "FROM $NOTHING", "FROM plain AS 0bad", "FROM plain as Upper\nENV A=1\nFROM UPPER\nENV B=2", "ENV A=1\nFROM plain", "", "# nothing\n", "FROM plain x y",
    "FROM --platform=$BUILDPLATFORM plain\nENV A=1", "FROM --platform=linux/amd64 plain", "FROM plain AS plain\nENV A=1\nFROM plain\nENV B=2",
    "FROM scratch", "FROM scratch\nENV A=1\nCMD [\"/x\"]", "FROM scratch\nFROM plain\nENV A=1", "FROM dressed", "FROM dressed\nWORKDIR $APP_HOME\nWORKDIR x\nENV P=$PATH$EMPTY",
    "FROM dressed\nENTRYPOINT [\"x\"]", "FROM dressed\nCMD y", "FROM dressed\nENTRYPOINT x\nCMD y", "FROM dressed\nHEALTHCHECK NONE\nEXPOSE 90\nVOLUME /d2\nLABEL version=2",
    "FROM dressed\nCOPY note .\nWORKDIR deeper\nCOPY --chown=app note .", "FROM dressed\nENV APP_HOME=/other\nWORKDIR $APP_HOME", "FROM dressed\nUSER root\nRUN id -u > /i; env | sort | grep -v HOSTNAME > /e; pwd > /p",
    "FROM triggers", "FROM triggers\nENV C=$B", "FROM triggers AS x\nFROM x\nENV D=1", "FROM shelled\nRUN false; true", "FROM shelled\nCMD a", "FROM shelled\nENTRYPOINT b\nSHELL [\"/x\"]",
]  # fmt: skip

CASES = [
    *(Case(text) for text in (*COPIES, *ADDS, *DIRECTIVES)),
    *(Case(f"FROM plain\n{text}") for text in (*SETTINGS, *WORDS, *LINES)),
    Case("ARG B\nFROM ${B:-plain}\nARG X=1\nENV A=$X$B", arguments={"X": "2"}),
    Case("FROM plain\nARG X\nARG Y=1\nENV A=$X$Y$Z", arguments={"X": "x", "Z": "z"}),
    Case("FROM plain\nARG HTTP_PROXY\nENV A=$HTTP_PROXY", arguments={"HTTP_PROXY": "p"}),
    Case("FROM plain\nENV X=env\nARG X=arg\nENV Y=$X", arguments={"X": "given"}),
    Case("ARG X=1\nFROM plain\nARG X\nENV A=$X\nFROM plain\nENV B=$X\nARG X=3\nENV C=$X", arguments={"X": "9"}),
    Case("FROM plain\nARG X=\nENV A=${X:-d}", arguments={"X": ""}),
]
