"""ackbone.yaml, variables and defaults: what loads, what is refused, and in which words."""

from __future__ import annotations

import json
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ackbone.brokers.redis.address import read_address
from ackbone.brokers.registry import kind_of
from ackbone.config import (
    Config,
    Queue,
    Retry,
    Worker,
    load_config,
    load_queue_trigger_config,
)
from ackbone.config.substitution import parse_dotenv, substitute
from ackbone.core.errors import ConfigError
from ackbone.core.notices import Notices
from ackbone.core.retry import RetryPolicy
from ackbone.core.secret import Secret, is_secret_name, mask_text
from ackbone.core.task_protocol import TaskProtocol
from ackbone.triggers.config import QueueTriggerConfig, validate_config

QUEUE_TRIGGER = """\
queue_trigger:
  # queue
  queue_name: "agent-events"
  consumer_group: "owlclaw-agents"
  concurrency: 4

  adapter:
    type: "kafka"  # kafka, rabbitmq, sqs, mock
    connection:
      brokers: "${KAFKA_BROKERS}"
      security_protocol: "SASL_SSL"
      sasl_mechanism: "PLAIN"
      sasl_username: "${KAFKA_USERNAME}"
      sasl_password: "${KAFKA_PASSWORD}"

  parser_type: "json"  # json, text, binary
  ack_policy: "requeue"  # ack, nack, requeue, dlq

  max_retries: 3
  retry_backoff_base: 1.0
  retry_backoff_multiplier: 2.0

  enable_dedup: true
  idempotency_window: 3600

  event_name_header: "x-event-name"
  focus: null

  metrics:
    enabled: true
    export_interval: 60
"""
KAFKA = {
    "KAFKA_BROKERS": "broker1:9092,broker2:9092",
    "KAFKA_USERNAME": "owlclaw",
    "KAFKA_PASSWORD": "hunter2",
}


@pytest.fixture
def load(tmp_path):
    """Load a text as ./ackbone.yaml, under no variables but the given ones."""

    def load(text: str | None = None, environ: dict[str, str] | None = None, **more: Any) -> Config:
        if text is not None:
            (tmp_path / "ackbone.yaml").write_text(text)
        return load_config(environ=environ or {}, cwd=tmp_path, **more)

    return load


@pytest.fixture
def problems(load):
    """The mistakes of a text."""

    def problems(*args: Any, **more: Any) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(*args, **more)
        return caught.value.problems

    return problems


# ── what loads ───────────────────────────────────────────────────────────────────────────────────


def test_without_a_file_everything_has_a_default(load, tmp_path):
    config = load()
    assert config.home == tmp_path / ".ackbone"
    assert (
        config.endpoints["default"].file
        == config.store_file
        == tmp_path / ".ackbone" / "ackbone.db"
    )
    assert config.ledger_key_file == tmp_path / ".ackbone" / "ledger.key"
    assert config.ledger_anchor_file == tmp_path / ".ackbone" / "ledger.anchors"
    assert config.file is None
    worker = config.worker
    assert (worker.slots, worker.lease_s, worker.crash_budget) == (100, 10, 2)
    assert (worker.shutdown_timeout_s, worker.stall_limit_s, worker.recycle_grace_s) == (30, 60, 10)
    assert (worker.guard_timeout_s, worker.solo_children) == (10, 16)
    assert (config.breaker.failures, config.breaker.probe_s) == (5, 30)
    assert (config.max_message_bytes, config.send_timeout_s) == (262_144, 5)
    kept = config.retention
    assert (kept.tasks_days, kept.metrics_days, kept.deliveries_days) == (30, 30, 30)
    assert (kept.events_days, kept.dead_letters_days) == (None, None)
    assert config.on_dedup_unavailable == "stop"
    assert config.retry_policy() == config.retry_policy("any") == RetryPolicy()


def test_a_redis_broker_is_all_that_a_task_worker_needs(load):
    config = load("broker: redis://localhost\ndefault_queue: stream:task\n")
    assert config.default_queue == "stream:task"
    sub = config.subscription("stream:task")
    assert (sub.codec, sub.group, sub.ordered) == ("task", "cg:workers", False)
    assert sub.dedup_window_s == 30 * 86_400
    assert sub.protocol == TaskProtocol(max_retries=3)
    notices = config.queue("stream:task").notices
    assert notices == Notices(results="stream:result", dead_letters="stream:dlq")
    policy = config.retry_policy("stream:task")
    assert (policy.max_retries, tuple(policy.table)) == (3, (60, 300, 900))
    other = config.subscription("orders")
    assert (other.codec, other.group, other.ordered) == ("standard", "ackbone", True)
    assert (other.protocol, config.queue("orders").notices) == (None, None)
    assert load("").default_queue == "default"


def test_what_a_task_queue_says_itself_is_kept(load):
    config = load(
        "tasks: {stream: jobs, results: done, max_retries: 7}\n"
        "queues:\n"
        "  jobs: {dead_letters: '', ordered: true}\n"
        "  steps: {codec: task, group: mine, waits_s: [1], max_retries: 2, results: steps-done}\n"
    )
    jobs, steps = config.subscription("jobs"), config.subscription("steps")
    assert (jobs.codec, jobs.ordered, jobs.protocol) == ("task", True, TaskProtocol(max_retries=7))
    assert config.queue("jobs").notices == Notices(results="done")
    assert config.retry_policy("jobs").max_retries == 7
    assert (steps.group, steps.protocol) == ("mine", TaskProtocol(max_retries=2))
    to = Notices(results="steps-done", dead_letters="stream:dlq")
    assert config.queue("steps").notices == to
    assert config.retry_policy("steps").max_retries == 2
    assert tuple(config.retry_policy("steps").table) == (1,)


def test_the_variables_of_the_task_protocol(load):
    config = load("", {"MAX_RETRIES": "5", "HEARTBEAT_INTERVAL_S": "12.5"})
    assert (config.tasks.max_retries, config.tasks.heartbeat_interval_s) == (5, 12.5)
    assert load("", {"MAX_RETRIES": "5", "ACKBONE__TASKS__MAX_RETRIES": "2"}).tasks.max_retries == 2
    with pytest.raises(ConfigError, match="MAX_RETRIES"):
        load("", {"MAX_RETRIES": "many"})


