"""Run a chain of ops in fp32, as a norm by hand has to, and cast back what the module makes of it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.numerics.remedies.base import Both, Cure, Evidence, where
from halfstep.numerics.remedies.full import RunInFp32
from halfstep.numerics.remedies.op import Operands, OpRemedy
from halfstep.numerics.remedies.source import Script, append
from halfstep.numerics.tape import Node
from halfstep.numerics.uncast import low_ops
from halfstep.policy.policy import Policy


@dataclass(frozen=True)
class CastBack(OpRemedy):
    """Cast an fp32 result of the op to fp16: where code goes on that takes tensors of one dtype alone."""

    cases = ("range",)

    @classmethod
    def propose(cls, evidence: Evidence) -> list[Cure]:
        """Propose it with the op that leaves its range in fp32, which alone such code would refuse."""
        node, end = evidence.node, _end_of(evidence)
        if end is None or evidence.cause.format != "fp16":
            return []
        text = (
            f"run {node.op} in fp32{where(node.location)}, go on in it to {end.op}{where(end.location)} and "
        )
        text += "cast the result of that back"
        code = "inputs .float(), result .half()"
        both = Both(RunInFp32.of(node, "", ""), cls.of(end, "", ""), text=text, code=code)
        return [Cure("chain", text, code, doses=[both])]

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        return out.half() if isinstance(out, Tensor) and out.dtype == torch.float32 else out

    def edit_op(self, script: Script, node: Any, operands: Operands) -> None:
        append(script, node, ".half()")


def _end_of(evidence: Evidence) -> Node | None:
    """Return the last op in the same module and file that the op's result reaches before a matmul reads it.

    None in a region, where autocast casts, and where no op that takes one dtype alone reads of it.
    """
    start, end, strict = evidence.node, None, low_ops(Policy())
    chain = {start.index}
    if start.location.in_region or start.phase != "forward":
        return None
    for node in evidence.later:
        if node.phase != "forward" or not any(p is not None and p[0].index in chain for p in node.parents):
            continue
        if node.op in strict:
            return end
        if node.op != "cast":
            chain.add(node.index)
            places = {(n.location.module, n.location.file) for n in (start, node)}
            end = end if len(places) > 1 or node.func.is_view else node
    return None
