"""Every attention class of the installed libraries: supported, or why not."""

import importlib
import importlib.metadata
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

from torch import nn

from collab.hosts import hosts_of_class, why_not_class
from collab.hosts.obstacles import attends, wrapped
from collab.table import format_table


@dataclass(frozen=True)
class HostRecord:
    """What becomes of one attention class.

    Attributes:
        library: the top package: "torch", "transformers" or "timm".
        name: the class.
        module: where it is defined.
        supported: whether its instances can be made collaborative; an instance may still be refused for what it is
            configured to be, such as heads that share keys.
        reasons: why not, when it is not.
    """

    library: str
    name: str
    module: str
    supported: bool
    reasons: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self) | {"reasons": list(self.reasons)}


class Catalogue(list[HostRecord]):
    """A list of records that prints as a table."""

    def __str__(self) -> str:
        rows = [
            [f"{record.library}.{record.name}", "supported" if record.supported else "; ".join(record.reasons)]
            for record in self
        ]
        supported = sum(record.supported for record in self)
        return f"{format_table(['class', 'support'], rows)}\n{supported} of {len(self)} attention classes are supported"


def catalogue(progress: Callable[[Iterable[str], int], Iterable[str]] | None = None) -> Catalogue:
    """List every attention class of torch, and of transformers and timm where they are installed.

    Every module of theirs that defines models is imported, which takes up to a minute or two. A module that cannot be
    imported, for want of another library, has a record of its own that says so.

    Args:
        progress: wraps the loop over modules, given their names and number: a progress bar.
    """
    names = [
        "torch.nn.modules.activation",
        *_modules("transformers.models", "modeling_"),
        *_modules("timm.layers"),
        *_modules("timm.models"),
    ]
    records: list[HostRecord] = []
    for name in names if progress is None else progress(names, len(names)):
        library = name.partition(".")[0]
        try:
            module = importlib.import_module(name)
        except Exception as error:  # whatever a library's module does when it is imported, the list goes on
            reason = f"cannot be imported: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            records.append(HostRecord(library, name.rpartition(".")[2], name, False, (reason,)))
            continue
        records += [_record(library, cls) for cls in _attention_classes(module)]
    return Catalogue(sorted(records, key=lambda record: (record.library, record.name.lower(), record.module)))


def markdown(records: Sequence[HostRecord]) -> str:
    """The catalogue as a document, with the versions it was made with."""
    libraries = dict.fromkeys(record.library for record in records)
    versions = ", ".join(f"{library} {_version(library)}" for library in libraries)
    counts = Counter((record.library, _kind(record)) for record in records)
    lines = [
        "# Attention classes",
        "",
        "Written by `collab hosts --markdown`; do not edit.",
        "",
        f"Made with {versions}.",
        "",
        f"| library | {' | '.join(_KINDS)} |",
        f"| --- |{' --- |' * len(_KINDS)}",
    ]
    lines += [f"| {library} | {' | '.join(str(counts[library, kind]) for kind in _KINDS)} |" for library in libraries]
    for library in libraries:
        lines += ["", f"## {library}", "", "| class | supported | if not, why |", "| --- | --- | --- |"]
        for record in records:
            if record.library == library:
                place = record.module.removeprefix(f"{library}.").removeprefix("models.").rpartition(".modeling_")
                shown = f"`{record.name}` ({place[0] or place[2]})"
                why = "; ".join(record.reasons).replace("|", "\\|")
                lines.append(f"| {shown} | {'yes' if record.supported else 'no'} | {why} |")
    return "\n".join(lines) + "\n"


_KINDS = ("supported", "wrap another class, which counts", "not supported")


def _kind(record: HostRecord) -> str:
    if record.supported:
        return _KINDS[0]
    return _KINDS[1] if record.reasons[0].startswith("wraps ") else _KINDS[2]


def _version(library: str) -> str:
    # A local build says so after a plus sign, which is of no interest to a reader.
    return importlib.metadata.version(library).partition("+")[0]


def _modules(package_name: str, prefix: str = "") -> Iterator[str]:
    """Names of the modules below a package that start with a prefix; none when it is not installed."""
    try:
        package = importlib.import_module(package_name)
    except ImportError:
        return
    for module in pkgutil.walk_packages(package.__path__, f"{package_name}.", onerror=lambda name: None):
        if not module.ispkg and module.name.rpartition(".")[2].startswith(prefix):
            yield module.name


def _attention_classes(module: ModuleType) -> Iterator[type[nn.Module]]:
    """Attention classes that a module defines: those a host serves, and those whose name and code say so."""
    for cls in vars(module).values():
        if not (inspect.isclass(cls) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__):
            continue
        named = "Attention" in cls.__name__ and not cls.__name__.endswith(("Output", "Projection", "Loss", "Model"))
        if hosts_of_class(cls) or (named and (attends(cls) or wrapped(cls))):
            yield cls


def _record(library: str, cls: type[nn.Module]) -> HostRecord:
    supported = bool(hosts_of_class(cls))
    inner = wrapped(cls)
    if supported:
        reasons = []
    elif inner and not attends(cls):
        reasons = [f"wraps {', '.join(inner)}"]
    else:
        reasons = why_not_class(cls)
    return HostRecord(library, cls.__name__, cls.__module__, supported, tuple(reasons))
