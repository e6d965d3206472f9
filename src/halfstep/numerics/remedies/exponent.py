"""Keep an exponential in range: shifted as softmax does, by torch's logsumexp, or its exponent clamped."""

import ast
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.numerics.remedies.base import Cure, Evidence, Met, where
from halfstep.numerics.remedies.op import AtLocation, Operands, OpRemedy
from halfstep.numerics.remedies.source import ATOMS, LIBRARIES, Script, append, is_on, with_edit
from halfstep.numerics.snapshot import StepParticipants
from halfstep.numerics.tape import Node, OpLocation, op_label

#: Powers of e below which an exponential fits, with what is computed of it after.
_EXPONENTS = {"fp16": (10.0, 4.0)}
#: Ops that leave a ratio to a sum, or the logarithm of that but for a constant, as it is.
_IN_PROPORTION = ("mul", "where", "masked_fill", "_to_copy", "bmm", "mm", "add")


@dataclass(frozen=True)
class ClampExponent(OpRemedy):
    """Keep the exponent below `value`."""

    value: float = 0.0
    kind = "clamp"
    cases = ("range", "power")

    @classmethod
    def propose(cls, evidence: Evidence) -> list[Cure]:
        """Propose it of a power that is too large; for a softmax or logsumexp by hand, what these do."""
        node, later = evidence.node, evidence.later
        base, exp, place = evidence.power, node.op == "exp", where(node.location)
        if evidence.case == "range" and (not base or node.phase == "backward"):
            return []
        name = evidence.name_of(next(iter(node.tensors()), None))
        last, dims = _by_hand(node, later)
        if last is not None and last.base == "log" and exp:
            text = f"take logsumexp in place of the log of a sum of exponentials{where(last.location)}"
            code = f"torch.logsumexp({name or 'x'}, dim={_dims_text(dims) or '...'})"
            return [Cure.of(LogSumExp.of(node, text, code, last.location.line, dims))]
        what = "what exp is taken of" if exp else "the exponent"
        text = f"keep {what} below {{:g}}, before {node.op} and not after it{place}"
        x, powers = name or "x", _EXPONENTS.get(evidence.cause.format, (80.0, 20.0))
        limits = [float(f"{k / math.log(base):.3g}") for k in powers]
        doses = [cls.of(node, text.format(k), f"{x}.clamp(max={k:g})", k) for k in limits]
        if last is not None and last.base != "log":
            text = f"subtract the largest before {node.op}, as softmax does{place}: the ratio stays"
            power = "torch.exp" if exp else f"{base:g} ** "
            code = f"{power}({x} - {x}.amax({_dim_first(dims)}keepdim=True))"
            doses.insert(0, Shift.of(node, text, code, dims))
        return [Cure.of(*doses)]

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return _call(func, args, kwargs, lambda x: x.clamp_max(self.value))

    def edit_op(self, script: Script, node: Any, operands: Operands) -> None:
        for operand in operands[-1:] if isinstance(node, ast.BinOp) else operands[:1]:
            append(script, operand, f".clamp(max={self.value:g})")


@dataclass(frozen=True)
class Shift(OpRemedy):
    """Subtract the largest over `dims` (all, if empty) from the exponent of a ratio."""

    dims: tuple[int, ...] = ()
    kind = "shift"

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        return _call(func, args, kwargs, lambda x: x - x.detach().amax(self.dims, keepdim=True))

    def edit_op(self, script: Script, node: Any, operands: Operands) -> None:
        for operand in operands[:1]:
            x = script.of(operand) if isinstance(operand, ATOMS) else f"({script.of(operand)})"
            script.swap(operand, f"({x} - {x}.amax({_dim_first(self.dims)}keepdim=True))")


@dataclass(frozen=True)
class LogSumExp(OpRemedy):
    """Replace the logarithm of a sum of exponentials, taken on line `last`, by torch's logsumexp."""

    last: int = 0
    dims: tuple[int, ...] = ()
    kind = "logsumexp"

    def apply(self, parts: StepParticipants, stack: ExitStack) -> Met | None:
        """Take logsumexp of what the exponential was taken of."""
        operands: list[Tensor] = []

        def remember(func: Any, args: Any, kwargs: Any) -> Any:
            operands[:] = args[:1]
            return func(*args, **kwargs)

        def take(func: Any, args: Any, kwargs: Any) -> Any:
            (x,) = operands
            dims = self.dims or tuple(range(x.dim()))
            return torch.logsumexp(x, dims, keepdim=args[0].dim() == x.dim())

        power = stack.enter_context(AtLocation(self.op, self.file, self.line, remember))
        log = stack.enter_context(AtLocation("log", self.file, self.last, take))
        return lambda: power.met and log.met

    def edit(self, text: str, location: OpLocation) -> Iterator[str]:
        """Write it in place of the logarithm, without the summed dimensions or with them."""
        for keep in ("", ", keepdim=True"):
            yield with_edit(text, self._edit_log, keep)

    def _edit_log(self, script: Script, keep: str) -> None:
        for exp, log in itertools.product(script.calls("exp"), script.calls("log")):
            if is_on(exp, self.line) and is_on(log, self.last) and self.dims:
                of_torch = script.of(exp.func).rpartition(".")[0] in LIBRARIES
                x = exp.args[0] if of_torch else getattr(exp.func, "value", None)
                script.swap(log, f"torch.logsumexp({script.of(x)}, {_dims_text(self.dims)}{keep})")


def _call(func: Any, args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Call a function with its exponent changed; as it is where it has none."""
    name = getattr(func, "__name__", "")
    label, place = op_label(func, name), None
    if label == "exp" or name == "__rpow__":
        place = 0
    elif label == "pow" and not isinstance(args[0], Tensor):
        place = 1
    if place is not None:
        args = (*args[:place], change(args[place]), *args[place + 1 :])
    return func(*args, **kwargs)


def _dims_text(dims: Sequence[int]) -> str:
    """Write dimensions as a script does; nothing for all."""
    return ", ".join(map(str, dims)) if len(dims) < 2 else f"({', '.join(map(str, dims))})"


def _dim_first(dims: Sequence[int]) -> str:
    return f"{_dims_text(dims)}, " if dims else ""


def _by_hand(node: Node, later: Sequence[Node]) -> tuple[Node | None, tuple[int, ...]]:
    """Find a softmax or logsumexp that the script writes by hand after an op, and its dimensions."""
    powers, sums, dims = {node.index}, set[int](), ()
    for other in later if node.phase == "forward" else ():
        repeat = other.func == node.func and other.location.line == node.location.line
        if repeat and other.parents == node.parents and None not in node.parents:
            powers.add(other.index)  # `x.exp() / x.exp().sum()`
        of = [-1 if parent is None else parent[0].index for parent in other.parents] or [-1]
        if other.base == "sum" and of[0] in powers and other.tensors()[0].shape == node.outs[0].shape:
            dims = tuple(other.args[1] or ()) if len(other.args) > 1 else ()
            sums.add(other.index)
        elif (other.base == "div" and of[0] in powers and of[-1] in sums) or (
            other.base == "log" and of[0] in sums
        ):
            return other, dims
        elif other.func.is_view or other.base in _IN_PROPORTION:
            for kind in (powers, sums):
                kind |= {other.index} if kind.intersection(of) else set()
    return None, ()
