"""The handlers, channels and subscribers of an app: those that the program registers, and those of
ackbone.yaml, whose channels are made by the class of their kind.

Programs register when they are imported, and an `App` reads its configuration when it is
opened. Names and values that can never be right are refused at once. Values that depend on a
setting are filled in later.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from ackbone.config import Config
from ackbone.config.settings import Channel as ChannelSettings
from ackbone.config.settings import ChannelKind
from ackbone.core.errors import ConfigError, InvalidMessage, install_extra
from ackbone.core.message import check_name
from ackbone.core.outbound.delivery import Channel
from ackbone.core.outbound.subscribers import Subscriber, Subscribers
from ackbone.core.retry import RetryPolicy
from ackbone.core.secret import Secret
from ackbone.delivery.attempts import Policy
from ackbone.delivery.carrier import Carried
from ackbone.engine.handlers import Handler, Handlers

Form = Literal["json", "text"]
OnUnknown = Literal["resend", "hold"]
KINDS: tuple[str, ...] = get_args(ChannelKind)
GRACE_S = 1.0
"""A call is cancelled this long after its channel should have given it up by itself."""


class HandlerDraft(NamedTuple):
    """A handler as it was registered. An empty queue means the default queue."""

    handler: Handler
    retry: RetryPolicy | None
    retries: int | None

    def complete(self, config: Config) -> Handler:
        """Return the handler, completed by the settings of the queue."""
        queue = self.handler.queue or config.default_queue
        own = config.queue(queue)
        retry = self.retry or config.retry_policy(queue)
        if self.retries is not None:
            retry = msgspec.structs.replace(retry, max_retries=self.retries)
        timeout_s, trigger = self.handler.timeout_s, config.trigger(queue)
        return msgspec.structs.replace(
            self.handler,
            queue=queue,
            retry=retry,
            timeout_s=own.timeout_s if timeout_s is None else timeout_s,
            on_parked=own.on_parked,
            focus=None if trigger is None else trigger.focus,
        )


class ChannelDraft(NamedTuple):
    """A channel as it was registered."""

    channel: Channel
    timeout_s: float | None
    on_unknown: OnUnknown | None

    def complete(self, config: Config) -> Carried:
        settings = config.delivery
        policy = Policy(
            timeout_s=self.timeout_s or settings.timeout_s,
            wait_scale=settings.wait_scale,
            hold_unknown=(self.on_unknown or settings.on_unknown) == "hold",
        )
        return Carried(self.channel, policy)


class Registrations:
    """The handlers, channels and subscribers of one app."""

    def __init__(self) -> None:
        self._handlers: list[HandlerDraft] = []
        self._seen = Handlers()
        self._channels: dict[str, ChannelDraft] = {}
        self._subscribers: list[tuple[Subscriber, Form | None]] = []

    def handler(
        self,
        call: Callable[..., Any],
        *,
        type: str,
        queue: str | None,
        retry: RetryPolicy | None,
        retries: int | None,
        timeout_s: float | None,
        isolation: str,
    ) -> HandlerDraft:
        """Raises ValueError if the queue has a handler for this type."""
        found = Handler(
            type=type, queue=queue or "", call=call, timeout_s=timeout_s, isolation=isolation
        )
        self._seen.add(found)
        draft = HandlerDraft(found, retry, retries)
        self._handlers.append(draft)
        return draft

    def channel(
        self, channel: Channel, *, timeout_s: float | None, on_unknown: OnUnknown | None
    ) -> ChannelDraft:
        """Raises ConfigError if there is a channel with this name."""
        check_name("channel", channel.name)
        if channel.name in self._channels:
            raise ConfigError([f"there are two channels with the name {channel.name!r}"])
        draft = ChannelDraft(channel, timeout_s, on_unknown)
        self._channels[channel.name] = draft
        return draft

    @property
    def channel_names(self) -> frozenset[str]:
        return frozenset(self._channels)

    def subscriber(
        self,
        channel: str,
        recipient: str,
        *,
        events: Sequence[str],
        tenant_id: str | None,
        form: Form | None,
    ) -> tuple[Subscriber, Form | None]:
        """Raises ConfigError if there is no event with one of these names."""
        found = Subscriber(
            channel=channel, recipient=recipient, events=tuple(events), tenant_id=tenant_id
        )
        Subscribers([found])
        self._subscribers.append((found, form))
        return found, form

    def handlers(self, config: Config) -> Handlers:
        found = Handlers()
        for draft in self._handlers:
            found.add(draft.complete(config))
        return found

    def channels(self, config: Config) -> dict[str, Carried]:
        """Return the channels of the program, then those that only the configuration names.

        Raises ConfigError with every channel that cannot be made.
        """
        drafts, problems = dict(self._channels), []
        for name, settings in config.channels.items():
            if name in drafts:
                continue
            within_s = settings.timeout_s or config.delivery.timeout_s
            try:
                check_name("channel", name)
                channel = make_channel(name, settings, within_s=within_s)
                drafts[name] = ChannelDraft(channel, within_s + GRACE_S, settings.on_unknown)
            except ConfigError as error:
                problems += error.problems
            except InvalidMessage as error:
                problems.append(f"channels: {error}")
        if problems:
            raise ConfigError(problems)
        return {name: draft.complete(config) for name, draft in drafts.items()}

    def subscribers(self, config: Config) -> Subscribers:
        """Return the subscribers of the configuration and of the program."""
        found = Subscribers()
        for each in config.subscribers.values():  # checked when the configuration was read
            subscriber = Subscriber(
                channel=each.channel, recipient=each.to, events=each.events, tenant_id=each.tenant
            )
            found.add(formed(subscriber, each.form, config))
        for subscriber, form in self._subscribers:
            found.add(formed(subscriber, form, config))
        return found


def formed(subscriber: Subscriber, form: Form | None, config: Config) -> Subscriber:
    """Return the subscriber. Without a form it is JSON for webhooks and text for others."""
    known = config.channels.get(subscriber.channel)
    is_webhook = ((known and known.kind) or subscriber.channel) == "webhook"
    as_json = is_webhook if form is None else form == "json"
    return msgspec.structs.replace(subscriber, as_json=as_json)


def make_channel(name: str, settings: ChannelSettings, *, within_s: float) -> Channel:
    """Make one channel. `within_s` is the time limit of a call, which the channel gets: only the
    channel knows whether a call that it gives up was sent.

    Raises ConfigError for an unknown kind, a missing extra and a wrong `connection`.
    """
    kind = settings.kind or name
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise ConfigError([f"channels.{name}: no kind {kind!r:.40}; write `kind:` with {known}"])
    try:
        module = importlib.import_module(f"ackbone.delivery.channels.{kind}_channel")
    except ModuleNotFoundError as error:
        raise ConfigError([f"channels.{name} needs {error.name}: {install_extra(kind)}"]) from error
    made_by = getattr(module, f"{kind.capitalize()}Channel")
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
