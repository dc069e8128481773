"""timm's attention classes, alone and in their models, keep computing what they did."""

import copy
import dataclasses
import pickle
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import collab
from collab.hosts import host_of
from tiny_models import randomise_

timm = pytest.importorskip("timm")
from timm.layers import Attention, AttentionPoolLatent, AttentionRope, RelPosBias, RelPosMlp  # noqa: E402
from timm.models import (  # noqa: E402
    beit,
    cait,
    crossvit,
    davit,
    maxxvit,
    metaformer,
    pvt_v2,
    swin_transformer,
    tnt,
    twins,
    vision_transformer_relpos,
    volo,
)

WIDTH, HEADS = 32, 4
generator = torch.Generator().manual_seed(1)
TOKENS = torch.randn(4, 5, WIDTH, generator=generator)
FINE = torch.randn(4, 16, WIDTH, generator=generator)
GRID = torch.randn(4, 2, 2, WIDTH, generator=generator)
ALLOWED = torch.rand(4, HEADS, 5, 5, generator=generator) > 0.5
ALLOWED |= torch.eye(5, dtype=torch.bool)
ADDED = torch.randn(4, HEADS, 5, 5, generator=generator)


class Case(NamedTuple):
    cls: Any
    options: dict[str, Any]
    x: Tensor = TOKENS
    given: dict[str, Any] = {}  # noqa: RUF012


HEADED = {"dim": WIDTH, "num_heads": HEADS}
BIASED = HEADED | {"qkv_bias": True}
CASES = {
    "plain": Case(Attention, BIASED),
    "no bias": Case(Attention, HEADED),
    "head size": Case(Attention, BIASED | {"attn_head_dim": 6, "dim_out": 20}),
    "norm and gate": Case(Attention, BIASED | {"gated": True, "scale_norm": True, "norm_layer": nn.LayerNorm}),
    "boolean mask": Case(Attention, BIASED, given={"attn_mask": ALLOWED}),
    "added mask": Case(Attention, BIASED, given={"attn_mask": ADDED[0, 0]}),
    "causal": Case(Attention, BIASED, given={"is_causal": True}),
    "relative bias": Case(
        vision_transformer_relpos.RelPosAttention,
        BIASED | {"rel_pos_cls": partial(RelPosBias, window_size=(2, 2), prefix_tokens=1)},
    ),
    "relative bias, shared": Case(
        vision_transformer_relpos.RelPosAttention, BIASED, given={"shared_rel_pos": ADDED[:1]}
    ),
    "BEiT": Case(beit.Attention, BIASED | {"window_size": (2, 2)}),
    "BEiT, added biases": Case(
        beit.Attention,
        BIASED | {"window_size": (2, 2), "qkv_bias_separate": True},
        given={"shared_rel_pos_bias": ADDED[:1]},
    ),
    "BEiT, no bias": Case(beit.Attention, HEADED, given={"shared_rel_pos_bias": ADDED[:1]}),
    "Swin": Case(swin_transformer.WindowAttention, BIASED | {"window_size": 2}, TOKENS[:, 1:]),
    "Swin, shifted": Case(
        swin_transformer.WindowAttention,
        BIASED | {"window_size": 2, "head_dim": 6},
        TOKENS[:, 1:],
        {"mask": ADDED[:2, 0, 1:, 1:]},
    ),
    "MaxViT": Case(
        maxxvit.AttentionCl,
        {"dim": WIDTH, "dim_head": 8, "rel_pos_cls": partial(RelPosMlp, window_size=(2, 2))},
        GRID,
    ),
    "MaxViT, heads last": Case(maxxvit.AttentionCl, {"dim": WIDTH, "dim_head": 8, "head_first": False}, GRID),
    "CaFormer": Case(metaformer.Attention, {"dim": WIDTH, "head_dim": 8, "qkv_bias": True}),
    "VOLO": Case(volo.Attention, BIASED, GRID),
    "VOLO, class": Case(volo.ClassAttention, BIASED),
    "DaViT": Case(davit.WindowAttention, BIASED | {"window_size": (2, 2)}, TOKENS[:, 1:]),
    "TNT": Case(tnt.Attention, BIASED | {"hidden_dim": 24}),
    "CaiT, class": Case(cait.ClassAttn, BIASED),
    "CrossViT": Case(crossvit.CrossAttention, BIASED),
    "PVTv2": Case(pvt_v2.Attention, BIASED | {"sr_ratio": 2}, FINE, {"feat_size": (2, 8)}),
    "PVTv2, whole": Case(pvt_v2.Attention, BIASED, FINE, {"feat_size": (2, 8)}),
    "PVTv2, linear": Case(pvt_v2.Attention, BIASED | {"linear_attn": True}, FINE, {"feat_size": (2, 8)}),
    "Twins": Case(twins.GlobalSubSampleAttn, HEADED | {"sr_ratio": 2}, FINE, {"size": (2, 8)}),
    "pooling": Case(
        AttentionPoolLatent,
        {"in_features": WIDTH, "num_heads": HEADS, "norm_layer": nn.LayerNorm},
        given={"attn_mask": ADDED[:, :1, :1]},
    ),
    "pooling, averaged": Case(
        AttentionPoolLatent,
        {"in_features": WIDTH, "num_heads": HEADS, "latent_len": 3, "latent_dim": 20, "pool_type": "avg"}
        | {"pos_embed": "abs", "feat_size": 5, "out_features": 0},
    ),
}