def test_the_visibility_timeout_counts_from_wherever_it_is_set(load, tmp_path):
    (tmp_path / ".env").write_text("VISIBILITY_TIMEOUT_S=9\n")
    redis = "broker: redis://h:6379/0"

    def seen(text, environ=None):
        config = load(text, environ or {})
        shown = {s.path: (s.value, s.origin) for s in config.describe()}
        return read_address(config.endpoints["default"].url).lease_s, shown[
            "tasks.visibility_timeout_s"
        ]

    assert seen(redis) == (9.0, (9, "env"))
    assert seen(redis, {"VISIBILITY_TIMEOUT_S": "8"}) == (8.0, (8, "env"))
    assert seen(f"{redis}?timeout_s=2&visibility_timeout_s=7") == (7.0, (7, "file"))
    (tmp_path / ".env").unlink()
    assert seen(f"{redis}\ntasks: {{visibility_timeout_s: 6}}") == (6.0, (6, "file"))
    assert seen(redis) == (300.0, (None, "default"))
    with pytest.raises(ConfigError, match="VISIBILITY_TIMEOUT_S"):
        load(redis, {"VISIBILITY_TIMEOUT_S": "soon"})


def test_a_config_made_in_python_is_converted_as_a_file_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain: dict[str, Any] = {
        "home": "data",
        "broker": "sqlite:///q.db",
        "worker": {"slots": 5},
        "queues": {"orders": {"waits_s": [1, 2]}, "mail": Queue(ttl_s=60)},
        "channels": {"bot": {"kind": "telegram", "connection": {"token": "1:x"}}},
    }
    config = Config(**plain)
    assert config.home == tmp_path / "data"
    assert config.broker == f"sqlite:///{tmp_path}/q.db"
    assert config.worker == Worker(slots=5)
    assert config.queue("orders").waits_s == (1.0, 2.0)
    assert config.queue("mail").ttl_s == 60
    assert config.channels["bot"].connection["token"] == Secret("1:x")
    assert {s.path for s in config.describe() if s.origin == "argument"} >= {"home", "worker.slots"}
    again = msgspec.structs.replace(config, send_timeout_s=2)
    assert again.channels == config.channels, "a secret stays what it is"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"home": 5}, "home: expected a path, found the number 5"),
        ({"worker": {"slots": "many"}}, "worker.slots: expected a whole number from 1 to 100000"),
        ({"worker": {"slot": 5}}, "worker.slot: unknown setting; did you mean worker.slots?"),
        ({"worker": 5}, "worker: expected a section"),
        ({"worker": Worker(lease_s=0.0)}, "worker.lease_s: expected a number from 0.5 to 86400"),
        ({"broker": "reddis://h"}, "broker: 'reddis://h' is not a known broker; did you mean"),
        ({"queues": {"a b": Queue()}}, 'queues["a b"]: not a valid queue name'),
        ({"retry": Retry(base_delay_s=70.0)}, "retry.base_delay_s: must not exceed"),
    ],
)
def test_a_config_made_in_python_is_checked_as_a_file_is(fields, said):
    with pytest.raises(ConfigError) as raised:
        Config(send_timeout_s=-1, **fields)
    first, second = sorted(raised.value.problems, key=lambda text: "send_timeout_s" in text)
    assert first.startswith(f"Config: {said}")
    assert second.startswith("Config: send_timeout_s: expected a number above 0")


def test_queues_do_not_tell_of_each_other_for_ever(load):
    with pytest.raises(ConfigError, match="a loop"):
        load("queues:\n  a: {results: b}\n  b: {results: a}\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: {broker_dead_letters: b}\n  b: {}", "a loop"),
        ("a: {broker_dead_letters: b, results: b}", "a loop"),
        ("a: {broker_dead_letters: default}", "a loop"),
        ("a: {broker_dead_letters: 'a:p3'}", "a loop"),
        ("a: {broker_dead_letters: dead, broker: files}", "SQLite has no dead-letter queues"),
    ],
)
def test_the_dead_letter_queue_of_a_server(load, text, said):
    brokers = "broker: amqp://h/\nbrokers: {files: sqlite}\n"
    with pytest.raises(ConfigError, match=said):
        load(f"{brokers}queues:\n  {text}\n")
    found = load(f"{brokers}queues:\n  a: {{broker_dead_letters: a.dead}}\n")
    assert found.subscription("a").broker_dead_letters == "a.dead"


def test_nothing_is_written_by_loading(load, tmp_path):
    load()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "worker:\nqueues:\ntriggers:\n", "---\n"])
def test_an_empty_file_or_section_means_the_defaults(load, text):
    config = load(text)
    assert config.worker == Config().worker
    assert config.queues == {}
    assert config.triggers == ()


def test_a_queue_gets_its_own_settings_and_inherits_the_rest(load):
    config = load(
        "retry: {max_retries: 5, jitter: 0}\n"
        "queues:\n"
        "  orders: {codec: json, tenant: acme, waits_s: [5, 25], dedup_window_s: 60}\n"
        "  letters: {dedup: false}\n"
        "  empty:\n"
    )
    policy = config.retry_policy("orders")
    assert (policy.max_retries, policy.jitter, policy.table) == (5, 0, (5.0, 25.0))
    sub = config.subscription("orders")
    assert (sub.queue, sub.codec, sub.tenant, sub.dedup_window_s) == ("orders", "json", "acme", 60)
    assert [config.subscription(name).dedup for name in ("orders", "letters")] == [True, False]
    assert config.queue("empty") == config.queue("not in the file")
    assert config.subscription("empty").ack_policy == "dlq"


def test_the_file_is_looked_for_by_argument_then_variable_then_folder(tmp_path):
    for name, slots in (("a.yaml", 1), ("b.yaml", 2), ("ackbone.yaml", 3)):
        (tmp_path / name).write_text(f"worker: {{slots: {slots}}}\n")
    env = {"ACKBONE_CONFIG": "b.yaml"}
    assert load_config(Path("a.yaml"), environ=env, cwd=tmp_path).worker.slots == 1
    assert load_config(environ=env, cwd=tmp_path).worker.slots == 2
    assert load_config(environ={}, cwd=tmp_path).worker.slots == 3
    (tmp_path / ".env").write_text("ACKBONE_CONFIG=a.yaml\n")
    assert load_config(environ={}, cwd=tmp_path).worker.slots == 1


