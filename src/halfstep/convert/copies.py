"""Deep copies of a model whose optimizer keeps fp32 masters: fp32 models, with the masters' values.

An average or a target network is made by copying the model. A copy in 16 bits would stand still where each
change is smaller than half a unit in its last place (weights averaged at decay 0.9999).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.convert.hooks import Power

#: The exact values by 16-bit tensor, as far as there are any.
Exact = Callable[[], Mapping[Tensor, Tensor]]


class WideCopies:
    """A hook that does no work in forward; copied with a module, it widens the copy.

    It is registered for the end of `load_state_dict`, where it does nothing. In a copy, and after pickling,
    it is empty.
    """

    def __init__(
        self,
        power: Power | None = None,
        tensors: Sequence[tuple[Tensor, torch.dtype]] = (),
        exact: Exact | None = None,
    ) -> None:
        self.power, self._tensors, self._exact = power, tensors, exact

    def __call__(self, module: nn.Module, keys: Any) -> None:
        """Do nothing; torch calls it at the end of `load_state_dict`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> WideCopies:
        if self.power is not None and self.power.on:
            self._widen(memo)
        return WideCopies()

    def __reduce__(self) -> tuple[type[WideCopies], tuple[()]]:
        return WideCopies, ()

    def _widen(self, memo: dict[int, Any]) -> None:
        """Put the wide twin of every tensor where `copy.deepcopy` looks for copies made before."""
        exact = {} if self._exact is None else self._exact()
        for tensor, dtype in self._tensors:
            wide = exact[tensor].clone() if tensor in exact else tensor.detach().to(dtype)
            made = memo.get(id(tensor))
            if made is not None:
                made.data = wide
            elif isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(wide, requires_grad=tensor.requires_grad)
            else:
                memo[id(tensor)] = wide


def widen_copies(
    model: nn.Module, power: Power, tensors: Sequence[tuple[Tensor, torch.dtype]], exact: Exact
) -> list[Any]:
    """Make deep copies of the model, or of a module in it, fp32 and free of casts; returns the hooks.

    tensors: what was narrowed, with the dtypes from before. exact: values to take instead of widened ones.
    """
    power.off_in_copies = True
    hook = WideCopies(power, tensors, exact)
    return [module.register_load_state_dict_post_hook(hook) for module in model.modules()]
