-- All tables, for both databases. Once an ackbone with this revision is released, this file never
-- changes: later tables and columns come by later revisions.
--
-- `revisions.statements` replaces these words:
--
--   | here      | PostgreSQL                                  | SQLite                        |
--   |-----------|---------------------------------------------|-------------------------------|
--   | MOMENT    | TIMESTAMP WITH TIME ZONE                    | BIGINT: microseconds          |
--   | NOW       | now()                                       | the same, in microseconds     |
--   | ROW_ID    | UUID                                        | BLOB: 16 bytes                |
--   | NAME      | VARCHAR(255), compared byte by byte         | VARCHAR(255)                  |
--   | TENANT    | VARCHAR(64) DEFAULT 'default' NOT NULL      | the same                      |
--   | BYTES     | BYTEA                                       | BLOB                          |
--   | JSON      | JSON                                        | TEXT                          |
--   | , ARRIVAL | , seq                                       | nothing: the rowid comes last |
--
-- A line that ends in the name of a database is left out for the other one.
--
-- Exceptions to "every business table has a UUID primary key", on purpose:
-- 1. `idempotency_keys`: its primary key is the business key, (tenant_id, key, subscription). Dedup
--    keys come from the messages; a second encoding would only hide them.
-- 2. `queue_executions`: its key is the identity of a task, (tenant_id, message_id, subscription),
--    in one unique index, which is the primary key on PostgreSQL; `id` is a UUIDv7 and has no index
--    of its own.
-- 3. `event_log`: append-only, and partitioned by time where the database can do that, so it has no
--    unique index; a gap or a double is found by its hash chain. On PostgreSQL an event whose month
--    has no partition yet goes into `event_log_default`.
-- 4. `alembic_version`: Alembic's own table, without `tenant_id` and UUID.
-- `effects`, `quotas`, `workers`, `sources`, `roles`, `send_windows`, `messages` and `witness` are
-- the engine's own tables.

CREATE TABLE idempotency_keys (
    tenant_id TENANT,
    subscription NAME NOT NULL,
    key NAME NOT NULL,
    message_id NAME NOT NULL,
    state VARCHAR(20) NOT NULL,
    value BYTES,
    created_at MOMENT DEFAULT NOW NOT NULL,
    expires_at MOMENT,
    PRIMARY KEY (tenant_id, key, subscription)
);
CREATE INDEX idx_idempotency_keys_tenant_expires ON idempotency_keys (tenant_id, expires_at)
    WHERE state = 'done';

CREATE TABLE queue_executions (
    id ROW_ID NOT NULL,
    tenant_id TENANT,
    subscription NAME NOT NULL,
    message_id NAME NOT NULL,
    queue_name NAME NOT NULL,
    event_name NAME,
    status VARCHAR(20) NOT NULL,
    held VARCHAR(10) NOT NULL,
    worker_id BIGINT,
    epoch INTEGER DEFAULT 0 NOT NULL,
    attempt INTEGER DEFAULT 0 NOT NULL,
    crashes INTEGER DEFAULT 0 NOT NULL,
    priority INTEGER DEFAULT 1 NOT NULL,
    due_at MOMENT,
    lane NAME,
    lane_seq BIGINT,
    idem_key NAME,
    created_at MOMENT,
    expires_at MOMENT,
    started_at MOMENT DEFAULT NOW NOT NULL,
    completed_at MOMENT,
    duration_ms INTEGER,
    agent_run_id ROW_ID,
    error_message TEXT,
    retry_count INTEGER DEFAULT 0,
    parked_kind VARCHAR(40),
    correlation_id NAME,
    trace_id NAME,
    history JSON,
    body BYTES,
    body_info JSON,
    body_crc BIGINT,
    body_sha256 BYTES,
    result BYTES,
    cancel_at MOMENT,
    lost_by TEXT
);
CREATE UNIQUE INDEX idx_queue_executions_tenant_message_id
    ON queue_executions (tenant_id, message_id, subscription);
