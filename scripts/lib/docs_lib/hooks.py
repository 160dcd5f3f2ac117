"""Hooks of mkdocs: pages from outside of docs/, links between them, and the API reference."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from docs_lib.public import PAGES, ROOT, forgotten, public_names

#: pages that are not in docs/, by their path in the repository
MOVED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)


def site_path(path: str) -> str:
    """Returns where the site has a file of the repository.

    Example:
        >>> site_path("docs/design.md"), site_path("README.md"), site_path("examples/digits.py")
        ('design.md', 'index.md', 'source/examples/digits.py.md')
    """
    if path in MOVED:
        return MOVED[path]
    if (ROOT / path).is_dir():
        path += "/index.md" if path.startswith("docs/") else "/index"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def target_of(link: str, page: str) -> str | None:
    """Returns the repository's file to which a page's link leads; None if it leads elsewhere.

    Args:
        link: as it is written, its anchor included.
        page: path of the page in the repository.
    """
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path))


def with_links(text: str, page: str) -> str:
    """Returns the page's text with its links changed for the site."""
    here = posixpath.dirname(site_path(page)) or "."

    def replace(match: re.Match[str]) -> str:
        target = target_of(match[2], page)
        if target is None:
            return match[0]
        anchor = match[2].partition("#")[1:]
        return match[1] + posixpath.relpath(site_path(target), here) + "".join(anchor) + match[3]

    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(replace, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(replace, text[end:])])


def reference_page(title: str, modules: list[str]) -> str:
    """Returns a page of the API reference, with an entry for every public name."""
    lines = [f"# {title}"]
    for module in modules:
        lines += ["", f"## {module}", ""]
        for name in public_names(module):
            lines += [f"::: {module}.{name}", "    options:", "      heading_level: 3"]
    return "\n".join([*lines, ""])


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not in docs/, what they and others link to, and the reference."""
    if missing := forgotten():
        raise PluginError(f"{missing} export names and are on no page of docs_lib/public.py's reference")
    for path, src in MOVED.items():
        files.append(File.generated(config, src, content=with_links((ROOT / path).read_text("utf-8"), path)))
    linked: set[str] = set()
    for page in [*MOVED, *(f"{path.relative_to(ROOT)}" for path in (ROOT / "docs").rglob("*.md"))]:
        text = _FENCE.sub("", (ROOT / page).read_text("utf-8"))
        targets = (target_of(match[2], page) for match in _LINK.finditer(text))
        linked |= {target for target in targets if target is not None} - {*MOVED}
    for path in sorted(linked):
        file = ROOT / path
        if file.is_dir():
            text = f"# {path}\n\n" + "".join(f"- `{item.name}`\n" for item in sorted(file.iterdir()))
            files.append(File.generated(config, site_path(path), content=text))
        elif file.is_file() and not path.startswith("docs/"):
            text = f"# {path}\n\n````python\n{file.read_text('utf-8')}\n````\n"
            files.append(File.generated(config, site_path(path), content=text))
    for name, (title, modules) in PAGES.items():
        files.append(File.generated(config, f"api/{name}.md", content=reference_page(title, modules)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links of pages in docs/ to what is outside of it."""
    path = f"docs/{page.file.src_uri}"
    if page.file.generated_by is None:
        return with_links(markdown, path)
    return markdown
