"""The statements of PostgreSQL, one module per area."""

from ackbone.store.statements import Statements

from .approvals import APPROVALS
from .desk import DESK
from .operations import OPERATIONS

SQL = Statements(operations=OPERATIONS, approvals=APPROVALS, desk=DESK)
