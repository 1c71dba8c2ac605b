#!/usr/bin/env bash
# The page for people, built from pagurus/page/front by Vite, from the packages that its lock names.
# usage: page.sh [browser]     browser: also what its tests need, Chromium from Debian and Playwright from PyPI
# An extra: without node the API and the command line work as always, and `/` says that the page is not built.
STEP=page
. "$(dirname "$0")/lib.sh"

FRONT=$ROOT/pagurus/page/front
BUILT=$ROOT/pagurus/page/built
PLAYWRIGHT=1.65.2
MIN_NODE=20.19.0
MAX_FETCH=600 # seconds for npm; a registry that does not answer holds up no set-up for longer

fingerprint() {
    (cd "$FRONT" && find . -path ./node_modules -prune -o -type f ! -name schema.ts -print0 | sort -z | xargs -0 cat) |
        cat - "$0" "$ROOT/pagurus/page/schema.py" | sha256sum | cut -d ' ' -f 1
}

build() {
    if [ "$(cat "$PREFIX/.page" 2>/dev/null || true)" = "$(fingerprint)" ] && [ -e "$BUILT/index.html" ]; then
        say "the page is built"
        return
    fi
    if ! command -v npm >/dev/null || ! version_at_least "$(node --version | tr -d v)" "$MIN_NODE"; then
        say "no node $MIN_NODE with npm here: the page for people is left out (install them, then make setup again)"
        return
    fi
    say "build the page for people (packages from npm, 70 MB, into $FRONT/node_modules)"
    ABOUT=60 quiet page-npm timeout "$MAX_FETCH" npm ci --prefix "$FRONT" --no-audit --no-fund --fetch-retries=1 || {
        say "npm could not install its packages, so the page is left out: see $LOGS/page-npm.log"
        return
    }
    "$VENV/bin/python" -m pagurus.page.schema "$FRONT/src/api/schema.ts"
    quiet page-build npm run build --prefix "$FRONT" || die "the page cannot be built" "see $LOGS/page-build.log"
    fingerprint >"$PREFIX/.page"
    say "the page is built"
}

install_chromium() {
    apt-get install -y --no-install-recommends chromium ||
        { apt-get update && apt-get install -y --no-install-recommends chromium; }
}

browser() {
    if ! command -v chromium >/dev/null; then
        say "install chromium, for the tests of the page (300 MB)"
        if ! ABOUT=60 quiet page-chromium install_chromium; then
            say "chromium could not be installed: tests in a browser are skipped"
            return
        fi
    fi
    "$VENV/bin/python" -c "import playwright" 2>/dev/null ||
        quiet page-playwright "$VENV/bin/python" -m pip --disable-pip-version-check install "playwright==$PLAYWRIGHT" ||
        say "playwright could not be installed: tests in a browser are skipped"
    say "a browser is there"
}

cd "$ROOT"
exec 9>"$PREFIX/page.lock"
flock 9
build
[ "${1:-}" != browser ] || browser
