"""calibrate: what the inputs of a model's attention layers look like, as mean and covariance; made in one pass."""

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from collab.inspection import AttentionSite, find_attention
from collab.running import Batch, Progress, call, device_of, length_of, step_by_step, tokens_that_count
from collab.table import format_table

_VERSION = "1"
_LEAST_SHRINKAGE = 1e-4
"""Of the mean variance, added to every direction: inputs of a LayerNorm never vary in some directions at all."""

_MUCH_SHRINKAGE = 0.05
"""From where on a report says that there was little data."""


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of some vectors, in float64.

    Attributes:
        count: how many vectors there were.
        mean: (width,).
        scatter: (width, width), the sum over vectors of the products of their differences from the mean.
    """

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, vectors: Tensor) -> "Moments":
        """Moments of the rows of (count, width)."""
        vectors = vectors.double() if vectors.device.type != "mps" else vectors.cpu().double()
        if not len(vectors):
            return cls.none(vectors.shape[1], vectors.device)
        mean = vectors.mean(0)
        centred = vectors - mean
        return cls(len(vectors), mean, centred.mT @ centred)

    @classmethod
    def none(cls, width: int, device: torch.device | str = "cpu") -> "Moments":
        """Of no vectors at all."""
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        return cls(0, torch.zeros(width, **options), torch.zeros(width, width, **options))

    def merge(self, other: "Moments") -> "Moments":
        """Of both sets of vectors together; exact, whatever the two means are."""
        if self.mean.shape != other.mean.shape:
            raise ValueError(f"moments must be of one width, got {len(self.mean)} and {len(other.mean)}")
        count = self.count + other.count
        if count == 0 or other.count == 0:
            return self
        apart = other.mean.to(self.mean) - self.mean
        between = torch.outer(apart, apart) * (self.count * other.count / count)
        return Moments(
            count, self.mean + apart * (other.count / count), self.scatter + other.scatter.to(between) + between
        )

    @property
    def covariance(self) -> Tensor:
        """(width, width)."""
        return self.scatter / max(1, self.count)

    def shrunk(self) -> tuple[Tensor, float]:
        """The covariance pulled towards a ball of the same total variance, the more the fewer vectors there were.

        How much follows from the vectors' number and spread (oracle approximating shrinkage: Chen, Wiesel, Eldar,
        Hero, 2010). With none, all that is left is the ball, and the metric is that of the weights alone.

        Returns:
            The covariance (width, width), positive definite, and the share of it that is the ball, in (0, 1].
        """
        width, covariance = len(self.mean), self.covariance
        variance = float(covariance.trace()) / width
        ball = torch.eye(width, dtype=covariance.dtype, device=covariance.device)
        if self.count < 2 or not variance > 0:
            return ball, 1.0
        squares, trace = float(covariance.square().sum()), variance * width
        spread = (self.count + 1 - 2 / width) * (squares - trace**2 / width)
        share = 1.0 if spread <= 0 else min(1.0, ((1 - 2 / width) * squares + trace**2) / spread)
        share = max(share, _LEAST_SHRINKAGE)
        return (1 - share) * covariance + share * variance * ball, share


@dataclass(frozen=True)
class SiteStatistics:
    """What one attention layer's inputs look like.

    Attributes:
        query: moments of what its queries are made from.
        key: moments of what its keys are made from; the same unless it attends to another sequence.
    """

    query: Moments
    key: Moments

    def whitening(self) -> tuple[Tensor, Tensor, float]:
        """Roots of the two covariances, (width, width) lower triangles, and the larger share of shrinkage."""
        (query, query_share), (key, key_share) = self.query.shrunk(), self.key.shrunk()
        return torch.linalg.cholesky(query), torch.linalg.cholesky(key), max(query_share, key_share)


@dataclass(frozen=True)
class Calibration:
    """Statistics of the inputs of every attention layer of a model, by path. Prints as a table."""

    sites: dict[str, SiteStatistics]

    def merge(self, other: "Calibration") -> "Calibration":
        """Of both sets of inputs together. Layers that only one of them saw are kept as they are."""
        merged = dict(self.sites)
        for path, theirs in other.sites.items():
            ours = merged.get(path)
            if ours is not None:
                theirs = SiteStatistics(ours.query.merge(theirs.query), ours.key.merge(theirs.key))
            merged[path] = theirs
        return Calibration(merged)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all."""
        from safetensors.torch import save_file

        tensors, counts = {}, {}
        for site, statistics in self.sites.items():
            for role in ("query", "key"):
                moments: Moments = getattr(statistics, role)
                counts[f"{site}.{role}"] = moments.count
                for name in ("mean", "scatter"):
                    tensors[f"{site}.{role}.{name}"] = getattr(moments, name).cpu().contiguous().clone()
        target = Path(path)
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        try:
            save_file(tensors, draft, metadata={"collab_calibration": _VERSION, "counts": json.dumps(counts)})
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read back what `save` wrote."""
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {path} with calibration statistics")
        try:
            with safe_open(str(path), "pt") as file:
                metadata = file.metadata() or {}
                names = list(file.keys())
                tensors = {name: file.get_tensor(name) for name in names}
            if metadata.get("collab_calibration") != _VERSION:
                raise ValueError("it has no mark of that, or of a newer version")
            counts = json.loads(metadata["counts"])
            if not isinstance(counts, dict):
                raise ValueError(f"counts must be by name, got {type(counts).__name__}")
            moments = {
                name: _checked(name, count, tensors[f"{name}.mean"], tensors[f"{name}.scatter"])
                for name, count in counts.items()
            }
            sites = dict.fromkeys(name.rpartition(".")[0] for name in moments)
            return cls({site: SiteStatistics(moments[f"{site}.query"], moments[f"{site}.key"]) for site in sites})
        except (SafetensorError, ValueError, KeyError) as error:
            raise ValueError(f"{path} must be calibration statistics that collab wrote: {error}") from error

    def __str__(self) -> str:
        rows = [
            [path, one.query.count, one.key.count, len(one.query.mean), len(one.key.mean), one.whitening()[2]]
            for path, one in self.sites.items()
        ]
        return format_table(["path", "query tokens", "key tokens", "query width", "key width", "shrinkage"], rows)


def calibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    only: Callable[[AttentionSite], bool] | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Run a model over some inputs and keep mean and covariance of what its attention layers make queries and keys of.

    A few hundred texts or images are enough. Sums are kept in float64, and memory does not grow with the inputs, so
    `batches` may be a generator. Padding does not count: tokens where `attention_mask` (of a decoder,
    `decoder_attention_mask`) is zero. The model is left as it was, and runs in evaluation mode without gradients.

    Example:
        >>> import torch, collab
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> stats = collab.calibrate(model, [torch.randn(8, 5, 16) for _ in range(4)])
        >>> stats.sites["self_attn"].query.count
        160

    Args:
        model: any model `find_attention` finds swappable attention in.
        batches: keyword arguments of the model as mappings, a tensor, or a tuple of positional arguments.
        only: look only at layers for which this is true.
        progress: wraps the loop over batches, given it and its length: a progress bar.
    """
    if isinstance(batches, Mapping | str | Tensor) or not isinstance(batches, Iterable):
        raise ValueError(
            f"batches must be an iterable of batches, got one {type(batches).__name__}: put a single batch in a list"
        )
    if device_of(model).type == "meta":
        raise ValueError(f"{type(model).__name__} is on the meta device and has no values: load the weights first")
    sites = [site for site in find_attention(model) if not site.why_not and (only is None or only(site))]
    if not sites:
        raise ValueError(f"no attention to calibrate in {type(model).__name__}")
    watches = {site.path: _Watch(model, site) for site in sites}
    handles = []
    try:
        for site in sites:
            assert site.host is not None
            handles += site.host.watch_inputs(site.module, watches[site.path].see)
        steps = batches if progress is None else progress(batches, length_of(batches))
        device, seen = device_of(model), 0
        with step_by_step(model), torch.no_grad():
            for index, batch in enumerate(steps):
                for watch in watches.values():
                    watch.batch = batch
                call(model, batch, device, seed=index)
                seen += 1
    finally:
        for handle in handles:
            handle.remove()
    if not seen:
        raise ValueError("batches must hold at least one batch, got none")
    found = {path: watch.statistics for path, watch in watches.items() if watch.statistics is not None}
    if not found:
        raise ValueError(f"none of {type(model).__name__}'s attention layers ran on these batches")
    return Calibration(found)


