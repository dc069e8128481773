"""Runs side by side keep together and end at the same update, when the time is up."""

import os
from pathlib import Path

import pytest

from collab.recipes import pace as pacing
from collab.recipes.pace import SILENT, Pace


def test_a_run_waits_for_slower_ones_but_not_for_those_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow, gone = (Pace(tmp_path, name, seconds=1e9, lead=20) for name in ("fast", "slow", "gone"))
    assert slow.after_step(10) is None
    assert gone.after_step(10) is None
    silent = (tmp_path / "gone.step").stat().st_mtime - SILENT - 1
    os.utime(tmp_path / "gone.step", (silent, silent))
    steps = iter([20, 30])
    monkeypatch.setattr(pacing.time, "sleep", lambda pause: slow.after_step(next(steps)))
    assert fast.after_step(25) is None  # no look at every step
    assert not (tmp_path / "fast.step").exists()
    assert fast.after_step(30) is None
    assert next(steps) == 20  # 10 was near enough
    assert fast.after_step(40) is None
    assert next(steps, "it waited") == "it waited"
    slow.leave()
    assert fast.after_step(500) is None
    assert fast.waited > 0


def test_all_end_at_the_update_that_the_first_names_who_finds_the_time_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(pacing.time, "time", lambda: clock[0])
    first, second = (Pace(tmp_path, name, seconds=60, notice=45) for name in ("first", "second"))
    clock[0] = 1059.0
    for step in (10, 20, 30):
        assert first.after_step(step) is second.after_step(step) is None
    assert first.after_step(40) is None
    clock[0] = 1060.0
    second.seconds = 1e9  # whose clock has not noticed
    assert second.after_step(40) is None
    assert first.after_step(50) == 120  # two looks of 10 and the notice after 50, and then a whole number of looks
    assert first.after_step(51) == 120
    assert second.after_step(41) is None
    assert second.after_step(50) == 120
    later = Pace(tmp_path, "later", seconds=60, notice=45)
    assert later.begun == 1000.0
    assert later.after_step(10) == 120
