import copy
import math

import pytest
import torch
from torch import nn

import collab
import tiny_models
from collab import evaluate


class Fixed(nn.Module):
    """Gives the output it was made with, whatever it is asked."""

    def __init__(self, output, **attributes):
        super().__init__()
        self.output = output
        self.dropout = nn.Dropout(0.5)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *arguments, **named):
        assert not self.training
        assert not torch.is_grad_enabled()
        return self.output


def outputs(seed=0, shape=(3, 5, 8)):
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(shape, generator=generator)
    return first, first + 0.3 * torch.randn(shape, generator=generator)


def test_measures_are_what_their_names_say():
    first, second = outputs()
    found = evaluate.compare(Fixed(first), Fixed(second), [torch.zeros(1)])
    rows = list(zip(first.reshape(-1, 8).double(), second.reshape(-1, 8).double(), strict=True))
    cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in rows]
    assert found.output == "output"
    assert found.positions == 15
    assert found.mean_cosine == pytest.approx(sum(cosines) / 15, abs=1e-12)
    assert found.min_cosine == pytest.approx(min(cosines), abs=1e-12)
    assert found.max_abs == float((first.double() - second.double()).abs().max())
    assert found.relative == pytest.approx(float((first - second).norm() / first.norm()), rel=1e-5)
    pooled = torch.cosine_similarity(first.double().mean(1), second.double().mean(1), dim=-1)
    assert found.pooled_cosine == pytest.approx(float(pooled.mean()), abs=1e-12)
    assert found.kl is None
    assert found.same_top is None


def test_kl_is_of_the_original_from_the_converted_in_nats():
    first, second = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25], [0.6, 0.4]]).log()
    found = evaluate.compare(Fixed({"loss": torch.tensor(0.0), "logits": first}), Fixed({"logits": second}), [{}])
    expected = 0.25 * math.log(0.25 / 0.75) + 0.75 * math.log(3) + 0.5 * math.log(0.5 / 0.6) + 0.5 * math.log(0.5 / 0.4)
    assert found.output == "logits"
    assert found.kl == pytest.approx(expected / 2, rel=1e-6)
    assert found.same_top == 0.5
    assert found.pooled_cosine is None


@pytest.mark.parametrize("name", ["logits", "last_hidden_state"])
def test_padding_does_not_count(name):
    first, second = outputs()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]])
    ruined = second.masked_fill(mask[..., None] == 0, float("nan"))
    padded = evaluate.compare(Fixed({name: first}), Fixed({name: ruined}), [{"attention_mask": mask}])
    rows = [(a[keep][None], b[keep][None]) for a, b, keep in zip(first, second, mask == 1, strict=True)]
    apart = [evaluate.compare(Fixed({name: a}), Fixed({name: b}), [{}]) for a, b in rows]
    weights = torch.tensor([part.positions for part in apart]).double() / 11
    assert padded.positions == 11
    for measure in ("mean_cosine", "kl" if name == "logits" else "mean_cosine"):
        values = torch.tensor([getattr(part, measure) for part in apart], dtype=torch.float64)
        assert getattr(padded, measure) == pytest.approx(float(weights @ values), abs=1e-12)
    assert padded.max_abs == max(part.max_abs for part in apart)
    if name == "last_hidden_state":
        assert padded.pooled_cosine == pytest.approx(sum(part.pooled_cosine for part in apart) / 3, abs=1e-12)


def test_chunks_and_batches_do_not_change_the_answer(monkeypatch):
    first, second = outputs()
    whole = evaluate.compare(Fixed({"logits": first}), Fixed({"logits": second}), [{}]).to_dict()
    monkeypatch.setattr(evaluate, "_CHUNK", 16)
    chunked = evaluate.compare(Fixed({"logits": first}), Fixed({"logits": second}), [{}]).to_dict()
    twice = evaluate.compare(Fixed({"logits": first}), Fixed({"logits": second}), iter([{}, {}])).to_dict()
    assert twice.pop("positions") == 2 * whole["positions"]
    assert chunked == pytest.approx(whole)
    assert twice == pytest.approx({name: value for name, value in whole.items() if name != "positions"})


