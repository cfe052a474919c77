"""The one call of a layer's experts: made for weights at some addresses, and made again for others there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from emulation import harness
from torch import Tensor

from fusible.ops.kernels.doors import inference
from fusible.ops.kernels.doors.inference import Experts
from fusible.ops.kernels.extension import TYPE_CODES
from fusible.ops.values.activation_spec import ActivationSpec

E, K, F = 16, 512, 128
SPEC = ActivationSpec("silu", gated=True)


class Extension:
    """In place of the extension: runs nothing."""


@pytest.fixture
def weights_on_a_gpu() -> Iterator[Experts]:
    torch.manual_seed(0)
    up, down = torch.randn(E, 2 * F, K).bfloat16(), torch.randn(E, K, F).bfloat16()
    with harness.installed(Extension()):  # type: ignore[arg-type]
        yield Experts(up, down, torch.zeros(E, 4 * F).bfloat16()[:, : 2 * F], torch.zeros(E, K).bfloat16(), SPEC, False)


@pytest.mark.parametrize(
    "other",
    [
        lambda up, down: (up.view(torch.float16), down.view(torch.float16)),  # the dtype
        lambda up, down: (up.as_strided(up.shape, (2 * F, 1)), down),  # the pitch
        lambda up, down: (up, down.as_strided(down.shape, (0, 1))),
    ],
)
def test_one_call_of_a_layer_is_made_again_for_other_biases_at_the_same_addresses(
    other: Callable[..., tuple[Tensor, Tensor]], weights_on_a_gpu: Experts
) -> None:
    e = weights_on_a_gpu
    assert e.up_bias is not None
    up_bias, down_bias = other(e.up_bias, e.down_bias)
    made, remade = (inference.one_call(some) for some in (e, e._replace(up_bias=up_bias, down_bias=down_bias)))

    assert inference.one_call(e._replace(up_bias=up_bias, down_bias=down_bias)) is remade
    assert made is not None
    assert remade is not None
    assert made._experts != remade._experts


def test_biases_of_two_dtypes_are_not_read_as_one(weights_on_a_gpu: Experts) -> None:
    e = weights_on_a_gpu
    assert e.down_bias is not None
    alone = inference.one_call(e._replace(up_bias=None))

    assert inference.one_call(e._replace(down_bias=e.down_bias.float())) is None
    assert alone is not None
    assert alone._experts["bias_type"] == TYPE_CODES[torch.bfloat16]
