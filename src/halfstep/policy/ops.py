"""The op table: which precision each op runs in, and why.

An op is named by its aten name as it reaches the Autocast dispatch key ("linear", "exp", "layer_norm").
The tables are data (`op_tables.py`); this file gives them types and finds an op's name. What a rule does to
tensors lives in `casting/casts.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch

from halfstep.errors import ConfigError
from halfstep.policy import op_tables
from halfstep.torch_private import all_op_names, has_kernel_for


class Rule(Enum):
    """What an active region does to the floating tensors an op is given.

    LOW: cast to the compute dtype. FP32_OUT: cast to the compute dtype, accumulated and given out in fp32,
    never rounded. FULL: cast to fp32, result fp32. KEEP: run in the dtype of the first floating tensor.
    WIDEST: cast to the widest floating dtype among them (of an op in place, to that of the tensor it writes
    into). BANNED: raise `BannedOpError`.
    """

    LOW = "low"
    FP32_OUT = "fp32_out"
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
        ),
        **{
            name: f"call {name.removesuffix('_')}, which gives fp32, or cast the tensor first"
            for name in op_tables.IN_PLACE.split()
        },
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
_TORCH_CUDA = _build(op_tables.TORCH_CUDA)

TABLES: Mapping[str, Mapping[str, OpRow]] = MappingProxyType(
    {
        "halfstep": _HALFSTEP,
        "low": _nothing_lifted(_HALFSTEP),
        "torch": _TORCH_CUDA,
        "torch-cuda": _TORCH_CUDA,
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
    has_kernel = has_kernel_for
    key = f"Autocast{device_type.upper()}"
    registered = {
        name.removeprefix("aten::").partition(".")[0]
        for name in all_op_names()
        if name.startswith("aten::") and has_kernel(name, key)
    }
    listed = _TORCH_BY_DEVICE[device_type]
    return MappingProxyType({name: row for name, row in listed.items() if name in registered})


def rows(table: str, device_type: str | None = None) -> Mapping[str, OpRow]:
    """Return the rows of `table` as they hold on `device_type`, by op name.

    Only the table "torch" differs by device: it mirrors torch's CPU list on "cpu", its CUDA list elsewhere;
    "torch-cuda" is the CUDA list on every device.
    Raises ConfigError for an unknown table.
    """
    if not isinstance(table, str) or table not in TABLES:
        raise ConfigError(f"unknown op table {table!r:.60}: expected one of {', '.join(TABLES)}")
    if table == "torch" and device_type is not None:
        return _mirror(device_type if device_type in _TORCH_BY_DEVICE else "cuda")
    return TABLES[table]


TAKES_DTYPE: frozenset[str] = frozenset(
    name for table in TABLES.values() for name, row in table.items() if row.via_dtype
)
