"""Refuses, on a CPU, the operations of PyTorch for which the host would wait for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
