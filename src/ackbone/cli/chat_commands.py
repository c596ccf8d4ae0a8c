"""The input of `ackbone chat`: messages to the agent, and commands that begin with a slash."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ackbone.admin.deliveries import UNDELIVERED, WAITING, Deliveries, short_names
from ackbone.core import events
from ackbone.core.errors import AckboneError, Ambiguous
from ackbone.core.ids import new_id
from ackbone.core.outbound.delivery import Status
from ackbone.core.outbound.delivery_records import DeliveryRecord
from ackbone.delivery.channels.terminal_channel import CHANNEL

from .chat_channel import ChatChannel
from .chat_screen import Screen
from .deliveries import age, next_attempt, status_word
from .output import safe

if TYPE_CHECKING:
    from ackbone.app import App
    from ackbone.core.events import Event

ORDER = "chat"
"""The ordering key of all messages, so that the conversation continues after a restart."""
_MOST = 50
_LATER = frozenset({events.RETRIED, events.PARKED})
_WELL = frozenset({events.SUCCEEDED, events.DUPLICATE})
HELP = """\
each line is sent to the agent; a line that begins with // is sent with one slash less
  /queue                list replies that wait to be sent
  /failed               list replies that failed or may have arrived
  /retry ID             send a reply again; the beginning of its id is enough
  /simulate-failure N   let the next N sends fail
  /help                 show this text
  /quit                 leave, as Ctrl+D and Ctrl+C do; waiting replies are kept"""


class Conversation:
    """One person's conversation with an open app."""

    def __init__(
        self,
        app: App,
        screen: Screen,
        replies: Deliveries,
        channel: ChatChannel,
        *,
        type: str,
        queue: str,
    ) -> None:
        self._app = app
        self._screen = screen
        self._replies = replies
        self._channel = channel
        self._type = type
        self._queue = queue
        self._unanswered: set[str] = set()
        self._answered = asyncio.Event()
        self._commands: dict[str, Callable[[str], Awaitable[None]]] = {
            "/queue": self._show_queue,
            "/failed": self._show_failed,
            "/retry": self._retry,
            "/simulate-failure": self._simulate,
            "/help": self._help,
        }
        app.observe(self._hear)

    async def take(self, line: str) -> bool:
        """Send a line, or carry out a command. Return False for /quit."""
        line = line.strip()
        word, _, rest = line.partition(" ")
        if word == "/quit":
            return False
        try:
            if word in self._commands:
                await self._commands[word](rest.strip())
            elif line.startswith("/") and not line.startswith("//"):
                self._screen.show(f"there is no command {safe(word)}; /help lists them")
            elif line:
                await self._send(line.removeprefix("/") if line.startswith("//") else line)
        except AckboneError as error:
            self._screen.show(f"ackbone: {safe(error)}")
            for match in error.matches if isinstance(error, Ambiguous) else ():
                self._screen.show(f"  {safe(match)}")
        return True

    async def answered(self) -> None:
        """Return once every message has been run, parked or scheduled for a retry."""
        while self._unanswered:
            self._answered.clear()
            await self._answered.wait()

    async def _send(self, text: str) -> None:
        message_id = new_id()
        self._unanswered.add(message_id)
        try:
            await self._app.send(
                self._type, {"text": text}, queue=self._queue, id=message_id, channel=CHANNEL,
                ordering_key=ORDER,
            )  # fmt: skip
        except AckboneError:
            self._unanswered.discard(message_id)
            raise

    def _hear(self, event: Event) -> None:
        if event.type not in events.FINAL_EVENTS | _LATER:
            return
        self._unanswered.discard(event.task_id)
        self._answered.set()
        if event.type in _WELL:
            return
        reason = event.data.get("error") or event.data.get("reason") or ""
        word = event.type.removeprefix("task.")
        hint = {
            events.FAILED: f"; ackbone dlq show {event.task_id}",
            events.PARKED: f"; ackbone parked show {event.task_id}",
        }.get(event.type, "")
        self._screen.show(safe(f"[message] {word}: {reason}{hint}"))

    # -- commands ---------------------------------------------------------------------------------

    async def _show_queue(self, rest: str) -> None:
        for name, each in await self._named(WAITING, "no waiting replies: all were sent"):
            waits = each.status == "pending"
            then = f"next attempt {next_attempt(each)}" if waits else status_word(each)
            retries = "1 retry" if each.retry_count == 1 else f"{each.retry_count} retries"
            self._screen.show(
                f"  {name} -> {safe(each.channel)}, {age(each)} old, {retries}, {then}"
            )

    async def _show_failed(self, rest: str) -> None:
        for name, each in await self._named(UNDELIVERED, "no failed replies"):
            self._screen.show(
                f"  {name} -> {safe(each.channel)}, {status_word(each)}, {age(each)} old: "
                f"{safe(each.last_error or '-')}"
            )

    async def _named(
        self, statuses: Sequence[Status], nothing: str
    ) -> Iterable[tuple[str, DeliveryRecord]]:
        found = await self._replies.listed(statuses, limit=_MOST)
        if not found:
            self._screen.show(nothing)
        return zip(map(safe, short_names([each.id for each in found])), found, strict=True)

    async def _retry(self, rest: str) -> None:
        if not rest:
            self._screen.show("write /retry ID; /failed and /queue list the ids")
            return
        record = await self._replies.find(rest)
        async for treated in self._replies.retry([record.id]):
            if treated.error is not None:
                raise treated.error
        (name,) = short_names([record.id])
        self._screen.show(f"{safe(name)} is due again")

    async def _simulate(self, rest: str) -> None:
        if not rest.isdecimal():
            self._screen.show("write a number: /simulate-failure 3")
            return
        self._channel.failures = count = int(rest)
        self._screen.show(
            "the next send will fail" if count == 1 else f"the next {count} sends will fail"
        )

    async def _help(self, rest: str) -> None:
        self._screen.show(HELP)
