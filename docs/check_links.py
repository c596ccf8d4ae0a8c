"""Check the documentation against the tree: `python docs/check_links.py`.

Every relative link must lead to a file, every `#anchor` to a heading, and every path below one of
the source folders that a page names (`src/...`, `tests/...`) to something that exists. What a page
says about the code is wrong the day that the code moves; this finds it on that day.
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "bench/**/*.md", "deploy/**/*.md")
HISTORY = {"CHANGELOG.md"}  # may name what is gone

FENCE = re.compile(r"^\s*(```|~~~)")
CODE_SPAN = re.compile(r"`[^`]*`")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\s*\[[^\]]+\]:\s+(\S+)")
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
NAMED_PATH = re.compile(
    r"(?<![\w./-])((?:src|tests|docs|bench|examples|deploy)/[\w./-]*)([<{*…]?)",
)


def lines_of(page: Path) -> Iterator[tuple[int, str, bool]]:
    """Number, text and "inside a code block" of each line."""
    fenced = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if FENCE.match(line):
            fenced = not fenced
            continue
        yield number, line, fenced


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """The anchors that a page's headings get."""
    anchors: set[str] = set()
    for _, line, fenced in lines_of(page):
        heading = None if fenced else HEADING.match(line)
        if heading is None:
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.group(1)).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        repeats = 0
        anchor = slug
        while anchor in anchors:
            repeats += 1
            anchor = f"{slug}-{repeats}"
        anchors.add(anchor)
    return frozenset(anchors)


def broken_link(page: Path, target: str) -> str | None:
    """Why the link leads nowhere, or None."""
    if SCHEME.match(target) or target.startswith("//"):
        return None
    path_part, _, anchor = unquote(target).partition("#")
    destination = (page.parent / path_part).resolve() if path_part else page
    if not destination.is_relative_to(ROOT):
        return f"{target} leads out of the repository"
    if not destination.exists():
        return f"{target} does not exist"
    if anchor and destination.suffix == ".md" and anchor not in anchors_of(destination):
        return f"{target}: no such heading"
    return None


def missing_path(named: str, pattern: str) -> str | None:
    """Why the path that the text names is wrong, or None.

    A path that goes on with a pattern (`src/ackbone/brokers/<name>.py`) is checked up to its last
    whole folder.
    """
    path = named.rpartition("/")[0] if pattern else named.rstrip(".-")
    return None if (ROOT / path).exists() else f"{path} does not exist"


def findings(page: Path) -> Iterator[tuple[int, str]]:
    for number, line, fenced in lines_of(page):
        prose = line if fenced else CODE_SPAN.sub("", line)
        targets = () if fenced else (m.group(1) or m.group(2) for m in LINK.finditer(prose))
        for target in targets:
            if problem := broken_link(page, target):
                yield number, problem
        if page.name in HISTORY:
            continue
        for match in NAMED_PATH.finditer(line):
            if in_link(line, match.start()):
                continue  # checked above, relative to its page
            if problem := missing_path(*match.groups()):
                yield number, problem


def in_link(line: str, position: int) -> bool:
    return any(
        m.start(group) <= position < m.end(group)
        for m in LINK.finditer(line)
        for group in (1, 2)
        if m.group(group)
    )


def main() -> int:
    pages = sorted({page for pattern in PAGES for page in ROOT.glob(pattern)})
    count = 0
    for page in pages:
        for number, problem in findings(page):
            count += 1
            print(f"{page.relative_to(ROOT)}:{number}: {problem}")
    print(f"docs: {len(pages)} pages checked, {count} broken")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
