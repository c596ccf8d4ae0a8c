"""The statements that each dialect writes in its own SQL, and what they take and return.

Parameters are numbered in the order that is given here. `task` stands for three of them: tenant,
subscription and message id. Times are microseconds. The id of a row is its text as a parameter,
and 16 bytes in a row that is returned.
"""

from __future__ import annotations

import msgspec


class OperationsSql(msgspec.Struct, frozen=True, kw_only=True):
    """Statements of `ackbone.store.operations`, `parked`, `orchestration` and `letters`."""

    write_letter: str
    """The columns of a dead letter in the order of `bury`."""
    settle_letter: str
    """id, state, replay_id, now → the task of the letter, if it was open."""
    letter_state: str
    """id → state, settled_at, replay_id"""
    unknown_effects: str
    """task → the names of effects that began and did not end"""
    effect_is_done: str
    """task, name → a row if it is"""
    effect_done: str
    """task, name, value, now → a row if it was begun"""
    effect_cleared: str
    """task, name → a row if it was begun"""
    pause_queue: str
    """queue, now → a row if it was not paused"""
    unpause_queue: str
    """queue → a row if it was paused"""

    task_state: str
    """task → status, parked_kind; nobody else changes the row until the end"""
    resume: str
    """task, now"""
    wait_for_handler: str
    """parked_kind, subscription, beginning of the reason, any type?, types → a row if any waits"""
    handler_came: str
    """the same, now → the tasks that are ready now"""
    wait_for_effect: str
    """→ a row if a message is parked for an effect whose result was recorded since"""
    effect_known: str
    """now → the tasks that are ready now"""
    parked_task: str
    """task → queue_name, event_name, trace_id, idem_key, lane, retry_count, history, body,
    body_info"""
    end_parked: str
    """task, status, reason, now"""
    free_key: str
    """tenant, subscription, key, message id"""

    record_task: str
    """id, task, queue, type, status, worker_id, now, completed_at, error, retry_count, key, result
    → a row if there was none"""
    created: str
    """task → a row if it has a `task.created` event"""
    ask_to_cancel: str
    """task, now"""
    discard_task: str
    """task, reason, now → queue_name, event_name, trace_id, idem_key, lane"""


class ApprovalsSql(msgspec.Struct, frozen=True, kw_only=True):
    """Statements of `ackbone.store.approvals`. They return the columns that `of_row` reads."""

    ask: str
    """The columns of an approval in the order of `ask`."""
    approve: str
    """id, expiry, by, now, note → the approval, if this is the yes that decides"""
    first_yes: str
    """id, expiry, by, now, note → the approval, if this is the first of two"""
    reject: str
    """id, expiry, by, now, note → the approval and keep_rejected"""
    expire: str
    """now, limit → approvals and keep_rejected"""
    withdraw: str
    """task, by, now, note → id, rule"""
    pending: str
    """task → id"""
    one: str
    """id → the approval"""


class DeskSql(msgspec.Struct, frozen=True, kw_only=True):
    """Statements of `ackbone.store.desk`."""

    pause: str
    """role → a row if it was not there"""
    unpause: str
    """role → a row if it was there"""
    retry: str
    """id, now → tenant, subscription, task, channel, lane"""
    edit: str
    """id, content → the same"""
    discard: str
    """id, now → the same"""
    state: str
    """id → status, whether a part was sent"""
    promote: str
    """lane, now: the next delivery of a lane is due"""


class Statements(msgspec.Struct, frozen=True, kw_only=True):
    """All statements of a dialect, by the module that runs them."""

    operations: OperationsSql
    approvals: ApprovalsSql
    desk: DeskSql
