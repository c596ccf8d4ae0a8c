"""What `import ackbone` offers, pinned; and how little it loads."""

import subprocess
import sys

import pytest

import ackbone

PUBLIC = {
    "__version__",
    "App",
    "Ask",
    "AuthorizationError",
    "BinaryParser",
    "Config",
    "ConfigError",
    "Context",
    "Dead",
    "Decision",
    "Done",
    "FinalError",
    "AckboneError",
    "IdempotencyStore",
    "InvalidMessage",
    "JSONParser",
    "Message",
    "MessageEnvelope",
    "MessageParser",
    "MockQueueAdapter",
    "NotDone",
    "NotFoundError",
    "Park",
    "ParkMessage",
    "ParseError",
    "Priority",
    "PublishUnknown",
    "QueueAdapter",
    "BACKOFF_MS",
    "Cancelled",
    "Channels",
    "DeliveryQueue",
    "SendUnknown",
    "WebhookChannel",
    "AppriseChannel",
    "DiscordChannel",
    "EmailChannel",
    "SlackChannel",
    "TelegramChannel",
    "DeliveryRunner",
    "FolderChannel",
    "QueuedDelivery",
    "RateLimited",
    "compute_backoff_ms",
    "is_ready_for_retry",
    "recovery_report",
    "recovery_scan",
    "Orchestrator",
    "TaskResult",
    "QueueTrigger",
    "QueueTriggerConfig",
    "RawMessage",
    "Receipt",
    "RedisIdempotencyStore",
    "Rejected",
    "Retry",
    "RetryPolicy",
    "RetryableError",
    "SyncContext",
    "TemporaryError",
    "TextParser",
    "ValidationError",
    "load_config",
    "load_queue_trigger_config",
    "validate_config",
}
HEAVY = (
    "sqlalchemy",
    "alembic",
    "click",
    "rich",
    "prometheus_client",
    "yaml",
    "sqlite3",
    "aiohttp",
    "aiosmtplib",
    "apprise",
    "cryptography",
)


def loaded_by(statement: str, env: dict[str, str]) -> set[str]:
    """Top-level packages that a new interpreter has after the statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


def test_the_public_names_are_these():
    assert set(ackbone.__all__) == PUBLIC
    assert set(dir(ackbone)) == PUBLIC


def test_every_public_name_is_there_and_an_unknown_one_is_not():
    for name in ackbone.__all__:
        assert getattr(ackbone, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        ackbone.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("TelegramChannel", "aiohttp", "telegram"),
        ("DiscordChannel", "aiohttp", "discord"),
        ("SlackChannel", "aiohttp", "slack"),
        ("WebhookChannel", "aiohttp", "webhook"),
        ("EmailChannel", "aiosmtplib", "email"),
        ("AppriseChannel", "apprise", "apprise"),
    ],
)
def test_a_name_whose_extra_is_missing_says_which_one(name, package, extra, unmeasured):
    code = f"import sys\nsys.modules[{package!r}] = None\nfrom ackbone import {name}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=unmeasured,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"ModuleNotFoundError: ackbone.{name} needs {package}: ")
    assert f"extra {extra!r}" in said
    assert f"pip install -e '.[{extra}]'" in said


def test_importing_ackbone_loads_nothing_heavy(unmeasured):
    assert loaded_by("import ackbone", unmeasured).isdisjoint(HEAVY)


def test_an_app_needs_no_schema_tools_and_no_terminal_tools(unmeasured):
    found = loaded_by("from ackbone import App, Context, Message", unmeasured)
    assert found.isdisjoint({"sqlalchemy", "alembic", "click", "rich", "prometheus_client"})
