"""The op table: which precision each op runs in, and why.

An op is named by its aten name as it reaches the Autocast dispatch key ("linear", "exp", "layer_norm").
The tables are data (`op_tables.py`); this file gives them types and finds an op's name. What a rule does to
tensors lives in `autocast.py`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch

from halfstep.errors import ConfigError
from halfstep.policy import op_tables


class Rule(Enum):
    """What an active region does to the floating tensors an op is given.

    LOW: cast to the compute dtype. FULL: cast to fp32, result fp32. KEEP: run in the dtype of the first
    floating tensor. WIDEST: cast to the widest floating dtype among them. BANNED: raise `BannedOpError`.
    """

    LOW = "low"
    FULL = "full"
    KEEP = "keep"
    WIDEST = "widest"
    BANNED = "banned"


@dataclass(frozen=True, slots=True)
class OpRow:
    """One op's rule and the reason for it.

    `via_dtype`: the op has a `dtype=` argument; under FULL it takes fp32 through that instead of a cast copy.
    `only_in`: a BANNED op that is refused in this compute dtype alone, and FULL in every other.
    """

    name: str
    rule: Rule
    reason: str
    via_dtype: bool = False
    only_in: torch.dtype | None = None

    def rule_for(self, compute_dtype: torch.dtype) -> Rule:
        """Return the rule when LOW ops run in `compute_dtype`."""
        if self.only_in is not None and compute_dtype != self.only_in:
            return Rule.FULL
        return self.rule


REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "binary_cross_entropy": (
            "give the logits to binary_cross_entropy_with_logits (or BCEWithLogitsLoss) and drop the "
            "sigmoid, or compute this loss inside autocast(enabled=False) on float32 inputs"
        )
    }
)


def _build(groups: op_tables.Groups) -> Mapping[str, OpRow]:
    """Turn groups of data into rows; a later group overrides an earlier one."""
    rows: dict[str, OpRow] = {}
    for word, reason, names in groups:
        rule, _, dtype = word.partition(":")
        only_in = torch.float16 if dtype == "fp16" else None
        for name in names.split():
            bare = name.removesuffix("*")
            rows[bare] = OpRow(bare, Rule(rule), reason, name != bare, only_in)
    return MappingProxyType(dict(sorted(rows.items())))


def _nothing_lifted(table: Mapping[str, OpRow]) -> Mapping[str, OpRow]:
    """Return the table with KEEP for every FULL row that has a 16-bit kernel: what level O3 runs."""
    reason = "level O3: everything in the compute dtype"
    stay = frozenset(op_tables.NO_16_BIT_KERNEL.split())
    lifted = [name for name, row in table.items() if row.rule is Rule.FULL and name not in stay]
    return MappingProxyType({**table, **{name: OpRow(name, Rule.KEEP, reason) for name in lifted}})


_HALFSTEP = _build(op_tables.HALFSTEP)

TABLES: Mapping[str, Mapping[str, OpRow]] = MappingProxyType(
    {
        "halfstep": _HALFSTEP,
        "low": _nothing_lifted(_HALFSTEP),
        "torch": _build(op_tables.TORCH_CUDA),
        "apex": _build(op_tables.APEX),
        "mindspore": _build(op_tables.MINDSPORE),
        "mlu": _build(op_tables.MLU),
        "paper": _build(op_tables.PAPER),
    }
)

_TORCH_BY_DEVICE: Mapping[str, Mapping[str, OpRow]] = MappingProxyType(
    {"cpu": _build(op_tables.TORCH_CPU), "cuda": TABLES["torch"]}
)


@functools.cache
def _mirror(device_type: str) -> Mapping[str, OpRow]:
    """Return torch's list for a device without the ops that the running torch does not register there."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    key = f"Autocast{device_type.upper()}"
    registered = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name, key)
    }
    listed = _TORCH_BY_DEVICE[device_type]
    return MappingProxyType({name: row for name, row in listed.items() if name in registered})