ALTER TABLE queue_executions ADD CONSTRAINT idx_queue_executions_tenant_message_id  -- postgresql
    PRIMARY KEY USING INDEX idx_queue_executions_tenant_message_id;  -- postgresql
CREATE INDEX idx_queue_executions_tenant_queue_started
    ON queue_executions (tenant_id, queue_name, started_at DESC);
CREATE INDEX idx_queue_executions_tenant_status ON queue_executions (tenant_id, status)
    WHERE status <> 'running' AND status <> 'succeeded' AND status <> 'duplicate';
CREATE INDEX idx_tasks_ready ON queue_executions (subscription, priority, due_at)
    WHERE status = 'ready';
CREATE INDEX idx_tasks_running ON queue_executions (worker_id) WHERE status = 'running';
CREATE INDEX idx_tasks_waiting_key ON queue_executions (tenant_id, subscription, idem_key)
    WHERE status = 'waiting_key';
CREATE INDEX idx_tasks_lane ON queue_executions (tenant_id, subscription, lane, lane_seq)
    WHERE lane IS NOT NULL AND status <> 'succeeded' AND status <> 'failed' AND status <> 'rejected'
        AND status <> 'expired' AND status <> 'discarded' AND status <> 'duplicate';
CREATE INDEX idx_tasks_parked ON queue_executions (subscription, parked_kind)
    WHERE status = 'parked';

CREATE TABLE queue_metrics (
    id ROW_ID NOT NULL,
    tenant_id TENANT,
    queue_name NAME NOT NULL,
    metric_name VARCHAR(100) NOT NULL,
    metric_value DOUBLE NOT NULL,
    timestamp MOMENT DEFAULT NOW NOT NULL,
    tags JSON,
    PRIMARY KEY (id)
);
CREATE INDEX idx_queue_metrics_tenant_metric_time
    ON queue_metrics (tenant_id, queue_name, metric_name, timestamp DESC);

CREATE TABLE event_log (
    id ROW_ID NOT NULL,
    tenant_id TENANT,
    subscription NAME NOT NULL,
    task_id NAME NOT NULL,
    event_type VARCHAR(40) NOT NULL,
    data JSON NOT NULL,
    created_at MOMENT NOT NULL,
    worker_id BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    hash BYTES NOT NULL
) PARTITION BY RANGE (created_at);  -- postgresql
);  -- sqlite
CREATE INDEX idx_event_log_tenant_task ON event_log (tenant_id, task_id);
CREATE INDEX idx_event_log_created ON event_log USING brin (created_at)  -- postgresql
    WITH (autosummarize = on);  -- postgresql
CREATE TABLE event_log_default PARTITION OF event_log DEFAULT;  -- postgresql

CREATE TABLE dead_letters (
    id ROW_ID NOT NULL,
    tenant_id TENANT,
    subscription NAME NOT NULL,
    message_id NAME NOT NULL,
    queue_name NAME NOT NULL,
    event_name NAME,
    reason VARCHAR(60) NOT NULL,
    error TEXT,
    retry_count INTEGER DEFAULT 0 NOT NULL,
    history JSON,
    body BYTES,
    body_info JSON,
    body_crc BIGINT,
    state VARCHAR(20) DEFAULT 'open' NOT NULL,
    failed_at MOMENT NOT NULL,
    settled_at MOMENT,
    replay_id NAME,
    PRIMARY KEY (id)
);
CREATE INDEX idx_dead_letters_tenant_state_failed ON dead_letters (tenant_id, state, failed_at);
CREATE INDEX idx_dead_letters_tenant_message ON dead_letters (tenant_id, message_id);

CREATE TABLE effects (
    tenant_id TENANT,
    subscription NAME NOT NULL,
    message_id NAME NOT NULL,
    name NAME NOT NULL,
    state VARCHAR(20) NOT NULL,
    value BYTES,
    worker_id BIGINT NOT NULL,
    epoch INTEGER NOT NULL,
    created_at MOMENT NOT NULL,
    done_at MOMENT,
    PRIMARY KEY (tenant_id, subscription, message_id, name)
);

