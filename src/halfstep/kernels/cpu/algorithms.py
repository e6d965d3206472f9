# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportUnknownLambdaType=false
"""CPU kernels: optim/algorithms.py once more, as what emits it for a number or a vector of them."""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from halfstep.kernels import codes as L


class Value:
    """Some fp32 numbers of LLVM, or vectors of them: Python's operators emit its correctly rounded ones.

    Several are worked on in turns: so the processor need not wait for one to begin the next.
    """

    def __init__(self, builder: Any, *llvm: Any) -> None:
        self.b, self.llvm = builder, llvm

    def _each(self, emit: Any, other: Value) -> Value:
        return Value(self.b, *map(emit, self.llvm, other.llvm))

    def __add__(self, other: Value) -> Value:
        return self._each(self.b.fadd, other)

    def __sub__(self, other: Value) -> Value:
        return self._each(self.b.fsub, other)

    def __mul__(self, other: Value) -> Value:
        return self._each(self.b.fmul, other)

    def __truediv__(self, other: Value) -> Value:
        return self._each(self.b.fdiv, other)

    def sqrt(self) -> Value:
        """The square root."""
        kind = self.llvm[0].type
        name = f"llvm.sqrt.v{kind.count}f32" if isinstance(kind, ir.VectorType) else "llvm.sqrt.f32"
        root = self.b.module.globals.get(name)
        root = root or ir.Function(self.b.module, ir.FunctionType(kind, [kind]), name)
        return Value(self.b, *(self.b.call(root, [x]) for x in self.llvm))

    def sign_times(self, other: Value) -> Value:
        """`other` where this is above 0, minus it below, else 0 (where this is a NaN too)."""
        b, zero = self.b, ir.Constant(self.llvm[0].type, None)

        def emit(x: Any, y: Any) -> Any:
            above = b.select(b.fcmp_ordered(">", x, zero), y, zero)
            return b.select(b.fcmp_ordered("<", x, zero), b.fneg(y), above)

        return self._each(emit, other)


# The first result emits the new weight when it is called, which may be after the moments of another vector: a
# processor looks a few hundred operations ahead, and those that wait for a root would fill that up.


def moments(g, m, v, s):
    v = v * s[3] + (g * g) * s[4]
    root = v.sqrt() * s[5] + s[6]
    return m + (g - m) * s[2], v, root


def adamw(w, g, m, v, s):
    m, v, root = moments(g, m, v, s)
    return lambda: w() * s[1] - s[7] * (m / root), m, v


def adam(w, g, m, v, s):
    w = w()
    m, v, root = moments(g + s[1] * w, m, v, s)
    return lambda: w - s[7] * (m / root), m, v


def lion(w, g, m, v, s):
    return lambda: w() * s[1] - (m * s[2] + g * s[3]).sign_times(s[6]), m * s[4] + g * s[5], v


def sgd(w, g, m, v, s):
    w = w()
    return lambda: w - s[4] * (g + s[1] * w), m, v


def sgd_momentum(w, g, m, v, s):
    w = w()
    m = m * s[2] + (g + s[1] * w) * s[3]
    return lambda: w - s[4] * m, m, v


def sgd_nesterov(w, g, m, v, s):
    w = w()
    g = g + s[1] * w
    m = m * s[2] + g * s[3]
    return lambda: w - s[4] * (g + m * s[5]), m, v


ALGORITHMS = {
    L.ADAMW: adamw,
    L.ADAM: adam,
    L.LION: lion,
    L.SGD: sgd,
    L.SGD_MOMENTUM: sgd_momentum,
    L.SGD_NESTEROV: sgd_nesterov,
}


@cache
def advance(algorithm: int) -> Any:
    """An algorithm for single elements: weight, moments and gradient to weight and moments."""

    @intrinsic
    def go(typingctx, w, g, m, v, s):
        def codegen(context, builder, signature, args):
            scalars = [Value(builder, builder.extract_value(args[4], i)) for i in range(8)]
            w, *others = (Value(builder, x) for x in args[:4])
            change, m, v = ALGORITHMS[algorithm](lambda: w, *others, scalars)
            new = [x.llvm[0] for x in (change(), m, v)]
            return context.make_tuple(builder, signature.return_type, new)

        return types.Tuple((w, m, v))(w, g, m, v, s), codegen

    return go
