"""Checks that need more than one field's type: names, URLs, values that depend on each other."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import msgspec

from ackbone.brokers.registry import kind_of, trigger_types
from ackbone.core.codecs.codec import CODECS
from ackbone.core.errors import ConfigError
from ackbone.core.message import NAME
from ackbone.core.outbound.delivery import LONGEST_RECIPIENT
from ackbone.core.outbound.subscribers import events_named, no_event
from ackbone.triggers.config import validate_config

from .endpoints import not_in_store, read_url
from .nodes import Where, join
from .queues import Queue
from .settings import DEFAULT, Config
from .settings_reader import Reader

_LATER_CODECS = ("task-envelope", "cloudevents")
_NAME_RULE = (
    "letters, digits and . _ : - only, beginning with a letter or digit, at most 128 characters"
)


C = TypeVar("C", bound=Config)


def check(config: C, reader: Reader, fallback: Where) -> C:
    """Return the config with absolute URLs; mistakes are added to the reader's problems."""
    rules = _Rules(config, reader, fallback)
    rules.brokers()
    rules.queues()
    rules.waits()
    rules.triggers()
    rules.subscribers()
    if config.ledger_key_file == config.ledger_anchor_file:
        rules.say("ledger.anchor_file", "is the same file as ledger.key_file; name another one")
    return msgspec.structs.replace(
        config,
        broker=rules.url("broker", config.broker),
        brokers={
            name: rules.url(join("brokers", name), url) for name, url in config.brokers.items()
        },
        store=rules.url("store", config.store),
    )


class _Rules:
    def __init__(self, config: Config, reader: Reader, fallback: Where) -> None:
        self.config = config
        self.reader = reader
        self.fallback = fallback

    def say(self, path: str, text: str) -> None:
        self.reader.say(path, text, self.fallback)

    def name(self, path: str, value: str, kind: str) -> bool:
        """Return True if this is a valid name. Otherwise add a mistake."""
        if NAME.match(value) is None:
            self.say(path, f"not a valid {kind} name: {_NAME_RULE}")
            return False
        return True

    def url(self, setting: str, url: str) -> str:
        where = self.reader.places.get(setting)
        folder = self.reader.folders[where.origin] if where else Path()
        try:
            return read_url(setting, url, folder)
        except ValueError as error:
            self.say(setting, str(error))
            return url

    def brokers(self) -> None:
        if problem := not_in_store(self.config.broker, self.config.store):
            self.say("broker", problem)
        for name, url in self.config.brokers.items():
            path = join("brokers", name)
            if problem := not_in_store(url, self.config.store):
                self.say(path, problem)
            if NAME.match(name) is None:
                self.say(path, f"not a valid name: {_NAME_RULE}")
            elif name == DEFAULT:
                text = "is the name of the broker in `broker`; write this URL there, or rename it"
                self.say(path, text)

    def queues(self) -> None:
        if NAME.match(self.config.default_queue) is None:
            self.say("default_queue", f"not a valid queue name: {_NAME_RULE}")
        for name, queue in self.config.queues.items():
            path = join("queues", name)
            if queue.broker is not None and queue.broker not in (DEFAULT, *self.config.brokers):
                self.say(join(path, "broker"), _no_broker(queue.broker, self.config.brokers))
            self.name(path, name, "queue")
            if queue.tenant is not None:
                self.name(join(path, "tenant"), queue.tenant, "tenant")
            if queue.codec and queue.codec not in CODECS:
                self.say(join(path, "codec"), _codec(queue.codec))
            for field in ("results", "dead_letters"):
                to = getattr(queue, field)
                if not to or not self.name(join(path, field), to, "queue"):
                    continue
                if self.config.queue(to).notices is not None:
                    self.say(
                        join(path, field),
                        "must not be a queue that has results or dead_letters itself: a loop",
                    )
            if queue.broker_dead_letters is not None:
                self.broker_dead_letters(join(path, "broker_dead_letters"), queue)

    def broker_dead_letters(self, path: str, queue: Queue) -> None:
        ours = {*self.config.queues, self.config.default_queue}
        for name in self.config.queues:
            to = self.config.queue(name).notices
            ours.update(() if to is None else {to.results or "", to.dead_letters or ""})
        name = queue.broker_dead_letters or ""
        if ours & {name, name.rpartition(":p")[0]}:  # `orders:p3` is a part of `orders`, too
            self.say(path, "must not be a queue that this configuration reads or sends to: a loop")
        with contextlib.suppress(ConfigError):  # a wrong URL is reported where it is written
            kind = kind_of(self.config.brokers.get(queue.broker or "", self.config.broker))
            if not kind.gives_up:
                self.say(path, f"{kind.title} has no dead-letter queues of its own; remove it")

    def waits(self) -> None:
        """Check that no first wait exceeds the longest one."""
        longest = self.config.retry.max_delay_s
        if self.config.retry.base_delay_s > longest:
            self.say(
                "retry.base_delay_s",
                f"must not exceed retry.max_delay_s ({longest:g}); lower it or raise the other",
            )
        for name, queue in self.config.queues.items():
            policy = self.config.retry_policy(name)
            own = queue.base_delay_s is not None or queue.max_delay_s is not None
            if own and policy.base_delay > policy.max_delay:
                field = "base_delay_s" if queue.base_delay_s is not None else "max_delay_s"
                self.say(
                    join(join("queues", name), field),
                    f"the first wait ({policy.base_delay:g} s) exceeds the longest one "
                    f"({policy.max_delay:g} s)",
                )

    def triggers(self) -> None:
        for index, trigger in enumerate(self.config.triggers):
            path = join("triggers", index)
            for problem in validate_config(trigger.queue_trigger()):
                field, _, text = problem.partition(" ")
                self.say(join(path, field), text)
            kind, known = trigger.adapter.type, trigger_types()
            if kind is not None and kind not in known:
                text = _unknown(kind, "an adapter", known)
                self.say(join(join(path, "adapter"), "type"), text)
            with contextlib.suppress(ConfigError):  # `check_triggers` reports it
                own = trigger.adapter.url(kind_of(self.config.broker))
                if own is not None and (wrong := not_in_store(own, self.config.store)):
                    self.say(join(path, "adapter"), wrong)

    def subscribers(self) -> None:
        for name, subscriber in self.config.subscribers.items():
            path = join("subscribers", name)
            self.name(join(path, "channel"), subscriber.channel, "channel")
            if not 0 < len(subscriber.to) <= LONGEST_RECIPIENT:
                self.say(join(path, "to"), f"must be text of 1 to {LONGEST_RECIPIENT} characters")
            for index, pattern in enumerate(subscriber.events):
                if not events_named(pattern):
                    self.say(join(join(path, "events"), index), no_event(pattern))


def _codec(name: str) -> str:
    if name in _LATER_CODECS:
        return f"this version of ackbone has no codec {name} yet; it has: {', '.join(CODECS)}"
    return _unknown(name, "a codec", CODECS)


def _no_broker(name: str, brokers: Collection[str]) -> str:
    if "@" in name or ":" in name:
        return "is a URL; give the broker a name below `brokers`, and write that name here"
    near = difflib.get_close_matches(name, brokers, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"there is no broker {name[:60]!r}; {hint}known: {', '.join((DEFAULT, *brokers))}"


def _unknown(name: str, what: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{name[:60]!r} is not {what}; {hint}known: {', '.join(known)}"
