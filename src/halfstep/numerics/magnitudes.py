"""Each parameter's largest gradient at every step: one pass on the device, Python values only when read.

This runs at every step of a watched training, so it keeps what it found as one small tensor and leaves names,
notes and series for whoever asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep.devices import Arriving, send_to_host
from halfstep.scaling import dense_values, home_device


class Slot:
    """Memory for the smallest and the largest element of one gradient, written anew at each backward.

    Small blocks left behind in backward, between large ones that are freed, would cost the allocator more
    than the reduction does.
    """

    def __init__(self, gradient: Tensor) -> None:
        gradient = dense_values(gradient)
        self._pair = gradient.new_zeros(2)
        self._ends = self._pair[0], self._pair[1]

    @torch.no_grad()
    def take(self, gradient: Tensor) -> Tensor:
        """Both ends of `gradient`, [2] (zeros where it has no elements, NaN where it holds one)."""
        dense = dense_values(gradient)
        if dense.numel():
            torch.aminmax(dense, out=self._ends)
        else:
            self._pair.zero_()
        return self._pair

    def fits(self, gradient: Tensor) -> bool:
        """Whether this gradient's ends can be written here."""
        return gradient.device == self._pair.device and gradient.dtype == self._pair.dtype


def magnitudes(ends: Sequence[Tensor]) -> Tensor:
    """The largest magnitudes [n] of gradients whose ends [2] or [n, 2] are given, in fp32 (or fp64)."""
    both = _together(ends, home_device(list(ends)), torch.cat).view(-1, 2)
    return torch.maximum(-both[:, 0], both[:, 1])


@torch.no_grad()
def largest(gradients: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each gradient: [n], fp32 (fp64 if one is), NaN where there is one.

    Gradients may differ in dtype and device; of a sharded one only the local shard is looked at.
    """
    tensors = [dense_values(g) for g in gradients]
    home = home_device(tensors)
    if home.type == "cpu":  # its infinity norm is 20 times slower than its aminmax
        nothing = torch.zeros(())
        pairs = [torch.aminmax(t) if t.numel() else (nothing, nothing) for t in tensors]
        return magnitudes([_together([end for pair in pairs for end in pair], home)])
    norms = [torch.linalg.vector_norm(t, math.inf) if t.numel() else t.new_zeros(()) for t in tensors]
    return _together(norms, home)


def _together(
    scalars: Sequence[Tensor], home: torch.device, join: Callable[..., Tensor] = torch.stack
) -> Tensor:
    wide = torch.float64 if any(s.dtype == torch.float64 for s in scalars) else torch.float32
    if any(s.dtype != wide or s.device != home for s in scalars):
        scalars = [s.to(home, wide, non_blocking=True) for s in scalars]
    return join(list(scalars))


@dataclass(frozen=True)
class Magnitudes:
    """The largest gradients of one step on their way to the host; `fate` is its scale and whether it was
    taken, None where they travel behind the magnitudes."""

    step: int
    names: tuple[str, ...]
    packed: Arriving
    fate: tuple[float, bool] | None

    @classmethod
    def of(
        cls, step: int, names: Sequence[str], tops: Tensor, scale: float | Tensor, taken: bool | Tensor
    ) -> Magnitudes:
        """Packs `tops` [n], and what of the step's fate is still on the device, into one copy."""
        if isinstance(scale, Tensor) or isinstance(taken, Tensor):
            late = [torch.as_tensor(x, dtype=tops.dtype, device=tops.device).view(1) for x in (scale, taken)]
            return cls(step, tuple(names), send_to_host(torch.cat([tops, *late])), None)
        return cls(step, tuple(names), send_to_host(tops), (scale, taken))

    @property
    def arrived(self) -> bool:
        """Whether the copy has finished."""
        return self.packed.done()

    def read(self) -> tuple[dict[str, float], float, bool]:
        """Largest gradient by name, scale, taken; waits if need be."""
        values = self.packed.wait().tolist()
        scale, taken = self.fate or (values[-2], bool(values[-1]))
        return dict(zip(self.names, values)), scale, taken


def worst_of(tops: dict[str, float]) -> str:
    """The name with the largest magnitude; NaN is larger than all."""
    return max(tops, key=lambda n: math.inf if math.isnan(tops[n]) else tops[n])
