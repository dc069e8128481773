import json
import math
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

import collab
from collab.alternating import PENALTY, at, squared_error
from collab.records import RunRecord, append_record, read_records

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_solvers  # noqa: E402
import bench_tensorly  # noqa: E402
import solver_candidates  # noqa: E402


@pytest.fixture
def layer():
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(1, 5, 18, generator=generator)
    return tuple(
        torch.randn(4, 5, 18, generator=generator) + common * torch.randn(4, 5, 1, generator=generator)
        for _ in range(2)
    )


@pytest.fixture
def started(layer):
    return bench_solvers.start(*layer, 7)


@pytest.fixture
def elsewhere(started):
    weights, point = started
    generator = torch.Generator().manual_seed(4)
    moved = (part + 0.1 * torch.randn(part.shape, generator=generator) for part in point.parts()[:3])
    return weights, at(weights, *moved)


def products(left, right, mixing):
    return torch.einsum("lqr,lhr,lkr->lhqk", left, mixing, right)


def test_all_start_where_decompose_starts(layer, started):
    weights, point = started
    expected = collab.decompose(*layer, 7, max_iterations=0).relative_error
    assert math.sqrt(float(squared_error(weights, point))) == pytest.approx(expected, rel=1e-9)
    norms = [part.norm(dim=1) for part in point.parts()[:3]]
    assert torch.allclose(norms[0], norms[1])
    assert torch.allclose(norms[0], norms[2])


def test_the_gradient_is_autograds(elsewhere):
    weights, point = elsewhere
    penalty = torch.tensor([0.03], dtype=torch.float64)
    factors = [part.clone().requires_grad_() for part in point.parts()[:3]]
    heads = (weights.num_heads, -1)
    whole = torch.einsum("lhdq,lhdk->lhqk", weights.query.unflatten(1, heads), weights.key.unflatten(1, heads))
    sizes = torch.stack([part.square().sum(1) for part in factors]).prod(0)
    value = 0.5 * ((whole - products(*factors)).square().sum() + penalty * sizes.sum())
    assert value.item() == pytest.approx(0.5 * solver_candidates.objective(weights, point, penalty))
    value.backward()
    for part, slope in zip(factors, solver_candidates.gradient(weights, point, penalty), strict=True):
        assert torch.allclose(part.grad, slope, atol=1e-12)


