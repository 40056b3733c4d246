"""Progress, told by a clock that does what it is told."""

import io

import pytest

from imprint.runtime.progress import Progress


class _Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _bar(stream: io.StringIO, total: int = 200) -> tuple[Progress, _Clock]:
    clock = _Clock()
    return Progress("simulating", total, "steps", True, stream, clock), clock


@pytest.mark.parametrize("stream", [io.StringIO(), _Terminal()], ids=["file", "terminal"])
def test_what_is_over_within_two_seconds_prints_nothing(stream: io.StringIO) -> None:
    bar, clock = _bar(stream)
    for _ in range(10):
        clock.now += 0.19
        bar.advance(20)
    bar.close()
    assert stream.getvalue() == ""


def test_a_terminal_sees_one_line_with_rate_and_time_left() -> None:
    stream = _Terminal()
    bar, clock = _bar(stream)
    clock.now += 10
    bar.advance(50)
    shown = stream.getvalue()
    assert shown.startswith("\r") and "\n" not in shown
    for part in ("simulating: 25% of 200 steps", "5/s", "0:10 elapsed", "0:30 left"):
        assert part in shown


def test_a_terminal_is_not_flooded() -> None:
    stream = _Terminal()
    bar, clock = _bar(stream, 1000)
    clock.now += 3
    for _ in range(100):
        clock.now += 0.01
        bar.advance()
    assert 1 <= stream.getvalue().count("\r") <= 6


def test_a_file_gets_a_line_every_ten_seconds() -> None:
    stream = io.StringIO()
    bar, clock = _bar(stream)
    for _ in range(60):
        clock.now += 0.5
        bar.advance()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert all("\r" not in line and "\033" not in line for line in lines)


def test_the_last_line_on_a_terminal_stays_with_the_final_count() -> None:
    stream = _Terminal()
    bar, clock = _bar(stream)
    clock.now += 5
    bar.advance(100)
    clock.now += 0.05
    bar.advance(100)
    bar.close()
    assert stream.getvalue().endswith("\n")
    assert "100% of 200" in stream.getvalue().rsplit("\r", 1)[1]


@pytest.mark.parametrize(("seconds", "shown"), [(59, "0:59"), (61, "1:01"), (3600, "1:00:00"), (86399.6, "24:00:00")])
def test_time_is_shown_as_a_clock_would(seconds: float, shown: str) -> None:
    stream = _Terminal()
    bar, clock = _bar(stream, 2)
    clock.now += seconds
    bar.advance(1)
    assert f"{shown} elapsed, {shown} left" in stream.getvalue()


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    clock = _Clock()
    bar = Progress("simulating", 3, "steps", False, clock=clock)
    clock.now += 100
    bar.advance(3)
    bar.close()
    assert bar.done == 3
    assert capsys.readouterr() == ("", "")


def test_by_default_it_is_told_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    clock = _Clock()
    bar = Progress("simulating", 3, "steps", clock=clock)
    clock.now += 100
    bar.advance(1)
    captured = capsys.readouterr()
    assert "33% of 3 steps" in captured.err
    assert captured.out == ""


def test_a_function_is_told_every_advance_and_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[int, int]] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))

    bar = Progress("simulating", 5, "steps", tell)
    bar.advance(2)
    bar.advance()
    bar.close()
    assert told == [(2, 5), (3, 5)]
    assert capsys.readouterr() == ("", "")


def test_nothing_to_do_is_no_division_by_zero() -> None:
    stream = _Terminal()
    bar, clock = _bar(stream, 0)
    clock.now += 5
    bar.advance(0)
    bar.close()
    assert "preparing" in stream.getvalue()


def test_what_an_earlier_run_did_does_not_count_for_the_rate() -> None:
    stream = _Terminal()
    bar, clock = _bar(stream)
    bar.skip(100)
    clock.now += 10
    bar.advance(50)
    shown = stream.getvalue()
    assert all(part in shown for part in ("75% of 200 steps", "5/s", "0:10 left"))


def test_after_a_skip_alone_nothing_is_known_of_the_rate() -> None:
    stream = _Terminal()
    bar, clock = _bar(stream)
    clock.now += 5
    bar.skip(100)
    assert "preparing, 0:05 elapsed" in stream.getvalue()


def test_a_function_is_told_of_a_skip_too() -> None:
    told: list[int] = []
    bar = Progress("simulating", 5, "steps", lambda done, total: told.append(done))
    bar.skip(3)
    bar.advance()
    assert told == [3, 4]


def test_what_is_done_before_anything_counts_is_named() -> None:
    stream = _Terminal()
    bar, clock = _bar(stream)
    for step in range(1, 4):
        clock.now += 5
        bar.announce(f"repeating the run as it was, step {step} of 3")
    assert stream.getvalue().endswith("\rsimulating: repeating the run as it was, step 3 of 3, 0:15 elapsed\033[K")
    clock.now += 10
    bar.advance(50)
    shown = stream.getvalue().rsplit("\r", 1)[1]
    assert shown.startswith("simulating: 25% of 200 steps, 5/s, 0:25 elapsed, 0:30 left")  # of the ten seconds alone


def test_a_phase_after_units_is_named_beside_them_until_the_next_unit() -> None:
    stream = _Terminal()
    bar, clock = _bar(stream)
    clock.now += 10
    bar.advance(100)
    clock.now += 1
    bar.announce("beginning 5 runs at once")
    assert stream.getvalue().rsplit("\r", 1)[1].startswith("simulating: 50% of 200 steps, beginning 5 runs at once, 0:")
    clock.now += 1
    bar.advance(1)
    assert "beginning" not in stream.getvalue().rsplit("\r", 1)[1]


def test_slow_work_shows_how_long_a_unit_takes() -> None:
    for seconds, each in ((4, "4 s each"), (90, "1:30 each"), (1, "1 s each"), (0.4, "2.5/s"), (0.01, "100/s")):
        stream = _Terminal()
        bar, clock = _bar(stream, 1000)
        for _ in range(600):
            clock.now += seconds
            bar.advance()
        assert f", {each}," in stream.getvalue().rsplit("\r", 1)[1]
        assert " 0/s" not in stream.getvalue()


def test_the_time_left_waits_until_it_means_something() -> None:
    """After minutes of preparation, a first unit says little; later ones are timed without that preparation."""
    stream = _Terminal()
    bar, clock = _bar(stream, 1000)
    clock.now += 600
    bar.advance()
    assert "left" not in stream.getvalue()
    for _ in range(40):
        clock.now += 1
        bar.advance()
    assert "1 s each, 10:40 elapsed, 15:59 left" in stream.getvalue().rsplit("\r", 1)[1]


def test_a_function_that_listens_is_told_of_phases() -> None:
    class Told:
        def __init__(self) -> None:
            self.phases, self.counts = list[str](), list[int]()

        def __call__(self, done: int, total: int, /) -> None:
            self.counts.append(done)

        def announce(self, phase: str, /) -> None:
            self.phases.append(phase)

    told = Told()
    bar = Progress("simulating", 5, "steps", told)
    bar.announce("measuring")
    bar.advance(2)
    assert (told.phases, told.counts) == (["measuring"], [2])
