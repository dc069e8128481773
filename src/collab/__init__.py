"""Collaborative multi-head attention for PyTorch: find a model's attention, share its query/key space, save, load."""

from collab.analysis import Analysis, analyze
from collab.benchmark import Timing, measure
from collab.calibration import Calibration, calibrate
from collab.checkpoint import load, save
from collab.config import CollaborativeConfig
from collab.content import ContentReport, content
from collab.cost import CostReport, LayerCost, cost, layer_cost
from collab.decomposition import QueryKeyFactors, decompose, decompose_many, error_curve
from collab.evaluate import Fidelity, compare
from collab.explanation import ExplainedAttention, Explanation, explain
from collab.head_importance import head_importance
from collab.hosts import register_host
from collab.import_hook import import_after
from collab.inspection import AttentionSite, find_attention
from collab.key_bias import KeyBiasReport, drop_key_bias_
from collab.layer import CollaborativeAttention
from collab.ops import use_implementation
from collab.pruning import PruningReport, attention_parameters, prune_heads_
from collab.refinement import Refinement, RefinementReport
from collab.reporting import Report, report
from collab.side_files import carry_side_files
from collab.sizes import SizePlan, plan
from collab.swap import NoAttentionFound, SwapReport, collaborate_
from collab.version import __version__
from collab.weights_file import CheckpointError

__all__ = [
    "Analysis",
    "AttentionSite",
    "Calibration",
    "CheckpointError",
    "CollaborativeAttention",
    "CollaborativeConfig",
    "ContentReport",
    "CostReport",
    "ExplainedAttention",
    "Explanation",
    "Fidelity",
    "KeyBiasReport",
    "LayerCost",
    "NoAttentionFound",
    "PruningReport",
    "QueryKeyFactors",
    "Refinement",
    "RefinementReport",
    "Report",
    "SizePlan",
    "SwapReport",
    "Timing",
    "__version__",
    "analyze",
    "attention_parameters",
    "calibrate",
    "carry_side_files",
    "collaborate_",
    "compare",
    "content",
    "cost",
    "decompose",
    "decompose_many",
    "drop_key_bias_",
    "error_curve",
    "explain",
    "find_attention",
    "head_importance",
    "layer_cost",
    "load",
    "measure",
    "plan",
    "prune_heads_",
    "register_host",
    "report",
    "save",
    "use_implementation",
]

# So that `from_pretrained` reads what `save` writes. transformers itself is not imported here: it takes seconds.
import_after("transformers.quantizers.auto", "collab.transformers_loading")
