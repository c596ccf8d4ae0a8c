"""What must be true of the database when a story of the protocol model is over."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import msgspec

from ackbone.core.events import CLAIMED, EVENT_OF_STATUS, FINAL_EVENTS
from ackbone.core.ids import derived_id
from ackbone.core.outcome import FINAL, Status
from ackbone.store.ledger import GENESIS, link
from tests.property.protocol_world import RESULTS, Sent, World

_BURIED = frozenset({Status.FAILED, Status.EXPIRED, Status.REJECTED})
"""These leave a dead letter (a rejected one here, too: the model asks for it)."""


def violations(world: World) -> list[str]:
    """Every broken promise, in words; empty if all are kept."""
    checks = Checks(world)
    checks.one_final_event()
    checks.nothing_vanishes()
    checks.one_committed_run_per_key()
    checks.effects_commit_together()
    checks.results_belong_to_the_committed_token()
    checks.conversations_in_order()
    checks.ledger_is_whole()
    checks.guarded_effects_at_most_once()
    return [*world.violations, *checks.found]


class Checks:
    """The promises, one method each."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.found: list[str] = []
        conn = world.file.conn
        columns = (
            "tenant_id, message_id, status, worker_id, epoch, idem_key, lane, lane_seq, body,"
            " result, completed_at"
        )
        self.tasks: dict[tuple[str, str], dict[str, Any]] = {}
        for row in conn.execute(f"SELECT {columns} FROM queue_executions"):
            task = dict(zip(columns.replace(" ", "").split(","), row, strict=True))
            self.tasks[(task["tenant_id"], task["message_id"])] = task
        self.events: dict[tuple[str, str], list[tuple[int, str, int, dict[str, Any]]]] = (
            defaultdict(list)
        )
        for n, tenant, task_id, kind, at, data in conn.execute(
            "SELECT rowid, tenant_id, task_id, event_type, created_at, data FROM event_log"
            " ORDER BY rowid"
        ):
            self.events[(tenant, task_id)].append((n, kind, at, msgspec.json.decode(data)))
        self.letters: dict[tuple[str, str], list[tuple[str, bytes | None]]] = defaultdict(list)
        for tenant, message_id, reason, body in conn.execute(
            "SELECT tenant_id, message_id, reason, body FROM dead_letters"
        ):
            self.letters[(tenant, message_id)].append((reason, body))

    def say(self, text: str) -> None:
        self.found.append(text)

    def one_final_event(self) -> None:
        """P3: each message ends once, and is never claimed again."""
        for identity, task in self.tasks.items():
            finals = [e for e in self.events[identity] if e[1] in FINAL_EVENTS]
            if task["status"] not in FINAL:
                continue  # told by the world: it never came to rest
            if [kind for _, kind, _, _ in finals] != [EVENT_OF_STATUS[task["status"]]]:
                self.say(f"P3: {identity} is {task['status']}, final events {finals}")
                continue
            if any(n > finals[0][0] and kind == CLAIMED for n, kind, _, _ in self.events[identity]):
                self.say(f"P3: {identity} was claimed after its end")
        for identity in self.events:
            if identity not in self.tasks:
                self.say(f"P3: events of {identity}, which is no task")

    def nothing_vanishes(self) -> None:
        """P6: every message that was sent has a task; what ended badly is kept, whole."""
        for sent in self.world.sent:
            bodies = {sent.outgoing.body}
            twins = [s for s in self.world.sent if s.id == sent.id and s.tenant == sent.tenant]
            if len(twins) > 1:  # one of two payloads has the id, the other a letter of its own
                bodies = {twin.outgoing.body for twin in twins}
                self._one_is_a_conflict(twins)
            task = self.tasks.get((sent.tenant, sent.id))
            if task is None:
                self.say(f"P6: {sent.tenant}/{sent.id} has vanished")
                continue
            letters = self.letters[(sent.tenant, sent.id)]
            if (task["status"] in _BURIED) != (len(letters) == 1):
                self.say(f"P6: {sent.id} is {task['status']} and has {len(letters)} dead letters")
            for reason, body in letters:
                if body not in bodies:
                    self.say(f"P6: the dead letter of {sent.id} ({reason}) lost its body")

    def _one_is_a_conflict(self, twins: list[Sent]) -> None:
        letters = []
        for twin in twins:
            candidate = self.world.decode(self.world.delivery_of(twin))
            letters += self.letters[(twin.tenant, derived_id(twin.id, candidate.sha256.hex()))]
        if [reason for reason, _ in letters] != ["id_conflict"]:
            self.say(f"P6: two payloads under {twins[0].id}, letters {letters}")
        elif letters[0][1] not in {twin.outgoing.body for twin in twins}:
            self.say(f"P6: the conflicting payload of {twins[0].id} is gone")

    def one_committed_run_per_key(self) -> None:
        """P4: within its window a key has one committed run; duplicates have its result."""
        runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for task in self.tasks.values():
            if task["status"] == Status.SUCCEEDED and task["idem_key"] is not None:
                runs[(task["tenant_id"], task["idem_key"])].append(task)
        window_us = int(self.world.window_s * 1e6)
        for key, committed in runs.items():
            committed.sort(key=lambda task: int(task["completed_at"]))
            for first, second in itertools.pairwise(committed):
                if second["completed_at"] < first["completed_at"] + window_us:
                    ids = (first["message_id"], second["message_id"])
                    self.say(f"P4: {key} has two committed runs in its window: {ids}")
        for identity, task in self.tasks.items():
            if task["status"] == Status.DUPLICATE:
                self._is_true_duplicate(identity, task)

    def _is_true_duplicate(self, identity: tuple[str, str], task: dict[str, Any]) -> None:
        ends = [data for _, kind, _, data in self.events[identity] if kind in FINAL_EVENTS]
        first = self.tasks.get((identity[0], str(ends[0].get("first_id")))) if ends else None
        if first is None or first["status"] != Status.SUCCEEDED:
            self.say(f"P4: {identity} is a duplicate of nothing that was done")
        elif first["idem_key"] != task["idem_key"] or first["result"] != task["result"]:
            self.say(f"P4: {identity} is a duplicate with another key or result than its first")

    def effects_commit_together(self) -> None:
        """P5: the reply and the follow-up of a run exist exactly if that run was committed."""
        conn = self.world.file.conn
        replies: dict[tuple[str, str], list[str]] = defaultdict(list)
        for tenant, task_id, content in conn.execute(
            "SELECT tenant_id, task_id, content FROM deliveries WHERE channel = 'test'"
        ):
            replies[(tenant, task_id)].append(content)
        sends: dict[str, list[str]] = defaultdict(list)
        for (message_id,) in conn.execute(
            "SELECT message_id FROM messages WHERE queue = ? UNION ALL"
            " SELECT message_id FROM outbox WHERE queue_name = ?",
            (RESULTS, RESULTS),
        ):
            parent, _, token = message_id.partition("#")
            sends[parent].append(token)
        for identity, task in self.tasks.items():
            done = task["status"] == Status.SUCCEEDED
            expected = [f"{task['worker_id']}:{task['epoch']}"] if done else []
            if replies[identity] != expected:
                self.say(f"P5: {identity} ({task['status']}) has replies of {replies[identity]}")
            if done and expected[0] not in sends[identity[1]]:
                self.say(f"P5: the follow-up of {identity} is missing")
        done_tokens = {
            f"{task['message_id']}#{task['worker_id']}:{task['epoch']}"
            for task in self.tasks.values()
            if task["status"] == Status.SUCCEEDED
        }
        for parent, tokens in sends.items():
            for token in tokens:
                if f"{parent}#{token}" not in done_tokens:
                    self.say(f"P5: a follow-up of {parent} by {token}, which never committed")

    def results_belong_to_the_committed_token(self) -> None:
        """A zombie's result is never kept in place of the owner's."""
        for identity, task in self.tasks.items():
            if task["status"] == Status.SUCCEEDED:
                token = f"{task['worker_id']}:{task['epoch']}"
                if task["result"] != msgspec.json.encode(token):
                    self.say(f"{identity} belongs to {token} and holds {task['result']!r}")
                if (*identity, task["worker_id"], task["epoch"]) not in self.world.commits:
                    self.say(f"{identity} succeeded without a commit of {token}")

    def conversations_in_order(self) -> None:
        """No message of a conversation starts before all earlier ones are over (or set aside)."""
        lanes: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
        forged = {(sent.tenant, sent.id) for sent in self.world.sent if sent.forged}
        for sent in self.world.sent:
            if sent.lane is not None and (sent.tenant, sent.id) not in forged:
                lanes[(sent.tenant, sent.lane)].append((sent.tenant, sent.id))
        for lane, identities in lanes.items():
            free_at = 0
            for identity in identities:
                claims = [n for n, kind, _, _ in self.events[identity] if kind == CLAIMED]
                if claims and min(claims) < free_at:
                    self.say(f"order: {identity} of {lane} ran before an earlier one was over")
                free_at = max(free_at, self._over_at(identity))

    def _over_at(self, identity: tuple[str, str]) -> int:
        """Where in the ledger this message stopped holding up its conversation."""
        skips = self.world.on_parked == "skip"
        ends = [
            n
            for n, kind, _, _ in self.events[identity]
            if kind in FINAL_EVENTS or (skips and kind == "task.parked")
        ]
        return min(ends, default=0)

    def ledger_is_whole(self) -> None:
        """Every chain (tenant, worker) is without a gap, and each hash covers the one before."""
        heads: dict[tuple[str, int], tuple[int, bytes]] = {}
        columns = (
            "tenant_id, subscription, task_id, event_type, data, created_at, worker_id, seq, hash"
        )
        for *fields, worker_id, seq, digest in self.world.file.conn.execute(
            f"SELECT {columns} FROM event_log ORDER BY rowid"
        ):
            chain = (str(fields[0]), int(worker_id))
            before, previous = heads.get(chain, (0, GENESIS))
            if seq != before + 1 or digest != link(previous, (seq, *fields, worker_id)):
                self.say(f"ledger: chain {chain} is broken at {seq}")
            heads[chain] = (seq, digest)

    def guarded_effects_at_most_once(self) -> None:
        for identity, times in self.world.performed.items():
            if times > 1:
                self.say(f"the guarded effect of {identity} happened {times} times")
