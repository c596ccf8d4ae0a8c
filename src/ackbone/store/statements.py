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
    listed: str
    """limit, after this id, state, queue, rule, tenant → approvals, the oldest first"""
    named: str
    """as `RecordsSql.letters_named`"""
    named_like: str
    """as `RecordsSql.letters_named_like`"""


class DeliveriesSql(msgspec.Struct, frozen=True, kw_only=True):
    """Statements of `ackbone.store.deliveries` and `delivery_operations`. `reply` stands for the
    columns that `due_reply` reads."""

    levels: str
    """channels, prefix of paused channels, now → channel, priority, due_at of its first pending
    delivery, now; the database's own time where none is given"""
    due: str
    """channel, priority, now, limit → reply, the oldest first"""
    behind: str
    """id, worker_id and call of a delivery that is being sent, limit → reply and content of the
    next ones in its lane"""
    grant: str
    """ids, worker_id, now → id, content, receipts"""
    queue: str
    """ids"""
    expire: str
    """ids, error"""
    promote: str
    """lanes, now → a row for each lane whose next delivery is due now"""
    free: str
    """key of a window, now, limit → a row for each delivery that it put off and that is due now"""
    orphans: str
    """worker_id, limit → the columns of `Orphan`: other workers were sending them and are gone"""
    take_back: str
    """ids, now, error: they are due again, in doubt"""
    windows: str
    """keys → key, state"""
    counting_windows: str
    """now → key, state of the windows that end later"""

    pause: str
    """role → a row if it was not there"""
    unpause: str
    """role → a row if it was there"""
    paused: str
    """prefix → the roles that begin with it"""
    retry: str
    """id, now → tenant, subscription, task, channel, lane"""
    edit: str
    """id, content → the same"""
    discard: str
    """id, now → the same"""
    state: str
    """id → status, whether a part was sent"""
    records: str
    """status, channel, tenant, since, limit → the columns of `DeliveryRecord`, newest first"""
    ids: str
    """the same → id, oldest first"""
    named: str
    """id, tenant, limit → the columns of `DeliveryRecord`"""
    beginning: str
    """beginning of an id, tenant, limit → the same"""


class MaintenanceSql(msgspec.Struct, frozen=True, kw_only=True):
    """Statements of the modules that look after the store: `outbox`, `copies`, `metric_rows`,
    `governance`, `retention` and `anchors`. `UnitOfWork.read_due` runs those that end in `_due`."""

    outbox_due: str
    """limit → the columns of `outbox.Row`, the oldest first; the id is a text"""
    outbox_delete: str
    """ids"""
    outbox_wait: str
    """ids, due_at"""

    copies_due: str
    """subscription, µs, limit → tenant, message id of tasks that have waited this long for their
    broker copy, the oldest first"""
    end_copy: str
    """task, now, error, due before → the columns of `copies.Lost`, if the task still waits"""

    add_metric: str
    """id, tenant, queue, name, value, now, tags (JSON)"""

    approvals_due: str
    """→ a row if an approval expired and nobody has ended it"""
    forget_quota_waits: str
    """no quota is known to be exhausted any more"""
    look_at_quotas_again: str
    """now → a row for each task that waited for a quota and is ready now"""

    tenants_with_keys: str
    """→ tenant, for each that has idempotency keys; read through the index, without the keys"""
    delete_expired_keys: str
    """now, tenant → a row for each key that was deleted, at most `retention.BATCH`"""

    seals: str
    """task of the tenant `_ledger`, limit → data, the newest first"""


class RunsSql(msgspec.Struct, frozen=True, kw_only=True):
    """Statements of `ackbone.store.runs`. `token` is two parameters: worker id and epoch."""

    fence: str
    """task, token → a row if the run still owns its message; it keeps it until the end"""
    adopt: str
    """task, token, body, body_info, body_crc → a row if the run still owns its message"""
    effect: str
    """task, name → state, value, token"""
    begin_effect: str
    """task, name, token, now"""
    effect_raised: str
    """task, name, error"""


class WorkersSql(msgspec.Struct, frozen=True, kw_only=True):
    """Statements of `ackbone.store.workers`."""

    name: str
    """worker → its name"""
    announce: str
    """worker, offers"""
    leaving: str
    """worker"""
    end: str
    """worker, state (`left` or `dead`), now"""
    forget: str
    """worker: delete its row, if it has left"""
    ended: str
    """list of names → those whose workers have died or left"""
    free_sources: str
    """worker"""
    running: str
    """worker → the columns of `workers.Running`, locked; the worker has left"""
    running_of_the_gone: str
    """→ the same, of all workers that are not there any more"""
    give_back: str
    """task, crashes, attempt, history or NULL, lost_by or NULL, now"""
    quarantine: str
    """task, crashes, error, history, now"""


