"""Decoding in Triton gives what the definition gives: any sizes, masks and layouts, and the same generated tokens.

On a CUDA device where there is one, otherwise in Triton's interpreter.
"""

import pytest
import torch

import tiny_models
from collab import CollaborativeConfig, collaborate_, ops
from collab.ops import reference

fused_decode = pytest.importorskip("collab.ops.fused_decode", reason="needs Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not fused_decode.INTERPRETED:
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

pytestmark = pytest.mark.gpu
needs_device = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")

SCALE = 0.3
SMALL = fused_decode.Config(block_keys=16, block_dims=16, stages=2, programs=1, registers=None)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def inputs(
    batch=2, queries=1, tokens=37, heads=4, shared_dim=24, value_dim=16, content=True, own=None, dtype=torch.float32
):
    """Query, key, value, mixing and dims."""
    width = shared_dim + heads * content
    dims = None
    if own is not None:
        generator = torch.Generator().manual_seed(5)
        dims = torch.stack([torch.randperm(shared_dim, generator=generator)[:own] for _ in range(heads)])
        dims = dims.to(DEVICE, ops.DIMS_DTYPE)
    return (
        random(batch, queries, shared_dim, dtype=dtype),
        random(batch, tokens, width, seed=1, dtype=dtype),
        random(batch, heads, tokens, value_dim, seed=2, dtype=dtype),
        random(heads, own or shared_dim, seed=3, dtype=dtype),
        dims,
    )


def exact(query, key, value, mixing, dims=None, mask=None, scale=SCALE):
    """In double precision."""
    wide = [part.double() for part in (query, key, value, mixing)]
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return reference.attention(*wide, scale=scale, dims=dims, mask=mask)[0]


def check(query, key, value, mixing, dims=None, mask=None, scale=SCALE, config=None):
    """The error is at most twice that of the definition in the same precision."""
    assert fused_decode.why_not(query, key, value, mixing, dims=dims, mask=mask) == []
    if config is None:
        output = fused_decode.decode(query, key, value, mixing, scale=scale, dims=dims, mask=mask)
    else:
        output = fused_decode.launch(query, key, value, mixing, dims, mask, scale, config).transpose(1, 2)
    expected = exact(query, key, value, mixing, dims, mask, scale)
    plain = reference.attention(query, key, value, mixing, scale=scale, dims=dims, mask=mask)[0]
    assert output.dtype == query.dtype
    assert output.shape == expected.shape
    assert output.isfinite().all()
    error, own_error = (float((found.double() - expected).abs().max()) for found in (output, plain))
    assert error <= 2 * own_error + 1e-6, f"error {error:.2g}, that of the definition {own_error:.2g}"
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"content": False},
        {"tokens": 1},
        {"tokens": 123, "heads": 5, "shared_dim": 77, "value_dim": 24},
        {"tokens": 50, "heads": 19, "shared_dim": 10, "value_dim": 8},
        {"own": 7},
        {"own": 40, "shared_dim": 150, "content": False},
        {"queries": 3},
    ],
    ids=str,
)
def test_as_exact_as_the_definition(sizes, dtype):
    check(*inputs(**sizes, dtype=dtype))
    check(*inputs(**sizes, dtype=dtype), config=SMALL)  # many pieces of keys and dimensions


@pytest.mark.parametrize("programs", [1, 4, 100])
def test_however_the_cache_is_split(programs):
    config = fused_decode.Config(block_keys=16, block_dims=32, stages=2, programs=programs, registers=None)
    check(*inputs(tokens=90), config=config)


LARGE = {"batch": 3, "tokens": 1500, "heads": 12, "value_dim": 64, "dtype": torch.bfloat16}


@needs_device
@pytest.mark.parametrize("config", fused_decode.CONFIGS, ids=str)
def test_every_configuration_on_long_caches(config):
    check(*inputs(**LARGE, shared_dim=128), config=config)
    check(*inputs(**LARGE, shared_dim=128), mask=padding(3, 1500), config=config)


def test_what_was_not_measured_keeps_its_configuration():
    query, _, value, _, _ = inputs(shared_dim=64, value_dim=64, dtype=torch.bfloat16)
    wide = inputs(shared_dim=128, value_dim=64, dtype=torch.bfloat16)[0]
    wider = inputs(shared_dim=144, value_dim=64, dtype=torch.bfloat16)[0]
    usual = fused_decode.CONFIGS[0]
    assert fused_decode.config_for(query, value) == fused_decode.BY_WIDTH[64]
    assert fused_decode.config_for(wide, value) == fused_decode.BY_WIDTH[128]
    assert fused_decode.config_for(wider, value) == usual
    assert fused_decode.config_for(query, value, padding(2, 37)) == usual
    assert fused_decode.config_for(query.repeat(1, 2, 1), value).registers is None
    assert fused_decode.config_for(query.float(), value.float()).block_keys == 16


