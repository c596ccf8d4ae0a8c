"""A Bot API server on loopback, with Telegram's rules and limits, that can be made to fail.

In a test: `async with telegram_server() as server:` and `server.url`. As a process of its own:
`python -m tests.servers.telegram PORT`; then `GET /_test/log` and `POST /_test/faults`,
`/_test/chats` do what the methods of `TelegramServer` do.

Any well-formed token is a bot's, and any chat is there, unless the server was told otherwise.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, Literal

from aiohttp import web

from tests.servers.receiver import reset
from tests.servers.telegram_rules import (
    TOKEN,
    Refused,
    Windows,
    check_album,
    check_caption,
    check_keyboard,
    check_text,
)

Kind = Literal["hang", "reset", "slow", "answer", "garbage"]
ChatState = Literal["missing", "blocked", "kicked"]
SENDS = {
    "sendmessage": "text",
    "sendphoto": "photo",
    "sendvideo": "video",
    "senddocument": "document",
    "sendaudio": "audio",
}
STATES: dict[str, tuple[int, str]] = {
    "missing": (400, "Bad Request: chat not found"),
    "blocked": (403, "Forbidden: bot was blocked by the user"),
    "kicked": (403, "Forbidden: bot was kicked from the group chat"),
}


@dataclass(frozen=True)
class Fault:
    """Happens to the next call. `after`: the message is taken, and only its answer is lost."""

    kind: Kind
    after: bool = False
    seconds: float = 0.0
    """Of `slow`."""
    code: int = 500
    """Of `answer`."""
    description: str = "Internal Server Error"
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass
class Entry:
    """A call: when it came, by the clock of this machine, and what was answered."""

    at_s: float
    method: str
    bot: str
    chat: str
    code: int
    description: str = ""
    text: str = ""
    message_ids: list[int] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)


class TelegramServer:
    """Bots, chats and messages. `log` has every call, in the order of arrival."""

    def __init__(self, windows: Windows | None = None) -> None:
        self.windows = windows or Windows()
        self.log: list[Entry] = []
        self.faults: deque[Fault] = deque()
        self.chats: dict[str, ChatState] = {}
        self.moved: dict[str, int] = {}
        """Groups that became supergroups, and their new numbers."""
        self.refused_tokens: set[str] = set()
        self.url = ""
        self._texts: dict[tuple[str, int], str] = {}
        self._ids = count(1)
        self._released = asyncio.Event()

    @property
    def messages(self) -> list[Entry]:
        """What was taken."""
        return [entry for entry in self.log if entry.message_ids]

    def release(self) -> None:
        """Ends what hangs."""
        self._released.set()

    # -- calls ------------------------------------------------------------------------------------

    async def call(self, request: web.Request) -> web.StreamResponse:
        token, method = request.match_info["token"], request.match_info["method"].lower()
        arguments = await request.json() if request.can_read_body else {}
        chat = str(arguments.get("chat_id", ""))
        entry = Entry(time.time(), method, token.partition(":")[0], chat, 200)
        entry.arguments = arguments
        self.log.append(entry)
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and not fault.after:
            early = await self._fail(request, fault, entry)
            if early is not None:
                return early
        try:
            body = {"ok": True, "result": self._take(token, method, entry)}
        except Refused as no:
            body = _refusal(entry, no)
        if fault is not None and fault.after:
            late = await self._fail(request, fault, entry)
            if late is not None:
                return late
        return web.json_response(body, status=entry.code)

    def _take(self, token: str, method: str, entry: Entry) -> Any:
        if not TOKEN.fullmatch(token):
            raise Refused(404, "Not Found")
        if token in self.refused_tokens:
            raise Refused(401, "Unauthorized")
        if entry.chat in self.chats:
            raise Refused(*STATES[self.chats[entry.chat]])
        if entry.chat in self.moved:
            raise Refused(
                400,
                "Bad Request: group chat was upgraded to a supergroup chat",
                migrate_to_chat_id=self.moved[entry.chat],
            )
        arguments = entry.arguments
        if method == "getme":
            return {"id": int(entry.bot), "is_bot": True, "first_name": "Test"}
        check_keyboard(arguments.get("reply_markup"))
        if method == "editmessagetext":
            return self._edited(entry, arguments)
        if method == "sendmediagroup":
            album = check_album(arguments.get("media"))
            self.windows.take(entry.bot, entry.chat, entry.at_s)
            entry.text = check_caption(album[0])
            return [self._kept(entry, "") for _ in album]
        if method not in SENDS:
            raise Refused(404, "Not Found: method not found")
        if method == "sendmessage":
            text = check_text(arguments.get("text"), arguments.get("parse_mode"))
        else:
            if not arguments.get(SENDS[method]):
                raise Refused(400, f"Bad Request: there is no {SENDS[method]} in the request")
            text = check_caption(arguments)
        self.windows.take(entry.bot, entry.chat, entry.at_s)
        entry.text = text
        return self._kept(entry, text)

    def _kept(self, entry: Entry, text: str) -> dict[str, Any]:
        number = next(self._ids)
        entry.message_ids.append(number)
        self._texts[entry.chat, number] = text
        return {"message_id": number, "chat": {"id": entry.chat}, "date": int(entry.at_s)}

    def _edited(self, entry: Entry, arguments: dict[str, Any]) -> dict[str, Any]:
        text = check_text(arguments.get("text"), arguments.get("parse_mode"))
        number = int(arguments["message_id"])
        if (entry.chat, number) not in self._texts:
            raise Refused(400, "Bad Request: message to edit not found")
        if self._texts[entry.chat, number] == text:
            raise Refused(
                400,
                "Bad Request: message is not modified: specified new message content and reply "
                "markup are exactly the same as a current content and reply markup of the message",
            )
        self.windows.take(entry.bot, entry.chat, entry.at_s)
        self._texts[entry.chat, number] = entry.text = text
        entry.message_ids.append(number)
        return {"message_id": number, "chat": {"id": entry.chat}, "date": int(entry.at_s)}

    def text_of(self, chat: str, message_id: int) -> str:
        return self._texts[chat, message_id]

    # -- faults -----------------------------------------------------------------------------------

    async def _fail(
        self, request: web.Request, fault: Fault, entry: Entry
    ) -> web.StreamResponse | None:
        entry.description = f"fault: {fault.kind}"
        if fault.kind == "slow":
            await asyncio.sleep(fault.seconds)
            return None
        if fault.kind == "answer":
            no = Refused(fault.code, fault.description, **fault.parameters)
            return web.json_response(_refusal(entry, no), status=fault.code)
        if fault.kind == "garbage":
            entry.code = fault.code
            page = f"<html>{request.path} is not here</html>"
            return web.Response(status=fault.code, text=page, content_type="text/html")
        entry.code = 0
        if fault.kind == "hang":
            await self._released.wait()
        return await reset(request)

    # -- for a process of its own -----------------------------------------------------------------

    async def control(self, request: web.Request) -> web.StreamResponse:
        what = request.match_info["what"]
        if what == "log":
            return web.json_response([asdict(entry) for entry in self.log])
        said = await request.json()
        if what == "faults":
            self.faults.extend(Fault(**fault) for fault in said)
        elif what == "chats":
            self.chats.update(said)
        else:
            raise web.HTTPNotFound
        return web.json_response({"ok": True})

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/bot{token}/{method}", self.call)
        app.router.add_route("*", "/_test/{what}", self.control)
        return app


def _refusal(entry: Entry, no: Refused) -> dict[str, Any]:
    entry.code, entry.description = no.code, no.description
    body: dict[str, Any] = {"ok": False, "error_code": no.code, "description": no.description}
    if no.parameters:
        body["parameters"] = no.parameters
    return body


@asynccontextmanager
async def telegram_server(
    windows: Windows | None = None, *, port: int = 0
) -> AsyncIterator[TelegramServer]:
    server = TelegramServer(windows)
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        server.release()
        await runner.cleanup()


async def serve(port: int) -> None:
    """Until it is killed. Says its address in one line when it listens."""
    async with telegram_server(port=port) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
