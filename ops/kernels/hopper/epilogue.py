"""Our Hopper kernels with an activation or its backward in the epilogue: one launch instead of a product and a pass."""

from __future__ import annotations

import torch
from torch import Tensor

from ...values.activation_spec import ActivationSpec
from ..architecture import assumed
from ..extension import TYPE_CODES, address, compiled, workspace_bytes
from ..jit import epilogue as functions
from ..problems.gemm import Activate, ActivateBackward, GroupedGemm, first
from . import arrivals
from .column_operands import ColumnGradients, ColumnOperands
from .operands import as_float32, bias_fields, product_fields, second_depth, second_fields
from .rows import ActivationFields, activation, scale_arguments

NAME = "hopper (activation in the epilogue)"
_TILE = 256  # columns of the widest tile: a block of gate and as much of up must fit in
_NARROW = (1, 2, 4)  # blocks that are told apart within sixteen columns


def name_of(spec: ActivationSpec) -> str:
    """The name in ``explain`` of a product with this activation in its epilogue."""
    return NAME if spec.program is None else f"hopper ({spec.name} in the epilogue)"


def configuration(problem: GroupedGemm, epilogue: Activate | ActivateBackward) -> str:
    """A text of the product with its epilogue and the chosen configuration."""
    p, (_, n, k), spec = problem, problem.mnk, epilogue.spec
    backward = isinstance(epilogue, ActivateBackward)
    columns = n // 2 if spec.gated and not backward else n
    shape = backward, spec.gated, spec.block or columns, TYPE_CODES[p.a.dtype]
    sizes = p.groups, p.rows, n, k, p.bias is not None, second_depth(p), spec.program is not None
    chosen = compiled().linear_activation_config(*shape, p.a.get_device(), *sizes)
    return f"{p}: {chosen}"


def refusal(problem: GroupedGemm) -> str | None:
    """Why a product that this backend takes cannot have its epilogue; None: it can."""
    epilogue = problem.epilogue
    if epilogue is None:
        return None
    if type(epilogue) is Activate:
        return _forward_refusal(problem, epilogue)
    return _backward_refusal(problem, epilogue)


def slower(problem: GroupedGemm) -> str | None:
    """Why a product whose epilogue this backend has is faster with a kernel over rows behind it; None: it is not.

    Tiles of this epilogue round the rows of a group up to 64, and tiles of such products alone to 16.
    """
    epilogue, depth = problem.epilogue, problem.mnk[2]
    if type(epilogue) is not ActivateBackward or epilogue.spec.program is not None or problem.second is not None:
        return None
    if (
        epilogue.grads.bias is not None
        or epilogue.vectors is not None
        or not 160 <= problem.rows // problem.groups <= 320
    ):
        return None
    return "is slower at 160 to 320 rows per group and such a depth" if depth >= 4096 else None


def _forward_refusal(problem: GroupedGemm, epilogue: Activate) -> str | None:
    postact, block, preact = first(problem.out), epilogue.spec.block, epilogue.preact
    if (why := tile_refusal(block, postact.shape[-1])) is not None:
        return why
    if problem.alpha is not None or problem.row_scale is not None or problem.beta is not None:
        return "takes no factor but the scales of the bias"
    rows = (postact,) if preact is None else (postact, preact)
    why = _scales_refusal(epilogue.scales) or _rows_refusal(problem, rows)
    why = why or _operands_refusal(problem, epilogue.spec, postact.shape[-1])
    return why or _function_refusal(problem, epilogue.spec, postact.shape[-1])


def tile_refusal(block: int | None, features: int) -> str | None:
    """Why no tile of the forward has the columns of gate and of up of these features; None: one has."""
    fits = block is None or block in (*_NARROW, features) or (block % 8 == 0 and _TILE % (2 * block) == 0)
    return None if fits else f"has no tile for blocks of {block} columns"


def _backward_refusal(problem: GroupedGemm, epilogue: ActivateBackward) -> str | None:
    block, grads = epilogue.spec.block, epilogue.grads
    if block is not None and block not in _NARROW and block % 8:
        return f"has no loads for blocks of {block} columns"
    p = problem
    if p.alpha is not None or p.beta is not None or p.bias is not None or p.row_scale is not None:
        return "takes no factors"
    if grads.bias is not None and grads.bias.dtype not in TYPE_CODES:
        return "needs biases of 16 or 32 bits"
    rows = (epilogue.preact, grads.preact) if grads.postact is None else (epilogue.preact, grads.preact, grads.postact)
    why = _scales_refusal(epilogue.scales) or _rows_refusal(problem, rows)
    why = why or _operands_refusal(problem, epilogue.spec, problem.mnk[1])
    return why or _function_refusal(problem, epilogue.spec, problem.mnk[1])


def _function_refusal(problem: GroupedGemm, spec: ActivationSpec, columns: int) -> str | None:
    """Why the function of a user has no kernels. They are compiled here, unless the GPU is only assumed.

    The problem keeps them for its launch.
    """
    operands = _operands(problem, spec, columns)
    if operands is None or assumed() is not None or problem.epilogue is None:
        return None
    form = _form(problem, operands, columns)
    problem.epilogue.kernels = _handles(form)
    return functions.refusal(form) if problem.epilogue.kernels is None else None


def _handles(form: functions.EpilogueForm) -> tuple[int, ...] | None:
    handles = functions.handles(form)
    return handles if isinstance(handles, tuple) else None


