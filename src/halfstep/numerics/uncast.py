"""Whether a level that casts ops cast any, and in which dtype its weights are; the words where it did not.

`Session` asks at its first step, `lint` and the doctor when they are called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from halfstep.formats import FP16, dtype_name
from halfstep.optim.masters import holder_of
from halfstep.policy.levels import LOW_DTYPES, Level
from halfstep.policy.ops import Rule
from halfstep.policy.policy import Policy

#: A node of autograd made by an op of torch's own that casts nothing.
_PLAIN = re.compile(r"(?!ToCopy)\w+Backward\d+|torch::autograd::AccumulateGrad")

Fault = tuple[str, str]
"""What is wrong, and what to write."""


def low_ops(policy: Policy) -> set[str]:
    """Return the ops that a policy runs in 16 bits."""
    return {name for name, row in policy.rows().items() if row.rule is Rule.LOW}


def casts_weights(level: Level, policy: Policy) -> bool:
    """Whether the level keeps fp32 weights and casts them to 16 bits where an op uses them."""
    return level.cast_ops and level.param_role == "full" and policy.compute_dtype in LOW_DTYPES


def no_region(policy: Policy, conversions: Iterable[Any]) -> Fault:
    """Return the fault of a step whose ops ran in fp32, which a plan may have asked for."""
    text = f"no op ran in {dtype_name(policy.compute_dtype)}: the step computed in fp32"
    cure = "compute model and loss inside `with amp.autocast():`"
    if any(conversion.changes for conversion in conversions):
        return text, f"{cure}; where the plan is to keep all of it in fp32, prepare at level O0 in its place"
    return text, f"{cure}, or prepare at level O0"


def weights_fault(
    level: Level, policy: Policy, optimizers: Iterable[torch.optim.Optimizer], weights: Iterable[Tensor]
) -> Fault | None:
    """Return the fault of 16-bit weights without masters, or of fp64 ones, at a level of fp32 weights.

    `weights`: all of the models. Optimizers of `halfstep.optim` keep what 16 bits lack themselves.
    """
    if not casts_weights(level, policy):
        return None
    torchs = [o for o in optimizers if holder_of(o) is None]
    updated = [p for o in torchs for group in o.param_groups for p in group["params"]]
    low = [p for p in updated if p.requires_grad and p.dtype in LOW_DTYPES]
    if low:
        text = f"{level.name} keeps fp32 weights, but {len(low)} parameters are {dtype_name(low[0].dtype)}"
        cure = "call model.float(), or prepare at O2, which adds masters"
        return f"{text} and would lose small updates", cure
    if {p.dtype for p in weights if p.is_floating_point()} == {torch.float64}:
        text = f"no op ran in {dtype_name(policy.compute_dtype)}: all weights are fp64, which is never cast"
        return text, "call model.float() before prepare(), or prepare at level O0"
    return None


def zero_epsilons(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, str, str]]:
    """Parameter groups whose epsilon fp16 weights round to zero: where, what is wrong, and the cure.

    Optimizers of `halfstep.optim` compute in fp32.
    """
    for optimizer in (o for o in optimizers if holder_of(o) is None):
        for number, group in enumerate(optimizer.param_groups):
            eps, half = group.get("eps"), any(p.dtype == torch.float16 for p in group["params"])
            if half and isinstance(eps, float) and 0 < eps <= FP16.smallest_subnormal / 2:
                text = f"eps {eps:g} is zero beside fp16 weights: a division by zero where a gradient is zero"
                cure = "use fp32 master weights (level O2), or eps=1e-4"
                yield f"{type(optimizer).__name__} group {number}", text, cure


def ran_wide(loss: Tensor, policy: Policy) -> bool:
    """Whether a loss's graph holds an op that the policy runs in 16 bits, and no cast.

    False where it holds what cannot be looked into: compiled code, a Function of somebody's own.
    """
    low = {name.replace("_", "") for name in low_ops(policy)}
    visited, todo, wide = set[Any](), [loss.grad_fn], False
    while todo:
        node = todo.pop()
        if node is None or node in visited:
            continue
        if not _PLAIN.fullmatch(node.name()):
            return False
        wide = wide or node.name().partition("Backward")[0].lower() in low
        visited.add(node)
        todo += [above for above, _ in node.next_functions]
    return wide
