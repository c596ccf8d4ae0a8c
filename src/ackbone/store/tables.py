"""What claim and finish need from the tables of a dialect, beyond plain statements.

These are the bulk statements whose form differs: `VALUES` on SQLite, arrays on PostgreSQL. The
classes behind them hold no policy. Which message may run, and what an outcome means, is decided in
`claims.py` and `finish.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .outcomes import TaskRow

if TYPE_CHECKING:
    from ackbone.core.message import Message
    from ackbone.core.store import Candidate, Finished, Run, Verdict

    from .claiming import Choice, Claiming
    from .tasks import Existing, Ready, Task
    from .unit import Identity, Key, Lane, Row

Pair = tuple[str, str]
"""tenant_id and message_id, within one subscription"""
QuotaName = tuple[str, str]
"""tenant_id and the name of a quota"""


class Wanted(NamedTuple):
    """A key that a message asks for."""

    tenant_id: str
    key: str
    message_id: str


class Holder(NamedTuple):
    """The message that has a key."""

    message_id: str
    state: str
    """`running` or `done`."""
    value: bytes | None
    """The result, once it is done."""


class Waiter(TaskRow):
    """A message that waits for a key which is free or done."""

    key: str
    lane: str | None
    holder: str | None
    """The id of the message that had the key."""
    state: str | None
    """None: the key is free."""
    value: bytes | None


class Placed(NamedTuple):
    """A message with its place in a conversation."""

    task: Task
    status: str
    lane_seq: int


class TaskRows(Protocol):
    """`queue_executions`."""

    async def claim(self, claim: Claiming, new: Sequence[Task]) -> Sequence[Task]:
        """Write rows that run under this worker, and take up `open` rows of the same message.

        Returns the tasks that this worker runs now; for the others there was a row before. The
        returned ones know their `row`, and their epoch and history if the row was `open`.
        """

    async def find(self, subscription: str, pairs: Sequence[Pair]) -> Mapping[Pair, Existing]:
        """Rows by their identity. They are locked if a claim asked for them before."""

    async def lock(self, subscription: str, pairs: Sequence[Pair]) -> None:
        """Lock rows as a claim locks them."""

    async def append(self, claim: Claiming, placed: Sequence[Placed]) -> Sequence[Task]:
        """Write rows that wait in their conversations; returns the tasks that had none before."""

    async def claim_due(
        self,
        claim: Claiming,
        *,
        choice: Choice,
        crashes: tuple[int, int],
        priorities: Sequence[int],
        limit: int,
    ) -> Sequence[Ready]:
        """Claim due rows that the store holds, by priority and due time, lane heads only."""

    async def finish(self, batch: Sequence[Finished]) -> list[str | None]:
        """Write the outcomes of runs whose token is still on their row.

        Returns who holds the message (`store` or `broker`) for each one; None: it was not written.
        If two of a batch have the same token, only the first one is written.
        """

    async def tokens(self, runs: Sequence[Run]) -> Mapping[Identity, tuple[int | None, int, str]]:
        """worker_id, epoch and status of these runs' rows."""

    async def ready_heads(self, claim: Claiming, choice: Choice, limit: int) -> int:
        """Count due messages of conversations that this worker could run now, up to `limit`.

        A message that waits for a retry, that crashed a worker, or that only another worker can
        handle does not count: it must not keep others out of their lanes.
        """

    async def approved(self, subscription: str, pairs: Sequence[Pair]) -> Sequence[Row]:
        """tenant_id, message_id, approval id, rule, payload_sha256 of what people allowed."""


class KeyRows(Protocol):
    """`idempotency_keys`, and the tasks that wait for one."""

    async def take(
        self, subscription: str, wanted: Sequence[Wanted], *, expiry: bool
    ) -> Mapping[Pair, Holder]:
        """Take keys; returns the lost ones, by tenant and message.

        A message gets a key that nobody has, that it has already, or whose window is over
        (`expiry`: windows may be over). If two of a batch ask for one, the first one gets it.
        """

    def keep(self, done: Sequence[Finished]) -> None:
        """Keep the results of successes with their keys, for the window of each."""

    def free(self, keys: Sequence[tuple[Key, str]]) -> None:
        """Give keys back, each with the id of the message that has it."""

    async def waiting(self, keys: Collection[Key] | None) -> Sequence[Waiter]:
        """Messages that wait for these keys (None: for any) while they are free or done.

        The oldest comes first. Nobody else moves them until the end of the transaction.
        """

    async def end_as_duplicates(self, ended: Sequence[tuple[Identity, bytes | None]]) -> None:
        """End tasks as duplicates, each with the result of the first message of its key."""

    async def make_ready(self, tasks: Sequence[Identity]) -> None:
        """Tasks that waited for a key may be claimed."""


class LaneRows(Protocol):
    """Conversations: the sources they come from, and the order of their tasks."""

    async def own_source(self, subscription: str, worker_id: int) -> bool:
        """Become or stay the one fetcher of an ordered source. False: a living worker has it."""

    async def lead(self, subscription: str) -> bool:
        """Become the only one that moves messages of a queue into their conversations, until the
        end of the transaction. False: another transaction does."""

    async def busy(self, subscription: str, lanes: Collection[Pair]) -> set[Pair]:
        """Those of these (tenant, lane) that have a task which has not ended."""

    async def advance(self, lanes: Collection[Lane]) -> int:
        """Make the first task of each lane ready if it only waited for its turn; returns how many
        were made ready."""


class QuotaRows(Protocol):
    """`quotas`."""

    async def lock(self, names: Sequence[QuotaName]) -> Mapping[QuotaName, Sequence[Any]]:
        """`quota_book.COLUMNS` of these rows; nobody else changes them until the end."""

    def write(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Rows as `QuotaBook.changed` returns them."""


class GrantedRuns(Protocol):
    """Runs that a claim granted whose commit got no answer."""

    def keep(self, verdicts: Sequence[Verdict]) -> None:
        """Remember these runs if the answer to this transaction's commit is lost."""

    def of(self, claim: Claiming, message: Message, row: Existing) -> Run | None:
        """The run that an earlier call granted to this worker, if its commit was made after all."""

    async def held_by_store(self, claim: Claiming) -> list[Run]:
        """Such runs of messages that the store holds; a commit in progress is waited for."""


class Copy(NamedTuple):
    """A broker's copy of a message that has a row, or asks for one in the same batch."""

    at: int
    """Its place in the batch."""
    candidate: Candidate
    message: Message
