"""The experts implementation ``"fusible"`` for Hugging Face transformers; importing this module registers it.

``import fusible`` imports it in programs that import transformers' models, before or after.

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="fusible")

or, for a model that is loaded, ``model.set_experts_implementation("fusible")``.
"""

from __future__ import annotations

import sys
import warnings

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations import moe

from ..fuser.explain.model import LayerContainer, add_finder
from . import quantizers
from .hugging_face import compiled, float8_experts, lora
from .hugging_face.experts import ExpertsForward, ModuleParameters, built_before, built_of, existing, refusal
from .hugging_face.gates import ModelExperts, is_experts
from .hugging_face.stored_experts import is_stored
from .quantizers import bits_and_bytes, float8_blocks, modelopt

NAME = "fusible"
OLDEST = (5, 7)

_warned: set[tuple[str, str]] = set()


def experts_forward(self: ModelExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Runs the routed experts of a layer: rows sorted by expert, both linears and the op between them, weighted sum.

    Args:
        self: the experts module of the model.
        hidden_states: [T, H].
        top_k_index: int [T, k]; ids below 0, or not below the number of local experts, belong to no local expert and
            add nothing.
        top_k_weights: [T, k], kept in their own dtype.

    Returns:
        [T, H], in the dtype of ``hidden_states``.
    """
    traced, tensors = torch.compiler.is_dynamo_compiling(), (hidden_states, top_k_index, top_k_weights)
    if is_stored(self):
        y: Tensor = lora.stored_forward(self, *tensors)
        return y
    if not traced and lora.ATTRIBUTE in self.__dict__ and self.__dict__[lora.ATTRIBUTE] is not None:
        adapted = lora.experts_forward(self, *tensors)
        if adapted is not None:
            return adapted
    built = None if traced else built_before(self)
    if built is not None:
        return built.run(*tensors)
    parameters = ModuleParameters.of(self)
    why = refusal(self, parameters)
    if why is not None:
        return _delegate(self, why, moe.grouped_mm_experts_forward)(self, *tensors)
    if traced:
        return compiled.experts_forward(self, parameters, *tensors)
    built = built_of(self, parameters)
    try:
        return built.run(*tensors)
    finally:
        built.let_go(self)


def register() -> None:
    """Makes ``"fusible"`` an experts implementation; called once, by the import of this module.

    Raises:
        ImportError: transformers is too old to let others register.
    """
    installed = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if installed < OLDEST:
        raise ImportError(
            f"fusible.integrations.transformers needs transformers {'.'.join(map(str, OLDEST))} or newer, "
            f"found {transformers.__version__}"
        )
    moe.ExpertsInterface.register(NAME, experts_forward)
    _register_fp8()
    _register_expert_parallelism()
    replaced = quantizers.REPLACED | bits_and_bytes.REPLACED | float8_blocks.REPLACED
    quantizers.register(replaced, home=sys.modules[__name__])
    modelopt.register()
    add_finder(_explained)


def _register_fp8() -> None:
    """Registers with the separate registry for FP8 models; the stock implementation runs unsupported cases."""
    try:
        from transformers.integrations import finegrained_fp8 as fp8
    except ImportError:
        return

    def forward(
        self: float8_experts.Float8Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        tensors = hidden_states, top_k_index, top_k_weights
        layer = self.__dict__.get(lora.ATTRIBUTE)
        if layer is not None and layer.adapters:
            y: Tensor = lora.stored_forward(self, *tensors)
            return y
        why = float8_experts.refusal(self, hidden_states)
        if why is None:
            return float8_experts.run(self, *tensors)
        return _delegate(self, why, fp8.fp8_grouped_mm_experts_forward)(self, *tensors)

    fp8.FP8ExpertsInterface.register(NAME, forward)


def _register_expert_parallelism() -> None:
    """Registers with the registry of expert parallelism, which transformers has had since 5.24."""
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface  # noqa: F401
    except ImportError:
        return
    from . import transformers_ep  # noqa: F401


def _delegate(experts: ModelExperts, why: str, stock: ExpertsForward) -> ExpertsForward:
    """The stock implementation, after one warning for each class and reason."""
    case = type(experts).__name__, why
    if case not in _warned:
        _warned.add(case)
        warnings.warn(f"fusible: {case[0]} runs through transformers' own grouped_mm: {why}", stacklevel=4)
    return stock


def _explained(module: nn.Module) -> LayerContainer | str | None:
    """The container of an experts module for ``fusible.explain(model)``, or a text on what runs it instead."""
    if not is_experts(module):
        return None
    implementation = module.config._experts_implementation
    if implementation != NAME:
        return f"experts_implementation is {implementation!r}; model.set_experts_implementation({NAME!r}) runs it here"
    if float8_experts.is_float8(module):
        float8 = float8_experts.existing(module)
        return "no call yet" if float8 is None else LayerContainer(float8.container, "")
    adapted = lora.explained(module)
    if adapted is not None or is_stored(module):
        return adapted or "no call yet"
    built = existing(module)
    if built is not None:  # also between the calls of a sharded model, when its parameters are DTensors
        return LayerContainer(built.container, built.routing)
    why = refusal(module, ModuleParameters.of(module))
    return "no call yet" if why is None else f"transformers' own grouped_mm runs it: {why}"


register()
