-- Made by `python -m ackbone.store.sqlite.migrate` from the migrations; not edited.
-- Run inside one transaction by ensure_schema, for a new SQLite file.
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
-- Running upgrade  -> 0001
CREATE TABLE idempotency_keys (
    tenant_id VARCHAR(64) DEFAULT 'default' NOT NULL,
    subscription VARCHAR(255) NOT NULL,
    "key" VARCHAR(255) NOT NULL,
    message_id VARCHAR(255) NOT NULL,
    state VARCHAR(20) NOT NULL,
    value BLOB,
    created_at BIGINT DEFAULT (CAST(strftime('%s', 'now') || substr(strftime('%f', 'now'), 4) || '000' AS INTEGER)) NOT NULL,
    expires_at BIGINT,
    PRIMARY KEY (tenant_id, "key", subscription)
);
CREATE INDEX idx_idempotency_keys_tenant_expires ON idempotency_keys (tenant_id, expires_at) WHERE state = 'done';
CREATE TABLE queue_executions (
    id BLOB NOT NULL,
    tenant_id VARCHAR(64) DEFAULT 'default' NOT NULL,
    subscription VARCHAR(255) NOT NULL,
    message_id VARCHAR(255) NOT NULL,
    queue_name VARCHAR(255) NOT NULL,
    event_name VARCHAR(255),
    status VARCHAR(20) NOT NULL,
    held VARCHAR(10) NOT NULL,
    worker_id BIGINT,
    epoch INTEGER DEFAULT 0 NOT NULL,
    attempt INTEGER DEFAULT 0 NOT NULL,
    crashes INTEGER DEFAULT 0 NOT NULL,
    priority INTEGER DEFAULT 1 NOT NULL,
    due_at BIGINT,
    lane VARCHAR(255),
    lane_seq BIGINT,
    idem_key VARCHAR(255),
    created_at BIGINT,
    expires_at BIGINT,
    started_at BIGINT DEFAULT (CAST(strftime('%s', 'now') || substr(strftime('%f', 'now'), 4) || '000' AS INTEGER)) NOT NULL,
    completed_at BIGINT,
    duration_ms INTEGER,
    agent_run_id BLOB,
    error_message TEXT,
    retry_count INTEGER DEFAULT 0,
    parked_kind VARCHAR(40),
    correlation_id VARCHAR(255),
    trace_id VARCHAR(255),
    history TEXT,
    body BLOB,
    body_info TEXT,
    body_crc BIGINT,
    body_sha256 BLOB,
    result BLOB
);
CREATE UNIQUE INDEX idx_queue_executions_tenant_message_id ON queue_executions (tenant_id, message_id, subscription);
CREATE INDEX idx_queue_executions_tenant_queue_started ON queue_executions (tenant_id, queue_name, started_at DESC);
CREATE INDEX idx_queue_executions_tenant_status ON queue_executions (tenant_id, status) WHERE status <> 'running' AND status <> 'succeeded' AND status <> 'duplicate';
CREATE INDEX idx_tasks_ready ON queue_executions (subscription, priority, due_at) WHERE status = 'ready';
CREATE INDEX idx_tasks_running ON queue_executions (worker_id) WHERE status = 'running';
CREATE INDEX idx_tasks_waiting_key ON queue_executions (tenant_id, subscription, idem_key) WHERE status = 'waiting_key';
CREATE INDEX idx_tasks_lane ON queue_executions (tenant_id, subscription, lane, lane_seq) WHERE lane IS NOT NULL AND status <> 'succeeded' AND status <> 'failed' AND status <> 'rejected' AND status <> 'expired' AND status <> 'discarded' AND status <> 'duplicate';
CREATE INDEX idx_tasks_parked ON queue_executions (subscription, parked_kind) WHERE status = 'parked';
CREATE TABLE queue_metrics (
    id BLOB NOT NULL,
    tenant_id VARCHAR(64) DEFAULT 'default' NOT NULL,
    queue_name VARCHAR(255) NOT NULL,
    metric_name VARCHAR(100) NOT NULL,
    metric_value DOUBLE NOT NULL,
    timestamp BIGINT DEFAULT (CAST(strftime('%s', 'now') || substr(strftime('%f', 'now'), 4) || '000' AS INTEGER)) NOT NULL,
    tags TEXT,
    PRIMARY KEY (id)
);
CREATE INDEX idx_queue_metrics_tenant_metric_time ON queue_metrics (tenant_id, queue_name, metric_name, timestamp DESC);
CREATE TABLE event_log (
    id BLOB NOT NULL,
    tenant_id VARCHAR(64) DEFAULT 'default' NOT NULL,
    subscription VARCHAR(255) NOT NULL,
    task_id VARCHAR(255) NOT NULL,
    event_type VARCHAR(40) NOT NULL,
    data TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    worker_id BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    hash BLOB NOT NULL
);
CREATE INDEX idx_event_log_tenant_task ON event_log (tenant_id, task_id);
CREATE TABLE dead_letters (
    id BLOB NOT NULL,
    tenant_id VARCHAR(64) DEFAULT 'default' NOT NULL,
    subscription VARCHAR(255) NOT NULL,
    message_id VARCHAR(255) NOT NULL,
    queue_name VARCHAR(255) NOT NULL,
    event_name VARCHAR(255),
    reason VARCHAR(60) NOT NULL,
    error TEXT,
    retry_count INTEGER DEFAULT 0 NOT NULL,
    history TEXT,
    body BLOB,
    body_info TEXT,
    body_crc BIGINT,
    state VARCHAR(20) DEFAULT 'open' NOT NULL,
    failed_at BIGINT NOT NULL,
    settled_at BIGINT,
    replay_id VARCHAR(255),
    PRIMARY KEY (id)
);
CREATE INDEX idx_dead_letters_tenant_state_failed ON dead_letters (tenant_id, state, failed_at);
CREATE INDEX idx_dead_letters_tenant_message ON dead_letters (tenant_id, message_id);
CREATE TABLE effects (
    tenant_id VARCHAR(64) DEFAULT 'default' NOT NULL,
    subscription VARCHAR(255) NOT NULL,
    message_id VARCHAR(255) NOT NULL,
    name VARCHAR(255) NOT NULL,
    state VARCHAR(20) NOT NULL,
    value BLOB,
    worker_id BIGINT NOT NULL,
    epoch INTEGER NOT NULL,
    created_at BIGINT NOT NULL,
    done_at BIGINT,
    PRIMARY KEY (tenant_id, subscription, message_id, name)
);
CREATE TABLE outbox (
    id BLOB NOT NULL,
    tenant_id VARCHAR(64) DEFAULT 'default' NOT NULL,
    queue_name VARCHAR(255) NOT NULL,
    message_id VARCHAR(255) NOT NULL,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    body_crc BIGINT NOT NULL,
    priority INTEGER DEFAULT 1 NOT NULL,
    ordering_key VARCHAR(255),
    ttl_us BIGINT,
    due_at BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    PRIMARY KEY (id)
);
CREATE INDEX idx_outbox_due ON outbox (due_at);
CREATE TABLE deliveries (
    id VARCHAR(36) NOT NULL,
    tenant_id VARCHAR(64) DEFAULT 'default' NOT NULL,
    subscription VARCHAR(255),
    task_id VARCHAR(255),
    channel VARCHAR(255) NOT NULL,
    recipient VARCHAR(255) NOT NULL,
    content TEXT NOT NULL,
    conversation VARCHAR(255),
    priority INTEGER DEFAULT 2 NOT NULL,
    status VARCHAR(20) DEFAULT 'pending' NOT NULL,
    retry_count INTEGER DEFAULT 0 NOT NULL,
    max_retries INTEGER DEFAULT 5 NOT NULL,
    due_at BIGINT NOT NULL,
    created_at BIGINT NOT NULL,
    last_attempt_at BIGINT,
    last_error TEXT,
    worker_id BIGINT,
    PRIMARY KEY (id)
);
CREATE INDEX idx_deliveries_tenant_task ON deliveries (tenant_id, task_id);
CREATE INDEX idx_deliveries_pending ON deliveries (channel, priority, due_at) WHERE status = 'pending';
CREATE TABLE workers (
    worker_id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    name VARCHAR(255) NOT NULL,
    state VARCHAR(10) NOT NULL,
    started_at BIGINT NOT NULL,
    ended_at BIGINT
);
CREATE TABLE sources (
    subscription VARCHAR(255) NOT NULL,
    part VARCHAR(255) DEFAULT '' NOT NULL,
    worker_id BIGINT,
    n BIGINT DEFAULT 0 NOT NULL,
    floor BIGINT,
    paused_at BIGINT,
    PRIMARY KEY (subscription, part)
);
CREATE TABLE roles (
    role VARCHAR(255) NOT NULL,
    worker_id BIGINT,
    state TEXT,
    PRIMARY KEY (role)
);
CREATE TABLE messages (
    seq INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    queue VARCHAR(255) NOT NULL,
    state INTEGER DEFAULT 0 NOT NULL,
    priority INTEGER DEFAULT 1 NOT NULL,
    message_id VARCHAR(255) NOT NULL,
    lane VARCHAR(255),
    due_at BIGINT,
    expires_at BIGINT,
    sent_at BIGINT NOT NULL,
    deliveries INTEGER DEFAULT 0 NOT NULL,
    worker_id BIGINT,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    body_crc BIGINT NOT NULL
);
CREATE INDEX idx_messages_ready ON messages (queue, priority DESC, seq) WHERE state = 0 AND lane IS NULL;
CREATE INDEX idx_messages_lanes ON messages (queue, seq) WHERE state = 0 AND lane IS NOT NULL;
CREATE INDEX idx_messages_delayed ON messages (due_at) WHERE state = 1;
CREATE INDEX idx_messages_taken ON messages (worker_id) WHERE state = 2;
CREATE TABLE witness (
    id INTEGER NOT NULL,
    commits BIGINT NOT NULL,
    PRIMARY KEY (id)
);
INSERT INTO witness (id, commits) VALUES (1, 0);
INSERT INTO alembic_version (version_num) VALUES ('0001');
-- Running upgrade 0001 -> 0002
CREATE TABLE approvals (
    id BLOB NOT NULL,
    tenant_id VARCHAR(64) DEFAULT 'default' NOT NULL,
    subscription VARCHAR(255) NOT NULL,
    message_id VARCHAR(255) NOT NULL,
    queue_name VARCHAR(255) NOT NULL,
    event_name VARCHAR(255),
    payload_sha256 BLOB NOT NULL,
    rule VARCHAR(255) NOT NULL,
    reason TEXT,
    state VARCHAR(20) DEFAULT 'pending' NOT NULL,
    four_eyes INTEGER DEFAULT 0 NOT NULL,
    keep_rejected INTEGER DEFAULT 0 NOT NULL,
    asked_at BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    first_by VARCHAR(255),
    first_at BIGINT,
    answered_by VARCHAR(255),
    answered_at BIGINT,
    note TEXT,
    PRIMARY KEY (id)
);
CREATE INDEX idx_approvals_tenant_message ON approvals (tenant_id, message_id);
CREATE INDEX idx_approvals_tenant_state ON approvals (tenant_id, state, asked_at);
CREATE INDEX idx_approvals_pending ON approvals (expires_at) WHERE state = 'pending';
CREATE TABLE quotas (
    tenant_id VARCHAR(64) DEFAULT 'default' NOT NULL,
    name VARCHAR(255) NOT NULL,
    window_us BIGINT NOT NULL,
    window_start BIGINT NOT NULL,
    runs BIGINT DEFAULT 0 NOT NULL,
    llm_calls BIGINT DEFAULT 0 NOT NULL,
    tokens BIGINT DEFAULT 0 NOT NULL,
    cost DOUBLE DEFAULT 0 NOT NULL,
    deferred_until BIGINT,
    "deferred" BIGINT DEFAULT 0 NOT NULL,
    PRIMARY KEY (tenant_id, name)
);
UPDATE alembic_version SET version_num='0002' WHERE alembic_version.version_num = '0001';
-- Running upgrade 0002 -> 0003
ALTER TABLE queue_executions ADD COLUMN cancel_at BIGINT;
UPDATE alembic_version SET version_num='0003' WHERE alembic_version.version_num = '0002';
-- Running upgrade 0003 -> 0004
UPDATE alembic_version SET version_num='0004' WHERE alembic_version.version_num = '0003';
-- Running upgrade 0004 -> 0005
ALTER TABLE deliveries ADD COLUMN lane VARCHAR(64);
ALTER TABLE deliveries ADD COLUMN options TEXT;
ALTER TABLE deliveries ADD COLUMN receipts TEXT;
ALTER TABLE deliveries ADD COLUMN calls INTEGER DEFAULT 0 NOT NULL;
ALTER TABLE deliveries ADD COLUMN resent INTEGER DEFAULT 0 NOT NULL;
ALTER TABLE deliveries ADD COLUMN in_doubt INTEGER DEFAULT 0 NOT NULL;
ALTER TABLE deliveries ADD COLUMN expires_at BIGINT;
UPDATE deliveries SET lane = id WHERE status <> 'sent';
DROP INDEX idx_deliveries_pending;
CREATE INDEX idx_deliveries_due ON deliveries (channel, priority DESC, due_at) WHERE status = 'pending';
CREATE INDEX idx_deliveries_lane ON deliveries (lane) WHERE status IN ('pending', 'queued', 'sending');
CREATE INDEX idx_deliveries_sending ON deliveries (lane) WHERE status = 'sending';
CREATE TABLE send_windows (
    "key" TEXT NOT NULL,
    state TEXT NOT NULL,
    ends_at BIGINT NOT NULL,
    PRIMARY KEY ("key")
);
UPDATE alembic_version SET version_num='0005' WHERE alembic_version.version_num = '0004';
-- Running upgrade 0005 -> 0006
ALTER TABLE deliveries ADD COLUMN put_off_by TEXT;
CREATE INDEX idx_deliveries_put_off ON deliveries (put_off_by, priority DESC) WHERE status = 'pending' AND put_off_by IS NOT NULL;
UPDATE alembic_version SET version_num='0006' WHERE alembic_version.version_num = '0005';
-- Running upgrade 0006 -> 0007
ALTER TABLE workers ADD COLUMN machine TEXT;
ALTER TABLE workers ADD COLUMN parent TEXT;
ALTER TABLE workers ADD COLUMN offers TEXT;
ALTER TABLE queue_executions ADD COLUMN lost_by TEXT;
UPDATE alembic_version SET version_num='0007' WHERE alembic_version.version_num = '0006';
