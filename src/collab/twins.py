"""Twin: an attention layer as it was and as it is now, both at hand, with no copy of what they have in common."""

import copy
from typing import Any

from torch import nn

from collab.inspection import AttentionSite
from collab.structure import host_at


class Twin:
    """One layer in two states; `show` puts one of them in place.

    Make it before the layer is swapped, and call `swapped` afterwards. A swap replaces parameters and attributes and
    overwrites none, so a state is the layer's classes and tables of attributes, and weights are held once.
    """

    def __init__(self, site: AttentionSite) -> None:
        self.site = site
        self._parts = host_at(site).parts(site.module)
        self._original = [_state(part) for part in self._parts]
        self._swapped = self._original

    def swapped(self) -> None:
        """Take note of the state the layer is in now as the swapped one."""
        self._swapped = [_state(part) for part in self._parts]

    def show(self, *, original: bool) -> None:
        """Put the original layer in place, or the swapped one."""
        for part, (cls, attributes) in zip(self._parts, self._original if original else self._swapped, strict=True):
            part.__class__ = cls
            for name in [name for name in vars(part) if not _is_kept(name)]:
                del vars(part)[name]
            vars(part).update(attributes)


def _is_kept(name: str) -> bool:
    """Attributes that belong to whoever uses the module, and not to its state."""
    return "hook" in name or name == "training"


def _state(part: nn.Module) -> tuple[type, dict[str, Any]]:
    return type(part), {
        name: copy.copy(value) if isinstance(value, dict) else value
        for name, value in vars(part).items()
        if not _is_kept(name)
    }
