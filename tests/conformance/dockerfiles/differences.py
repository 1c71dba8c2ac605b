"""Cases of the corpus whose outcome is another one here, each with its reason (docs/images.md), and the recorded ones."""

from __future__ import annotations

import re

from tests.conformance.dockerfiles.cases import Case

#: What a case's text matches -> why it differs. The first that fits; a case without a difference must match none.
_REASONS: tuple[tuple[str, str], ...] = (
    (r"--parents", "the reference, a build without its experimental flags, does not know the flag"),
    (r"COPY note /proc/x", "/proc is mounted in every sandbox: nothing can be copied into it"),
    (r"find \. -type d -exec chmod", "hard links of a layer stay hard links when a later RUN changes one of them"),
    (r"RUN kill -9 \$\$", "the shell of a RUN is process 1 with BuildKit, which no signal from within ends"),
    (r"RUN rm /etc/(passwd|group).*\nUSER", "RUN needs neither file for root and numbers, nor groups, as `docker run`"),
    (r"rm /etc/hosts", "/etc/hosts is a file of the tree; BuildKit mounts one of its own while a command runs"),
)


def reason(case: Case) -> str:
    """Why a case differs; "": it must not."""
    if case.target == "0":
        return "a target may also be named by its number"
    return next((why for pattern, why in _REASONS if re.search(pattern, case.text)), "")


#: Part of `make test`, against what the reference made of them (recorded.json).
RECORDED = (
    "COPY---chown=app:staff-app-/new-3565d3",
    "COPY---chmod=4755-app-/new-58a4e7",
    "COPY-note-/dangling-e388dd",
    "COPY-note-zeros-/m/-93f903",
    "COPY---exclude=**/*.md-.-/all/-cd5f42",
    "ADD-p.tgz-zeros-/u/-e88e6f",
    "COPY-E--F-/d/-$PATH-E-x-F-f0cf0f",
    "NV-V=a.tar.gz-ENV-X=${V-.*}-Y=${V-*.}-Z=${V/a/b}-W=${V//./_}-U=${V-.*}-T=${V-*.}-fc56e8",
    "imeout=2s---start-period=1m---start-interval=5s---retries=4-CMD-curl--f-x-exit-1-8659e3",
    "WORKDIR-/a//b/./c/-098559",
    "FROM-plain-AS-a-COPY-app-/x-FROM-scratch-COPY---from=a-/-/-caeea3",
    "COPY---from=5-/a-/b-f7b2e5",
    "FROM-scratch-COPY-.-/c/-9e22a6",
    "COPY-link-/srv/-ddc460",
    "FROM-scratch-COPY-.-/c/-a4efa7",
    "ADD---chmod=700-p.tgz-/u/-0a2ed2",
)

#: Of what is fetched.
REMOTE_DIFFERENCES = {
    "ADD --checksum={commit} {git}#v1 /x": "an annotated tag may be named by its commit; the reference knows its own"
    " checksum alone",
}

_OWN = "whiteouts hide what lower layers have, wherever they stand in their own (OCI); the overlay2 driver refuses"
_FOLLOWED = "the link is followed, as containerd does; overlay2 replaces it"
_TWICE = "the last entry of a name counts; docker load refuses the archive"
LAYER_DIFFERENCES: dict[str, str] = {
    "whiteout behind its own file": _OWN,
    "whiteout behind a directory": _OWN,
    "whiteout in the same layer alone": _OWN,
    "whiteout before a directory": "the directory is a new one (OCI); with overlay2 what the whiteout hid is there again",
    "opaque of the root": "it hides all lower layers (OCI); overlay2 has no opaque root",
    "files through a link to a directory": _FOLLOWED,
    "whiteout through a link": _FOLLOWED,
    "hard link across layers": "the target may lie in a lower layer, as with containerd; overlay2 refuses",
    "the same file twice": _TWICE,
    "the same directory twice": _TWICE,
    "file, then directory of its name": _TWICE,
    "directory, then file of its name": _TWICE,
    "sparse gnu": "a file with holes as GNU tar writes it by itself is taken; docker load refuses that kind of entry",
    "devices": "an image holds no device nodes",
    "attributes of overlay": "attributes of a file system's own use (trusted.*) are not taken from an archive",
}
