"""analyze: energies and likeness of heads, judged by products formed in full."""

import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import collab
import collab.analysis_commands  # its commands join those below
import tiny_models
from collab import spectra
from collab.analysis import CapturedEnergy
from collab.commands import app
from collab.conversion import Metric
from collab.hosts import HeadWeights, SharedWeights
from collab.hosts.obstacles import ROTARY
from collab.spectra import mixed_energies
from test_cli import TEXTS, save_tokenizer
from tiny_models import numbers

torch.set_num_threads(1)


def heads(num_heads=3, dim=4, query_in=10, key_in=7, seed=0):
    return numbers(num_heads, dim, query_in, seed=seed).double(), numbers(
        num_heads, dim, key_in, seed=seed + 1
    ).double()


def squares(matrix, count):
    return torch.linalg.svdvals(matrix).square()[..., :count]


def shares(values):
    return (values.cumsum(-1) / values.sum(-1, keepdim=True)).tolist()


def check_layer(layer, query, key):
    """A layer's curves and cosines are those of query and key (head, dim, in), as products formed in full say."""
    products = query.mT @ key
    together = (query.flatten(0, 1), key.flatten(0, 1), products.sum(0))
    for role, own, whole in zip(("query", "key", "product"), (query, key, products), together, strict=True):
        found = getattr(layer, role)
        for curve, matrix in zip(found.heads, own, strict=True):
            expected = shares(squares(matrix, len(curve)))
            assert curve == pytest.approx(expected, abs=1e-6)
            assert curve[-1] == pytest.approx(1)
        assert found.concatenated == pytest.approx(shares(squares(whole, len(found.concatenated))), abs=1e-6)
    flat = nn.functional.normalize(products.flatten(1), dim=1)
    torch.testing.assert_close(torch.tensor(layer.similarity).double(), flat @ flat.mT, atol=1e-6, rtol=0)


# --- the arithmetic


@pytest.mark.parametrize("sizes", [(3, 4, 10, 7), (2, 8, 6, 9), (2, 8, 9, 6), (1, 5, 5, 5), (4, 1, 3, 3)])
def test_energies_are_squared_singular_values(sizes):
    query, key = heads(*sizes)
    for found, matrix in zip(spectra.head_energies(query, key), (query, key, query.mT @ key), strict=True):
        torch.testing.assert_close(found, squares(matrix, found.shape[-1]), atol=1e-9, rtol=1e-9)
        assert found.shape == (sizes[0], min(found.shape[-1], *matrix.shape[1:], sizes[1]))


def test_weights_come_in_pieces_and_large_ones_in_single_precision(monkeypatch):
    query, key = heads(5, 4, 40, 40)
    exact = [*spectra.head_energies(query, key), *spectra.energies(query.flatten(0, 1), key.flatten(0, 1))]
    likeness = spectra.likeness(query, key)
    monkeypatch.setattr(spectra, "_CHUNK", 2 * query[0].numel())
    assert len(query.split(2)) == 3
    in_pieces = [*spectra.head_energies(query, key), *spectra.energies(query.flatten(0, 1), key.flatten(0, 1))]
    torch.testing.assert_close(in_pieces, exact)
    torch.testing.assert_close(spectra.likeness(query, key), likeness)
    monkeypatch.setattr(spectra, "_SINGLE_PRECISION_FROM", 0)
    for found, expected in zip(
        [*spectra.head_energies(query, key), *spectra.energies(query.flatten(0, 1), key.flatten(0, 1))],
        exact,
        strict=True,
    ):
        assert found.dtype == torch.float64
        assert not torch.equal(found, expected)
        torch.testing.assert_close(spectra.captured(found), spectra.captured(expected), atol=1e-6, rtol=0)
    torch.testing.assert_close(spectra.likeness(query, key), likeness, atol=1e-6, rtol=0)


def test_heads_that_differ_by_a_change_of_basis_are_the_same():
    """The paper's example: raw matrices of the two have nothing in common, products everything."""
    query, key = heads(2, 4, 32, 32)
    turn = torch.linalg.qr(numbers(4, 4, seed=5).double())[0]
    change = numbers(4, 4, seed=6).double()
    query = torch.stack((query[0], turn @ query[0], change @ query[0], query[1], query[0]))
    key = torch.stack((key[0], turn @ key[0], torch.linalg.inv(change).mT @ key[0], key[1], -3 * key[0]))
    raw = nn.functional.cosine_similarity(query[0].flatten(), query[1].flatten(), dim=0)
    assert abs(raw) < 0.5
    found = spectra.likeness(query, key)
    torch.testing.assert_close(found[0, [0, 1, 2, 4]], torch.tensor([1.0, 1, 1, -1]).double())
    assert abs(found[0, 3]) < 0.5


