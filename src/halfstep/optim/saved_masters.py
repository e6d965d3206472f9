"""fp32 masters in a state that another optimizer or another level saved: found, checked, set exactly.

A torch optimizer with `MasterWeights` saves them as one entry, `masters`; one of `halfstep.optim` in the
entry of each parameter, whole or as the bits that its 16-bit weight lacks. States are read, never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from halfstep.errors import CheckpointError
from halfstep.kernels import codes as L
from halfstep.optim import checkpoints, entries, split
from halfstep.optim.split import LOW_DTYPES
from halfstep.torch_private import has_load_hooks, is_traceable_wrapper_subclass

MASTERS = "masters"
PLACES = "master_places"
"""Beside `masters`: which parameter of the optimizer each is of, counted over all groups."""
_OWN = ("master", "lacking", "weight")
_SIGNED = ("exp_avg", "momentum_buffer")
_LOAD_FIRST = "load the model's weights before the optimizer's"

State = Mapping[str, Any]


def places(optimizer: torch.optim.Optimizer, masters: Sequence[Tensor]) -> list[int]:
    """The place of each master among the optimizer's parameters."""
    known = {id(p): place for place, p in enumerate(params_of(optimizer))}
    return [known[id(master)] for master in masters if id(master) in known]


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters in all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def into_entries(state: State) -> dict[str, Any]:
    """The state with each of its `masters` in its parameter's entry, as `halfstep.optim` saves one.

    CheckpointError where the state does not say which parameter a master is of.
    """
    rest = {key: value for key, value in state.items() if key not in (MASTERS, PLACES)}
    masters = state.get(MASTERS)
    if masters is None:
        return rest
    if not isinstance(masters, Mapping) or not all(isinstance(value, Tensor) for value in masters.values()):
        raise CheckpointError(f"saved masters are tensors by name, got {masters!r:.60}")
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    found = dict(state["state"])
    for place, value in zip(_places_in(state, len(numbers)), masters.values()):
        found[numbers[place]] = {**found.get(numbers[place], {}), "master": value}
    return {**rest, "state": found}


def _places_in(state: State, count: int) -> list[int]:
    masters, saved = state[MASTERS], state.get(PLACES)
    known = list(range(count)) if saved is None else saved
    if len(known) != len(masters) or any(place not in range(count) for place in known):
        raise CheckpointError(
            f"the saved optimizer has {count} parameters and {len(masters)} fp32 masters, and does not say "
            "whose they are: load it at the level and into the kind of optimizer that saved it, and save anew"
        )
    return known


@torch.no_grad()
def of_one_weight(own: Tensor, value: Tensor) -> bool:
    """Whether a weight (fp32 or 16-bit) and an fp32 master can be of one 16-bit weight, in every element."""
    own, value = own.detach().float(), value.detach().to(own.device, torch.float32)
    half = value.half()
    same = (own == value) | (own.isnan() & value.isnan())
    same |= (own == half.float()) | (own == half.bfloat16().float()) | (own.half() == half)
    for rounded in (split.round_away, Tensor.bfloat16):
        low = rounded(value)
        same |= (own == low.float()) | (own == low.half().float()) | (rounded(own) == low)
    return bool(same.all())


def is_of_other_bits(value: Tensor, weight: Tensor) -> bool:
    """Whether 16-bit values come in for a weight of the other 16-bit dtype."""
    alike = is_traceable_wrapper_subclass(value) == is_traceable_wrapper_subclass(weight)
    low = value.dtype in LOW_DTYPES and weight.dtype in LOW_DTYPES
    return alike and low and value.dtype != weight.dtype and value.shape == weight.shape


def widened(value: Tensor, master: Tensor | None) -> Tensor:
    """16-bit values in fp32: those of a master where they are its rounding."""
    wide = value.to(torch.float32)
    if master is None:
        return wide
    same = master.to(value.dtype) == value
    if value.dtype == torch.bfloat16:
        same |= split.round_away(master) == value
    return torch.where(same, master, wide)


def other_weight(name: str) -> CheckpointError:
    """The error where a state's master is of another weight than the model holds."""
    return CheckpointError(
        f"the saved state of {name} holds an fp32 master, and the weight it belongs to is not in the model: "
        f"{_LOAD_FIRST}"
    )


class SavedMasters:
    """Load hooks of a torch optimizer, which take out of a state what only `halfstep` keeps, and use it.

    fp32 masters go into the parameters, 8-bit states become fp32. `settle` is called before parameters are
    looked at and `finish` after they were set: that brings 16-bit weights beside them in step with them.
    """

    def __init__(
        self, settle: Callable[[], None] | None = None, finish: Callable[[], None] | None = None
    ) -> None:
        self._settle, self._finish = settle, finish
        self._found: list[tuple[Tensor, Tensor]] = []

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
        groups = state["param_groups"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in optimizer.param_groups]:
            return None  # torch refuses it
        spread = into_entries(state)
        kept = dict(spread["state"])
        numbers = [number for group in groups for number in group["params"]]
        mine = [(n, p) for n, p in zip(numbers, params_of(optimizer)) if _is_own(kept.get(n))]
        if not mine:
            return spread
        if self._settle is not None:
            self._settle()
        for place, (number, p) in enumerate(mine):
            entry = kept[number]
            value = _value(f"parameter {place}", entry, p)
            if value is not None:
                self._found.append((p, value))
            kept[number] = _plain(entry, p)
            if not kept[number]:
                del kept[number]
        return {**spread, "state": kept}

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the parameters to the masters that `before` found."""
        found, self._found = self._found, []
        for p, value in found:
            p.copy_(value)
        if found and self._finish is not None:
            self._finish()


def _is_own(entry: Any) -> bool:
    return isinstance(entry, Mapping) and any(
        key in _OWN or str(key).endswith(checkpoints.CODES) for key in cast("Mapping[Any, Any]", entry)
    )


@torch.no_grad()
def _value(name: str, entry: State, p: Tensor) -> Tensor | None:
    """The fp32 value of a parameter by its entry; None where there is none, or `p` cannot hold it."""
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
    value = checkpoints.master_value(name, entry, p, p)
    if value is not None and not of_one_weight(p, value):
        raise other_weight(name)
    return value


def _plain(entry: State, p: Tensor) -> dict[str, Any]:
    """The entry as torch's optimizers read it: no master, and fp32 in the place of 8-bit codes."""
    plain = {key: value for key, value in entry.items() if key not in _OWN}
    for coded in [key for key in plain if str(key).endswith(checkpoints.CODES)]:
        key = coded.removesuffix(checkpoints.CODES)
        codes, exponents = plain.pop(coded), plain.pop(key + checkpoints.EXPONENTS, None)
        if isinstance(codes, Tensor) and codes.dtype == torch.uint8 and codes.shape == p.shape:
            index = 0 if key in _SIGNED else 1
            plain.update(entries.moment(key, index, codes, exponents, p, L.STATE_FP32))
        else:
            raise CheckpointError(f"the saved {coded} are no 8-bit state of a parameter of {list(p.shape)}")
    return plain
