"""Channels of the configuration: made by the class of their kind, or refused with a hint."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from ackbone import App
from ackbone.composition.background import relays_of
from ackbone.config import load_config
from ackbone.core.breaker import Breaker, BreakerPolicy
from ackbone.core.errors import ConfigError
from ackbone.core.outbound.delivery import Again, Limit, Outbound
from ackbone.delivery.attempts import Route, attempt
from ackbone.delivery.channels.folder_channel import FolderChannel
from ackbone.delivery.channels.slack_channel import SlackChannel
from ackbone.delivery.channels.telegram_channel import TelegramChannel
from ackbone.delivery.channels.terminal_channel import TerminalChannel

TOKEN = "123456:very-secret"


def app_with(home: Path, text: str) -> App:
    (home / "ackbone.yaml").write_text(text)
    return App(load_config(home / "ackbone.yaml", environ={"BOT": TOKEN}, cwd=home))


def test_a_channel_is_made_by_its_name_or_its_kind(home: Path) -> None:
    app = app_with(
        home,
        """
channels:
  telegram: {connection: {token: "${BOT}"}, timeout_s: 7}
  ops: {kind: slack, connection: {token: xoxb-1}, on_unknown: hold}
delivery: {wait_scale: 0.5}
""",
    )
    telegram, ops = app.carried()
    assert isinstance(telegram.channel, TelegramChannel)
    assert isinstance(ops.channel, SlackChannel)
    assert (telegram.channel.name, ops.channel.name) == ("telegram", "ops")
    assert (telegram.policy.hold_unknown, ops.policy.hold_unknown) == (False, True)
    assert ops.policy.wait_scale == 0.5
    assert app.carried() == [telegram, ops], "made once"


def test_a_folder_is_a_channel(home: Path) -> None:
    queue_dir = home / "replies"
    app = app_with(
        home, f"channels: {{handover: {{kind: folder, connection: {{queue_dir: {queue_dir}}}}}}}"
    )
    (carried,) = app.carried()
    assert isinstance(carried.channel, FolderChannel)
    assert carried.channel.name == "handover"
    assert (queue_dir / "failed").is_dir()
    (home / "taken").write_text("a file")
    app = app_with(home, f"channels: {{folder: {{connection: {{queue_dir: {home}/taken/x}}}}}}")
    with pytest.raises(ConfigError, match="cannot be a folder of replies"):
        app.carried()


@pytest.mark.parametrize(
    ("text", "own_s", "limit_s"),
    [
        ("channels: {telegram: {connection: {token: '1:a'}}}", 20, 60),
        ("channels: {telegram: {connection: {token: '1:a'}, timeout_s: 7}}", 7, 7),
        ("channels: {telegram: {connection: {token: '1:a'}, timeout_s: 90}}", 90, 90),
        ("channels: {telegram: {connection: {token: '1:a'}}}\ndelivery: {timeout_s: 5}", 5, 5),
        ("channels: {telegram: {connection: {token: '1:a', timeout_s: 3}, timeout_s: 7}}", 3, 7),
        ("channels: {telegram: {connection: {token: '1:a', timeout_s: 30}, timeout_s: 7}}", 7, 7),
    ],
)
def test_a_channel_gives_up_before_its_call_is_cut(
    home: Path, text: str, own_s: float, limit_s: float
) -> None:
    """It knows whether it was sent; whoever cuts the call does not."""
    (telegram,) = app_with(home, text).carried()
    assert isinstance(telegram.channel, TelegramChannel)
    assert telegram.channel._timeout.total == own_s
    assert limit_s < telegram.policy.timeout_s <= limit_s + 1


async def test_a_connection_that_is_not_made_in_time_is_no_doubt(home: Path) -> None:
    ended = asyncio.Event()

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    server = await asyncio.start_server(nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    app = app_with(
        home,
        f"""
channels:
  telegram: {{connection: {{token: '1:a', base_url: "https://127.0.0.1:{port}"}}, timeout_s: 1}}
  email: {{connection: {{host: 127.0.0.1, port: {port}, sender: a@example.com}}, timeout_s: 1}}
""",
    )
    for carried, recipient in zip(app.carried(), ("4711", "b@example.com"), strict=True):
        reply = Outbound(
            id="r", tenant_id="t", channel="c", recipient=recipient, content="x", call=1
        )
        route = Route(
            channel=carried.channel,
            policy=carried.policy,
            splits=None,
            reconciles=None,
            breaker=Breaker(BreakerPolicy(), time.monotonic),
            destination=Limit("gate"),
            narrowest=Limit("gate"),
            widest=Limit("gate"),
        )
        ((result,), _) = await attempt([reply], reply, route)
        assert isinstance(result, Again)
        assert not result.in_doubt, result.error
        await carried.channel.close()
    ended.set()
    server.close()


def test_the_programs_own_goes_before_the_configurations(home: Path) -> None:
    app = app_with(home, "channels: {telegram: {connection: {token: nonsense}}}")
    own = TerminalChannel()
    own.name = "telegram"
    app.channel(own)
    (carried,) = app.carried()
    assert carried.channel is own
    with pytest.raises(ConfigError, match="two channels with the name 'telegram'"):
        app.channel(own)


async def test_a_worker_says_which_subscribers_it_cannot_tell(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = app_with(
        home,
        """
channels: {ops: {kind: slack, connection: {token: xoxb-1}}}
subscribers:
  dashboard: {channel: webhook, to: "https://example.org/", events: [task.failed]}
  people: {channel: ops, to: C1, events: [task.failed]}
""",
    )
    async with app:
        relays_of(app, spawn_solo=False)
        (record,) = [each for each in caplog.records if each.levelname == "WARNING"]
        assert "no channel 'webhook'" in record.getMessage()
        caplog.clear()
        own = TerminalChannel()
        own.name = "webhook"
        app.channel(own)
        relays_of(app, spawn_solo=False)
        app.subscribe("nowhere", "x", events=["task.failed"])
        relays_of(app, spawn_solo=False, carry=False)
        assert not caplog.records, "who carries nothing need not have it"


def test_secrets_are_not_shown(home: Path) -> None:
    app = app_with(home, 'channels: {telegram: {connection: {token: "${BOT}"}}}')
    assert TOKEN not in repr(app.config)
    shown = {each.path: each.value for each in app.config.describe()}
    assert "very-secret" not in str(shown["channels.telegram.connection.token"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pigeon: {connection: {}}", "no kind 'pigeon'; write `kind:` with telegram"),
        ("telegram: {connection: {}}", "channels.telegram.connection.token: is missing"),
        (
            "telegram: {connection: {token: '1:a', colour: red}}",
            "connection.colour: unknown; known: token",
        ),
        ("telegram: {connection: {token: nonsense}}", "the token is not that of a Telegram bot"),
        ("email: {connection: {host: h}}", "channels.email.connection.sender: is missing"),
    ],
)
def test_mistakes_are_named(home: Path, text: str, words: str) -> None:
    app = app_with(home, f"channels: {{{text}}}")
    with pytest.raises(ConfigError) as caught:
        app.carried()
    assert words in str(caught.value)


def test_an_extra_that_is_missing_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    def gone(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'aiohttp'", name="aiohttp")

    app = app_with(home, "channels: {telegram: {connection: {token: '1:a'}}}")
    monkeypatch.setattr(importlib, "import_module", gone)
    with pytest.raises(ConfigError, match="needs aiohttp: install the extra 'telegram'"):
        app.carried()
