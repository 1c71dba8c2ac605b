#!/usr/bin/env bash
# Debian packages that are unpacked, never installed, each pinned by its sha256 in scripts/debs.lock: what they are does
# not depend on a suite or on the date of an index.
# usage: debs.sh fetch SET INTO | lock    fetch: download the packages of SET into a directory; lock: pin the newest
STEP=debs
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

LOCK=$ROOT/scripts/debs.lock
declare -A SUITE=([criu]=forky [python]=bookworm)
declare -A PACKAGES=(
    [criu]='criu'
    [python]='python3.11-minimal libpython3.11-stdlib'
)

mirror() { # the machine's own; a snapshot archive has what mirrors no longer have
    local found=${PAGURUS_DEBIAN_MIRROR:-}
    [ -n "$found" ] ||
        found=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | head -n 1)
    [ -n "$found" ] || die "apt knows no Debian mirror" "add a Debian source to /etc/apt/sources.list and run apt-get update"
    printf '%s\n' "${found%/}"
}

fetch() { # fetch SET INTO
    local from set sum path
    from=$(mirror)
    mkdir -p "$2"
    while read -r set sum path; do
        [ "$set" = "$1" ] || continue
        quiet "deb-$1" /usr/lib/apt/apt-helper -o APT::Sandbox::User=root download-file \
            "$from/$path" "$2/$(basename "$path")" "SHA256:$sum" || {
            say "$(basename "$path"), which scripts/debs.lock pins, is not at $from"
            return 1
        }
    done <"$LOCK"
}

# An apt of its own: in it nothing is installed, so the libraries come along. Signatures are checked, dates are not: the
# index of testing and sid may be weeks old on a mirror.
private_apt() { # private_apt WORK SUITE ARGUMENT...
    local work=$1 suite=$2
    shift 2
    mkdir -p "$work"/{lists/partial,cache/archives/partial,sources}
    : >"$work/status"
    printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' \
        "$(mirror)" "$suite" >"$work/sources/newer.sources"
    apt-get -o Dir::State="$work" -o Dir::State::status="$work/status" -o Dir::Cache="$work/cache" \
        -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$work/sources" \
        -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
        -o APT::Install-Recommends=false -o Acquire::Languages=none -o Acquire::Check-Valid-Until=false \
        -o APT::Sandbox::User=root "$@" # the prefix may lie where apt's own user cannot read
}

lock() {
    local work set package from new=$LOCK.new
    from=$(mirror)
    sed -n '/^#/p' "$LOCK" >"$new"
    for set in criu python; do
        work=$(mktemp -d)
        quiet debs-index private_apt "$work" "${SUITE[$set]}" update || die "no index of ${SUITE[$set]}" "see $LOGS/debs-index.log"
        for package in ${PACKAGES[$set]}; do uris "$work" "$set" install "$package"; done >"$work/uris"
        [ "$set" = python ] || uris "$work" "$set" download python3-pycriu >>"$work/uris" # alone: .venv has a Python
        pins "$set" "$from" <"$work/uris" | sort -u -k 3 >>"$new"
        rm -rf "$work"
    done
    mv "$new" "$LOCK"
    say "pinned $(grep -vc '^#' "$LOCK") packages in scripts/debs.lock; run the tests with them"
}

uris() { # uris WORK SET VERB PACKAGE
    private_apt "$1" "${SUITE[$2]}" -o Acquire::ForceHash=SHA256 "$3" --print-uris -qq "$4"
}

pins() { # pins SET MIRROR: of apt's lines 'URI' FILE SIZE SHA256:SUM
    sed -nE "s#^'$2/([^']*)' [^ ]+ [0-9]+ SHA256:([0-9a-f]{64})\$#$1 \\2 \\1#p" | sort -k 3
}

case ${1:-} in
fetch) fetch "$2" "$3" ;;
lock) lock ;;
'') ;; # sourced by another script, for its functions
*) die "no verb $1" "say fetch or lock" ;;
esac
