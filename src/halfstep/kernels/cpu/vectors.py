# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
"""CPU kernels: 64 elements in explicit vectors, for bf16 weights without masters, states of 16 or 8 bits.

What the compiler makes of single elements unpacks and packs every value by itself; here 16-bit values are
joined, split and coded 32 to a vector, and only arithmetic is done 16 to a vector. LLVM cuts these vectors
into what the processor has. Shuffles stay inside of 16 bytes, where they take one instruction: so the two
vectors of 16 that belong to one of 32 hold its elements in the order of `LANES`.

Results are written where all 32 are finite; else none is, and the caller does them singly. So no number that
is written here was a NaN.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from halfstep.kernels import codes as L
from halfstep.kernels.cpu.algorithms import ALGORITHMS
from halfstep.kernels.cpu.bits import I8, I16, I32, I64, MIX, WEYL, Value

BYTES, WORDS, INTS = ir.VectorType(I8, 32), ir.VectorType(I16, 32), ir.VectorType(I32, 16)
FLOATS = ir.VectorType(ir.FloatType(), 16)
# Elements 4s to 4s+3 of each 8, s = 0 or 1, of two vectors of 32: a low and a high half of every float.
UNPACK = [[k for e in range(4 * s, 32, 8) for i in range(e, e + 4) for k in (i, 32 + i)] for s in (0, 1)]
LANES = [[e + i for e in range(4 * s, 32, 8) for i in range(4)] for s in (0, 1)]
# The low (h = 0) or high halves of two vectors of floats, in the order of elements.
PACK = [[32 * (i % 8 // 4) + 2 * (i // 8 * 4 + i % 4) + h for i in range(32)] for h in (0, 1)]
SIGN, TOO_LARGE = 0x80000000, 0x7F80


def fits(weight: int, grad: int, state: int) -> bool:
    """Whether `panel` does updates of these formats."""
    return (
        weight in (L.BF16_EXACT, L.BF16_NONE, L.BF16_STOCHASTIC) and grad != L.FP16 and state != L.STATE_FP32
    )


class Emitter:
    """Short names over LLVM's builder for vectors of 512 bits."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    def constant(self, kind: Any, numbers: int | Sequence[int]) -> Any:
        """A vector of one number, or of these."""
        several = [numbers] * kind.count if isinstance(numbers, int) else numbers
        bits = kind.element.width
        wrapped = [(n + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1) for n in several]
        return ir.Constant(kind, [ir.Constant(kind.element, n) for n in wrapped])

    def splat(self, kind: Any, scalar: Any) -> Any:
        """A vector of a scalar."""
        none = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(none, scalar, I32(0))
        return self.shuffle(first, none, [0] * kind.count)

    def shuffle(self, x: Any, y: Any, order: Sequence[int]) -> Any:
        """Elements of `x` followed by `y`, in an order."""
        return self.b.shuffle_vector(x, y, self.constant(ir.VectorType(I32, len(order)), order))

    def load(self, kind: Any, address: Any, offset: int = 0) -> Any:
        """The vector that lies at an address and so many bytes."""
        place = self.b.inttoptr(self.b.add(address, I64(offset)), kind.as_pointer())
        return self.b.load(place, align=1)

    def store(self, value: Any, address: Any, offset: int = 0) -> None:
        """Write a vector to an address and so many bytes."""
        place = self.b.inttoptr(self.b.add(address, I64(offset)), value.type.as_pointer())
        self.b.store(value, place, align=1)

    def call(self, name: str, *args: Any) -> Any:
        """An intrinsic of LLVM from vectors of 32 words to one of them, by its name."""
        kind = ir.FunctionType(WORDS, [arg.type for arg in args])
        name = f"llvm.{name}.v32i16"
        known = self.b.module.globals.get(name) or ir.Function(self.b.module, kind, name)
        return self.b.call(known, args)

    def words(self, x: Any) -> Any:
        """The bits of a vector as 16-bit words."""
        return self.b.bitcast(x, WORDS)

    def ints(self, x: Any) -> Any:
        """The bits of a vector as 32-bit integers."""
        return self.b.bitcast(x, INTS)

    def floats(self, x: Any) -> Any:
        """The bits of a vector as fp32 numbers."""
        return self.b.bitcast(x, FLOATS)

    def pick_bits(self, mask: Any, x: Any, y: Any) -> Any:
        """The bits of `x` where the mask has ones, else those of `y`."""
        flipped = self.b.xor(mask, self.constant(mask.type, -1))
        return self.b.or_(self.b.and_(x, mask), self.b.and_(y, flipped))


