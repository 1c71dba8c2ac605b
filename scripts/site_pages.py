"""A hook of MkDocs: the site's pages that are not in docs/, and links that leave it.

::

    README.md, ARCHITECTURE.md, CONTRIBUTING.md, CHANGELOG.md ─▶ pages of the site, their links led to its pages
    `sandbox.__all__` ─▶ reference.md, one entry of mkdocstrings for each name, by the module that defines it
    a link from a page to a file of the tree ─▶ the file's path as code

`tests/test_pages.py` checks the same links in the tree, without MkDocs.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, name in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        for other, page in PAGES.items():
            text = text.replace(f"]({other}", f"]({page}")
        files.append(File.generated(config, name, content=text))
    files.append(File.generated(config, "reference.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    directory = Path(page.file.src_uri).parent

    def led(link: re.Match[str]) -> str:
        target = (ROOT / "docs" / directory / link[2]).resolve()
        if target.is_relative_to(ROOT / "docs") or link[2] in PAGES.values():
            return link[0]
        path = str(target.relative_to(ROOT))
        return link[0].replace(link[2], PAGES[path]) if path in PAGES else f"{link[1]} (`{path}`)"

    return LINK.sub(led, markdown)


def reference() -> str:
    """The SDK as `sandbox` exports it, grouped by module.

    >>> "::: sandbox.sdk.client.Client" in reference()
    True
    """
    tree = ast.parse((ROOT / "sandbox" / "__init__.py").read_text())
    modules = {
        alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sandbox.")
        for alias in node.names
    }
    groups = {"Clients and handles": "sandbox.sdk", "Values": "sandbox.messages", "Errors": "sandbox.errors"}
    lines = [
        "# SDK reference",
        "",
        "What `import sandbox` exports. `sandbox.sync` has the same names without `async` and `await`.",
    ]
    for title, package in groups.items():
        lines += ["", f"## {title}", ""]
        lines += [f"::: {module}.{name}" for name, module in sorted(modules.items()) if module.startswith(package)]
    return "\n".join(lines) + "\n"
