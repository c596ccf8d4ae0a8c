"""A thread that carries out what waits in a folder."""

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
from ackbone.core.parcels import EXPIRED

from .channels import Channels
from .file_queue import DeliveryQueue
from .queued import QueuedDelivery
from .waits import asked_s, compute_backoff_ms, due_at

log = logging.getLogger("ackbone.delivery")

SendFn = Callable[..., Any]
"""Called with channel, recipient and content; plain or async. It returns when the channel has taken
the text. One that takes `delivery_id` is given that, too: the same for every attempt; and one that
takes `in_doubt` is told whether it may have arrived before."""

LOOK_S = 2.0
"""How often the folder is looked at for what others put in."""
STOP_S = 5.0
CLOCK_S = 1.0
"""An attempt of the future by more than this shows that the clock was set back."""


class DeliveryRunner:
    """Sends what is due: direct answers first, then the oldest; one conversation in its order.

    What `send_fn` raises decides: `RateLimited` waits as long as it says and costs nothing,
    `FinalError` gives up at once, anything else is tried again by the table of waits, or when it
    says (`retry_after_s`) if that is later; after `SendUnknown` that is marked as a repeat.
    A `send_fn` that is made of `Channels` is closed with the runner.
    """

    def __init__(self, queue: DeliveryQueue, send_fn: SendFn, *, wait_scale: float = 1.0) -> None:
        """`wait_scale` multiplies the waits between attempts. It leaves a wait alone that the
        other side asked for (`retry_after_s`)."""
        self.queue = queue
        self.send_fn = send_fn
        self._scale = wait_scale
        self._takes = _parameters(send_fn)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failure: BaseException | None = None
        """Why the thread ended by itself, if it did."""

    def start(self) -> None:
        """Begin to send. Raises StoreError if another process sends from this folder."""
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
        """Begin nothing new, and wait for the attempt under way, at most five seconds."""
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
                except StoreError as error:  # the disk is full, say: what waits goes on waiting
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
        """Send what is due; returns in how many seconds the next one is."""
        conversations: dict[tuple[str, str, int], deque[QueuedDelivery]] = {}
        for delivery in self.queue.load_pending():
            conversations.setdefault(delivery.conversation, deque()).append(delivery)
        heads = [_place(waiting[0]) for waiting in conversations.values()]
        heapq.heapify(heads)
        next_due = float("inf")
        while heads and not self._stop.is_set():
            if self.queue.added.is_set():  # it may be more urgent than all these
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
        if delivery.last_attempt_at > now + CLOCK_S:  # somebody set the clock back
            return 0.0
        return due_at(delivery, scale=self._scale) - now

    def _attempt(self, known: QueuedDelivery) -> QueuedDelivery | None:
        """Returns it if it has to wait for another attempt: its conversation waits with it."""
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
        """What arrived would be sent again after a restart: the file has to tell of it."""
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
    """Where it stands among others: its class, its age; its conversation last."""
    return -delivery.priority, delivery.created_at, delivery.id, delivery.conversation


def _parameters(send_fn: SendFn) -> Collection[str]:
    try:
        return set(inspect.signature(send_fn).parameters)
    except (TypeError, ValueError):  # some callables of C do not say
        return ()


async def _awaited(result: Any) -> None:
    await result
