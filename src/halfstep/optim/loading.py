"""Who holds fp32 masters, and how the values that `load_state_dict` brings reach them unrounded.

torch rounds an fp32 checkpoint into 16-bit weights; hooks of modules hand the values to whoever holds the
bits that the weights lack. Copies and pickles of a model keep empty ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from halfstep.distributed import local_of
from halfstep.errors import warn
from halfstep.optim import split
from halfstep.policy.levels import LOW_DTYPES
from halfstep.trees import parameters_of


class MasterHolder:
    """What keeps fp32 masters of a model's weights: an optimizer of `halfstep.optim`, or `MasterWeights`."""

    accumulate: str | None
    """"fp32" where the gradients of micro-batches add up in fp32."""

    def masters(self, only: AnySet[Tensor] | None = None) -> dict[Tensor, Tensor]:
        """The exact fp32 value of every weight, or of those in `only`, by weight: to be read, not written."""
        raise NotImplementedError

    def seed_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """Set masters to fp32 `values` by weight, and weights to their rounding; others are left alone."""
        raise NotImplementedError

    def init_states(self) -> None:
        """Make every state now instead of in the first step, so that a checkpoint before it is whole."""

    def _has_early_bits(self, p: Tensor) -> bool:
        """Whether a state that came before the value of `p` brought the low-order bits of that one."""
        return False


class HooksOfHolder:
    """Base of hooks that a module may carry along: they keep no masters alive, and copies know of none."""

    def __init__(self, holder: Any = None) -> None:
        self.holder: Callable[[], Any] = (lambda: None) if holder is None else weakref.ref(holder)

    def __deepcopy__(self, memo: dict[int, Any]) -> HooksOfHolder:
        return type(self)()

    def __reduce__(self) -> tuple[type[HooksOfHolder], tuple[()]]:
        return type(self), ()


class LoadedMasters(HooksOfHolder):
    """Module hooks around `load_state_dict` that set masters to the values that came in.

    A weight that was given fp32 or fp64 values gets these as its master; one that was given 16 bits, or that
    the module made something else of, is its own master where it changed.
    """

    def __init__(self, holder: MasterHolder | None = None) -> None:
        super().__init__(holder)
        self._came: dict[Tensor, tuple[int, Tensor, Tensor, Tensor]] = {}

    def attach(self, models: Sequence[nn.Module]) -> list[RemovableHandle]:
        """Register the hooks on every module, since parts of a model are loaded alone; return handles."""
        modules = dict.fromkeys(module for model in models for module in model.modules())
        return [
            handle
            for module in modules
            for handle in (
                module.register_load_state_dict_pre_hook(self.before),
                module.register_load_state_dict_post_hook(self.after),
            )
        ]

    @torch.no_grad()
    def before(self, module: nn.Module, state: dict[str, Any], prefix: str, *about: Any) -> None:
        """Note what is loaded into the module's own weights, and these and their masters as they are."""
        holder: MasterHolder | None = self.holder()
        names: dict[Tensor, str] = {p: prefix + n for n, p in module._parameters.items() if p is not None}
        came = {p for p, name in names.items() if p.dtype in LOW_DTYPES and _fits(state.get(name), p)}
        if holder is None or not came:
            return
        assigns = bool(about and about[0].get("assign_to_params_buffers"))
        for p, master in holder.masters(came).items():
            value = state[names[p]]
            if value.dtype in LOW_DTYPES and value.dtype != p.dtype and not assigns:
                value = state[names[p]] = _widen(value.detach().to(p.device), master)
            self._came[p] = p._version, p.detach().clone(), value.detach(), master

    @torch.no_grad()
    def after(self, module: nn.Module, keys: Any) -> None:
        """Set the masters of those that were loaded."""
        holder: MasterHolder | None = self.holder()
        values: dict[Tensor, Tensor] = {}
        for p in (p for p in module._parameters.values() if p is not None and p in self._came):
            version, before, value, master = self._came.pop(p)
            if (
                holder is None
                or p._version == version
                or (value.dtype == p.dtype and holder._has_early_bits(p))
            ):
                continue
            if value.dtype in LOW_DTYPES:
                same, exact_value = p == before, master
            else:
                exact_value = value.to(p.device, torch.float32)
                same = exact_value.to(p.dtype) == p
            values[p] = torch.where(same, exact_value, p.to(torch.float32))
        if holder is not None and values:
            holder.seed_masters(values)


def _fits(value: Any, p: Tensor) -> TypeGuard[Tensor]:
    if not isinstance(value, Tensor) or value.shape != p.shape or not value.is_floating_point():
        return False
    return (local_of(value) is value) == (local_of(p) is p)


def _widen(value: Tensor, master: Tensor) -> Tensor:
    """Return 16-bit values in fp32: those of a master where they are its rounding."""
    same = master.to(value.dtype) == value
    if value.dtype == torch.bfloat16:
        same |= split.round_away(master) == value
    return torch.where(same, master, value.to(torch.float32))


# ---- moments that went through fp16 ----------------------------------------------------------------------


@torch.no_grad()
def find_zero_moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, str]]:
    """Yield parameters most of whose second moments are zero beside first moments that are not, in words.

    An Adam's squares cannot be: they went through fp16, which ends at 6e-8, and the next updates divide by
    epsilon alone. Reads values back to the host. 8-bit codes, whose small values round to 0, are left out.
    """
    for p in parameters_of(optimizer):
        entry = optimizer.state.get(p) or {}  # ZeroRedundancyOptimizer puts None for those of other ranks
        mean, square = entry.get("exp_avg"), entry.get("exp_avg_sq")
        if isinstance(mean, Tensor) and isinstance(square, Tensor) and mean.shape == square.shape:
            mean, square = local_of(mean), local_of(square)
            zeros = square.numel() - square.count_nonzero()
            # Where a square is not zero its mean is not: with fewer zeros these are not most of them.
            if 3 * zeros > square.numel() and 2 * zeros > (count := mean.count_nonzero()):
                lost = (square == 0).logical_and_(mean).count_nonzero()
                if 2 * lost > count:
                    yield p, f"{lost} of {count} second moments are zero where first moments are not"


def warn_of_zero_moments(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Warn once of optimizers that were loaded with second moments that fp16 rounded to zero."""
    for optimizer in optimizers:
        for p, words in find_zero_moments(optimizer):
            warn(
                f"{type(optimizer).__name__} was loaded with a state that went through fp16: of a parameter "
                f"of shape {list(p.shape)} {words}, so that its next updates divide by eps alone. Load a "
                "state that was saved in fp32, or clear optimizer.state to start the moments anew"
            )
            break
