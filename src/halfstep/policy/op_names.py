"""The one name of an op: what a user may write, and what torch calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from halfstep.policy.ops import TABLES
from halfstep.torch_private import (
    OpOverload,
    OpOverloadPacket,
    all_op_names,
    nn_functions,
    overload_packet_name,
)

# Public spellings whose name differs from the op that reaches the dispatcher.
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "cross_entropy": "cross_entropy_loss",
        "grid_sample": "grid_sampler",
        "nll_loss_nd": "nll_loss",
        "ger": "addr",
        "__matmul__": "matmul",
        "__rmatmul__": "matmul",
        "__pow__": "pow",
        "__rpow__": "pow",
        "__add__": "add",
        "__sub__": "sub",
        "__mul__": "mul",
        "__truediv__": "div",
    }
)
_PREFIXES = ("torch.nn.functional.", "torch.Tensor.", "torch.ops.aten.", "torch.", "aten::", "aten.", "F.")
_NN: Any = nn_functions
OWN_OP_MARK = "__halfstep_op__"
OWN_OPS: dict[str, Callable[..., Any]] = {}


def list_names() -> list[str]:
    """Return every name that `canonical_op` accepts as is: aten ops and own functions."""
    aten = {name[6:].partition(".")[0] for name in all_op_names() if name[:6] == "aten::"}
    return sorted(aten | set(OWN_OPS))


def _find_name(name: str) -> str | None:
    name = _ALIASES.get(name, name)
    if any(name in table for table in TABLES.values()) or hasattr(torch.ops.aten, name):
        return name
    return None


def _name_of_callable(fn: Callable[..., Any]) -> str | None:
    if hasattr(fn, OWN_OP_MARK):
        return getattr(fn, OWN_OP_MARK)
    if isinstance(fn, OpOverload):
        fn = fn.overloadpacket
    if isinstance(fn, OpOverloadPacket):
        namespace, _, name = overload_packet_name(fn).partition("::")
        return name if namespace == "aten" else overload_packet_name(fn)
    if getattr(fn, "__module__", "") == "_operator":
        return _ALIASES.get(f"__{fn.__name__}__")
    name = getattr(fn, "__name__", "")
    homes = (torch, torch.nn.functional, torch.Tensor, _NN, torch.special, torch.linalg, torch.fft)
    short = name.removeprefix("linalg_").removeprefix("fft_").removeprefix("special_")
    return name if any(getattr(home, n, None) is fn for home in homes for n in (name, short)) else None


def canonical_op(op: str | Callable[..., Any]) -> str | None:
    """Return the aten name of an op given by name or as a torch function, method or operator; else None.

    "exp", "torch.exp", `torch.exp`, `torch.Tensor.exp_` and `torch.ops.aten.exp` all give "exp". An op of
    another library keeps its namespace ("mylib::op").
    """
    if isinstance(op, str):
        if op in OWN_OPS:
            return op
        name = op
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
    else:
        callable_name = _name_of_callable(op)
        if callable_name is None:
            return None
        if callable_name in OWN_OPS:
            return callable_name
        name = callable_name
    if "::" in name:
        namespace, _, rest = name.partition("::")
        return name if hasattr(getattr(torch.ops, namespace), rest) else None
    if not name.startswith("__"):
        name = name.removesuffix("_") or name
    return _find_name(name.partition(".")[0])
