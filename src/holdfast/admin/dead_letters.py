"""Dead letters: list, read, send again, edit, discard.

A replay is a new message with an id of its own, linked to the old one, so that each message keeps
its one final outcome. It keeps the idempotency key (a dead letter has given it back), the ordering
key and the correlation; its time to live starts anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from holdfast.core.clock import Clock, SystemClock
from holdfast.core.errors import Conflict, HoldfastError, InvalidMessage
from holdfast.core.ids import new_id
from holdfast.core.message import Message
from holdfast.core.records import DeadLetter, LetterFilter, Operations, Records, Replay
from holdfast.core.store import Send

from .bodies import Reading, read_body
from .naming import SHORTEST, check_typed, the_one

Encode = Callable[[Message, str], Send]
"""A message and its queue as the bytes that are sent. Raises InvalidMessage."""
BATCH = 100
REPLAY_HEADER = "x-replay-of"
"""Carries the old id where the wire form has no metadata."""


class Edits(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator changes; unset fields stay as they are."""

    payload: Any = msgspec.UNSET
    type: str | None = None
    headers: Mapping[str, str] = {}
    queue: str | None = None
    """Send it to another queue."""

    @property
    def changed(self) -> tuple[str, ...]:
        """Fields of the message that are changed; another queue alone is no edit."""
        names = (("payload", self.payload is not msgspec.UNSET), ("type", self.type is not None))
        found = [name for name, is_set in names if is_set]
        return (*found, "headers") if self.headers else tuple(found)


class Handled(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one letter."""

    letter: DeadLetter
    replay_id: str | None = None
    error: HoldfastError | None = None


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
            hint="; 'holdfast dlq list' shows what there is",
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

    async def replay(
        self,
        letters: Sequence[DeadLetter] | LetterFilter,
        *,
        limit: int | None = None,
        rate: float | None = None,
        edits: Edits | None = None,
        dry_run: bool = False,
    ) -> AsyncIterator[Handled]:
        """Send letters again, oldest first, at most `rate` a second.

        Which ones is settled at the start: what dies again meanwhile is not sent a second time.
        """
        if isinstance(letters, LetterFilter):
            ids = list(await self._records.letter_ids(letters, limit=limit))
        else:
            ids = [letter.id for letter in letters]
        size = 1 if rate is not None else BATCH
        begun = self._clock.monotonic()
        for at in range(0, len(ids), size):
            if rate is not None and not dry_run:
                await asyncio.sleep(max(0.0, begun + at / rate - self._clock.monotonic()))
            batch = ids[at : at + size]
            for handled in await self._replay_batch(batch, edits or Edits(), dry_run):
                yield handled

    async def count(self, where: LetterFilter, *, limit: int | None = None) -> int:
        """How many letters a filter means, now."""
        return len(await self._records.letter_ids(where, limit=limit))

    async def discard(
        self,
        letters: Sequence[DeadLetter] | LetterFilter,
        *,
        reason: str,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> AsyncIterator[Handled]:
        """Settle letters without sending anything."""
        if isinstance(letters, LetterFilter):
            ids = list(await self._records.letter_ids(letters, limit=limit))
        else:
            ids = [letter.id for letter in letters]
        for at in range(0, len(ids), BATCH):
            found = await self._load(ids[at : at + BATCH])
            errors: Sequence[HoldfastError | None] = [_not_open(letter) for letter in found]
            if not dry_run:
                errors = await self._acting.discard_letters(
                    [letter.id for letter in found], reason=reason
                )
            for letter, error in zip(found, errors, strict=True):
                yield Handled(letter=letter, error=error)

    async def _replay_batch(self, ids: Sequence[str], edits: Edits, dry_run: bool) -> list[Handled]:
        handled: dict[str, Handled] = {}
        replays: list[Replay] = []
        letters = await self._load(ids)
        for letter in letters:
            try:
                error = _not_open(letter)
                if error is not None:
                    raise error
                replay = self._again(letter, edits)
            except HoldfastError as error:
                handled[letter.id] = Handled(letter=letter, error=error)
                continue
            replays.append(replay)
            handled[letter.id] = Handled(letter=letter, replay_id=replay.send.outgoing.id)
        if replays and not dry_run:
            answers = await self._acting.replay(replays)
            for replay, answer in zip(replays, answers, strict=True):
                if answer is not None:
                    old = handled[replay.letter_id]
                    handled[replay.letter_id] = Handled(letter=old.letter, error=answer)
        return [handled[letter.id] for letter in letters]

    async def _load(self, ids: Sequence[str]) -> list[DeadLetter]:
        found = [await self._records.letter(each) for each in ids]
        return [letter for letter in found if letter is not None]

    def _again(self, letter: DeadLetter, edits: Edits) -> Replay:
        """The message that is sent in a letter's place."""
        if self._encode is None:
            raise RuntimeError("replaying needs an encoder")
        reading = self.read(letter)
        message = reading.message
        if message is None:
            if edits.payload is msgspec.UNSET:
                raise Conflict(
                    f"dead letter {letter.id} cannot be sent again as it is: {reading.problem}. "
                    f"Give it a payload: holdfast dlq edit {letter.id} --payload JSON"
                )
            if not (edits.type or letter.type):
                raise InvalidMessage(
                    f"the type of dead letter {letter.id} is not known; name it with --type"
                )
            message = Message(type=letter.type or "", tenant_id=letter.tenant_id)
        queue = edits.queue or letter.queue
        send = self._encode(_renewed(message, letter, edits, self._codec_of(queue)), queue)
        return Replay(letter_id=letter.id, send=send, changed=edits.changed)

    @property
    def _acting(self) -> Operations:
        if self._operations is None:
            raise RuntimeError("these dead letters can only be looked at")
        return self._operations


def _renewed(message: Message, letter: DeadLetter, edits: Edits, codec: str) -> Message:
    """A new message that says what the old one said."""
    now = datetime.now(UTC)
    metadata = {k: v for k, v in message.metadata.items() if k != "retry_count"}
    metadata["replay_of"] = letter.message_id
    headers = {**message.headers, **edits.headers}
    if codec != "standard":
        headers[REPLAY_HEADER] = letter.message_id
    lifetime = None if message.expires_at is None else message.expires_at - message.created_at
    return msgspec.structs.replace(
        message,
        id=new_id(),
        type=edits.type or message.type,
        payload=message.payload if edits.payload is msgspec.UNSET else edits.payload,
        tenant_id=letter.tenant_id,
        created_at=now,
        expires_at=now + lifetime if lifetime is not None and lifetime > timedelta() else None,
        attempt=1,
        headers=headers,
        metadata=metadata,
        raw=None,
    )


def _not_open(letter: DeadLetter) -> HoldfastError | None:
    if letter.state == "open":
        return None
    as_what = f" as message {letter.replay_id}" if letter.replay_id else ""
    return Conflict(f"dead letter {letter.id} was {letter.state}{as_what}; it is not open any more")