class StoreSql(msgspec.Struct, frozen=True, kw_only=True):
    """Statements of `ackbone.store.base` and `notices`."""

    to_cancel: str
    """worker → the tasks that it runs and that are to be cancelled"""
    suspects_due: str
    """subscriptions → subscription, type, how many run in a small group, how many run alone; by
    `read_due`"""
    paused: str
    """→ subscriptions"""
    busy: str
    """subscriptions → whether anything of them waits, runs or is due later, parked messages
    aside"""
    stuck: str
    """subscriptions → how many messages are left, if nothing is ready and nothing runs. Such a
    message waits for a parked one, or for one whose copy is with the broker."""
    holds_role: str
    """role, worker → a row if the worker holds it"""
    take_role: str
    """role, worker → a row if the role was free"""
    identity: str
    """→ the id of this store, if it has one"""
    set_identity: str
    """id"""
    ended_tasks: str
    """tasks as a JSON array of [tenant, subscription, message id] → task, event_name, result,
    retry_count, error_message, idem_key, name of the worker that ran it"""


class RecordsSql(msgspec.Struct, frozen=True, kw_only=True):
    """Statements of `ackbone.store.records` and `endings`.

    Each returns the columns that a builder in `ackbone.store.record_rows` reads, or those that are
    given here. A filter that is NULL lets every row pass.
    """

    letters: str
    """limit, before this id, queue, reason, tenant, failed since, state, type, text of the error,
    failed before → dead letters without bodies, the newest first"""
    letter_ids: str
    """the same; a limit that is NULL is no limit → ids, the oldest first"""
    letters_named: str
    """id, tenant, limit, message id → dead letters, the newest first"""
    letters_named_like: str
    """first and, after tenant and limit, last message id, then the first and last id as hexadecimal
    digits → dead letters, the newest first"""
    letters_by_id: str
    """ids → dead letters in any order"""
    letters_of: str
    """tenant, message id → dead letters without bodies, the oldest first"""
    parked: str
    """queue, kind, tenant, before this place, limit → tasks without bodies, the newest first"""
    tasks: str
    """tenant, message id → tasks"""
    tasks_like: str
    """tenant, first and last message id, status, limit → tasks without bodies"""
    tasks_correlated: str
    """correlation id, limit → tasks without bodies"""
    tenants_of_tasks: str
    """→ tenants"""
    tenants_of_events: str
    """→ tenants"""
    find_task: str
    """tenant, limit, message id → message id"""
    find_tasks_like: str
    """tenant, limit, first and last message id → message ids"""
    find_event: str
    """as `find_task`, in the ledger"""
    find_events_like: str
    """as `find_tasks_like`, in the ledger"""
    find_related: str
    """correlation id, trace id or idempotency key; tenant, limit → tenant, message id, which"""
    events_of: str
    """tenant, message id → events, the oldest first"""
    effects_of: str
    """tenant, message id → name, state, value, worker_id, created_at, done_at"""
    replies_of: str
    """tenant, message id → the columns of `Reply`"""
    queues: str
    """→ tenant and queue of all tasks"""
    unsent: str
    """now → queue, how many are due in the outbox, how many are not, time of the oldest due one"""
    unended: str
    """now → queue, how many wait, how many are parked, time of the oldest that waits and is due"""
    running: str
    """→ queue, number of running tasks"""
    open_letters: str
    """→ queue, number of open dead letters"""
    paused_queues: str
    """→ queue, since when it is paused or NULL"""
    task_counts: str
    """→ queue, status, number"""
    reply_counts: str
    """→ channel, status, number"""
    workers: str
    """→ worker_id, name, started_at, whether its lease holds, number of its runs, offers"""
    quota_use: str
    """tenant → the columns of `use_of_row`"""
    final_events: str
    """subscription, tenants, task ids → tenant, task id, event_type, data, history of the letter"""


class ClaimsSql(msgspec.Struct, frozen=True, kw_only=True):
    """Statements of `ackbone.store.claims` and `dead_on_arrival`, each for one task. Bulk
    statements are behind `ackbone.store.tables`."""

    hold: str
    """task, body, body_info, body_crc: the row takes the message, if the broker holds it"""
    keep: str
    """task, now: a task that is `open` is ready"""
    count_failures: str
    """task, attempt, retry_count"""
    found_again: str
    """task: nobody has lost it any more"""
    wait_for_key: str
    """task: gives the attempt back"""
    pass_on: str
    """task, now: gives the attempt back"""
    park: str
    """task, parked_kind, reason: gives the attempt back"""
    put_off: str
    """task, due_at, reason: gives the attempt back"""
    expire: str
    """task, now"""
    fail: str
    """task, error, now"""
    known_hash: str
    """task → body_sha256"""
    dead_on_arrival: str
    """id, task, queue, type, worker_id, now, error, body_sha256 → a row if there was none"""
    complete_letter: str
    """task, body, body_info, body_crc: only if the dead letter has no body"""

    unresolved: str
    """→ a row if a message waits for a key that is free or done"""
    stuck: str
    """→ tenant, subscription, lane of conversations whose first message only waits for its turn"""


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
