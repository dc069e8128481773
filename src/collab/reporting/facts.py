"""Everything a report shows, as plain values: gathered from the two models and from what the conversion recorded."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from collab.analysis import Analysis, LayerAnalysis, analyze
from collab.cost import TOKENS, cost
from collab.evaluate import compare
from collab.hosts import Collaborative
from collab.inspection import AttentionSite
from collab.records import provenance
from collab.reporting.cells import resolve
from collab.reporting.inputs import LeftOut
from collab.reporting.latency import latencies
from collab.reporting.maps import attention_maps, mixing_maps
from collab.reporting.subject import Subject
from collab.running import device_of
from collab.structure import host_at
from collab.swap import count_parameters

FORMAT_VERSION = 1
_POINTS = 256
"""Places of a curve that are kept, at most."""


def gather(subject: Subject, progress: Callable[[Any, int], Any] | None = None) -> dict[str, Any]:
    """Every part of the report that can be had, and the reasons for those that cannot, under "left_out"."""
    facts: dict[str, Any] = {"format_version": FORMAT_VERSION, "conversion": _conversion(subject)}
    left_out: list[dict[str, str]] = []
    for part, reason in subject.why_not.items():
        if part in ("original", "record"):
            left_out.append({"part": {"original": "the original model", "record": "errors"}[part], "reason": reason})
    after = analyze(subject.converted, only=lambda site: isinstance(site.module, Collaborative))
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("layers", lambda: _layers(subject, after)),
        ("parameters", lambda: _parameters(subject)),
        ("cost", lambda: _cost(subject)),
        ("fidelity", lambda: _fidelity(subject)),
        ("spectra", lambda: _spectra(subject, after)),
        ("mixing", lambda: mixing_maps(subject)),
        ("speed", lambda: _speed(subject)),
        ("attention", lambda: attention_maps(subject)),
    ]
    for part, make in parts if progress is None else progress(parts, len(parts)):
        try:
            facts[part] = make()
        except LeftOut as reason:
            left_out.append({"part": part, "reason": str(reason)})
        except Exception as error:  # whatever a model makes of inputs it was not meant for
            left_out.append({"part": part, "reason": f"{type(error).__name__}: {' '.join(str(error).split())}"})
    seed = subject.record.get("settings", {}).get("seed", 0)
    facts["provenance"] = _provenance(subject.record.get("provenance"), provenance(seed, device_of(subject.converted)))
    errors = [row["error"] for row in facts.get("layers", ()) if row["error"] is not None]
    facts["mean_error"] = sum(errors) / len(errors) if errors else None
    facts["headline"] = _headline(facts)
    facts["left_out"] = left_out
    return facts


def _conversion(subject: Subject) -> dict[str, Any]:
    """What was converted, into what."""
    report = subject.record.get("report", {})
    sites = subject.sites
    settings = subject.record.get("settings") or getattr(
        getattr(subject.converted, "config", None), "collaborative", {}
    ).get("settings")
    return {
        "directory": str(subject.folder),
        "name": subject.folder.resolve().name,
        "model": subject.record.get("model"),
        "class": type(subject.converted).__name__,
        "dtype": str(next(subject.converted.parameters()).dtype).removeprefix("torch."),
        "layers": len(sites),
        "heads": sorted({site.num_heads for site in sites}),
        "head_dim": sorted({site.head_dim for site in sites}),
        "full_dim": sorted({site.full_dim for site in sites}),
        "shared_dim": sorted({_shared(site).shared_dim for site in sites}),
        **{
            name: ", ".join(sorted({row.get(name, "") for row in report.get("sites", ())})) or None
            for name in ("method", "metric")
        },
        "calibration": subject.record.get("calibration"),
        "refinement": report.get("refinement"),
        "settings": settings or {},
        "notes": list(report.get("notes", ())),
        "left": [{"path": path, "reasons": reasons} for path, reasons in report.get("left", {}).items()],
    }


def _layers(subject: Subject, after: Analysis) -> list[dict[str, Any]]:
    """One row a converted layer: sizes as they are, errors as they were recorded."""
    recorded = {row["path"]: row for row in subject.record.get("report", {}).get("sites", ())}
    analysed = {layer.path: layer for layer in after.layers}
    rows = []
    for site in subject.sites:
        known, used = recorded.get(site.path, {}), analysed[site.path].effective_dims or (0.0,)
        shared = _shared(site)
        rows.append(
            {
                "layer": subject.numbers[site.path],
                "path": site.path,
                "heads": site.num_heads,
                "full_dim": site.full_dim,
                "shared_dim": shared.shared_dim,
                "dims_per_head": None if shared.dims is None else shared.dims.shape[1],
                "effective_dims": {"mean": sum(used) / len(used), "least": min(used), "most": max(used)},
                **{name: known.get(name) for name in ("error", "unshared_error", "iterations")},
            }
        )
    return rows


def _parameters(subject: Subject) -> list[dict[str, Any]]:
    """Counts before and after: of the model, of its converted layers, of their queries and keys."""
    report = subject.record.get("report", {})
    before = report.get("parameters_before") if subject.original is None else count_parameters(subject.original)
    rows = [("the whole model", before, count_parameters(subject.converted))]
    after = sum(count_parameters(site.module) for site in subject.sites)
    of_layers = [row.get("parameters_before") for row in report.get("sites", ())]
    if subject.original is not None:
        of_layers = [count_parameters(subject.original.get_submodule(site.path)) for site in subject.sites]
    rows.append(("converted attention layers", sum(of_layers) if of_layers else None, after))
    counted = cost(subject.converted, only=lambda site: isinstance(site.module, Collaborative), tokens=[1]).rows[0]
    rows.append(("their queries and keys, mixing and content", counted.before.parameters, counted.after.parameters))
    return [{"what": what, **_pair(before, after)} for what, before, after in rows]


def _cost(subject: Subject) -> dict[str, Any]:
    """Operations at some lengths, and the cache of keys."""
    found = cost(subject.converted, only=lambda site: isinstance(site.module, Collaborative), tokens=TOKENS)
    first = found.rows[0]
    return {
        "flops": [{"tokens": row.tokens, **_pair(row.before.flops, row.after.flops)} for row in found.rows],
        "cache_bytes": _pair(first.before.cache_bytes, first.after.cache_bytes),
        "break_even": str(first.break_even),
    }


def _fidelity(subject: Subject) -> dict[str, Any]:
    """How far outputs moved."""
    original, judged = subject.original_or_leave(), subject.judged_or_leave()
    measured = compare(original, subject.converted, judged.batches).to_dict()
    return {"inputs": judged.count, "about": judged.about, **measured}


def _spectra(subject: Subject, after: Analysis) -> dict[str, Any]:
    """Curves of the captured energy, mean over layers, and for each layer the sizes that hold most of it."""
    known = {}
    if subject.original is not None:
        paths = {site.path for site in subject.sites}
        before = analyze(subject.original, only=lambda site: site.path in paths)
        known = {layer.path: layer for layer in before.layers}
    rows = []
    for layer in after.layers:
        earlier = known.get(layer.path)
        row = {"layer": subject.numbers[layer.path], "path": layer.path, "after": _sizes(layer)}
        rows.append(row | {"before": None if earlier is None else _sizes(earlier)})
    curves = {"before": _curves(list(known.values())) if known else None, "after": _curves(after.layers)}
    return {"share": 0.9, "layers": rows, "curves": curves}


def _sizes(layer: LayerAnalysis) -> dict[str, float]:
    """Components that hold nine tenths of the energy."""
    of_heads = layer.product.head_sizes(0.9)
    whole = {role: getattr(layer, role).concatenated_size(0.9) for role in ("query", "key", "product")}
    return {"head": sum(of_heads) / len(of_heads), **whole}


def _curves(layers: list[LayerAnalysis]) -> dict[str, dict[str, Any]]:
    """By role: mean curve of the heads and of all heads together, from zero components on, and how many there are."""
    found: dict[str, dict[str, Any]] = {}
    for role in ("query", "key", "product"):
        kinds = {
            "heads": [getattr(layer, role).mean_head for layer in layers],
            "all": [getattr(layer, role).concatenated for layer in layers],
        }
        found[role] = {kind: _mean_curve(curves) for kind, curves in kinds.items()}
    return found


def _mean_curve(curves: list[tuple[float, ...]]) -> dict[str, list[float]]:
    """The mean of curves; one that ends before others has all of its energy from there on."""
    longest = max(map(len, curves))
    whole = torch.tensor([(0.0, *curve, *([1.0] * (longest - len(curve)))) for curve in curves]).double().mean(0)
    at = torch.arange(longest + 1)[:: max(1, longest // _POINTS)]
    at = at if at[-1] == longest else torch.cat((at, torch.tensor([longest])))
    return {"components": at.tolist(), "energy": [round(value, 5) for value in whole[at].tolist()]}


def _speed(subject: Subject) -> dict[str, Any]:
    """Milliseconds of one pass: on one input, and on a batch of them."""
    original, judged = subject.original_or_leave(), subject.judged_or_leave()
    batch: Any = judged.batches[0]
    parts = dict(batch) if isinstance(batch, Mapping) else {"": batch}
    first = {name: value[:1] for name, value in parts.items()}
    cases: list[Any] = [first if isinstance(batch, Mapping) else first[""], batch]
    shapes = [next(iter(one.values())).shape if isinstance(one, Mapping) else one.shape for one in cases]
    if shapes[0] == shapes[1]:
        cases, shapes = cases[:1], shapes[:1]
    rows = []
    for case, shape in zip(cases, shapes, strict=True):
        before, after = latencies([original, subject.converted], case)
        row = {"inputs": shape[0], "size": " x ".join(map(str, shape[1:])), **_pair(before[1], after[1])}
        rows.append(row | {"before_quartiles": [before[0], before[2]], "after_quartiles": [after[0], after[2]]})
    device = device_of(subject.converted)
    return {
        "device": provenance(0, device)["device"],
        "dtype": str(next(subject.converted.parameters()).dtype).removeprefix("torch."),
        "rows": rows,
    }


def _provenance(earlier: dict[str, Any] | None, now: dict[str, Any]) -> list[dict[str, Any]]:
    """Item by item: of the conversion, as far as it is known, and of the report."""
    rows = []
    for item in ("time", "device", "seed", "commit"):
        rows.append({"item": item, "conversion": (earlier or {}).get(item), "report": now[item]})
    versions = (earlier or {}).get("versions", {})
    for package in now["versions"]:
        rows.append({"item": package, "conversion": versions.get(package), "report": now["versions"][package]})
    return rows


def _headline(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The numbers to see first: where in the facts each is, what it says, and the kind of its "before" and "after"."""
    found: list[dict[str, Any]] = []

    def add(label: str, at: str, kind: str, note: str = "", pair: str | None = None) -> None:
        if resolve(facts, at) is not None:
            found.append({"label": label, "at": at, "kind": kind, "note": note, "pair": pair})

    inputs = f"on {facts['fidelity']['inputs']:,} inputs" if "fidelity" in facts else ""
    add("same largest logit", "fidelity/same_top", "share", inputs)
    add("cosine of mean-pooled outputs", "fidelity/pooled_cosine", "cosine", inputs)
    if not found:
        add("cosine of outputs", "fidelity/mean_cosine", "cosine", inputs)
    add("error of query/key products", "mean_error", "error", "mean over layers")
    add("parameters of the model", "parameters/0/ratio", "change", pair="count")
    add("parameters of queries and keys", "parameters/2/ratio", "change", pair="count")
    add("cache of keys, per token", "cost/cache_bytes/ratio", "change", pair="bytes")
    last = len(facts.get("speed", {}).get("rows", " ")) - 1
    add("time of one pass", f"speed/rows/{last}/ratio", "change", pair="ms")
    return found


def _pair(before: float | None, after: float | None) -> dict[str, Any]:
    ratio = None if not before or after is None else after / before
    return {"before": before, "after": after, "ratio": ratio}


def _shared(site: AttentionSite) -> Any:
    return host_at(site).shared_weights(site.module)
