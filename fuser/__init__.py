"""The graph compiler: ops, patterns, fusions, plans. Knows no concrete op and no kernel."""

from .chain import Composite, FusedOp
from .errors import ArgumentError, DoubleBackwardError, RefusedError
from .explanation import Explanation
from .fusion import Fusion, register_fusion, registry, unregister
from .graph import OpGraph
from .model_explanation import ModelExplanation, explain
from .op import Buffer, Gradient, Grads, Keyword, Op, Outputs
from .pattern import Match, Pattern, optional
from .plan import Plan
from .sequential import Sequential
from .settings import Config, config
from .spec import Spec

__all__ = [
    "ArgumentError",
    "Buffer",
    "Composite",
    "Config",
    "DoubleBackwardError",
    "Explanation",
    "FusedOp",
    "Fusion",
    "Gradient",
    "Grads",
    "Keyword",
    "Match",
    "ModelExplanation",
    "Op",
    "OpGraph",
    "Outputs",
    "Pattern",
    "Plan",
    "RefusedError",
    "Sequential",
    "Spec",
    "config",
    "explain",
    "optional",
    "register_fusion",
    "registry",
    "unregister",
]
