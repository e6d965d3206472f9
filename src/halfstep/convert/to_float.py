"""`to_float`: a module that computes in a dtype of its own, as MindSpore's `Cell.to_float`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from halfstep.convert.hooks import Inside, Power
from halfstep.errors import ConfigError
from halfstep.formats import parse_dtype
from halfstep.torch_private import hooks_of


def to_float(module: nn.Module, dtype: str | torch.dtype | None, *, keep_parts: bool = False) -> nn.Module:
    """Make a module and all in it compute in `dtype`, as MindSpore's `Cell.to_float`; returns the module.

    Floating inputs are cast to it, parameters and buffers are cast in use and stay stored as they are,
    outputs are in it, and autocast does not reach inside. The last call wins, for a module and for all below
    it; None takes it off again. `convert` leaves such modules alone. With `keep_parts` the outputs of a
    module whose parts were given another dtype later are left as they come, as MindSpore does.
    """
    if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"to_float takes a torch.nn.Module, not {type(module).__name__}")
    chosen = None if dtype is None else parse_dtype(dtype)
    for each in module.modules():
        for registered in hooks_of(each)[:2]:
            for key in [
                k for k, hook in registered.items() if isinstance(getattr(hook, "__self__", None), _ToFloat)
            ]:
                _unhook(each, key)
        if chosen is not None:
            hooks = _ToFloat(Power(), chosen)
            hooks.keep_parts = keep_parts
            hooks.attach(each)
    return module


class _ToFloat(Inside):
    """What `to_float` hangs on a module."""

    keep_parts = False

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """As `Inside`; see `to_float` for `keep_parts`."""
        cast_output = super().leave(module, args, output)
        if not self.keep_parts:
            return cast_output
        others = (own_dtype(each) for each in module.modules())
        return None if any(dtype not in (None, self.dtype) for dtype in others) else cast_output


def own_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype that `to_float` gave a module, or None."""
    for hook in hooks_of(module)[0].values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, _ToFloat):
            return owner.dtype
    return None


def _unhook(module: nn.Module, key: int) -> None:
    for held in hooks_of(module):
        held.pop(key, None)
