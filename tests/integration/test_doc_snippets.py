"""The python blocks of the guides run, in the order of their page, as one program.

The same text runs on each broker: `App()` is told by the environment alone where its queues are.
"""

import ast
import asyncio
import inspect
import re
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest

from ackbone import App, Context
from tests.integration.conftest import on_each_broker

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FRAGMENT = "# A fragment"
PAGES = [ROOT / "README.md", ROOT / "docs/quickstart.md", *sorted(ROOT.glob("docs/guides/*.md"))]
LIMIT_S = 60.0

NOT_ON_EACH_BROKER = {
    "adding-a-broker.md": "brings a broker of its own, and sends nothing to a queue",
    "channels.md": "channels alone: it has no app",
    "delivery-files.md": "a folder of files is the queue",
    "operating.md": "commands and settings; it has no program",
    "postgresql.md": "commands and settings of one store; it has no program",
    "queue-triggers.md": "the queue is the trigger's adapter",
    "rabbitmq.md": "commands and settings of one broker; it has no program",
    "redis.md": "commands and settings of one broker; it has no program",
    "testing.md": "a test of a user's program names its folder and nothing else: an embedded file",
}
"""Pages whose examples do not run on each broker, and why not."""


class Story(NamedTuple):
    """What the text of a page says and no block of it shows."""

    ends: dict[tuple[str, str], int]
    """How many messages of each type are in each state, in the end."""
    send: tuple[tuple[str, Any], ...] = ()
    """Messages that the page leaves to its reader, sent after its blocks ran."""
    handle: tuple[str, ...] = ()
    """Types that the page sends to handlers that it does not show."""
    replies: tuple[str, ...] = ()
    """In the order of the alphabet."""


STORIES = {
    "README.md": Story(
        send=(("order", {}),),
        ends={("order", "succeeded"): 1, ("parcel", "succeeded"): 1},
        replies=("Thank you, a parcel is on its way.",),
    ),
    "quickstart.md": Story(
        send=(("question", {"text": "what is durable?"}),),
        ends={("question", "succeeded"): 1},
        replies=("You asked: what is durable? (attempt 1)",),
    ),
    "dead-letters.md": Story(ends={("import", "failed"): 1}),
    "deliveries.md": Story(
        send=(("order", {}),),
        ends={("order", "succeeded"): 1},
        replies=(
            "Good morning.",
            "One more parcel.",
            "Thank you, a parcel is on its way.",
        ),
    ),
    "effects-once.md": Story(
        send=(("invoice", {}),),
        ends={("order", "succeeded"): 1, ("booking", "succeeded"): 1, ("invoice", "succeeded"): 1},
    ),
    "governance.md": Story(
        ends={("payout", "rejected"): 1, ("payout", "succeeded"): 1, ("payout", "parked"): 1}
    ),
    "ordering.md": Story(ends={("said", "succeeded"): 4}),
    "sending.md": Story(
        send=(("order", {"id": "o-1"}),),
        handle=("greeting", "charge"),
        ends={
            ("greeting", "succeeded"): 506,
            ("charge", "succeeded"): 1,
            ("charge", "duplicate"): 1,
            ("order", "succeeded"): 1,
        },
    ),
    "several-brokers.md": Story(
        send=(("order", {"id": "o-1"}),),
        ends={("order", "succeeded"): 1},
    ),
    "writing-handlers.md": Story(
        send=(
            ("report", {}),
            ("invoice", {"amount": 1}),
            ("invoice", {}),
            ("invoice", {"amount": 1, "ledger": "closed"}),
            ("summary", {}),
            ("triage", {}),
            ("triage", {"spam": True}),
            ("triage", {"language": "unknown"}),
            ("triage", {"needs": "approval"}),
        ),
        ends={
            ("greeting", "succeeded"): 2,
            ("report", "succeeded"): 1,
            ("invoice", "succeeded"): 1,
            ("invoice", "failed"): 1,
            ("invoice", "parked"): 1,
            ("summary", "succeeded"): 1,
            ("triage", "succeeded"): 1,
            ("triage", "rejected"): 1,
            ("triage", "failed"): 1,
            ("triage", "parked"): 1,
        },
        replies=("Hello, Ada", "Hello, Bo", "Your report is ready."),
    ),
}


def blocks_of(page: Path) -> Iterator[tuple[int, str]]:
    """First line and text of each python block."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        yield text.count("\n", 0, match.start(1)), match[1]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in: what a page makes stays in it."""
    with tempfile.TemporaryDirectory(prefix="ab-", dir="/tmp") as name:
        monkeypatch.chdir(name)
        yield Path(name)


def run_blocks(page: Path) -> dict[str, Any]:
    """Run the blocks of a page as one program. Returns its names."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for line, block in blocks_of(page):
        fragment = block.startswith(FRAGMENT)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if fragment else 0
        code = compile("\n" * line + block, str(page), "exec", flags=flags)
        if fragment:
            asyncio.run(in_its_place(code, names))
        else:
            exec(code, names)
    return names


async def in_its_place(code: CodeType, names: dict[str, Any]) -> None:
    """A fragment stands in an async function, where the page's apps are open."""
    async with AsyncExitStack() as opened:
        for app in {value for value in names.values() if isinstance(value, App)}:
            await opened.enter_async_context(app)
        done = eval(code, names)
        if inspect.isawaitable(done):
            await done


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name in NOT_ON_EACH_BROKER], ids=named
)
def test_blocks_run(page: Path, home: Path, folder: Path) -> None:
    run_blocks(page)


@on_each_broker
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in NOT_ON_EACH_BROKER], ids=named
)
def test_blocks_run_on_each_broker(page: Path, broker: str, home: Path, folder: Path) -> None:
    """What they assert holds, and so does what the page says about messages that it leaves to its
    reader."""
    story, app = STORIES[page.name], run_blocks(page)["app"]

    async def noop(ctx: Context) -> None:
        """The handler of a message whose page says nothing about it."""

    for kind in story.handle:
        app.on(kind)(noop)

    async def read_on() -> None:
        async with app:
            for queue in {sub.queue for sub in app.subscriptions()}:
                assert type(app.brokers.of(queue)).__module__.startswith(
                    f"ackbone.brokers.{broker}"
                )
            for kind, payload in story.send:
                (queue, *_) = [name for name, kinds in app.handled_types().items() if kind in kinds]
                await app.send(kind, payload, queue=queue)
            if story.send:
                async with asyncio.timeout(LIMIT_S):
                    await app.work(until_idle=True)

    asyncio.run(read_on())
    with closing(sqlite3.connect(home / "ackbone.db")) as conn:
        ends = conn.execute("SELECT event_name, status FROM queue_executions").fetchall()
        replies = conn.execute("SELECT content FROM deliveries ORDER BY content").fetchall()
    assert Counter(ends) == story.ends
    assert [content for (content,) in replies] == list(story.replies)


def test_each_page_is_told_or_excused() -> None:
    """A new page needs a story, or a reason; one that is gone needs neither."""
    assert sorted([*STORIES, *NOT_ON_EACH_BROKER]) == sorted(page.name for page in PAGES)


def test_there_are_blocks_to_run() -> None:
    """Should the form of a block change, nothing would run, and nothing would fail."""
    assert sum(1 for page in PAGES for _ in blocks_of(page)) >= 20