def _form(problem: GroupedGemm, operands: ColumnOperands, columns: int) -> functions.EpilogueForm:
    ending, extras = problem.epilogue, (problem.bias is not None, problem.second is not None)
    backward, program = isinstance(ending, ActivateBackward), operands.program
    types, of_elements = operands.types[: len(program.columns)], operands.types[len(program.columns) :]
    sums = isinstance(ending, ActivateBackward) and ending.grads.vectors is not None
    blocks = functions.blocks_of(program, backward, operands.block, columns)
    scales = ending is not None and ending.scales is not None
    return functions.EpilogueForm(
        *(program, backward, problem.layout, problem.a.dtype, *blocks, *extras, types, sums, scales, of_elements)
    )


def activation_of(problem: GroupedGemm, spec: ActivationSpec, columns: int) -> ActivationFields:
    """The activation of the epilogue as the extension wants it, with the kernels of a user's function."""
    operands = _operands(problem, spec, columns)
    if operands is None:
        return activation(spec, columns)
    kept = None if problem.epilogue is None else problem.epilogue.kernels
    handles = kept or _handles(_form(problem, operands, columns))
    assert handles is not None
    kernel, other, deep = (*handles, 0, 0)[:3]
    return activation(spec, columns)._replace(kernel=kernel, other_kernel=other, deep_kernel=deep)


def _operands_refusal(problem: GroupedGemm, spec: ActivationSpec, columns: int) -> str | None:
    operands = _operands(problem, spec, columns)
    if operands is None:
        return None
    if spec.block in _NARROW and any(len(names) == 2 for names in operands.program.matrix_operands.values()):
        return f"has no loads of matrices of gate and up for blocks of {spec.block} columns"
    return operands.refusal()


def _operands(problem: GroupedGemm, spec: ActivationSpec, columns: int) -> ColumnOperands | None:
    """The operands of a user's function beside the product and the scales; None for a built-in activation."""
    of_groups = None if spec.program is None else problem.of_groups
    if of_groups is None:
        return None if spec.program is None else ColumnOperands.of(spec, None, columns)
    return ColumnOperands.of(spec, of_groups.vectors, columns, of_groups.matrices)


def _scales_refusal(scales: Tensor | None) -> str | None:
    if scales is None or (scales.dtype in TYPE_CODES and scales.is_contiguous()):
        return None
    return "needs dense scales of 16 or 32 bits"


def _rows_refusal(problem: GroupedGemm, buffers: tuple[Tensor, ...]) -> str | None:
    """Rows are read and written in pieces of 16 bytes."""
    dtype = problem.a.dtype
    for rows in buffers:
        if rows.dtype != dtype or rows.shape[-1] % 8:
            return "needs hidden rows of a multiple of 8 columns, in the dtype of the operands"
        if not rows.is_contiguous() or rows.storage_offset() % 8:
            return "needs rows that are dense and aligned to 16 bytes"
    return None


def forward(problem: GroupedGemm, epilogue: Activate, variant: int = -1) -> None:
    """``out`` = activation of the product, times the scales; the product itself into ``preact``, if there is one.

    Args:
        variant: a tile variant instead of the cost model's, for tests and tuning.
    """
    p, postact = problem, first(problem.out)
    bias_scale = None if p.bias is None else as_float32(p.bias_scale)
    scales, scales_type = scale_arguments(epilogue.scales)
    if p.arrived is not None and arrivals.are_waited_for(p):
        launch, kept = arrivals.arguments(p), p.arrived
    else:
        kept = p.a.new_empty(workspace_bytes(p.groups), dtype=torch.uint8)
        launch = {"workspace": kept.data_ptr()}
    compiled().linear_activation(
        activation=activation_of(p, epilogue.spec, postact.shape[-1]),
        **product_fields(p, p.mnk[1]),
        preact=address(epilogue.preact),
        postact=postact.data_ptr(),
        **bias_fields(p.bias, bias_scale),
        scales=scales,
        scales_type=scales_type,
        vectors=_input_addresses(p, epilogue.spec, postact.shape[-1]),
        variant=variant,
        **launch,
        **second_fields(p.second),
    )


def backward(problem: GroupedGemm, epilogue: ActivateBackward, variant: int = -1) -> None:
    """Computes the tensors in ``grads``, from the product, which is the gradient of the hidden rows, and ``preact``."""
    p, columns, library, grads = problem, problem.mnk[1], compiled(), epilogue.grads
    bias_columns, bias_type = (0, 0) if grads.bias is None else (grads.bias.shape[1], TYPE_CODES[grads.bias.dtype])
    program = epilogue.spec.program
    dvectors = None
    if program is not None and grads.vectors is not None:
        dvectors = ColumnGradients.of(program, grads.vectors, columns)
    scales, scales_type = scale_arguments(epilogue.scales)
    size = library.backward_workspace_bytes(
        groups=p.groups,
        tokens=p.rows,
        columns=columns,
        dscales=grads.scales is not None,
        bias_columns=bias_columns,
        dvectors=0 if program is None or dvectors is None else len(program.columns),
    )
    workspace = p.a.new_empty(size, dtype=torch.uint8)
    library.linear_activation_backward(
        activation=activation_of(p, epilogue.spec, columns),
        **product_fields(p, columns),
        preact=epilogue.preact.data_ptr(),
        dpreact=grads.preact.data_ptr(),
        scales=scales,
        scales_type=scales_type,
        dscales=address(grads.scales),
        postact=address(grads.postact),
        dbias=address(grads.bias),
        dbias_type=bias_type,
        vectors=_input_addresses(p, epilogue.spec, columns),
        **({} if program is None or dvectors is None else dvectors.fields(program, epilogue.spec.block or columns)),
        workspace=workspace.data_ptr(),
        variant=variant,
        **second_fields(p.second),
    )
    if dvectors is not None:
        dvectors.finish()


def _input_addresses(problem: GroupedGemm, spec: ActivationSpec, columns: int) -> list[int]:
    operands = _operands(problem, spec, columns)
    return [] if operands is None else operands.addresses
