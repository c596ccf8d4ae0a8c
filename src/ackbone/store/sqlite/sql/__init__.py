"""The statements of SQLite, one module per area. `id_of` makes the 16 bytes of an id's text."""

from __future__ import annotations

from ackbone.store.statements import Statements

from .approvals import APPROVALS
from .claims import CLAIMS
from .deliveries import DELIVERIES
from .maintenance import MAINTENANCE
from .operations import OPERATIONS
from .records import RECORDS
from .runs import RUNS
from .store import STORE
from .workers import WORKERS

SQL = Statements(
    operations=OPERATIONS,
    approvals=APPROVALS,
    claims=CLAIMS,
    deliveries=DELIVERIES,
    maintenance=MAINTENANCE,
    records=RECORDS,
    runs=RUNS,
    store=STORE,
    workers=WORKERS,
)
