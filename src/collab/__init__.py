"""Collaborative multi-head attention for PyTorch: find a model's attention, share its query/key space, save, load."""

from collab.checkpoint import load, save
from collab.config import CollaborativeConfig
from collab.decomposition import QueryKeyFactors, decompose
from collab.evaluate import Fidelity, compare
from collab.hosts import register_host
from collab.import_hook import import_after
from collab.inspection import AttentionSite, find_attention
from collab.layer import CollaborativeAttention
from collab.side_files import carry_side_files
from collab.swap import NoAttentionFound, SwapReport, collaborate_
from collab.version import __version__
from collab.weights_file import CheckpointError

__all__ = [
    "AttentionSite",
    "CheckpointError",
    "CollaborativeAttention",
    "CollaborativeConfig",
    "Fidelity",
    "NoAttentionFound",
    "QueryKeyFactors",
    "SwapReport",
    "__version__",
    "carry_side_files",
    "collaborate_",
    "compare",
    "decompose",
    "find_attention",
    "load",
    "register_host",
    "save",
]

# So that `from_pretrained` reads what `save` writes. transformers itself is not imported here: it takes seconds.
import_after("transformers.quantizers.auto", "collab.transformers_loading")
