"""Every statement of the engine on a table with a tenant names `tenant_id`, or returns it.

Row-level security cannot bind the engine's role: its batches mix tenants. So its statements are
read instead, all of them, out of the source. The few that do neither are listed, each with why no
row of one tenant can pass for another's.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import msgspec
import pytest

import ackbone.store.postgres
from ackbone.store.postgres.sql import SQL
from ackbone.store.postgres.tenant_wall import TABLES

FOLDER = Path(ackbone.store.postgres.__file__).parent
_VERB = re.compile(r"[\s(]*(SELECT|INSERT|UPDATE|DELETE|WITH)\b", re.ASCII)
_TABLE = re.compile(
    rf"\b(?:FROM|JOIN|INTO|UPDATE)\s+(?:ONLY\s+)?((?:{'|'.join(TABLES)})\b|{{\w*}})", re.ASCII
)
"""A table that is named by a parameter may be any of them."""
_TENANT = re.compile(r"\btenant_id\b|SELECT \*|RETURNING \*")

EXCUSED = {
    # Is there anything to do? Nothing of a row is looked at.
    "SELECT clock_timestamp() FROM approvals WHERE state = 'pending'": "the answer is yes or no",
    "SELECT d.priority, d.due_at FROM deliveries d": "when a sender has to look again",
    "SELECT 1 FROM queue_executions WHERE status =": "the answer is yes or no",
    "SELECT clock_timestamp(), coalesce((SELECT": "the clock, workers, and whether rows are lost",
    "SELECT subscription, event_name, count(*) FILTER": "how many suspects wait, of which types",
    "SELECT EXISTS (SELECT 1 FROM outbox": "the answer is yes or no",
    "SELECT min((extract(epoch FROM d.due_at)": "when a worker has to look again",
    # Rows by an id of their own, which was read together with their tenant.
    "UPDATE deliveries SET status = 'sending', worker_id": "ids that were read with their tenants",
    "UPDATE deliveries SET status = 'queued'": "ids that were read with their tenants",
    "UPDATE deliveries SET status = 'failed', last_error = $2": "ids, likewise",
    "UPDATE deliveries d SET due_at": "ids, likewise",
    "in_doubt = 1, last_error = $3 WHERE id = ANY": "ids, likewise",
    "UPDATE deliveries d SET status = 'pending', due_at": "a lane is one tenant's",
    "DELETE FROM outbox WHERE id = ANY": "ids that were published just now, for their tenants",
    "UPDATE outbox SET due_at": "ids that could not be published just now",
    "SELECT status, receipts IS NOT NULL FROM deliveries": "an operator's reply: what it is now",
    "SELECT state, (extract(epoch FROM settled_at)": "an operator's letter: what it is now",
    # What moves is moved alike for all tenants, and nobody is told whose it was.
    "UPDATE {} SET {} WHERE {}": "the server's clock was set: all waiting times move with it",
    "UPDATE quotas SET deferred_until = NULL": "new rules: everybody's waits are looked at anew",
    "* interval '1 microsecond') WHERE status = 'ready' AND due_at >": "likewise",
    "DELETE FROM {table}": "retention, by age; only how many are counted",
    "SELECT min(e.created_at) FROM {table} e": "pruning: a time to begin at",
    # For operators, who see all tenants: numbers, checks, and places in the ledger.
    "SELECT count(*) FROM event_log": "a number",
    "SELECT count(*) FROM (SELECT 1 FROM queue_executions a WHERE a.subscription = $1": "a number",
    "SELECT p.priority, (extract(epoch FROM d.due_at)": "when each priority is due",
    "SELECT queue_name, count(*) FROM queue_executions WHERE status = 'running'": "numbers",
    "SELECT queue_name, count(*) FROM dead_letters": "numbers",
    "SELECT queue_name, status, count(*) FROM queue_executions GROUP BY 1, 2": "numbers",
    "SELECT channel, status, count(*) FROM deliveries GROUP BY 1, 2": "numbers",
    "SELECT subscription, event_type, count(*) FROM event_log": "numbers",
    "SELECT queue_name, count(*) FILTER": "numbers",
    "SELECT w.worker_id, w.name": "workers, and how many they run",
    "SELECT message_id, body, body_crc FROM {}": "doctor names what is broken",
    "SELECT uuid_send(id), (extract(epoch FROM created_at)": "where the ledger ends",
}
"""What a statement without a tenant holds, and why that is right."""


class Statement(NamedTuple):
    place: str
    text: str

    @property
    def tables(self) -> set[str]:
        return set(_TABLE.findall(self.text))

    @property
    def knows_tenant(self) -> bool:
        return _TENANT.search(self.text) is not None


def texts(tree: ast.Module, module: ModuleType) -> Iterator[tuple[int, str]]:
    """Every text that a module writes out, with what its own names stand for filled in."""
    parts: set[ast.AST] = set()
    for node in ast.walk(tree):  # from the outside in
        if node not in parts and isinstance(node, ast.expr):
            text = _text(node, module)
            if text is not None:
                parts.update(ast.walk(node))
                yield node.lineno, text


def _text(node: ast.expr, module: ModuleType) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_piece(each, module) for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left, module), _text(node.right, module)
        if left is not None or right is not None:
            return (left or _piece(node.left, module)) + (right or _piece(node.right, module))
    return None


def _piece(node: ast.expr, module: ModuleType) -> str:
    """A part of a text; {} for what only a call of the function around it will know."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    value = node.value if isinstance(node, ast.FormattedValue) else node
    try:
        return str(eval(ast.unparse(value), vars(module)))  # our own source, at rest
    except Exception:
        return "{}"


