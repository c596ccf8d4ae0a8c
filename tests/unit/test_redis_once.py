"""What one script publishes once: every entry comes out of its groups as it went in."""

from collections.abc import Mapping, Sequence

import pytest

from ackbone.brokers.redis.entries import fields_of
from ackbone.brokers.redis.once import once_command
from ackbone.brokers.redis.wire import Command
from ackbone.core.broker import Outgoing
from ackbone.core.notices import End, Notices, notices_of, success_notice
from ackbone.core.outcome import Status
from ackbone.core.task_protocol import FLAT, ONCE, FlatOutgoing


def entries_of(command: Command) -> list[tuple[object, ...]]:
    """As the script on the server reads them."""
    keys = int(command[2])
    argv: list[object] = [None, *command[3 + keys :]]  # Lua counts from one
    found: list[tuple[object, ...]] = []
    at = 2
    while at < len(argv):
        size, count, differ = (int(str(argv[at + n])) for n in range(3))
        entry = argv[at + 3 : at + 3 + size]
        at += 3 + size
        places = [int(str(each)) for each in argv[at : at + differ]]
        at += differ
        for _ in range(count):
            for place, value in zip(places, argv[at : at + differ], strict=True):
                entry[place - 1] = value
            found.append(tuple(entry))
            at += differ
    return found


def told(fields: Mapping[str, str], n: int) -> Outgoing:
    headers = {FLAT: "1", ONCE: f"mark-{n}"}
    return FlatOutgoing(id=f"m{n}", body=b"", headers=headers, fields=fields)


SAME = [{"task_id": f"t{n}", "status": "succeeded", "at": str(n // 2)} for n in range(5)]


@pytest.mark.parametrize(
    "fields",
    [
        SAME,
        SAME[:1],
        [{"only": str(n)} for n in range(3)],
        [{"a": "1", "b": "2"}, {"b": "3", "a": "4"}, {"a": "5", "c": "6"}],
        [*SAME, {"task_id": "t", "status": "failed", "at": "1", "tenant_id": "acme"}],
    ],
    ids=["alike", "one", "one field", "other names", "one more field"],
)
def test_fields_come_out_as_they_went_in(fields: Sequence[Mapping[str, str]]) -> None:
    batch = [told(each, n) for n, each in enumerate(fields)]
    command = once_command("results", batch)
    assert list(command[3 : 3 + len(batch) + 1]) == [
        "results",
        *[f"{{results}}:once:mark-{n}" for n in range(len(batch))],
    ]
    found = [dict(zip(each[::2], each[1::2], strict=True)) for each in entries_of(command)]
    assert found == fields


def test_messages_with_and_without_fields_go_together() -> None:
    plain = Outgoing(id="p", body=b"x", headers={ONCE: "mark-p"})
    batch = [told(SAME[0], 0), plain, told(SAME[1], 1)]
    assert entries_of(once_command("q", batch)) == [tuple(fields_of(each)) for each in batch]


@pytest.mark.parametrize("tenant", ["default", "acme"])
@pytest.mark.parametrize("result", [None, b'{"ok":true}'])
def test_a_success_is_told_as_every_other_end_is(tenant: str, result: bytes | None) -> None:
    end = End(
        tenant_id=tenant,
        subscription="jobs",
        task_id="t1",
        status=Status.SUCCEEDED,
        result=result,
        retry_count=2,
        idempotency_key="k",
        finished_at_us=1_763_370_000_123_456,
        consumer="w",
    )
    ((_, expected),) = notices_of(Notices(results="results"), end)
    identity = (tenant, "jobs", "t1")
    out = success_notice(identity, result, 2, "k", 1_763_370_000_123_456, "w")
    assert isinstance(out, FlatOutgoing)
    assert isinstance(expected, FlatOutgoing)
    assert (out.fields, out.id, out.headers) == (expected.fields, expected.id, expected.headers)
