"""Normalize an entry of `optimizer.state` for the kernels, whatever a user or a checkpoint put there.

What has the right shape is kept, cast or laid out again; what has not is refused by name, since torch's own
optimizers would stop there too. Nothing here is remembered: the entry is the truth.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.kernels import codes as L
from halfstep.optim import arguments, rounding, split, storage
from halfstep.optim.algorithms import Algorithm
from halfstep.torch_private import is_traceable_wrapper_subclass

Entry = dict[str, Any]


def normalize_entry(
    entry: Entry,
    p: Tensor,
    algorithm: Algorithm,
    kind: int,
    state_kind: int,
    name: str,
    value: Tensor | None = None,
) -> None:
    """Complete `entry`, in place; `value` (fp32) sets master and weight. ConfigError for what cannot fit."""
    _normalize_step(entry, p, algorithm, name)
    for index, key in enumerate(algorithm.states):
        _normalize_moment(entry, key, index, p, state_kind, name)
    normalize_master(entry, p, kind, value)


def _normalize_step(entry: Entry, p: Tensor, algorithm: Algorithm, name: str) -> None:
    """Make the step count an fp32 number on p's device; without a buffer yet the first step is step 1."""
    step, missing = entry.get("step"), [key for key in algorithm.states if _moment_values(entry, key) is None]
    if algorithm.starts_with_buffer:
        step = 0.0 if missing else 1.0 if step is None else step
    else:
        missing += ["step"] if algorithm.counts and step is None else []
        if 0 < len(missing) < len(algorithm.states) + algorithm.counts:
            raise ConfigError(
                f"optimizer.state of {name} has no {', '.join(map(repr, missing))}: put it back, or clear "
                "the entry to start anew"
            )
    if isinstance(step, Tensor) and step.numel() != 1:
        raise ConfigError(f"the state 'step' of {name} has shape {list(step.shape)}, expected one number")
    if not isinstance(step, Tensor) or step.dtype != torch.float32 or step.dim():
        step = torch.tensor(0.0 if step is None else float(step), dtype=torch.float32, device="cpu")
    entry["step"] = step.to(p.device)


def _moment_values(entry: Entry, key: str) -> Any:
    """Return a moment stored as numbers, which take precedence over its codes."""
    state = entry.get(key)
    return entry.get(key + storage.CODES) if state is None else state


def _normalize_moment(entry: Entry, key: str, index: int, p: Tensor, state_kind: int, name: str) -> None:
    state, stored_key = _moment_values(entry, key), storage.name_of_moment(key, state_kind)
    if state is None:
        entry[stored_key] = torch.empty_like(p, dtype=storage.STORED[state_kind]).zero_()
        if state_kind == L.STATE_8BIT:
            shape = storage.exponents_shape(p)
            entry[key + "_exponents"] = torch.full(
                shape, L.LEAST_EXPONENT, dtype=torch.uint8, device=p.device
            )
        return
    check_moment(key, state, p, name)
    old_entry, exponents = {stored_key: state}, None
    if state.dtype == torch.uint8:
        exponents = entry.get(key + "_exponents")
        check_exponents(key, exponents, state, name)
        old_entry[key + "_exponents"] = exponents
    placed = _is_placed_as(state, p) and all(t.device == p.device for t in old_entry.values())
    for old in (key, key + storage.CODES, key + "_exponents"):
        entry.pop(old, None)
    fits = placed and state.dtype == storage.STORED[state_kind]
    entry.update(old_entry if fits else moment(key, index, state, exponents, p, state_kind))


def check_moment(key: str, state: Any, p: Tensor, name: str) -> None:
    """Raise ConfigError unless a state of `p` is a dense tensor of its shape."""
    if (
        not isinstance(state, Tensor)
        or state.layout is not torch.strided
        or is_traceable_wrapper_subclass(state)
    ):
        kind = f"{state.layout} tensor" if type(state) is Tensor else type(state).__name__
        raise ConfigError(f"the state {key!r} of {name} is a {kind}, expected a dense tensor")
    if state.shape != p.shape:
        raise ConfigError(
            f"the state {key!r} of {name} has shape {list(state.shape)}, the parameter {list(p.shape)}: give "
            "it the parameter's shape, or clear the entry of optimizer.state to start anew"
        )
    if not state.is_floating_point() and state.dtype != torch.uint8:
        raise ConfigError(f"the state {key!r} of {name} is {state.dtype}, expected floating numbers")


def check_exponents(key: str, exponents: Any, state: Tensor, name: str) -> None:
    """Raise ConfigError unless these are the exponents of a state in 8-bit codes."""
    shape = storage.exponents_shape(state)
    fits = isinstance(exponents, Tensor) and exponents.dtype == torch.uint8 and exponents.is_contiguous()
    if not fits or exponents.shape != shape:
        raise ConfigError(
            f"the 8-bit state {key!r} of {name} needs uint8 numbers of shape {list(shape)} in "
            f"{key + '_exponents'!r} beside it: put both back, or clear the entry of optimizer.state to "
            "start anew"
        )


