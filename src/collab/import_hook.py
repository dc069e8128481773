"""Let this package follow another into a process, whichever of the two is imported first."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def import_after(trigger: str, module: str) -> None:
    """Import `module` once `trigger` has been imported: now if it has been, else right after; `trigger` may never come.

    What cannot be imported then is a warning, not an error: the import of another library must not fail on our account.
    """
    if trigger in sys.modules:
        _import_or_warn(module)
    elif not any(isinstance(finder, _Follower) and finder.module == module for finder in sys.meta_path):
        sys.meta_path.insert(0, _Follower(trigger, module))


class _Follower(MetaPathFinder):
    """Finds nothing itself: it has the others find `trigger`, and adds one step to its execution."""

    def __init__(self, trigger: str, module: str) -> None:
        self.trigger, self.module = trigger, module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.trigger:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_follow(module: ModuleType) -> None:
            execute(module)
            _import_or_warn(self.module)

        spec.loader.exec_module = execute_and_follow  # type: ignore[method-assign]
        return spec


def _import_or_warn(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        warnings.warn(f"could not import {module}: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
