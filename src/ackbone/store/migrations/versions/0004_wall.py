"""The second wall between tenants: row-level security, on PostgreSQL.

Every table with a `tenant_id` shows a role only the rows of the tenant that its transaction names:
`set_config('ackbone.tenant_id', …, true)`. Who names none sees none. The owner of the tables is
not bound, and neither are the roles of the policy `workers`: a batch of the engine mixes tenants.

Row-level security of a partition is its own, and the ledger is read and written through
`event_log` alone: its partitions have it without a policy, so that nobody but their owner gets in
by their names.

Roles that could write tasks before this revision are workers: they go on seeing everything. Else a
fleet under a role of its own would find its queues empty the moment that the tables were upgraded.

SQLite has no roles; there this revision changes nothing.
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TABLES = (
    "idempotency_keys",
    "queue_executions",
    "queue_metrics",
    "event_log",
    "dead_letters",
    "effects",
    "outbox",
    "deliveries",
    "approvals",
    "quotas",
)
# A setting that was made for one transaction is '' in the next one of its session.
_OF_TENANT = "tenant_id = nullif(current_setting('ackbone.tenant_id', true), '')"
# Without a percent sign: rendered as a script, it would come out twice.
_PARTITIONS = """
DO $$
DECLARE
  partition regclass;
BEGIN
  FOR partition IN SELECT inhrelid FROM pg_inherits WHERE inhparent = 'event_log'::regclass LOOP
    EXECUTE 'ALTER TABLE ' || partition::text || ' {} ROW LEVEL SECURITY';
  END LOOP;
END $$
"""
_WORKERS = f"""
DO $$
DECLARE
  workers text;
  name text;
BEGIN
  SELECT string_agg(DISTINCT quote_ident(pg_get_userbyid(acl.grantee)), ', ') INTO workers
    FROM pg_class, aclexplode(relacl) acl
    WHERE oid = 'queue_executions'::regclass AND acl.privilege_type = 'INSERT'
      AND acl.grantee NOT IN (0, relowner);
  IF workers IS NOT NULL THEN
    FOREACH name IN ARRAY ARRAY['{"', '".join(TABLES)}'] LOOP
      EXECUTE 'CREATE POLICY workers ON ' || quote_ident(name) || ' TO ' || workers
        || ' USING (true) WITH CHECK (true)';
    END LOOP;
  END IF;
END $$
"""


def upgrade() -> None:
    """Build it. Roles that worked before keep working."""
    if _is_sqlite():
        return
    for table in TABLES:
        op.execute(
            f"CREATE POLICY tenant_wall ON {table} USING ({_OF_TENANT}) WITH CHECK ({_OF_TENANT})"
        )
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(_PARTITIONS.format("ENABLE"))
    op.execute(_WORKERS)


def downgrade() -> None:
    """Take it down: roles with rights on the tables see every tenant again."""
    if _is_sqlite():
        return
    op.execute(_PARTITIONS.format("DISABLE"))
    for table in TABLES:
        op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
        op.execute(f"DROP POLICY tenant_wall ON {table}")
        op.execute(f"DROP POLICY IF EXISTS workers ON {table}")


def _is_sqlite() -> bool:
    return op.get_context().dialect.name == "sqlite"
