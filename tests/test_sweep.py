"""Layers measured against each other: same results whoever computes them, every size beside ordinary attention."""

import json

import pytest
import torch

import collab
from collab import rivals
from collab.cost import layer_cost
from collab.rivals import OrdinaryAttention, Setting, WrongResult, ordinary_rivals, shared_rivals
from collab.speed_records import best, latest, series, size_of
from collab.sweep import sweep

SMALL = {"batch": 2, "tokens": 9, "width": 24, "num_heads": 3, "repeats": 2}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


# Layers.


def test_ordinary_attention_is_multi_head_attention():
    layer = OrdinaryAttention(24, 3)
    whole = torch.nn.MultiheadAttention(24, 3, batch_first=True)
    with torch.no_grad():
        whole.in_proj_weight.copy_(layer.projection.weight)
        whole.in_proj_bias.copy_(layer.projection.bias)
        whole.out_proj.load_state_dict(layer.out.state_dict())
    x = torch.randn(2, 7, 24)
    torch.testing.assert_close(layer(x), whole(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("step", ["inference", "training"])
def test_every_layer_computes_the_same_whoever_computes_it(step, device):
    setting = Setting(step=step, device=device, **SMALL)
    inputs, gradient = setting.inputs()
    ordinary = ordinary_rivals(setting, inputs, gradient)
    assert {"default"} < {rival.implementation for rival in ordinary}
    assert all(rival.error < 1e-5 for rival in ordinary)
    assert all(rival.parameters == 4 * 24 * 24 + 4 * 24 for rival in ordinary)
    ours = shared_rivals(setting, (12, 5), inputs, gradient, ["auto", "sdpa"], skipped=None)
    assert [rival.asked for rival in ours] == ["auto", "sdpa"]
    assert all(rival.error < 1e-5 for rival in ours)
    results = ours[0].step(inputs, gradient)()
    assert len(results) == (2 if step == "inference" else 1 + len(ours[0].wanted))


def test_an_implementation_that_raises_is_left_out_and_told(monkeypatch):
    forward = rivals.SharedAttention.forward

    def raising(self, inputs):
        if self.layer.implementation == "sdpa":
            raise RuntimeError("no such kernel")
        return forward(self, inputs)

    monkeypatch.setattr(rivals.SharedAttention, "forward", raising)
    told = []
    rows = list(
        sweep(
            Setting(**SMALL), [(8, 5)], implementations=["sdpa", "reference"], skipped=lambda *what: told.append(what)
        )
    )
    assert [row.rival.asked for row in rows if row.rival.kind == "collaborative"] == ["reference"]
    assert [(name, str(error)) for name, error in told] == [("collaborative 8/5, sdpa", "no such kernel")]


def test_a_wrong_result_is_never_measured(monkeypatch):
    setting = Setting(**SMALL)
    forward = rivals.SharedAttention.forward
    wrong = lambda self, inputs: forward(self, inputs) * (1.01 if self.layer.implementation == "sdpa" else 1)  # noqa: E731
    monkeypatch.setattr(rivals.SharedAttention, "forward", wrong)
    with pytest.raises(WrongResult, match="output of shared_dim 8, dims_per_head None, by sdpa must be within"):
        list(sweep(setting, [(8, None)], implementations=["sdpa"]))


def test_a_wrong_gradient_is_seen(monkeypatch):
    setting = Setting(step="training", **SMALL)
    forward = rivals.SharedAttention.forward

    def wrong(self, inputs):
        output = forward(self, inputs)
        return output + 0.1 * (inputs - inputs.detach()) if self.layer.implementation == "sdpa" else output

    monkeypatch.setattr(rivals.SharedAttention, "forward", wrong)
    with pytest.raises(WrongResult, match="gradient of the input"):
        list(sweep(setting, [(8, None)], implementations=["sdpa"]))


@pytest.mark.parametrize("step", ["inference", "training", "decode"])
def test_a_sweep_measures_every_size_beside_ordinary_attention(step, device):
    setting = Setting(step=step, device=device, threads=1 if device == "cpu" else None, **SMALL)
    rows = list(sweep(setting, [(8, None), (12, 4)], implementations=["auto", "reference"]))
    ordinary = [row for row in rows if row.rival.kind == "ordinary"]
    assert min(row.ratio for row in ordinary) == 1
    ours = [row for row in rows if row.rival.kind == "collaborative"]
    assert [(row.rival.shared_dim, row.rival.dims_per_head, row.rival.asked) for row in ours] == [
        (8, None, "auto"), (8, None, "reference"), (12, 4, "auto"), (12, 4, "reference"),
    ]  # fmt: skip
    record = ours[2].to_record("attention", run="now", commit="abc")
    assert {"benchmark", "device", "batch", "tokens", "shared_dim", "dims_per_head", "pass"} <= set(record.config)
    assert record.config["pass"] == step
    assert record.metrics["ratio"] == pytest.approx(
        record.metrics["milliseconds"] / record.metrics["baseline_milliseconds"]
    )
    assert record.provenance["commit"] == "abc"
    assert "torch" in record.provenance["versions"]
    json.dumps(record.to_dict(), allow_nan=False)


def test_operations_are_those_of_the_formula():
    setting = Setting(batch=32, tokens=128)
    projections, products = 4 * 128 * 768 * 768, 2 * 128 * 128 * 768
    assert setting.flops() == 32 * (projections + products)
    assert [round(setting.flops(size) / setting.flops(), 2) for size in (64, 128, 256)] == [0.58, 0.66, 0.81]
    cost = layer_cost(num_heads=12, head_dim=64, query_width=768, shared_dim=256, dims_per_head=64)
    values = 2 * 128 * 768 * 768 + 128 * 128 * 768
    assert setting.flops(256, 64) == 32 * (cost.flops + values)
    assert Setting(batch=32, tokens=128, step="training").flops() == 3 * setting.flops()
    decode = Setting(batch=1, tokens=4096, step="decode")
    assert decode.flops() == 2 * 4096 * 768
    assert decode.flops(64) == 4096 * 12 * 64 + 12 * 64 + 12 * 4096 + 4096 * 768


def test_the_cache_of_a_decoding_step_is_counted():
    setting = Setting(step="decode", **SMALL)
    rows = list(sweep(setting, [(8, None)]))
    assert rows[0].cache_bytes == 2 * 9 * (24 + 24) * 4
    assert rows[-1].cache_bytes == 2 * 9 * (8 + 3 + 24) * 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"width": 25}, "width must be divisible by num_heads, got 25 and 3"),
        ({"step": "both"}, "step must be one of inference, training, decode, got 'both'"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Setting(**(SMALL | wrong))


# Records.


def test_figures_of_different_runs_are_not_mixed_and_the_faster_of_one_counts():
    setting = Setting(**SMALL)
    rows = list(sweep(setting, [(8, None)], implementations=["auto", "reference"]))
    old = [row.to_record("attention", run="1") for row in rows]
    new = [row.to_record("attention", run="2") for row in rows]
    own = [record for record in new if record.config["asked"] == "auto"]
    compiled = [
        collab.records.RunRecord(
            name=record.name, config=record.config | {"compiled": True},
            metrics=record.metrics | {"ratio": 1e-3}, provenance=record.provenance,
        )
        for record in own
    ]  # fmt: skip
    found = latest([*old, *new, *compiled])
    assert {record.config["run"] for record in found} == {"2"}
    assert best(found, "collaborative", "auto") == compiled
    assert [size_of(record) for record in best(found, "collaborative")] == [(8, 0)]
    assert [(name, len(figures)) for name, figures in series(found)] == [("auto", 1), ("reference", 1)]
