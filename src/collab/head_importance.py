"""head_importance: how much the loss would feel it if a head's output were turned down a little."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from collab.hosts.heads import HeadPart
from collab.inspection import AttentionSite
from collab.prunable import find_prunable
from collab.running import Batch, Progress, call, device_of, length_of, split_batch, step_by_step

Loss = Callable[[nn.Module, Any], Tensor]
"""The loss of a model on a batch, which is on the model's device."""


def head_importance(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    loss: Loss | None = None,
    normalise: bool = True,
    one_by_one: bool = True,
    only: Callable[[AttentionSite], bool] | None = None,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """How important every head is: the mean absolute gradient of the loss by a gate of 1 on the head's output.

    importance[head] = mean over inputs of |d loss / d gate[head]|, as in Michel, Levy and Neubig (2019), section 4. A
    head's output is linear in its values, so its gate may stand at their projection: the gradient by the gate is the
    product of those weights with their gradients, summed. Nothing is hooked and nothing of the model changes.

    Args:
        model: a model with ordinary attention; it is run in evaluation mode.
        batches: labelled inputs, as the model takes them.
        loss: the loss from the model and a batch; `model(**batch).loss` if not given.
        normalise: divide the importances of a layer by their norm (root of the sum of squares), as in that paper.
        one_by_one: take apart batches that are mappings, for the mean over inputs that is meant: the sum over a batch
            lets gradients of opposite signs cancel. Any other batch counts as one input.
        only: measure only layers for which this is true.
        progress: wraps the loop over batches, given it and its length: a progress bar.

    Returns:
        path -> (head,) importances, on the CPU, of the layers whose heads `prune_heads_` can take away and on which the
        loss depends.
    """
    prunable, _ = find_prunable(model, only)
    watched = [(one.site.path, part) for one in prunable for part in one.parts["value"]]
    parameters = list({id(part.parameter): part.parameter for _, part in watched}.values())
    if not parameters:
        raise ValueError(f"no heads to weigh in {type(model).__name__}")
    totals: dict[str, Tensor] = {}
    inputs = 0
    with step_by_step(model), _trained_alone(model, parameters), torch.enable_grad():
        for batch in batches if progress is None else progress(batches, length_of(batches)):
            for one in split_batch(batch, 1, model) if one_by_one and isinstance(batch, Mapping) else [batch]:
                value = _loss(model, one, loss)
                gradients = torch.autograd.grad(value, parameters, allow_unused=True)
                for path, gate in _by_gate(watched, parameters, gradients).items():
                    totals[path] = totals.get(path, 0.0) + gate.abs()
                inputs += 1
    if not inputs:
        raise ValueError("batches must hold at least one batch, got none")
    result = {}
    for path, total in totals.items():
        mean = total / inputs
        if not torch.isfinite(mean).all():
            raise ValueError(f"the loss must have finite gradients, got NaN or infinity at {path}")
        result[path] = mean / mean.norm().clamp(min=1e-30) if normalise else mean
    return result


def _loss(model: nn.Module, batch: Batch, loss: Loss | None) -> Tensor:
    device = device_of(model)
    if loss is not None:
        own = loss

        def run(*args: Any, **named: Any) -> Any:
            return own(model, named or (args[0] if isinstance(batch, Tensor) else args))

        value = call(run, batch, device)
    else:
        output = call(model, batch, device)
        value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        hint = "" if loss is not None else ": give labels in the batches, or loss"
        raise ValueError(f"the loss must be one number, got {got}{hint}")
    if not value.requires_grad:
        raise ValueError("the loss must depend on the model's attention, but no gradient leads there")
    return value.reshape(())


def _by_gate(
    watched: list[tuple[str, HeadPart]], parameters: list[nn.Parameter], gradients: tuple[Tensor | None, ...]
) -> dict[str, Tensor]:
    """Path -> (head,) gradient of the loss by the gates."""
    found = {id(one): gradient for one, gradient in zip(parameters, gradients, strict=True)}
    gates: dict[str, Tensor] = {}
    for path, part in watched:
        gradient = found[id(part.parameter)]
        if gradient is not None:
            product = part.of_heads(gradient.detach().float() * part.parameter.detach().float()).sum(1).cpu()
            gates[path] = gates[path] + product if path in gates else product
    return gates


@contextmanager
def _trained_alone(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Gradients for these parameters only, and afterwards for those that had them."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)
