"""GLUE's tasks: sentences and labels, from GLUE's files in a folder or an archive, or from the hub."""

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HUB = "nyu-mll/glue"


@dataclass(frozen=True)
class Layout:
    """How one file keeps examples: the columns of the sentences and of the label, by name or by position from 0."""

    sentences: tuple[str | int, ...]
    label: str | int

    @property
    def has_header(self) -> bool:
        """Whether columns have names, in the first line."""
        return isinstance(self.label, str)


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as GLUE writes it.
        hub: its name on the hub.
        fields: the hub's names of its sentences.
        metrics: what it is judged by; their mean is its score.
        labels: its classes, in the hub's order; none where the label is a number.
        epochs: how long the paper trains on it.
        files: split -> file names, each with its layout.
    """

    name: str
    hub: str
    fields: tuple[str, ...]
    metrics: tuple[str, ...]
    labels: tuple[str, ...]
    epochs: float
    files: dict[str, dict[str, Layout]]

    @property
    def dev_splits(self) -> tuple[str, ...]:
        """What it is judged on; MNLI on two."""
        return tuple(split for split in self.files if split != "train")


@dataclass(frozen=True)
class Examples:
    """Some examples of a task.

    Attributes:
        sentences: one or two texts for each.
        labels: the number of its class, or a score.
    """

    sentences: list[tuple[str, ...]]
    labels: list[float]

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, count: int | None) -> "Examples":
        """So many of them, the first."""
        return self if count is None else Examples(self.sentences[:count], self.labels[:count])


def _both(layout: Layout, train: str = "train.tsv", dev: str = "dev.tsv") -> dict[str, dict[str, Layout]]:
    return {"train": {train: layout}, "dev": {dev: layout}}


_PAIR = Layout(("sentence1", "sentence2"), "label")
_MNLI = Layout(("sentence1", "sentence2"), "gold_label")
_STSB = {
    split: {f"{split}.tsv": Layout(("sentence1", "sentence2"), "score"), f"sts-{split}.csv": Layout((5, 6), 4)}
    for split in ("train", "dev")
}
_ENTAILS = ("entailment", "not_entailment")

TASKS = {
    task.name: task
    for task in (
        Task("CoLA", "cola", ("sentence",), ("matthews",), ("0", "1"), 3, _both(Layout((3,), 1))),
        Task("SST-2", "sst2", ("sentence",), ("accuracy",), ("0", "1"), 10, _both(Layout(("sentence",), "label"))),
        Task(
            "MRPC", "mrpc", ("sentence1", "sentence2"), ("f1", "accuracy"), ("0", "1"), 3,
            _both(Layout(("#1 String", "#2 String"), "Quality")),
        ),
        Task("STS-B", "stsb", ("sentence1", "sentence2"), ("pearson", "spearman"), (), 3, _STSB),
        Task(
            "QQP", "qqp", ("question1", "question2"), ("f1", "accuracy"), ("0", "1"), 3,
            _both(Layout(("question1", "question2"), "is_duplicate")),
        ),
        Task(
            "MNLI", "mnli", ("premise", "hypothesis"), ("accuracy",), ("entailment", "neutral", "contradiction"), 3,
            {
                "train": {"train.tsv": _MNLI},
                "dev": {"dev_matched.tsv": _MNLI},
                "dev_mismatched": {"dev_mismatched.tsv": _MNLI},
            },
        ),
        Task(
            "QNLI", "qnli", ("question", "sentence"), ("accuracy",), _ENTAILS, 3,
            _both(Layout(("question", "sentence"), "label")),
        ),
        Task("RTE", "rte", ("sentence1", "sentence2"), ("accuracy",), _ENTAILS, 10, _both(_PAIR)),
    )
}  # fmt: skip


def task_named(name: str) -> Task:
    """A task by its name, in any case, with or without hyphens."""
    names = {_plain(known): task for known, task in TASKS.items()}
    if _plain(name) not in names:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")
    return names[_plain(name)]


def read_examples(task: Task, source: str, split: str) -> Examples:
    """A split of a task.

    Args:
        task: which one.
        source: "hub", or a folder or tar archive with GLUE's files, as `MRPC/train.tsv`, in folders of any name above.
        split: "train", "dev", or MNLI's "dev_mismatched".

    Raises:
        FileNotFoundError: there is no such file in it; it says which there are.
        ValueError: a file is not as GLUE writes it.
    """
    if source == "hub":
        return _from_hub(task, split)
    path = Path(source).expanduser()
    found = _find(path, task, tuple(task.files[split]))
    if found is None:
        others = sorted(name for name, _ in _members(path) if _plain(task.name) in map(_plain, Path(name).parts))
        raise FileNotFoundError(
            f"{task.name} needs {' or '.join(task.files[split])} for its {split} examples; "
            f"{path} has of {task.name}: {', '.join(others) or 'nothing'}"
        )
    name, text = found
    return _parse(text, task, task.files[split][Path(name).name], f"{path}: {name}")


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _members(path: Path) -> list[tuple[str, Any]]:
    """(name, how to read it) of the files of a folder or an archive."""
    if path.is_dir():
        return [(str(file.relative_to(path.parent)), file) for file in sorted(path.rglob("*")) if file.is_file()]
    if not path.is_file():
        raise FileNotFoundError(f"data must be hub, a folder or a tar archive with GLUE's files, got {path}")
    try:
        with tarfile.open(path) as archive:
            return [(member.name, member) for member in archive.getmembers() if member.isfile()]
    except tarfile.TarError as error:
        raise ValueError(f"{path} must be a folder or a tar archive with GLUE's files: {error}") from None


def _find(path: Path, task: Task, names: tuple[str, ...]) -> tuple[str, str] | None:
    for name, member in _members(path):
        parts = Path(name).parts
        if parts[-1] in names and len(parts) > 1 and _plain(parts[-2]) == _plain(task.name):
            if isinstance(member, Path):
                return name, member.read_text(encoding="utf-8")
            with tarfile.open(path) as archive:
                file = archive.extractfile(member)
                assert file is not None
                return name, file.read().decode("utf-8")
    return None


def _parse(text: str, task: Task, layout: Layout, where: str) -> Examples:
    """Lines of tab-separated columns, in which quotation marks mean nothing."""
    lines = (line.rstrip("\r\n") for line in io.StringIO(text, newline="\n"))
    wanted = (*layout.sentences, layout.label)
    if layout.has_header:
        header = next(lines, "").lstrip("\ufeff").split("\t")
        missing = [str(name) for name in wanted if name not in header]
        if missing:
            raise ValueError(f"{where} must have the columns {', '.join(missing)}, got {', '.join(header)}")
        columns = [header.index(str(name)) for name in wanted]
    else:
        columns = [int(name) for name in wanted]
    sentences, labels = [], []
    for number, cells in _rows(lines, max(columns)):
        *texts, label = (cells[column].strip() for column in columns)
        sentences.append(tuple(texts))
        try:
            labels.append(_label(task, label))
        except ValueError:
            known = f"one of {', '.join(task.labels)}" if task.labels else "a number"
            raise ValueError(f"{where}, example {number}: the label must be {known}, got {label!r}") from None
    if not labels:
        raise ValueError(f"{where} must hold examples, got none")
    return Examples(sentences, labels)


def _rows(lines: Iterator[str], last: int) -> Iterator[tuple[int, list[str]]]:
    """The rows that are whole: QQP's file has a few that were cut in two."""
    for number, line in enumerate(lines, start=1):
        cells = line.split("\t")
        if len(cells) > last:
            yield number, cells


def _label(task: Task, text: str) -> float:
    if not task.labels:
        return float(text)
    # Some editions of the files write a class by its name, some by its number.
    return task.labels.index(text) if text in task.labels else range(len(task.labels)).index(int(text))


def _from_hub(task: Task, split: str) -> Examples:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "data from the hub needs datasets: pip install datasets; or give data, a folder or archive of GLUE's files",
            name="datasets",
        ) from error
    names = {"train": "train", "dev": "validation", "dev_mismatched": "validation_mismatched"}
    name = "validation_matched" if task.name == "MNLI" and split == "dev" else names[split]
    rows = datasets.load_dataset(HUB, task.hub, split=name)
    columns = [rows[field] for field in task.fields]
    return Examples(list(zip(*columns, strict=True)), [float(label) for label in rows["label"]])
