"""Make the `channels` and `subscribers` of ackbone.yaml. `KINDS` names the class of each kind."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any

from ackbone.core.errors import ConfigError
from ackbone.core.extras import install_extra
from ackbone.core.outbound.subscribers import Subscriber, Subscribers
from ackbone.core.secret import Secret

if TYPE_CHECKING:
    from ackbone.config import Config
    from ackbone.config.settings import Channel as Settings
    from ackbone.core.outbound.delivery import Channel

KINDS = {
    "telegram": "telegram_channel:TelegramChannel",
    "discord": "discord_channel:DiscordChannel",
    "slack": "slack_channel:SlackChannel",
    "email": "email_channel:EmailChannel",
    "webhook": "webhook_channel:WebhookChannel",
    "apprise": "apprise_channel:AppriseChannel",
    "folder": "folder_channel:FolderChannel",
}


GRACE_S = 1.0
"""A call is cancelled this long after its channel should have given it up by itself."""


def make_channel(name: str, settings: Settings, *, within_s: float) -> Channel:
    """Make one channel. `within_s` is the time limit of a call, which the channel gets: only the
    channel knows whether a call that it gives up was sent.

    Raises ConfigError for an unknown kind, a missing extra and a wrong `connection`.
    """
    kind = settings.kind or name
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise ConfigError([f"channels.{name}: no kind {kind!r:.40}; write `kind:` with {known}"])
    module, _, attribute = KINDS[kind].partition(":")
    try:
        made_by = getattr(importlib.import_module(f"ackbone.delivery.channels.{module}"), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError([f"channels.{name} needs {error.name}: {install_extra(kind)}"]) from error
    arguments = {key: _revealed(value) for key, value in settings.connection.items()}
    _check(made_by, arguments, name)
    usual = inspect.signature(made_by).parameters.get("timeout_s")
    try:
        if usual is not None:
            own_s = arguments.get("timeout_s", settings.timeout_s or usual.default)
            arguments["timeout_s"] = min(within_s, own_s)
        channel: Channel = made_by(**arguments, name=name)
    except (TypeError, ValueError) as error:
        raise ConfigError([f"channels.{name}.connection: {error}"]) from error
    return channel


def subscribers_of(config: Config) -> Subscribers:
    """Return the `subscribers` of ackbone.yaml. They were checked when it was read."""
    return Subscribers(
        [
            Subscriber(
                channel=settings.channel,
                recipient=settings.to,
                events=settings.events,
                tenant_id=settings.tenant,
                as_json=(settings.form or form_for(config, settings.channel)) == "json",
            )
            for settings in config.subscribers.values()
        ]
    )


def form_for(config: Config, channel: str) -> str:
    """Return the usual form of a channel: `json` for webhooks, `text` for the others."""
    known = config.channels.get(channel)
    return "json" if ((known and known.kind) or channel) == "webhook" else "text"


def _check(made_by: type[Any], arguments: dict[str, Any], name: str) -> None:
    taken = inspect.signature(made_by).parameters
    known = ", ".join(key for key in taken if key not in ("name", "tls"))
    wrong = [key for key in arguments if key not in taken or key in ("name", "tls")]
    missing = [
        key
        for key, parameter in taken.items()
        if parameter.default is inspect.Parameter.empty and key not in arguments
    ]
    problems = [f"channels.{name}.connection.{key}: unknown; known: {known}" for key in wrong]
    problems += [f"channels.{name}.connection.{key}: is missing" for key in missing]
    if problems:
        raise ConfigError(problems)


def _revealed(value: Any) -> Any:
    if isinstance(value, Secret):
        return value.reveal()
    if isinstance(value, dict):
        return {key: _revealed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_revealed(item) for item in value]
    return value