@needs_device
@pytest.mark.parametrize("shared_dim", [32, 64, 128, 192, 768])
def test_every_shared_size_on_long_caches(shared_dim):
    check(*inputs(**LARGE, shared_dim=shared_dim))


@needs_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("queries", "value_dim"), [(1, 16), (1, 32), (1, 80), (1, 128), (2, 64), (5, 128), (8, 64), (8, 128)]
)
def test_every_width_of_values(queries, value_dim, dtype):
    check(*inputs(batch=3, tokens=700, heads=20, shared_dim=96, value_dim=value_dim, queries=queries, dtype=dtype))


def padding(batch, tokens, visible=1):
    """(batch, 1, 1, token): each sequence shorter than the one before, the last of `visible` tokens."""
    lengths = torch.linspace(tokens, visible, batch, device=DEVICE).long()
    return torch.arange(tokens, device=DEVICE) < lengths[:, None, None, None]


@pytest.mark.parametrize("config", [None, SMALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kind", ["padding", "left", "expanded", "per-head", "additive", "additive-per-head", "2d"])
def test_masks(kind, queries, dtype, config):
    tensors = inputs(batch=3, queries=queries, tokens=45, dtype=dtype)
    shape = (3, 4, queries, 45)
    masks = {
        "padding": padding(3, 45),
        "left": padding(3, 45).flip(-1),
        "expanded": padding(3, 45).expand(shape),
        "per-head": random(*shape, seed=7) > 0,
        "additive": random(3, 1, queries, 45, seed=7, dtype=dtype).masked_fill(~padding(3, 45), -torch.inf),
        "additive-per-head": random(1, 4, 1, 45, seed=7, dtype=dtype),
        "2d": random(queries, 45, seed=7, dtype=dtype),
    }
    check(*tensors, mask=masks[kind], config=config)


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("tokens", [9, 70])
def test_rows_with_nothing_to_attend_to_are_zero(tokens, additive):
    query, key, value, mixing, _ = inputs(batch=3, tokens=tokens)
    mask = padding(3, tokens, visible=0)
    if additive:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    output = check(query, key, value, mixing, mask=mask)
    assert output[2].abs().max() == 0
    assert output[0].abs().max() > 0
    # one head alone
    mask = torch.ones(1, 4, 1, tokens, dtype=torch.bool, device=DEVICE)
    mask[:, 1] = False
    output = check(query, key, value, mixing, mask=mask)
    assert output[:, 1].abs().max() == 0


def test_the_lowest_number_as_a_mask_is_no_infinity():
    query, key, value, mixing, _ = inputs(tokens=40)
    mask = torch.full((2, 1, 1, 40), torch.finfo(query.dtype).min, device=DEVICE)
    output = fused_decode.decode(query, key, value, mixing, scale=SCALE, mask=mask)
    torch.testing.assert_close(output, value.mean(dim=2, keepdim=True), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_logits(dtype):
    query, key, value, mixing, _ = inputs(tokens=60, dtype=dtype)
    # scores of some millions: nearly all weight on one token, whichever the precision says
    output = fused_decode.decode(query * 1000, key * 1000, value, mixing, scale=SCALE)
    assert output.isfinite().all()
    assert (output.abs() <= value.abs().amax(dim=2, keepdim=True) * 1.01).all()


def test_what_masked_tokens_hold_is_not_read():
    query, key, value, mixing, _ = inputs(tokens=45)
    mask = padding(2, 45)
    expected = fused_decode.decode(query, key, value, mixing, scale=SCALE, mask=mask)
    hidden = ~mask[:, 0, 0]
    key[hidden], value.transpose(1, 2)[hidden] = torch.nan, torch.nan
    assert torch.equal(fused_decode.decode(query, key, value, mixing, scale=SCALE, mask=mask), expected)


@pytest.mark.parametrize("config", [None, SMALL])
def test_views_are_read_as_they_lie(config):
    query, key, value, mixing, _ = inputs(tokens=40)
    longer = torch.full((2, 50, 35), torch.nan, device=DEVICE)  # rows that start at odd places
    longer[:, 3:43, 5:33] = key
    by_token = torch.full((2, 44, 4, 16), torch.nan, device=DEVICE)
    by_token[:, :40] = value.transpose(1, 2)
    wide_query = torch.cat((query, query), dim=-1)
    wide_mixing = torch.cat((mixing, mixing), dim=-1)
    output = check(
        wide_query[..., :24], longer[:, 3:43, 5:33], by_token[:, :40].transpose(1, 2), wide_mixing[:, 24:],
        config=config,
    )  # fmt: skip
    torch.testing.assert_close(output, check(query, key, value, mixing, config=config), atol=1e-6, rtol=0)


def test_the_output_is_ready_to_be_joined():
    output = fused_decode.decode(*inputs()[:4], scale=SCALE)
    assert output.transpose(1, 2).is_contiguous()


def test_mixing_may_be_of_another_precision_and_transposed():
    query, key, value, mixing, _ = inputs(dtype=torch.bfloat16)
    output = fused_decode.decode(query, key, value, mixing.float().T.contiguous().T, scale=SCALE)
    assert torch.equal(output, fused_decode.decode(query, key, value, mixing, scale=SCALE))


REFUSED = {
    "1 to 8 queries": {"queries": 9},
    "at most 128 dimensions": {"value_dim": 130},
    "all the same": {"dtype": torch.float64},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_sizes_that_are_refused(reason):
    (found,) = fused_decode.why_not(*inputs(**REFUSED[reason])[:4])
    assert reason in found


def test_arguments_that_are_refused():
    query, key, value, mixing, _ = inputs()
    options = {"causal": True, "dropout": 0.1, "need_weights": True}
    reasons = fused_decode.why_not(query, key, value, mixing, **options)
    assert len(reasons) == 3
    assert all(word in reason for word, reason in zip(("causal", "dropout", "weights"), reasons, strict=True))
    (reason,) = fused_decode.why_not(query, key, value.transpose(-1, -2).contiguous().transpose(-1, -2), mixing)
    assert "contiguous" in reason
    (reason,) = fused_decode.why_not(query, key, value, mixing.requires_grad_())
    assert "gradients" in reason
    with torch.no_grad():
        assert not fused_decode.why_not(query, key, value, mixing)


def test_the_operator_is_registered_as_torch_wants_it():
    query, key, value, mixing, dims = inputs(own=7)
    operator = torch.ops.collab.decode
    torch.library.opcheck(operator, (query, key, value, mixing, dims, padding(2, 37), SCALE))


def test_compiles_into_one_graph():
    def attend(query, key, value, mixing):
        return fused_decode.decode(query, key, value, mixing, scale=SCALE).transpose(1, 2).flatten(-2)

    tensors = inputs()[:4]
    backend = "inductor" if DEVICE == "cuda" else "eager"
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*tensors), attend(*tensors))


@needs_device
def test_replays_as_a_cuda_graph():
    tensors = inputs(batch=4, tokens=900, heads=12, shared_dim=128, value_dim=64, dtype=torch.bfloat16)[:4]
    before = fused_decode.decode(*tensors, scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = fused_decode.decode(*tensors, scale=SCALE)
    graph.replay()
    assert torch.equal(output, before)
    tensors[0].neg_()
    graph.replay()
    assert torch.equal(output, fused_decode.decode(*tensors, scale=SCALE))
    assert not torch.equal(output, before)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("dims_per_head", [None, 6])
def test_generation_gives_the_same_tokens(monkeypatch, cache, dims_per_head):
    model = tiny_models.gpt2("sdpa", tie_word_embeddings=False)
    with torch.no_grad():  # otherwise constant biases decide what comes next, whatever attention does
        for name, parameter in model.named_parameters():
            parameter.mul_(0.1 if name.endswith("ln_f.bias") else 4 if "wte" in name or "wpe" in name else 1)
    collaborate_(model, CollaborativeConfig(shared_dim=10, dims_per_head=dims_per_head, max_iterations=3))
    model = model.to(DEVICE)
    mask = tiny_models.padding_mask().flip(1).to(DEVICE)
    tokens = tiny_models.token_ids().to(DEVICE).masked_fill(mask == 0, 1)
    options = {
        "max_new_tokens": 4,
        "do_sample": False,
        "pad_token_id": 1,
        "eos_token_id": None,
        "disable_compile": True,
    }
    if cache == "static":
        options["cache_implementation"] = "static"

    def generate(attention):
        monkeypatch.setattr(ops, "attention", attention)
        done = model.generate(tokens, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options)
        return done.sequences, torch.stack(done.logits)

    decoded = []

    def by_kernel(query, key, value, mixing, *, scale, dims, mask, **others):
        if fused_decode.why_not(query, key, value, mixing, dims=dims, mask=mask, **others):
            return reference.attention(query, key, value, mixing, scale=scale, dims=dims, mask=mask, **others)
        decoded.append(key.shape[1])
        return fused_decode.decode(query, key, value, mixing, scale=scale, dims=dims, mask=mask), None

    expected, expected_logits = generate(reference.attention)
    found, logits = generate(by_kernel)
    assert expected[:, tokens.shape[1] :].unique().numel() > 2
    assert torch.equal(found, expected)
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)
    # Masked, a short prompt is a few queries and goes through the kernel, too.
    length = tokens.shape[1]
    assert set(decoded) == ({length + 3} if cache == "static" else {length, length + 1, length + 2, length + 3})
    assert len(decoded) == 4 * model.config.n_layer
