"""The context of a run: the message, and the replies and sends that commit together with it."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ackbone.core.codecs.values import dumps, is_model
from ackbone.core.errors import EffectUnknown, InvalidMessage, proves_not_done
from ackbone.core.message import Message
from ackbone.core.outbound.delivery import DIRECT, SCHEDULED, check_recipient
from ackbone.core.retry import describe
from ackbone.core.secret import mask_line
from ackbone.core.store import Effects, EffectState, Reply, Run, RunWrites, Send, Usage
from ackbone.core.text import storable

T = TypeVar("T")
log = logging.getLogger("ackbone.handler")

ON_UNKNOWN = ("park", "again", "skip")


class RunStore(Effects, RunWrites, Protocol):
    """The writes that a run may make before its end."""


class MakeSend(Protocol):
    """Builds a follow-up message. The app does it, because it knows codecs and limits."""

    def __call__(
        self, parent: Message, type: str, payload: Any, options: Mapping[str, Any]
    ) -> Send: ...


class Context:
    """One run, as its handler sees it. Replies and sends are committed with its outcome (P5)."""

    __slots__ = (
        "_begun",
        "_focus",
        "_make_send",
        "_now_replies",
        "_replies",
        "_run",
        "_sends",
        "_store",
        "_usage",
        "_without_dedup",
    )

    def __init__(
        self, run: Run, store: RunStore, make_send: MakeSend, focus: str | None = None
    ) -> None:
        self._run = run
        self._focus = focus
        self._store = store
        self._make_send = make_send
        self._replies: list[Reply] = []
        self._sends: list[Send] = []
        self._usage: Usage | None = None
        self._now_replies = 0
        self._begun: set[str] = set()
        """Names of the effects whose functions this run has called."""
        self._without_dedup = False
        """True: the dedup store could not be asked. The final event records that."""

    @property
    def message(self) -> Message:
        """The message that started this run."""
        return self._run.message

    @property
    def payload(self) -> Any:
        return self._run.message.payload

    @property
    def tenant_id(self) -> str:
        return self._run.message.tenant_id

    @property
    def attempt(self) -> int:
        """1 for the first attempt."""
        return self._run.attempt

    @property
    def retry_count(self) -> int:
        """Failed attempts before this one."""
        return self._run.failures

    @property
    def idempotency_key(self) -> str:
        """The same text in all attempts of this message. Give it to the services that you call."""
        return self._run.message.idempotency_key or self._run.message.id

    @property
    def focus(self) -> str | None:
        """The skills that the queue's trigger limits the run to. None: all."""
        return self._focus

    async def reply(
        self,
        content: Any,
        *,
        channel: str | None = None,
        recipient: str | None = None,
        now: bool = False,
        options: Mapping[str, Any] | None = None,
        expires_s: float | None = None,
    ) -> None:
        """Answer where the message came from. `now=True` sends at once, however the run ends.

        A dataclass, a msgspec struct or a pydantic model is sent as JSON text. `options` are for
        the channel. `expires_s`: do not send the reply after this many seconds.
        """
        message = self._run.message
        metadata = message.metadata
        to = recipient or metadata.get("chat_id") or metadata.get("user_id") or message.ordering_key
        reply = Reply(
            channel=channel or message.channel or "terminal",
            recipient=check_recipient(str(to or "-")),
            content=_text(content),
            conversation=message.ordering_key,
            now=now,
            options=_options(options),
            expires_s=expires_s,
        )
        await self._add(reply)

    async def send_to(
        self,
        channel: str,
        recipient: str,
        content: Any,
        *,
        scheduled: bool = False,
        conversation: str | None = None,
        now: bool = False,
        options: Mapping[str, Any] | None = None,
        expires_s: float | None = None,
    ) -> None:
        """Write to another recipient. `scheduled`: nobody waits for it, so replies go first."""
        reply = Reply(
            channel=channel,
            recipient=check_recipient(recipient),
            content=_text(content),
            conversation=conversation,
            priority=SCHEDULED if scheduled else DIRECT,
            now=now,
            options=_options(options),
            expires_s=expires_s,
        )
        await self._add(reply)

    async def _add(self, reply: Reply) -> None:
        if reply.now:
            self._now_replies += 1
            await self._store.reply_now(self._run, reply, self._now_replies)
        else:
            self._replies.append(reply)

    async def send(self, type: str, payload: Any = None, **options: Any) -> str:
        """Send a follow-up message, published when this run commits. Returns its id.

        Options: queue, id, idempotency_key, ordering_key, priority, delay_s, ttl_s, headers,
        metadata.
        """
        send = self._make_send(self._run.message, type, payload, options)
        self._sends.append(send)
        return send.outgoing.id

    def usage(self, *, llm_calls: int = 0, tokens: int = 0, cost: float = 0.0) -> None:
        """Count what this run used. Several calls add up."""
        before = self._usage or Usage()
        self._usage = Usage(
            llm_calls=before.llm_calls + llm_calls,
            tokens=before.tokens + tokens,
            cost=before.cost + cost,
        )

    async def heartbeat(self, data: Mapping[str, Any] | None = None) -> None:
        """Record that a long run is alive, and how far it is. Raises LeaseLost."""
        await self._store.heartbeat(self._run, dict(data or {}))

    async def once(
        self,
        name: str,
        fn: Callable[..., Any],
        *,
        on_unknown: str = "park",
        not_done: tuple[type[BaseException], ...] = (),
    ) -> Any:
        """Call `fn`, an effect outside the store, at most once over all attempts of this message.

        The intent is written before, the result after. A later attempt gets the recorded result.
        An intent without a result means that the effect is unknown, and `on_unknown` decides:
        `park` sets the message aside for a person, `again` calls `fn` again (for effects that take
        an idempotency key), `skip` returns None. `fn` may take one argument: an idempotency key for
        this effect.
        An error of `fn` leaves the effect unknown, unless it proves that nothing happened:
        `NotDone`, a refused connection, a name that DNS does not know, or one of `not_done`. Then a
        later attempt calls `fn` again. The result must be a JSON value.
        """
        if on_unknown not in ON_UNKNOWN:
            raise ValueError(f"on_unknown is one of {', '.join(ON_UNKNOWN)}, not {on_unknown!r}")
        state, recorded = await self._store.effect_begin(self._run, name)
        if state is EffectState.NEW and name in self._begun:
            state = EffectState.UNKNOWN  # the intent is of an earlier call in this run
        if state is EffectState.DONE:
            return msgspec.json.decode(recorded or b"null")
        if state is EffectState.UNKNOWN:
            if on_unknown == "park":
                raise EffectUnknown(name, None if recorded is None else recorded.decode())
            if on_unknown == "skip":
                log.warning("message %s: effect %r is unknown, skipped", self.message.id, name)
                return None
        self._begun.add(name)
        try:
            result = await _call_effect(fn, f"{self.idempotency_key}:{name}")
        except BaseException as error:
            if isinstance(error, not_done) or proves_not_done(error):
                await self._store.effect_clear(self._run, name)
                self._begun.discard(name)
            elif on_unknown == "park" and isinstance(error, Exception):
                await self._store.effect_raised(
                    self._run, name, storable(describe(error, mask_line))
                )
            raise
        await self._store.effect_done(self._run, name, dumps(result))
        return result

    def _keep(self, replies: Sequence[Reply], sends: Sequence[Send], usage: Usage | None) -> None:
        """Take over replies, sends and usage of a handler in a child process."""
        self._replies.extend(replies)
        self._sends.extend(sends)
        if usage is not None:
            self.usage(llm_calls=usage.llm_calls, tokens=usage.tokens, cost=usage.cost)

    def _collected(self) -> tuple[list[Reply], list[Send], Usage | None]:
        return self._replies, self._sends, self._usage


