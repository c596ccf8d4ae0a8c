"""Dead letters: list, read, send again, edit, discard.

A replay is a new message with an id of its own, linked to the old one, so that each message keeps
its one final outcome. It keeps the idempotency key (a dead letter has given it back), the ordering
key and the correlation; its time to live starts anew.
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
from .naming import SHORTEST, check_typed, the_one
from .repairs import GONE, Change, repaired

Encode = Callable[[Message, str], Send]
"""A message and its queue as the bytes that are sent. Raises InvalidMessage."""
BATCH = 100
PACE_S = 0.1
"""A paced replay sends what is due within so long as one batch."""
REPLAY_HEADER = "x-replay-of"
"""Carries the old id where the wire form has no metadata."""


class Edits(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator changes; unset fields stay as they are."""

    payload: Any = msgspec.UNSET
    type: str | None = None
    headers: Mapping[str, str] = {}
    changes: tuple[Change, ...] = ()
    """Made after the others, in turn."""
    queue: str | None = None
    """Send it to another queue."""

    @property
    def every_change(self) -> tuple[Change, ...]:
        """Another queue alone is no edit."""
        found = [Change(f"headers.{name}", value) for name, value in self.headers.items()]
        if self.type is not None:
            found.insert(0, Change("type", self.type))
        if self.payload is not msgspec.UNSET:
            found.insert(0, Change("payload", self.payload))
        return (*found, *self.changes)

    @property
    def changed(self) -> tuple[str, ...]:
        """Paths, for the ledger; what stands there now is in the message itself."""
        return tuple(dict.fromkeys(change.path for change in self.every_change))

    def gives(self, path: str) -> bool:
        """Is this place set, whatever stood there before?"""
        return any(c.path == path and c.value is not GONE for c in self.every_change)


class DeadLetters:
    """The use cases. `operations` and `encode` are needed for acting only."""

    def __init__(
        self,
        records: Records,
        operations: Operations | None = None,
        *,
        encode: Encode | None = None,
        codec_of: Callable[[str], str] = lambda queue: "standard",
        clock: Clock | None = None,
    ) -> None:
        self._records = records
        self._operations = operations
        self._encode = encode
        self._codec_of = codec_of
        self._clock = clock or SystemClock()

    async def find(self, name: str, *, tenant_id: str | None = None) -> DeadLetter:
        """By letter id, message id, or the beginning of either; open ones are preferred."""
        name = check_typed(name)
        found = list(await self._records.letters_named(name, tenant_id=tenant_id))
        exact = [letter for letter in found if name in (letter.id, letter.message_id)]
        if not exact and len(name) < SHORTEST:
            raise InvalidMessage(f"{name!r} is too short: write at least {SHORTEST} characters")
        wide = exact or found
        still_open = [letter for letter in wide if letter.state == "open"]
        return the_one(
            still_open or wide,
            name=name,
            what="dead letter",
            describe=lambda each: (
                f"{each.id}  {each.message_id}  {each.queue}  {each.tenant_id}  {each.state}"
            ),
            hint="; 'ackbone dlq list' shows what there is",
        )

    def read(self, letter: DeadLetter) -> Reading:
        """The message in a letter, or why there is none."""
        return read_body(
            letter.body,
            letter.body_info,
            message_id=letter.message_id,
            queue=letter.queue,
            intact=letter.intact,
            codec=self._codec_of(letter.queue),
        )

    async def chosen(
        self, letters: Sequence[DeadLetter] | LetterFilter, *, limit: int | None = None
    ) -> list[str]:
        """Ids, the oldest first. From here on it is settled which letters are meant."""
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
        """Send letters again, at most `rate` a second, until `stop` is set.

        What was yielded is done, what was not is open. A batch is one commit: a process that dies
        in the middle leaves no letter sent and open, and none settled and not sent.
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
        """Settle letters without sending anything: they are given up."""
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
        """The message that is sent in a letter's place."""
        if self._encode is None:
            raise RuntimeError("replaying needs an encoder")
        queue = edits.queue or letter.queue
        codec = self._codec_of(queue)
        message = repaired(self._legible(letter, edits), edits.every_change)
        message = _renewed(message, letter, codec)
        send = self._encode(message, queue)
        return message, Replay(letter_id=letter.id, send=send, changed=edits.changed)

    def _legible(self, letter: DeadLetter, edits: Edits) -> Message:
        """The message in a letter; of one that cannot be read, what is left of it.

        The latter needs a payload from the operator, and a type if it has lost its own.
        """
        reading = self.read(letter)
        if reading.message is not None:
            return reading.message
        if not edits.gives("payload"):
            raise Conflict(
                f"dead letter {letter.id} cannot be sent again as it is: {reading.problem}. "
                f"Give it a payload: ackbone dlq edit {letter.id} --payload JSON"
            )
        left = salvaged(letter.body if letter.intact else None)
        kind = letter.type or left.pop("type", "")
        if not (kind or edits.gives("type")):
            raise InvalidMessage(
                f"the type of dead letter {letter.id} is not known; name it with --type"
            )
        return Message(**{**left, "type": kind, "tenant_id": letter.tenant_id})

    @property
    def _acting(self) -> Operations:
        if self._operations is None:
            raise RuntimeError("these dead letters can only be looked at")
        return self._operations


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    """So long, or until asked to stop."""
    if seconds > 0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), seconds)


def _renewed(message: Message, letter: DeadLetter, codec: str) -> Message:
    """A new message that says what the old one said."""
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
    return Conflict(f"dead letter {letter.id} was {letter.state}{as_what}; it is not open any more")
