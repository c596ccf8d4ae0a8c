"""What PostgreSQL says, in our words: the one place that knows its error codes."""

from __future__ import annotations

import re

import psycopg
from psycopg import errors

from ackbone.core.errors import (
    SchemaMismatch,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
)

from .address import Address

_REPEAT = ("40001", "40P01", "55P03")
"""Serialization failure, deadlock, a lock that was not free in time: nothing was written."""
_GONE = ("08", "57P", "53300", "25P03", "57014")
"""Connection, shutdown and start of the server, no connection left, told to stop waiting."""
_DENIED = (
    "password authentication failed",
    "authentication failed for user",
    "no password supplied",
    "no pg_hba.conf entry",
    "is not permitted to log in",
)
"""What the server says to a login that it refuses. A failed connection has no error code."""
_MISSING = re.compile(r'(role|database) ("[^"]*") does not exist')
_OF_VALUES = ("21", "22", "23", "54")
"""Two rows where one may be, data that no column takes, constraints, limits of size and depth."""


def may_repeat(error: BaseException) -> bool:
    """Was it rolled back for no fault of its own?"""
    if not isinstance(error, psycopg.Error):
        return False
    return error.sqlstate in _REPEAT or _went_to_another_month(error)


def _went_to_another_month(error: psycopg.Error) -> bool:
    """An event was on its way to the default partition while the one of its month was made.

    No constraint is named: it is the partition's own.
    """
    return isinstance(error, errors.CheckViolation) and error.diag.constraint_name is None


def is_away(error: BaseException) -> bool:
    """Is it the connection or the server, and not what was asked?"""
    if isinstance(error, TimeoutError | OSError):
        return True
    if not isinstance(error, psycopg.Error):
        return False
    state = error.sqlstate
    if state is None:  # never came to an answer
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return state.startswith(_GONE)


def _is_of_a_value(error: BaseException) -> bool:
    """May a single value be the reason? Nothing else may cost a message its outcome."""
    if not isinstance(error, psycopg.Error):
        return True  # Python's own: it could not be encoded
    if error.sqlstate is None:  # the driver's own: it was never sent
        return isinstance(error, psycopg.DataError)
    return error.sqlstate.startswith(_OF_VALUES)


def translate(  # noqa: PLR0911 - one per kind of failure
    error: BaseException, address: Address
) -> StoreError | None:
    """Our error for one that is not the fault of a single value; None: it may be."""
    where = address.shown
    if is_away(error):
        denied = _denied(error)
        if denied is not None:
            return StoreDenied(f"{where} {denied}")
        return StoreUnavailable(f"{where} is away: {_first_line(error)}")
    if may_repeat(error):
        return StoreUnavailable(f"{where} could not do it now: {_first_line(error)}")
    if isinstance(error, errors.DiskFull | errors.OutOfMemory):
        return StoreFull(f"{where} has no room: {_first_line(error)}")
    if isinstance(error, errors.ReadOnlySqlTransaction):
        return StoreUnavailable(
            f"{where} only reads (a standby, or default_transaction_read_only is on); "
            "give `store` the address of the primary"
        )
    if isinstance(error, errors.InsufficientPrivilege):
        return StoreUnavailable(
            f"{where}: the role may not do this ({_first_line(error)}). Run 'ackbone migrate "
            "--worker-role NAME' with the name of this role, as the owner of the tables"
        )
    if isinstance(error, errors.UndefinedTable | errors.UndefinedColumn | errors.InvalidSchemaName):
        return SchemaMismatch(
            f"{where} lacks tables or columns of this ackbone ({_first_line(error)}). "
            "Run 'ackbone migrate'"
        )
    if not _is_of_a_value(error):
        return StoreUnavailable(f"{where} failed: {_first_line(error)}")
    return None


def _denied(error: BaseException) -> str | None:
    """Why the server let us not in, and what to do; None: it is something else."""
    for line in str(error).splitlines():
        said = line.rpartition("FATAL:")[2].strip()
        missing = _MISSING.search(said)
        if missing is not None:
            return f"has no {missing[1]} {missing[2]}: create it, or correct `store`"
        if any(words in said for words in _DENIED):
            return f"refuses the login: {said}. Correct user and password in `store`"
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