def _is_placed_as(tensor: Tensor, p: Tensor) -> bool:
    """Whether a tensor of p's shape lies on p's device in p's memory order."""
    return (
        tensor.device == p.device
        and not tensor.is_neg()
        and (tensor.stride() == p.stride() or (tensor.is_contiguous() and p.is_contiguous()))
    )


@torch.no_grad()
def moment(
    key: str, index: int, state: Tensor, exponents: Tensor | None, p: Tensor, state_kind: int
) -> Entry:
    """Return a moment, in any format and layout, as state of `p` in the format `state_kind`."""
    target = torch.empty_like(p, dtype=storage.STORED[state_kind])
    if state.dtype == target.dtype and (exponents is None or state.stride() == target.stride()):
        new_entry: Entry = {storage.name_of_moment(key, state_kind): target.copy_(state)}
        if exponents is not None:
            new_entry[key + "_exponents"] = exponents.to(p.device, copy=True)
        return new_entry
    if exponents is not None:
        width = storage.width_of(state)
        decoded = rounding.decode(storage.flat(state), exponents, signed=index == 0, width=width)
        wide = torch.empty_like(state, dtype=torch.float32)
        storage.flat(wide).copy_(decoded)
        state = wide
    if state_kind != L.STATE_8BIT:
        return {key: target.copy_(state)}
    values = storage.flat(torch.empty_like(p, dtype=torch.float32).copy_(state))
    half = torch.full_like(values, rounding.HALF, dtype=torch.int64)
    width = storage.width_of(p)
    exponents = rounding.exponents_for(rounding.peaks(values, width))
    storage.flat(target).copy_(rounding.encode(values, exponents, half, signed=index == 0, width=width))
    return {key + storage.CODES: target, key + "_exponents": exponents.to(torch.uint8)}


def normalize_master(entry: Entry, p: Tensor, kind: int, value: Tensor | None) -> None:
    """Do `normalize_entry` for the master alone: all that a weight needs before it trains."""
    master_key = "master" if kind in storage.WITH_MASTER else "lacking" if kind in storage.EXACT else None
    if value is None:
        if master_key and _fits_master(entry.get(master_key), master_key, p):
            entry.pop("lacking" if master_key == "master" else "master", None)
            return
        value = fp32_value_of(entry, p) if master_key else None
    old_value = entry.get(master_key) if master_key else None
    entry.pop("master", None)
    entry.pop("lacking", None)
    if master_key:
        dtype = torch.float32 if master_key == "master" else torch.int16
        fits = _fits_master(old_value, master_key, p)
        entry[master_key] = old_value if fits else torch.empty_like(p, dtype=dtype)
        if master_key == "master":
            entry["master"].copy_(p if value is None else value)
        elif value is None:
            entry["lacking"].zero_()
    if value is not None:
        wide = value.to(p.device, torch.float32)
        if wide.stride() != p.stride():
            wide = torch.empty_like(p, dtype=torch.float32).copy_(wide)
        if kind in storage.EXACT:
            split.split(wide, p, entry["lacking"])
            return
        for part, *targets in split.parts(wide, p, *([entry["master"]] if master_key else [])):
            for target, source in zip(targets, storage.store_weight(kind, part, p.dtype, None)[0]):
                target.copy_(source)


def _fits_master(tensor: Any, master_key: str, p: Tensor) -> bool:
    dtype = torch.float32 if master_key == "master" else torch.int16
    return (
        isinstance(tensor, Tensor)
        and tensor.dtype == dtype
        and tensor.shape == p.shape
        and _is_placed_as(tensor, p)
    )


def fp32_value_of(entry: Mapping[str, Any], p: Tensor) -> Tensor | None:
    """Return the fp32 weight from an entry in another form or layout; the weight wins where it differs.

    None where the entry says nothing of this weight: no master, one of another shape, or bits that were cast.
    """
    master, lacking = entry.get("master"), entry.get("lacking")
    if isinstance(master, Tensor) and master.shape == p.shape and master.is_floating_point():
        wide = torch.empty_like(p, dtype=torch.float32).copy_(master)
        kind = arguments.kind_of(p.dtype, "fp32")
        for low, part in split.parts(p, wide):
            part.copy_(storage.read_weight(kind, low, part))
        return wide
    if isinstance(lacking, Tensor) and lacking.shape == p.shape and lacking.dtype == torch.int16:
        return split.join(p.detach(), lacking.to(p.device))
    return None
