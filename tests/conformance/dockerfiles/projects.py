"""Dockerfiles of the corpus in the shapes that real projects use, with a busybox in the place of their tools.

Written for this corpus; each stands for a habit that public Dockerfiles have: the dependencies first, a builder and a
small image behind it, an entry point script, a user of its own, a white list in .dockerignore.
"""

from __future__ import annotations

from tests.conformance.dockerfiles.cases import Case

ENTRY = '#!/bin/sh\nset -e\nexec "$@"\n'

CASES = [
    Case(
        "FROM box AS base\nENV PYTHONUNBUFFERED=1 \\\n    PYTHONDONTWRITEBYTECODE=1 \\\n    PIP_NO_CACHE_DIR=off\n"
        "WORKDIR /code\nCOPY requirements.txt .\nRUN mkdir -p /venv/lib && cp requirements.txt /venv/lib/ \\\n"
        '    && rm -rf /var/lib/apt/lists/*\nCOPY . .\nEXPOSE 8000\nCMD ["gunicorn", "--bind", "0.0.0.0:8000", "app:app"]\n',
        {
            ".dockerignore": ".git\n.env\n**/__pycache__\n*.md\n!README.md\n",
            "pkg/__pycache__/m.pyc": "x",
            ".git/HEAD": "ref",
        },
        title="python-web",
    ),
    Case(
        "FROM box AS deps\nWORKDIR /app\nCOPY package.json package-lock.json* yarn.lock* ./\nRUN mkdir node_modules && echo dep > node_modules/dep.js\n"
        "FROM box AS builder\nWORKDIR /app\nCOPY --from=deps /app/node_modules ./node_modules\nCOPY . .\nENV NEXT_TELEMETRY_DISABLED 1\n"
        "RUN mkdir -p .next/standalone .next/static && cp src/index.js .next/standalone/ && echo s > .next/static/s\n"
        "FROM box AS runner\nWORKDIR /app\nENV NODE_ENV production\nRUN addgroup -g 1001 -S nodejs && adduser -S -D -H -u 1001 nextjs\n"
        "COPY --from=builder /app/public ./public\nRUN mkdir .next && chown nextjs:nodejs .next\n"
        "COPY --from=builder --chown=nextjs:nodejs /app/.next/standalone ./\nCOPY --from=builder --chown=nextjs:nodejs /app/.next/static ./.next/static\n"
        'USER nextjs\nEXPOSE 3000\nENV PORT 3000\nCMD ["node", "server.js"]\n',
        {
            "package.json": "{}",
            "yarn.lock": "y",
            "src/index.js": "i",
            "public/p.txt": "p",
            ".dockerignore": "node_modules\n.next\nDockerfile*\n",
            "node_modules/old": "x",
        },
        title="node-three-stages",
    ),
    Case(
        "ARG GO_VERSION=box\nFROM ${GO_VERSION} AS build\nARG TARGETOS TARGETARCH\nWORKDIR /src\nRUN --mount=type=cache,target=/go/pkg/mod \\\n"
        "    --mount=type=bind,source=go.mod,target=go.mod \\\n    cat go.mod > /tmp/deps\nRUN --mount=type=cache,target=/root/.cache \\\n"
        "    --mount=type=bind,target=. \\\n    echo $TARGETOS/$TARGETARCH > /bin/server && cat main.go >> /bin/server && chmod +x /bin/server\n"
        'FROM scratch\nCOPY --from=build /etc/passwd /etc/passwd\nCOPY --from=build /bin/server /bin/\nUSER 65534:65534\nENTRYPOINT [ "/bin/server" ]\n',
        {"go.mod": "module m\n", "main.go": "package main\n"},
        title="go-scratch",
    ),
    Case(
        "FROM box AS chef\nWORKDIR /app\nFROM chef AS planner\nCOPY . .\nRUN cat Cargo.toml > recipe.json\nFROM chef AS builder\n"
        "COPY --from=planner /app/recipe.json recipe.json\nRUN cat recipe.json > deps\nCOPY . .\nRUN mkdir -p target/release && cat src/main.rs deps > target/release/app\n"
        'FROM plain AS runtime\nWORKDIR /app\nCOPY --from=builder /app/target/release/app /usr/local/bin\nENTRYPOINT ["/usr/local/bin/app"]\n',
        {"Cargo.toml": "[package]\n", "src/main.rs": "fn main() {}\n"},
        title="rust-chef",
    ),
    Case(
        "FROM box\nRUN addgroup -S app && adduser -S -D -H -G app app2\nCOPY --chmod=0755 docker-entrypoint.sh /usr/local/bin/\nCOPY --chown=app2:app app /home/app2/app\n"
        'WORKDIR /home/app2\nUSER app2\nVOLUME ["/data"]\nENTRYPOINT ["docker-entrypoint.sh"]\nCMD ["serve", "--port=80"]\nHEALTHCHECK --interval=5m --timeout=3s \\\n'
        "  CMD curl -f http://localhost/ || exit 1\n",
        {"docker-entrypoint.sh": ENTRY},
        title="entry-point",
    ),
    Case(
        'FROM box AS build\nCOPY site /site\nRUN for f in /site/*; do echo "<p>$(cat $f)</p>" > $f.html; done\nFROM box\nRUN rm -rf /srv/*\n'
        'COPY --from=build /site/*.html /srv/\nCOPY nginx.conf /etc/nginx/conf.d/default.conf\nEXPOSE 80\nSTOPSIGNAL SIGQUIT\nCMD ["nginx", "-g", "daemon off;"]\n',
        {"site/a": "a", "site/b": "b", "nginx.conf": "server {}\n"},
        title="static-site",
    ),
    Case(
        'FROM box\nENV TINI_VERSION v0.19.0\nADD p.tgz /opt\nRUN set -eux; \\\n\t\\\n# a comment within\n\tfor d in a b; do \\\n\t\tmkdir -p "/opt/$d"; \\\n\tdone; \\\n\techo done > /opt/done\n'
        'ENV PATH="/opt/a/bin:${PATH}"\nRUN echo $PATH > /path\n',
        title="official-image-style",
    ),
    Case(
        "ARG VERSION=1.0\nFROM box\nARG VERSION\nARG BUILD_DATE\nARG VCS_REF=unknown\nLABEL org.opencontainers.image.version=$VERSION \\\n"
        '      org.opencontainers.image.created=$BUILD_DATE \\\n      org.opencontainers.image.revision="$VCS_REF"\nRUN echo "${VERSION:?needed}" > /version\n',
        arguments={"VERSION": "2.1", "BUILD_DATE": "2020-01-01T00:00:00Z"},
        title="labels-from-arguments",
    ),
    Case(
        'FROM box AS base\nWORKDIR /app\nFROM base AS dev\nENV MODE=dev\nCMD ["dev"]\nFROM base AS test\nCOPY . .\nRUN test -f note\nFROM base AS prod\nENV MODE=prod\n'
        'COPY --from=test /app/app ./app\nCMD ["prod"]\n',
        target="prod",
        title="targets",
    ),
    Case(
        'FROM box\nCOPY <<-EOF /etc/app.ini\n\t[main]\n\tpath = ${HOME:-/root}\n\tname = app\nEOF\nCOPY <<"EOF" /usr/local/bin/run\n#!/bin/sh\necho "$@"\nEOF\n'
        "RUN chmod +x /usr/local/bin/run && /usr/local/bin/run a b > /said\nRUN <<EOF\nset -e\nmkdir -p /x/y\necho $(pwd) > /x/y/z\nEOF\n",
        title="here-documents",
    ),
    Case(
        "FROM box AS jdk\nWORKDIR /build\nCOPY pom.xml .\nRUN --mount=type=cache,target=/root/.m2 echo dep > /root/.m2/dep\nCOPY src ./src\nRUN mkdir -p target/dependency && tar cf target/app.jar -C src . "
        "&& (cd target/dependency; tar xf ../app.jar)\nFROM plain\nVOLUME /tmp\nARG DEPENDENCY=/build/target/dependency\nCOPY --from=jdk ${DEPENDENCY}/lib /app/lib\nCOPY --from=jdk ${DEPENDENCY}/META /app/META\n"
        'ENTRYPOINT ["java","-cp","app:app/lib/*","Main"]\n',
        {"pom.xml": "<p/>", "src/lib/l.jar": "l", "src/META/M": "m"},
        title="java-layers",
    ),
    Case(
        'FROM box\nRUN mkdir -p /usr/src/app\nWORKDIR /usr/src/app\nCOPY package*.json /usr/src/app/\nRUN cat package.json > installed\nCOPY . /usr/src/app\nCMD [ "npm", "start" ]\n',
        {
            "package.json": "{}",
            ".dockerignore": "*\n!package*.json\n!src\nsrc/**/*.test.js\n",
            "src/a.js": "a",
            "src/t/a.test.js": "t",
        },
        title="white-list",
    ),
    Case(
        "FROM box\nWORKDIR /var/www/html\nCOPY --chown=www:www . .\nCOPY --chown=nobody:nobody app /var/www/html/storage\nRUN find . -type d -exec chmod 755 {} \\; && find . -type f -exec chmod 644 {} +\nUSER nobody\n",
        title="php-permissions",
    ),
    Case(
        "FROM box\nARG UID=1000\nARG GID=1000\nRUN addgroup -g $GID dev && adduser -D -H -u $UID -G dev dev\nENV HOME=/home/dev\nRUN mkdir -p $HOME && chown $UID:$GID $HOME\nUSER dev\nWORKDIR $HOME\n"
        "COPY --chown=$UID:$GID .env .\nRUN cp .env copy && ln -s .env link\n",
        arguments={"UID": "1234"},
        title="developer-user",
    ),
    Case(
        "FROM box AS fetch\nRUN --mount=type=secret,id=token test -s /run/secrets/token && echo private > /private\nFROM box\nCOPY --link --from=fetch /private /opt/\nCOPY --link --chmod=755 app/run /usr/local/bin/\n",
        secrets={"token": "t"},
        title="private-dependency",
    ),
    Case(
        '# A test bed of an agent: a repository, its tests, tools.\nFROM box\nSHELL ["/bin/sh", "-o", "pipefail", "-c"]\nENV DEBIAN_FRONTEND=noninteractive TZ="Etc/UTC"\nWORKDIR /testbed\nCOPY . /testbed\n'
        'RUN echo ok | tee setup.log && rm -rf .git && mkdir -p /logs/{a,b} || true\nCOPY app/sub/ /tests/\nENTRYPOINT []\nCMD ["/bin/sh"]\n',
        title="agent-test-bed",
    ),
    Case(
        "FROM box AS a\nRUN mkdir -p /lib1 && echo 1 > /lib1/l.so.1.0 && ln -s l.so.1.0 /lib1/l.so.1 && ln -s l.so.1 /lib1/l.so\nFROM plain\nCOPY --from=a /lib1/l.so* /usr/lib/\nCOPY --from=a /lib1/l.so /lib/exact.so\n",
        title="shared-libraries",
    ),
    Case(
        "FROM box\nCOPY crontab /etc/cron.d/job\nRUN chmod 0644 /etc/cron.d/job && touch /var/log.txt && ln -sf /dev/stdout /var/access.log\nRUN mkdir -p /var/run/app && echo 1 > /var/run/app/pid\nCMD cron && tail -f /var/log.txt\n",
        {"crontab": "* * * * * root true\n"},
        title="cron",
    ),
    Case(
        "FROM box\nADD --chown=7:8 p.tgz p.txz /opt/\nADD p.tzst /opt/z/\nCOPY p.tar /opt/\nRUN cd /opt && tar xf p.tar -C z && rm p.tar\n",
        title="archives",
    ),
    Case(
        "FROM box as builder\nCOPY ./ /src\nRUN cd /src && mkdir dist && cp note dist/\nFROM box\nLABEL Name=app Version=0.0.1\nCOPY --from=builder /src/dist /dist\nCOPY --from=0 /src/app/sub /sub\nRUN ls -A /dist /sub > /ls\n",
        title="numbered-stage",
    ),
]