CREATE TABLE outbox (
    id ROW_ID NOT NULL,
    tenant_id TENANT,
    queue_name NAME NOT NULL,
    message_id NAME NOT NULL,
    headers JSON NOT NULL,
    body BYTES NOT NULL,
    body_crc BIGINT NOT NULL,
    priority INTEGER DEFAULT 1 NOT NULL,
    ordering_key NAME,
    ttl_us BIGINT,
    due_at MOMENT NOT NULL,
    created_at MOMENT NOT NULL,
    PRIMARY KEY (id)
);
CREATE INDEX idx_outbox_due ON outbox (due_at);

CREATE TABLE deliveries (
    id VARCHAR(36) NOT NULL,
    tenant_id TENANT,
    subscription NAME,
    task_id NAME,
    channel NAME NOT NULL,
    recipient VARCHAR(2048) COLLATE "C" NOT NULL,  -- postgresql
    recipient VARCHAR(255) NOT NULL,  -- sqlite
    content TEXT NOT NULL,
    conversation NAME,
    priority INTEGER DEFAULT 2 NOT NULL,
    status VARCHAR(20) DEFAULT 'pending' NOT NULL,
    retry_count INTEGER DEFAULT 0 NOT NULL,
    max_retries INTEGER DEFAULT 5 NOT NULL,
    due_at MOMENT NOT NULL,
    created_at MOMENT NOT NULL,
    last_attempt_at MOMENT,
    last_error TEXT,
    worker_id BIGINT,
    lane VARCHAR(64) COLLATE "C",
    options JSON,
    receipts JSON,
    calls INTEGER DEFAULT 0 NOT NULL,
    resent INTEGER DEFAULT 0 NOT NULL,
    in_doubt INTEGER DEFAULT 0 NOT NULL,
    expires_at MOMENT,
    seq BIGINT GENERATED BY DEFAULT AS IDENTITY,  -- postgresql
    put_off_by TEXT COLLATE "C",
    PRIMARY KEY (id)
);
CREATE INDEX idx_deliveries_tenant_task ON deliveries (tenant_id, task_id);
CREATE INDEX idx_deliveries_due ON deliveries (channel, priority DESC, due_at, ARRIVAL)
    WHERE status = 'pending';
CREATE INDEX idx_deliveries_lane ON deliveries (lane, ARRIVAL)
    WHERE status IN ('pending', 'queued', 'sending');
CREATE INDEX idx_deliveries_sending ON deliveries (lane) WHERE status = 'sending';
CREATE INDEX idx_deliveries_put_off ON deliveries (put_off_by, priority DESC, ARRIVAL)
    WHERE status = 'pending' AND put_off_by IS NOT NULL;

CREATE TABLE workers (
    worker_id BIGSERIAL NOT NULL,  -- postgresql
    worker_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,  -- sqlite
    name NAME NOT NULL,
    state VARCHAR(10) NOT NULL,
    started_at MOMENT NOT NULL,
    ended_at MOMENT,
    beat BIGINT DEFAULT 0 NOT NULL,  -- postgresql
    lease_until MOMENT,  -- postgresql
    machine TEXT,
    parent TEXT,
    offers TEXT  -- sqlite
    offers TEXT,  -- postgresql
    PRIMARY KEY (worker_id)  -- postgresql
);

CREATE TABLE sources (
    subscription NAME NOT NULL,
    part NAME DEFAULT '' NOT NULL,
    worker_id BIGINT,
    n BIGINT DEFAULT 0 NOT NULL,
    adopted_at MOMENT,
    paused_at MOMENT,
    PRIMARY KEY (subscription, part)
);
CREATE INDEX idx_sources_paused ON sources (subscription) WHERE paused_at IS NOT NULL;

CREATE TABLE roles (
    role NAME NOT NULL,
    worker_id BIGINT,
    state JSON,
    PRIMARY KEY (role)
);

