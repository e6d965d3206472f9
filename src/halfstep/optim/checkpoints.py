"""Optimizer checkpoints that load into another master or state format.

A saved entry describes itself: the moments' own dtype, `<name>_exponents` beside 8-bit codes, `master` or
`lacking` for the weight, and `weight`, which 16-bit weight the lacking bits belong to. What the target
holds in the same form is copied bit for bit; anything else goes through fp32.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.errors import CheckpointError
from halfstep.kernels import codes as L
from halfstep.optim import rounding, split, storage
from halfstep.optim.algorithms import Algorithm

OWN_OPTIONS = ("params", "param_names", "master", "state_dtype", "release")
"""What a group keeps of its own when a checkpoint is loaded."""


def describe_weight(p: Tensor) -> dict[str, Any]:
    """The dtype and a checksum of a 16-bit weight, by which its lacking bits know it again."""
    total = p.detach().view(torch.int16).sum(dtype=torch.int64)
    return {"dtype": str(p.dtype).removeprefix("torch."), "sum": int(total)}


@torch.no_grad()
def restore(
    name: str, saved: Mapping[str, Any], p: Tensor, algorithm: Algorithm, kind: int, state_kind: int
) -> dict[str, Any]:
    """The state entry of `p` from a saved one of any format; writes `p` where masters say so."""
    for key in (*algorithm.states, "master", "lacking"):
        if key in saved and saved[key].shape != p.shape:
            raise CheckpointError(
                f"the saved {key} of {name} has shape {list(saved[key].shape)}, the parameter {list(p.shape)}"
            )
    state: dict[str, Any] = {}
    step = saved.get("step", 0.0)
    state["step"] = torch.as_tensor(step, dtype=torch.float32).clone().to(p.device)
    for index, key in enumerate(algorithm.states):
        if saved.get(key) is not None:
            _restore_moment(state, key, index, saved, p, state_kind)
    value = None
    if kind in storage.EXACT and "lacking" in saved and _dtype_of(saved, p) == p.dtype:
        state["lacking"] = torch.empty_like(p, dtype=torch.int16).copy_(saved["lacking"])
    else:
        value = _master_value(name, saved, p)
    storage.fill_state(state, p, algorithm, kind, state_kind, value)
    return state


def _restore_moment(
    state: dict[str, Any], key: str, index: int, saved: Mapping[str, Any], p: Tensor, state_kind: int
) -> None:
    given: Tensor = saved[key]
    exponents: Tensor | None = saved.get(key + "_exponents")
    target = torch.empty_like(p, dtype=storage.STORED[state_kind])
    if given.dtype == target.dtype and (exponents is None or given.stride() == target.stride()):
        state[key] = target.copy_(given)
        if exponents is not None:
            state[key + "_exponents"] = exponents.to(p.device, copy=True)
        return
    if exponents is not None:
        codes = storage.flat(given)
        decoded = rounding.decode(codes, exponents, signed=index == 0)
        wide = torch.empty_like(given, dtype=torch.float32)
        storage.flat(wide).copy_(decoded)
        given = wide
    if state_kind != L.STATE_8BIT:
        state[key] = target.copy_(given)
        return
    values = storage.flat(torch.empty_like(p, dtype=torch.float32).copy_(given))
    half = torch.full_like(values, rounding.HALF, dtype=torch.int64)
    tops = rounding.exponents_for(rounding.peaks(values))
    storage.flat(target).copy_(rounding.encode(values, tops, half, signed=index == 0))
    state[key], state[key + "_exponents"] = target, tops.to(torch.uint8)


def _dtype_of(saved: Mapping[str, Any], p: Tensor) -> torch.dtype:
    known = saved.get("weight")
    return getattr(torch, known["dtype"]) if known else p.dtype


def _master_value(name: str, saved: Mapping[str, Any], p: Tensor) -> Tensor | None:
    """The fp32 weight the saved entry speaks of, or None where it holds none."""
    if "master" in saved:
        return cast(Tensor, saved["master"]).to(p.device)
    if "lacking" not in saved:
        return None
    half = p.detach().to(_dtype_of(saved, p))
    known = saved.get("weight")
    if known is not None and describe_weight(half) != known:
        raise CheckpointError(
            f"the saved state of {name} holds the bits its 16-bit weight lacked, and that weight "
            "is not in the model: load the model's weights before the optimizer's"
        )
    return split.join(half, torch.empty_like(p, dtype=torch.int16).copy_(saved["lacking"]))


def match_groups(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> dict[tuple[int, int], Any]:
    """For each (group, position) of ours the saved parameter's key; CheckpointError where they do not fit."""
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved]:
        raise CheckpointError(
            f"the saved optimizer has groups of {[len(g['params']) for g in saved]} parameters, "
            f"this one of {[len(g['params']) for g in groups]}"
        )
    found: dict[tuple[int, int], Any] = {}
    for g, (ours, theirs) in enumerate(zip(groups, saved)):
        order = list(theirs["params"])
        names, saved_names = ours.get("param_names"), theirs.get("param_names")
        if names and saved_names:
            by_name = dict(zip(saved_names, order))
            missing = [name for name in names if name not in by_name]
            if missing:
                raise CheckpointError(f"the saved optimizer has no state for {', '.join(missing[:5])}")
            order = [by_name[name] for name in names]
        found.update({(g, i): key for i, key in enumerate(order)})
    return found
