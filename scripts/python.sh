#!/usr/bin/env bash
# The virtual environment .venv with exactly the versions of the locks, and this checkout in it.
# usage: python.sh hosts|train     hosts: daemon, SDK and tests' tools; train: torch and what training needs beside it
STEP=python
. "$(dirname "$0")/lib.sh"

PART=${1:-hosts}
LOCK=$ROOT/requirements.lock
TRAIN_LOCK=$ROOT/requirements-train.lock
# Where the CPU builds of torch lie. PyPI's own Linux builds bring CUDA, several gigabytes.
TORCH_CPU_INDEX=${PAGURUS_TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

fingerprint() { # fingerprint LOCK: of what that part is made of
    cat "$1" "$ROOT/pyproject.toml" "$0" | sha256sum | cut -d ' ' -f 1
}

up_to_date() { [ "$(cat "$VENV/.$1" 2>/dev/null || true)" = "$(fingerprint "$2")" ]; }

install_hosts() {
    if up_to_date hosts "$LOCK"; then
        say ".venv matches requirements.lock (pinned Python packages)"
        return
    fi
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        die "$PYTHON is missing or older than 3.11" "use Debian 12 or newer, or set PYTHON to a newer interpreter"
    say "create .venv from requirements.lock (about 60 MB from PyPI into $VENV)"
    # A set-up that was interrupted may have left half an environment.
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || quiet venv "$PYTHON" -m venv --clear "$VENV" ||
        die "no virtual environment could be made" "install python3-venv"
    ABOUT=40 quiet pip pip install -r "$LOCK" ||
        die "pip could not install requirements.lock" "check the network and $LOGS/pip.log, then run make setup again"
    quiet pip-self pip install --no-build-isolation --no-deps -e "$ROOT" ||
        die "this checkout could not be installed into .venv" "see $LOGS/pip-self.log"
    # pycriu is not on PyPI: it comes with CRIU.
    echo "$PREFIX/criu/python" >"$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pagurus-criu.pth"
    fingerprint "$LOCK" >"$VENV/.hosts"
    say ".venv is complete"
}

install_torch() {
    local version
    version=$(sed -n 's/^torch==//p' "$TRAIN_LOCK")
    if has_gpu; then
        say "a GPU is there: torch $version comes from PyPI with CUDA (several GB)"
        return
    fi
    say "install torch $version for the CPU (about 200 MB; no GPU here)"
    # What pip sees already, such as a folder of wheels; then the index of CPU builds; then PyPI's build with CUDA.
    quiet torch pip install --retries 1 "torch==$version+cpu" 2>/dev/null ||
        quiet torch pip install --retries 1 --extra-index-url "$TORCH_CPU_INDEX" "torch==$version+cpu" 2>/dev/null || {
        say "no CPU build of torch $version can be reached: take PyPI's own, with CUDA (several GB; it runs without a GPU)"
        quiet torch pip install "torch==$version" ||
            die "torch $version could not be installed for $("$VENV/bin/python" --version)" \
                "let pip see a build of it, for example with PIP_FIND_LINKS or PAGURUS_TORCH_CPU_INDEX; see $LOGS/torch.log"
    }
}

install_train() {
    if up_to_date train "$TRAIN_LOCK"; then
        say ".venv matches requirements-train.lock (torch and what training needs)"
        return
    fi
    install_torch
    quiet pip-train pip install -r "$LOCK" -r "$TRAIN_LOCK" ||
        die "pip could not install requirements-train.lock" "check the network and $LOGS/pip-train.log, then run make setup-train again"
    fingerprint "$TRAIN_LOCK" >"$VENV/.train"
    say "training can run"
}

case $PART in
hosts) install_hosts ;;
train) install_train ;;
*) die "no part $PART" "say hosts or train" ;;
esac
