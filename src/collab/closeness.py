"""How far outputs are from the original's: what refinement lowers, and judges by."""

import torch
from torch import Tensor


def pooled_error(output: Tensor, target: Tensor, counts: Tensor | None) -> Tensor:
    """Error of the mean over positions, and of how alike the inputs of a batch are by it.

    Outputs are often averaged and compared: errors that positions have in common count once more, and so do those that
    bring two inputs closer together or further apart.
    """
    found, aim = _mean(output, counts), _mean(target, counts)
    missed, size = squares_of(found, aim, None)
    likeness = [torch.nn.functional.normalize(pooled, dim=-1) for pooled in (found, aim)]
    found_likeness, aimed_likeness = (unit @ unit.mT for unit in likeness)
    spread = (aimed_likeness - aimed_likeness.mean()).square().sum()
    return missed / size.clamp(min=1e-30) + (found_likeness - aimed_likeness).square().sum() / spread.clamp(min=1e-30)


def _mean(output: Tensor, counts: Tensor | None) -> Tensor:
    """(batch, feature): of (batch, position, feature), over the positions that count."""
    if counts is None:
        return output.float().mean(1)
    weights = counts.to(output.device)[..., None].float()
    return (output.float() * weights).sum(1) / weights.sum(1).clamp(min=1)


def divergence_of(output: Tensor, target: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """KL divergence of the softmax of logits, summed over the positions that count, and the number of those."""
    log_output, log_target = (_counted(logits, counts).float().log_softmax(-1) for logits in (output, target))
    divergence = (log_target.exp() * (log_target - log_output)).sum()
    number = divergence.new_tensor(float(output[..., 0].numel())) if counts is None else counts.sum().to(divergence)
    return divergence, number.clamp(min=1)


def logit_squares_of(output: Tensor, target: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """`squares_of` logits (..., class) whose mean over classes is taken away, which their softmax does not see.

    A classifier is sure of what it was trained on, and a divergence of its softmax then hangs on a few inputs that it
    is not sure of; its logits tell as much of all of them.
    """
    return squares_of(output - output.mean(-1, keepdim=True), target - target.mean(-1, keepdim=True), counts)


def squares_of(output: Tensor, target: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Squared difference and squared target, summed over the positions that count, in float32."""
    output, target = (_counted(values, counts).float() for values in (output, target))
    return (output - target).square().sum(), target.square().sum()


def _counted(values: Tensor, counts: Tensor | None) -> Tensor:
    """Values with zeros where they do not count: a GPU would wait to learn how many there are to be picked out."""
    if counts is None:
        return values
    counts = counts.to(values.device)[(...,) + (None,) * (values.dim() - counts.dim())]
    return torch.where(counts, values, values.new_zeros(()))