class _Watch:
    """Takes in what one layer's projections see, call by call."""

    def __init__(self, model: nn.Module, site: AttentionSite) -> None:
        self.model, self.path, self.is_cross = model, site.path, site.kind == "cross"
        self.batch: Batch = ()
        self.moments: dict[str, Moments] = {}
        self.last: tuple[Tensor, Moments] | None = None

    def see(self, role: str, inputs: Tensor) -> None:
        """Take in (batch, token, width) inputs of one role."""
        is_elsewhere = role == "key" and self.is_cross
        counts = tokens_that_count(self.model, self.batch, self.path, inputs.shape, keys=is_elsewhere)
        if role == "key" and self.last is not None and _is_same(self.last[0], inputs):
            moments = self.last[1]  # keys from the same sequence: the product is made once
        else:
            rows = inputs.detach().flatten(0, -2) if counts is None else inputs.detach()[counts.to(inputs.device)]
            moments = Moments.of(rows)
            if not torch.isfinite(moments.scatter).all():
                raise ValueError(f"inputs of {self.path} must be finite, got NaN or infinity")
        self.last = (inputs, moments) if role == "query" else None
        self.moments[role] = moments if role not in self.moments else self.moments[role].merge(moments)

    @property
    def statistics(self) -> SiteStatistics | None:
        """What was seen, if anything was."""
        if not self.moments or any(moments.count == 0 for moments in self.moments.values()):
            return None
        return SiteStatistics(self.moments["query"], self.moments["key"])


