"""Dockerfiles of the corpus in the shapes of public bug reports of kaniko, buildah, podman, BuildKit and Docker.

Each is written for this corpus, with the number of the report that has the like; what is right is what the reference
makes of it today.
"""

from __future__ import annotations

import bz2
import io
import tarfile

from tests.conformance.dockerfiles.cases import Case, archive


def _rooted(mode: int) -> bytes:
    """An archive with an entry of its own root, and names with ``./``."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind in (("./", tarfile.DIRTYPE), ("./marker", tarfile.REGTYPE), ("./deep/er/x", tarfile.REGTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.mtime, member.uid = kind, mode, 3_000_000, 5
            tar.addfile(member, io.BytesIO())
    return out.getvalue()


OTHERS = [  # kaniko
    "FROM box AS t\nRUN echo hello > /tmp/target; ln -s /tmp /test; ln -s /test/target /test/link\nFROM box\nCOPY --from=t /test/link /other/link",  # 1036
    "FROM box AS t\nRUN mkdir -p /top/nested && touch /top/nested/x\nFROM box\nCOPY --from=t /top /a\nCOPY --from=t /top/nested /b",  # 1909
    "FROM box AS t\nRUN mkdir -p /v/bin && ln -s /usr/bin/sh /v/bin/python && ln -s python /v/bin/python3\nFROM box\nCOPY --from=t /v /v\nCOPY --from=t /v /v",  # 3371
    "FROM box\nRUN mkdir -p /a/a && touch /a/a/x\nRUN rm -r /a && mkdir /b && ln -s b /a",  # 2308
    "FROM box\nRUN mkdir /target && ln -s target /things && touch /things/old\nRUN rm /things && rm -r /target && mkdir /things && touch /things/new",  # 3442
    "FROM box\nRUN mkdir /something\nWORKDIR /something\nRUN rm -rf /something\nRUN [\"/bin/touch\", \"here\"]",  # 1129
    "FROM box\nWORKDIR /gone\nRUN rmdir /gone\nUSER app\nRUN pwd > /tmp/p",
    "FROM scratch\nFROM scratch\nCOPY note /",  # 1210
    "FROM box AS t\nRUN mkdir -p /k/.config /k/.docker && echo {} > /k/.docker/config.json\nFROM box\nCOPY --from=t /k/.config /k/.config\nCOPY --from=t /k/.docker /k/.docker\nRUN ln -s /k/.docker/config.json /link && touch /k/empty",  # 3122, 2314
    "FROM box\nRUN mkdir -m 700 /data && chown app /data\nVOLUME /data\nRUN echo x > /data/x && chmod 751 /data",  # 334
    "FROM box\nRUN chmod 2775 /srv && chgrp staff /srv\nCOPY app /srv/new\nCOPY note /srv/n\nRUN mkdir /srv/made; touch /srv/t",  # 1917
    "FROM box\nRUN chmod 2775 /srv && chgrp staff /srv\nCOPY --chown=app app /srv/new\nCOPY --chmod=711 app/sub /srv/sub\nCOPY note /srv/a/b/c\nADD p.tgz /srv/u/",
    "FROM box\nRUN chmod 2775 /srv && chgrp staff /srv\nWORKDIR /srv/w/x\nUSER app\nWORKDIR /srv/y/z\nRUN touch t",
    "FROM box\nRUN chmod 2775 /srv && chgrp staff /srv\nADD --chmod=700 p.tgz /srv/u/\nCOPY --link app /srv/n/\nRUN --mount=type=bind,target=/srv/m ls /srv > /l",
    "FROM box\nCOPY --chown=app:staff app /home/app/deep/er",  # moby 42819
    "FROM box\nCOPY --chmod=0644 note /new/path/",  # moby 49851
    "FROM box\nCOPY note /tmp/a\nCOPY --link note /tmp/b\nCOPY --link app /root/c",  # buildkit 3602
    "FROM box\nCOPY --link --chown=app note /srv/deep/x\nRUN stat -c '%a %u %g' /srv /srv/deep > /s",
    "FROM box AS t\nRUN mkdir /test && ln -s /test/target /test/link && touch /test/x.git\nFROM box\nCOPY --from=t --exclude=*.git /test /test",  # buildkit 4946
    "FROM box\nCOPY --exclude=note --exclude=zeros note* z* /x/",  # buildkit 5489
    "FROM box AS t\nRUN mkdir -p /c/man/man1 && touch /c/man/man1/x\nFROM box\nRUN mkdir -p /share/man && ln -s /share/man /usr/man\nCOPY --from=t /c /usr/",  # for-linux 1363
    "ARG S=t\nFROM box AS t\nFROM box\nARG S\nCOPY --from=$S /srv/file /x",  # buildkit 6153
    "FROM dressed\nARG APP_HOME=/from/arg\nRUN echo $APP_HOME > /h\nENV SEEN=$APP_HOME",  # moby 45228
    "FROM triggers AS first\nRUN echo first >> /log\nFROM first AS second\nRUN echo second >> /log\nFROM scratch AS last\nCOPY --from=second /triggered /log /\nARG WHO\nENV W=$WHO",  # buildkit 5578
    "FROM box AS one\nONBUILD RUN echo 1 >> /log\nFROM one AS two\nONBUILD RUN echo 2 >> /log\nFROM two AS three\nFROM three",
    "FROM box\nENV N=shown\nRUN cat <<\\EOF > /a\n$N\nEOF\nRUN cat <<\"EOF\" > /b\n$N\nEOF",  # buildah 5213
    "FROM box\nARG V=\"EXPANDED\"\nCOPY <<E /a\n\"$V\" '$V' \\$V ${V:+x} `date` $(date)\nE\nRUN <<E\necho \"$V\" '$V' > /b\nE",  # buildah 7103
    "FROM box\nCOPY <<E <<F /d/\n$E one\nE\n$F two\nF\nRUN <<E cat - /d/F > /c\nthree\nE",
    "FROM box\nLABEL io.one = \"v\" io.two=\"w\"",  # buildah 879
    "FROM box\nLABEL io.one=\"a\" \\\n      io.two=\"b c\" \\\n\n      io.three='d$X'",
    "FROM box\nARG username=me\nRUN echo 'x' > /r && sed -i.bkp -e \\\n\t'1s;^;/home/${username}/a\\n;' \\\n\t/r && sed -i -e \"1s;^;/home/${username}/b\\n;\" /r",  # podman 4393
    "FROM box\nRUN mkdir -p /home/u && chown app:staff /home/u\nUSER app\nRUN --mount=type=cache,target=/home/u/.cache,uid=100,gid=300 touch /home/u/.cache/x\nRUN ls -A /home/u > /tmp/l",  # buildkit 3153
    "FROM box\nRUN --mount=type=cache,target=/cache,uid=1234,gid=1234 stat -c '%a %u %g' /cache > /a\nRUN ls -d /cache > /b 2>&1; true",  # buildkit 2683
    "FROM box\nARG U=7\nENV D=/cached\nRUN --mount=type=cache,target=$D/x,uid=$U,gid=${U} stat -c '%u %g' /cached/x > /s",  # moby 43404
    "FROM box\nRUN --mount=type=cache,mode=777,target=/build/cache,sharing=shared stat -c %a /build /build/cache > /s",  # buildah 4811
    "FROM box AS a\nRUN echo '#!/bin/sh' > /tool && echo 'echo made' >> /tool && chmod +x /tool\nFROM box\nRUN --mount=type=bind,from=a,source=/tool,target=/usr/bin/tool tool > /out; type tool >> /out",  # kaniko 1568
    "FROM box AS a\nRUN mkdir /o && echo 1 > /o/f\nFROM box\nRUN --mount=type=cache,id=seeded,from=a,source=/o,target=/c cat /c/f > /out; echo 2 > /c/g\nRUN --mount=type=cache,id=seeded,from=a,source=/o,target=/c ls /c > /l",
    "FROM box\nRUN --mount=type=tmpfs,target=/tmp --mount=type=cache,target=/var/cache/apt echo x > /tmp/x; ls /tmp /var/cache > /l",
    "FROM box\nRUN --mount=type=ssh echo \"[$SSH_AUTH_SOCK]\" > /s",  # buildkit 825
    "FROM box\nRUN --mount=type=ssh,id=other,required=true echo x > /s",
    "FROM box\nRUN --mount=type=ssh,id=other,nosuch=1 echo x > /s",
    "FROM box\nCOPY app/a.py/ /x",
    "FROM box\nRUN echo x:y:1 > /srv/link-target && ln -s /srv/link-target /srv/ln\nCOPY note /srv/ln\nADD note2 /srv/ln",
    "FROM box\nRUN ln -s /nowhere/at/all /dang\nWORKDIR /dang\nRUN touch x",
    "FROM box\nRUN touch /srv/file2 && ln /srv/file /srv/hard\nRUN echo changed > /srv/hard\nCOPY note /srv/file",
    "FROM box\nRUN chmod 000 /srv/file && chmod 111 /srv/deep\nUSER app\nCOPY note /srv/deep/n\nWORKDIR /srv/deep/w",
    "FROM box\nUSER 9999\nWORKDIR /work/deep\nRUN touch x && mkdir y",  # kaniko 2259
]  # fmt: skip
ARCHIVES = [
    Case(f"FROM box\nRUN mkdir -m 0755 /target && touch -d @7000 /target\nADD {name} /target/", {name: data})
    for name, data in (
        ("rooted.tar", _rooted(0o700)),  # kaniko 841
        ("sticky.tar", _rooted(0o1777)),
        ("b.tar.bz2", bz2.compress(archive())),
    )
]
ARCHIVES += [Case("FROM scratch\nADD rooted.tar /new/target", {"rooted.tar": _rooted(0o700)})]
IGNORED = [
    ("COPY . /c/", "*\n!docker/*/Dockerfile\n"),  # for-linux 585
    ("COPY . /c/", "docker\n!docker/**/*.go\n"),  # docs 25850
    ("COPY . /c/", "*\n!docker/\n!/.vscode/tasks.json\n"),  # railpack 435
    ("COPY . /c/", "*\n!docker/app\n!docker/app/**\n"),  # olla 213
    ("COPY docker /c/", "docker/app\n!docker/app/sub/m.go\n"),
    ("COPY --exclude=app/sub docker/ /c/", "**/Dockerfile\n"),  # buildah 6726
    ("COPY docker/app docker/app/sub /c/", "**/*.go\n!**/m.go"),
]

CASES = [
    *(Case(text) for text in OTHERS),
    *ARCHIVES,
    *(
        Case(
            f"FROM scratch\n{copy}",
            {
                ".dockerignore": ignored,
                "docker/app/Dockerfile": "x",
                "docker/app/sub/m.go": "m",
                "docker/app/sub/t.txt": "t",
                "docker/top.go": "g",
            },
        )
        for copy, ignored in IGNORED
    ),
    Case(
        "FROM box\nUSER app\nRUN --mount=type=secret,id=k cat /run/secrets/k > /tmp/k || echo no > /tmp/k",
        secrets={"k": "s3"},
    ),
    Case(
        "FROM box\nUSER app\nRUN --mount=type=secret,id=k,uid=100 --mount=type=secret,id=k,target=/tmp/o,mode=0444 cat /run/secrets/k /tmp/o > /tmp/k",
        secrets={"k": "s3"},
    ),
    Case('FROM box\nENV 100=no A.B=dots\nRUN echo "$100 $A.B" > /a; env | grep -c dots >> /a'),
]
