"""Refinement without labels: fit swapped layers to what the original ones gave on the same inputs."""

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from collab.calibration import SiteStatistics
from collab.closeness import divergence_of, logit_squares_of, pooled_error, squares_of
from collab.config import is_integer
from collab.evaluate import are_logits, pick_output, positions_that_count
from collab.fitting import PRECISIONS, Leaves, fit, quick_products
from collab.holding_back import hold_back, spread
from collab.running import Batch, Progress, call, device_of, step_by_step, tokens_that_count
from collab.twins import Twin

_CACHED = 2**26
"""Numbers of the original's outputs that are kept, not computed again every time: 256 MiB."""

_FEWEST_STEPS, _MOST_STEPS = 240, 480
"""Of the joint fit, unless given: inputs seen for the first time teach most, but few must be seen more than once."""

_RATE, _RATE_OF_SINGLES = 0.005, 0.00125
"""Unless given: of models that give a vector a token, and of those that give one for a whole input, as classifiers give
logits. A step of the latter sees as many vectors as it has inputs, no more, and longer ones undo what there is."""


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """How to refine.

    Args:
        steps: of the fit of each layer by itself, from the first to the last; later layers see the converted earlier.
        joint_steps: of the fit of all layers together that follows, to the outputs of the model and of every layer; one
            for each batch to fit to unless given, but from 240 to 480. It needs the memory of training on one batch and
            at most 256 MiB for outputs that are kept; with 0 there are no such steps.
        rate: step size, as a share of the root mean square of what is changed, in the metric of the inputs; unless
            given, 0.005, or 0.00125 where the model's output is one vector an input.
        layer_weight: of the layers' own outputs beside the model's, when all are fitted together.
        batch_size: inputs of a step; larger batches are split.
        held_back: share of the inputs that no fit sees, to judge by; no more than a dozen batches.
        precision: of the products in fitting steps: "float32", "tf32" or "bfloat16"; "auto" is tf32 on CUDA, else
            float32. What judges is computed as the model is.
        seed: of the order the inputs come in.
    """

    steps: int = 8
    joint_steps: int | None = None
    rate: float | None = None
    layer_weight: float = 1.0
    batch_size: int = 16
    held_back: float = 0.125
    precision: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("steps", 0), ("joint_steps", 0), ("batch_size", 1), ("seed", 0)):
            value = getattr(self, name)
            if name == "joint_steps" and value is None:
                continue
            if not is_integer(value) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be a number > 0, got {self.rate!r}")
        if not 0 <= self.layer_weight < math.inf:
            raise ValueError(f"layer_weight must be a number >= 0, got {self.layer_weight!r}")
        if not 0 < self.held_back < 1:
            raise ValueError(f"held_back must be a share in (0, 1), got {self.held_back!r}")
        if self.precision not in ("auto", *PRECISIONS):
            raise ValueError(f"precision must be 'auto' or one of {PRECISIONS}, got {self.precision!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class RefinementReport:
    """What refinement did, measured on inputs held back from it.

    Errors are squared differences from the original's outputs, as a share of the squared outputs; of logits of tokens,
    the mean KL divergence of their softmax from the original's, in nats.

    Attributes:
        settings: how it was done, with the number of joint steps and the rate where they were not given.
        batches, held_back: how many batches were fitted to, and held back.
        before, after: error of the model's output when it started, and at the end; `after` is never the larger.
        sites: path -> error of a layer's output before and after its own fit.
        kept: whether the fit was better than the start on what was held back, and so was kept.
        seconds: time it took.
        notes: what else there is to say.
    """

    settings: dict[str, Any]
    batches: int
    held_back: int
    before: float
    after: float
    sites: dict[str, tuple[float, float]]
    kept: bool
    seconds: float
    notes: list[str]


@dataclass
class _Case:
    """One call of a layer: its arguments as the converted model gives them, and what the original's output was."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor
    counts: Tensor | None


class _Enough(Exception):
    """Ends a pass of the model: the layer of interest has run."""


def refine_(
    model: nn.Module,
    twins: Sequence[Twin],
    batches: Iterable[Batch],
    settings: Refinement,
    progress: Progress | None = None,
    statistics: Mapping[str, SiteStatistics] | None = None,
) -> RefinementReport:
    """Fit the shared weights of swapped layers to the original layers' outputs, in place.

    Each layer is fitted by itself, in the order in which they run: its inputs are those the converted layers before it
    give, its aim is what the original gave in the original model. Only one layer's inputs and outputs are held at a
    time. Then all are fitted together. Whatever does worse on inputs held back than what there was before is undone.

    Args:
        model: the model, its layers swapped.
        twins: those layers, in both states.
        batches: unlabelled inputs, as in `calibrate`.
        settings: how long, how fast.
        progress: wraps the loop over steps, given it and its length: a progress bar.
        statistics: path -> what the inputs of that layer look like; where that is known, steps are even in all
            directions of them.
    """
    start = time.perf_counter()
    fitted, held, notes = hold_back(model, batches, settings.batch_size, settings.held_back)
    if settings.joint_steps is None:
        settings = replace(settings, joint_steps=min(max(len(fitted), _FEWEST_STEPS), _MOST_STEPS))
    run = _Run(model, list(twins), fitted, held, settings, statistics or {})
    ordered = run.order()
    idle = [twin.site.path for twin in twins if twin not in ordered]
    if idle:
        notes.append(f"not refined, since no input reached them: {', '.join(idle)}")
    total = settings.steps * len(ordered) + run.joint_steps
    ticks = iter(range(total) if progress is None else progress(range(total), total))
    with step_by_step(model), _frozen(model):
        before = run.output_error()
        if not math.isfinite(before):
            raise ValueError(
                f"the output of {type(model).__name__} must be finite to be fitted to, got NaN or infinity; "
                "refine=False converts without"
            )
        unrefined = [run.leaves[twin].values() for twin in ordered]
        fits = {twin.site.path: run.fit_layer(twin, ticks) for twin in ordered if settings.steps}
        errors = {path: found for path, found in fits.items() if found is not None}
        by_layer = run.output_error()
        if not by_layer <= before:  # each closer by itself, but not together: begin again from where they were
            for twin, values in zip(ordered, unrefined, strict=True):
                run.leaves[twin].set_(values)
        after = run.fit_together(ordered, min(before, by_layer), ticks)
    for _ in ticks:
        pass
    return RefinementReport(
        settings=replace(settings, rate=run.rate).to_dict(),
        batches=len(fitted),
        held_back=len(held),
        before=before,
        after=after,
        sites=errors,
        kept=after < before,
        seconds=time.perf_counter() - start,
        notes=notes,
    )


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter of the model collects gradients."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


class _Run:
    """One refinement: the model in both its states, and the inputs."""

    def __init__(
        self,
        model: nn.Module,
        twins: list[Twin],
        fitted: list[Batch],
        held: list[Batch],
        settings: Refinement,
        statistics: Mapping[str, SiteStatistics],
    ) -> None:
        self.model, self.twins, self.fitted, self.held, self.settings = model, twins, fitted, held, settings
        self.joint_steps = settings.joint_steps or 0
        self.device = device_of(model)
        self.leaves = {twin: Leaves(twin.site, statistics.get(twin.site.path)) for twin in twins}
        self.targets: dict[int, Tensor] = {}
        self.is_logits = self.is_single = False
        self.generator = torch.Generator().manual_seed(settings.seed)

    @contextlib.contextmanager
    def original(self) -> Iterator[None]:
        """The model as it was before any layer was swapped."""
        for twin in self.twins:
            twin.show(original=True)
        try:
            yield
        finally:
            for twin in self.twins:
                twin.show(original=False)

    def order(self) -> list[Twin]:
        """The layers that run on the batches to fit to, in the order in which they first do."""
        seen: dict[Twin, None] = {}
        handles = [
            twin.site.module.register_forward_pre_hook(lambda module, args, twin=twin: seen.setdefault(twin))
            for twin in self.twins
        ]
        try:
            with step_by_step(self.model), torch.no_grad():
                for batch in self.fitted:
                    call(self.model, batch, self.device)
                    if len(seen) == len(self.twins):
                        break
        finally:
            for handle in handles:
                handle.remove()
        return list(seen)

    @torch.no_grad()
    def output_error(self) -> float:
        """Of the whole model's output, on the batches held back."""
        total = squares = 0.0
        for index, batch in enumerate(self.held):
            target = self._target(index)
            _, output = self._output(batch)
            missed, size = self._output_error(batch, output, target)
            total, squares = total + float(missed), squares + float(size)
        return total / max(squares, 1e-300)

    def _output_error(self, batch: Batch, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """How far the model's output is from the original's, and what that is to be divided by."""
        of_logits = logit_squares_of if self.is_single else divergence_of
        counts = positions_that_count(self.model, batch, target)
        return (of_logits if self.is_logits else squares_of)(output, target, counts)

    @property
    def rate(self) -> float:
        """What was asked for, or what suits the model's output, which must have been seen."""
        if self.settings.rate is not None:
            return self.settings.rate
        return _RATE_OF_SINGLES if self.is_single else _RATE

    def _output(self, batch: Batch) -> tuple[str, Tensor]:
        return pick_output(call(self.model, batch, self.device), type(self.model).__name__)

    def _target(self, index: int) -> Tensor:
        """The original model's output on one of the batches held back."""
        if index in self.targets:
            return self.targets[index]
        with self.original():
            name, target = self._output(self.held[index])
            self.is_logits, self.is_single = are_logits(self.model, name, target), target.dim() == 2
        if target.numel() * len(self.held) <= _CACHED:
            self.targets[index] = target
        return target

    def fit_layer(self, twin: Twin, ticks: Iterator[int]) -> tuple[float, float] | None:
        """Fit one layer by itself; returns its error on what was held back, before and after.

        None where the layer does not run on the batches it would be fitted to, or judged by.
        """
        # No more batches than steps; and fewer of a layer that one pass runs many times, for no more memory.
        share = max(1, twin.site.uses)
        fitted = self._cases(twin, spread(self.fitted, self.settings.steps // share))
        held = self._cases(twin, spread(self.held, self.settings.steps // (4 * share)))
        if not fitted or not held:
            return None
        leaves = self.leaves[twin]

        def loss_of(case: _Case) -> Tensor:
            output = _first(functional_call(twin.site.module, leaves.parameters(), case.args, case.kwargs))
            missed, size = squares_of(output, case.target, case.counts)
            return missed / size.clamp(min=1e-30)

        def judge() -> float:
            with torch.no_grad():
                return sum(float(loss_of(case)) for case in held) / len(held)

        return self._fit([leaves], fitted, loss_of, judge, self.settings.steps, ticks)

    def fit_together(self, ordered: list[Twin], before: float, ticks: Iterator[int]) -> float:
        """Fit all layers to the model's output and to every layer's; returns the output's error on what was held."""
        if not self.joint_steps or not ordered:
            return before
        every = [self.leaves[twin] for twin in ordered]

        aimed: dict[int, tuple[Tensor, list[tuple[str, Tensor]]]] = {}

        def loss_of(index: int) -> Tensor:
            batch = self.fitted[index]
            if index not in aimed:
                with self.original(), torch.no_grad():
                    aimed[index] = self._outputs(ordered, batch, {})
            target, aims = aimed[index]
            numbers = target.numel() + sum(aim.numel() for _, aim in aims)
            if numbers * len(self.fitted) > _CACHED:
                del aimed[index]
            parameters = {
                f"{leaves.site.path}.{name}".lstrip("."): tensor
                for leaves in every
                for name, tensor in leaves.parameters().items()
            }
            output, reached = self._outputs(ordered, batch, parameters)
            missed, size = self._output_error(batch, output, target)
            loss = missed / size.clamp(min=1e-30)
            counts = positions_that_count(self.model, batch, target)
            if target.dim() == 3 and not self.is_logits:
                loss = loss + pooled_error(output, target, counts)
            for (path, found), (_, aim) in zip(reached, aims, strict=True):
                counts = tokens_that_count(self.model, batch, path, aim.shape, keys=False)
                missed, size = squares_of(found, aim, counts)
                loss = loss + self.settings.layer_weight * missed / size.clamp(min=1e-30) / len(aims)
            return loss

        def judge() -> float:
            for leaves in every:
                leaves.set_(leaves.values())
            return self.output_error()

        return self._fit(every, list(range(len(self.fitted))), loss_of, judge, self.joint_steps, ticks)[1]

    def _fit(
        self, every: list[Leaves], cases: list[Any], loss_of: Any, judge: Any, steps: int, ticks: Iterator[int]
    ) -> tuple[float, float]:
        precision = self.settings.precision
        if precision == "auto":
            precision = "tf32" if self.device.type == "cuda" else "float32"
        return fit(
            every, cases, loss_of, judge, steps,
            rate=self.rate, generator=self.generator, ticks=ticks,
            quickly=lambda: quick_products(precision, self.device),
        )  # fmt: skip

    @torch.no_grad()
    def _cases(self, twin: Twin, batches: Sequence[Batch]) -> list[_Case]:
        """Every call of a layer on these batches: arguments from the converted model, outputs from the original."""
        targets: list[list[Tensor]] = []
        with self.original():
            for batch in batches:
                outputs: list[Tensor] = []
                self._pass(twin, batch, lambda args, kwargs, output, into=outputs: into.append(_first(output)))
                targets.append(outputs)
        cases: list[_Case] = []
        for batch, outputs in zip(batches, targets, strict=True):
            calls: list[tuple[Any, Any]] = []
            self._pass(twin, batch, lambda args, kwargs, output, into=calls: into.append((args, kwargs)))
            for (args, kwargs), target in zip(calls, outputs, strict=True):
                counts = tokens_that_count(self.model, batch, twin.site.path, target.shape, keys=False)
                # A cache would grow with every call that is made again.
                given = {
                    name: None if "cache" in type(value).__name__.lower() else value for name, value in kwargs.items()
                }
                cases.append(_Case(args, given, target, counts))
        return cases

    def _pass(self, twin: Twin, batch: Batch, take: Any) -> None:
        """Run the model on a batch, handing every call of one layer to `take`; no further than need be."""

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            take(args, kwargs, output)
            if twin.site.uses == 1:
                raise _Enough

        handle = twin.site.module.register_forward_hook(hook, with_kwargs=True)
        try:
            with contextlib.suppress(_Enough):
                call(self.model, batch, self.device)
        finally:
            handle.remove()

    def _outputs(
        self, ordered: list[Twin], batch: Batch, parameters: dict[str, Tensor]
    ) -> tuple[Tensor, list[tuple[str, Tensor]]]:
        """The model's output and, call by call, those of its layers."""
        found: list[tuple[str, Tensor]] = []
        handles = [
            twin.site.module.register_forward_hook(
                lambda module, args, output, path=twin.site.path: found.append((path, _first(output)))
            )
            for twin in ordered
        ]
        try:
            outputs = call(
                lambda *args, **kwargs: functional_call(self.model, parameters, args, kwargs), batch, self.device
            )
        finally:
            for handle in handles:
                handle.remove()
        return pick_output(outputs, type(self.model).__name__)[1], found


def _first(output: Any) -> Tensor:
    """A layer's output proper: what it returns, or the first thing it does."""
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor
