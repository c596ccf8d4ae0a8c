"""All tables.

Its number is the last one of the revisions that it replaces: databases that they
brought so far are as this one makes them.

On PostgreSQL, row-level security is the second wall between tenants. Every table with a `tenant_id`
shows a role only the rows of the tenant that its transaction names:
`set_config('ackbone.tenant_id', …, true)`. Who names none sees none. The owner of the tables is not
bound, and neither are the roles of the policy `workers`: a batch of the engine mixes tenants.

Row-level security of a partition is its own, and the ledger is read and written through `event_log`
alone: its partitions have it without a policy, so that only their owner gets in by their names.

Roles that get the right to write tasks with the table are workers: they see everything.
"""

from __future__ import annotations

from alembic import op

from ackbone.store.revisions import statements

revision = "0007"
down_revision = None
branch_labels = None
depends_on = None

# A setting that was made for one transaction is '' in the next one of its session.
_OF_TENANT = "tenant_id = nullif(current_setting('ackbone.tenant_id', true), '')"
_WORKERS = """
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
    FOREACH name IN ARRAY ARRAY['{}'] LOOP
      EXECUTE 'CREATE POLICY workers ON ' || quote_ident(name) || ' TO ' || workers
        || ' USING (true) WITH CHECK (true)';
    END LOOP;
  END IF;
END $$
"""


def upgrade() -> None:
    """Make all tables; on PostgreSQL, build the wall between tenants around them."""
    dialect = op.get_context().dialect.name
    made = statements(dialect)
    for statement in made:
        op.execute(statement)
    if dialect == "sqlite":  # it has no roles
        return
    named = (text.split(maxsplit=3) for text in made if text.startswith("CREATE TABLE"))
    tables = [name for _, _, name, columns in named if "tenant_id" in columns]
    for table in tables:
        op.execute(
            f"CREATE POLICY tenant_wall ON {table} USING ({_OF_TENANT}) WITH CHECK ({_OF_TENANT})"
        )
    for table in (*tables, "event_log_default"):
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
    op.execute(_WORKERS.format("', '".join(tables)))


def downgrade() -> None:
    """Refused: below the first revision there is nothing, and messages would be dropped."""
    raise RuntimeError("0007 cannot be taken back: it would drop every message; restore a copy")
