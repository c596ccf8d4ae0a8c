"""A thread that sends the deliveries of a folder."""

from __future__ import annotations

import asyncio
import heapq
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from ackbone.core.errors import FinalError, RateLimited, SendUnknown, StoreError
from ackbone.core.outbound.send_order import EXPIRED
from ackbone.delivery.backoff import asked_s, compute_backoff_ms

from .channel_sender import Channels
from .delivery_queue import DeliveryQueue
from .queued_delivery import QueuedDelivery, due_at

log = logging.getLogger("ackbone.delivery")

SendFn = Callable[..., Any]
"""Called with channel, recipient and content; a plain or an async function. It returns when the
channel has accepted the text. A function with a parameter `delivery_id` gets the id, which is the
same for every attempt; one with `in_doubt` learns whether it may have arrived before."""

LOOK_S = 2.0
"""How often the folder is checked for deliveries of other processes, in seconds."""
STOP_S = 5.0
CLOCK_S = 1.0
"""If the last attempt is further in the future than this, the clock was set back."""


class DeliveryRunner:
    """Sends due deliveries: direct answers first, then the oldest; each conversation in its order.

    The error of `send_fn` decides what happens next. After `RateLimited` the delivery waits as long
    as the error says, without using a retry. After `FinalError` it is given up at once. After any
    other error it is tried again by the table of waits, or after `retry_after_s` if that is later;
    after `SendUnknown` the next attempt is marked as a repeat.
    A `send_fn` of type `Channels` is closed with the runner.
    """

    def __init__(self, queue: DeliveryQueue, send_fn: SendFn, *, wait_scale: float = 1.0) -> None:
        """`wait_scale` multiplies the waits between attempts, except those that the service asked
        for (`retry_after_s`)."""
        self.queue = queue
        self.send_fn = send_fn
        self._scale = wait_scale
        self._takes = _parameters(send_fn)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failure: BaseException | None = None
        """The error that ended the thread, if one did."""

    def start(self) -> None:
        """Start sending. Raises StoreError if another process sends from this folder."""
        if self._thread is not None:
            raise RuntimeError("the runner was started before")
        self._stop.clear()
        self.failure = None
        lock = self.queue.only_runner()
        lock.__enter__()
        self._thread = threading.Thread(
            target=self._run, args=(lock,), daemon=True, name="delivery-runner"
        )
        self._thread.start()

    def stop(self) -> None:
        """Start no more attempts, and wait up to five seconds for the one in progress."""
        self._stop.set()
        self.queue.added.set()
        if self._thread is not None:
            self._thread.join(timeout=STOP_S)
            self._thread = None

    def _run(self, lock: Any) -> None:
        try:
            while not self._stop.is_set():
                self.queue.added.clear()
                try:
                    wait_s = self._round()
                except StoreError as error:  # for example a full disk: the deliveries keep waiting
                    log.warning("[delivery] %s", error)
                    wait_s = LOOK_S
                if not self._stop.is_set():
                    self.queue.added.wait(min(LOOK_S, wait_s))
        except BaseException as error:
            self.failure = error
            log.exception("[delivery] the runner ended")
            raise
        finally:
            if self._loop is not None:
                loop, self._loop = self._loop, None
                if isinstance(self.send_fn, Channels):
                    loop.run_until_complete(self.send_fn.close())
                loop.close()
            lock.__exit__(None, None, None)

    def _round(self) -> float:
        """Send what is due; return the seconds until the next delivery is due."""
        conversations: dict[tuple[str, str, int], deque[QueuedDelivery]] = {}
        for delivery in self.queue.load_pending():
            conversations.setdefault(delivery.conversation, deque()).append(delivery)
        heads = [_place(waiting[0]) for waiting in conversations.values()]
        heapq.heapify(heads)
        next_due = float("inf")
        while heads and not self._stop.is_set():
            if self.queue.added.is_set():  # the new one may be more urgent than all of these
                return 0.0
            *_, key = heapq.heappop(heads)
            waiting = conversations[key]
            wait_s = self._wait_s(waiting[0])
            if wait_s > 0:
                next_due = min(next_due, wait_s)
                continue
            known = waiting.popleft()
            left = self._attempt(known)
            if left is not None:
                next_due = min(next_due, self._wait_s(left))
            elif waiting:
                heapq.heappush(heads, _place(waiting[0]))
        return max(0.0, next_due)

    def _wait_s(self, delivery: QueuedDelivery) -> float:
        now = time.time()
        if delivery.last_attempt_at > now + CLOCK_S:  # the clock was set back
            return 0.0
        return due_at(delivery, scale=self._scale) - now

    def _attempt(self, known: QueuedDelivery) -> QueuedDelivery | None:
        """Return the delivery if it waits for another attempt: its conversation waits with it."""
        delivery = self.queue.begin(known.id)
        if delivery is None:
            return None
        name = delivery.short_id
        if delivery.resent > known.resent:
            log.warning("[delivery] again: %s (nobody knows whether it arrived before)", name)
        try:
            self._call(delivery)
        except RateLimited as error:
            wait_s = asked_s(error) or compute_backoff_ms(1) / 1000 * self._scale
            until = time.time() + wait_s
            self.queue.put_off(delivery, until, str(error), unknown=self._sent_in_part(delivery))
            log.warning("[delivery] waits: %s (%s), %.0fs", name, error, wait_s)
            return delivery
        except FinalError as error:
            in_part = self._sent_in_part(delivery)
            self.queue.fail_for_good(delivery, str(error), unknown=in_part)
            log.error("[delivery] FAILED: %s (%s), moved to failed/", name, error)
        except (Exception, asyncio.CancelledError) as error:
            more_s = asked_s(error)
            table_s = compute_backoff_ms(delivery.retry_count + 1) / 1000 * self._scale
            self.queue.fail(
                delivery,
                str(error) or type(error).__name__,
                unknown=isinstance(error, SendUnknown) or self._sent_in_part(delivery),
                not_before=time.time() + max(more_s, table_s) if more_s else 0.0,
            )
            if delivery.retry_count <= delivery.max_retries:
                wait_s = max(compute_backoff_ms(delivery.retry_count) / 1000, more_s)
                log.warning(
                    "[delivery] FAILED: %s (%s), retry %d, backoff %.0fs",
                    name,
                    delivery.last_error,
                    delivery.retry_count,
                    wait_s,
                )
                return delivery
            log.error(
                "[delivery] FAILED: %s (%s), given up after %d attempts, moved to failed/",
                name,
                delivery.last_error,
                delivery.retry_count,
            )
        else:
            self.queue.ack(delivery.id)
            count = delivery.retry_count
            tries = f", after {count} {'retry' if count == 1 else 'retries'}" if count else ""
            log.info("[delivery] sent: %s (ack%s)", name, tries)
        return None

    def _sent_in_part(self, delivery: QueuedDelivery) -> bool:
        """Return True if parts arrived. The file records it, so that a restart marks them."""
        return isinstance(self.send_fn, Channels) and self.send_fn.sent_in_part(delivery.id)

    def _call(self, delivery: QueuedDelivery) -> None:
        if 0 < delivery.expires_at <= time.time():
            raise FinalError(EXPIRED)
        known = {"delivery_id": delivery.id, "in_doubt": delivery.resent > 0}
        more = {name: value for name, value in known.items() if name in self._takes}
        result = self.send_fn(delivery.channel, delivery.recipient, delivery.content, **more)
        if inspect.isawaitable(result):
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            self._loop.run_until_complete(_awaited(result))


def _place(delivery: QueuedDelivery) -> tuple[int, float, str, tuple[str, str, int]]:
    """Return its place in the order of sending: by priority, then age; the conversation last."""
    return -delivery.priority, delivery.created_at, delivery.id, delivery.conversation


def _parameters(send_fn: SendFn) -> Collection[str]:
    try:
        return set(inspect.signature(send_fn).parameters)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return ()


async def _awaited(result: Any) -> None:
    await result
