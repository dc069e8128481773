"""Several projections of one input as one product: the same numbers, and parameters that stay ordinary ones."""

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize, prune

import collab
import tiny_models
from collab import fused_projection
from collab.fused_projection import project_together

WIDTH, OUTPUTS = 32, (12, 16, 32)  # the first one needs padding

CUDA = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


@pytest.fixture(params=["cpu", CUDA], autouse=True)
def device(request, monkeypatch):
    """Everything here is about devices where one product is taken; the CPU is made one of them."""
    monkeypatch.setattr(fused_projection, "DEVICES", {request.param})
    return request.param


@pytest.fixture
def linears(device):
    torch.manual_seed(0)
    made = [nn.Linear(WIDTH, outputs, bias=outputs == OUTPUTS[-1], device=device) for outputs in OUTPUTS]
    return nn.ModuleList(made)


@pytest.fixture
def inputs(device):
    return torch.randn(2, 5, WIDTH, device=device)


def one_by_one(linears, inputs):
    return [linear(inputs) for linear in linears]


def together(linears, inputs):
    outputs = project_together(linears, inputs)
    assert outputs is not None
    return outputs


def assert_same(linears, inputs, tolerance=2e-6):
    """One product gives what the layers give."""
    for found, expected in zip(together(linears, inputs), one_by_one(linears, inputs), strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert (found - expected).abs().max() <= tolerance


def packed(linears):
    """What holds the weights, None where that is nothing."""
    holders = [
        getattr(part.untyped_storage(), "collab_packed", None) for part in linears.parameters() if part is not None
    ]
    assert all(holder is holders[0] for holder in holders)
    return holders[0]


def assert_ordinary(parameters):
    """Every parameter has a storage of its own, just as large as it is."""
    parameters = list(parameters)
    for parameter in parameters:
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
        assert parameter.storage_offset() == 0
        assert parameter.data_ptr() % 16 == 0
    assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == len(parameters)


@torch.no_grad()
def pack(linears, inputs):
    together(linears, inputs)
    assert packed(linears) is not None
    return linears


def stays(linears, inputs):
    """Whether layers are called one by one without gradients, with nothing moved."""
    places = [parameter.data_ptr() for parameter in linears.parameters()]
    with torch.no_grad():
        refused = project_together(linears, inputs) is None
    return refused and places == [parameter.data_ptr() for parameter in linears.parameters()]


# The product


@pytest.mark.parametrize("learns", [False, True])
def test_same_outputs_as_views_of_one_aligned_tensor(linears, inputs, learns):
    with torch.set_grad_enabled(learns):
        assert_same(linears, inputs)
        outputs = together(linears, inputs)
    assert len({output.untyped_storage().data_ptr() for output in outputs}) == 1
    assert [output.storage_offset() for output in outputs] == [0, 16, 32]
    assert all(output.stride() == (5 * 64, 64, 1) for output in outputs)
    assert all(output.requires_grad == learns for output in outputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(linears, inputs, dtype):
    exact = one_by_one(linears, inputs)
    linears.to(dtype)
    found = together(linears, inputs.to(dtype))
    own = one_by_one(linears, inputs.to(dtype))
    for one, plain, expected in zip(found, own, exact, strict=True):
        assert one.dtype == dtype
        assert (one - expected).abs().max() <= 1.5 * (plain - expected).abs().max()


@pytest.mark.parametrize("shape", [(WIDTH,), (3, WIDTH), (2, 3, 4, WIDTH), (0, 3, WIDTH), (2, 0, WIDTH)])
def test_any_batch_shape(linears, device, shape):
    for found, outputs in zip(together(linears, torch.randn(shape, device=device)), OUTPUTS, strict=True):
        assert found.shape == (*shape[:-1], outputs)


@pytest.mark.parametrize("biased", [(False, False, False), (True, True, True), (True, False, True)])
def test_any_biases(device, inputs, biased):
    linears = nn.ModuleList(
        nn.Linear(WIDTH, outputs, bias=bias, device=device) for outputs, bias in zip(OUTPUTS, biased, strict=True)
    )
    with torch.no_grad():
        assert_same(linears, inputs)
    assert_same(linears, inputs)
    assert_ordinary(linears.parameters())


def gradients(outputs, wanted):
    torch.manual_seed(1)
    return torch.autograd.grad([output.square() * torch.randn_like(output) for output in outputs], wanted, outputs)


@pytest.mark.parametrize("way", ["packed", "concatenated"])
def test_gradients(linears, inputs, way):
    inputs.requires_grad_()
    wanted = [inputs, *linears.parameters()]
    expected = gradients(one_by_one(linears, inputs), wanted)
    held = linears.state_dict() if way == "concatenated" else None  # who knows of the memory keeps it where it is
    found = gradients(together(linears, inputs), wanted)
    assert (packed(linears) is None) == (held is not None)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("way", ["packed", "concatenated"])
def test_some_parameters_learn(linears, inputs, way):
    linears[1].weight.requires_grad_(False)
    linears[2].bias.requires_grad_(False)
    held = linears.state_dict() if way == "concatenated" else None
    inputs.requires_grad_()
    wanted = [inputs, linears[0].weight, linears[2].weight]
    expected = gradients(one_by_one(linears, inputs), wanted)
    found = gradients(together(linears, inputs), wanted)
    assert (packed(linears) is None) == (held is not None)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    together(linears, inputs)[0].sum().backward()
    assert linears[1].weight.grad is None
    assert linears[2].bias.grad is None


def test_only_inputs_learn(linears, inputs):
    linears.requires_grad_(False)
    inputs.requires_grad_()
    expected = gradients(one_by_one(linears, inputs), [inputs])[0]
    assert torch.allclose(gradients(together(linears, inputs), [inputs])[0], expected, rtol=1e-4, atol=1e-5)


def test_second_derivatives(linears, inputs):
    linears.double()
    inputs = inputs[:1, :2].double().requires_grad_()
    parameters = tuple(linears.parameters())

    def outputs(inputs, *parameters):
        return tuple(together(linears, inputs))

    assert torch.autograd.gradcheck(outputs, (inputs, *parameters))
    assert torch.autograd.gradgradcheck(outputs, (inputs, *parameters))


def test_weights_changed_before_backward_are_an_error_as_ever(linears, inputs):
    output = together(linears, inputs)[0].square().sum()
    with torch.no_grad():
        linears[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_training_steps_are_those_of_the_layers(linears, inputs):
    other = copy.deepcopy(linears)
    losses = []
    for model, project in ((linears, together), (other, one_by_one)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(5):
            loss = sum((output - 1).square().mean() for output in project(model, inputs))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert packed(linears) is not None
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_autocast(linears, inputs, device):
    """Weights are cast together when they learn; without gradients one by one, so that autocast can keep them."""
    with torch.autocast(device, torch.bfloat16):
        expected = one_by_one(linears, inputs)
        found = together(linears, inputs)
        assert stays(linears, inputs)
    assert all(one.dtype == torch.bfloat16 for one in found)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 0.02
    wanted = list(linears.parameters())
    for one, other in zip(gradients(found, wanted), gradients(expected, wanted), strict=True):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() <= 0.02 * other.abs().max()
    linears.to(torch.bfloat16)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        assert together(linears, inputs)[0].dtype == torch.bfloat16


# Memory


def test_memory_is_held_once_and_no_call_copies_it(linears, inputs):
    before = {name: value.clone() for name, value in linears.state_dict().items()}
    objects = list(linears.parameters())
    pack(linears, inputs)
    holder = packed(linears)
    assert_ordinary(linears.parameters())
    assert [id(parameter) for parameter in linears.parameters()] == [id(one) for one in objects]
    start, rows = holder.weight.data_ptr(), WIDTH * holder.weight.element_size()
    assert [linear.weight.data_ptr() - start for linear in linears] == [0, 16 * rows, 32 * rows]
    assert list(linears.state_dict()) == list(before)
    assert all(value.equal(before[name]) for name, value in linears.state_dict().items())
    for learns in (True, False, True):
        with torch.set_grad_enabled(learns):
            together(linears, inputs)
        assert packed(linears) is holder


def test_updates_in_place_reach_the_product(linears, inputs):
    pack(linears, inputs)
    holder = packed(linears)
    with torch.no_grad():
        for parameter in linears.parameters():
            parameter.mul_(-2).add_(0.1)
    fresh = {name: torch.randn_like(value) for name, value in linears.state_dict().items()}
    with torch.no_grad():
        assert_same(linears, inputs)
        linears.load_state_dict(fresh)
        assert_same(linears, inputs)
        linears[1].weight.data.fill_(0.5)
        assert_same(linears, inputs)
    assert packed(linears) is holder


def test_nothing_is_left_behind_when_parameters_leave(linears, inputs):
    pack(linears, inputs)
    memory = weakref.ref(packed(linears).weight)
    linears.double()
    gc.collect()
    assert memory() is None
    pack(linears, inputs.double())
    memory = weakref.ref(packed(linears).weight)
    with torch.no_grad():
        assert_same(linears, inputs.double(), 1e-12)
    del linears[:]
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("index", [0, 1, 2])
def test_replaced_parameters(linears, inputs, index):
    pack(linears, inputs)
    linears[index].weight = nn.Parameter(torch.randn(20, WIDTH, device=inputs.device))
    linears[index].bias = None
    with torch.no_grad():
        assert_same(linears, inputs)
    assert_ordinary(linears.parameters())


def test_new_data_in_the_same_parameters(linears, inputs):
    pack(linears, inputs)
    for linear in linears:
        linear.weight.data = torch.randn_like(linear.weight)
    with torch.no_grad():
        assert_same(linears, inputs)
    linears.load_state_dict(
        {name: torch.randn_like(value) for name, value in linears.state_dict().items()}, assign=True
    )
    with torch.no_grad():
        assert_same(linears, inputs)
    assert packed(linears) is not None


def test_copies_are_on_their_own(linears, inputs):
    pack(linears, inputs)
    copied = copy.deepcopy(linears)
    assert_ordinary([*linears.parameters(), *copied.parameters()])
    pack(copied, inputs)
    with torch.no_grad():
        copied[0].weight.zero_()
        assert_same(linears, inputs)
        assert_same(copied, inputs)
        assert linears[0].weight.any()


@pytest.mark.parametrize("way", ["pickle", "torch"])
def test_written_at_its_own_size_and_read_again(linears, inputs, way):
    def written(module):
        if way == "pickle":
            return pickle.dumps(module)
        file = io.BytesIO()
        torch.save(module, file)
        return file.getvalue()

    plain = len(written(linears))
    pack(linears, inputs)
    file = written(linears)
    assert abs(len(file) - plain) <= 200
    again = pickle.loads(file) if way == "pickle" else torch.load(io.BytesIO(file), weights_only=False)
    assert_ordinary(again.parameters())
    for one, other in zip(again.parameters(), linears.parameters(), strict=True):
        assert one.equal(other)
    with torch.no_grad():
        assert_same(again, inputs)
    one_weight = io.BytesIO()
    torch.save(linears[0].weight, one_weight)
    assert len(one_weight.getvalue()) < 2 * linears[0].weight.nbytes + 2000


def test_safetensors(linears, inputs, tmp_path):
    pack(linears, inputs)
    save_file(linears.state_dict(), tmp_path / "weights.safetensors")
    read = load_file(tmp_path / "weights.safetensors", device=str(inputs.device))
    assert read.keys() == linears.state_dict().keys()
    assert all(value.equal(read[name]) for name, value in linears.state_dict().items())


def test_accelerate_keeps_every_weight(linears, inputs):
    other = pytest.importorskip("accelerate.utils.other")
    pack(linears, inputs)
    assert other.clean_state_dict_for_safetensors(linears.state_dict()).keys() == linears.state_dict().keys()


def test_parameters_of_several_modules(linears, inputs):
    """A tied parameter stays tied; who shares some of packed parameters does not take them from there."""
    tied = nn.Linear(WIDTH, OUTPUTS[0], bias=False)
    tied.weight = linears[0].weight
    pack(linears, inputs)
    assert tied.weight is linears[0].weight
    holder = packed(linears)
    others = nn.ModuleList([tied, *(nn.Linear(WIDTH, 8, device=inputs.device) for _ in range(2))])
    assert stays(others, inputs)
    assert_same(others, inputs)  # with gradients, from a copy
    with torch.no_grad():
        assert_same(linears, inputs)
    assert packed(linears) is holder


def test_one_parameter_for_two_roles(linears, inputs):
    linears[1] = linears[0]
    assert stays(linears, inputs)
    assert_same(linears, inputs)
    expected = gradients(one_by_one(linears, inputs), [linears[0].weight])[0]
    assert torch.allclose(gradients(together(linears, inputs), [linears[0].weight])[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alias", ["whole", "part of it", "larger"])
def test_memory_that_others_know_of_stays_theirs(linears, inputs, alias):
    weight = linears[1].weight
    if alias == "larger":
        flat = torch.randn(2 * weight.numel(), device=inputs.device)
        weight.data = flat[: weight.numel()].view_as(weight)
    else:
        flat = weight.data if alias == "whole" else weight.data[:3]
    assert stays(linears, inputs)
    assert_same(linears, inputs)
    flat.zero_()
    assert not weight[:3].any()
    del flat
    if alias != "larger":
        pack(linears, inputs)


def test_memory_shared_with_processes_stays_shared(linears, inputs, device):
    if device == "cuda":
        pytest.skip("CUDA memory always counts as shared")
    linears.share_memory()
    assert stays(linears, inputs)
    assert all(parameter.is_shared() for parameter in linears.parameters())


def test_packed_memory_can_be_shared_with_processes(linears, inputs, device):
    pack(linears, inputs)
    linears.share_memory()
    with torch.no_grad():
        linears[0].weight.zero_()
        outputs = project_together(linears, inputs)
    assert all(parameter.is_shared() for parameter in linears.parameters())
    assert outputs is None if device == "cpu" else not outputs[0].any()


def test_inference_mode(linears, inputs):
    with torch.inference_mode():
        assert_same(linears, inputs)
    assert packed(linears) is not None
    assert not any(parameter.is_inference() for parameter in linears.parameters())
    sum(output.sum() for output in together(linears, inputs)).backward()
    assert all(parameter.grad is not None for parameter in linears.parameters())
    with torch.inference_mode():
        born_there = nn.ModuleList(nn.Linear(WIDTH, outputs, device=inputs.device) for outputs in OUTPUTS)
        assert stays(born_there, inputs)


def test_threads(linears, inputs):
    expected = [output.detach() for output in one_by_one(linears, inputs)]
    wrong = []

    def run():
        with torch.no_grad():
            for _ in range(20):
                found = together(linears, inputs)
                if any((one - other).abs().max() > 1e-5 for one, other in zip(found, expected, strict=True)):
                    wrong.append(found)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert packed(linears) is not None


# What is called one by one


class Sub(nn.Linear):
    """A linear layer that may do anything."""


class Marked(torch.Tensor):
    """A tensor that may be anything."""


def pruned(linear):
    prune.l1_unstructured(linear, "weight", 0.5)
    return linear


def parametrised(linear):
    return parametrize.register_parametrization(linear, "weight", nn.Identity())


def hooked(name):
    def register(linear):
        getattr(linear, name)(lambda *args: None)
        return linear

    return register


def with_other_forward(linear):
    linear.forward = lambda inputs: inputs[..., :12]
    return linear


def of_subclass(linear):
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(Marked))
    return linear


def replica(linear):
    made = linear._replicate_for_data_parallel()
    made.weight, made.bias = linear.weight * 1, None
    return made


UNUSUAL = {
    "subclass of Linear": lambda linear: Sub(WIDTH, 12, device=linear.weight.device),
    "another module": lambda linear: nn.Sequential(linear),
    "pruned": pruned,
    "parametrised": parametrised,
    "forward hook": hooked("register_forward_hook"),
    "forward pre-hook": hooked("register_forward_pre_hook"),
    "backward hook": hooked("register_full_backward_hook"),
    "backward pre-hook": hooked("register_full_backward_pre_hook"),
    "replaced forward": with_other_forward,
    "tensor subclass": of_subclass,
    "other type": lambda linear: linear.double(),
    "other device": lambda linear: linear.to("meta"),
    "other width": lambda linear: nn.Linear(WIDTH + 1, 12, device=linear.weight.device),
    "replica of data parallel": replica,
}


@pytest.mark.parametrize("after", [False, True], ids=["at first", "once packed"])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_layers_are_called_one_by_one(linears, inputs, kind, after):
    if after:
        pack(linears, inputs)
    linears[0] = UNUSUAL[kind](linears[0])
    assert stays(linears, inputs)
    assert project_together(linears, inputs) is None


def test_hooks_on_all_modules_are_called(linears, inputs):
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert project_together(linears, inputs) is None
    finally:
        handle.remove()
    together(linears, inputs)


def test_unusual_inputs_and_devices_are_left_to_the_layers(linears, inputs, monkeypatch):
    assert stays(linears, inputs.as_subclass(Marked))
    assert stays(linears, inputs.double())
    assert stays(linears, inputs.to("meta"))
    assert stays(linears, torch.randn(2, WIDTH + 1, device=inputs.device))
    monkeypatch.setattr(fused_projection, "DEVICES", set())
    assert stays(linears, inputs)


def test_watching_inputs_still_works(device):
    model = tiny_models.bert().to(device)
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=12, max_iterations=2))
    batch = {name: value.to(device) for name, value in tiny_models.inputs_for(model).items()}
    with torch.no_grad():
        model(**batch)
    site = collab.find_attention(model)[0]
    seen = []
    handles = site.host.watch_inputs(site.module, lambda role, inputs: seen.append(role))
    with torch.no_grad():
        model(**batch)
    assert seen == ["query", "key"]
    for handle in handles:
        handle.remove()


# Graphs


class Layers(nn.Module):
    """Three layers that read the same input, together where they may."""

    def __init__(self, linears):
        super().__init__()
        self.linears = linears

    def forward(self, inputs):
        outputs = project_together(self.linears, inputs)
        return tuple(one_by_one(self.linears, inputs) if outputs is None else outputs)


def products(nodes):
    return sum("linear" in str(node.target) and node.op == "call_function" for node in nodes)


@pytest.mark.parametrize("learns", [False, True])
def test_compiled_without_a_break(linears, inputs, learns):
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph

    with torch.set_grad_enabled(learns):
        expected = one_by_one(linears, inputs)
        for found, other in zip(
            torch.compile(Layers(linears), fullgraph=True, backend=backend)(inputs), expected, strict=True
        ):
            assert (found - other).abs().max() <= 1e-6
    assert [products(graph.graph.nodes) for graph in graphs] == [1]
    assert packed(linears) is None


@pytest.mark.parametrize("strict", [False, True])
def test_exported_as_separate_layers(linears, inputs, strict):
    program = torch.export.export(Layers(linears), (inputs,), strict=strict)
    assert products(program.graph.nodes) == 3


@pytest.mark.filterwarnings("ignore")
def test_traced_as_separate_layers(linears, inputs):
    assert str(torch.jit.trace(Layers(linears), (inputs,)).inlined_graph).count("aten::linear") == 3


def test_function_transforms(linears, inputs):
    model = Layers(linears)

    def loss(inputs):
        return sum(output.square().sum() for output in model(inputs))

    many = torch.stack((inputs, 2 * inputs))
    for found, expected in zip(torch.func.vmap(model)(many), one_by_one(linears, many), strict=True):
        assert (found - expected).abs().max() <= 1e-5
    slopes = torch.func.vmap(torch.func.grad(loss))(many)
    expected = torch.func.vmap(
        torch.func.grad(lambda inputs: sum(one.square().sum() for one in one_by_one(linears, inputs)))
    )(many)
    assert torch.allclose(slopes, expected, rtol=1e-4, atol=1e-4)
    parameters = dict(model.named_parameters())
    found = torch.func.grad(
        lambda given: sum(one.square().sum() for one in torch.func.functional_call(model, given, (inputs,)))
    )(parameters)
    expected = torch.autograd.grad(
        sum(one.square().sum() for one in one_by_one(linears, inputs)), list(parameters.values())
    )
    for one, other in zip(found.values(), expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("warm", [True, False])
def test_cuda_graph(linears, inputs, device, warm):
    """Weights move before a graph is captured or never: its kernels look where they were then."""
    if device != "cuda":
        pytest.skip("needs a CUDA device")
    model = Layers(linears)
    with torch.no_grad():
        expected = [output.clone() for output in one_by_one(linears, inputs)]
        if warm:
            model(inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(inputs)
        model(inputs)
        assert (project_together(linears, inputs) is not None) == warm
        for scale in (1, 2):
            graph.replay()
            for found, other in zip(captured, expected, strict=True):
                assert (found - scale * other).abs().max() <= 1e-5
            for parameter in linears.parameters():
                parameter.mul_(2)


# The layer and the hosts


@pytest.fixture
def layer(device):
    torch.manual_seed(0)
    made = collab.CollaborativeAttention(WIDTH, 4, 12, device=device)
    nn.init.normal_(made.value.bias)
    return made


def separately(monkeypatch, model, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(fused_projection, "DEVICES", set())
        return model(*args, **kwargs)


def own_linears(layer):
    return nn.ModuleList([layer.query, layer.key, layer.value])


@pytest.mark.parametrize("shape", [(5, WIDTH), (2, 5, WIDTH), (2, 3, 5, WIDTH)])
def test_the_layer_takes_one_product_of_one_input(layer, monkeypatch, device, shape):
    inputs = torch.randn(shape, device=device)
    expected = separately(monkeypatch, layer, inputs)
    assert packed(own_linears(layer)) is None
    assert (layer(inputs) - expected).abs().max() <= 1e-5
    assert packed(own_linears(layer)) is not None


def test_the_layer_takes_three_products_of_two_inputs(layer, device):
    inputs, others = torch.randn(2, 2, 5, WIDTH, device=device)
    with torch.no_grad():
        layer(inputs, others)
        layer(others, others, inputs)
    assert packed(own_linears(layer)) is None


def test_the_layer_is_written_and_read_after_packing(layer, device, tmp_path):
    inputs = torch.randn(2, 5, WIDTH, device=device)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with torch.no_grad():
        expected = layer(inputs)
    assert packed(own_linears(layer)) is not None
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    read = load_file(tmp_path / "layer.safetensors", device=device)
    assert list(read) == sorted(before)
    assert all(read[name].equal(value) for name, value in before.items())
    other = collab.CollaborativeAttention(WIDTH, 4, 12, device=device)
    with torch.no_grad():
        other(inputs)
        other.load_state_dict(read)
        assert other(inputs).equal(expected)


@pytest.mark.parametrize("name", ["bert", "vit", "clip", "bart", "t5", "opt", "whisper", "gpt2"])
def test_models(name, device, monkeypatch):
    model = getattr(tiny_models, name)().to(device)
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=12, max_iterations=2))
    inputs = {key: value.to(device) for key, value in tiny_models.inputs_for(model).items()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        expected = separately(monkeypatch, model, **inputs)[0]
        found = model(**inputs)[0]
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    held = [hasattr(parameter.untyped_storage(), "collab_packed") for parameter in model.parameters()]
    assert any(held) == (name != "gpt2")  # whose projections are one layer already
    assert all(value.equal(state[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("way", ["collab.save", "save_pretrained"])
def test_converted_models_are_written_and_read_after_packing(device, tmp_path, way):
    model = tiny_models.bert().to(device)
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=12, max_iterations=2))
    collab.save(model, tmp_path / "before")
    inputs = {name: value.to(device) for name, value in tiny_models.inputs_for(model).items()}
    with torch.no_grad():
        expected = model(**inputs)[0]
    assert any(hasattr(parameter.untyped_storage(), "collab_packed") for parameter in model.parameters())
    if way == "collab.save":
        collab.save(model, tmp_path / "after")
    else:
        model.save_pretrained(tmp_path / "after")
    files = [(tmp_path / when / "model.safetensors").read_bytes() for when in ("before", "after")]
    assert files[0] == files[1]
    with torch.no_grad():
        assert collab.load(tmp_path / "after", device=device)(**inputs)[0].equal(expected)


def test_a_model_swapped_again_after_packing(device, monkeypatch):
    model = tiny_models.bert().to(device)
    inputs = {name: value.to(device) for name, value in tiny_models.inputs_for(model).items()}
    copied = copy.deepcopy(model)
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=12, max_iterations=2))
    with torch.no_grad():
        model(**inputs)
    again = copy.deepcopy(model)
    site = collab.find_attention(again)[0]
    shared = site.host.shared_weights(site.module)
    with torch.no_grad():
        shared.query.mul_(2)
        site.module.query.weight = nn.Parameter(shared.query)
        expected = separately(monkeypatch, again, **inputs)[0]
        assert (again(**inputs)[0] - expected).abs().max() <= 1e-5
        assert not again(**inputs)[0].equal(model(**inputs)[0])
        assert copied(**inputs)[0].isfinite().all()


def test_lora_after_packing(device):
    peft = pytest.importorskip("peft")
    model = tiny_models.bert().to(device)
    collab.collaborate_(model, collab.CollaborativeConfig(shared_dim=12, max_iterations=2))
    inputs = {name: value.to(device) for name, value in tiny_models.inputs_for(model).items()}
    with torch.no_grad():
        plain = model(**inputs)[0]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"], init_lora_weights=False))
    with torch.no_grad():
        expected = adapted(**inputs)[0]
        merged = adapted.merge_and_unload()
        found = merged(**inputs)[0]
    assert not torch.allclose(plain, expected, atol=1e-3)
    assert torch.allclose(found, expected, atol=1e-4)
    assert hasattr(collab.find_attention(merged)[0].module.query.weight.untyped_storage(), "collab_packed")
