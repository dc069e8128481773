"""measure: time and memory of a call, and of rivals in turn. On a CUDA device the same, through graphs."""

import json
import time

import pytest
import torch

import collab
from collab import benchmark
from collab.benchmark import measure_in_turn


def test_a_call_takes_as_long_as_it_sleeps():
    timing = collab.measure(lambda: time.sleep(0.004), repeats=5, warm_up=1)
    assert 0.004 <= timing.low <= timing.median <= timing.high < 0.1
    assert (timing.samples, timing.calls, timing.replayed, timing.peak_memory) == (5, 1, False, 0)
    assert timing.milliseconds == timing.median * 1e3
    assert json.loads(json.dumps(timing.to_dict()))["samples"] == 5
    assert str(timing).startswith(f"{timing.milliseconds:.4g} ms (")


def test_short_calls_are_repeated_within_a_sample():
    timing = collab.measure(lambda: None, repeats=3)
    assert timing.calls == benchmark._MOST_CALLS
    assert timing.median < 1e-4


def test_peak_memory_is_what_is_held_at_once():
    x = torch.ones(100_000)

    def chain():
        y = x + 1
        z = y + 1
        del y
        return z + 1

    assert collab.measure(lambda: x + 1, repeats=2).peak_memory == pytest.approx(400_000, rel=1e-3)
    assert collab.measure(chain, repeats=2).peak_memory == pytest.approx(800_000, rel=1e-3)


def test_rivals_take_turns_and_one_that_raises_is_left_out_if_wished():
    calls = []

    def wrong():
        raise RuntimeError("no such kernel")

    told = {}
    runs = {
        "a": lambda: calls.append("a") or time.sleep(0.006),
        "wrong": wrong,
        "b": lambda: calls.append("b") or time.sleep(0.006),
    }
    found = measure_in_turn(runs, repeats=4, warm_up=1, failed=lambda name, error: told.update({name: str(error)}))
    assert list(found) == ["a", "b"]
    assert told == {"wrong": "no such kernel"}
    assert "".join(calls[-8:]) == "abbaabba"
    with pytest.raises(RuntimeError, match="no such kernel"):
        measure_in_turn(runs, repeats=2)


def test_threads_are_those_asked_for_and_then_as_before():
    before, seen = torch.get_num_threads(), []
    collab.measure(lambda: seen.append(torch.get_num_threads()), repeats=2, threads=before + 1)
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("wrong", [{"repeats": 1}, {"warm_up": 0}])
def test_too_few_calls_are_refused(wrong):
    with pytest.raises(ValueError, match="repeats must be at least 2 and warm_up at least 1"):
        collab.measure(lambda: None, **wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_is_timed_by_what_the_device_does():
    x = torch.randn(4096, 4096, device="cuda")
    timing = collab.measure(lambda: x @ x, device="cuda", repeats=5)
    assert timing.replayed
    assert timing.peak_memory == 4096 * 4096 * 4
    assert 1e-4 < timing.median < 0.1
    assert not collab.measure(lambda: x @ x, device="cuda", repeats=5, replay=False).replayed
