"""RunRecord: what was run, what came out, and where it came from; kept as JSON lines that only ever grow."""

import dataclasses
import importlib.metadata
import json
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from collab.version import __version__

_PACKAGES = ("torch", "transformers", "timm")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run: enough to tell what a number means and to get it again.

    Attributes:
        name: what was run.
        config: its settings.
        metrics: what it measured.
        provenance: seed, commit, device, versions and time, as `provenance` gives them.
    """

    name: str
    config: dict[str, Any]
    metrics: dict[str, Any]
    provenance: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunRecord":
        """Rebuild a record; missing and unknown keys are errors that name them."""
        known = {item.name for item in dataclasses.fields(cls)}
        if set(values) != known:
            raise ValueError(f"a record must have the keys {sorted(known)}, got {sorted(values)}")
        return cls(**values)


def provenance(seed: int, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Where a result came from: seed, commit, device, versions, time.

    `commit` is that of the checkout this package is in, with "+changes" where the sources differ from it; None where
    there is no checkout.
    """
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {"collab": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    threads = torch.get_num_threads()
    return {
        "seed": seed,
        "commit": _commit(),
        "device": f"{device.type} ({name}, {threads} thread{'s' * (threads > 1)})",
        "versions": versions,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def append_record(path: str | Path, record: RunRecord) -> None:
    """Add a record to the end of a file of JSON lines, made if it is not there."""
    line = json.dumps(record.to_dict(), allow_nan=False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_records(path: str | Path) -> list[RunRecord]:
    """Every record of a file, oldest first."""
    records = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            records.append(RunRecord.from_dict(json.loads(line)))
        except (ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{path}, line {number}, must be a record: {error}") from error
    return records


def _commit() -> str | None:
    package = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(package), *arguments], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        # A package installed inside another project's checkout is not tracked there.
        if not git("ls-files", "--", "records.py"):
            return None
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None