def rows(table: str, device_type: str | None = None) -> Mapping[str, OpRow]:
    """Return the rows of `table` as they hold on `device_type`, by op name.

    Only the table "torch" differs by device: it mirrors torch's CPU list on "cpu", its CUDA list elsewhere.
    Raises ConfigError for an unknown table.
    """
    if not isinstance(table, str) or table not in TABLES:
        raise ConfigError(f"unknown op table {table!r:.60}: expected one of {', '.join(TABLES)}")
    if table == "torch" and device_type is not None:
        return _mirror(device_type if device_type in _TORCH_BY_DEVICE else "cuda")
    return TABLES[table]


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
_OPERATORS: Mapping[Any, str] = {
    operator.matmul: "matmul",
    operator.pow: "pow",
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
}


TAKES_DTYPE: frozenset[str] = frozenset(
    name for table in TABLES.values() for name, row in table.items() if row.via_dtype
)
_NN: Any = getattr(torch._C, "_nn")  # noqa: B009 - a submodule without stubs
OWN_OP_MARK = "__halfstep_op__"
OWN_OPS: dict[str, Callable[..., Any]] = {}


def known_names() -> list[str]:
    """Return every name that `canonical_op` accepts as is: aten ops and own functions."""
    aten = {
        name[6:].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name[:6] == "aten::"
    }
    return sorted(aten | set(OWN_OPS))


def _known(name: str) -> str | None:
    name = _ALIASES.get(name, name)
    if any(name in table for table in TABLES.values()) or hasattr(torch.ops.aten, name):
        return name
    return None


def _name_of_callable(fn: Callable[..., Any]) -> str | None:
    if hasattr(fn, OWN_OP_MARK):
        return getattr(fn, OWN_OP_MARK)
    if isinstance(fn, torch._ops.OpOverload):
        fn = fn.overloadpacket
    if isinstance(fn, torch._ops.OpOverloadPacket):
        namespace, _, name = fn._qualified_op_name.partition("::")
        return name if namespace == "aten" else fn._qualified_op_name
    if fn in _OPERATORS:
        return _OPERATORS[fn]
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
        found = _name_of_callable(op)
        if found is None:
            return None
        if found in OWN_OPS:
            return found
        name = found
    if "::" in name:
        namespace, _, rest = name.partition("::")
        return name if hasattr(getattr(torch.ops, namespace), rest) else None
    if not name.startswith("__"):
        name = name.removesuffix("_") or name
    return _known(name.partition(".")[0])


_MEANINGS: Mapping[Rule, str] = MappingProxyType(
    {
        Rule.LOW: "inputs are cast to the compute dtype (fp16 or bf16)",
        Rule.FULL: "runs in fp32 and gives fp32",
        Rule.KEEP: "runs in the dtype of its first floating input; fp32 weights beside it are welcome",
        Rule.WIDEST: "mixed inputs go to the widest floating dtype among them",
        Rule.BANNED: "refused, with the remedy",
    }
)


def _cell(row: OpRow | None) -> str:
    if row is None:
        return "-"
    word = row.rule.value + (" (fp16)" if row.only_in == torch.float16 else "")
    return word + ("*" if row.via_dtype and row.rule is Rule.FULL else "")


def markdown() -> str:
    """Return the text of docs/ops.md: every op, its rule in each table, and the reason for the default."""
    tables = {**TABLES, "torch cpu": _TORCH_BY_DEVICE["cpu"]}
    order = ("halfstep", "torch", "torch cpu", "apex", "mindspore", "mlu", "paper")
    names = sorted(set[str]().union(*tables.values()), key=lambda name: (name.lstrip("_"), name))
    lines = [
        "# What each op runs in",
        "",
        "Generated from the op tables by `python docs/generate_ops.py`; do not edit.",
        "",
        *(f"- **{rule.value}**: {_MEANINGS[rule]}" for rule in Rule),
        "",
        "`-` means no rule: the op runs in what it is given. `*` marks an op that takes fp32 through its own",
        "`dtype=` argument. `banned (fp16)` is refused in fp16 and runs in fp32 otherwise. The column torch",
        "is torch's CUDA list, torch cpu its CPU list; every other table holds on every device.",
        "Measurements are from `benchmarks/op_rules.py`.",
        "",
        f"| op | {' | '.join(order)} | reason in halfstep |",
        f"|{'---|' * (len(order) + 2)}",
    ]
    for name in names:
        cells = [_cell(tables[table].get(name)) for table in order]
        reason = TABLES["halfstep"][name].reason if name in TABLES["halfstep"] else ""
        lines.append(f"| `{name}` | {' | '.join(cells)} | {reason} |")
    return "\n".join(lines) + "\n"