def test_arguments_win_over_the_environment_over_the_file_over_defaults(load):
    text = "worker: {slots: 2, crash_budget: 4}\n"
    env = {"ACKBONE__WORKER__SLOTS": "3"}
    config = load(text, env, overrides={"worker.slots": 7})
    assert config.worker.slots == 7
    assert load(text, env).worker.slots == 3
    origins = {row.path: row.origin for row in config.describe()}
    assert origins["worker.slots"] == "argument"
    assert origins["worker.crash_budget"] == "file"
    assert origins["worker.lease_s"] == "default"


def test_relative_paths_start_at_the_file_or_at_the_current_folder(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "h.yaml").write_text("home: data\nbroker: sqlite:///q.db\n")
    config = load_config(Path("etc/h.yaml"), environ={}, cwd=tmp_path)
    assert config.home == tmp_path / "etc" / "data"
    assert config.endpoints["default"].file == config.store_file == tmp_path / "etc" / "q.db"
    config = load_config(Path("etc/h.yaml"), environ={"ACKBONE_HOME": "h"}, cwd=tmp_path)
    assert config.home == tmp_path / "h"


@pytest.mark.parametrize(
    ("lines", "broker_file", "store_file"),
    [
        ("broker: memory://", None, "home/ackbone.db"),
        ("broker: memory", None, "home/ackbone.db"),
        ("broker: sqlite://", "home/ackbone.db", "home/ackbone.db"),
        ("broker: sqlite:///a.db", "a.db", "a.db"),
        ("store: sqlite:///b.db", "b.db", "b.db"),
        ("broker: sqlite:///a.db\nstore: sqlite:///b.db", "a.db", "b.db"),
    ],
)
def test_broker_and_store_share_a_file_unless_told_otherwise(
    load, tmp_path, lines, broker_file, store_file
):
    config = load(f"home: home\n{lines}\n")
    assert config.endpoints["default"].file == (broker_file and tmp_path / broker_file)
    assert config.store_file == tmp_path / store_file


@pytest.mark.parametrize(
    "broker", ["postgresql", "postgres", "postgresql://", "postgres://other@H:5432/db"]
)
def test_the_postgresql_broker_is_in_the_database_of_the_store(load, broker):
    config = load(f"store: postgresql://u@h/db\nbroker: {broker}\nbrokers: {{jobs: postgresql}}\n")
    assert [config.endpoints[name].url for name in ("default", "jobs")] == [config.store] * 2
    assert config.endpoints["default"].kind.name == "postgresql"


def test_an_absolute_sqlite_url_has_four_slashes(load, problems, tmp_path):
    assert (
        load(f"broker: sqlite:///{tmp_path}/x.db\n").endpoints["default"].file == tmp_path / "x.db"
    )
    [problem] = problems("broker: sqlite:///tmp/x.db\n")
    assert "write four: sqlite:////tmp/x.db" in problem


def test_anchors_and_merge_keys_work(load):
    config = load(
        "queues:\n  a: &base {codec: json, max_retries: 9}\n  b:\n    <<: *base\n    codec: text\n"
    )
    assert (config.queues["b"].codec, config.queues["b"].max_retries) == ("text", 9)


def test_choices_may_be_written_in_capitals(load):
    assert load("log: {level: INFO}\n").log.level == "info"


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────────


