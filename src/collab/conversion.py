"""From one layer's trained weights to shared ones, in the metric of its weights or of its inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collab.calibration import SiteStatistics
from collab.config import CollaborativeConfig
from collab.decomposition import QueryKeyFactors
from collab.hosts import HeadWeights, SharedWeights, empty_shared_weights
from collab.layer import start_dims, start_mixing_


@dataclass(frozen=True)
class Metric:
    """In what measure an approximation of a layer's products is to be close.

    Without roots all directions of the inputs count alike. With them, those count in which inputs vary, as much as they
    vary: with inputs x and y of covariances L Lᵀ and K Kᵀ, the mean square of x T yᵀ is the squared norm of Lᵀ T K.
    Both are centred. What all keys have in common no softmax sees, and what all queries have in common the content
    term takes over exactly.

    Attributes:
        query_root: (query_in, query_in) L, or None.
        key_root: (key_in, key_in) K, or None.
        query_mean: (query_in,) mean of the query's inputs, or None.
        shrinkage: share of the covariances that was assumed, not measured.
    """

    query_root: Tensor | None = None
    key_root: Tensor | None = None
    query_mean: Tensor | None = None
    shrinkage: float = 0.0

    @classmethod
    def of(cls, statistics: SiteStatistics | None, device: torch.device) -> "Metric":
        """The metric of these inputs; of the weights, where there are none."""
        if statistics is None:
            return cls()
        query_root, key_root, shrinkage = statistics.whitening()
        return cls(query_root.to(device), key_root.to(device), statistics.query.mean.to(device), shrinkage)

    @property
    def name(self) -> str:
        """As reports print it."""
        return "weights" if self.query_root is None else "inputs"

    def enter(self, weights: HeadWeights) -> tuple[Tensor, Tensor]:
        """Query and key weights (head, head_dim, in) whose products' plain norm is this measure."""
        if self.query_root is None or self.key_root is None:
            return weights.query, weights.key
        return weights.query.double() @ self.query_root, weights.key.double() @ self.key_root

    def leave(self, factors: QueryKeyFactors) -> tuple[Tensor, Tensor]:
        """Query and key directions (in, rank) for the inputs as they are, each pair of the same norm."""
        query, key = factors.query, factors.key
        if self.query_root is not None and self.key_root is not None:
            query = torch.linalg.solve_triangular(self.query_root.mT, query.double(), upper=True)
            key = torch.linalg.solve_triangular(self.key_root.mT, key.double(), upper=True)
        query_norm, key_norm = query.norm(dim=0), key.norm(dim=0)
        ratio = torch.where((query_norm > 0) & (key_norm > 0), (key_norm / query_norm).sqrt(), 1.0)
        return query * ratio, key / ratio


def content_of(weights: HeadWeights) -> Tensor:
    """(head, key_in): what the query bias adds to the score of a key, exactly."""
    if weights.query_bias is None:
        return weights.key.new_zeros(weights.num_heads, weights.key.shape[2], dtype=torch.float64)
    if not torch.isfinite(weights.query_bias).all():
        raise ValueError("the query bias must be finite, got NaN or infinity")
    return torch.einsum("hdk,hd->hk", weights.key.double(), weights.query_bias.double())


def shared_from(weights: HeadWeights, factors: QueryKeyFactors, metric: Metric, dims: int | None) -> SharedWeights:
    """What `factors`, found in `metric`, mean for the layer, in the dtype of its weights.

    What the factors miss of the mean query's scores goes to the content term: mean (T - T̃), one vector per head.
    """
    query, key = metric.leave(factors)
    mixing, content = factors.mixing, content_of(weights)
    if metric.query_mean is not None:
        mean_query = torch.einsum("hdq,q->hd", weights.query.double(), metric.query_mean)
        exact = torch.einsum("hdk,hd->hk", weights.key.double(), mean_query)
        content = content + exact - (mixing * (metric.query_mean @ query)) @ key.mT
    chosen = None
    if dims is not None and dims < mixing.shape[1]:
        strength = mixing.abs() * query.norm(dim=0) * key.norm(dim=0)
        # Those that are not zero first; where a head uses fewer, any others do, with a weight of zero.
        chosen = strength.topk(dims, dim=1).indices.sort(dim=1).values
        mixing = mixing.gather(1, chosen)
    query, key, mixing, content = (part.to(weights.query) for part in (query.mT, key.mT, mixing, content))
    return SharedWeights(query, key, mixing, content, chosen)


def fresh_weights(
    weights: HeadWeights, shared_dim: int, config: CollaborativeConfig, generator: torch.Generator, scale: float
) -> SharedWeights:
    """New weights drawn on the CPU, so that a seed means the same on every device.

    Heads that use some of the shared dimensions draw the same ones as heads that use all: the mixing differs alone.
    `scale` is the layer's own, which what it computes is multiplied with whatever `config.scale` says.
    """
    dims = config.dims_per_head if config.dims_per_head is not None and config.dims_per_head < shared_dim else None
    shared = empty_shared_weights(weights, shared_dim, device="cpu", dtype=torch.float32, dims_per_head=dims)
    if dims is not None and shared.dims is not None:
        shared.dims.copy_(start_dims(weights.num_heads, shared_dim, dims))
    nn.init.xavier_uniform_(shared.query, generator=generator)
    nn.init.xavier_uniform_(shared.key, generator=generator)
    start_mixing_(shared.mixing, weights.head_dim, config.mixing, generator, dims=shared.dims, shared_dim=shared_dim)
    if config.scale is not None:
        shared.mixing.mul_(config.scale / scale)
    shared.content.zero_()
    return shared