class SyncContext:
    """`Context` for plain functions that run in a thread: the same methods, without `await`."""

    def __init__(self, inner: Context, loop: asyncio.AbstractEventLoop) -> None:
        self._inner = inner
        self._loop = loop

    @property
    def message(self) -> Message:
        return self._inner.message

    @property
    def payload(self) -> Any:
        return self._inner.payload

    @property
    def tenant_id(self) -> str:
        return self._inner.tenant_id

    @property
    def attempt(self) -> int:
        return self._inner.attempt

    @property
    def retry_count(self) -> int:
        return self._inner.retry_count

    @property
    def idempotency_key(self) -> str:
        return self._inner.idempotency_key

    @property
    def focus(self) -> str | None:
        return self._inner.focus

    def reply(self, content: Any, **options: Any) -> None:
        self._wait(self._inner.reply(content, **options))

    def send_to(self, channel: str, recipient: str, content: Any, **options: Any) -> None:
        self._wait(self._inner.send_to(channel, recipient, content, **options))

    def send(self, type: str, payload: Any = None, **options: Any) -> str:
        return self._wait(self._inner.send(type, payload, **options))

    def usage(self, *, llm_calls: int = 0, tokens: int = 0, cost: float = 0.0) -> None:
        self._inner.usage(llm_calls=llm_calls, tokens=tokens, cost=cost)

    def heartbeat(self, data: Mapping[str, Any] | None = None) -> None:
        self._wait(self._inner.heartbeat(data))

    def once(self, name: str, fn: Callable[..., Any], **options: Any) -> Any:
        """As `Context.once`. A plain `fn` runs in a thread."""

        async def effect(key: str) -> Any:
            return await asyncio.to_thread(_call_plain, fn, key)

        is_async = inspect.iscoroutinefunction(fn)
        return self._wait(self._inner.once(name, fn if is_async else effect, **options))

    def _wait(self, work: Awaitable[T]) -> T:
        async def run() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()


def _text(content: Any) -> str:
    """Return models as JSON text. Any other value that is not a text is refused."""
    if isinstance(content, str):
        return content
    if not is_model(content):
        raise InvalidMessage(
            f"a reply is text, a dataclass, a msgspec struct or a pydantic model, not "
            f"{type(content).__name__}"
        )
    return dumps(content).decode()


def _options(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Check the options now: after the run has ended, a mistake could not be reported."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise InvalidMessage(f"options of a reply are a mapping, not {type(options).__name__}")
    return msgspec.json.decode(dumps(dict(options)))  # type: ignore[no-any-return]


def _call_plain(fn: Callable[..., Any], key: str) -> Any:
    return fn(key) if _takes_key(fn) else fn()


async def _call_effect(fn: Callable[..., Any], key: str) -> Any:
    result = _call_plain(fn, key)
    return await result if inspect.isawaitable(result) else result


def _takes_key(fn: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters
    )
