"""calibrate: statistics are those of what the projections see, and conversions in their metric are truer to inputs."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tiny_models
from collab import Calibration, CollaborativeConfig, calibrate, collaborate_, decompose, find_attention
from collab.calibration import Moments, SiteStatistics
from collab.conversion import Metric, shared_from
from collab.hosts import HeadWeights
from tiny_models import inputs_for, numbers, padding_mask, token_ids

BERT_LAYERS = ["encoder.layer.0.attention.self", "encoder.layer.1.attention.self"]


def texts(batches=4, length=7, batch=3, first=0):
    """Batches of padded token ids with their masks."""
    return [
        {"input_ids": token_ids(length, batch, seed=first + seed), "attention_mask": padding_mask(length, batch)}
        for seed in range(batches)
    ]


def assert_moments(moments, rows, tolerance=1e-10):
    """Moments are those of the rows (count, width)."""
    rows = rows.double()
    assert moments.count == len(rows)
    assert moments.mean.dtype == moments.scatter.dtype == torch.float64
    scale = float(rows.abs().max())
    torch.testing.assert_close(moments.mean, rows.mean(0), atol=tolerance * scale, rtol=0)
    expected = torch.cov(rows.mT, correction=0)
    torch.testing.assert_close(moments.covariance, expected, atol=tolerance * scale**2, rtol=0)


def seen_by(model, projections, batches):
    """Name -> what went into each projection, batch by batch."""
    seen = {name: [] for name in projections}
    handles = [
        model.get_submodule(path).register_forward_pre_hook(lambda module, args, name=name: seen[name].append(args[0]))
        for name, path in projections.items()
    ]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for handle in handles:
        handle.remove()
    return seen


def close(one, other, tolerance=1e-9):
    """Whether two calibrations are the same up to rounding."""
    assert list(one.sites) == list(other.sites)
    for path, ours in one.sites.items():
        for role in ("query", "key"):
            left, right = getattr(ours, role), getattr(other.sites[path], role)
            assert left.count == right.count, (path, role)
            torch.testing.assert_close(left.mean, right.mean, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(left.covariance, right.covariance, atol=tolerance, rtol=tolerance)


def bit_equal(one, other):
    return list(one.sites) == list(other.sites) and all(
        getattr(one.sites[path], role).count == getattr(other.sites[path], role).count
        and torch.equal(getattr(one.sites[path], role).mean, getattr(other.sites[path], role).mean)
        and torch.equal(getattr(one.sites[path], role).scatter, getattr(other.sites[path], role).scatter)
        for path in one.sites
        for role in ("query", "key")
    )


# what is measured


def test_statistics_are_those_of_what_the_projections_see():
    model, batches = tiny_models.bert(), texts()
    seen = seen_by(model, {path: f"{path}.query" for path in BERT_LAYERS}, batches)
    stats = calibrate(model, batches)
    assert list(stats.sites) == BERT_LAYERS
    for path in BERT_LAYERS:
        rows = torch.cat([x[batch["attention_mask"] != 0] for x, batch in zip(seen[path], batches, strict=True)])
        assert_moments(stats.sites[path].query, rows)
        assert_moments(stats.sites[path].key, rows)


def test_sums_are_exact_where_the_mean_is_large():
    rows = 1e4 + numbers(3000, 5)
    moments = Moments.none(5)
    for part in rows.split(7):
        moments = moments.merge(Moments.of(part))
    # A sum of squares in float32, or one that is not centred, has no digit of this left.
    assert_moments(moments, rows, tolerance=1e-15)


def test_padding_does_not_count():
    model = tiny_models.bert()
    padded = texts(1, length=9)[0]
    single = [
        {"input_ids": ids[mask != 0][None], "attention_mask": torch.ones(1, int(mask.sum()), dtype=torch.long)}
        for ids, mask in zip(padded["input_ids"], padded["attention_mask"], strict=True)
    ]
    padded["input_ids"][padded["attention_mask"] == 0] = 1
    stats = calibrate(model, [padded])
    assert stats.sites[BERT_LAYERS[0]].query.count == int(padded["attention_mask"].sum()) < 27
    close(stats, calibrate(model, single), tolerance=1e-5)


def test_left_padding_and_boolean_masks_do_not_count_either():
    model = tiny_models.gpt2()
    mask = padding_mask().flip(1)
    whole = {"input_ids": token_ids(), "attention_mask": mask}
    path = "transformer.h.0.attn"
    assert calibrate(model, [whole]).sites[path].query.count == int(mask.sum())
    assert calibrate(model, [whole | {"attention_mask": mask.bool()}]).sites[path].query.count == int(mask.sum())


def test_batches_may_come_from_a_generator_and_in_any_split():
    model = tiny_models.bert()
    close(calibrate(model, texts()), calibrate(model, (batch for batch in texts())))
    joined = {name: torch.cat([batch[name] for batch in texts()]) for name in texts()[0]}
    close(calibrate(model, texts()), calibrate(model, [joined]), tolerance=1e-5)


CROSS = {
    "bart": (
        "model.decoder.layers.1.encoder_attn", "q_proj", "k_proj", "attention_mask", "decoder_attention_mask",
    ),
    "t5": (
        "decoder.block.1.layer.1.EncDecAttention", "q", "k", "attention_mask", "decoder_attention_mask",
    ),
    "gpt2": (
        "transformer.h.1.crossattention", "q_attn", "c_attn", "encoder_attention_mask", "attention_mask",
    ),
    "whisper": ("model.decoder.layers.1.encoder_attn", "q_proj", "k_proj", None, "decoder_attention_mask"),
}  # fmt: skip
"""Model -> path of a cross-attention, its query and key projections, and the masks of what those project."""


@pytest.mark.parametrize("name", CROSS)
def test_keys_of_cross_attention_are_the_encoders_under_its_mask(name):
    path, query, key, key_mask, query_mask = CROSS[name]
    model = getattr(tiny_models, name)(**({"add_cross_attention": True} if name == "gpt2" else {}))
    inputs = inputs_for(model)
    seen = seen_by(model, {"query": f"{path}.{query}", "key": f"{path}.{key}"}, [inputs])
    statistics = calibrate(model, [inputs]).sites[path]
    keys, queries = seen["key"][0], seen["query"][0]
    assert keys.shape[1] != queries.shape[1]
    assert_moments(statistics.query, queries[inputs[query_mask] != 0])
    assert_moments(statistics.key, keys.flatten(0, 1) if key_mask is None else keys[inputs[key_mask] != 0])


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_decoders_own_attention_has_the_decoders_mask(name):
    model = getattr(tiny_models, name)()
    inputs = inputs_for(model)
    # As long as the encoder's: only the path tells whose mask it is.
    inputs["decoder_input_ids"], inputs["decoder_attention_mask"] = token_ids(seed=1), torch.ones(3, 7).long()
    inputs["decoder_attention_mask"][:, 3:] = 0
    for site in find_attention(model):
        one = calibrate(model, [inputs], only=lambda other, path=site.path: other.path == path).sites[site.path]
        is_decoder = "decoder" in site.path
        whole, decoder = int(inputs["attention_mask"].sum()), 9
        assert one.query.count == (decoder if is_decoder else whole), site.path
        assert one.key.count == (decoder if is_decoder and site.kind != "cross" else whole), site.path


def test_a_decoder_on_its_own_has_the_encoders_mask_for_keys():
    decoder = tiny_models.bart().get_decoder()
    batch = {
        "input_ids": token_ids(), "attention_mask": padding_mask(),
        "encoder_hidden_states": numbers(3, 7, 32), "encoder_attention_mask": torch.ones(3, 7).long(),
    }  # fmt: skip
    batch["encoder_attention_mask"][:, 2:] = 0
    statistics = calibrate(decoder, [batch]).sites["layers.0.encoder_attn"]
    assert (statistics.query.count, statistics.key.count) == (int(padding_mask().sum()), 6)


def test_labels_say_where_a_decoder_is_padded():
    model = tiny_models.t5(decoder_start_token_id=0)
    inputs = inputs_for(model)
    labels = inputs.pop("decoder_input_ids")
    labels[inputs.pop("decoder_attention_mask") == 0] = -100
    for given in ({}, {"decoder_attention_mask": None}):
        stats = calibrate(model, [inputs | given | {"labels": labels}])
        count = int((labels != -100).sum())
        assert stats.sites["decoder.block.0.layer.0.SelfAttention"].query.count == count < labels.numel()
        assert stats.sites["encoder.block.0.layer.0.SelfAttention"].query.count == int(inputs["attention_mask"].sum())


def test_a_mask_of_the_text_is_not_one_of_the_image():
    model = tiny_models.clip()
    inputs = inputs_for(model) | {"input_ids": token_ids(17), "attention_mask": padding_mask(17)}  # 17 patches too
    stats = calibrate(model, [inputs])
    assert stats.sites["text_model.encoder.layers.0.self_attn"].query.count == int(padding_mask(17).sum())
    assert stats.sites["vision_model.encoder.layers.0.self_attn"].query.count == 3 * 17


def test_where_another_sequence_is_as_long_as_the_text_its_mask_is_not_taken_for_the_others():
    model = tiny_models.tiny(
        "LxmertModel", l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=16, attn_implementation="eager"
    )
    mask = padding_mask()
    text = {"input_ids": token_ids(), "attention_mask": mask}

    def counts(regions):
        stats = calibrate(
            model, [text | {"visual_feats": numbers(3, regions, 16), "visual_pos": numbers(3, regions, 4)}]
        )
        paths = ("encoder.layer.0.attention.self", "encoder.r_layers.0.attention.self")
        return [stats.sites[path].query.count for path in paths]

    assert counts(5) == [int(mask.sum()), 3 * 5]
    assert counts(7) == [3 * 7, 3 * 7]  # nothing tells the two apart: all count, rather than the wrong ones


def test_a_shared_module_counts_every_run():
    model, batches = tiny_models.albert(), texts()
    path = "encoder.albert_layer_groups.0.albert_layers.1.attention"
    seen = seen_by(model, {"query": f"{path}.query"}, batches)["query"]
    stats = calibrate(model, batches)
    assert len(stats.sites) == 4
    assert len(seen) == 2 * len(batches)
    masks = [batch["attention_mask"] != 0 for batch in batches for _ in range(2)]
    assert_moments(stats.sites[path].query, torch.cat([x[mask] for x, mask in zip(seen, masks, strict=True)]))


def test_the_fast_path_of_torch_does_not_hide_inputs():
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    model = tiny_models.randomise_(nn.TransformerEncoder(layer, 2)).eval()
    batches = [numbers(3, 5, 16, seed=seed) for seed in range(3)]
    seen = []
    model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    stats = calibrate(model, batches)
    assert torch.backends.mha.get_fastpath_enabled()
    assert [one.query.count for one in stats.sites.values()] == [45, 45]
    assert_moments(stats.sites["layers.1.self_attn"].key, torch.cat(seen[-3:]).flatten(0, 1))
    assert_moments(stats.sites["layers.0.self_attn"].key, torch.cat(batches).flatten(0, 1))


def test_a_model_in_half_precision():
    model = tiny_models.bert().to(torch.bfloat16)
    seen = seen_by(model, {"query": f"{BERT_LAYERS[1]}.query"}, texts(2))["query"]
    stats = calibrate(model, texts(2))
    rows = torch.cat([x[batch["attention_mask"] != 0] for x, batch in zip(seen, texts(2), strict=True)])
    assert rows.dtype == torch.bfloat16
    assert_moments(stats.sites[BERT_LAYERS[1]].query, rows)


def test_only_some_layers():
    assert list(calibrate(tiny_models.bert(), texts(1), only=lambda site: ".1." in site.path).sites) == BERT_LAYERS[1:]
    with pytest.raises(ValueError, match="no attention to calibrate in BertModel"):
        calibrate(tiny_models.bert(), texts(1), only=lambda site: False)


# what is left behind


def test_the_model_is_left_as_it_was():
    model = tiny_models.gpt2()
    model.transformer.h[0].train()
    for parameter in model.transformer.h[1].parameters():
        parameter.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    model.config.use_cache = True
    calibrate(model, texts(2))
    with pytest.raises(RuntimeError, match="stop"):
        calibrate(model, iter_then_stop())
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config.use_cache is True
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.equal(torch.get_rng_state(), random)


def iter_then_stop():
    yield texts(1)[0]
    raise RuntimeError("stop")


def test_memory_does_not_grow_with_the_batches():
    model = tiny_models.bert()
    moments = []

    def batches(count):
        for seed in range(count):
            yield {"input_ids": token_ids(8, 2, seed=seed)}
            moments.append(sum(tensor.numel() for tensor in live_tensors()))

    calibrate(model, batches(12))
    assert max(moments[2:]) <= moments[1] * 1.05


def live_tensors():
    import gc

    return [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]


def test_progress_wraps_the_batches():
    calls = []

    def progress(steps, total):
        calls.append(total)
        return steps

    stats = calibrate(tiny_models.bert(), texts(3), progress=progress)
    calibrate(tiny_models.bert(), iter(texts(3)), progress=progress)
    assert calls == [3, 0]  # a generator does not say how many
    assert stats.sites[BERT_LAYERS[0]].query.count == 3 * int(padding_mask().sum())


# what is refused


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_no_numbers_are_refused_by_the_layers_name(value):
    model = tiny_models.bert()
    model.encoder.layer[0].output.dense.bias.data[3] = value
    with pytest.raises(ValueError, match=rf"inputs of {BERT_LAYERS[1]} must be finite, got NaN or infinity"):
        calibrate(model, texts(1))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_nan_in_padding_does_no_harm():
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    inputs = numbers(2, 5, 16)
    inputs[0, 4] = float("nan")
    with pytest.raises(ValueError, match="inputs of self_attn must be finite"):
        calibrate(layer, [inputs])


@pytest.mark.parametrize("batches", [[], iter(())])
def test_no_batches_are_refused(batches):
    with pytest.raises(ValueError, match="batches must hold at least one batch, got none"):
        calibrate(tiny_models.bert(), batches)


@pytest.mark.parametrize(
    "batches", [None, numbers(3, 5, 16), {"src": numbers(3, 5, 16)}, "text", Calibration({})], ids=lambda one: type(one)
)
def test_what_are_no_batches_is_refused_before_anything_runs(batches):
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    with pytest.raises(ValueError, match=f"batches must be an iterable of batches, got one {type(batches).__name__}"):
        calibrate(layer, batches)


def test_models_without_values_are_refused():
    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True, device="meta")
    with pytest.raises(ValueError, match="TransformerEncoderLayer is on the meta device and has no values"):
        calibrate(layer, [numbers(3, 5, 16)])


def test_batches_that_can_be_read_once_but_do_not_look_like_it_are_enough_for_refinement():
    class Wrapped:
        def __init__(self, batches):
            self.batches = batches

        def __iter__(self):
            yield from self.batches

    layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    once = Wrapped(numbers(3, 5, 16, seed=seed) for seed in range(4))
    report = collaborate_(layer, CollaborativeConfig(budget=0.5), calibration=once)
    assert report.refinement.batches == 3


def test_batches_of_nothing_but_padding_are_refused():
    batch = {"input_ids": token_ids(), "attention_mask": torch.zeros(3, 7).long()}
    with pytest.raises(ValueError, match="none of BertModel's attention layers ran on these batches"):
        calibrate(tiny_models.bert(), [batch])


def test_what_is_no_batch_is_refused():
    with pytest.raises(ValueError, match="a batch must be a mapping, a tensor or a tuple, got str"):
        calibrate(tiny_models.bert(), ["a text"])


# merge, save, load


def test_merged_statistics_are_those_of_one_pass():
    model = tiny_models.bart()
    first, second = inputs_for(model), inputs_for(model) | {"input_ids": token_ids(seed=5)}
    merged = calibrate(model, [first]).merge(calibrate(model, [second]))
    close(merged, calibrate(model, [first, second]), tolerance=1e-12)


def test_merging_keeps_what_only_one_has_seen_and_refuses_other_widths():
    first = calibrate(tiny_models.bert(), texts(1), only=lambda site: ".0." in site.path)
    second = calibrate(tiny_models.bert(), texts(1), only=lambda site: ".1." in site.path)
    assert list(first.merge(second).sites) == BERT_LAYERS
    wider = calibrate(tiny_models.bert(hidden_size=48), texts(1))
    with pytest.raises(ValueError, match="moments must be of one width, got 32 and 48"):
        first.merge(wider)


def test_saved_statistics_come_back_bit_for_bit(tmp_path):
    stats = calibrate(tiny_models.bart(), [inputs_for(tiny_models.bart())])
    path = tmp_path / "stats.safetensors"
    stats.save(path)
    stats.save(str(path))  # over an earlier one
    assert bit_equal(Calibration.load(path), stats)
    assert [entry.name for entry in tmp_path.iterdir()] == ["stats.safetensors"]


def test_an_attention_layer_on_its_own_is_saved_too(tmp_path):
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    stats = calibrate(layer, [(numbers(2, 5, 16),) * 3])
    assert list(stats.sites) == [""]
    stats.save(tmp_path / "stats")
    assert bit_equal(Calibration.load(tmp_path / "stats"), stats)


def test_nothing_is_left_half_written(tmp_path, monkeypatch):
    stats = calibrate(tiny_models.bert(), texts(1))
    path = tmp_path / "stats"
    stats.save(path)
    before = path.read_bytes()

    def fail(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        stats.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_files_that_are_not_statistics_are_refused_by_name(tmp_path):
    path = tmp_path / "stats.safetensors"
    with pytest.raises(FileNotFoundError, match=r"no file .*stats\.safetensors with calibration statistics"):
        Calibration.load(path)
    calibrate(tiny_models.bert(), texts(1)).save(path)
    whole = path.read_bytes()
    refused = r"stats\.safetensors must be calibration statistics that collab wrote"
    for damaged in (whole[: len(whole) // 2], whole[:3], b"", b"\xff" * 100, whole + b"more"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=refused):
            Calibration.load(path)
    tensors = {"a.query.mean": torch.zeros(2)}
    for metadata in (
        None,
        {"collab_calibration": "2", "counts": "{}"},
        {"collab_calibration": "1"},
        {"collab_calibration": "1", "counts": "no json"},
        {"collab_calibration": "1", "counts": "[1]"},
        {"collab_calibration": "1", "counts": '{"a.query": 3}'},
        {"collab_calibration": "1", "counts": '{"a.query": null}'},
        {"collab_calibration": "1", "counts": "3"},
    ):
        save_file(tensors, path, metadata=metadata)
        with pytest.raises(ValueError, match=refused):
            Calibration.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.query.scatter": torch.zeros(3, 3).double()}, r"a\.query must be \(width,\) and \(width, width\)"),
        ({"a.key.mean": torch.zeros(1, 2).double()}, r"a\.key must be \(width,\) and \(width, width\)"),
        ({"a.key.mean": torch.zeros(2)}, "a.key must be float64, got torch.float32"),
        ({"a.key.scatter": torch.full((2, 2), torch.nan).double()}, "a.key must be finite, got NaN or infinity"),
        ({"a.query": -1}, "the count of a.query must be an integer >= 0, got -1"),
        ({"a.query": 2.5}, "the count of a.query must be an integer >= 0, got 2.5"),
        ({"a.query": [3]}, r"the count of a.query must be an integer >= 0, got \[3\]"),
    ],
    ids=str,
)
def test_statistics_of_the_wrong_kind_are_refused_with_the_reason(tmp_path, change, message):
    tensors, counts = {}, {"a.query": 3, "a.key": 3}
    for name in counts:
        tensors |= {f"{name}.mean": torch.zeros(2).double(), f"{name}.scatter": torch.zeros(2, 2).double()}
    path = tmp_path / "stats"

    def save():
        save_file(tensors, path, metadata={"collab_calibration": "1", "counts": json.dumps(counts)})

    save()
    assert list(Calibration.load(path).sites) == ["a"]
    (counts if set(change) <= set(counts) else tensors).update(change)
    save()
    with pytest.raises(ValueError, match=rf"stats must be calibration statistics that collab wrote: {message}"):
        Calibration.load(path)


def test_statistics_print_as_a_table():
    lines = str(calibrate(tiny_models.bart(), [inputs_for(tiny_models.bart())])).splitlines()
    assert len(lines) == 2 + 6
    cross = next(line for line in lines if "decoder.layers.0.encoder_attn" in line)
    masks = inputs_for(tiny_models.bart())
    expected = [int(masks["decoder_attention_mask"].sum()), int(masks["attention_mask"].sum()), 32, 32]
    assert [int(cell) for cell in cross.split()[1:5]] == expected


# shrinkage


def test_shrinkage_falls_as_inputs_come_and_the_covariance_is_always_positive():
    spread = torch.linspace(0.0, 2.0, 16) ** 3  # one direction never varies
    shares = []
    for count in (0, 1, 2, 5, 50, 500, 50_000):
        covariance, share = Moments.of(numbers(count, 16) * spread).shrunk()
        assert torch.isfinite(covariance).all()
        assert torch.linalg.eigvalsh(covariance).min() > 0
        shares.append(share)
    assert shares[:2] == [1.0, 1.0]
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < 1e-3
    assert Moments.of(torch.ones(9, 16)).shrunk()[1] == 1.0  # all alike: nothing varies


def test_shrinkage_is_that_of_the_paper():
    """Chen, Wiesel, Eldar, Hero (2010), equation 23, written out."""
    rows = (numbers(40, 6) * torch.tensor([3.0, 1, 1, 0.5, 0.2, 2])).double()
    p, n, sample = 6, 40, torch.cov(rows.mT, correction=0)
    trace, square = sample.trace(), (sample @ sample).trace()
    rho = ((1 - 2 / p) * square + trace**2) / ((n + 1 - 2 / p) * (square - trace**2 / p))
    covariance, share = Moments.of(rows).shrunk()
    assert share == pytest.approx(float(rho), rel=1e-9)
    torch.testing.assert_close(covariance, (1 - rho) * sample + rho * trace / p * torch.eye(p).double())


# conversions in the metric of the inputs


def anisotropic(model=None):
    """A layer, and batches whose inputs vary much more in some directions than in others, about a mean of their own."""
    spread, mean = 0.05 + 3 * torch.rand(32, generator=torch.Generator().manual_seed(3)) ** 6, 2 * numbers(32, seed=9)
    layer = nn.TransformerEncoderLayer(32, 4, 36, batch_first=True, norm_first=False)
    rotation = torch.linalg.qr(numbers(32, 32, seed=4)).Q
    batches = [(numbers(8, 16, 32, seed=seed) * spread) @ rotation + mean for seed in range(6)]
    return tiny_models.randomise_(layer).eval(), batches


def scores(weights, inputs):
    """(..., head, query, key), centred over the keys, which is all that a softmax sees."""
    query = torch.einsum("hdi,bti->bhtd", weights.query.double(), inputs)
    if weights.query_bias is not None:
        query = query + weights.query_bias.double()[:, None]
    found = query @ torch.einsum("hdi,bti->bhtd", weights.key.double(), inputs).mT
    return found - found.mean(-1, keepdim=True)


def dense_mixing(shared):
    """(head, shared), with zeros where a head does not use a dimension."""
    mixing = shared.mixing.double()
    if shared.dims is None:
        return mixing
    return mixing.new_zeros(len(mixing), shared.shared_dim).scatter(1, shared.dims, mixing)


def shared_scores(shared, inputs):
    query, key = inputs @ shared.query.double().mT, inputs @ shared.key.double().mT
    found = torch.einsum("bqr,hr,bkr->bhqk", query, dense_mixing(shared), key)
    found = found + torch.einsum("bki,hi->bhk", inputs, shared.content.double())[:, :, None]
    return found - found.mean(-1, keepdim=True)


def score_error(shared, weights, inputs):
    expected = scores(weights, inputs)
    return float((shared_scores(shared, inputs) - expected).norm() / expected.norm())


def converted(layer, statistics, rank, **options):
    site = find_attention(layer)[0]
    weights = site.host.read(site.module)
    weights = HeadWeights(*(None if part is None else part.detach().double() for part in vars(weights).values()))
    metric = Metric.of(statistics, torch.device("cpu"))
    factors = decompose(*metric.enter(weights), rank, **options)
    return weights, shared_from(weights, factors, metric, options.get("dims_per_head")), factors


@pytest.mark.parametrize("options", [{}, {"method": "unshared"}, {"dims_per_head": 6}], ids=str)
@pytest.mark.parametrize("rank", [8, 16])
def test_scores_on_such_inputs_are_closer_with_calibration(rank, options):
    layer, batches = anisotropic()
    statistics = calibrate(layer, batches).sites["self_attn"]
    weights, plain, _ = converted(layer, None, rank, **options)
    _, calibrated, factors = converted(layer, statistics, rank, **options)
    unseen = torch.cat([anisotropic()[1][0].flip(0), batches[1]]).double()
    assert score_error(calibrated, weights, unseen) < 0.6 * score_error(plain, weights, unseen)
    assert 0 < factors.relative_error < 1


def products(weights):
    """(head, query_in, key_in) of heads, and of shared weights alike."""
    if isinstance(weights, HeadWeights):
        return torch.einsum("hdi,hdj->hij", weights.query.double(), weights.key.double())
    return torch.einsum("ri,hr,rj->hij", weights.query.double(), dense_mixing(weights), weights.key.double())


def distance(found, exact):
    return float((found - exact).norm() / exact.norm())


def test_the_error_reported_is_that_of_scores_under_the_covariances_that_were_assumed():
    layer, batches = anisotropic()
    statistics = calibrate(layer, batches).sites["self_attn"]
    weights, shared, factors = converted(layer, statistics, 8)
    query_root, key_root, share = statistics.whitening()
    assert 0.005 < share < 0.02  # enough to matter in what follows
    found, exact = (query_root.mT @ products(part) @ key_root for part in (shared, weights))
    assert distance(found, exact) == pytest.approx(factors.relative_error, rel=1e-9)


def test_the_error_reported_is_that_of_the_scores_of_centred_inputs():
    layer, batches = anisotropic()
    statistics = calibrate(layer, batches * 10).sites["self_attn"]
    # As if seen a thousand times each: what is assumed is then the least there is, 1e-4 of the mean variance in every
    # direction of queries and of keys, and errors move by that order.
    often = SiteStatistics(*(Moments(m.count * 100, m.mean, m.scatter * 100) for m in vars(statistics).values()))
    weights, shared, factors = converted(layer, often, 8)
    rows = torch.cat(batches).flatten(0, 1).double()
    rows = rows - rows.mean(0)
    found, exact = (rows @ products(part) @ rows.mT for part in (shared, weights))
    assert distance(found, exact) == pytest.approx(factors.relative_error, rel=1e-3)


@pytest.mark.parametrize("rank", [1, 8, 24])
@pytest.mark.parametrize("dims_per_head", [None, 1])
def test_the_mean_query_scores_keys_exactly_at_any_size(rank, dims_per_head):
    layer, batches = anisotropic()
    statistics = calibrate(layer, batches).sites["self_attn"]
    weights, shared, _ = converted(layer, statistics, rank, dims_per_head=dims_per_head)
    keys = batches[0][:1].double()
    mean = statistics.query.mean[None, None]
    query = torch.einsum("hdi,bti->bhtd", weights.query, mean) + weights.query_bias[:, None]
    exact = query @ torch.einsum("hdi,bti->bhtd", weights.key, keys).mT
    found = torch.einsum("qr,hr,bkr->bhqk", mean[0] @ shared.query.mT, dense_mixing(shared), keys @ shared.key.mT)
    found = found + torch.einsum("bki,hi->bhk", keys, shared.content)[:, :, None]
    torch.testing.assert_close(found, exact, atol=1e-10 * float(exact.abs().max()), rtol=0)


def test_cross_attention_is_converted_in_both_its_metrics():
    weights = HeadWeights(numbers(4, 8, 24, seed=1).double(), numbers(4, 8, 20, seed=2).double(), None)
    queries = (numbers(500, 24, seed=3) * torch.linspace(0.1, 3, 24) ** 3).double()
    keys = (numbers(400, 20, seed=4) * torch.linspace(3, 0.1, 20) ** 3).double() + 5
    metric = Metric.of(SiteStatistics(Moments.of(queries), Moments.of(keys)), torch.device("cpu"))

    def error(measure):
        shared = shared_from(weights, decompose(*measure.enter(weights), 12), measure, None)
        exact = torch.einsum("qi,hdi,hdj,kj->hqk", queries, weights.query, weights.key, keys)
        found = torch.einsum("qi,ri,hr,rj,kj->hqk", queries, shared.query, shared.mixing, shared.key, keys)
        found = found + (shared.content @ keys.mT)[:, None]
        difference = found - exact
        return float((difference - difference.mean(-1, keepdim=True)).norm())

    assert error(metric) < 0.5 * error(Metric())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_conversion_from_few_inputs_says_so(count):
    layer, batches = anisotropic()
    few = batches[0][:1, :count]
    plain, little, much = copy.deepcopy(layer), copy.deepcopy(layer), copy.deepcopy(layer)
    config = CollaborativeConfig(shared_dim=8)
    expected = collaborate_(plain, config)
    report = collaborate_(little, config, calibration=calibrate(layer, [few]))
    enough = collaborate_(much, config, calibration=calibrate(layer, batches))
    assert all(torch.isfinite(parameter).all() for parameter in little.parameters())
    assert any("little calibration data" in note for note in report.notes)
    assert "note: little calibration data" in str(report)
    assert expected.notes == ()
    assert not any("little" in note for note in enough.notes)
    if count == 1:
        assert report.sites[0].error == pytest.approx(expected.sites[0].error, rel=1e-6)
        assert torch.allclose(little.self_attn.mixing, plain.self_attn.mixing, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_inputs_do_no_harm(count):
    """Errors are in metrics of their own, so both conversions are measured alike: by the weights, by other inputs."""
    layer, batches = anisotropic()
    few = calibrate(layer, [batches[0][:1, :count]]).sites["self_attn"]
    assert few.whitening()[2] > 0.6  # most of it is assumed
    weights, plain, _ = converted(layer, None, 8)
    _, little, _ = converted(layer, few, 8)
    exact = products(weights)
    assert distance(products(little), exact) < 1.15 * distance(products(plain), exact)
    unseen = torch.cat(batches[1:]).double()
    assert score_error(little, weights, unseen) < score_error(plain, weights, unseen)


def test_at_full_size_calibration_changes_nothing():
    layer, batches = anisotropic()
    plain, calibrated = copy.deepcopy(layer), copy.deepcopy(layer)
    collaborate_(plain, CollaborativeConfig(shared_dim=32))
    collaborate_(calibrated, CollaborativeConfig(shared_dim=32), calibration=calibrate(layer, batches))
    for name, value in plain.state_dict().items():
        assert torch.equal(calibrated.state_dict()[name], value)


def test_layers_no_input_reached_are_converted_from_the_weights_and_named():
    model = tiny_models.bert()
    stats = calibrate(model, texts(), only=lambda site: ".0." in site.path)
    plain = copy.deepcopy(model)
    collaborate_(plain, CollaborativeConfig(shared_dim=8))
    report = collaborate_(model, CollaborativeConfig(shared_dim=8), calibration=stats)
    assert [site.metric for site in report.sites] == ["inputs", "weights"]
    assert any(f"no calibration input reached {BERT_LAYERS[1]}" in note for note in report.notes)
    same = [torch.equal(model.get_submodule(path).mixing, plain.get_submodule(path).mixing) for path in BERT_LAYERS]
    assert same == [False, True]


def test_statistics_of_another_model_are_refused():
    stats = calibrate(tiny_models.bert(hidden_size=48), texts(1))
    with pytest.raises(ValueError, match=f"calibration of {BERT_LAYERS[0]} must have query inputs 32 wide, got 48"):
        collaborate_(tiny_models.bert(), CollaborativeConfig(shared_dim=8), calibration=stats)
    with pytest.raises(
        ValueError, match=rf"calibration has {BERT_LAYERS[0]}, where the model has no attention; it has"
    ):
        collaborate_(tiny_models.gpt2(), CollaborativeConfig(shared_dim=8), calibration=stats)
