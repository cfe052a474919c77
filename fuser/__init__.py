"""The graph compiler: ops, patterns, fusions, plans. Knows no concrete op and no kernel."""

from .compiler.graph import OpGraph
from .compiler.pattern import Match, Pattern, Run, one_or_run, optional
from .compiler.plan import Plan
from .compiler.registry import Fusion, register_fusion, registry, unregister
from .composite import Composite, FusedOp
from .container.sequential import Sequential
from .contract.config import Config
from .contract.errors import ArgumentError, DoubleBackwardError, RefusedError
from .contract.op import Buffer, Gradient, Grads, Keyword, Op, Outputs, Promises
from .contract.spec import TensorSpec
from .explain.explanation import Explanation
from .explain.model import ModelExplanation, explain

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
    "Promises",
    "RefusedError",
    "Run",
    "Sequential",
    "TensorSpec",
    "explain",
    "one_or_run",
    "optional",
    "register_fusion",
    "registry",
    "unregister",
]
