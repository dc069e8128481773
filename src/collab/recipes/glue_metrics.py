"""GLUE's metrics, of predictions (classes, or numbers) and labels."""

from collections.abc import Callable, Sequence

from torch import Tensor


def accuracy(predicted: Tensor, labels: Tensor) -> float:
    """Share of the labels that were predicted."""
    return float((predicted == labels).double().mean())


def f1(predicted: Tensor, labels: Tensor) -> float:
    """Harmonic mean of precision and recall of class 1; 0 where it never occurs."""
    both = int(((predicted == 1) & (labels == 1)).sum())
    either = int((predicted == 1).sum()) + int((labels == 1).sum())
    return 2 * both / either if either else 0.0


def matthews(predicted: Tensor, labels: Tensor) -> float:
    """Matthews' correlation of two classes; 0 where only one is predicted or only one occurs."""
    return pearson(predicted, labels)


def pearson(predicted: Tensor, labels: Tensor) -> float:
    """Linear correlation; 0 where either side does not vary."""
    left, right = (values.double() - values.double().mean() for values in (predicted, labels))
    size = float((left.square().sum() * right.square().sum()).sqrt())
    return float(left @ right) / size if size > 0 else 0.0


def spearman(predicted: Tensor, labels: Tensor) -> float:
    """Correlation of the ranks, those that are equal sharing their mean rank."""
    return pearson(_ranks(predicted), _ranks(labels))


METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}


def scores(names: Sequence[str], logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Each metric of (example, class) logits, or of (example, 1) predicted numbers."""
    predicted = logits[:, 0] if logits.shape[1] == 1 else logits.argmax(1)
    return {name: METRICS[name](predicted, labels) for name in names}


def _ranks(values: Tensor) -> Tensor:
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks: Tensor = (last - (counts.double() - 1) / 2)[inverse]
    return ranks
