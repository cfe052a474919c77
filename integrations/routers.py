"""Routers of Hugging Face transformers' models, run by :func:`fusible.functional.route`.

fusible.integrations.routers.route(model)
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from functools import partial
from types import MethodType

import torch
from torch import Tensor, nn

from .hugging_face.router_formula import Formulas, formulas_of, tensor_of

ATTRIBUTE = "_fusible_router"


class PaddingMask:
    """The mask of a model's running call: bool [B, S], True for a real token; None without one."""

    def __init__(self) -> None:
        self.valid: Tensor | None = None


def route(model: nn.Module) -> dict[str, str]:
    """Lets routers of a transformers model choose by :func:`fusible.functional.route`, where that is their formula.

    The formula is found by trial: experts, weights and gradients of the router's own code on random numbers. Parameters
    and their names stay, and so do the results, but of experts with equal scores the lower one is chosen. Under
    autocast, and for hidden states of another dtype, a router runs its own code; float32 weights may be cast to 16 bits
    for a call, as FSDP2 does.

    Call it before weights are sharded.

    If the experts are ``"fusible"``, a 2-D ``attention_mask`` of a call keeps padding from all experts, except in
    training with activation checkpointing, whose second forward does not see the mask.

    Returns:
        The name of each router, with the reason why its own code stays; "" where it does not.

    >>> import torch, fusible.integrations.routers
    >>> fusible.integrations.routers.route(torch.nn.Linear(2, 2))
    {}
    """
    reasons, padding, of_forms = dict[str, str](), PaddingMask(), dict[Hashable, Formulas | str]()
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    for name, module in model.named_modules():
        if not _is_router(module):
            continue
        form = _form(module)
        if form not in of_forms:
            with torch.inference_mode(False), torch.enable_grad():  # a trial compares gradients, too
                of_forms[form] = formulas_of(module, dtype)
        formulas = of_forms[form]
        reasons[name] = formulas if isinstance(formulas, str) else ""
        if not isinstance(formulas, str):
            setattr(module, ATTRIBUTE, (next(iter(formulas.values())).weight, formulas, padding))
            module.forward = MethodType(_forward, module)
    if "" in reasons.values():
        for called in {model, getattr(model, "base_model", model)}:
            _, *names = inspect.signature(type(called).forward).parameters
            called.register_forward_pre_hook(partial(_note_padding, padding, tuple(names)), with_kwargs=True)
            called.register_forward_hook(partial(_forget_padding, padding))
    return reasons


def _forward(router: nn.Module, hidden_states: Tensor, *arguments: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
    """The ``forward`` of a router whose formula is known."""
    weight, formulas, padding = getattr(router, ATTRIBUTE)
    formula = formulas.get((hidden_states.dtype, tensor_of(router, weight).dtype))
    if formula is None or torch.is_autocast_enabled(hidden_states.device.type):
        theirs: tuple[Tensor, ...] = type(router).forward(router, hidden_states, *arguments, **named)
        return theirs
    valid, tokens = padding.valid, hidden_states.numel() // hidden_states.shape[-1]
    valid = valid.reshape(-1) if valid is not None and valid.numel() == tokens else None
    return tuple(formula.run(router, hidden_states, (*arguments, *named.values()), valid))


def _note_padding(
    padding: PaddingMask,
    names: tuple[str, ...],
    model: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    """Keeps the mask of a call for its routers. ``names``: those of the arguments of the model.

    A model with a head may give its base model another form of the mask: then that of its own call stays.
    """
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    mask, tokens = call.get("attention_mask"), call.get("input_ids")
    tokens = call.get("inputs_embeds") if tokens is None else tokens
    is_2d = isinstance(mask, Tensor) and mask.dim() == 2
    if getattr(model, "base_model", None) is model and mask is not None and not is_2d:
        return
    padding.valid = None
    if not (isinstance(mask, Tensor) and is_2d and isinstance(tokens, Tensor)):
        return
    implementation = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if implementation == "fusible" and not (model.training and _recomputes(model)):
        padding.valid = mask[:, -tokens.shape[1] :].bool()  # a cache has the others


def _forget_padding(padding: PaddingMask, *call: object) -> None:
    """Ends the call: parts of the model that run later, as in a recomputation, may belong to another one."""
    padding.valid = None


def _recomputes(model: nn.Module) -> bool:
    name = "is_activation_checkpointing"  # since transformers 5.24
    return bool(getattr(model, name if hasattr(type(model), name) else "is_gradient_checkpointing", False))


def _is_router(module: nn.Module) -> bool:
    return "router" in type(module).__name__.lower() and any(p.dim() == 2 for p in module.parameters())


def _form(module: nn.Module) -> Hashable:
    """All that the formula depends on: the class, its attributes, and the forms of tensors."""
    simple = int, float, str, bool, type(None)
    attributes = [
        (path, name, value if isinstance(value, simple) else id(value))
        for path, each in module.named_modules()
        for name, value in vars(each).items()
        if not name.startswith("_") and name != "training"
    ]
    return type(module), tuple(attributes), tuple([(n, t.shape, t.dtype) for n, t in module.state_dict().items()])