def test_every_mistake_is_reported_at_once_in_order(problems):
    found = problems(
        "brokr: sqlite\n"
        "worker:\n"
        "  slots: many\n"
        "  crash_budget: 0\n"
        "  lease: 4\n"
        "log: {level: loud}\n"
        "triggers:\n"
        "  - {queue_name: q, consumer_group: g, concurrency: 0}\n",
        {"ACKBONE__WORKER__LEASE_S": "soon"},
    )
    assert found == [
        "ackbone.yaml:1: brokr: unknown setting; did you mean broker?",
        "ackbone.yaml:3: worker.slots: expected a whole number from 1 to 100000, "
        "found the text 'many'; write for example slots: 100",
        "ackbone.yaml:4: worker.crash_budget: expected a whole number from 1 to 1000, "
        "found the number 0; write for example crash_budget: 2",
        "ackbone.yaml:5: worker.lease: unknown setting; did you mean worker.lease_s?",
        "ackbone.yaml:6: log.level: expected one of debug, info, warning, error, critical, "
        "found the text 'loud'",
        "ackbone.yaml:8: triggers[0].concurrency: must be positive, got 0",
        "ACKBONE__WORKER__LEASE_S: worker.lease_s: expected a number from 0.5 to 86400, "
        "found the text 'soon'; write for example ACKBONE__WORKER__LEASE_S=10",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slots: 5", "slots: unknown setting here; did you mean worker.slots?"),
        ("breaker: {zzz: 1}", "breaker.zzz: unknown setting; known here: failures, probe_s"),
        ("worker: {lease_s: 30s}", "found the text '30s'; write lease_s: 30"),
        ("worker: {lease_s: 5m}", "write lease_s: 300"),
        ("max_message_bytes: 256 KB", "write max_message_bytes: 262144"),
        ('worker: {slots: "100"}', "found the text '100'; write slots: 100 without quotes"),
        ("worker: {slots: true}", "found true; write for example slots: 100"),
        ("worker: {slots:}", "found nothing; remove the key for the default, 100"),
        ("worker: {slots: 1.5}", "found the number 1.5"),
        ("worker: {lease_s: .nan}", "worker.lease_s: expected a number from 0.5 to 86400"),
        ("worker: {lease_s: .inf}", "found the number inf"),
        ("worker: 5", "worker: expected a section (keys such as slots, lease_s, crash_budget,"),
        ("queues: [a]", "queues: expected a section with one key for each entry, found a list"),
        ("queues: {a: b}", "queues.a: expected a section"),
        (
            "queues: {a: {tenant: 12}}",
            "expected text, or null, found the number 12; put it in quot",
        ),
        ("queues: {a: {tenant: no}}", "found false; put it in quotes"),
        ("queues: {a: {paused: 'yes'}}", "expected true or false, found the text 'yes'"),
        (
            "queues: {a: {waits_s: 5}}",
            "found the number 5; write for example waits_s: [5, 25, 120]",
        ),
        ("queues: {a: {waits_s: [1, x]}}", "queues.a.waits_s[1]: expected a number from 0"),
        (
            "queues: {a: {on_parked: skipp}}",
            "expected one of wait, skip, found the text 'skipp'; d",
        ),
        (
            "queues: {a: {codec: jsn}}",
            "'jsn' is not a codec; did you mean json? known: standard, json",
        ),
        ("queues: {a: {codec: cloudevents}}", "this version of ackbone has no codec cloudevents"),
        ("queues: {'a b!': }", 'queues["a b!"]: not a valid queue name: letters, digits'),
        (
            "queues: {a: {base_delay_s: 90}}",
            "the first wait (90 s) exceeds the longest one (60 s)",
        ),
        ("retry: {base_delay_s: 90}", "must not exceed retry.max_delay_s (60)"),
        ("ledger: {key_file: a, anchor_file: ./a}", "is the same file as ledger.key_file"),
        (
            "triggers: {queue_name: a}",
            "expected a list, found a section with keys; begi",
        ),
        ("triggers: [{}]", "triggers[0].queue_name: is required"),
        ("triggers:\n-", "triggers[0].consumer_group: is required"),
        ("home: 5", "home: expected a path, found the number 5"),
        ("home: ''", "home: expected a path, found the text ''"),
        ("broker: redis://", "redis:// names no server; write redis://host:6379/0"),
        ("broker: unix://redis.sock", "a socket's path is absolute: unix:///run/redis.sock"),
        ("broker: redsi://u:hunter2@h/0", "did you mean redis?"),
        ("store: redis://u:hunter2@h/0", "'redis://***@h/0' is not a known store"),
        ("broker: amqp://", "amqp:// names no server; write amqp://user@host:5672/vhost"),
        ("broker: kafka://h", "no Kafka adapter"),
        ("broker: sqs://h", "no Amazon SQS adapter"),
        ("broker: servicebus://h", "no Azure Service Bus adapter"),
        ("store: postgresql://", "postgresql:// names no database; write postgresql://user@host"),
        ("store: postgrsql://u:hunter2@h/db", "did you mean postgresql?"),
        ("broker: postgresql", "broker: the PostgreSQL broker is in the store's database, and"),
        ("broker: postgresql://u:hunter2@h/db", "write `store: postgresql://user@host/name` and"),
        (
            "store: postgresql://u@h/db\nbroker: postgresql://u:hunter2@h/other",
            "broker: names another database than `store`",
        ),
        (
            "store: postgresql://u@h/db\ntriggers: [{queue_name: q, consumer_group: g, adapter:"
            " {type: postgresql, connection: {url: postgresql://u@h/other}}}]",
            "triggers[0].adapter: names another database than `store`",
        ),
        (
            "store: postgresql://u@h/db\nbrokers: {jobs: postgres://u@h:5433/db}",
            "brokers.jobs: names another database than `store`",
        ),
        ("store: memory://", "store: the store cannot be in memory"),
        ("broker: sqllite", "'sqllite' is not a known broker; did you mean sqlite?"),
        ("broker: rabbitmq", "'rabbitmq' is not a known broker; did you mean amqp?"),
        ("broker: rabbit", "did you mean amqp?"),
        ("broker: rabbitmq://u:hunter2@h/v", "did you mean amqp?"),
        ("broker: sqlite://a.db", "a file takes three slashes (sqlite:///relative.db)"),
        ("broker: sqlite:///a.db?mode=ro", "takes only a path"),
        (
            "- a",
            "ackbone.yaml:1: expected settings such as `broker: sqlite`, one per line; found",
        ),
        ("just words", "found a single value"),
        (
            "a: [1, 2",
            "expected ',' or ']', but got '<stream end>', in the part that begins on line 1; ",
        ),
        ("a: 1\n\tb: 2", "ackbone.yaml:2: not valid YAML: "),
        ("a: 1\n---\nb: 2", "not valid YAML: but found another document"),
        ("retention: {tasks_days: ${D}}", "inside { } and [ ], put a value with ${…} in quotes"),
        ("worker: !!python/object:os.system {}", "is not supported; remove it"),
        ("? [a]\n: 1", "a key must be text"),
        ("worker: {<<: 5}", "`<<` takes a section"),
        ('retry: {max_retries: "\\ud800"}', "max_retries: contains half of a character"),
        ('home: "\\ud800"', "ackbone.yaml:1: home: contains half of a character"),
        ('broker: "redis://\\udfff"', "broker: contains half of a character"),
        ('queues: {"a\\ud800": {}}', "queues: a key contains half of a character"),
        ('channels: {a: {kind: webhook, options: ["\\ud800"]}}', "contains half of a character"),
    ],
)
def test_what_is_said_about_a_mistake(problems, text, said):
    found = problems(text + "\n")
    assert any(said in problem for problem in found), found
    assert "hunter2" not in "".join(found)


def test_a_key_that_stands_twice_is_a_mistake(problems):
    assert problems("worker:\n  slots: 1\n  lease_s: 5\n  slots: 2\n") == [
        "ackbone.yaml:4: worker.slots: is set twice, first on line 2; remove one of the two"
    ]


def test_a_file_that_is_not_there_is_named(tmp_path, problems):
    with pytest.raises(ConfigError) as caught:
        load_config(Path("other.yaml"), environ={}, cwd=tmp_path)
    assert caught.value.problems[0].startswith("other.yaml: there is no such file; ")
    [problem] = problems(None, {"ACKBONE_CONFIG": "gone.yaml"})
    assert problem == (
        "ACKBONE_CONFIG: there is no file 'gone.yaml'; correct the variable or unset it"
    )