def test_modes_are_restored_module_by_module_also_after_an_error():
    first, second = (Fixed(part) for part in outputs())
    first.train()
    first.dropout.eval()
    second.eval()
    with pytest.raises(ValueError, match="mapping, a tensor or a tuple, got str"):
        evaluate.compare(first, second, [torch.zeros(1), "text"])
    assert (first.training, first.dropout.training) == (True, False)
    assert (second.training, second.dropout.training) == (False, False)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), r"output \(2, 3\) from Fixed and output \(2, 4\)"),
        ({"logits": torch.ones(2, 3)}, torch.ones(2, 3), r"logits \(2, 3\) from Fixed and output \(2, 3\)"),
        (torch.ones(2, 3), torch.full((2, 3), float("nan")), "output of the converted model must be finite"),
        (
            torch.ones(2, 3, dtype=torch.long),
            torch.ones(2, 3),
            "Fixed must give floating .* got integers",
        ),
        ((), torch.ones(2, 3), "Fixed must give floating .* got tuple"),
    ],
)
def test_outputs_that_cannot_be_compared(first, second, message):
    with pytest.raises(ValueError, match=message):
        evaluate.compare(Fixed(first), Fixed(second), [torch.zeros(1)])


def test_nothing_to_compare():
    first, second = (Fixed({"last_hidden_state": part}) for part in outputs())
    with pytest.raises(ValueError, match="at least one position that is not padding"):
        evaluate.compare(first, second, [])
    with pytest.raises(ValueError, match="at least one position that is not padding"):
        evaluate.compare(first, second, [{"attention_mask": torch.zeros(3, 5)}])


def test_classifiers_that_say_how_many_classes_they_have_give_logits():
    first, second = outputs(shape=(4, 8))
    found = evaluate.compare(Fixed(first, num_classes=8), Fixed(second, num_classes=8), [(torch.zeros(1),)])
    assert found.output == "logits"
    assert found.kl > 0
    assert found.positions == 4


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5", "vit"])
def test_transformers_models(kind):
    model = getattr(tiny_models, kind)()
    batch = tiny_models.inputs_for(model)
    exact, rough = copy.deepcopy(model), copy.deepcopy(model)
    collab.collaborate_(exact, collab.CollaborativeConfig(shared_dim=1.0))
    collab.collaborate_(rough, collab.CollaborativeConfig(shared_dim=0.25))
    found = collab.compare(model, exact, [batch])
    assert found.max_abs < 1e-5
    assert collab.compare(model, rough, [batch]).mean_cosine < found.mean_cosine
    assert collab.compare(model, model, [batch]).max_abs == 0


def test_padded_positions_of_a_decoder_are_found_in_its_own_mask_or_labels():
    first, second = outputs()
    config = type("Config", (), {"is_encoder_decoder": True})
    models = [Fixed({"logits": part}, config=config) for part in (first, second)]
    mask = torch.tensor([[1, 1, 1, 1, 0]]).expand(3, 5)
    labels = torch.where(mask == 1, 4, -100)
    everything = torch.ones(3, 5)
    for batch in ({"decoder_attention_mask": mask}, {"labels": labels}):
        assert evaluate.compare(*models, [batch | {"attention_mask": everything}]).positions == 12
    assert evaluate.compare(*models, [{"attention_mask": mask}]).positions == 15


def test_padding_of_an_encoder_on_its_own_is_in_the_usual_mask():
    class TinyEncoder(Fixed):
        pass

    config = type("Config", (), {"is_encoder_decoder": True})
    models = [TinyEncoder({"last_hidden_state": part}, config=config) for part in outputs()]
    mask = torch.tensor([[1, 1, 1, 1, 0]]).expand(3, 5)
    assert evaluate.compare(*models, [{"attention_mask": mask}]).positions == 12


def test_prints_as_a_table_without_what_was_not_measured():
    first, second = outputs()
    text = str(evaluate.compare(Fixed(first), Fixed(second), [torch.zeros(1)]))
    assert "mean_cosine" in text
    assert "kl" not in text
    assert f"{evaluate.compare(Fixed(first), Fixed(second), [torch.zeros(1)]).max_abs:.6g}" in text
