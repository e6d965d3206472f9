# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
# pyright: reportUnknownLambdaType=false
"""What the CPU kernels are made of: values that emit LLVM, memory, loops, 16-bit formats, codes, random bits.

A function of values is Python that runs once, while a kernel is compiled, and emits what it computes: so
Numba need not infer the types of each and compile it by itself. What reads or writes a format equals its
counterpart in optim/split.py or optim/rounding.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from time import perf_counter
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from halfstep.kernels import codes as L

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
MASK = 0x7FFFFFFF
INF_BITS = 0x7F800000


def constant(kind: Any, number: float) -> Any:
    """A number of LLVM's type; of an integer only the bits that fit."""
    if isinstance(kind, ir.IntType):
        half = 1 << kind.width - 1
        number = (int(number) + half) % (2 * half) - half
    return ir.Constant(kind, number)


def _operator(ints: str, floats: str = "") -> Any:
    def emit(self: Any, other: Any) -> Value:
        kind = self.llvm[0].type
        whole = isinstance(getattr(kind, "element", kind), ir.IntType)
        return self._each(getattr(self.b, ints if whole else floats), other)

    return emit


def _comparison(sign: str) -> Any:
    """Of integers, bytes without a sign, and of floats: false where one is a NaN."""

    def emit(self: Any, other: Any) -> Value:
        kind, b = self.llvm[0].type, self.b
        compare = b.icmp_unsigned if kind == I8 else b.icmp_signed
        compare = compare if isinstance(kind, ir.IntType) else b.fcmp_ordered
        return self._each(lambda x, y: compare(sign, x, y), other)

    return emit


class Value:
    """Some numbers of LLVM, or vectors of fp32: Python's operators emit its correctly rounded ones.

    Several are worked on in turns: so the processor need not wait for one to begin the next. Integers wrap;
    bytes have no sign, others have one where they are compared or shifted by >>, none where by `down`. A
    Python number beside a value has its type.
    """

    def __init__(self, builder: Any, *llvm: Any) -> None:
        self.b, self.llvm = builder, llvm

    def _each(self, emit: Any, other: Any) -> Value:
        if not isinstance(other, Value):
            other = Value(self.b, *(constant(x.type, other) for x in self.llvm))
        return Value(self.b, *map(emit, self.llvm, other.llvm))

    __add__, __sub__ = _operator("add", "fadd"), _operator("sub", "fsub")
    __mul__, __truediv__ = _operator("mul", "fmul"), _operator("", "fdiv")
    __and__, __or__, __xor__ = _operator("and_"), _operator("or_"), _operator("xor")
    __lshift__, __rshift__, down = _operator("shl"), _operator("ashr"), _operator("lshr")
    __lt__, __gt__, __ge__ = (_comparison(sign) for sign in ("<", ">", ">="))
    equals = _comparison("==")

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

    def to(self, kind: Any) -> Value:
        """The number in a longer or shorter integer, in a float or back; bytes and flags have no sign."""
        (x,), b = self.llvm, self.b
        if isinstance(x.type, ir.IntType) and isinstance(kind, ir.IntType):
            longer = b.zext if x.type.width <= 8 else b.sext
            return Value(b, (b.trunc if x.type.width > kind.width else longer)(x, kind))
        if isinstance(x.type, ir.IntType):
            return Value(b, b.sitofp(x, kind))
        return Value(b, (b.fptosi if isinstance(kind, ir.IntType) else b.fpext)(x, kind))

    def as_bits_of(self, kind: Any) -> Value:
        """A value of another type with the same bits."""
        return Value(self.b, self.b.bitcast(self.llvm[0], kind))


def bits_of(x):
    return x.as_bits_of(I32)


def float_of(x):
    return x.as_bits_of(F32)


def is_nan(x):
    return Value(x.b, x.b.fcmp_unordered("uno", x.llvm[0], x.llvm[0]))


def pick(condition, x, y):
    """`x` where the condition holds, else `y`; both are computed, since a branch may keep loops scalar."""
    kind = x.llvm[0].type if isinstance(x, Value) else y.llvm[0].type if isinstance(y, Value) else I32
    x, y = (z.llvm[0] if isinstance(z, Value) else constant(kind, z) for z in (x, y))
    return Value(condition.b, condition.b.select(condition.llvm[0], x, y))


def most(x, y):
    return pick(x > y, x, y)


def least(x, y):
    return pick(x < y, x, y)


