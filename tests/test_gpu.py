"""The same on a CUDA device: conversion, low precision, compiled decoding, and the decomposition's answer.

`make test-gpu` runs this file; elsewhere it is skipped.
"""

import copy

import pytest
import torch
from transformers import StaticCache

import tiny_models
from collab import CollaborativeAttention, CollaborativeConfig, collaborate_, decompose, find_attention, load, save
from collab.ops.reference import dense_mixing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MODELS = ("bert", "albert", "vit", "clip", "gpt2", "bart", "t5", "whisper")


@pytest.fixture(autouse=True)
def _full_precision():
    """Products in float32, not in tf32, so that differences of 1e-5 mean something."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_gpu(inputs):
    return {name: tensor.cuda() for name, tensor in inputs.items()}


@torch.no_grad()
def first_output(model, inputs):
    return model(**inputs)[0]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_exact_at_full_size(name, attention):
    model = getattr(tiny_models, name)(attention).cuda()
    inputs = on_gpu(tiny_models.inputs_for(model))
    converted = copy.deepcopy(model)
    collaborate_(converted, CollaborativeConfig(shared_dim=1.0))
    assert all(parameter.is_cuda for parameter in converted.parameters())
    expected = first_output(model, inputs)
    mask = inputs.get("attention_mask")
    valid = mask.bool() if mask is not None and mask.shape == expected.shape[:2] else ...
    difference = (first_output(converted, inputs) - expected)[valid]
    assert difference.abs().max() <= 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_low_precision_is_no_worse_than_the_original(name, dtype):
    model = getattr(tiny_models, name)("sdpa").cuda()
    inputs = on_gpu(tiny_models.inputs_for(model))
    exact = first_output(model, inputs)
    low = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    original = copy.deepcopy(model).to(dtype)
    converted = copy.deepcopy(original)
    collaborate_(converted, CollaborativeConfig(shared_dim=1.0))
    mask = inputs.get("attention_mask")
    valid = mask.bool() if mask is not None and mask.shape == exact.shape[:2] else ...
    own_error = (first_output(original, low).float() - exact)[valid].abs().max()
    error = (first_output(converted, low).float() - exact)[valid].abs().max()
    assert error <= 2 * own_error + 1e-2 * exact[valid].abs().max()


def test_decomposition_gives_the_same_answer_as_on_the_cpu():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(4, 8, 40, generator=generator) for _ in range(2))
    on_cpu = decompose(query, key, 12)
    answer = decompose(query.cuda(), key.cuda(), 12)
    assert answer.query.is_cuda
    assert answer.relative_error == pytest.approx(on_cpu.relative_error, rel=1e-3)


@pytest.mark.parametrize("dims_per_head", [None, 7])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_layer(mode, dims_per_head):
    torch.manual_seed(0)
    layer = CollaborativeAttention(64, 4, 24, dims_per_head=dims_per_head, device="cuda").eval()
    inputs = torch.randn(2, 16, 64, device="cuda")
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    with torch.no_grad():
        torch.testing.assert_close(compiled(inputs, causal=True), layer(inputs, causal=True), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_mixing_is_the_dense_layer_of_the_same_mixing(dtype):
    torch.manual_seed(0)
    sparse = CollaborativeAttention(64, 4, 24, dims_per_head=7, mixing="normal", device="cuda", dtype=dtype).eval()
    dense = CollaborativeAttention(64, 4, 24, device="cuda", dtype=dtype).eval()
    state = sparse.state_dict()
    state["mixing"] = dense_mixing(state["mixing"], state.pop("mixing_dims"), 24)
    dense.load_state_dict(state)
    inputs = torch.randn(2, 16, 64, device="cuda", dtype=dtype)
    padding = torch.arange(16, device="cuda") < torch.tensor([16, 9], device="cuda")[:, None]
    exact = dense.double()(inputs.double(), padding_mask=padding)
    own_error = (dense.to(dtype)(inputs, padding_mask=padding).double() - exact).abs().max()
    assert (sparse(inputs, padding_mask=padding).double() - exact).abs().max() <= 2 * own_error + 1e-6


@pytest.mark.parametrize("dims_per_head", [None, 7])
def test_training_step_under_autocast(dims_per_head):
    torch.manual_seed(0)
    layer = CollaborativeAttention(64, 4, 24, dims_per_head=dims_per_head, dropout=0.1, mixing="normal", device="cuda")
    inputs = torch.randn(2, 16, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = layer(inputs, causal=True).float().square().mean()
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("shared_dim", [1.0, 12])
def test_static_cache_generates_as_without_cache(shared_dim):
    model = tiny_models.tiny("GPT2LMHeadModel", "sdpa").cuda()
    collaborate_(model, CollaborativeConfig(shared_dim=shared_dim))
    tokens = tiny_models.token_ids().cuda()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}
    plain = model.generate(tokens, use_cache=False, **options)
    cache = StaticCache(config=model.config, max_cache_len=tokens.shape[1] + 6)
    assert torch.equal(model.generate(tokens, past_key_values=cache, **options), plain)


def test_save_and_load_on_the_device(tmp_path):
    model = tiny_models.bert("sdpa").cuda()
    collaborate_(model, CollaborativeConfig(shared_dim=10))
    save(model, tmp_path / "model")
    again = load(tmp_path / "model", device="cuda")
    inputs = on_gpu(tiny_models.inputs_for(model))
    assert torch.equal(first_output(again, inputs), first_output(model, inputs))
    assert all(site.module.mixing.is_cuda for site in find_attention(again))
