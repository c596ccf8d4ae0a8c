"""What is taken out of a line before anybody reads it."""

import pytest

from ackbone.core.secret import mask_line


@pytest.mark.parametrize(
    ("line", "masked"),
    [
        ("RuntimeError: password=hunter2 on port 5", "RuntimeError: password=*** on port 5"),
        ('{"api_key": "abc", "n": 1}', '{"api_key": ***, "n": 1}'),
        ("{'sasl_password': 'two words'}", "{'sasl_password': ***}"),
        ("Authorization: Bearer abc.def-1", "Authorization: Bearer ***"),
        ("amqp://user:pw@host/v?token=1", "amqp://***@host/v?token=***"),
        ("KeyError: 'name'", "KeyError: 'name'"),
        ("attempt: 3, queue=orders", "attempt: 3, queue=orders"),
    ],
)
def test_secrets_are_masked_and_the_rest_is_kept(line: str, masked: str) -> None:
    assert mask_line(line) == masked


@pytest.mark.parametrize(
    "piece", ["x", "x:", "://", "://a@", "token ", "password=", "?a", "?a=", "Bearer "]
)
def test_long_lines_take_no_time_to_speak_of(piece: str) -> None:
    """A hang here would be one of the whole worker; the suite's time limit is what fails."""
    text = piece * 200_000
    assert len(mask_line(text)) <= len(text)
    assert mask_line(f"{text} password=hunter2").endswith("***")
