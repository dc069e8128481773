"""torch.nn.MultiheadAttention, alone and inside torch's own transformers, keeps computing what it did."""

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import collab
from tiny_models import randomise_

pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True", "ignore:Support for mismatched", "ignore:The PyTorch API of nested tensors"
)

FULL = collab.CollaborativeConfig(shared_dim=1.0)
BATCH, QUERIES, KEYS, HEADS = 3, 5, 7, 4
WIDTH = 32

FORMS: dict[str, dict[str, Any]] = {
    "fused": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "separate": {"kdim": 24, "vdim": 20},
    "separate, batch first": {"kdim": 24, "vdim": 20, "batch_first": True},
    "separate, no bias": {"vdim": 20, "bias": False},
}

# Key 0 is never masked, so that no row is empty.
PADDING = torch.arange(KEYS) >= torch.tensor([7, 5, 2])[:, None]
MASKED = torch.rand(BATCH * HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) > 0.5
MASKED[..., 0] = False
ADDED = torch.randn(BATCH * HEADS, QUERIES, KEYS, generator=torch.Generator().manual_seed(2))
CAUSAL = torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1)

MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "padding added": {"key_padding_mask": PADDING * -3.0},
    "masked": {"attn_mask": MASKED[0]},
    "masked per head": {"attn_mask": MASKED},
    "added": {"attn_mask": ADDED[0]},
    "added per head": {"attn_mask": ADDED, "key_padding_mask": PADDING * -3.0},
    "both boolean": {"attn_mask": MASKED, "key_padding_mask": PADDING},
    "boolean and added": {"attn_mask": ADDED, "key_padding_mask": PADDING},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "causal, added, padded": {
        "attn_mask": torch.zeros(QUERIES, KEYS).masked_fill(CAUSAL, -torch.inf),
        "key_padding_mask": PADDING,
        "is_causal": True,
    },
}
WEIGHTS: list[dict[str, Any]] = [{"need_weights": False}, {}, {"average_attn_weights": False}]


class Inheriting(nn.MultiheadAttention):
    """A user's class that adds nothing to forward."""


def attention(cls: type[nn.MultiheadAttention] = nn.MultiheadAttention, **form: Any) -> Any:
    return randomise_(cls(WIDTH, HEADS, **form)).eval()


def inputs(module: Any, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((QUERIES, module.embed_dim), (KEYS, module.kdim), (KEYS, module.vdim))
    made = [torch.randn(BATCH, *size, generator=generator).to(dtype) for size in sizes]
    return made if module.batch_first else [part.transpose(0, 1) for part in made]


def swapped(model: nn.Module, config: collab.CollaborativeConfig = FULL, **options: Any) -> Any:
    model = copy.deepcopy(model)
    collab.collaborate_(model, config, **options)
    return model


def error(given: Tensor, expected: Tensor) -> float:
    assert given.shape == expected.shape
    return (given - expected).abs().max().item()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_exact_at_full_size(form: str, mask: str) -> None:
    original = attention(**FORMS[form])
    converted = swapped(original)
    parts = inputs(original)
    for options in WEIGHTS:
        expected, expected_weights = original(*parts, **MASKS[mask], **options)
        output, weights = converted(*parts, **MASKS[mask], **options)
        assert error(output, expected) < 1e-5
        assert output.is_contiguous()
        if expected_weights is None:
            assert weights is None
        else:
            assert error(weights, expected_weights) < 1e-5


@pytest.mark.parametrize("form", ["fused", "separate, batch first"])
@pytest.mark.parametrize("options", WEIGHTS)
@torch.no_grad()
def test_without_a_batch(form: str, options: dict[str, Any]) -> None:
    original = attention(**FORMS[form])
    parts = [part[1] if original.batch_first else part[:, 1] for part in inputs(original)]
    masks = {"key_padding_mask": PADDING[1], "attn_mask": MASKED[:HEADS]}
    expected = original(*parts, **masks, **options)
    for given, wanted in zip(swapped(original)(*parts, **masks, **options), expected, strict=True):
        assert (given is None and wanted is None) or error(given, wanted) < 1e-5


@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_bfloat16(autocast: bool) -> None:
    original = attention()
    exact, _ = original(*inputs(original), attn_mask=ADDED)
    dtype = torch.float32 if autocast else torch.bfloat16
    low = copy.deepcopy(original).to(dtype)
    parts, mask = inputs(original, dtype), ADDED.to(dtype)
    for options in WEIGHTS:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            own = low(*parts, attn_mask=mask, **options)[0]
            output = swapped(low)(*parts, attn_mask=mask, **options)[0]
        assert output.dtype == own.dtype == torch.bfloat16
        assert 0 < error(output.float(), exact) <= 2 * error(own.float(), exact) + 1e-3


@torch.no_grad()
def test_a_sequence_of_padding_alone_attends_to_nothing() -> None:
    module = swapped(attention(batch_first=True))
    padding = PADDING.clone()
    padding[2] = True
    for options in WEIGHTS:
        output, _ = module(*inputs(module), key_padding_mask=padding, **options)
        assert error(output[2], module.out_proj.bias.expand(QUERIES, -1)) < 1e-6


def test_dropout_only_while_training() -> None:
    module = swapped(attention(dropout=0.5))
    parts = inputs(module)
    _, kept = module(*parts, average_attn_weights=False)
    _, dropped = module.train()(*parts, average_attn_weights=False)
    assert 0.2 < (dropped == 0).float().mean() < 0.8
    assert torch.allclose(dropped, torch.where(dropped == 0, 0.0, 2 * kept))
    assert not (kept == 0).any()
    first, second = (module(*parts, need_weights=False)[0] for _ in range(2))
    assert error(first, second) > 1e-3


def encoder(**options: Any) -> Any:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 40, dropout=0.0, batch_first=True, **options)
    return randomise_(nn.TransformerEncoder(layer, 3, enable_nested_tensor=not options.get("norm_first"))).eval()


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "grad": torch.enable_grad,
}


