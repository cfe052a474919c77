"""A launch of a compiled kernel in the words of the extension, which notes it and makes it again in a replay.

Where the driver counts other parameters than these, or Triton has none of the names, the call is not replayed.
"""

from __future__ import annotations

import struct

import torch
from triton import knobs

from .....fuser.contract.torch_private import current_cuda_device, current_raw_stream
from .....fuser.replay.capture import Capture
from ...jit.driver import parameter_sizes

NUMBER, ADDRESS, TENSOR_MAP = range(3)  # as csrc/fusible/foreign_kernel.h has them
_MAP_BYTES, _MOST_SCRATCH = 128, 2  # two addresses of scratch memory, which these kernels do not need
_PROMOTION = 2  # of loads to 128 bytes in the L2 cache, as Triton asks for it
_MAP_TYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_FORMATS = {"i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f"}
_kept = {}  # kernels by their handles, which are valid as long as these live
_FEATURES = "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"


class UnknownLaunchError(Exception):
    """The launch has something that the extension does not do."""


class NextAddress(int):
    """The address of a tensor and 1, as a number. It is odd, so that no kernel is compiled for multiples of 16."""


class KernelParameters:
    """The parameters of a kernel; ``sizes``: their bytes."""

    def __init__(self, maps):
        self.kinds, self.numbers, self.addresses, self.maps, self.sizes = [], [], [], [], []
        self._maps = iter(maps)

    def add(self, kind, value):
        """Adds the parameters of an argument whose type Triton names so."""
        if isinstance(kind, tuple):
            for each, of_value in zip(kind, value, strict=True):
                self.add(each, of_value)
        elif kind.startswith("tensordesc"):
            self._add_map(value, next(self._maps, None))
        elif kind[0] == "*" or type(value) is NextAddress:
            self._add(ADDRESS, 8)
            self.addresses.append(value if type(value) is NextAddress else value.data_ptr())
        elif kind != "constexpr":
            self._add_number(kind, value)

    def fill(self, sizes):
        """Adds the scratch memory that the kernel is given besides, as null, where its parameters have these sizes."""
        rest = sizes[len(self.sizes) :]
        if sizes[: len(self.sizes)] != self.sizes or rest != [8] * len(rest) or len(rest) > _MOST_SCRATCH:
            raise UnknownLaunchError(f"parameters of {sizes} bytes instead of {self.sizes}")
        for _ in rest:
            self._add_number("i64", 0)

    def _add(self, kind, size):
        self.kinds.append(kind)
        self.sizes.append(size)

    def _add_number(self, kind, value):
        if (form := _FORMATS.get(kind)) is None:
            raise UnknownLaunchError(f"a number of type {kind}")
        bits = struct.pack(form, value)
        self._add(NUMBER, len(bits))
        self.numbers.append(int.from_bytes(bits, "little", signed=True))

    def _add_map(self, value, form):
        """A descriptor: its map, then its sizes and its strides."""
        if not form or form.get("fp4_padded") or value.base.dtype not in _MAP_TYPES:
            raise UnknownLaunchError("a descriptor without a tensor map")
        size, padding = value.base.element_size(), 1 if getattr(value, "padding", "zero") == "nan" else 0
        self._add(TENSOR_MAP, _MAP_BYTES)
        self.addresses.append(value.base.data_ptr())
        self.maps += _MAP_TYPES[value.base.dtype], form["swizzle"], _PROMOTION, padding, len(value.shape)
        self.maps += *reversed(value.shape), *reversed(form["block_size"])
        self.maps += [stride * size for stride in reversed(value.strides[:-1])]
        for each in value.shape:
            self._add_number("i32", each)
        for each in value.strides:
            self._add_number("i64", each)


def launch(kernel, grid, arguments, constants):
    """Launches a kernel by the extension.

    Raises:
        UnknownLaunchError: it cannot, and has done nothing.
    """
    compiled = kernel.run(*arguments, grid=grid, warmup=True, **constants)
    try:
        fields = _fields(compiled, arguments)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, struct.error) as error:  # another Triton
        raise UnknownLaunchError(f"{type(error).__name__}: {error}") from error
    _kept[compiled.function] = compiled
    device, (blocks, *more) = current_cuda_device(), grid
    stream, blocks_y = current_raw_stream(device), more[0] if more else 1
    Capture.find_library().launch_foreign(device=device, stream=stream, blocks_x=blocks, blocks_y=blocks_y, **fields)


def _fields(compiled, arguments):
    """The fields of the launch that do not depend on its grid and its stream."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if any(getattr(hook, "calls", hook) for hook in hooks):
        raise UnknownLaunchError("a hook observes the launches of Triton")
    compiled._init_handles()
    metadata = compiled.metadata
    asked = [name for name in _FEATURES if getattr(metadata, name, 0)]
    if asked or getattr(metadata, "num_ctas", 1) != 1:
        raise UnknownLaunchError(f"it asks for {', '.join(asked) or 'clusters'}")
    parameters = KernelParameters(getattr(metadata, "tensordesc_meta", None) or ())
    for kind, value in zip(compiled.src.signature.values(), arguments, strict=False):
        parameters.add(kind, value)
    parameters.fill(parameter_sizes(compiled.function))
    return {
        "function": compiled.function,
        "threads": metadata.num_warps * 32,
        "shared_bytes": metadata.shared,
        "parameters": parameters.kinds,
        "numbers": parameters.numbers,
        "maps": parameters.maps,
        "addresses": parameters.addresses,
    }
