"""Buffers that keep their dtype when their module is cast: numbers that would be others in fewer bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn


class WideBuffers(nn.Module):
    """A module some of whose buffers keep their dtype, whatever casts the module or is loaded into it."""

    wide_buffers: ClassVar[tuple[str, ...]] = ()
    """Their names; the module need not have them all."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """``.to()`` and its kin: of these buffers only the device changes."""
        before = self._wide()
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            after = self.get_buffer(name)
            if after.dtype != buffer.dtype:
                setattr(self, name, buffer.to(after.device))
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Casts what would replace these buffers, as ``assign=True`` does. A file of fewer bits has lost its others."""
        for name, buffer in self._wide().items():
            if isinstance(value := state_dict.get(prefix + name), Tensor):
                state_dict[prefix + name] = value.to(buffer.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _wide(self) -> dict[str, Tensor]:
        return {name: buffer for name in self.wide_buffers if (buffer := self._buffers.get(name)) is not None}