@pytest.mark.parametrize("layers", ["all", "0", "1", "2"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [False, True])
def test_encoder_never_goes_round_us(layers: str, mode: str, frozen: bool) -> None:
    """With padding, torch packs a nested tensor for kernels of its own, as the first layer's weights allow."""
    original = encoder().requires_grad_(not frozen)
    assert original.use_nested_tensor
    x = torch.randn(BATCH, KEYS, WIDTH, generator=torch.Generator().manual_seed(4))
    converted = swapped(original, only=lambda site: layers in ("all", site.path.split(".")[1]))
    with MODES[mode]():
        for options in ({}, {"src_key_padding_mask": PADDING}, {"mask": MASKED[0, :1].expand(KEYS, -1)}):
            expected, output = original(x, **options), converted(x, **options)
            assert error(output[~PADDING], expected[~PADDING]) < 1e-5
            broken = copy.deepcopy(converted)
            for module in broken.modules():
                if hasattr(module, "mixing"):
                    module.mixing.data.zero_()
            assert error(broken(x, **options)[~PADDING], output[~PADDING]) > 1e-2


@pytest.mark.parametrize("options", [{"norm_first": True}, {"bias": False}, {"activation": nn.functional.silu}])
@torch.no_grad()
def test_encoder_forms(options: dict[str, Any]) -> None:
    original = encoder(**options)
    x = torch.randn(BATCH, KEYS, WIDTH)
    expected, output = (model(x, src_key_padding_mask=PADDING) for model in (original, swapped(original)))
    assert error(output[~PADDING], expected[~PADDING]) < 1e-5


def test_a_converted_layer_in_a_new_encoder() -> None:
    layer = swapped(encoder().layers[0])
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim"):
        stack = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(BATCH, KEYS, WIDTH)
    expected = stack(x, src_key_padding_mask=PADDING)
    with torch.no_grad():
        assert error(stack(x, src_key_padding_mask=PADDING)[~PADDING], expected[~PADDING]) < 1e-6


@pytest.mark.parametrize("batch_first", [False, True])
@torch.no_grad()
def test_transformer(batch_first: bool) -> None:
    original = nn.Transformer(WIDTH, HEADS, 2, 2, 40, dropout=0.0, batch_first=batch_first)
    original = randomise_(original).eval()
    source, target = (torch.randn(BATCH, length, WIDTH) for length in (KEYS, QUERIES))
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(QUERIES),
        "src_key_padding_mask": PADDING,
        "memory_key_padding_mask": PADDING,
    }
    converted = swapped(original)
    assert error(converted(source, target, **masks), original(source, target, **masks)) < 1e-5
    kinds = {site.path: site.kind for site in collab.find_attention(original)}
    assert kinds["encoder.layers.0.self_attn"] == kinds["decoder.layers.1.self_attn"] == "self"
    assert kinds["decoder.layers.1.multihead_attn"] == "cross"
    assert len(kinds) == 6


@torch.no_grad()
def test_compiles_whole() -> None:
    converted = swapped(encoder())
    x = torch.randn(BATCH, KEYS, WIDTH)
    compiled = torch.compile(converted, fullgraph=True, backend="eager")  # tracing is what could break
    expected = converted(x, src_key_padding_mask=PADDING)
    assert error(compiled(x, src_key_padding_mask=PADDING), expected) < 1e-5


