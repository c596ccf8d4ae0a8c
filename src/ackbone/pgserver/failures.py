"""PostgreSQL's errors as ours. This is the one place that knows its error codes."""

from __future__ import annotations

import re

import psycopg
from psycopg import errors

from ackbone.core.errors import SchemaMismatch, StoreDenied, StoreError, StoreFull, StoreUnavailable

from .address import Address

_REPEAT = ("40001", "40P01", "55P03")
"""Serialization failure, deadlock, a lock that was not free in time: nothing was written."""
_GONE = ("08", "57P", "53300", "25P03", "57014")
"""Connection, shutdown and start of the server, no connection left, statement cancelled."""
_DENIED = (
    "password authentication failed",
    "authentication failed for user",
    "no password supplied",
    "no pg_hba.conf entry",
    "is not permitted to log in",
)
"""Texts of the server when it refuses a login. A failed connection has no error code."""
_MISSING = re.compile(r'(role|database) ("[^"]*") does not exist')
_OF_VALUES = ("21", "22", "23", "54")
"""Too many rows, data that no column takes, constraints, limits of size and depth."""


def may_repeat(error: BaseException) -> bool:
    """Return True if the transaction was rolled back through no fault of its own."""
    if not isinstance(error, psycopg.Error):
        return False
    return error.sqlstate in _REPEAT or _went_to_another_month(error)


def _went_to_another_month(error: psycopg.Error) -> bool:
    """Return True if an event went to the default partition while that of its month was made.

    The error names no constraint, because the constraint is the partition's own.
    """
    return isinstance(error, errors.CheckViolation) and error.diag.constraint_name is None


def is_away(error: BaseException) -> bool:
    """Return True if the connection or the server failed, and not the statement."""
    if isinstance(error, TimeoutError | OSError):
        return True
    if not isinstance(error, psycopg.Error):
        return False
    state = error.sqlstate
    if state is None:  # there was no answer
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return state.startswith(_GONE)


def _is_of_a_value(error: BaseException) -> bool:
    """Return True if a single value may be the reason. Only then may a message lose its outcome."""
    if not isinstance(error, psycopg.Error):
        return True  # an error of Python: the value could not be encoded
    if error.sqlstate is None:  # an error of the driver: the value was never sent
        return isinstance(error, psycopg.DataError)
    return error.sqlstate.startswith(_OF_VALUES)


def translate(  # noqa: PLR0911 - one per kind of failure
    error: BaseException, address: Address
) -> StoreError | None:
    """Return our error, or None if a single value may be the reason."""
    where = address.shown
    if is_away(error):
        denied = _denied(error)
        if denied is not None:
            return StoreDenied(f"{where} {denied}")
        away = StoreUnavailable(f"{where} is away: {_first_line(error)}")
        away.hint = "start it, or correct `store` in ackbone.yaml"
        return away
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
    """Return why the server refuses the login, and what to do. None for other errors."""
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
