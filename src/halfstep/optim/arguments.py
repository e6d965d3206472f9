"""What a parameter group may hold: torch's keys, formats, and numbers as Python, numpy or torch has them."""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from halfstep.distributed import local_of
from halfstep.errors import ConfigError, UnsupportedError, show
from halfstep.formats import dtype_name
from halfstep.gradients.decision import check_clip
from halfstep.kernels import codes as L
from halfstep.optim import storage

MASTERS = ("exact", "fp32", "stochastic", None)
STATE_DTYPES = {"fp32": L.STATE_FP32, "bf16": L.STATE_BF16, "8bit": L.STATE_8BIT}
_KINDS: dict[tuple[torch.dtype, str | None], int] = {
    (torch.bfloat16, "exact"): L.BF16_EXACT,
    (torch.bfloat16, "fp32"): L.BF16_MASTER,
    (torch.bfloat16, "stochastic"): L.BF16_STOCHASTIC,
    (torch.bfloat16, None): L.BF16_NONE,
    (torch.float16, "exact"): L.FP16_EXACT,
    (torch.float16, "fp32"): L.FP16_MASTER,
    (torch.float16, None): L.FP16_NONE,
}
_NUMBERS = ("lr", "eps", "weight_decay", "momentum")
TORCH_KEYS: Mapping[str, Any] = MappingProxyType({"foreach": None, "fused": None, "capturable": False})
"""How a step of torch's runs, for code that reads groups. A step here has one way, so they are no options."""
_PLAIN = frozenset({float, int, bool, str, type(None), list, tuple})


def name_of(group: Mapping[str, Any], place: tuple[int, int]) -> str:
    """Return the name of a parameter in errors."""
    names = group.get("param_names")
    return repr(names[place[1]]) if names else f"parameter {place[1]} of group {place[0]}"


def check_group(group: dict[str, Any], ours: bool = True) -> None:
    """Check a group and make numpy's numbers Python's, in place; `ours`: the algorithm's are checked as well.

    Raises:
        ConfigError: values no optimizer here can mean. UnsupportedError: differentiable=True.
    """
    for name, value in group.items():
        if name not in ("params", "param_names"):
            group[name] = _as_number(value, read=False)
    if isinstance(group["state_dtype"], torch.dtype):
        group["state_dtype"] = dtype_name(group["state_dtype"])
    check_storage(group)
    limits_of([group], None)
    if not isinstance(group["skip_nonfinite"], bool):
        raise ConfigError(f"skip_nonfinite={show(group['skip_nonfinite'])}: expected True or False")
    if group["differentiable"]:
        raise UnsupportedError(
            "differentiable=True: a step here is no part of a graph; use torch.optim for it"
        )
    if ours:
        check_hyperparameters(group)


WHOLE = ("seed", "backend", "accumulate", "release_gradients")
"""Options of a whole optimizer, which a parameter group has none of."""


def check_whole_options(optimizer: Any, group: Any) -> None:
    """Raise ConfigError for a group with an option of the whole optimizer that says other than it."""
    for name in WHOLE if isinstance(group, Mapping) else ():
        if name in group and group[name] != getattr(optimizer, name):
            raise ConfigError(
                f"{name}={show(group[name])} in a parameter group: it is an option of the whole optimizer, "
                f"hs.optim.{type(optimizer).__name__}(..., {name}=...)"
            )


def check_storage(group: Mapping[str, Any]) -> None:
    """Raise ConfigError for a master or state format that does not exist or does not go with the rest."""
    for name, choices in (("master", MASTERS), ("state_dtype", STATE_DTYPES)):
        if group[name] not in choices:
            raise ConfigError(f"{name}={group[name]!r}: choose one of {', '.join(map(repr, choices))}")
    if group.get("amsgrad") and group["state_dtype"] != "fp32":
        raise ConfigError(
            f"amsgrad=True keeps its states in fp32: leave state_dtype={group['state_dtype']!r} out"
        )


def check_parameter(p: Tensor, master: str | None) -> None:
    """Raise UnsupportedError for a parameter that no step here could update."""
    if isinstance(p, UninitializedParameter):
        return  # known when it has a shape
    p = local_of(p)
    kind_of(storage.local_tensor(p).dtype, master)
    if p.layout is not torch.strided:
        raise UnsupportedError(f"a parameter of shape {list(p.shape)} is {p.layout}: use torch.optim for it")
    storage.check_dense(p)