def build(case: Case, fused: bool = True) -> Any:
    module = randomise_(case.cls(**case.options)).eval()
    if hasattr(module, "fused_attn"):
        module.fused_attn = fused
    return module


def swapped(model: nn.Module, shared_dim: float = 1.0) -> Any:
    model = copy.deepcopy(model)
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=shared_dim))
    return model


def error(given: Tensor, expected: Tensor) -> float:
    assert given.shape == expected.shape
    return (given - expected).abs().max().item()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_exact_at_full_size(name: str, fused: bool) -> None:
    case = CASES[name]
    original = build(case, fused)
    expected = original(case.x, **case.given)
    assert error(swapped(original)(case.x, **case.given), expected) < 1e-5
    assert error(swapped(original, 3)(case.x, **case.given), expected) > 1e-4


SMALL = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 5}
MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {},
    "deit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "deit3_small_patch16_224": {},
    "vit_base_patch16_siglip_224": {},
    "vit_relpos_small_patch16_224": {},
    "beit_base_patch16_224": {},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)},
}


def model(name: str) -> Any:
    options = MODELS[name] | {"num_classes": 5} if MODELS[name] else SMALL
    return randomise_(timm.create_model(name, pretrained=False, **options)).eval()


def images(name: str) -> Tensor:
    size = MODELS[name].get("img_size", 32)
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_models_are_exact_at_full_size(name: str) -> None:
    original, x = model(name), images(name)
    assert all(not site.why_not for site in collab.find_attention(original))
    expected = original(x)
    assert error(swapped(original)(x), expected) < 1e-5
    assert error(swapped(original, 7)(x), expected) > 1e-4
    low = original.bfloat16()
    own, output = (low_model(x.bfloat16()).float() for low_model in (low, swapped(low)))
    assert 0 < error(output, expected) <= 2 * error(own, expected) + 1e-2


@pytest.mark.parametrize("fused", [True, False])
def test_dropout_only_while_training(fused: bool) -> None:
    module = swapped(build(Case(Attention, BIASED | {"attn_drop": 0.5}), fused))
    assert torch.equal(module(TOKENS), module(TOKENS))
    module.train()
    assert error(module(TOKENS), module(TOKENS)) > 1e-3
    module.attn_drop.p = 0.0
    assert torch.equal(module(TOKENS), module(TOKENS))
    module.proj_drop.p = 1.0
    assert not module(TOKENS).any()


@torch.no_grad()
def test_weights_pass_through_attn_drop_where_users_look_at_them() -> None:
    original = build(CASES["plain"], fused=False)
    seen = []
    for module in (original, swapped(original)):
        module.attn_drop.register_forward_hook(lambda module, args, output: seen.append(output))
        module(TOKENS)
    assert error(seen[1], seen[0]) < 1e-5


def test_training_reaches_every_parameter() -> None:
    converted = swapped(build(CASES["BEiT"]), 7).train()
    optimiser = torch.optim.SGD(converted.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        loss = (converted(TOKENS) - 1).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    assert {name for name, _ in converted.named_parameters()} == {
        "qkv.weight", "v_bias", "relative_position_bias_table", "proj.weight", "proj.bias", "mixing",
    }  # fmt: skip
    assert all(parameter.grad.abs().max() > 0 for parameter in converted.parameters())


@pytest.mark.parametrize("name", ["plain", "BEiT", "MaxViT, heads last"])
def test_copies_agree(name: str) -> None:
    case = CASES[name]
    original = build(case)
    converted = swapped(original, 7)
    expected = converted(case.x)
    other = swapped(randomise_(build(case), seed=9), 7)
    other.load_state_dict(converted.state_dict())
    for twin in (other, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert type(twin) is type(converted)
        assert torch.equal(twin(case.x), expected)
    with pytest.raises(RuntimeError, match="qkv"):
        original.load_state_dict(swapped(original).state_dict())


@torch.no_grad()
def test_compiles_whole() -> None:
    converted = swapped(model("vit_tiny_patch16_224"))
    compiled = torch.compile(converted, fullgraph=True, backend="eager")  # tracing is what could break
    x = images("vit_tiny_patch16_224")
    assert error(compiled(x), converted(x)) < 1e-5


def test_refusals() -> None:
    normed = BIASED | {"qk_norm": True, "norm_layer": nn.LayerNorm}
    refused = {
        "q_norm": Attention(**normed),
        "rotary": AttentionRope(**BIASED),
        "not a plain linear": AttentionPoolLatent(WIDTH, num_heads=HEADS, q_proj=False),
        "no host": cait.TalkingHeadAttn(**BIASED),
    }
    for reason, module in refused.items():
        (site,) = collab.find_attention(module)
        assert reason in " ".join(site.why_not)
    module = build(CASES["plain"])
    host: Any = host_of(module)
    assert "attn_mask" in dataclasses.replace(host, arguments=("x", "is_causal")).why_not(module)[0]


def test_wrong_arguments_are_named() -> None:
    module = swapped(build(CASES["plain"]))
    for arguments in ({"rope": TOKENS}, {"mask": None}):
        with pytest.raises(TypeError, match="takes x, attn_mask, is_causal"):
            module(TOKENS, **arguments)
    with pytest.raises(TypeError, match="got 4 arguments"):
        module(TOKENS, None, False, None)