def test_a_folder_a_large_file_and_bytes_are_refused(tmp_path, problems):
    file = tmp_path / "ackbone.yaml"
    file.mkdir()
    assert problems() == ["ackbone.yaml: the file is not a regular file"]
    file.rmdir()
    file.write_bytes(b"#" * 1_048_577)
    assert "the file is larger than 1 MB" in problems()[0]
    file.write_bytes(b"# fine\nhome: \xff\n")
    assert problems() == ["ackbone.yaml: the file is not UTF-8 text (line 2)"]


def test_yaml_bombs_are_refused(problems):
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    assert any("more than 50000 values, aliases counted" in p for p in problems(bomb))
    assert any("does an alias contain itself?" in p for p in problems("a: &a [*a]\n"))
    assert any("nested deeper than 32 levels" in p for p in problems("[" * 100_000))
    merges = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
    )
    assert any("more than 50000 values" in p or "nested" in p for p in problems(merges))


def test_a_yaml_error_does_not_repeat_the_file(problems):
    for text in (
        "password: *hunter2",
        "password: !hunter2!x y",
        'password: "hunter2',
        "p: @hunter2",
    ):
        found = problems(f"triggers: [{{adapter: {{connection: {{{text}}}}}}}]\n")
        assert "hunter2" not in "".join(found), found


# ── substitution ─────────────────────────────────────────────────────────────────────────────────


def test_an_unset_variable_is_named_with_its_path(problems):
    assert problems("queues:\n  a:\n    tenant: ${WHO}-${WHERE}\n") == [
        f"ackbone.yaml:3: queues.a.tenant: the variable {name} is not set; set it in the "
        f"environment or in .env, or give a default: ${{{name}:-default}}"
        for name in ("WHO", "WHERE")
    ]


def test_a_variable_fits_numbers_switches_and_texts(load):
    config = load(
        'worker: {slots: "${N}", lease_s: "${L:-2.5}"}\n'
        "queues:\n"
        "  a: {paused: '${P}', tenant: '${T}', ttl_s: '${TTL:-}', codec: '${C:-json}'}\n",
        {"N": "12", "P": "yes", "T": "007"},
    )
    assert (config.worker.slots, config.worker.lease_s) == (12, 2.5)
    queue = config.queues["a"]
    assert (queue.paused, queue.tenant, queue.ttl_s, queue.codec) == (True, "007", None, "json")


def test_what_a_variable_gave_is_not_repeated_in_an_error(problems):
    [problem] = problems("worker: {slots: '${PW}'}\n", {"PW": "hunter2"})
    assert problem == (
        "ackbone.yaml:1: worker.slots: expected a whole number from 1 to 100000, found the "
        "value of the ${…} (not shown: it may be secret); write for example slots: 100"
    )


def test_a_file_gives_its_content_stripped(load, problems, tmp_path):
    (tmp_path / "tenant.txt").write_text("  acme\n")
    text = "queues: {{a: {{tenant: '${{file:{}}}'}}}}\n"
    assert load(text.format("tenant.txt")).queues["a"].tenant == "acme"
    assert load(text.format(tmp_path / "tenant.txt")).queues["a"].tenant == "acme"
    assert load(text.format("${D}/tenant.txt"), {"D": "."}).queues["a"].tenant == "acme"
    [problem] = problems(text.format("/no/such"))
    assert problem == (
        "ackbone.yaml:1: queues.a.tenant: ${file:/no/such}: the file /no/such does not exist"
    )


VARIABLES = {"A": "1", "EMPTY": "", "REF": "${A}", "file": "f"}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("${A}", "1"),
        ("x${A}y${A}z", "x1y1z"),
        ("$$", "$"),
        ("$${A}", "${A}"),
        ("$$$${A}", "$${A}"),
        ("$$${A}", "$1"),
        ("a$b $ 5$", "a$b $ 5$"),
        ("${NO:-d}", "d"),
        ("${NO:-}", ""),
        ("${EMPTY:-d}", "d"),
        ("${EMPTY}", ""),
        ("${A:-${NO}}", "1"),
        ("${NO:-${A}}", "1"),
        ("${NO:-a{b}", "a{b"),
        ("${NO:-$$}", "$"),
        ("${REF}", "${A}"),
        ("${file:-x}", "f"),
        ("}{", "}{"),
    ],
)
def test_substitution(text, result):
    done = substitute(text, VARIABLES, Path())
    assert (done.text, done.problems) == (result, ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("${", "is not followed by a name"),
        ("${}", "is not followed by a name"),
        ("${A", "reference cannot be read"),
        ("${A:-x", "has no closing brace"),
        ("${A B}", "reference cannot be read: write ${NAME}, ${NAME:-default} or ${file:/path}"),
        ("${A:?x}", "reference cannot be read"),
        ("${file:}", "names no file"),
        ("${NO:-" * 9, "deeper than 8 levels"),
    ],
)
def test_substitution_that_cannot_be_read(text, said):
    [problem] = substitute(text, VARIABLES, Path()).problems
    assert said in problem


@given(st.text())
def test_doubled_dollars_come_back_as_they_were(text):
    assert substitute(text.replace("$", "$$"), {}, Path()).text == text


@given(st.text(), st.text(), st.text())
def test_a_value_goes_in_untouched(before, value, after):
    before, after = before.replace("$", "$$"), after.replace("$", "$$")
    done = substitute(f"{before}${{V}}{after}", {"V": value}, Path())
    assert done.text == before.replace("$$", "$") + value + after.replace("$$", "$")
    assert done.problems == ()


@given(st.text(alphabet="${}:-ABfile/ \n", max_size=40))
def test_substitution_never_raises(text):
    done = substitute(text, VARIABLES, Path("/nonexistent"))
    assert isinstance(done.text, str)


# ── variables ────────────────────────────────────────────────────────────────────────────────────