CREATE TABLE approvals (
    id ROW_ID NOT NULL,
    tenant_id TENANT,
    subscription NAME NOT NULL,
    message_id NAME NOT NULL,
    queue_name NAME NOT NULL,
    event_name NAME,
    payload_sha256 BYTES NOT NULL,
    rule NAME NOT NULL,
    reason TEXT,
    state VARCHAR(20) DEFAULT 'pending' NOT NULL,
    four_eyes INTEGER DEFAULT 0 NOT NULL,
    keep_rejected INTEGER DEFAULT 0 NOT NULL,
    asked_at MOMENT NOT NULL,
    expires_at MOMENT NOT NULL,
    first_by NAME,
    first_at MOMENT,
    answered_by NAME,
    answered_at MOMENT,
    note TEXT,
    PRIMARY KEY (id)
);
CREATE INDEX idx_approvals_tenant_message ON approvals (tenant_id, message_id);
CREATE INDEX idx_approvals_tenant_state ON approvals (tenant_id, state, asked_at);
CREATE INDEX idx_approvals_pending ON approvals (expires_at) WHERE state = 'pending';

CREATE TABLE quotas (
    tenant_id TENANT,
    name NAME NOT NULL,
    window_us BIGINT NOT NULL,
    window_start MOMENT NOT NULL,
    runs BIGINT DEFAULT 0 NOT NULL,
    llm_calls BIGINT DEFAULT 0 NOT NULL,
    tokens BIGINT DEFAULT 0 NOT NULL,
    cost DOUBLE DEFAULT 0 NOT NULL,
    deferred_until MOMENT,
    deferred BIGINT DEFAULT 0 NOT NULL,
    PRIMARY KEY (tenant_id, name)
);

CREATE TABLE send_windows (
    key TEXT COLLATE "C" NOT NULL,
    state JSON NOT NULL,
    ends_at MOMENT NOT NULL,
    PRIMARY KEY (key)
);

-- The queue of the broker that shares the store's database. On PostgreSQL every message is a row
-- that dies young, so the table is vacuumed often and at full speed: its indexes are read from the
-- end where rows are deleted.
CREATE TABLE messages (
    seq BIGINT GENERATED BY DEFAULT AS IDENTITY,  -- postgresql
    seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,  -- sqlite
    queue NAME NOT NULL,
    state INTEGER DEFAULT 0 NOT NULL,
    priority INTEGER DEFAULT 1 NOT NULL,
    message_id NAME NOT NULL,
    lane NAME,
    due_at MOMENT,
    expires_at MOMENT,
    sent_at MOMENT NOT NULL,
    deliveries INTEGER DEFAULT 0 NOT NULL,
    worker_id BIGINT,  -- sqlite
    headers JSON NOT NULL,
    body BYTES NOT NULL,
    body_crc BIGINT NOT NULL  -- sqlite
    body_crc BIGINT NOT NULL,  -- postgresql
    PRIMARY KEY (seq)  -- postgresql
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,  -- postgresql
        autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0,  -- postgresql
        autovacuum_analyze_threshold = 1000000);  -- postgresql
);  -- sqlite
CREATE INDEX idx_messages_ready ON messages (queue, priority DESC, seq)
    WHERE state = 0 AND lane IS NULL;
CREATE INDEX idx_messages_lanes ON messages (queue, seq) WHERE state = 0 AND lane IS NOT NULL;
CREATE INDEX idx_messages_delayed ON messages (due_at) WHERE state = 1;  -- sqlite
CREATE INDEX idx_messages_delayed ON messages (due_at) WHERE due_at IS NOT NULL;  -- postgresql
CREATE INDEX idx_messages_taken ON messages (worker_id) WHERE state = 2;  -- sqlite

-- begin sqlite: the number of durable commits
CREATE TABLE witness (
    id INTEGER NOT NULL,
    commits BIGINT NOT NULL,
    PRIMARY KEY (id)
);
INSERT INTO witness (id, commits) VALUES (1, 0);
-- end
