"""What a report is of: the two models, what is known of the conversion, and what there is to run them on."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from collab.hosts import Collaborative
from collab.inspection import AttentionSite, find_attention
from collab.reporting.inputs import Example, Judged, LeftOut


@dataclass
class Subject:
    """What a report is of.

    Attributes:
        folder: where the converted model is.
        converted: the converted model.
        original: the original, or None.
        record: what `collab convert` wrote of the conversion; empty if it is not known.
        judged: what to run the models on, or None.
        example: whose attention to draw, or None.
        why_not: what is missing ("original", "record", "judged", "example") -> why.
    """

    folder: Path
    converted: nn.Module
    original: nn.Module | None
    record: dict[str, Any]
    judged: Judged | None
    example: Example | None
    why_not: dict[str, str] = field(default_factory=dict)

    @property
    def sites(self) -> list[AttentionSite]:
        """The layers that are converted."""
        return [site for site in find_attention(self.converted) if isinstance(site.module, Collaborative)]

    @property
    def numbers(self) -> dict[str, int]:
        """Path -> number of the layer, counted from zero over all attention of the model, converted or not."""
        return {site.path: number for number, site in enumerate(find_attention(self.converted))}

    def original_or_leave(self) -> nn.Module:
        """The original model; without it, what asks for it is left out."""
        if self.original is None:
            raise LeftOut(f"it takes the original model, and {self.why_not['original']}")
        return self.original

    def judged_or_leave(self) -> Judged:
        """The inputs to judge by; without them, what asks for them is left out."""
        if self.judged is None:
            raise LeftOut(self.why_not["judged"])
        return self.judged