def test_likeness_is_the_cosine_of_products():
    query, key = heads(6, 3, 8, 9)
    flat = nn.functional.normalize((query.mT @ key).flatten(1), dim=1)
    torch.testing.assert_close(spectra.likeness(query, key), flat @ flat.mT)


def test_a_head_of_zeros_is_like_none():
    query, key = heads(3, 2, 6, 6)
    query[1] = 0
    found = spectra.likeness(query, key)
    assert found[1].tolist() == [0, 0, 0]
    assert spectra.captured(torch.zeros(2, 3)).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_sizes_are_the_smallest_that_hold_a_share():
    energy = CapturedEnergy(((0.5, 0.9, 1.0), (0.95, 0.99, 1.0)), (0.2, 0.4, 0.6, 0.8, 1.0))
    assert energy.head_sizes(0.9) == (2, 1)
    assert energy.head_sizes(0.99) == (3, 2)
    assert [energy.concatenated_size(share) for share in (0.1, 0.2, 0.21, 1.0)] == [1, 1, 2, 5]
    assert energy.mean_head == pytest.approx((0.725, 0.945, 1.0))
    with pytest.raises(ValueError, match="share must be above 0 and at most 1, got 0"):
        energy.concatenated_size(0)


def test_effective_dims_count_dimensions_of_equal_strength():
    query, key = numbers(6, 9).double(), numbers(6, 8, seed=1).double()
    strength = 1 / (query.norm(dim=1) * key.norm(dim=1))
    mixing = torch.stack((strength, strength * torch.tensor([1, 1, 0, 0, 1, 0]), torch.zeros(6).double()))
    mixing = torch.cat((mixing, strength[None] * torch.tensor([[100, 1, 1, 1, 1, 1]])))
    found = spectra.effective_dims(query, key, mixing).tolist()
    assert found[:3] == pytest.approx([6, 3, 0])
    assert found[3] == pytest.approx(1, abs=1e-2)


