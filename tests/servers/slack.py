"""A server shaped like Slack's Web API, as its reference has it: messages are kept with their
metadata, and shown by the history, page by page."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from .receiver import reset

SCOPES = frozenset({"chat:write", "channels:history"})


class Slack:
    """One workspace. A bot that lacks a scope, or is told to wait, hears so."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.scopes = set(SCOPES)
        self.channels = {"C1"}
        self.asked: list[dict[str, str]] = []
        self.lost_answers = 0
        """So many messages are taken, and nobody is told."""
        self.dropped = 0
        """So many requests break off before anything is taken."""
        self.limited = 0
        """So many questions are refused."""
        self.most = 100
        """Messages of one page, whatever was asked for."""
        self.port = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def says(self, text: str, **fields: Any) -> dict[str, Any]:
        """Somebody writes a message."""
        ts = f"{time.time():.6f}"
        if self.messages and ts <= self.messages[-1]["ts"]:
            ts = f"{float(self.messages[-1]['ts']) + 0.000001:.6f}"
        message = {"type": "message", "text": text, "ts": ts, **fields}
        self.messages.append(message)
        return message

    async def post(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if self.dropped:
            self.dropped -= 1
            return await reset(request)
        if body["channel"] not in self.channels:
            return web.json_response({"ok": False, "error": "channel_not_found"})
        kept = {name: body[name] for name in ("thread_ts", "metadata") if name in body}
        message = self.says(body["text"], bot_id="B1", **kept)
        if self.lost_answers:
            self.lost_answers -= 1
            return await reset(request)
        return web.json_response({"ok": True, "channel": body["channel"], "ts": message["ts"]})

    async def history(self, request: web.Request) -> web.StreamResponse:
        """The newest first; no answers of threads."""
        found = [m for m in self.messages if m.get("thread_ts") in (None, m["ts"])]
        return await self._page(request, found[::-1])

    async def replies(self, request: web.Request) -> web.StreamResponse:
        """The oldest first, and the parent before all."""
        asked = await request.post()
        found = [m for m in self.messages if asked["ts"] in (m["ts"], m.get("thread_ts"))]
        return await self._page(request, found)

    async def _page(self, request: web.Request, found: list[dict[str, Any]]) -> web.StreamResponse:
        asked = {name: str(value) for name, value in (await request.post()).items()}
        self.asked.append(asked)
        if self.limited:
            self.limited -= 1
            return web.Response(status=429, headers={"Retry-After": "1"})
        if "channels:history" not in self.scopes:
            needed = {"error": "missing_scope", "needed": "channels:history"}
            return web.json_response({"ok": False, **needed})
        if asked["channel"] not in self.channels:
            return web.json_response({"ok": False, "error": "channel_not_found"})
        found = [m for m in found if float(m["ts"]) > float(asked.get("oldest", "0"))]
        begin, size = int(asked.get("cursor", "0")), min(self.most, int(asked["limit"]))
        shown = found[begin : begin + size]
        if asked.get("include_all_metadata") != "true":
            shown = [{name: m[name] for name in m if name != "metadata"} for m in shown]
        more = begin + size < len(found)
        cursor = {"next_cursor": str(begin + size) if more else ""}
        return web.json_response(
            {"ok": True, "messages": shown, "has_more": more, "response_metadata": cursor}
        )


@asynccontextmanager
async def slack() -> AsyncIterator[Slack]:
    server = Slack()
    app = web.Application()
    app.router.add_post("/api/chat.postMessage", server.post)
    app.router.add_post("/api/conversations.history", server.history)
    app.router.add_post("/api/conversations.replies", server.replies)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        await runner.cleanup()
