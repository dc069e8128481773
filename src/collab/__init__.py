"""Collaborative multi-head attention for PyTorch: find a model's attention, share its query/key space, save, load."""

from collab.config import CollaborativeConfig
from collab.decomposition import QueryKeyFactors, decompose
from collab.hosts import register_host
from collab.inspection import AttentionSite, find_attention
from collab.layer import CollaborativeAttention
from collab.swap import NoAttentionFound, SwapReport, collaborate_
from collab.version import __version__

__all__ = [
    "AttentionSite",
    "CollaborativeAttention",
    "CollaborativeConfig",
    "NoAttentionFound",
    "QueryKeyFactors",
    "SwapReport",
    "__version__",
    "collaborate_",
    "decompose",
    "find_attention",
    "register_host",
]
