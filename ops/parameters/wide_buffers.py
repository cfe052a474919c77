"""Buffers that keep their dtype when their module is cast, as fewer bits would change their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor, nn


class WideBuffers(nn.Module):
    """A module with buffers that keep their dtype when the module is cast or loaded."""

    wide_buffers: tuple[str, ...] = ()
    """Their names; the module need not have them all."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Applies ``.to()`` and the like; only changes the device of these buffers."""
        before = self._wide()
        result: Self = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            after = self.get_buffer(name)
            if after.dtype != buffer.dtype:
                setattr(self, name, buffer.to(after.device))
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Casts loaded values that would replace these buffers, as with ``assign=True``.

        Bits that a file lacks stay lost.
        """
        for name, buffer in self._wide().items():
            if isinstance(value := state_dict.get(prefix + name), Tensor):
                state_dict[prefix + name] = value.to(buffer.dtype)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _wide(self) -> dict[str, Tensor]:
        return {name: buffer for name in self.wide_buffers if (buffer := self._buffers.get(name)) is not None}
