"""Bars on a terminal that is a string, so that what was drawn and what was erased can be read."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from wardround import progress
from wardround.progress import Bars, Lines, NowAndThen, Silent

ERASE_LINE = "\x1b[2K"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What the terminal got; every step is drawn, none is rationed."""
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.0)
    return io.StringIO()


@pytest.fixture
def bars(screen: io.StringIO) -> Bars:
    return Bars(Console(file=screen, force_terminal=True, width=80, color_system=None))


def test_silent_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    silent = Silent()
    with silent.task("training", 2) as advance:
        advance()
        advance()
        advance()  # one too many is no matter
    silent.say("a note")
    assert capfd.readouterr() == ("", "")


def test_lines_are_for_a_log_and_cannot_steer_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with Lines().task("training", 2) as advance:
        advance()
    Lines().say("a note on \x1b]0;title\x07.png")
    assert capfd.readouterr() == ("", "a note on \\x1b]0;title\\x07.png\n")


def test_long_work_has_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Steps of ten seconds: after three of them, and after three more; what is said shows in `Lines` alone."""
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    shown = NowAndThen()
    with shown.task("synthesis \x1b]0;x\x07", 2000, done=1000) as advance:
        for _ in range(7):
            advance()
    shown.say("a note")
    lines = "synthesis \\x1b]0;x\\x07: 1,003 of 2,000\nsynthesis \\x1b]0;x\\x07: 1,006 of 2,000\n"
    assert capfd.readouterr() == ("", lines)


def test_what_a_file_is_called_cannot_steer_the_terminal(bars: Bars, screen: io.StringIO) -> None:
    with bars.task("scan\x1b]0;title\x07.npz", 1):
        bars._bars.refresh()
        bars.say("note: \x1b]0;title\x07.png")
    assert "\x1b]0;" not in screen.getvalue()
    assert "\x07" not in screen.getvalue()
    assert screen.getvalue().count("\\x1b]0;title\\x07") >= 2


def test_a_bar_shows_its_label_its_count_and_the_time_left_and_then_goes(bars: Bars, screen: io.StringIO) -> None:
    with bars.task("site-1, round 3", 4) as advance:
        advance()
        advance()
        bars._bars.refresh()
    drawn = screen.getvalue()
    (line,) = {line for line in drawn.replace("\r", "\n").split("\n") if "2/4" in line}
    assert "site-1, round 3" in line
    assert "left" in line
    assert bars._bars.tasks == []
    assert ERASE_LINE in drawn[drawn.rindex("2/4") :]


def test_a_label_is_text_and_no_markup(bars: Bars, screen: io.StringIO) -> None:
    with bars.task("[bold]round[/bold]", 1):
        bars._bars.refresh()
    assert "[bold]round[/bold]" in screen.getvalue()


def test_a_bar_goes_when_the_work_fails(bars: Bars, screen: io.StringIO) -> None:
    def stopped() -> None:
        with bars.task("training", 3) as advance:
            advance()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert bars._bars.tasks == []
    assert not bars._bars.live.is_started


def test_bars_nest_and_come_back(bars: Bars, screen: io.StringIO) -> None:
    with bars.task("methods", 2) as outer:
        for name in ("first fit", "second fit"):
            with bars.task(name, 1) as inner:
                inner()
                bars._bars.refresh()
            outer()
            assert [task.description for task in bars._bars.tasks] == ["methods"]
            assert bars._bars.live.is_started
        assert bars._bars.tasks[0].completed == 2
    assert not bars._bars.live.is_started
    with bars.task("once more", 1):
        bars._bars.refresh()
    assert not bars._bars.live.is_started
    assert all(label in screen.getvalue() for label in ("methods", "first fit", "second fit", "once more"))


def test_steps_from_many_threads_are_all_counted(bars: Bars) -> None:
    threads, steps = 8, 200
    with bars.task("training", threads * steps) as advance:

        def work() -> None:
            for _ in range(steps):
                advance()

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert bars._bars.tasks[0].completed == threads * steps


def test_drawing_is_rationed(bars: Bars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 10.0)
    now = 100.0
    monkeypatch.setattr("wardround.progress.time.monotonic", lambda: now)
    with bars.task("training", 5) as advance:
        advance()
        advance()
        assert bars._bars.tasks[0].completed == 0
        now = 111.0
        advance()
        assert bars._bars.tasks[0].completed == 3
        advance()
        assert bars._bars.tasks[0].completed == 3


def test_say_prints_the_text_as_it_is(bars: Bars, screen: io.StringIO) -> None:
    bars.say("note: site-2 [red]failed[/red] at 3 %")
    assert screen.getvalue() == "note: site-2 [red]failed[/red] at 3 %\n"


def test_what_is_said_stays_above_the_bars(bars: Bars, screen: io.StringIO) -> None:
    with bars.task("training", 1):
        bars.say("a note")
        bars._bars.refresh()
    drawn = screen.getvalue()
    assert drawn.index("a note") < drawn.rindex("training")
    assert bars._bars.tasks == []


def test_work_that_was_begun_before_starts_where_it_stands(bars: Bars) -> None:
    with bars.task("rounds", 5, done=3) as advance:
        assert bars._bars.tasks[0].completed == 3
        advance()
        assert bars._bars.tasks[0].completed == 4


def test_items_are_tracked_one_step_each(bars: Bars) -> None:
    seen = []
    for item in bars.track(["a", "b", "c"], "reading"):
        (bar,) = bars._bars.tasks
        seen.append((item, bar.description, bar.completed, bar.total))
    assert seen == [("a", "reading", 0, 3), ("b", "reading", 1, 3), ("c", "reading", 2, 3)]
    assert bars._bars.tasks == []
    assert list(Silent().track(["a", "b"], "reading")) == ["a", "b"]
