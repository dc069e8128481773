"""Decoders keep generating: same tokens and logits as the original, whatever the cache, and a lighter key cache."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, EncoderDecoderModel, QuantizedCache, StaticCache

import tiny_models
from collab import CollaborativeConfig, collaborate_, find_attention, ops
from collab.ops import reference

NEW_TOKENS = 5
TOLERANCE = 1e-5
START = 2
HEADS, HEAD_DIM, FULL = 4, 8, 32


def lively(model: Any) -> Any:
    """Without this, constant biases and a tied head make a random model repeat one token whatever attention does."""
    attention = {id(parameter) for site in find_attention(model) for parameter in site.module.parameters()}
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and id(parameter) not in attention:
            parameter.data.mul_(0.1)
        elif "embed" in name or "wte" in name or "wpe" in name:
            parameter.data.mul_(4)
    return model


def tiny(name: str, attention: str, **overrides: Any) -> Any:
    return lively(tiny_models.tiny(name, attention, tie_word_embeddings=False, **overrides))


def bert_to(name: str, attention: str, **overrides: Any) -> Any:
    decoder = tiny_models.tiny(name, attention, tie_word_embeddings=False, add_cross_attention=True, **overrides)
    model = EncoderDecoderModel(encoder=tiny_models.bert(attention), decoder=decoder)
    return lively(tiny_models.randomise_(model).eval())


MODELS = {
    "gpt2": lambda attention: tiny("GPT2LMHeadModel", attention),
    "opt": lambda attention: tiny("OPTForCausalLM", attention),
    "bert": lambda attention: tiny("BertLMHeadModel", attention, is_decoder=True),
    "bart": lambda attention: tiny("BartForConditionalGeneration", attention),
    "marian": lambda attention: tiny("MarianMTModel", attention),
    "mbart": lambda attention: tiny("MBartForConditionalGeneration", attention),
    "t5": lambda attention: tiny("T5ForConditionalGeneration", attention),
    "whisper": lambda attention: tiny("WhisperForConditionalGeneration", attention),
    "bert2gpt2": lambda attention: bert_to("GPT2LMHeadModel", attention),
    "bert2bert": lambda attention: bert_to("BertLMHeadModel", attention, is_decoder=True),
}


def prompt(model: Any) -> dict[str, Tensor]:
    """A padded batch: at the left for a decoder, at the right for an encoder."""
    if model.main_input_name == "input_features":
        return {"input_features": tiny_models.inputs_for(model)["input_features"]}
    mask = tiny_models.padding_mask()
    mask = mask if model.config.is_encoder_decoder else mask.flip(1)
    return {"input_ids": tiny_models.token_ids().masked_fill(mask == 0, 1), "attention_mask": mask}


def static_cache(model: Any) -> StaticCache | EncoderDecoderCache:
    length = tiny_models.LENGTH + NEW_TOKENS
    config = model.config.get_text_config(decoder=True)
    if not model.config.is_encoder_decoder:
        return StaticCache(config=config, max_cache_len=length)
    encoded = getattr(config, "max_source_positions", tiny_models.LENGTH)  # Whisper always reads that many
    return EncoderDecoderCache(
        StaticCache(config=config, max_cache_len=length), StaticCache(config=config, max_cache_len=encoded)
    )


MODES = {
    "greedy": lambda model: {},
    "beam": lambda model: {"num_beams": 3},
    "no-cache": lambda model: {"use_cache": False},
    "no-cache-beam": lambda model: {"use_cache": False, "num_beams": 2},
    "static": lambda model: {"cache_implementation": "static"},
    "explicit-static": lambda model: {"past_key_values": static_cache(model)},
}


def generate(model: Any, **options: Any) -> Any:
    if model.config.is_encoder_decoder:
        options["decoder_start_token_id"] = START
    return model.generate(
        **prompt(model),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def same_generation(one: Any, other: Any) -> None:
    assert one.sequences.tolist() == other.sequences.tolist()
    assert len(one.logits) == len(other.logits) == NEW_TOKENS
    torch.testing.assert_close(torch.stack(one.logits), torch.stack(other.logits), atol=TOLERANCE, rtol=0)


def converted(model: Any, shared_dim: int | float = 1.0) -> Any:
    model = copy.deepcopy(model)
    collaborate_(model, CollaborativeConfig(shared_dim=shared_dim, max_iterations=3))
    return model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_and_logits_at_full_size(name: str, attention: str) -> None:
    original = MODELS[name](attention)
    model = converted(original)
    assert all(site.why_not for site in find_attention(model))  # none is left as it was
    for mode in MODES.values():
        same_generation(generate(model, **mode(model)), generate(original, **mode(original)))


@pytest.mark.parametrize("name", MODELS)
def test_every_cache_gives_what_no_cache_gives_at_a_smaller_size(name: str) -> None:
    original = MODELS[name]("sdpa")
    model = converted(original, shared_dim=10)
    without = generate(model, use_cache=False)
    for mode in ("greedy", "static", "explicit-static"):
        same_generation(generate(model, **MODES[mode](model)), without)
    # or the cache would be tested with layers that lost nothing
    assert not torch.allclose(without.logits[0], generate(original, use_cache=False).logits[0], atol=1e-3)


def test_random_models_attend_and_do_not_repeat_themselves() -> None:
    """Otherwise the tests above would pass whatever attention did."""
    for name, build in MODELS.items():
        model = build("sdpa")
        tokens = generate(model).sequences[:, -NEW_TOKENS:]
        assert tokens.unique().numel() >= 3, name
        for site in find_attention(model):
            if site.kind == "self":
                next(site.module.parameters()).data.mul_(-1)  # of the query, the key, or both with the value
        assert generate(model).logits[-1].sub(generate(build("sdpa")).logits[-1]).abs().max() > 1e-2, name


def numbers_a_token(stored: Tensor, batch: int, tokens: int) -> float:
    return stored.nbytes / stored.element_size() / batch / tokens


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert"])
@pytest.mark.parametrize("shared_dim", [8, 10])
def test_the_key_cache_holds_the_shared_key_once(name: str, shared_dim: int) -> None:
    model = converted(MODELS[name]("sdpa"), shared_dim)
    inputs = {"input_ids": tiny_models.token_ids()}
    batch, tokens = inputs["input_ids"].shape
    dynamic = DynamicCache(config=model.config)
    model(**inputs, past_key_values=dynamic)
    static = StaticCache(config=model.config, max_cache_len=16)
    model(**inputs, past_key_values=static)
    assert len(dynamic.layers) == len(static.layers) == 2
    for layer in dynamic.layers:
        assert numbers_a_token(layer.keys, batch, tokens) == shared_dim + HEADS  # was HEADS * HEAD_DIM
        assert numbers_a_token(layer.values, batch, tokens) == HEADS * HEAD_DIM
    for layer in static.layers:
        rounded_up = -(-(shared_dim + HEADS) // HEADS) * HEADS
        assert numbers_a_token(layer.keys, batch, 16) == rounded_up
        assert numbers_a_token(layer.values, batch, 16) == HEADS * HEAD_DIM


@pytest.mark.parametrize("name", ["bart", "t5", "bert2gpt2", "bert2bert"])
def test_both_caches_of_an_encoder_decoder_hold_the_shared_key_once(name: str) -> None:
    cache = generate(converted(MODELS[name]("sdpa"), 10)).past_key_values
    assert isinstance(cache, EncoderDecoderCache)
    for layers, tokens in ((cache.self_attention_cache, NEW_TOKENS), (cache.cross_attention_cache, tiny_models.LENGTH)):
        assert len(layers.layers) == 2
        for layer in layers.layers:
            assert numbers_a_token(layer.keys, tiny_models.BATCH, tokens) == 10 + HEADS


@pytest.mark.parametrize("shared_dim", [FULL, 10])
def test_a_static_cache_made_ready_for_the_original(shared_dim: int) -> None:
    """Prefilling in chunks allocates the cache beforehand, from the heads the config speaks of."""
    model = converted(MODELS["gpt2"]("sdpa"), shared_dim)
    with_chunks = generate(model, cache_implementation="static", prefill_chunk_size=3)
    same_generation(with_chunks, generate(model, use_cache=False))
    assert with_chunks.past_key_values.layers[0].keys.shape[-1] == -(-(shared_dim + HEADS) // HEADS)


def test_prompt_lookup_which_crops_the_cache() -> None:
    original = MODELS["gpt2"]("sdpa")
    model = converted(original)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "prompt_lookup_num_tokens": 2}
    repeating = torch.tensor([[5, 9, 5, 9, 5]])
    assert torch.equal(model.generate(repeating, **options), original.generate(repeating, **options))


def test_an_eight_bit_cache_takes_the_shared_key_as_it_would_any_key() -> None:
    model = converted(MODELS["gpt2"]("sdpa"))
    try:
        cache = QuantizedCache("fp8", model.config)
    except ValueError as error:
        pytest.skip(f"this transformers has no such cache: {error}")
    generate(model, past_key_values=cache)


def test_a_decode_step_compiles_into_one_graph() -> None:
    original = MODELS["gpt2"]("sdpa")
    model = converted(original)

    def decode(model: Any, step: Any) -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=12)
        tokens = tiny_models.token_ids()
        model(input_ids=tokens, past_key_values=cache)
        logits = []
        for position in range(tiny_models.LENGTH, 10):
            places = torch.full((len(tokens), 1), position)
            mask = torch.ones(len(tokens), position + 1, dtype=torch.long)
            output = step(input_ids=tokens[:, :1], past_key_values=cache, position_ids=places, attention_mask=mask)
            logits.append(output.logits)
        return torch.cat(logits, dim=1)

    with torch.no_grad():
        # The graph is what could break here; what a compiler makes of it is not ours.
        compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
        torch.testing.assert_close(decode(model, compiled), decode(original, original), atol=TOLERANCE, rtol=0)


def test_an_encoder_compiles_into_one_graph() -> None:
    original = tiny_models.bert("sdpa")
    inputs = tiny_models.inputs_for(original)
    compiled = torch.compile(converted(original), fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs)[0], original(**inputs)[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_encoder_exports_with_any_batch_and_length(attention: str) -> None:
    model = converted(tiny_models.bert(attention), shared_dim=10)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=40)}
    inputs = tiny_models.inputs_for(model)
    program = torch.export.export(model, (), kwargs=inputs, dynamic_shapes=dict.fromkeys(inputs, sizes))
    other = {"input_ids": tiny_models.token_ids(11, 5), "attention_mask": tiny_models.padding_mask(11, 5)}
    torch.testing.assert_close(program.module()(**other)[0], model(**other)[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "bert2bert", "t5"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str, use_reentrant: bool) -> None:
    model = converted(MODELS[name]("sdpa"), shared_dim=10).train()
    inputs = prompt(model)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tiny_models.token_ids(seed=1)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        torch.manual_seed(0)  # dropout is on
        model(**inputs, use_cache=False).logits.square().mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    expected = gradients()
    assert any(name.endswith("mixing") for name in expected)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    found = gradients()
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        assert torch.allclose(found[parameter], gradient, atol=1e-6, rtol=1e-4), parameter


@pytest.mark.parametrize("kind", [StaticCache, DynamicCache])
def test_a_cache_filled_by_another_model_is_refused(kind):
    model = tiny("GPT2LMHeadModel", "sdpa")
    converted = copy.deepcopy(model)
    collaborate_(converted, CollaborativeConfig(shared_dim=1.0))
    tokens = tiny_models.token_ids()
    options = {"max_cache_len": tokens.shape[1]} if kind is StaticCache else {}
    cache = kind(config=model.config, **options)
    model(tokens[:, :3], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="filled by another model"):
        converted(tokens[:, 3:], past_key_values=cache)


@pytest.mark.parametrize("shared_dim", [8, 10])
def test_a_static_cache_is_read_without_a_copy(monkeypatch: pytest.MonkeyPatch, shared_dim: int) -> None:
    model = converted(MODELS["gpt2"]("sdpa"), shared_dim)
    cache = StaticCache(config=model.config, max_cache_len=12)
    model(tiny_models.token_ids(), past_key_values=cache)
    keys = []

    def watch(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        keys.append((key, value))
        return reference.attention(query, key, value, **{"mask": None, **options})

    monkeypatch.setattr(ops, "attention", watch)
    model(tiny_models.token_ids()[:, :1], past_key_values=cache)
    for (key, value), layer in zip(keys, cache.layers, strict=True):
        assert key.shape[-1] == shared_dim + HEADS
        assert key.untyped_storage().data_ptr() == layer.keys.untyped_storage().data_ptr()
        assert value.untyped_storage().data_ptr() == layer.values.untyped_storage().data_ptr()
