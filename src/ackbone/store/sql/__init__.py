"""The statements of the store, one module per area: what each takes, what it returns, its text.

A text that serves both dialects is written once, as the default of its field; a dialect gives the
others itself, in `sqlite/sql` and `postgres/sql`. Parameters are numbered in the order that the
docstring of a statement gives. `task` stands for three of them: tenant, subscription and message
id. Times are microseconds. The id of a row is its text as a parameter, and 16 bytes in a row that
is returned.

Texts are written as for PostgreSQL, with a few functions that each dialect replaces by its own
words:

| in a text                | PostgreSQL                      | SQLite                              |
|--------------------------|---------------------------------|-------------------------------------|
| `$1::bigint`, `data::text` | as it is                      | `?1`, `data`: without the cast      |
| `$1::uuid`               | as it is                        | the 16 bytes of the id              |
| `at($1)`                 | microseconds to a timestamptz   | `?1`                                |
| `us(due_at)`             | a timestamptz to microseconds   | `due_at`                            |
| `uuid_send(id)`          | as it is                        | `id`                                |
| `placed(id)`             | `id`: ids and `seq` grow        | `rowid`                             |
| `digits(id)`             | 32 hexadecimal digits           | the same                            |
| `= ANY($1::text[])`      | as it is                        | `IN`, with a list as JSON           |
| `unnest($1::text[]) AS value` | as it is                   | `json_each`, with a list as JSON    |
| `starts_with`, `strpos`  | as it is                        | by `substr`, `instr`                |
| `FOR UPDATE`, `FOR SHARE`, `COLLATE "C"` | as it is        | left out: it is always so           |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from .claims import ClaimsSql, RunsSql
from .deliveries import DeliveriesSql
from .operations import ApprovalsSql, OperationsSql
from .records import RecordsSql
from .store import MaintenanceSql, StoreSql, WorkersSql

S = TypeVar("S", bound=msgspec.Struct)


class Statements(msgspec.Struct, frozen=True, kw_only=True):
    """All statements of a dialect, by the module that runs them."""

    operations: OperationsSql
    approvals: ApprovalsSql
    claims: ClaimsSql
    maintenance: MaintenanceSql
    runs: RunsSql
    store: StoreSql
    workers: WorkersSql
    records: RecordsSql
    deliveries: DeliveriesSql


Words = Sequence[tuple[str, str]]
"""Patterns of the shared texts, and what a dialect writes instead, in the order of replacement."""


def worded(text: str, words: Words) -> str:
    """A text in the words of a dialect."""
    for pattern, word in words:
        text = re.sub(pattern, word, text)
    return text


def rendered(statements: S, words: Words) -> S:
    """The same statements in the words of a dialect."""
    texts = msgspec.structs.asdict(statements)
    return type(statements)(**{name: worded(text, words) for name, text in texts.items()})