def test_variables_reach_every_kind_of_setting(load):
    config = load(
        "queues: {my-queue: {codec: json}}\n"
        "triggers: [{queue_name: q, consumer_group: g, adapter: {connection: {port: 1}}}]\n",
        {
            "ACKBONE__WORKER__SLOTS": "5",
            "ACKBONE__QUEUES__MY_QUEUE__TENANT": "123",
            "ACKBONE__QUEUES__OTHER__PAUSED": "on",
            "ACKBONE__RETRY__WAITS_S": "[1, 2.5]",
            "ACKBONE__TRIGGERS__0__CONCURRENCY": "8",
            "ACKBONE__TRIGGERS__0__ADAPTER__CONNECTION__PORT": "9092",
            "ACKBONE__TRIGGERS__0__ADAPTER__CONNECTION__PASSWORD": "0123",
            "ACKBONE__TRIGGERS__1": "{queue_name: r, consumer_group: $g}",
            "ACKBONE__RETENTION__TASKS_DAYS": "null",
        },
    )
    assert config.worker.slots == 5
    assert config.queues["my-queue"].tenant == "123"
    assert config.queues["my-queue"].codec == "json"
    assert config.queues["other"].paused is True
    assert config.retry.waits_s == (1.0, 2.5)
    assert config.triggers[0].concurrency == 8
    assert config.triggers[0].adapter.connection == {"port": 9092, "password": Secret("0123")}
    assert config.triggers[1].consumer_group == "$g"
    assert config.retention.tasks_days is None


def test_lists_by_index_grow_in_order(load, problems):
    env = {f"ACKBONE__RETRY__WAITS_S__{n}": str(n) for n in range(12)}
    assert load(None, env).retry.waits_s == tuple(range(12))
    [problem] = problems(None, {"ACKBONE__RETRY__WAITS_S__1": "1"})
    assert "retry.waits_s[1]: entries are numbered without gaps: the next one is 0" in problem


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ACKBONE__WORKER__SLOT", "worker.slot: unknown setting; did you mean worker.slots?"),
        ("ACKBONE__WORKR__SLOTS", "workr: unknown setting; did you mean worker?"),
        ("ACKBONE__BROKER__X", "broker: is a single value without keys"),
        ("ACKBONE____X", "is not the name of a setting; write ACKBONE__SECTION__KEY"),
        ("ACKBONE__TRIGGERS__X", "an entry of a list has a number, from 0"),
        ("ACKBONE__ORIGINS", "origins: unknown setting"),
    ],
)
def test_a_wrong_variable_is_named(problems, name, said):
    [problem] = problems(None, {name: "1"})
    assert problem.startswith(name + ": ")
    assert said in problem


@pytest.mark.parametrize("name", ["ACKBONE_HOME", "ACKBONE__RETRY__MAX_RETRIES"])
def test_a_variable_with_half_of_a_character_is_a_mistake(problems, name):
    """Bytes of the environment that are no UTF-8 come as such."""
    (said,) = problems("", {name: "\udcff"})
    assert "contains half of a character" in said


def test_home_by_its_two_names(load, problems, tmp_path):
    assert load(None, {"ACKBONE_HOME": "/a"}).home == Path("/a")
    assert load(None, {"ACKBONE__HOME": "b"}).home == tmp_path / "b"
    assert load(None, {"ACKBONE_HOME": ""}).home == tmp_path / ".ackbone"
    [problem] = problems(None, {"ACKBONE__HOME": "b", "ACKBONE_HOME": "/a"})
    assert "ACKBONE__HOME names another folder; unset one of the two" in problem


def test_dotenv_beside_the_file_is_read_and_the_environment_wins(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "h.yaml").write_text("queues: {a: {tenant: '${A}'}, b: {tenant: '${B}'}}\n")
    (tmp_path / "etc" / ".env").write_text("A=file\nB=file\nACKBONE__WORKER__SLOTS=9\n")
    (tmp_path / ".env").write_text("A=elsewhere\nACKBONE_HOME=elsewhere\n")
    config = load_config(Path("etc/h.yaml"), environ={"B": "real"}, cwd=tmp_path)
    assert (config.queues["a"].tenant, config.queues["b"].tenant) == ("file", "real")
    assert config.worker.slots == 9
    assert config.home == tmp_path / ".ackbone"


def test_dotenv_forms():
    text = (
        "# comment\n\nA=1\nexport B = two words # comment\nC='$x # y'\n"
        'D="a\\n\\"b\\""  # c\nE=\nF="two\nlines"\nG=a#b\r\nH= # c\n'
    )
    found, bad = parse_dotenv(text)
    assert found == {
        "A": "1", "B": "two words", "C": "$x # y", "D": 'a\n"b"', "E": "", "F": "two\nlines",
        "G": "a#b", "H": "",
    }  # fmt: skip
    assert bad == []


def test_a_line_of_dotenv_that_is_none_is_named_without_its_content(problems, tmp_path):
    (tmp_path / ".env").write_text("A=1\nhunter2\nB='open\n")
    assert [problem.partition(" expected")[0] for problem in problems()] == [".env:2:", ".env:3:"]


@given(
    st.dictionaries(
        st.from_regex(r"[A-Z_][A-Z0-9_]{0,9}", fullmatch=True),
        st.text(alphabet=string.printable.replace("'", "").replace("\r", ""), max_size=30),
    )
)
def test_single_quoted_values_of_dotenv_come_back(variables):
    text = "".join(f"{name}='{value}'\n" for name, value in variables.items())
    assert parse_dotenv(text) == (variables, [])


# ── queue triggers ───────────────────────────────────────────────────────────────────────────────


def in_list(text: str) -> str:
    lines = text.splitlines()
    return "triggers:\n- " + "\n  ".join(lines) + "\n"


@pytest.mark.parametrize("text", [QUEUE_TRIGGER, in_list(QUEUE_TRIGGER)])
def test_the_queue_trigger_file_loads_as_it_stands(load, text):
    config = load(text, KAFKA)
    [trigger] = config.triggers
    assert trigger.queue_trigger() == QueueTriggerConfig(
        queue_name="agent-events",
        consumer_group="owlclaw-agents",
        concurrency=4,
        ack_policy="requeue",
        metrics_enabled=True,
        metrics_export_interval=60.0,
    )
    assert trigger.metrics.export_interval == 60
    assert trigger.adapter.type == "kafka"
    assert trigger.adapter.connection == {
        "brokers": "broker1:9092,broker2:9092",
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "PLAIN",
        "sasl_username": "owlclaw",
        "sasl_password": Secret("hunter2"),
    }
    assert "hunter2" not in repr(config)
    rows = {row.path: row for row in config.describe()}
    assert rows["triggers[0].adapter.connection.sasl_password"].value == "***"
    assert rows["triggers[0].concurrency"][1:] == (4, "file")
    assert "queue_trigger" not in "".join(rows)