def test_no_large_array_is_formed():
    script = """
import resource, torch
from torch import nn
import collab
torch.set_num_threads(1)
collab.analyze(nn.MultiheadAttention(8, 2))  # what the first call loads does not count
from collab.hosts import HeadWeights
from collab import spectra
generator = torch.Generator().manual_seed(0)
query, key = (torch.randn(64, 8, 4096, generator=generator) for _ in range(2))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
spectra.head_energies(query, key)
spectra.energies(query.flatten(0, 1), key.flatten(0, 1))
spectra.likeness(query, key)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # One head's product (4096, 4096) has 64 MiB in float32 and 128 in float64; all have 4 GiB; the weights have 8 each.
    assert int(done.stdout) < 64


# --- models


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "albert"])
def test_every_layer_of_a_model(name):
    model = getattr(tiny_models, name)()
    found = collab.analyze(model)
    sites = {site.path: site for site in collab.find_attention(model)}
    assert [layer.path for layer in found.layers] == list(sites)
    assert found.left == {}
    for layer in found.layers:
        weights = sites[layer.path].host.read(sites[layer.path].module)
        check_layer(layer, weights.query.detach().double(), weights.key.detach().double())
        assert (layer.num_heads, layer.head_dim, layer.metric, layer.effective_dims) == (4, 8, "weights", None)


def test_pairs_that_share_most_come_first():
    layer = collab.analyze(tiny_models.bert()).layers[0]
    pairs = layer.closest_pairs()
    assert len(pairs) == 6
    sizes = [abs(cosine) for *_, cosine in pairs]
    assert sizes == sorted(sizes, reverse=True)
    assert all(layer.similarity[left][right] == cosine for left, right, cosine in pairs)
    assert layer.mean_similarity == pytest.approx(sum(sizes) / 6)
    assert layer.closest_pairs(2) == pairs[:2]


def test_inputs_are_the_metric_where_there_is_calibration():
    model = tiny_models.bert()
    statistics = collab.calibrate(model, [tiny_models.inputs_for(model)])
    first, second = collab.analyze(model, calibration=statistics).layers
    site = collab.find_attention(model)[0]
    metric = Metric.of(statistics.sites[site.path], torch.device("cpu"))
    weights = site.host.read(site.module)
    check_layer(
        first,
        (weights.query.double() @ metric.query_root).detach(),
        (weights.key.double() @ metric.key_root).detach(),
    )
    assert first.metric == "inputs"
    some = collab.Calibration({second.path: statistics.sites[second.path]})
    assert [layer.metric for layer in collab.analyze(model, calibration=some).layers] == ["weights", "inputs"]
    assert "in the metric of the inputs and weights" in str(collab.analyze(model, calibration=some))
    assert "little calibration data" in str(collab.analyze(model, calibration=statistics))
    with pytest.raises(ValueError, match="where the model has no attention"):
        collab.analyze(tiny_models.gpt2(), calibration=statistics)


@pytest.mark.parametrize("dims_per_head", [None, 5])
@pytest.mark.parametrize("calibrated", [False, True])
def test_converted_layers_are_read_as_heads_of_shared_dimensions(dims_per_head, calibrated):
    model = tiny_models.bert()
    statistics = collab.calibrate(model, [tiny_models.inputs_for(model)]) if calibrated else None
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=12, dims_per_head=dims_per_head))
    found = collab.analyze(model, calibration=statistics)
    for layer, site in zip(found.layers, collab.find_attention(model), strict=True):
        shared = site.host.shared_weights(site.module)
        mixing = shared.mixing.double()
        if dims_per_head is not None:
            mixing = torch.zeros(4, 12).double().scatter(1, shared.dims, mixing)
        metric = Metric.of(statistics and statistics.sites[site.path], torch.device("cpu"))
        entered = metric.enter(HeadWeights(shared.query[None], shared.key[None], None))
        query, key = (part[0].double() for part in entered)
        products = torch.einsum("sq,hs,sk->hqk", query, mixing, key)
        for curve, product in zip(layer.product.heads, products, strict=True):
            assert curve == pytest.approx(shares(squares(product, len(curve))), abs=1e-6)
        whole = layer.product.concatenated
        assert whole == pytest.approx(shares(squares(products.sum(0), len(whole))), abs=1e-6)
        side_by_side = (mixing[:, :, None] * query).flatten(0, 1)
        assert layer.query.concatenated == pytest.approx(shares(squares(side_by_side, 12)), abs=1e-6)
        flat = nn.functional.normalize(products.flatten(1), dim=1)
        torch.testing.assert_close(torch.tensor(layer.similarity).double(), flat @ flat.mT, atol=1e-6, rtol=0)
        assert (layer.shared_dim, layer.dims_per_head) == (12, dims_per_head)
        assert all(1 <= used <= (dims_per_head or 12) for used in layer.effective_dims)
    assert "effective dims" in str(found)


def test_a_conversion_at_full_size_changes_nothing():
    model = tiny_models.bert()
    before = collab.analyze(model).layers
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=1.0))
    for old, new in zip(before, collab.analyze(model).layers, strict=True):
        assert new.product.heads[1] == pytest.approx(old.product.heads[1], abs=1e-5)
        assert new.product.concatenated == pytest.approx(old.product.concatenated, abs=1e-5)
        torch.testing.assert_close(torch.tensor(new.similarity), torch.tensor(old.similarity), atol=1e-5, rtol=0)
        assert max(new.effective_dims) <= 8 + 1e-6


def test_heads_that_use_one_dimension_each():
    model = nn.MultiheadAttention(8, 2)
    (site,) = collab.find_attention(model)
    shared = SharedWeights(numbers(3, 8), numbers(3, 8), torch.tensor([[1.0, 0, 0], [0, 2, 0]]), torch.zeros(2, 8))
    site.host.install_(model, shared)
    (layer,) = collab.analyze(model).layers
    assert layer.effective_dims == pytest.approx((1, 1))
    assert layer.product.heads == ((1.0,), (1.0,))


def rotary(name, **sizes):
    return tiny_models.tiny(name, **({"num_key_value_heads": 2} | sizes))


def test_rotary_positions_do_not_hide_the_weights():
    model = rotary("LlamaModel")
    assert {site.why_not for site in collab.find_attention(model)} == {(ROTARY,)}
    found = collab.analyze(model)
    attention = model.layers[1].self_attn
    key = attention.k_proj.weight.detach().double().unflatten(0, (2, 8))[[0, 0, 1, 1]]  # two queries a key
    check_layer(found.layers[1], attention.q_proj.weight.detach().double().unflatten(0, (4, 8)), key)
    assert "at the same position" in found.layers[1].note
    assert str(found).count("at the same position") == 1
    by_host = tiny_models.tiny("EsmModel", position_embedding_type="rotary")
    assert len(collab.analyze(by_host).layers) == 2


def test_what_cannot_be_read_is_left_out_with_the_reason():
    with pytest.raises(ValueError, match=r"no attention to analyze in Qwen3Model: layers.0.*normalised between"):
        collab.analyze(rotary("Qwen3Model"))
    with pytest.raises(ValueError, match="not where they could be read"):
        collab.analyze(tiny_models.tiny("GPTNeoXModel"))
    with pytest.raises(ValueError, match=r"no attention to analyze in Linear$"):
        collab.analyze(nn.Linear(2, 2))
    model = tiny_models.bert()
    model.encoder.layer[1].attention.self.key.weight.data[0, 0] = math.nan
    found = collab.analyze(model)
    assert found.left == {"encoder.layer.1.attention.self": ["key.weight must be finite, got NaN or infinity"]}
    assert "left out: encoder.layer.1.attention.self (key.weight must be finite" in str(found)
    (layer,) = collab.analyze(tiny_models.bert(), only=lambda site: ".1." in site.path).layers
    assert layer.path == "encoder.layer.1.attention.self"


def test_tied_weights_can_be_looked_at():
    model = tiny_models.bert()
    model.encoder.layer[1].attention.self.key = model.encoder.layer[0].attention.self.key
    assert all(site.why_not for site in collab.find_attention(model))
    assert len(collab.analyze(model).layers) == 2


# --- what it says


def test_json_and_table():
    model = tiny_models.bert()
    seen = []
    found = collab.analyze(model, progress=lambda steps, total: seen.append(total) or steps)
    assert seen == [2]
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    layer = values["layers"][0]
    assert layer["product"]["concatenated"] == pytest.approx(found.layers[0].product.concatenated, abs=1e-6)
    assert layer["product"]["concatenated_sizes"]["0.9"] == found.layers[0].product.concatenated_size(0.9)
    assert len(layer["similarity"]) == 4
    assert layer["closest_pairs"][0]["cosine"] == found.layers[0].closest_pairs(1)[0][2]
    table = str(found)
    sizes = "/".join(str(found.layers[0].product.concatenated_size(share)) for share in (0.9, 0.95, 0.99))
    assert sizes in table.splitlines()[2]
    assert "90/95/99%" in table


def test_plots(tmp_path):
    one_size = collab.analyze(tiny_models.bert())
    mixed = collab.Analysis([*one_size.layers, *collab.analyze(nn.MultiheadAttention(8, 1)).layers], {})
    one_size.plot(tmp_path / "0.png")
    one_size.plot(tmp_path / "0.svg")
    mixed.plot(tmp_path / "2.svg")
    assert (tmp_path / "0.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "2.svg").read_text()
    assert "their product" in drawn
    assert "as a share of all" in drawn
    assert "as a share of all" not in (tmp_path / "0.svg").read_text()
    with pytest.raises(ValueError, match=r"must end in one of .png, .svg, .pdf, got 'heads.txt'"):
        one_size.plot(tmp_path / "heads.txt")
    with pytest.raises(ValueError, match="must go to a directory that exists"):
        one_size.plot(tmp_path / "none" / "heads.png")


def test_plots_need_matplotlib(tmp_path, monkeypatch):
    found = collab.analyze(nn.MultiheadAttention(8, 2))
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="a plot needs matplotlib: pip install matplotlib"):
        found.plot(tmp_path / "heads.png")


# --- the command


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("model")
    tiny_models.bert().save_pretrained(root)
    save_tokenizer(root)
    return root


def test_the_command(folder, tmp_path):
    text = run("analyze", folder, "--plot", tmp_path / "heads.png").stdout
    assert "encoder.layer.1.attention.self" in text
    assert (tmp_path / "heads.png").is_file()
    found = json.loads(run("analyze", folder, "--json", "--only", "*.0.*").stdout)
    (layer,) = found["layers"]
    expected = collab.analyze(tiny_models.bert()).layers[0].to_dict()
    assert layer == json.loads(json.dumps(expected))
    (tmp_path / "texts.txt").write_text(TEXTS)
    found = json.loads(run("analyze", folder, "--json", "--calibrate", tmp_path / "texts.txt").stdout)
    assert {layer["metric"] for layer in found["layers"]} == {"inputs"}
    assert found["notes"]
    assert "Examples:\n    collab analyze" in run("analyze", "--help").stdout
    assert "must end in one of" in run("analyze", folder, "--plot", "x.txt", code=2).stderr
    assert "no directory" in run("analyze", "./nowhere", code=2).stderr


def test_heads_that_share_all_keys_are_measured_with_one_root_of_those():
    generator = torch.Generator().manual_seed(0)
    query, key, mixing = (torch.randn(*size, generator=generator).double() for size in ((6, 20), (6, 24), (3, 6)))
    for weights, found in zip(mixing, mixed_energies(query, key, mixing), strict=True):
        own = weights[:, None] * query
        for values, matrix in zip(found, (own, key, own.mT @ key), strict=True):
            torch.testing.assert_close(values, torch.linalg.svdvals(matrix)[:6].square())