def statements(tree: ast.Module, module: ModuleType) -> list[Statement]:
    """Of a module: what it writes out, and what its constants are made of."""
    found = [Statement(f"{module.__name__}:{line}", text) for line, text in texts(tree, module)]
    found += [
        Statement(f"{module.__name__}.{name}", value)
        for name, value in vars(module).items()
        if isinstance(value, str) and not name.startswith("__")
    ]
    return [each for each in found if _VERB.match(each.text) and each.tables]


def of_the_engine() -> list[Statement]:
    found = []
    for file in sorted(FOLDER.rglob("*.py")):
        name = ".".join(file.relative_to(FOLDER).with_suffix("").parts)
        module = importlib.import_module(f"ackbone.store.postgres.{name}")
        if file.stem != "__init__":
            found += statements(ast.parse(file.read_text(encoding="utf-8")), module)
    return found + shared()


def shared() -> list[Statement]:
    """The statements that are written once for both dialects, in the words of PostgreSQL."""
    found = [
        Statement(f"SQL.{area}.{name}", text)
        for area, texts in msgspec.structs.asdict(SQL).items()
        for name, text in msgspec.structs.asdict(texts).items()
    ]
    return [each for each in found if _VERB.match(each.text) and each.tables]


def is_excused(statement: Statement) -> bool:
    return any(start in statement.text for start in EXCUSED)


def test_every_statement_names_its_tenant_or_returns_it() -> None:
    found = of_the_engine()
    assert {table for each in found for table in each.tables} >= set(TABLES)
    assert len({each.text for each in found}) > 100
    for each in found:
        assert each.knows_tenant or is_excused(each), f"{each.place}: {each.text}"


def test_no_excuse_is_left_over() -> None:
    without = [each for each in of_the_engine() if not each.knows_tenant]
    for start in EXCUSED:
        assert any(start in each.text for each in without), start


@pytest.mark.parametrize(
    ("source", "knows"),
    [
        ("A = 'SELECT body FROM dead_letters WHERE id = $1'", False),
        ("def f(n): return f'UPDATE {n} SET state = 1 RETURNING id'", False),
        ("T = 'outbox'\nB = f'DELETE FROM {T} ' + 'WHERE id = $1'", False),
        ("def f(): return 'DELETE FROM effects ' + COND", False),
        ("COND = 'WHERE tenant_id = $1'\ndef f(): return 'DELETE FROM effects ' + COND", True),
        ("K = 'tenant_id'\nB = f'UPDATE approvals SET state = $1 RETURNING {K}'", True),
        ("A = '(SELECT a.tenant_id FROM outbox a)'", True),
    ],
)
def test_it_is_noticed(source: str, knows: bool) -> None:
    module = ModuleType("planted")
    exec(source, vars(module))
    found = statements(ast.parse(source), module)
    assert [each.knows_tenant for each in found if not is_excused(each)]
    assert all(each.knows_tenant == knows for each in found)


@pytest.mark.parametrize(
    "source", ["A = 'SELECT 1 FROM workers'", "A = 'no statement FROM outbox'"]
)
def test_what_is_none_of_these_is_left_alone(source: str) -> None:
    module = ModuleType("planted")
    exec(source, vars(module))
    assert statements(ast.parse(source), module) == []