def test_the_curvature_is_that_of_the_jacobian(elsewhere):
    _, point = elsewhere
    factors = point.parts()[:3]
    penalty = torch.tensor([0.03], dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    change = tuple(torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in factors)

    def residuals(left, right, mixing):
        own = torch.einsum("lqr,lhr,lkr->lhqkr", left, mixing, right)  # each dimension's, for the penalty
        return torch.cat([own.sum(-1).flatten(), penalty.sqrt() * own.flatten()])

    _, moved = torch.func.jvp(residuals, factors, change)
    expected = torch.func.vjp(residuals, *factors)[1](moved)
    weight = solver_candidates.ones(penalty, point.left.shape[2])
    for one, other in zip(expected, solver_candidates.curvature(factors, change, weight), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_the_objective_along_a_line_is_a_polynomial(elsewhere):
    weights, point = elsewhere
    change = point.map(lambda part: part.roll(1, 1))
    change = at(weights, *change.parts()[:3])
    penalty = torch.tensor([0.03], dtype=torch.float64)
    polynomial = solver_candidates.objective_along(weights, point, change, penalty)
    for step in (0.0, 0.3, -1.7):
        there = at(weights, *(a + step * b for a, b in zip(point.parts()[:3], change.parts()[:3], strict=True)))
        expected = solver_candidates.objective(weights, there, penalty)
        assert sum(c * step**power for power, c in enumerate(polynomial)) == pytest.approx(expected)


@pytest.mark.parametrize("name", solver_candidates.METHODS)
def test_every_candidate_lowers_the_error_by_as_much_as_it_says(name, started):
    weights, point = started
    before = float(squared_error(weights, point))
    *_, last = islice(solver_candidates.METHODS[name](weights, point), 8)
    assert last.squared < 0.95 * before
    assert last.count >= 8
    factors = (part.double() for part in last.point.parts()[:3])
    assert last.squared == pytest.approx(float(squared_error(weights, at(weights, *factors))), rel=1e-4)


def test_momentum_step_by_step_is_momentum_at_once(layer, started):
    weights, point = started
    steps = list(islice(solver_candidates.momentum(weights, point), 12))
    factors = collab.decompose(*layer, 7, max_iterations=12, tolerance=0.0)
    assert [math.sqrt(step.squared) for step in steps] == pytest.approx(factors.history[1:], rel=1e-6)


def test_levenberg_marquardt_ends_where_sweeps_would(started):
    weights, point = started
    *_, last = islice(solver_candidates.levenberg_marquardt(weights, point), 60)
    slope = solver_candidates.gradient(weights, last.point, PENALTY * squared_error(weights, last.point))
    assert max(float(part.abs().max()) for part in slope) < 1e-4


def test_a_comparison_is_recorded_and_rendered(layer, tmp_path, monkeypatch):
    metrics = bench_solvers.compare(*layer, 7, 0.05)
    assert metrics["best"] == min(one["error"] for one in metrics["methods"].values()) < metrics["start"]
    assert any(one["reached"][1] for one in metrics["methods"].values())
    config = {"model": "tiny", "layer": 0, "metric": "weights", "rank": 7, "seconds": 0.05, "threads": 1}
    origin = {"commit": "0123456789abcdef", "device": "cpu (x)", "versions": {"torch": "2"}, "seed": 0, "time": ""}
    case = RunRecord(name="x", config=config, metrics=json.loads(json.dumps(metrics)), provenance=origin)
    append_record(tmp_path / "x.jsonl", case)
    text = bench_solvers.render(bench_tensorly.latest(tmp_path / "x.jsonl"))
    assert text.count("| tiny | 0 | weights | 7 | ") == len(solver_candidates.METHODS)
    assert "Commit 0123456789ab;" in text
    bench_solvers.draw([case], tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_curves_are_read_and_thinned():
    curve = [(0.0, 1.0, 0), (1.0, 0.5, 1), (2.0, 0.6, 2), (3.0, 0.4, 3)]
    assert bench_solvers._first(curve, 0.5) == (1.0, 1)
    assert bench_solvers._first(curve, 0.1) is None
    assert bench_solvers._until(curve, 2.5) == 0.5
    thin = list(bench_solvers._thinned([(float(i), 1.0, i) for i in range(5000)]))
    assert len(thin) <= bench_solvers.SHOWN + 1
    assert (thin[0][2], thin[-1][2]) == (0, 4999)


def test_both_are_timed_on_the_same_layer(layer):
    pytest.importorskip("tensorly")
    case = bench_tensorly.against_tensorly(layer, 7, 5)
    assert case["tensorly"]["iterations"] == len(case["tensorly"]["curve"]) - 1 <= 5
    assert case["ratio"] == case["tensorly"]["seconds"] / case["seconds"]
    assert case["curve"][-1] == (case["seconds"], case["error"])
    assert case["as_good"]["error"] <= case["tensorly"]["error"]
    factors = collab.decompose(*layer, 7, max_iterations=case["as_good"]["sweeps"])
    assert factors.relative_error == pytest.approx(case["as_good"]["error"])


def test_an_exponent_is_that_of_a_power():
    assert bench_tensorly.exponent([1, 2, 4], [3, 3 * 2**2.5, 3 * 4**2.5]) == pytest.approx(2.5)


def test_text_is_put_between_its_own_markers(tmp_path):
    path = tmp_path / "document.md"
    path.write_text(f"a\nX\nold\n{bench_tensorly.END}b\nY\nkept\n{bench_tensorly.END}")
    bench_tensorly.put_between("X\n", "new\n", path)
    assert path.read_text() == f"a\nX\nnew\n{bench_tensorly.END}b\nY\nkept\n{bench_tensorly.END}"


TABLES = {bench_solvers.NAME: (bench_solvers.BEGIN, bench_solvers.render)} | {
    f"decomposition-{verb}": (bench_tensorly.begin_of(verb), rendered)
    for verb, rendered in bench_tensorly.RENDERED.items()
}


@pytest.mark.parametrize("name", TABLES)
def test_the_document_holds_what_the_program_writes_from_the_committed_records(name):
    begin, rendered = TABLES[name]
    held = bench_tensorly.DOCUMENT.read_text(encoding="utf-8").split(begin)[1].split(bench_tensorly.END)[0]
    records = bench_tensorly.latest(bench_tensorly.RESULTS / f"{name}.jsonl")
    if not records:
        assert held == ""
        pytest.skip(f"there are no records of {name} yet")
    assert held == rendered(records)
    assert len(read_records(bench_tensorly.RESULTS / f"{name}.jsonl")) >= len(records)
