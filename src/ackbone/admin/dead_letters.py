"""Dead letters: find, read, replay, edit, discard.

A replay is a new message with a new id that names the old one, so that each message keeps its one
final outcome. It keeps the idempotency key (which the dead letter has released), the ordering key
and the correlation id; its time to live starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from ackbone.core.clock import Clock, SystemClock
from ackbone.core.errors import AckboneError, Conflict, InvalidMessage
from ackbone.core.ids import new_id
from ackbone.core.message import Message
from ackbone.core.records import DeadLetter, LetterFilter, Operations, Records, Replay
from ackbone.core.store import Send

from .bodies import Reading, read_body, salvaged
from .causes import Handled
from .naming import Desk, check_length, check_typed, the_one
from .repairs import GONE, Change, repaired

Encode = Callable[[Message, str], Send]
"""Encodes a message for a queue. Raises InvalidMessage."""
BATCH = 100
PACE_S = 0.1
"""With a rate limit, messages that are due within this many seconds are one batch."""
REPLAY_HEADER = "x-replay-of"
"""The header with the old message id, for codecs without metadata."""


class Edits(msgspec.Struct, frozen=True, kw_only=True):
    """Changes by an operator. Unset fields stay as they are."""

    payload: Any = msgspec.UNSET
    type: str | None = None
    headers: Mapping[str, str] = {}
    changes: tuple[Change, ...] = ()
    """Applied after the other fields, in order."""
    queue: str | None = None
    """Send the message to this queue instead."""

    @property
    def every_change(self) -> tuple[Change, ...]:
        """All changes of the message itself, in order; another queue is not one of them."""
        found = [Change(f"headers.{name}", value) for name, value in self.headers.items()]
        if self.type is not None:
            found.insert(0, Change("type", self.type))
        if self.payload is not msgspec.UNSET:
            found.insert(0, Change("payload", self.payload))
        return (*found, *self.changes)

    @property
    def changed(self) -> tuple[str, ...]:
        """The changed paths, for the ledger."""
        return tuple(dict.fromkeys(change.path for change in self.every_change))

    def gives(self, path: str) -> bool:
        """Return True if the edits set this path."""
        return any(c.path == path and c.value is not GONE for c in self.every_change)


class DeadLetters(Desk[Records, Operations]):
    """Actions on dead letters. Replays need `encode`."""

    def __init__(
        self,
        records: Records,
        operations: Operations | None = None,
        *,
        encode: Encode | None = None,
        codec_of: Callable[[str], str] = lambda queue: "standard",
        clock: Clock | None = None,
    ) -> None:
        super().__init__(records, operations, codec_of=codec_of)
        self._encode = encode
        self._clock = clock or SystemClock()

    async def find(self, name: str, *, tenant_id: str | None = None) -> DeadLetter:
        """Find by dead letter id, message id or the beginning of either; prefer open ones."""
        name = check_typed(name)
        found = list(await self._records.letters_named(name, tenant_id=tenant_id))
        exact = [letter for letter in found if name in (letter.id, letter.message_id)]
        if not exact:
            check_length(name)
        wide = exact or found
        still_open = [letter for letter in wide if letter.state == "open"]
        return the_one(
            still_open or wide,
            name=name,
            what="dead letter",
            describe=lambda each: (
                f"{each.id}  {each.message_id}  {each.queue}  {each.tenant_id}  {each.state}"
            ),
            hint="; list them with 'ackbone dlq list'",
        )

    def read(self, letter: DeadLetter) -> Reading:
        """Return the message in a dead letter, or why it cannot be read."""
        return read_body(letter, self._codec_of(letter.queue))

    async def chosen(
        self, letters: Sequence[DeadLetter] | LetterFilter, *, limit: int | None = None
    ) -> list[str]:
        """Return the ids of the chosen dead letters, oldest first."""
        if isinstance(letters, LetterFilter):
            return list(await self._records.letter_ids(letters, limit=limit))
        return list(dict.fromkeys(letter.id for letter in letters))

    async def replay(
        self,
        ids: Sequence[str],
        *,
        rate: float | None = None,
        edits: Edits | None = None,
        dry_run: bool = False,
        stop: asyncio.Event | None = None,
    ) -> AsyncIterator[Handled]:
        """Send dead letters again, at most `rate` per second, until `stop` is set.

        The ones that were yielded are done, the others are still open. A batch is one commit: if
        the process dies, each dead letter is either sent and replayed, or not sent and open.
        """
        stop = stop or asyncio.Event()
        size = BATCH if rate is None or dry_run else min(BATCH, max(1, int(rate * PACE_S)))
        begun = self._clock.monotonic()
        for at in range(0, len(ids), size):
            if rate is not None and not dry_run:
                await _wait(stop, begun + at / rate - self._clock.monotonic())
            if stop.is_set():
                return
            batch = ids[at : at + size]
            for handled in await self._replay_batch(batch, edits or Edits(), dry_run):
                yield handled

    async def discard(
        self,
        ids: Sequence[str],
        *,
        reason: str,
        dry_run: bool = False,
        stop: asyncio.Event | None = None,
    ) -> AsyncIterator[Handled]:
        """Close dead letters without sending them again."""
        for at in range(0, len(ids), BATCH):
            if stop is not None and stop.is_set():
                return
            found = await self._records.letters_by_id(ids[at : at + BATCH])
            errors: Sequence[AckboneError | None] = [_not_open(letter) for letter in found]
            if not dry_run:
                errors = await self._acting.discard_letters(
                    [letter.id for letter in found], reason=reason
                )
            for letter, error in zip(found, errors, strict=True):
                yield Handled(letter=letter, error=error)

    async def _replay_batch(self, ids: Sequence[str], edits: Edits, dry_run: bool) -> list[Handled]:
        handled: dict[str, Handled] = {}
        replays: list[Replay] = []
        letters = await self._records.letters_by_id(ids)
        for letter in letters:
            try:
                error = _not_open(letter)
                if error is not None:
                    raise error
                message, replay = self._again(letter, edits)
            except AckboneError as error:
                handled[letter.id] = Handled(letter=letter, error=error)
                continue
            replays.append(replay)
            handled[letter.id] = Handled(
                letter=letter, replay_id=replay.send.outgoing.id, message=message
            )
        if replays and not dry_run:
            answers = await self._acting.replay(replays)
            for replay, answer in zip(replays, answers, strict=True):
                if answer is not None:
                    old = handled[replay.letter_id]
                    handled[replay.letter_id] = Handled(letter=old.letter, error=answer)
        return [handled[letter.id] for letter in letters]

    def _again(self, letter: DeadLetter, edits: Edits) -> tuple[Message, Replay]:
        """Return the message to send in the place of a dead letter."""
        if self._encode is None:
            raise RuntimeError("DeadLetters was created without an encoder; replays need one")
        queue = edits.queue or letter.queue
        codec = self._codec_of(queue)
        message = repaired(self._legible(letter, edits), edits.every_change)
        message = _renewed(message, letter, codec)
        send = self._encode(message, queue)
        return message, Replay(letter_id=letter.id, send=send, changed=edits.changed)

    def _legible(self, letter: DeadLetter, edits: Edits) -> Message:
        """Return the message in a dead letter, or the readable fields of a broken one.

        A broken message needs a payload from the operator, and a type if it has none.
        """
        reading = self.read(letter)
        if reading.message is not None:
            return reading.message
        if not edits.gives("payload"):
            raise Conflict(
                f"dead letter {letter.id} cannot be sent again unchanged: {reading.problem}. "
                f"Give it a payload: ackbone dlq edit {letter.id} --payload JSON"
            )
        left = salvaged(letter.body if letter.intact else None)
        kind = letter.type or left.pop("type", "")
        if not (kind or edits.gives("type")):
            raise InvalidMessage(
                f"the type of dead letter {letter.id} is unknown; give it with --type"
            )
        return Message(**{**left, "type": kind, "tenant_id": letter.tenant_id})


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    """Wait this long, or until `stop` is set."""
    if seconds > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), seconds)


def _renewed(message: Message, letter: DeadLetter, codec: str) -> Message:
    """Return a copy of the message with a new id and new times."""
    now = datetime.now(UTC)
    metadata = {k: v for k, v in message.metadata.items() if k != "retry_count"}
    metadata["replay_of"] = letter.message_id
    headers = dict(message.headers)
    if codec != "standard":
        headers[REPLAY_HEADER] = letter.message_id
    lifetime = None if message.expires_at is None else message.expires_at - message.created_at
    return msgspec.structs.replace(
        message,
        id=new_id(),
        tenant_id=letter.tenant_id,
        created_at=now,
        expires_at=now + lifetime if lifetime is not None and lifetime > timedelta() else None,
        attempt=1,
        headers=headers,
        metadata=metadata,
        raw=None,
    )


def _not_open(letter: DeadLetter) -> AckboneError | None:
    if letter.state == "open":
        return None
    as_what = f" as message {letter.replay_id}" if letter.replay_id else ""
    return Conflict(f"dead letter {letter.id} is not open: it was {letter.state}{as_what}")
