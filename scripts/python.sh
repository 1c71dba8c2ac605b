#!/usr/bin/env bash
# The virtual environment .venv with exactly the versions of requirements.lock, and this checkout in it.
STEP=python
. "$(dirname "$0")/lib.sh"

LOCK=$ROOT/requirements.lock
# Where the CPU build of torch lives when none of pip's configured sources has it.
TORCH_CPU_INDEX=${PAGURUS_TORCH_CPU_INDEX:-}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

fingerprint() { cat "$LOCK" "$ROOT/pyproject.toml" "$0" | sha256sum | cut -d ' ' -f 1; }

install_torch() {
    local version
    version=$(sed -n 's/^torch==//p' "$LOCK")
    if has_gpu; then
        say "a GPU is there: torch $version comes with CUDA"
        return
    fi
    say "install torch $version for the CPU (no GPU here; the CUDA build would be gigabytes)"
    quiet torch "$VENV/bin/pip" install "torch==$version+cpu" ||
        quiet torch "$VENV/bin/pip" install ${TORCH_CPU_INDEX:+--extra-index-url "$TORCH_CPU_INDEX"} "torch==$version+cpu" ||
        die "no CPU build of torch $version for $("$VENV/bin/python" --version)" \
            "let pip see one, for example with PIP_FIND_LINKS or PAGURUS_TORCH_CPU_INDEX"
}

main() {
    if [ "$(cat "$VENV/.fingerprint" 2>/dev/null || true)" = "$(fingerprint)" ]; then
        say ".venv matches requirements.lock (pinned Python packages)"
        return
    fi
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        die "$PYTHON is missing or older than 3.11" "use Debian 12 or newer, or set PYTHON to a newer interpreter"
    say "create .venv from requirements.lock (everybody runs the same versions)"
    [ -x "$VENV/bin/python" ] || quiet venv "$PYTHON" -m venv "$VENV" ||
        die "no virtual environment could be made" "install python3-venv"
    install_torch
    quiet pip "$VENV/bin/pip" install -r "$LOCK" ||
        die "pip could not install requirements.lock" "check the network and $LOGS/pip.log, then run make setup again"
    quiet pip-self "$VENV/bin/pip" install --no-build-isolation --no-deps -e "$ROOT" ||
        die "this checkout could not be installed into .venv" "see $LOGS/pip-self.log"
    # pycriu is not on PyPI: it comes with CRIU.
    echo "$PREFIX/criu/python" >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pagurus-criu.pth"
    fingerprint >"$VENV/.fingerprint"
    say ".venv is complete"
}

main
