"""Buffers that a conversion stored in 16 bits, and a word about those that the model changes in training.

They have no masters, and nothing says beforehand which is a table (rightly 16-bit, since fp32 would promote
what it meets) and which a running mean or a count, whose small changes 16 bits swallow.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from halfstep.errors import warn
from halfstep.formats import dtype_name
from halfstep.policy.levels import LOW_DTYPES
from halfstep.torch_private import NormWithStatistics, hooks_of

#: The step after which buffers are compared with what the first one left, which may fill caches.
_COMPARED = 3


def is_recomputed(module: nn.Module, key: str) -> bool:
    """Whether a buffer is recomputed from the weight again and again: spectral norm's vectors."""
    hooks = (hook for hook in hooks_of(module)[0].values() if isinstance(hook, SpectralNorm))
    return type(module).__name__ == "_SpectralNorm" or any(
        key in (f"{hook.name}_u", f"{hook.name}_v") for hook in hooks
    )


def follows_weight(module: nn.Module, key: str) -> bool:
    """Whether a level stores a buffer as the weight, since a kernel of torch takes both in one dtype."""
    return isinstance(module, NormWithStatistics) or is_recomputed(module, key)


class LowBuffers:
    """What one conversion made of the model's buffers.

    originals: the values before, by buffer, for the way back. watched: module and name there of those to look
    at after the next step, by their public name.
    """

    def __init__(self) -> None:
        self.originals: dict[Tensor, Tensor] = {}
        self.watched: dict[str, tuple[weakref.ref[nn.Module], str]] = {}
        self._first: dict[str, Tensor] = {}
        self._compared = 0

    def watch(self, names: Mapping[str, str], modules: Mapping[str, nn.Module]) -> None:
        """From now on look at the buffers that became 16-bit; `names` gives the public name of each path."""
        self.watched = {
            f"{names[path]}.{key}".lstrip("."): (weakref.ref(module), key)
            for path, module in (modules.items() if self.originals else ())
            for key, buffer in module._buffers.items()
            if buffer is not None and buffer.dtype in LOW_DTYPES and buffer in self.originals
            if not is_recomputed(module, key) and not isinstance(module, NormWithStatistics)
        }

    def warn_if_changed(self) -> None:
        """After a step, one of the first three: warn of buffers that differ from what the first step left."""
        self._compared += 1
        watched = ((name, weak(), key) for name, (weak, key) in self.watched.items())
        places = ((name, module._buffers.get(key)) for name, module, key in watched if module is not None)
        now = {n: t.detach() for n, t in places if t is not None and not t.is_inference() and not t.is_meta}
        if self._compared == 1:
            self._first = {name: t.clone() for name, t in now.items()}
        if self._compared < _COMPARED:
            return
        both = {name: (first, now[name]) for name, first in self._first.items() if name in now}
        changed = [n for n, (a, b) in both.items() if a.dtype == b.dtype and not torch.equal(a, b)]
        if changed:
            _warn(changed, now[changed[0]].dtype)
        self.watched, self._first = {}, {}


def _warn(names: list[str], dtype: torch.dtype) -> None:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    several = len(names) > 1
    warn(
        f"buffer{'s' if several else ''} {', '.join(map(repr, names[:4]))}{more}: stored in "
        f"{dtype_name(dtype)} and changed by the model in training, where small changes are rounded away, so "
        f"that a running mean or a count stops moving: keep {'each' if several else 'it'} in fp32 by a rule "
        "in prepare(plan=hs.Plan([hs.PlanRule("
        f"{names[0]!r}, dtype='fp32')])), or make a count an integer (said once)"
    )