def emitted(result: Any, literals: int = 0) -> Callable[..., Any]:
    """Make a function of values one that kernels call, with the type that Numba gives its result.

    It gets a tuple as a list of values, and returns one so; so many arguments are literals, and come as one
    tuple of numbers before the others.
    """

    def decorate(function: Any) -> Any:
        def emit(typingctx, *kinds):
            def codegen(context, builder, types_of, args):
                def value(kind: Any, x: Any) -> Any:
                    if not isinstance(kind, types.BaseTuple):
                        return Value(builder, x)
                    return [Value(builder, builder.extract_value(x, i)) for i in range(len(kind))]

                known = [tuple(kind.literal_value for kind in kinds[:literals])] if literals else []
                new = function(*known, *map(value, kinds[literals:], args[literals:]))
                if isinstance(new, list):
                    return context.make_tuple(builder, types_of.return_type, [x.llvm[0] for x in new])
                return context.get_dummy_value() if new is None else new.llvm[0]

            return result(*kinds), codegen

        given = list(signature(function).parameters)
        names = ["typingctx", *(f"literal{i}" for i in range(literals)), *given[bool(literals) :]]
        places = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        vars(emit)["__signature__"] = Signature(places)  # Numba makes a tuple of what a * takes
        return intrinsic(prefer_literal=literals > 0)(emit)

    return decorate


@intrinsic
def widest_vectors(typingctx):
    """Compile the calling function on its own, for 512 bits where the processor has them; LLVM takes 256.

    Its stack begins at a cache line: it spills whole vectors, which took up to 60 % longer where the length
    of the environment left each of them in two lines.
    """

    def codegen(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        builder.function.attributes.alignstack = 64
        set.add(
            builder.function.attributes, '"prefer-vector-width"="512"'
        )  # llvmlite knows no such attribute
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def always_inline(typingctx):
    """Compile the calling function into its callers, however long it is: a call keeps a loop scalar."""

    def codegen(context, builder, signature, args):
        builder.function.attributes.add("alwaysinline")
        return context.get_dummy_value()

    return types.void(), codegen


# ---- memory and loops -----------------------------------------------------------------------------------


def _place(address: Value, i: Value, kind: Any) -> Any:
    b = address.b
    return b.gep(b.inttoptr(address.llvm[0], kind.as_pointer()), [i.llvm[0]], inbounds=True)


def load(kind: Any, address: Value, i: Value) -> Value:
    """The i-th value of a type at an address; a view may start at any 16-bit value."""
    return Value(address.b, address.b.load(_place(address, i, kind), align=1 if kind == I8 else 2))


def store(value: Value, address: Value, i: Value) -> None:
    """Write the i-th value at an address."""
    x = value.llvm[0]
    value.b.store(x, _place(address, i, x.type), align=1 if x.type == I8 else 2)


def loop(first: Value, last: Value, begun: Sequence[Value], step: Callable[..., Sequence[Value]]) -> Any:
    """Emit a loop over first..last: `step` makes new values of an index and old ones, begun so."""
    b, before = first.b, first.b.block
    head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
    b.branch(head)
    b.position_at_end(head)
    phis = [b.phi(x.llvm[0].type) for x in (first, *begun)]
    i, *old = (Value(b, phi) for phi in phis)
    b.cbranch((i < last).llvm[0], inside, after)
    b.position_at_end(inside)
    new = Value(b, b.add(i.llvm[0], I64(1), flags=["nsw"])), *step(i, *old)
    for phi, start, x in zip(phis, (first, *begun), new):
        phi.add_incoming(start.llvm[0], before)
        phi.add_incoming(x.llvm[0], b.block)
    b.branch(head)
    b.position_at_end(after)
    return old


OPTIONS = {"nogil": True, "error_model": "numpy"}
INNER: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, **OPTIONS}
"""Of what only kernels call: what Python and C would call it by takes time to compile."""
PATIENCE = 2.0
"""Seconds of compiling without a word: who waits longer is told what for."""