@pytest.mark.parametrize(
    "password", ["hunter2 x", "x hunter2", "hunter2'x", 'x"hunter2', "hunter2/x"]
)
def test_a_password_in_a_url_is_masked_whatever_it_holds(load, problems, password):
    url = json.dumps(f"redis://u:{password}@host/0")
    connection = f"{{type: redis, connection: {{url: {url}}}}}"
    config = load(
        f"broker: {url}\nstore: {url.replace('redis', 'postgresql')}\n"
        f"channels: {{a: {{kind: webhook, connection: {{url: {url}}}}}}}\n"
        f"queue_trigger: {{queue_name: q, consumer_group: g, adapter: {connection}}}\n"
    )
    shown = [str(row.value) for row in config.describe()]
    assert shown.count("redis://***@host/0") == 3
    assert "hunter2" not in "".join(shown)
    assert "hunter2" not in "".join(problems(f"broker: {url.replace('redis', 'rdis')}\n"))


def test_an_adapter_that_this_version_lacks_is_named_when_it_is_started(load):
    [trigger] = load(QUEUE_TRIGGER, KAFKA).triggers
    with pytest.raises(
        ConfigError, match=r"adapter\.type: Kafka has no adapter in this version; it has: mock"
    ):
        trigger.adapter.url(kind_of("sqlite"))
    [trigger] = load(QUEUE_TRIGGER.replace('"kafka"', "mock"), KAFKA).triggers
    with pytest.raises(ConfigError, match=r"adapter.type mock needs|is the memory broker"):
        trigger.adapter.url(kind_of("sqlite"))


def test_mistakes_in_a_trigger_stand_under_their_own_name(problems):
    text = QUEUE_TRIGGER.replace("concurrency: 4", "concurrency: four").replace("kafka", "kafak")
    found = problems(text)
    assert found[0].startswith("ackbone.yaml:5: queue_trigger.concurrency: expected a whole number")
    assert any("'kafak' is not an adapter; did you mean kafka? known: mock" in p for p in found)
    assert sum("is not set" in problem for problem in found) == 3


def test_one_trigger_from_its_own_file(tmp_path):
    file = tmp_path / "queue_trigger.yaml"
    file.write_text(QUEUE_TRIGGER + "other_program: {x: '${UNKNOWN}'}\n")
    config = load_queue_trigger_config(str(file), environ=KAFKA)
    assert config.queue_name == "agent-events"
    assert validate_config(config) == []
    file.write_text("queue_trigger: {concurrency: 0, parser_type: xml}\n")
    assert validate_config(load_queue_trigger_config(file, environ={})) == [
        "queue_name is required",
        "consumer_group is required",
        "concurrency must be positive, got 0",
        "parser_type must be one of ['json', 'text', 'binary'], got xml",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\n", "queue_trigger: the section is missing"),
        ("queue_trigger: 5\n", "queue_trigger: expected a section"),
        ("queue_trigger: {concurency: 1}\n", "did you mean queue_trigger.concurrency?"),
        ("queue_trigger: {focus: '${NO}'}\n", "the variable NO is not set"),
        (None, "the file is not a regular file"),
    ],
)
def test_a_trigger_file_that_cannot_be_read(tmp_path, text, said):
    file = tmp_path / "t.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_queue_trigger_config(file, environ={})
    assert said in str(caught.value)


def test_the_rules_of_a_trigger():
    config = QueueTriggerConfig(
        queue_name="",
        consumer_group="",
        concurrency=-1,
        ack_policy="drop",
        max_retries=-1,
        retry_backoff_base=0,
        retry_backoff_multiplier=0.5,
        idempotency_window=0,
        parser_type="xml",
    )
    assert validate_config(config) == [
        "queue_name is required",
        "consumer_group is required",
        "concurrency must be positive, got -1",
        "ack_policy must be one of ['ack', 'nack', 'requeue', 'dlq'], got drop",
        "max_retries must be non-negative, got -1",
        "retry_backoff_base must be positive, got 0",
        "retry_backoff_multiplier must be >= 1, got 0.5",
        "idempotency_window must be positive, got 0",
        "parser_type must be one of ['json', 'text', 'binary'], got xml",
    ]
    assert validate_config(QueueTriggerConfig("q", "g")) == []


def test_rules_hold_for_values_of_a_wrong_type():
    config = QueueTriggerConfig("q", "g", concurrency=None, retry_backoff_base=float("nan"))  # type: ignore[arg-type]
    assert validate_config(config) == [
        "concurrency must be positive, got None",
        "retry_backoff_base must be positive, got nan",
    ]


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────


def test_a_secret_does_not_show_itself():
    secret = Secret("hunter2")
    assert [repr(secret), str(secret), f"{secret}", f"{secret:>5}", "%s" % secret] == [  # noqa: UP031
        "***", "***", "***", "  ***", "***",
    ]  # fmt: skip
    assert repr({"password": secret}) == "{'password': ***}"
    assert secret.reveal() == "hunter2"
    assert secret == Secret("hunter2") != Secret("other")
    assert secret != "hunter2"
    assert (bool(secret), bool(Secret(""))) == (True, False)


@pytest.mark.parametrize(
    "name",
    ["password", "sasl_password", "secret", "api_key", "apiKey", "TOKEN", "bot-token", "accessKey",
     "aws_secret_access_key", "connection_string", "credentials", "passphrase"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["key_file", "username", "brokers", "monkey", "keys_path", ""])
def test_names_that_are_none(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("amqp://u:hunter2@h:5672/v", "amqp://***@h:5672/v"),
        ("redis://:hunter2@h/0", "redis://***@h/0"),
        ("amqp://u:p@hunter2/x@h/v", "amqp://***@h/v"),
        ("https://h/x?a=1&token=hunter2&b=2", "https://h/x?a=1&token=***&b=2"),
        ("http://localhost:8000/a", "http://localhost:8000/a"),
        ("sqlite:///a.db", "sqlite:///a.db"),
        ("someone@example.org", "someone@example.org"),
    ],
)
def test_texts_are_masked(text, seen):
    assert mask_text(text) == seen


