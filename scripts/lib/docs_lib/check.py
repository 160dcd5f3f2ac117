"""Looks at the built site: every link leads somewhere, and every public name is in the reference.

python -m docs_lib.check SITE
"""

from __future__ import annotations

import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from docs_lib.public import forgotten, qualified


class _Page(HTMLParser):
    """What a page links to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.links += [value for name in ("href", "src") if (value := named.get(name))]
        self.anchors |= {value for name in ("id", "name") if (value := named.get(name))}


def documented(site: Path) -> set[str]:
    """Names with an entry in the reference, as the site's own inventory has them (Sphinx's format)."""
    *_, body = (site / "objects.inv").read_bytes().split(b"\n", 4)
    return {line.split(maxsplit=1)[0] for line in zlib.decompress(body).decode().splitlines()}


def dead_links(site: Path) -> tuple[int, list[str]]:
    """How many links within the site there are, and those that lead nowhere, anchors included."""
    pages = {path: _Page(path.read_text("utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    count, dead = 0, []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file() or (
                anchor and target in pages and anchor not in pages[target].anchors | {"__"}
            ):
                dead.append(f"{path.relative_to(site)}: {link}")
    return count, sorted(set(dead))


def main() -> int:
    """Says what is wrong; the exit code is 1 then."""
    site = Path(sys.argv[1]).resolve()
    names = qualified()
    missing = sorted(set(names) - documented(site))
    count, dead = dead_links(site)
    for title, items in (
        ("not in the reference", missing),
        ("exports names, but is on no page of the reference (scripts/lib/docs_lib/public.py)", forgotten()),
        ("a dead link", dead),
    ):
        for item in items:
            print(f"{title}: {item}", file=sys.stderr)
    if missing or dead or forgotten():
        return 1
    pages = sum(1 for _ in site.rglob("*.html"))
    print(f"{pages} pages, {len(names)} public names, {count} links within the site: none dead")
    return 0


if __name__ == "__main__":
    sys.exit(main())