def compiled(signature: str | None = None, name: str = "", **more: Any) -> Any:
    """njit as every kernel here wants it; with a signature, kept on disk where that can be.

    What a function closes over belongs into its `name`. Numba tells functions apart by name and by a number
    that every process counts from 0, so that code from disk would call whatever function of its name, number
    and types came first; and two processes that write to the files of one name may mix them up.
    """

    def decorate(function: Any) -> Any:
        assert name or not function.__closure__, f"{function.__qualname__} closes over its variant"
        function.__qualname__ = name or function.__qualname__
        if signature is None:
            return njit(**INNER, **more)(function)
        begun, kept = perf_counter(), "the next run finds it on disk"
        options: dict[str, Any] = {**OPTIONS, **more}
        try:
            kernel = njit(signature, cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache" not in str(error):
                raise
            kernel = njit(signature, **options)(function)
            kept = "there is no folder to keep it in, which NUMBA_CACHE_DIR names"
        if (took := perf_counter() - begun) > PATIENCE and not kernel.stats.cache_hits:
            print(f"halfstep: compiled a kernel in {took:.0f} s; {kept}", file=sys.stderr, flush=True)
        return kernel

    return decorate


# ---- 16-bit formats -------------------------------------------------------------------------------------


def from_bf16(h):
    return float_of(h.to(I32) << 16)


def bf16_even(x):
    b = bits_of(x)
    even = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
    return pick((b & MASK) > INF_BITS, (b >> 16) | 0x40, even).to(I16)


def bf16_away(x):
    b = bits_of(x)
    return (pick(is_nan(x), b | 0x7FC00000, b + 0x8000) >> 16).to(I16)


def bf16_random(x, noise):
    """Of the result of an operation: a NaN is quiet then, and stays one without its lower half."""
    b = bits_of(x)
    return ((b + pick((b & MASK) < INF_BITS, noise & 0xFFFF, 0)) >> 16).to(I16)


def join_bf16(h, lo):
    high = h.to(I32) << 16
    both = high + lo.to(I32)
    return float_of(pick((both ^ high) < 0, high, both))


def lacking_bf16(x, h):
    low = bits_of(x) - (h.to(I32) << 16)
    return pick(is_nan(x), 0, low).to(I16)


def from_fp16(h):
    sign = (h.to(I32) & 0x8000) << 16
    magnitude = h.to(I32) & 0x7FFF
    normal = (magnitude << 13) + pick(magnitude >= 0x7C00, 0x70000000, 0x38000000)
    tiny = bits_of(magnitude.to(F32) * 2.0**-24)
    return float_of(sign | pick(magnitude < 0x400, tiny, normal))


def fp16_even(x):
    b = bits_of(x)
    a = b & MASK
    normal = (a - 0x38000000 + 0xFFF + ((a >> 13) & 1)) >> 13
    normal = pick(a >= 0x477FF000, 0x7C00, normal)
    tiny = bits_of(float_of(a) + 0.5) - 0x3F000000
    h = pick(a < 0x38800000, tiny, normal)
    h = pick(a > INF_BITS, 0x7E00, h)
    return (h | ((b >> 16) & 0x8000)).to(I16)


def join_fp16(h, lo):
    sign = (h.to(I32) & 0x8000) << 16
    magnitude = h.to(I32) & 0x7FFF
    base = bits_of(from_fp16(magnitude.to(I16)))
    low = pick(magnitude >= 0x7C00, 0, lo.to(I32))
    largest = pick(magnitude > 0x200, 1 << 13, 1 << 14)
    largest = pick(magnitude > 0x400, 1 << 12, largest)
    far = pick(low < 0, low * -1, low) > largest
    pattern = base + pick((magnitude > 0x100) & far, 0, low)
    below = bits_of(float_of(base) + low.to(F32) * 2.0**-40)
    units = low & 0xFFFF
    zero = bits_of(pick(units > 0x8000, 0, units).to(F32) * 2.0**-40)
    below = pick(magnitude.equals(0), zero, below)
    return float_of(sign | pick(magnitude < 0x100, below, pattern))


def lacking_fp16(x, h):
    a = bits_of(x) & MASK
    magnitude = h.to(I32) & 0x7FFF
    base = bits_of(from_fp16(magnitude.to(I16)))
    units = (float_of(a) - float_of(base)) * 2.0**40
    below = (units + 12582912.0 - 12582912.0).to(I32)
    below = least(below, pick(magnitude.equals(0), 32768, 32767))
    low = pick(magnitude < 0x100, below, a - base)
    return pick(magnitude >= 0x7C00, 0, low).to(I16)


# ---- random bits ----------------------------------------------------------------------------------------


WEYL, MIX = 0x9E3779B1, 0x7FEB352D


def mix(x):
    """Half of a hash: enough for dither where a whole one has made the counter."""
    x = (x ^ x.down(16)) * MIX
    return x ^ x.down(15)


def word_of(panel, key):
    """The hashed word of a panel of random bits; an element's are it, exclusive or WEYL times its lane."""
    x = mix(panel.to(I32) * WEYL + key) * 0x846CA68B
    return x ^ x.down(16)


# ---- 8-bit states ---------------------------------------------------------------------------------------


def read_signed(code, exponent):
    """A signed code, E4M3 of the magnitude plus the smallest normal: 0 is zero, spacing is even near it."""
    least = ((exponent - 15) << 23) | ((code & 128) << 24)
    return float_of(((code & 127) << 20) + least) - float_of(least)


def read_unsigned(code, exponent):
    """An E5M3 code; the smallest, 0, is 2^-31 of the block's largest and not zero."""
    return float_of((code + ((exponent - 31) << 3)) << 20)


def nan_to_inf(value):
    return pick(is_nan(value), INF_BITS, bits_of(value))


def write_signed(value, exponent, random):
    b = nan_to_inf(value)
    smallest = (exponent - 15) << 23
    raised = bits_of(float_of(b & MASK) + float_of(smallest))
    code = (raised - smallest + ((random & 0xFFFF) << 4)) >> 20
    return (least(code, 127) | ((b >> 24) & 128)).to(I8)


def write_unsigned(value, exponent, random):
    magnitude = nan_to_inf(value) & MASK
    code = ((magnitude + (random.down(16) << 4)) >> 20) - ((exponent - 31) << 3)
    return least(most(code, 0), 255).to(I8)


def exponent_for(bound):
    """The block exponent under which values up to `bound` fit, rounding up included."""
    exponent = ((bits_of(bound) >> 20) + 1) >> 3
    return most(least(exponent, 255), L.LEAST_EXPONENT)
