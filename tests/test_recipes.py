"""The training core: settings, a run's folder, and the loop, which one process and several run alike, killed or not."""

import copy
import json
import sys
from dataclasses import dataclass, field

import pytest
import torch
from torch.utils.data import default_collate
from typer.testing import CliRunner

import tiny_models
from collab import train_commands
from collab.commands import app
from collab.recipes import fitting_loop, processes
from collab.recipes.batches import length_sorted_batches, shuffled_batches
from collab.recipes.fitting_loop import fit
from collab.recipes.many import DONE, Run
from collab.recipes.settings import FitSettings, RecipeConfig, read_config
from collab.recipes.work import Work, write_json
from collab.records import RunRecord, read_records
from fit_in_process import examples, in_processes, settings, train, train_forked


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    rate: float = field(default=1e-3, metadata={"help": "a rate"})
    sizes: tuple[int, ...] = (64,)
    betas: tuple[float, float] = (0.9, 0.98)
    name: str | None = None
    share: int | float = 1
    fast: bool = False


# Settings.


def test_settings_are_read_from_yaml_and_overridden(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("rate: 2e-5\nsizes: [256, 128]\nfast: yes\nname: 7\n")
    config = read_config(Config, file, {"sizes": "64,32", "share": "0.5", "seed": "3"})
    assert config == Config(rate=2e-5, sizes=(64, 32), fast=True, name="7", share=0.5, seed=3)
    assert read_config(Config, file, {"name": "none", "sizes": "8"}) == Config(rate=2e-5, sizes=(8,), fast=True)
    assert config.to_dict()["sizes"] == [64, 32]
    shares = [read_config(Config, None, {"share": share}).share for share in (1, "1", 1.0, "1.0")]
    assert [type(share) for share in shares] == [int, int, float, float]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"speed": 1}, "unknown setting speed; known are seed, device, precision, threads, rate, sizes"),
        ({"rate": "fast"}, "rate must be a number, got 'fast'"),
        ({"sizes": "64,x"}, "sizes must be an integer, got 'x'"),
        ({"sizes": [1.5]}, "sizes must be an integer, got 1.5"),
        ({"betas": "0.9"}, "betas must have 2 values, got '0.9'"),
        ({"fast": "maybe"}, "fast must be true or false, got 'maybe'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"precision": "int8"}, "precision must be one of auto, fp32, tf32, bf16, fp16, got 'int8'"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        read_config(Config, None, given)


def test_a_file_that_is_not_settings_is_refused(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="must hold settings"):
        read_config(Config, tmp_path / "list.yaml", {})


def test_the_length_of_a_training_must_be_given():
    with pytest.raises(ValueError, match="epochs or max_steps must be given, got neither"):
        FitSettings()
    assert fitting_loop.total_steps(FitSettings(epochs=2.5, max_steps=40), 10) == 25
    assert fitting_loop.total_steps(FitSettings(epochs=5, max_steps=40), 10) == 40


def test_schedules():
    linear = FitSettings(max_steps=1, warmup_steps=4)
    assert [linear.rate_at(step, 14) for step in (0, 3, 4, 9, 14)] == pytest.approx([0.2, 0.8, 1, 0.5, 0])
    cosine = FitSettings(max_steps=1, schedule="cosine", warmup_share=0.2, final_share=0.1)
    assert [cosine.rate_at(step, 10) for step in (1, 2, 6, 10)] == pytest.approx([2 / 3, 1, 0.55, 0.1])
    root = FitSettings(max_steps=1, schedule="inverse_sqrt", warmup_steps=3)
    assert [root.rate_at(step, 99) for step in (0, 3, 15)] == pytest.approx([0.25, 1, 0.5])


# A run's folder.


def test_a_step_is_done_once(tmp_path):
    calls = []

    def function():
        calls.append(1)
        return {"score": (1, 2)}

    for _ in range(2):
        work = Work(tmp_path, progress=False)
        assert work.step("a/b", function) == {"score": [1, 2]}
    assert len(calls) == 1
    assert json.loads((tmp_path / "steps/a/b.json").read_text()) == {"result": {"score": [1, 2]}}
    assert work.is_done("a/b")
    assert not work.is_done("a")
    with pytest.raises(ValueError, match=r"must be like a or a/b, got '../b'"):
        work.step("../b", function)


def test_a_step_that_fails_is_done_again(tmp_path):
    work = Work(tmp_path, progress=False)
    with pytest.raises(ZeroDivisionError):
        work.step("a", lambda: 1 / 0)
    assert work.step("a", lambda: None) is None
    assert work.step("a", lambda: 1) is None


# Batches.


def test_batches_hold_every_example_once_in_an_order_of_the_seed_and_epoch():
    lengths = [index % 7 for index in range(23)]
    for make in (lambda seed: shuffled_batches(23, 4, seed), lambda seed: length_sorted_batches(lengths, 4, seed)):
        first = make(0)(0)
        assert sorted(index for batch in first for index in batch) == list(range(23))
        assert first == make(0)(0)
        assert first != make(0)(1)
        assert first != make(1)(0)
    for batch in length_sorted_batches(lengths, 4, 0)(3):
        assert max(lengths[index] for index in batch) - min(lengths[index] for index in batch) <= 2


# The loop.


def assert_alike(some, others, atol):
    """Equal weights, but for key biases: softmax ignores them, so Adam follows nothing but rounding there."""
    some, others = ({name: value for name, value in of.items() if "key.bias" not in name} for of in (some, others))
    torch.testing.assert_close(some, others, atol=atol, rtol=0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A training with dropout: its result and weights."""
    return train_forked(tmp_path_factory.mktemp("undisturbed"), dropout=0.1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same without dropout, which differs between one process and several."""
    return train(tmp_path_factory.mktemp("alone"))


def test_a_training_ends_as_it_was_asked_to(undisturbed):
    result, _ = undisturbed
    assert result.steps == 6
    assert [step for step, _ in result.losses] == [1, 2, 3, 4, 5, 6]
    assert result.seconds > 0
    assert 0 <= result.waiting <= 1
    assert result.peak_memory is None
    assert result.examples_per_second == pytest.approx(22 / result.seconds)


def test_a_training_may_be_ended_before_its_time(tmp_path):
    model = tiny_models.tiny("BertForSequenceClassification")
    result = fit(
        model, examples(), settings(log_every=2), tmp_path, after_step=lambda step, model: step == 3, progress=False
    )
    assert result.steps == 3
    assert [step for step, _ in result.losses] == [2, 3]
    assert result.examples_per_second == pytest.approx(11 / result.seconds)


def test_it_is_plain_adam_on_the_mean_loss(tmp_path):
    """Pinned by hand: the same steps, written out."""
    ours, theirs = (tiny_models.tiny("BertForSequenceClassification") for _ in range(2))
    chosen = settings(epochs=1, schedule="constant", max_grad_norm=0, accumulate=2)
    losses = fit(ours, examples(), chosen, tmp_path, progress=False).losses
    optimiser = torch.optim.Adam(theirs.parameters(), lr=1e-3)
    theirs.train()
    for (_, loss), batch in zip(losses, shuffled_batches(11, 5, 1)(0), strict=True):
        expected = theirs(**default_collate([examples()[index] for index in batch])).loss
        assert loss == pytest.approx(expected.item(), abs=1e-6)
        optimiser.zero_grad()
        expected.backward()
        optimiser.step()
    assert_alike(ours.state_dict(), theirs.state_dict(), 2e-5)


@pytest.mark.parametrize("given", [{}, {"fsdp": True}, {"accumulate": 2}], ids=["ddp", "fsdp2", "ddp, in parts"])
def test_two_processes_train_like_one(given, alone, tmp_path):
    def function():
        done = train(tmp_path, **given)
        if processes.is_main():
            torch.save(done, tmp_path / "done.pt")

    assert in_processes(2, function) == [0, 0]
    result, weights = torch.load(tmp_path / "done.pt", weights_only=False)
    expected, expected_weights = alone
    assert [loss for _, loss in result.losses] == pytest.approx([loss for _, loss in expected.losses], abs=1e-5)
    assert_alike(weights, expected_weights, 1e-4)


def test_sharded_processes_that_were_killed_go_on(alone, tmp_path):
    def function(**given):
        done = train(tmp_path, fsdp=True, checkpoint_every=2, **given)
        if processes.is_main():
            torch.save(done, tmp_path / "done.pt")

    assert in_processes(2, lambda: function(kill=3)) == [-9, -9]
    assert in_processes(2, function) == [0, 0]
    result, weights = torch.load(tmp_path / "done.pt", weights_only=False)
    assert [step for step, _ in result.losses] == [1, 2, 3, 4, 5, 6]
    assert_alike(weights, alone[1], 1e-4)


def test_a_killed_training_ends_with_the_same_weights(undisturbed, tmp_path):
    assert in_processes(1, lambda: train(tmp_path, dropout=0.1, checkpoint_every=2, kill=5)) == [-9]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-4"]  # older ones go
    with (tmp_path / "losses.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # as if killed while writing
    result, weights = train_forked(tmp_path, dropout=0.1, checkpoint_every=2)
    expected, expected_weights = undisturbed
    torch.testing.assert_close(weights, expected_weights, atol=0, rtol=0)
    assert result.losses == expected.losses
    again, weights = train(tmp_path, dropout=0.1, checkpoint_every=2)  # it is done: nothing is left to do
    assert again.losses == expected.losses
    torch.testing.assert_close(weights, expected_weights, atol=0, rtol=0)


def test_what_a_checkpoint_lacks_makes_it_not_count(tmp_path):
    from collab.recipes.training_steps import newest_checkpoint

    for step, is_whole in ((2, True), (10, True), (12, False)):
        folder = tmp_path / f"checkpoints/checkpoint-{step}"
        folder.mkdir(parents=True)
        if is_whole:
            (folder / "whole.json").write_text("{}")
    assert newest_checkpoint(tmp_path).name == "checkpoint-10"
    assert newest_checkpoint(tmp_path / "other") is None


def test_losses_groups_and_changes_on_the_device_can_be_given(tmp_path):
    model = torch.nn.Linear(3, 2)
    before = model.bias.detach().clone()
    data = [{"x": torch.full((3,), float(index)), "labels": torch.tensor(index % 2)} for index in range(6)]
    seen, steps = [], []

    def loss(model, batch, num_items):
        seen.append((len(batch["x"]), int(num_items), float(batch["x"].max())))
        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="sum") / num_items

    fit(
        model, data, settings(batch_size=4, max_steps=3, accumulate=2), tmp_path, loss=loss, progress=False,
        on_device=lambda batch: {**batch, "x": batch["x"] / 10},
        parameter_groups=lambda model: [{"params": [model.weight], "lr": 0.1}],
        after_step=lambda step, model: steps.append(step),
    )  # fmt: skip
    assert [row[:2] for row in seen] == [(2, 4), (2, 4), (1, 2), (1, 2), (2, 4), (2, 4)]
    assert max(row[2] for row in seen) == pytest.approx(0.5)
    assert steps == [1, 2, 3]
    assert torch.equal(model.bias, before)


class Noisy:
    """Examples that are changed at random whenever they are fetched."""

    def __len__(self):
        return 11

    def __getitem__(self, index):
        return {"x": torch.rand(3) + index, "labels": torch.tensor(index % 2)}


def test_random_changes_to_examples_are_the_same_whoever_prepares_them(tmp_path):
    def losses(workers):
        model = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        chosen = settings(workers=workers)

        def loss(model, batch, num_items):
            return torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["x"][:, 1], reduction="sum") / num_items

        return fit(model, Noisy(), chosen, tmp_path / str(workers), loss=loss, progress=False).losses

    assert losses(0) == losses(1)


def test_low_precision_is_of_the_training_alone(tmp_path):
    model = tiny_models.tiny("BertForSequenceClassification")
    seen = set()
    model.classifier.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    result = fit(model, examples(), settings(epochs=1, precision="bf16"), tmp_path, progress=False)
    assert seen == {torch.bfloat16}
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    exact = fit(tiny_models.tiny("BertForSequenceClassification"), examples(), settings(epochs=1), tmp_path / "exact")
    assert [loss for _, loss in result.losses] == pytest.approx([loss for _, loss in exact.losses], abs=0.05)
    assert [loss for _, loss in result.losses] != [loss for _, loss in exact.losses]
    seen.clear()
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.classifier.weight)
    ids = torch.stack([example["input_ids"] for example in examples()])
    assert torch.equal(other(input_ids=ids).logits, other.classifier.bias.expand(len(ids), -1))
    assert seen == {torch.float32}


