"""Buffers that a conversion stored in 16 bits, and a word about those that the model changes in training.

They have no masters, and nothing says beforehand which is a table (rightly 16-bit, since fp32 would promote
what it meets) and which a running mean or a count, whose small changes 16 bits swallow.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from halfstep.errors import HalfstepWarning
from halfstep.formats import dtype_name
from halfstep.policy.levels import LOW_DTYPES
from halfstep.torch_private import NormWithStatistics, hooks_of

#: Steps after which buffers are compared; one that changes in training changes in the first ones already.
_COMPARED = 3


def recomputed(module: nn.Module, key: str) -> bool:
    """Whether a buffer is found anew from the weight again and again: spectral norm's vectors."""
    hooks = (hook for hook in hooks_of(module)[0].values() if isinstance(hook, SpectralNorm))
    return type(module).__name__ == "_SpectralNorm" or any(
        key in (f"{hook.name}_u", f"{hook.name}_v") for hook in hooks
    )


# Their statistics are 16-bit at O3 alone, where the level says so.
_STATISTICS = (NormWithStatistics,)


class _WatchedBuffer:
    """A buffer's place in the model, and its value when it was looked at last."""

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name, self.module, self.key = name, module, key
        self.before: Tensor | None = None
        self.changes = 0

    def look(self) -> None:
        """Count a change of its values, in place or by another buffer of its kind."""
        now, before, self.before = self.module._buffers.get(self.key), self.before, None
        if now is None or now.is_inference() or now.is_meta:
            return
        if before is not None and (now.shape, now.dtype) == (before.shape, before.dtype):
            self.changes += now.dtype in LOW_DTYPES and not torch.equal(now, before)
        self.before = now.detach().clone()


class LowBuffers:
    """What one conversion made of the model's buffers.

    originals: the values before, by buffer, for the way back. watched: those to look at after the next step.
    """

    def __init__(self) -> None:
        self.originals: dict[Tensor, Tensor] = {}
        self.watched: list[_WatchedBuffer] = []
        self._looks = 0

    def watch(self, names: Mapping[str, str], modules: Mapping[str, nn.Module]) -> None:
        """From now on look at the buffers that became 16-bit; `names` gives the public name of each path."""
        self.watched = [
            _WatchedBuffer(f"{names[path]}.{key}".lstrip("."), module, key)
            for path, module in (modules.items() if self.originals else ())
            for key, buffer in module._buffers.items()
            if buffer is not None and buffer.dtype in LOW_DTYPES and buffer in self.originals
            if not recomputed(module, key) and not isinstance(module, _STATISTICS)
        ]

    def look(self) -> None:
        """After a step, one of the first three: warn of the buffers that changed between all of them."""
        self._looks += 1
        for one in self.watched:
            one.look()
        if self._looks == _COMPARED:
            found = [one for one in self.watched if one.changes == _COMPARED - 1]
            self.watched = []
            if found:
                _warn(found)


def _warn(found: list[_WatchedBuffer]) -> None:
    first = found[0]
    shown = ", ".join(repr(one.name) for one in found[:4]) + (
        f" and {len(found) - 4} more" if len(found) > 4 else ""
    )
    dtype = dtype_name(first.module._buffers[first.key].dtype)  # pyright: ignore[reportOptionalMemberAccess]
    several = len(found) > 1
    warnings.warn(
        f"buffer{'s' if several else ''} {shown}: stored in {dtype} and changed by the model in training, "
        "where small changes are rounded away, so that a running mean or a count stops moving: keep "
        f"{'each' if several else 'it'} in fp32 by a rule in prepare(plan=hs.Plan([hs.PlanRule("
        f"{first.name!r}, dtype='fp32')])), or make a count an integer (said once)",
        HalfstepWarning,
        stacklevel=5,
    )