def test_sites_and_refusals() -> None:
    (site,) = collab.find_attention(attention(**FORMS["separate"]))
    assert (site.kind, site.num_heads, site.head_dim) == ("cross", HEADS, WIDTH // HEADS)
    assert (site.query_width, site.key_width, site.value_width) == (WIDTH, 24, 20)
    parametrised = attention()
    nn.utils.parametrize.register_parametrization(parametrised, "in_proj_weight", nn.Identity())
    refused = {
        "bias_k": attention(add_bias_kv=True),
        "add_zero_attn": attention(add_zero_attn=True),
        "in_proj_weight is parametrised": parametrised,
    }
    for reason, module in refused.items():
        (site,) = collab.find_attention(module)
        assert reason in site.why_not[0]
        with pytest.raises(collab.NoAttentionFound, match=reason):
            collab.collaborate_(module, FULL)


def test_quantisable_attention_of_the_same_name_is_not_ours() -> None:
    quantisable = torch.ao.nn.quantizable.MultiheadAttention(WIDTH, HEADS)
    assert all(site.why_not for site in collab.find_attention(quantisable))


@pytest.mark.parametrize("form", ["fused", "separate", "no bias"])
def test_what_is_left_of_the_parameters(form: str) -> None:
    original = attention(**FORMS[form])
    converted = swapped(original, collab.CollaborativeConfig(shared_dim=10))
    shapes = {name: tuple(values.shape) for name, values in converted.state_dict().items()}
    expected = {
        "q_proj_weight": (10, WIDTH),
        "k_proj_weight": (10 + HEADS, original.kdim),
        "v_proj_weight": (WIDTH, original.vdim),
        "mixing": (HEADS, 10),
        "out_proj.weight": (WIDTH, WIDTH),
    }
    if original.in_proj_bias is not None:
        expected |= {"in_proj_bias": (WIDTH,), "out_proj.bias": (WIDTH,)}
    assert shapes == expected
    with pytest.raises(RuntimeError, match="k_proj_weight"):
        original.load_state_dict(swapped(original).state_dict())
    with pytest.raises(TypeError, match="its weights are q_proj_weight"):
        nn.functional.linear(torch.randn(2, WIDTH), converted.in_proj_weight)
    with pytest.raises(AttributeError, match="its weights are q_proj_weight"):
        nn.init.xavier_uniform_(converted.in_proj_weight)


@pytest.mark.parametrize("cls", [nn.MultiheadAttention, Inheriting])
def test_copies_agree(cls: type[nn.MultiheadAttention]) -> None:
    converted = swapped(attention(cls), collab.CollaborativeConfig(shared_dim=10))
    parts = inputs(converted)
    expected, _ = converted(*parts)
    other = swapped(randomise_(attention(cls), seed=9), collab.CollaborativeConfig(shared_dim=10))
    assert error(other(*parts)[0], expected) > 1e-2
    other.load_state_dict(converted.state_dict())
    for twin in (other, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert isinstance(twin, cls)
        assert type(twin) is type(converted)
        assert torch.equal(twin(*parts)[0], expected)


def test_trainability_is_kept() -> None:
    module = attention(**FORMS["separate"])
    module.k_proj_weight.requires_grad_(False)
    module.in_proj_bias.requires_grad_(False)
    converted = swapped(module)
    frozen = {name for name, parameter in converted.named_parameters() if not parameter.requires_grad}
    assert frozen == {"k_proj_weight", "in_proj_bias"}


def test_training_moves_every_parameter_and_lowers_the_loss() -> None:
    model = swapped(encoder(), collab.CollaborativeConfig(shared_dim=10)).train()
    x, target = (torch.randn(BATCH, KEYS, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(3):
        loss = (model(x, src_key_padding_mask=PADDING) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": True}, "attn_mask must be given"),
        ({"attn_mask": MASKED[:HEADS]}, r"attn_mask must be \(5, 7\) or \(12, 5, 7\), got \(4, 5, 7\)"),
        ({"key_padding_mask": PADDING[:1]}, r"key_padding_mask must be \(3, 7\), got \(1, 7\)"),
        ({"attn_mask": MASKED.long()}, "boolean .True is masked. or floating point, got torch.int64"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], message: str) -> None:
    module = swapped(attention())
    with pytest.raises(ValueError, match=message):
        module(*inputs(module), **options)


def test_inputs_of_different_rank_are_named() -> None:
    module = swapped(attention())
    query, key, value = inputs(module)
    with pytest.raises(ValueError, match="must all be of 3 dimensions"):
        module(query[0], key, value)