class Panel:
    """One panel: addresses of its streams, scalars, old and new exponents of its block, random bits."""

    def __init__(self, builder: Any, kind: tuple[int, ...], args: Sequence[Any]) -> None:
        self.b, self.e = builder, Emitter(builder)
        self.algorithm, self.kept, self.grad, self.state = kind
        self.weight, self.lacking, self.gradient, *self.moments = args[:5]
        scalars = [self.e.splat(FLOATS, builder.extract_value(args[5], i)) for i in range(8)]
        self.scalars = [Value(builder, s, s) for s in scalars]
        self.exponents = [builder.extract_value(args[6], i) for i in range(4)]
        self.word, self.key = args[7:9]
        self.coded = self.state == L.STATE_8BIT
        self.count = 2 if self.algorithm in (L.ADAMW, L.ADAM) else 0 if self.algorithm == L.SGD else 1
        self.zeros = self.e.constant(WORDS, 0)

    def least(self, index: int, when: int, kind: Any) -> Any:
        """The smallest number of a moment's codes, old (`when` 0) or new (1): its bits, or upper ones."""
        exponent = self.b.sub(self.exponents[2 * when + index], I32(31 if index else 15))
        shift = I32(23 if kind is INTS else 7)
        bits = self.b.shl(exponent, shift)
        return self.e.splat(kind, bits if kind is INTS else self.b.trunc(bits, I16))

    def with_sign_of(self, x: Any, bits: Any) -> Any:
        """A positive float's bits with the sign of another."""
        return self.e.floats(self.e.pick_bits(self.e.constant(INTS, SIGN), self.e.ints(x), bits))

    def noise(self, index: int, half: int, s: int) -> Any:
        """16 random bits of each element, below those that its moment keeps."""
        shift = 4 if self.coded else 0
        lanes = [((32 * half + i) * WEYL >> 16 * index & 0xFFFF) << shift for i in LANES[s]]
        own = self.b.and_(self.b.lshr(self.word, I32(16 * index)), I32(0xFFFF))
        return self.b.xor(self.e.splat(INTS, self.b.shl(own, I32(shift))), self.e.constant(INTS, lanes))

    # ---- in ---------------------------------------------------------------------------------------------

    def gradients(self, half: int) -> list[Any]:
        """In fp32, before they are multiplied."""
        if self.grad == L.FP32:
            x, y = (self.e.load(FLOATS, self.gradient, 128 * half + at) for at in (0, 64))
            return [self.e.shuffle(x, y, lanes) for lanes in LANES]
        return self.widened(self.e.load(WORDS, self.gradient, 64 * half))

    def widened(self, words: Any) -> list[Any]:
        """Two vectors of floats whose upper halves are the words."""
        return [self.e.floats(self.e.shuffle(self.zeros, words, order)) for order in UNPACK]

    def weights(self, half: int) -> list[Any]:
        """`join_bf16`, or bf16."""
        b, e = self.b, self.e
        if self.kept != L.BF16_EXACT:
            return self.widened(e.load(WORDS, self.weight, 64 * half))
        high, low = (e.load(WORDS, at, 64 * half) for at in (self.weight, self.lacking))
        zero = b.icmp_unsigned("==", b.and_(high, e.constant(WORDS, 0x7FFF)), self.zeros)
        low = b.select(zero, e.call("smax", low, self.zeros), low)
        high = b.add(high, b.ashr(low, e.constant(WORDS, 15)))
        return [e.floats(e.shuffle(low, high, order)) for order in UNPACK]

    def moment(self, index: int, half: int) -> list[Any]:
        """`read_signed` and `read_unsigned`, or bf16."""
        b, e = self.b, self.e
        if not self.coded:
            return self.widened(e.load(WORDS, self.moments[index], 64 * half))
        codes, least = e.load(BYTES, self.moments[index], 32 * half), self.least(index, 0, WORDS)
        upper = b.shl(b.zext(codes, WORDS) if index else b.sext(codes, WORDS), e.constant(WORDS, 4))
        if index:
            return self.widened(b.add(upper, least))
        size = b.and_(upper, e.constant(WORDS, 0x87F0))
        raised, least = self.widened(b.add(size, least)), self.least(index, 0, INTS)
        return [b.fsub(x, self.with_sign_of(x, least)) for x in raised]

    # ---- out --------------------------------------------------------------------------------------------

    def packed(self, floats: Sequence[Any], h: int) -> Any:
        """The low (`h` 0) or high (1) halves of two vectors of floats, in the order of elements."""
        return self.e.shuffle(*map(self.e.words, floats), PACK[h])

    def stored(self, index: int, half: int, new: Sequence[Any]) -> Any:
        """`write_signed` and `write_unsigned`, or random rounding to bf16."""
        b, e = self.b, self.e
        if self.coded and not index:
            least = self.least(0, 1, INTS)
            new = [b.fadd(x, self.with_sign_of(x, least)) for x in new]
        if self.count == 1:  # noise could carry a NaN into the sign, and Lion's weights stay finite
            self.sizes.append(b.and_(self.packed(new, 1), e.constant(WORDS, 0x7FFF)))
        new = [b.add(e.ints(x), self.noise(index, half, s)) for s, x in enumerate(new)]
        words = self.packed(new, 1)
        if index:
            self.sizes.append(words)
        if not self.coded:
            return words
        least, four = self.least(index, 1, WORDS), e.constant(WORDS, 4)
        if index:
            code = b.lshr(e.call("usub.sat", words, least), four)
            return b.trunc(e.call("umin", code, e.constant(WORDS, 255)), BYTES)
        words = b.sub(words, least)
        code = e.call("umin", b.and_(words, e.constant(WORDS, 0x7FFF)), e.constant(WORDS, 0x7FF))
        sign = b.and_(b.lshr(words, e.constant(WORDS, 8)), e.constant(WORDS, 0x80))
        return b.trunc(b.or_(b.lshr(code, four), sign), BYTES)

    def rounded(self, half: int, floats: Sequence[Any]) -> Any:
        """bf16 weights that keep nothing else: `bf16_random` by `mix`, or `bf16_even`."""
        b, e = self.b, self.e
        words = []
        for s, x in enumerate(map(e.ints, floats)):
            if self.kept == L.BF16_NONE:
                up = b.and_(b.lshr(x, e.constant(INTS, 16)), e.constant(INTS, 1))
                up = b.add(up, e.constant(INTS, 0x7FFF))
            else:
                lanes = e.constant(INTS, [(32 * half + i) * WEYL for i in LANES[s]])
                up = b.mul(b.xor(e.splat(INTS, self.word), lanes), e.constant(INTS, WEYL))
                up = b.add(up, e.splat(INTS, self.key))
                up = b.mul(b.xor(up, b.lshr(up, e.constant(INTS, 16))), e.constant(INTS, MIX))
                up = b.and_(b.xor(up, b.lshr(up, e.constant(INTS, 15))), e.constant(INTS, 0xFFFF))
            words.append(b.add(x, up))
        return self.packed(words, 1)

    def emit(self) -> Any:
        """All of it, or its first half, or nothing, up to a result that is not finite: elements done."""
        self.done = cgutils.alloca_once_value(self.b, I64(0))
        self.finish(0, [self.begin(half) for half in (0, 1)])
        return self.b.load(self.done)

    def begin(self, half: int) -> tuple[Any, list[Any], list[Any]]:
        """What emits 32 new weights, their states as they are stored, and what tells if those are finite."""
        s, b = self.scalars, self.b
        g = Value(b, *self.gradients(half)) * s[0]
        old = [Value(b, *self.moment(index, half)) for index in reversed(range(self.count))][::-1]
        m, v = [*old, None, None][:2]
        weights, *new = ALGORITHMS[self.algorithm](lambda: Value(b, *self.weights(half)), g, m, v, s)
        self.sizes: list[Any] = []
        states = [self.stored(index, half, x.llvm) for index, x in enumerate(new) if x is not None]
        return weights, states, self.sizes

    def finish(self, half: int, begun: Sequence[tuple[Any, list[Any], list[Any]]]) -> None:
        """Write 32 elements, and then the others."""
        b, e = self.b, self.e
        weights, states, sizes = begun[half]
        new = weights().llvm
        high = self.packed(new, 1)
        largest = b.and_(high, e.constant(WORDS, 0x7FFF))
        for words in sizes:
            largest = e.call("umax", largest, words)
        large = b.icmp_unsigned(">=", largest, e.constant(WORDS, TOO_LARGE))
        with b.if_then(b.not_(self.any_of(large)), likely=True):
            if self.kept == L.BF16_EXACT:
                low = self.packed(new, 0)
                e.store(low, self.lacking, 64 * half)
                high = b.sub(high, b.ashr(low, e.constant(WORDS, 15)))
            else:
                high = self.rounded(half, new)
            e.store(high, self.weight, 64 * half)
            for address, x in zip(self.moments, states):
                e.store(x, address, (32 if self.coded else 64) * half)
            b.store(I64(32 * half + 32), self.done)
            if not half:
                self.finish(1, begun)

    def any_of(self, flags: Any) -> Any:
        """Whether one of a vector of flags is set."""
        word = self.b.bitcast(flags, ir.IntType(flags.type.count))
        return self.b.icmp_unsigned("!=", word, word.type(0))


@cache
def panel(algorithm: int, weight: int, grad: int, state: int) -> Callable[..., int]:
    """Update 64 elements, by the addresses of their five streams, scalars, exponents, random word and key.

    Returns how many were done: up to 32 with a result that is not finite, of which none was written.
    """
    kind = algorithm, weight, grad, state

    @intrinsic
    def go(typingctx, w, x, g, m, v, s, exponents, word, key):
        def codegen(context, builder, signature, args):
            return Panel(builder, kind, args).emit()

        return types.int64(w, x, g, m, v, s, exponents, word, key), codegen

    return go