def test_describe_masks_and_shows_what_is_in_force(load, tmp_path):
    config = load(
        "triggers:\n"
        "- queue_name: q\n"
        "  consumer_group: g\n"
        "  adapter:\n"
        "    type: rabbitmq\n"
        "    connection:\n"
        "      url: amqp://u:hunter2@h/v\n"
        "      hosts: [a, 'amqp://u:hunter2@b/']\n"
        "      tls: {key: hunter2, key_file: /k}\n"
        "      pin_key: 1234\n"
        "      tokens: [hunter2, {a: hunter2}]\n"
        "      credentials: {user: hunter2, none: null}\n"
    )
    assert "hunter2" not in repr(config)
    assert "1234" not in repr(config)
    rows = {row.path: (row.value, row.origin) for row in config.describe()}
    assert "hunter2" not in repr(rows)
    base = "triggers[0].adapter.connection"
    assert rows[f"{base}.url"] == ("amqp://***@h/v", "file")
    assert rows[f"{base}.hosts"] == (["a", "amqp://***@b/"], "file")
    assert rows[f"{base}.tls.key"] == ("***", "file")
    assert rows[f"{base}.tls.key_file"] == ("/k", "file")
    assert rows[f"{base}.tokens"] == (["***", {"a": "***"}], "file")
    assert rows[f"{base}.credentials.user"] == ("***", "file")
    assert rows[f"{base}.credentials.none"] == (None, "file")
    assert rows[f"{base}.pin_key"] == ("***", "file")
    assert config.triggers[0].adapter.connection["url"].reveal() == "amqp://u:hunter2@h/v"
    assert rows["ledger.key_file"] == (str(tmp_path / ".ackbone" / "ledger.key"), "default")
    assert rows["worker.lease_s"] == (10, "default")
    assert rows["triggers[0].metrics.enabled"] == (True, "default")


# ── anything at all ──────────────────────────────────────────────────────────────────────────────


def loads_or_is_refused(content: bytes, environ: dict[str, str] | None = None) -> None:
    """Either a Config or a ConfigError with at least one mistake; never anything else."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ackbone.yaml").write_bytes(content)
        try:
            config = load_config(environ=environ or {}, cwd=Path(folder))
        except ConfigError as refused:
            problems = refused.problems
        else:
            problems = [row.path for row in config.describe()]
        assert problems


@given(st.text() | st.text(alphabet="abc:-[]{}&*!|>'\"%@`#,?~<= \n\t$0.", max_size=60))
@example('a: "\\UFFFFFFFF"')
@example("%YAML 1.")
@example("worker: {slots: 0x_}")
@example("worker: {slots: " + "9" * 5000 + "}")
@example("worker: {slots: 1:99999999999:3}")
@example("max_message_bytes: 99999999999999999999999999")
@example("worker: {lease_s: 1e999}")
@example('home: "a\\0b"')
@example('broker: "sqlite:///a\\0b"')
@example("broker: sqlite:///" + "x/" * 3000)
@example("queues: {a: {tenant: '${file:" + "x" * 5000 + "}'}}")
@example("=: 1")
@example("a: !!binary x\nb: !!timestamp x\nc: !!set {x}\nd: !!int x\ne: !!bool x\nf: !!float x")
@settings(max_examples=300, deadline=None)
def test_garbage_is_refused_in_our_own_words(text):
    loads_or_is_refused(text.encode("utf-8", "surrogatepass"))


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_are_refused_in_our_own_words(content):
    loads_or_is_refused(content)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
TOP = ["home", "broker", "store", "worker", "queues", "retry", "max_message_bytes", "ledger",
       "triggers", "queue_trigger", "log", "origins"]  # fmt: skip
INNER = ["slots", "codec", "waits_s", "adapter", "connection", "type", "key_file", "level",
         "max_retries", "queue_trigger", "password"]  # fmt: skip
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(INNER) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(TOP), TREES, max_size=5))
@settings(max_examples=300, deadline=None)
def test_any_tree_under_real_names_loads_or_is_refused(tree):
    loads_or_is_refused(yaml.safe_dump(tree).encode())


@given(
    st.dictionaries(
        st.lists(
            st.sampled_from([*TOP, *INNER, "0", "1", "X", ""]).map(str.upper),
            min_size=1,
            max_size=5,
        ).map(lambda parts: "ACKBONE__" + "__".join(parts)),
        st.text(max_size=10) | st.sampled_from(["[1, 2]", "{a: 1}", "[", "null", "5", "yes"]),
        max_size=4,
    )
)
@settings(max_examples=300, deadline=None)
def test_any_variables_load_or_are_refused(environ):
    loads_or_is_refused(b"worker: {slots: 1}\ntriggers: [{}]\nqueues: {a: }\n", environ)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "worker": st.fixed_dictionaries(
                {"slots": st.integers(1, 100_000), "lease_s": st.floats(0.5, 86_400)}
            ),
            "max_message_bytes": st.integers(1024, 67_108_864),
            "retry": st.fixed_dictionaries({"waits_s": st.lists(st.floats(0, 1000), max_size=4)}),
            "on_dedup_unavailable": st.sampled_from(["stop", "continue"]),
            "retention": st.fixed_dictionaries({"tasks_days": st.none() | st.integers(1, 36_500)}),
        },
    )
)
@settings(deadline=None)
def test_every_value_in_range_comes_back_as_it_was(tree):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ackbone.yaml"
        file.write_text(yaml.safe_dump(tree))
        rows = {r.path: r for r in load_config(environ={}, cwd=Path(folder)).describe()}
    for name, value in tree.items():
        items = value.items() if isinstance(value, dict) else [("", value)]
        for key, item in items:
            row = rows[f"{name}.{key}".rstrip(".")]
            assert (row.value, row.origin) == (item, "file")


def test_importing_it_loads_no_yaml_and_no_database():
    code = (
        "import sys, ackbone.config; "
        "print([m for m in ('yaml', 'sqlalchemy', 'alembic', 'click', 'prometheus_client') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
