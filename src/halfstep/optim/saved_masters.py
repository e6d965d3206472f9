"""fp32 masters and 8-bit states that torch's optimizers find in a state of another optimizer or level.

Hooks of `load_state_dict` take out what only `halfstep` keeps, check it and set it exactly. States are read,
never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from halfstep.errors import CheckpointError
from halfstep.kernels import codes as L
from halfstep.optim import checkpoints, entries, storage
from halfstep.optim.loading import warn_of_zero_moments
from halfstep.optim.master_link import Link, Master
from halfstep.policy.levels import LOW_DTYPES
from halfstep.torch_private import has_load_hooks, is_traceable_wrapper_subclass
from halfstep.trees import parameters_of


class SavedMasters:
    """Load hooks of a torch optimizer, which take out of a state what only `halfstep` keeps, and use it.

    fp32 masters go into the parameters, 8-bit states become fp32. `link`: what ties the parameters to 16-bit
    weights, where they are their masters; then masters that were saved by name go to that name.
    """

    def __init__(self, link: Link | None = None) -> None:
        self._link = link
        self._found: list[tuple[Tensor, Callable[[], Tensor | None]]] = []

    def attach(self, optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
        """Register the hooks; none on a wrapper that is no whole torch optimizer."""
        if not has_load_hooks(optimizer):
            return []
        return [
            optimizer.register_load_state_dict_pre_hook(self.before),
            optimizer.register_load_state_dict_post_hook(self.after),
        ]

    def before(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """Take out masters and 8-bit codes; CheckpointError, with nothing changed, where they do not fit."""
        self._found = []
        if self._link is not None:
            pairs = self._link.read_saved_pairs(state.get(checkpoints.MASTERS))
            self._found = [(master, partial(Tensor.detach, value)) for master, value in pairs]
            state = {key: value for key, value in state.items() if key != checkpoints.MASTERS}
        groups = state["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in optimizer.param_groups]:
            return None  # torch refuses it
        spread = checkpoints.into_entries(state)
        states = dict(spread["state"])
        numbers = [number for group in groups for number in group["params"]]
        mine = [(n, p) for n, p in zip(numbers, parameters_of(optimizer)) if _is_own(states.get(n))]
        if mine and self._link is not None:
            self._link.sync()
        for place, (number, p) in enumerate(mine):
            entry = states[number]
            value = partial(_value, f"parameter {place}", entry, p)
            if value() is not None:  # it is made again when it is set: they are never all there
                self._found.append((p, value))
            states[number] = _plain(entry, p)
        return {**spread, "state": {number: _widen_count(entry) for number, entry in states.items()}}

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the parameters to the masters that `before` found."""
        pairs, self._found = self._found, []
        for p, value in pairs:
            p.copy_(cast(Tensor, value()))
            if isinstance(p, Master):
                p.write()
        warn_of_zero_moments([optimizer])


def _widen_count(entry: Any) -> Any:
    """Return the entry, a 16-bit count of its steps in fp32: bf16 stops counting at 256, fp16 at 2,048."""
    step = entry.get("step") if isinstance(entry, Mapping) else None
    return {**entry, "step": step.float()} if isinstance(step, Tensor) and step.dtype in LOW_DTYPES else entry


def _is_own(entry: Any) -> bool:
    return isinstance(entry, Mapping) and any(
        key in checkpoints.OF_MASTERS or str(key).endswith(storage.CODES)
        for key in cast("Mapping[Any, Any]", entry)
    )


@torch.no_grad()
def _value(name: str, entry: Mapping[str, Any], p: Tensor) -> Tensor | None:
    """Return the fp32 value of a parameter by its entry; None where there is none, or `p` cannot hold it."""
    if p.dtype in LOW_DTYPES or not checkpoints.has_master(entry):
        return None
    saved = entry["master"] if "master" in entry else entry["lacking"]
    if is_traceable_wrapper_subclass(saved) or is_traceable_wrapper_subclass(p):
        raise CheckpointError(
            f"the saved state of {name} holds its master in another form than this optimizer keeps, and it "
            "is sharded: save and load it by Session.save and Session.load"
        )
    if saved.shape != p.shape:
        raise CheckpointError(
            f"the saved master of {name} has shape {list(saved.shape)}, the parameter {list(p.shape)}"
        )
    return checkpoints.master_value(name, entry, p)


def _plain(entry: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    """Return the entry as torch's optimizers read it: no master, and fp32 in the place of 8-bit codes."""
    plain = {key: value for key, value in entry.items() if key not in checkpoints.OF_MASTERS}
    for coded in [key for key in plain if str(key).endswith(storage.CODES)]:
        key, index = storage.moment_of(coded)
        exponents_name = coded.removesuffix(storage.CODES) + storage.EXPONENTS
        codes, exponents = plain.pop(coded), plain.pop(exponents_name, None)
        if isinstance(codes, Tensor) and codes.dtype == torch.uint8 and codes.shape == p.shape:
            plain.update(entries.moment(key, index, codes, exponents, p, L.STATE_FP32))
        else:
            raise CheckpointError(f"the saved {coded} are no 8-bit state of a parameter of {list(p.shape)}")
    return plain
