"""Refuses, without a GPU, the operations of PyTorch for which the host would wait for one."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_READ = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default}
_READ |= {_aten.repeat_interleave.Tensor, _aten.equal.default}


class NoHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In the body, numbers of tensors may not come to the host, nor sizes depend on them."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = function in _READ or (
            function is _aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        )
        assert not waits, f"{function} waits for the device"
        return function(*args, **(kwargs or {}))


class NoHostTensors(TorchFunctionMode):
    """In the body, meta tensors stand for those of a GPU, and nothing may be copied to them from the host.

    Such a copy waits for a GPU, and a CUDA graph cannot capture it.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function not in (torch.tensor, torch.as_tensor), "numbers of the host are copied"
        read = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        assert all(each.is_meta for each in read), f"{function} reads a tensor of the host"
        return function(*args, **(kwargs or {}))
