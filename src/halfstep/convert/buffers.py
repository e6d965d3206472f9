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

#: Steps after each of which buffers are looked at; later only every SELDOM-th.
_OFTEN, _SELDOM = 20, 64
#: Steps in which values are compared, since changes through `.data` count no version.
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
    """A buffer's place in the model and how it was when looked at last."""

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name, self.module, self.key = name, module, key
        self.tensor: Tensor | None = None
        self.version = self.changes = 0
        self.value: Tensor | None = None

    def looked(self, keep_value: bool) -> bool:
        """Whether it was changed after at least two steps, in place or for another one of its kind."""
        now, before = self.module._buffers.get(self.key), self.tensor
        if now is before and now is not None and self.value is None and now._version == self.version:
            return False
        if now is None or now.is_inference() or now.is_meta:
            self.tensor = self.value = None
            return False
        alike = before is not None and (now.shape, now.dtype) == (before.shape, before.dtype)
        if alike and now.dtype in LOW_DTYPES and (now is not before or self._written(now)):
            self.changes += 1
        self.tensor, self.version = now, now._version
        self.value = now.detach().clone() if keep_value else None
        return self.changes > 1

    def _written(self, now: Tensor) -> bool:
        return now._version != self.version or (self.value is not None and not torch.equal(now, self.value))


class LowBuffers:
    """What one conversion made of the model's buffers.

    originals: the values before, by buffer, for the way back.
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
        """After a step: warn of buffers that were changed after two of them, each once.

        Values are compared after the first three steps, versions alone later.
        """
        self._looks += 1
        if self._looks > _OFTEN and self._looks % _SELDOM:
            return
        found = [one for one in self.watched if one.looked(self._looks < _COMPARED)]
        if found:
            self.watched = [one for one in self.watched if one not in found]
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
