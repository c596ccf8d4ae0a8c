"""The bench's own logic: what it computes, how it says it, and that it runs."""

import math
from pathlib import Path

import pytest

from bench import profile, sampler
from bench.cli import main
from bench.figures import Row, at_least, at_most, markdown, number, percentile, ratio_at_most, table
from bench.machine import Noise, Pulse
from bench.measure import Bench

ROOT = Path(__file__).resolve().parents[2]


def row(name: str, *values: float, **more: object) -> Row:
    return Row(section="s", name=name, unit="msg/s", values=values, **more)  # type: ignore[arg-type]


def test_percentile_is_a_sample_that_so_many_do_not_exceed() -> None:
    samples = [float(n) for n in range(100, 0, -1)]
    assert percentile(samples, 0.5) == 50
    assert percentile(samples, 0.99) == 99
    assert percentile(samples, 1.0) == 100
    assert percentile([7.0], 0.01) == 7
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2


@pytest.mark.parametrize(("samples", "share"), [([], 0.5), ([1.0], 0.0), ([1.0], 1.1)])
def test_percentile_refuses_what_has_no_answer(samples: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"samples|share"):
        percentile(samples, share)


def test_best_is_the_highest_rate_and_the_lowest_time() -> None:
    assert row("rate", 10, 30, 20).best == 30
    assert row("time", 10, 30, 20, lower_is_better=True).best == 10
    assert row("rate", 10, 30, 20).spread == (10, 30)
    with pytest.raises(ValueError, match="at least one"):
        row("nothing")


def test_a_ratio_is_best_against_best() -> None:
    base = row("base", 100, 200)
    assert row("ours", 900, 2000, beside=base).ratio == 10
    assert row("alone", 1).ratio is None
    assert row("ours", 5, beside=row("none", 0)).ratio is None


def test_a_paired_ratio_is_the_middle_one_of_the_turns() -> None:
    base = row("base", 100, 200, 400)
    ours = row("ours", 90, 240, 200, beside=base, paired=True)
    assert ours.ratio == 0.9
    assert ours.best == 240


def test_goals_are_met_or_not() -> None:
    base = row("base", 100)
    assert row("ours", 1000, beside=base, goal=at_least(10)).reached is True
    assert row("ours", 999, beside=base, goal=at_least(10)).reached is False
    assert row("cpu", 125, beside=base, lower_is_better=True, goal=ratio_at_most(1.25)).reached
    assert not row("cpu", 126, beside=base, lower_is_better=True, goal=ratio_at_most(1.25)).reached
    assert row("wait", 3, lower_is_better=True, goal=at_most(3)).reached
    assert not row("wait", 3.1, lower_is_better=True, goal=at_most(3)).reached
    assert row("no goal", 1).reached is None
    assert row("cpu", 1, beside=row("too little", 0), goal=ratio_at_most(1.25)).reached is None
    with pytest.raises(ValueError, match="beside"):
        _ = row("ours", 1, goal=at_least(2)).reached


def test_numbers_carry_no_false_precision() -> None:
    assert number(12345.6) == "12,346"
    assert number(123.45) == "123"
    assert number(12.345) == "12.3"
    assert number(1.2345) == "1.23"


def test_the_table_says_what_was_reached() -> None:
    base = row("plain", 100, 110)
    lines = table(
        [base, row("ours", 500, 550, beside=base, goal=at_least(10), note="a word")]
    ).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[2] == ["s", "plain", "110", "msg/s", "100 – 110", "", "", "", ""]
    assert cells[3] == [
        "",
        "ours (a word)",
        "550",
        "msg/s",
        "500 – 550",
        "5.00 ×",
        "plain",
        "≥ 10 ×",
        "NO",
    ]
    assert len({len(line) for line in lines}) == 1, "aligned"


def test_a_markdown_table_has_a_rule_below_its_heading() -> None:
    assert markdown([("a", "n"), ("bb", "12")], right=frozenset({1})).splitlines() == [
        "| a   |   n |",
        "| --- | --: |",
        "| bb  |  12 |",
    ]


def test_noise_warns_when_the_machine_changed() -> None:
    def pulse(loops: float, syncs: float, busy: float, ours: float, at: float) -> Pulse:
        return Pulse(loops_s=loops, syncs_s=syncs, busy_s=busy, ours_s=ours, at=at)

    steady = Noise(pulse(20, 4000, 100, 5, 0), pulse(19, 4100, 118, 18, 10))
    assert not steady.unsteady
    assert math.isclose(steady.others, 0.5)
    assert "WARNING" not in steady.text()
    slower = Noise(pulse(20, 4000, 0, 0, 0), pulse(15, 4000, 0, 0, 10))
    assert slower.unsteady
    assert "WARNING" in slower.text()


def test_contenders_take_turns(tmp_path: Path) -> None:
    order: list[str] = []

    def contender(name: str) -> dict[str, float]:
        order.append(name)
        return {name: float(len(order))}

    bench = Bench(folder=tmp_path, rounds=2, quiet=True)
    seen = bench.take_turns({"a": lambda: contender("a"), "b": lambda: contender("b")})
    assert order == ["a", "b", "a", "b"]
    assert seen == {"a": (1.0, 3.0), "b": (2.0, 4.0)}


def test_statements_get_short_names() -> None:
    assert sampler.label("INSERT OR IGNORE INTO event_log (id) VALUES (?)") == "INSERT event_log"
    assert sampler.label("WITH u (a) AS (VALUES (1)) UPDATE tasks SET a = 1") == "UPDATE tasks"
    assert sampler.label("UPDATE t SET a = 1 RETURNING a") == "UPDATE t RETURNING"
    assert sampler.label("BEGIN IMMEDIATE") == "BEGIN"
    assert sampler.label("PRAGMA wal_checkpoint(PASSIVE)") == "PRAGMA wal_checkpoint(PASSIVE)"


def test_a_profile_counts_only_what_lies_in_the_window() -> None:
    found = {
        "samples": [
            [5, "MainThread", "engine/executor", "engine/executor:run", 9_000_000],
            [10, "MainThread", "engine/executor", "engine/executor:run", 2_000],
            [12, "MainThread", "waiting", "waiting", 1_000],
            [15, "ackbone-writer:x", "SQL COMMIT", "sqlitefile/file:go", 5_000],
            [16, "ackbone-writer:x", "sqlitefile/file", "sqlitefile/file:go", 1_000],
            [99, "MainThread", "engine/executor", "engine/executor:run", 9_000_000],
        ],
        "statements": {
            "ackbone-writer:x": {"COMMIT": [4, 8_000, 2_000]},
            "pool": {"SELECT": [1, 1, 1]},
        },
    }
    seen = profile.summarise(found, count=2, seconds=0.1, plain=0.05, window=(10, 20))
    assert seen.total(profile.LOOP) == 1.5, "what a waiting thread did before is spread"
    assert list(seen.steps) == [
        (profile.LOOP, "run: task, context, handler, outcome"),
        (profile.WRITER, "writer thread's own work"),
        (profile.WRITER, "SQL COMMIT"),
    ]
    assert seen.steps[profile.WRITER, "SQL COMMIT"] == 1.0, "timed, not guessed from samples"
    assert seen.total(profile.WRITER) == 3.0
    assert seen.statements == {"COMMIT": (2000.0, 4.0, 1.0)}
    shown = profile.text(seen)
    assert "run: task, context, handler, outcome" in shown
    assert "SQL COMMIT" in shown


def test_an_unknown_section_is_an_error_that_names_the_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["nothing"])
    assert "drain" in capsys.readouterr().err