def check_options(kind: type, unknown: Mapping[str, Any], seed: int, release_gradients: bool) -> None:
    """Refuse options that there are none of, and a seed or a switch that is none."""
    for name in unknown:
        if name in TORCH_KEYS:
            raise TypeError(
                f"{name}={unknown[name]!r}: leave it out: a step of hs.optim.{kind.__name__} is one fused "
                "pass, which a CUDA graph can capture; backend='reference' runs it in plain torch"
            )
        option_names = [n for cls in kind.__mro__ for n in inspect.signature(cls.__init__).parameters]
        near = difflib.get_close_matches(name, option_names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "; docs/api.md lists its options"
        raise TypeError(f"hs.optim.{kind.__name__} has no option {name!r}{hint}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed={show(seed)}: expected a whole number, 0 or more and below 2**63")
    if not isinstance(release_gradients, bool):
        raise ConfigError(f"release_gradients={show(release_gradients)}: expected True or False")


def check_accumulate(accumulate: Any) -> None:
    """Raise ConfigError unless it is None or "fp32"."""
    if accumulate not in (None, "fp32"):
        raise ConfigError(f"accumulate={show(accumulate)}: choose 'fp32' or None (the weights' own dtype)")


def kind_of(dtype: torch.dtype, master: str | None) -> int:
    """Return how a weight of `dtype` is stored under `master`; UnsupportedError if no optimizer takes it."""
    if dtype == torch.float32:
        return L.PLAIN
    kind = _KINDS.get((dtype, master))
    if kind is None:
        if dtype == torch.float16:
            raise UnsupportedError(
                f"master={master!r} is for bf16 weights, and these are fp16: take master='exact' or "
                "'fp32', or prepare with dtype='bf16'"
            )
        raise UnsupportedError(
            f"hs.optim updates bf16, fp16 and fp32 weights, and these are {dtype}: use torch.optim for them"
        )
    return kind


def state_kind_of(p: Tensor, state_dtype: str) -> int:
    """Return the format of p's states: as asked for, but bf16 instead of 8 bits in vectors and short rows.

    There an exponent for every row would take as much; one for several rows would keep a tensor from being
    cut between them.
    """
    kind = STATE_DTYPES[state_dtype]
    if kind != L.STATE_8BIT:
        return kind
    short = p.numel() < L.LONG_VECTOR if p.dim() < 2 else storage.width_of(p) < L.SHORT_ROW
    return L.STATE_BF16 if short else kind


def numbers_of(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the group with every number a Python one; 0-d tensors are read."""
    betas = group.get("betas", ())
    if _PLAIN.issuperset(map(type, group.values())) and _PLAIN.issuperset(map(type, betas)):
        return group
    numbers = {key: _as_number(value, read=True) for key, value in group.items() if key != "params"}
    check_hyperparameters(numbers)
    return numbers


def limits_of(groups: Sequence[Mapping[str, Any]], clip_norm: float | None) -> list[float | None]:
    """Return the norm that each group's gradients are clipped to: `clip_norm`, else the group's own."""
    if clip_norm is not None:
        return [clip_norm] * len(groups)
    limits = [group.get("clip_norm") for group in groups]
    for limit in limits:
        if limit is not None:
            check_clip(limit)
    return limits


def check_clipping(clip_norm: float, clip_coef: Any, released: bool) -> None:
    """Raise for what a step cannot clip by: no norm, one beside a coefficient, or too late."""
    check_clip(clip_norm)
    if clip_coef is not None:
        raise ConfigError(f"step(clip_norm={clip_norm}, clip_coef={show(clip_coef)}): give one of the two")
    if released:
        raise UnsupportedError(
            f"step(clip_norm={clip_norm}): gradients were released and applied during backward; give it to "
            "Session.step, which clips them as they come, or build the optimizer without release_gradients"
        )


def _as_number(value: Any, read: bool) -> Any:
    """Return numbers of numpy, in tuples too, as Python's; those of tensors where `read`."""
    if isinstance(value, tuple | list):
        return type(value)(_as_number(item, read) for item in value)
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1):
        return value.item()
    return float(value) if read and isinstance(value, Tensor) else value


def check_betas(betas: Any) -> None:
    """Raise ConfigError unless it is two numbers in [0, 1): 0.999 in bf16 is not. A device's is not read."""
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise ConfigError(f"betas={show(betas)}: must be a pair of numbers in [0, 1)")
    for i, beta in enumerate(betas):
        if isinstance(beta, Tensor) and beta.numel() == 1:
            beta = float(beta) if beta.is_cpu else 0.0
        if not (isinstance(beta, int | float) and 0 <= beta < 1):
            raise ConfigError(f"betas[{i}]={show(beta)}: must be a number in [0, 1)")


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Raise ConfigError for values no optimizer here can mean."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"lr is a tensor of shape {list(lr.shape)}; it must have one element")
    for name in _NUMBERS:
        value = group.get(name, 0.0)
        if not isinstance(value, Tensor) and not (isinstance(value, int | float) and value >= 0):
            raise ConfigError(f"{name}={show(value)}: must be a number of at least 0")
    if "betas" in group:
        check_betas(group["betas"])
    if group.get("nesterov") and "dampening" in group and (group["momentum"] <= 0 or group["dampening"]):
        raise ConfigError("nesterov=True needs momentum > 0 and dampening 0")
