"""The python blocks of the guides run, in the order of their page, as one program."""

import ast
import asyncio
import inspect
import re
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from ackbone import App

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FRAGMENT = "# A fragment"
PAGES = [ROOT / "README.md", ROOT / "docs/quickstart.md", *sorted(ROOT.glob("docs/guides/*.md"))]


def blocks_of(page: Path) -> Iterator[tuple[int, str]]:
    """First line and text of each python block."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        yield text.count("\n", 0, match.start(1)), match[1]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in: what a page makes stays in it."""
    with tempfile.TemporaryDirectory(prefix="ab-", dir="/tmp") as name:
        monkeypatch.chdir(name)
        yield Path(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page: Path, home: Path, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for line, block in blocks_of(page):
        fragment = block.startswith(FRAGMENT)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if fragment else 0
        code = compile("\n" * line + block, str(page), "exec", flags=flags)
        if fragment:
            asyncio.run(in_its_place(code, names))
        else:
            exec(code, names)


async def in_its_place(code: CodeType, names: dict[str, Any]) -> None:
    """A fragment stands in an async function, where the page's apps are open."""
    async with AsyncExitStack() as opened:
        for app in {value for value in names.values() if isinstance(value, App)}:
            await opened.enter_async_context(app)
        done = eval(code, names)
        if inspect.isawaitable(done):
            await done


def test_there_are_blocks_to_run() -> None:
    """Should the form of a block change, nothing would run, and nothing would fail."""
    assert sum(1 for page in PAGES for _ in blocks_of(page)) >= 20
