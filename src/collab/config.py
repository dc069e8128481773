"""Every setting of a conversion, in one frozen object that travels to disk and back."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORMAT_VERSION = 3
"""Newest version of what `save` writes. A reader refuses a newer one. 2 brought sparse mixing, 3 heads cut out."""

WEIGHTS = ("decompose", "fresh")
METHODS = ("shared", "unshared", "paper")
MIXING_STARTS = ("concatenate", "normal", "uniform", "ones")


@dataclass(frozen=True, kw_only=True)
class CollaborativeConfig:
    """How to make a model's attention collaborative. One of `shared_dim`, `budget` and `max_error` says how small.

    Args:
        shared_dim: dimensions of the query/key space all heads share. An integer, the same for every layer; a
            fraction in (0, 1] of each layer's own heads x head size; or a mapping from a layer's path to an integer,
            which swaps the layers it names and leaves the others alone.
        budget: share in (0, 1] of the query and key parameters to keep, all layers together: each layer's size is
            chosen from its error curve, so that layers with more in common give more; see `collab.plan`.
        max_error: largest relative error of a layer: each gets the smallest size whose error is at most this.
        multiple_of: sizes that are chosen, not given, are multiples of this.
        dims_per_head: how many of the shared dimensions each head may use; all of them if not given. A head then
            scores in so many dimensions.
        method: how weights are decomposed: "shared", or for comparison "unshared" (every head truncated by itself) or
            "paper" (alternating least squares from a random start).
        weights: "decompose" keeps what the trained layer computes as well as `shared_dim` allows; "fresh" draws new
            query/key weights, to train from scratch.
        mixing: how fresh mixing rows start: "concatenate", "normal", "uniform" or "ones".
        scale: factor on the scores of fresh layers, the model's own if not given. It goes into the mixing, so that it
            is saved and loaded with the weights: heads of a reduced size have a scale of their own, and are
            `mixing="concatenate"`, `dims_per_head` and `scale` of that size, once their mixing is frozen.
        max_iterations: limit on the sweeps of the decomposition.
        tolerance: the decomposition stops when a sweep lowers the relative error by less than this share of it.
        seed: of the random numbers that "fresh" weights and the method "paper" draw.
    """

    shared_dim: int | float | Mapping[str, int] | None = None
    budget: float | None = None
    max_error: float | None = None
    multiple_of: int = 8
    dims_per_head: int | None = None
    method: str = "shared"
    weights: str = "decompose"
    mixing: str = "concatenate"
    scale: float | None = None
    max_iterations: int = 100
    tolerance: float = 1e-6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.budget is None and self.max_error is None:
            _check_shared_dim(self.shared_dim)
        self._check_chosen_sizes()
        if isinstance(self.shared_dim, Mapping):  # a copy: what the caller does with theirs changes nothing here
            object.__setattr__(self, "shared_dim", dict(self.shared_dim))
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights must be one of {list(WEIGHTS)}, got {self.weights!r}")
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {list(METHODS)}, got {self.method!r}")
        if self.dims_per_head is not None and (not is_integer(self.dims_per_head) or self.dims_per_head < 1):
            raise ValueError(f"dims_per_head must be an integer >= 1, got {self.dims_per_head!r}")
        if self.mixing not in MIXING_STARTS:
            raise ValueError(f"mixing must be one of {list(MIXING_STARTS)}, got {self.mixing!r}")
        if self.scale is not None and (not _is_number(self.scale) or not 0 < self.scale < math.inf):
            raise ValueError(f"scale must be a number > 0, got {self.scale!r}")
        if self.scale is not None and self.weights != "fresh":
            raise ValueError("scale must come with weights='fresh': what a trained layer computes has its own")
        if not is_integer(self.max_iterations) or self.max_iterations < 0:
            raise ValueError(f"max_iterations must be an integer >= 0, got {self.max_iterations!r}")
        if not _is_number(self.tolerance) or not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance must be a number >= 0, got {self.tolerance!r}")
        if not is_integer(self.seed) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, got {self.seed!r}")

    def _check_chosen_sizes(self) -> None:
        given = [name for name in ("shared_dim", "budget", "max_error") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give only one of shared_dim, budget and max_error, got {' and '.join(given)}")
        if self.budget is not None and (not _is_number(self.budget) or not 0 < self.budget <= 1):
            raise ValueError(f"budget must be a share in (0, 1] of the query and key parameters, got {self.budget!r}")
        if self.max_error is not None and (not _is_number(self.max_error) or not 0 <= self.max_error < 1):
            raise ValueError(f"max_error must be a relative error in [0, 1), got {self.max_error!r}")
        if not is_integer(self.multiple_of) or self.multiple_of < 1:
            raise ValueError(f"multiple_of must be an integer >= 1, got {self.multiple_of!r}")
        if self.weights == "fresh" and self.shared_dim is None:
            raise ValueError(f"fresh weights have no error to choose a size by: give shared_dim, got {given[0]}")

    def shared_dim_for(self, path: str, full_dim: int) -> int | None:
        """Shared size of the layer at `path`, whose heads x head size is `full_dim`; None leaves the layer alone."""
        if self.shared_dim is None:
            raise ValueError("sizes must be chosen first: collab.plan does that, from the layers' error curves")
        if isinstance(self.shared_dim, Mapping):
            if path not in self.shared_dim:
                return None
            size = self.shared_dim[path]
        elif isinstance(self.shared_dim, float):
            size = max(1, round(self.shared_dim * full_dim))
        else:
            size = self.shared_dim
        if size > full_dim:
            raise ValueError(
                f"shared_dim must be at most heads x head size, which is {full_dim} at {path!r} and exact, got {size}"
            )
        return size

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; `from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CollaborativeConfig":
        """Rebuild a config; an unknown key is an error that names the known ones."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [key for key in values if key not in known]
        if unknown:
            raise ValueError(f"unknown setting {', '.join(map(str, unknown))}; known are {', '.join(known)}")
        if not {"shared_dim", "budget", "max_error"} & values.keys():
            raise ValueError(f"settings must have shared_dim, budget or max_error, got {', '.join(values) or 'none'}")
        return cls(**values)


def is_integer(value: object) -> bool:
    """Whether a value is an integer, which True and False are not meant to be."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return is_integer(value) or isinstance(value, float)


def _check_shared_dim(value: object) -> None:
    if isinstance(value, Mapping):
        if not value:
            raise ValueError("shared_dim must name at least one layer when it is a mapping, got an empty one")
        for path, size in value.items():
            if not isinstance(path, str) or not is_integer(size) or size < 1:
                raise ValueError(f"shared_dim must map layer paths to integers >= 1, got {path!r}: {size!r}")
    elif is_integer(value):
        if value < 1:  # type: ignore[operator]
            raise ValueError(f"shared_dim must be at least 1, got {value}")
    elif isinstance(value, float):
        if not 0 < value <= 1:
            raise ValueError(
                f"shared_dim must be an integer, or a fraction in (0, 1] of each layer's heads x head size, got {value}"
            )
    else:
        raise ValueError(
            "shared_dim must be an integer >= 1, a fraction in (0, 1] or a mapping from layer path to integer (or give "
            f"budget or max_error instead), got {value!r}"
        )