def _checked(name: str, count: object, mean: Tensor, scatter: Tensor) -> Moments:
    """Moments that were read, refused unless they are what `Calibration.save` writes."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"the count of {name} must be an integer >= 0, got {count!r}")
    if mean.dtype != torch.float64 or scatter.dtype != torch.float64:
        raise ValueError(f"{name} must be float64, got {mean.dtype} and {scatter.dtype}")
    if mean.dim() != 1 or scatter.shape != (len(mean), len(mean)):
        raise ValueError(f"{name} must be (width,) and (width, width), got {(*mean.shape,)} and {(*scatter.shape,)}")
    if not torch.isfinite(mean).all() or not torch.isfinite(scatter).all():
        raise ValueError(f"{name} must be finite, got NaN or infinity")
    return Moments(count, mean, scatter)


def _is_same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors that both live are the same numbers in the same place."""
    return left.data_ptr() == right.data_ptr() and left.shape == right.shape and left.stride() == right.stride()


def little_data(share: float) -> str | None:
    """What to say of this share of shrinkage, if anything."""
    if share <= _MUCH_SHRINKAGE:
        return None
    return f"little calibration data: {share:.0%} of the inputs' covariance had to be assumed equal in all directions"


def check_calibration(calibration: object) -> None:
    """Refuse what is neither statistics nor batches of inputs."""
    if isinstance(calibration, Mapping | str | Tensor):
        raise ValueError(
            f"calibration must be statistics or an iterable of batches, got one {type(calibration).__name__}: "
            "put a single batch in a list"
        )
    if not isinstance(calibration, Calibration | Iterable | None):
        raise ValueError(f"calibration must be statistics or an iterable of batches, got {calibration!r}")


def check_fits(calibration: Calibration, sites: Mapping[str, AttentionSite]) -> None:
    """Refuse statistics of another model: paths it does not have, widths that differ."""
    for path, statistics in calibration.sites.items():
        if path not in sites:
            raise ValueError(
                f"calibration has {path}, where the model has no attention; it has {', '.join(sites) or 'none'}"
            )
        for role in ("query", "key"):
            width, expected = len(getattr(statistics, role).mean), getattr(sites[path], f"{role}_width")
            if width != expected:
                raise ValueError(f"calibration of {path} must have {role} inputs {expected} wide, got {width}")
