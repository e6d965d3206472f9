"""Scale an op's input down by a power of two and its result up."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.numerics.remedies.base import Cure, Evidence, where
from halfstep.numerics.remedies.op import Operands, OpRemedy
from halfstep.numerics.remedies.source import Script, append


@dataclass(frozen=True)
class ScaleAround(OpRemedy):
    """Scale by 2**-bits before the op and back in fp32 after it; a bias that it adds stays as it is."""

    bits: int = 1
    has_bias: bool = False
    kind = "scale"
    cases = ("range",)

    @classmethod
    def propose(cls, evidence: Evidence) -> list[Cure]:
        """Propose it of products."""
        node, bits = evidence.node, evidence.bits
        if node.op not in ("matmul", "linear", "bmm", "mm", "mul", "einsum") or node.phase == "backward":
            return []
        of_the_call = (n for n in (node, *evidence.later) if n.location.call == node.location.call)
        added = node.op == "linear" and any(n.base.startswith("add") for n in of_the_call)
        text = f"scale by 2^-{bits} before {node.op} and undo it in fp32 after{where(node.location)}"
        code = f"torch.{node.op}(x * 2**-{bits}, y).float() * 2**{bits}"
        if added:
            text += ", but for its bias"
            code = f"(linear(x * 2**-{bits}).float() - linear.bias) * 2**{bits} + linear.bias"
        return [Cure.of(cls.of(node, text, code, bits, added))]

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        bits, place = self.bits, next(i for i, x in enumerate(args) if isinstance(x, Tensor))
        out = func(*args[:place], args[place] * 2.0**-bits, *args[place + 1 :], **kwargs).float()
        bias = kwargs.get("bias", [*args, None, None][2]) if func is torch.nn.functional.linear else None
        return out * 2.0**bits if bias is None else (out - bias.float()) * 2.0**bits + bias.float()

    def edit_op(self, script: Script, node: Any, operands: Operands) -> None:
        bits = self.bits
        for operand in operands[:1]:
            append(script, operand, f" * 2.0**-{bits:g})", "(")
        if not self.has_bias:
            script.around(node, "((", f").float() * 2.0**{bits:g})")
            return
        given = next((k.value for k in node.keywords if k.arg == "bias"), None) or [*node.args, None, None][2]
        bias = f"{script.of(node.func)}.bias" if given is None else script.of(given)
        script.around(node, "((", f".float() - {bias}) * 2.0**{bits:g} + {bias})")
