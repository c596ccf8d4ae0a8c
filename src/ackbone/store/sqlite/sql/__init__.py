"""The statements of SQLite, one module per area. `id_of` makes the 16 bytes of an id's text."""

from ackbone.store.statements import Statements

from .approvals import APPROVALS
from .desk import DESK
from .operations import OPERATIONS

SQL = Statements(operations=OPERATIONS, approvals=APPROVALS, desk=DESK)
