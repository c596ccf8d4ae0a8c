"""Roles, which one worker has at a time, and the name of the store, which stands beside them."""

from __future__ import annotations

TAKE = (
    "INSERT INTO roles (role, worker_id) VALUES ($1, $2::bigint) ON CONFLICT (role)"
    " DO UPDATE SET worker_id = excluded.worker_id WHERE roles.worker_id = excluded.worker_id"
    " OR roles.worker_id IS NULL OR roles.worker_id NOT IN"
    " (SELECT worker_id FROM workers WHERE state = 'alive') RETURNING 1"
)
HOLDS = "SELECT 1 FROM roles WHERE role = $1 AND worker_id = $2::bigint"
NAME_STORE = (
    "INSERT INTO roles (role, state) VALUES ('_store', to_json($1::text))"
    " ON CONFLICT (role) DO NOTHING"
)
STORE_NAME = "SELECT state #>> '{}' FROM roles WHERE role = '_store'"