def test_without_tensorboard_losses_are_logged_all_the_same(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    model = torch.nn.Linear(3, 2)
    data = [{"x": torch.ones(3), "labels": torch.tensor(0)}]
    result = fit(
        model, data, settings(max_steps=2), tmp_path,
        loss=lambda model, batch, num_items: torch.nn.functional.cross_entropy(model(batch["x"]), batch["labels"]),
    )  # fmt: skip
    assert len(result.losses) == 2
    assert not (tmp_path / "logs").exists()
    said = capfd.readouterr().err
    assert "tensorboard is not installed: losses are in losses.jsonl alone" in said
    assert "step 2 of 2, loss" in said


def test_tensorboard_gets_the_losses(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    fit(tiny_models.tiny("BertForSequenceClassification"), examples(), settings(epochs=1), tmp_path, progress=False)
    assert list((tmp_path / "logs").glob("events.out.tfevents.*"))


def test_a_loss_that_is_no_number_ends_the_training(tmp_path):
    model = torch.nn.Linear(3, 2)
    with pytest.raises(FloatingPointError, match="must stay finite, got nan at step 1"):
        fit(
            model, [{"x": torch.zeros(3)}], settings(epochs=1), tmp_path, progress=False,
            loss=lambda model, batch, num_items: model(batch["x"]).sum() * float("nan"),
        )  # fmt: skip


def test_many_keep_a_record_as_soon_as_its_run_is_done(tmp_path, monkeypatch):
    config = tmp_path / "mlm" / "one.yaml"
    config.parent.mkdir()
    config.write_text("texts: [x]\nmax_steps: 1\n")
    results = tmp_path / "results.jsonl"
    one = Run("mlm/one", "mlm", config, {}, tmp_path / "one")
    monkeypatch.setattr(train_commands, "plan_runs", lambda *args, **how: [one])
    record = RunRecord(name="mlm", config={}, metrics={}, provenance={})

    def run_many(runs, changed, **options):
        changed(runs, None)
        assert not results.exists()
        write_json(tmp_path / "one" / "record.json", record.to_dict())
        runs[0].state = DONE
        changed(runs, runs[0])
        assert read_records(results) == [record]
        return True

    monkeypatch.setattr(train_commands, "run_many", run_many)
    command = ["train", "many", str(config), "--out", str(tmp_path), "--results", str(results)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert read_records(results) == [record]


def test_a_single_process_is_the_main_one():
    assert processes.is_main()
    assert processes.count() == 1
    assert processes.agree([1]) == [1]
    assert processes.device_named("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda, got 'tpu'"):
        processes.device_named("tpu")
