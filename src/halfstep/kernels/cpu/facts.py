# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
"""Reads where many tensors lie and what they are in one call, finds their gradients and counts their changes.

All arguments are numbers, since each array would take 0.2 us a call: `asked` is the address of torch's
functions (`torch_functions.table`), a list of tensors the address of the addresses of their C++ tensors.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from halfstep.kernels.cpu import torch_functions as F
from halfstep.kernels.cpu.bits import compiled, peek_f32, poke_f32, prefetch

WORD = ir.IntType(64)
HEAD = 4  # words of a tensor before its sizes and strides: address, rank, dtype and layout, device
SCRATCH = 6  # words that `look` writes: address, sizes, strides, rank, dtype and layout, device


def _caller(kind: Any, arity: int, result: Any) -> Any:
    """Compile a call of the C function at an address with `arity` words."""

    def codegen(context, builder, signature, args):
        function = ir.FunctionType(kind, [WORD] * arity).as_pointer()
        value = builder.call(builder.inttoptr(args[0], function), args[1:])
        if isinstance(kind, ir.VoidType):
            return context.get_dummy_value()
        return builder.zext(value, WORD) if kind.width < 32 else value

    return result(*[types.int64] * (arity + 1)), codegen


def _entry(signature: str, name: str, function: Any) -> Any:
    """Compile what is called with numbers of its types alone, without Numba's look at what is given.

    That look takes half of the call, 2 us where it was long ago.
    """
    made = compiled(signature, name, nogil=False)(function)
    return made.overloads[made.signatures[0]].entry_point


@intrinsic
def ask(typingctx, function, tensor, target):
    """Call `int function(Tensor *, void *)`: what is asked is written at `target`; 0 where all went well."""
    return _caller(ir.IntType(32), 2, types.int32)


@intrinsic
def number(typingctx, function, tensor):
    """Call `int64_t function(const Tensor *)`."""
    return _caller(WORD, 1, types.int64)


@intrinsic
def truth(typingctx, function, tensor):
    """Call `bool function(const Tensor *)`."""
    return _caller(ir.IntType(8), 1, types.int64)


@intrinsic
def tell(typingctx, function, tensor):
    """Call `void function(const Tensor *)`."""
    return _caller(ir.VoidType(), 1, types.void)


@intrinsic
def set_on(typingctx, function, descriptor, owner, value):
    """Call `int function(PyObject *, PyObject *, PyObject *)`; where it raises, Python does on return."""
    return _caller(ir.IntType(32), 3, types.int32)


@intrinsic
def word(typingctx, address, i):
    """The i-th 64-bit word at an address."""

    def codegen(context, builder, signature, args):
        at = builder.gep(builder.inttoptr(args[0], WORD.as_pointer()), [args[1]], inbounds=True)
        return builder.load(at)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def set_word(typingctx, address, i, value):
    """Write the i-th 64-bit word at an address."""

    def codegen(context, builder, signature, args):
        at = builder.gep(builder.inttoptr(args[0], WORD.as_pointer()), [args[1]], inbounds=True)
        builder.store(args[2], at)

    return types.void(types.int64, types.int64, types.int64), codegen


AHEAD = 8  # tensors: some 0.2 us, as long as memory takes
LINES = 3  # of a C++ tensor


@compiled("void(int64)", "prefetch_tensor", nogil=False)
def prefetch_tensor(tensor):
    """Ask for the memory of a C++ tensor."""
    for line in range(LINES):
        prefetch(tensor + 64 * line)


@compiled("void(int64,int64,int64)", "prefetch_ahead", nogil=False)
def prefetch_ahead(tensors, i, count):
    """Ask for what a pass over `count` tensors that is at the i-th will look at soon."""
    if i + 2 * AHEAD < count:
        prefetch(word(tensors, i + 2 * AHEAD))
    if i + AHEAD < count:
        prefetch_tensor(word(word(tensors, i + AHEAD), 0))


@compiled("boolean(int64,int64,int64)", "look_at_tensor", nogil=False)
def look(asked, tensor, scratch):
    """Write the facts of one tensor; false where it has no address or strides, or turns the sign of one."""
    set_word(scratch, 4, 0)
    set_word(scratch, 5, 0)
    if ask(word(asked, F.LAYOUT), tensor, scratch + 36) != 0 or word(scratch, 4) != 0:
        return False
    bad = ask(word(asked, F.ADDRESS), tensor, scratch)
    bad |= ask(word(asked, F.SIZES), tensor, scratch + 8)
    bad |= ask(word(asked, F.STRIDES), tensor, scratch + 16)
    bad |= ask(word(asked, F.DIM), tensor, scratch + 24)
    bad |= ask(word(asked, F.DTYPE), tensor, scratch + 32)
    bad |= ask(word(asked, F.DEVICE), tensor, scratch + 40)
    bad |= ask(word(asked, F.INDEX), tensor, scratch + 44)
    return bad == 0 and truth(word(asked, F.NEGATIVE), tensor) == 0


@cache
def reader() -> Any:
    """Write the facts of `count` tensors, HEAD + 2 * rank words each; the words written, or -1."""

    def read(asked, count, tensors, scratch, facts):
        k = 0
        for i in range(count):
            if not look(asked, word(tensors, i), scratch):
                return -1
            set_word(facts, k, word(scratch, 0))
            for place in range(1, HEAD):
                set_word(facts, k + place, word(scratch, place + 2))
            k += HEAD
            for d in range(word(scratch, 3)):
                set_word(facts, k, word(word(scratch, 1), d))
                set_word(facts, k + 1, word(word(scratch, 2), d))
                k += 2
        return k

    return _entry(f"int64({','.join(['int64'] * 5)})", "read_facts", read)


@cache
def comparer() -> Any:
    """Whether tensors have the facts that `reader` wrote.

    Where `addresses` is not 0 they may lie elsewhere, and it is noted there where.
    """

    def same(asked, count, tensors, scratch, facts, addresses):
        k = 0
        for i in range(count):
            prefetch_ahead(tensors, i, count)
            if not look(asked, word(tensors, i), scratch):
                return False
            if addresses != 0:
                set_word(addresses, i, word(scratch, 0))
            elif word(facts, k) != word(scratch, 0):
                return False
            for place in range(1, HEAD):
                if word(facts, k + place) != word(scratch, place + 2):
                    return False
            k += HEAD
            for d in range(word(scratch, 3)):
                if word(facts, k) != word(word(scratch, 1), d):
                    return False
                if word(facts, k + 1) != word(word(scratch, 2), d):
                    return False
                k += 2
        return True

    return _entry(f"boolean({','.join(['int64'] * 6)})", "same_facts", same)


@cache
def gradients() -> Any:
    """Write where the gradients of tensors are; how many have one."""

    def find(asked, count, tensors, found):
        there = 0
        for i in range(count):
            gradient = number(word(asked, F.GRAD), word(word(tensors, i), 0))
            set_word(found, i, gradient)
            there += 1 if word(gradient, 0) != word(asked, F.NOTHING) else 0
        return there

    return _entry(f"int64({','.join(['int64'] * 4)})", "find_gradients", find)


SPEC_OF, LOCAL_OF, KIND_OF, INSIDE, SHARD, PLAIN, WRAP, DROP, SET, GRAD, NONE = range(11)
"""The words of `layout`: at which byte an object holds its spec, its local tensor, its type, its C++ tensor;
the types of DTensors and of tensors; torch's function that finds an object, Python's that lets it go and
that sets a descriptor; the descriptor of gradients and None."""


@cache
def holders() -> Any:
    """Whether all objects hold at one place what they held; all are objects' addresses."""

    def hold(place, count, objects, held):
        kept = True
        for i in range(count):
            kept &= word(word(objects, i) + place, 0) == word(held, i)
        return kept

    return _entry("boolean(int64,int64,int64,int64)", "all_hold", hold)


OWNER, OWNER_TENSOR, PLACE, TENSOR, OBJECT, LOCAL, LOCAL_TENSOR, ROW = range(8)
"""The words of a row, what the gradient of a DTensor is made of: the object and the C++ tensor of its owner,
where that holds it, its own C++ tensor and object, its local tensor's object and C++ tensor; their number."""


@compiled("boolean(int64,int64,int64,int64,int64,int64)", "find_gradient_objects", nogil=False)
def find_objects(asked, layout, count, tensors, specs, rows):
    """Note the objects of the gradients of tensors, 0 for one that is no DTensor; false where one is none.

    A look at one waits for memory that the last look named: in passes, the waits of many overlap.
    """
    for i in range(count):
        row, owner = rows + 8 * ROW * i, word(tensors, i)
        tensor = word(owner + word(layout, INSIDE), 0)
        place = number(word(asked, F.GRAD), tensor)
        gradient = word(place, 0)
        if gradient == word(asked, F.NOTHING):
            return False
        prefetch_tensor(gradient)
        set_word(row, OWNER, owner)
        set_word(row, OWNER_TENSOR, tensor)
        set_word(row, PLACE, place)
        set_word(row, TENSOR, gradient)
    for i in range(count):
        row, shard = rows + 8 * ROW * i, 0
        if word(specs, 2 * i) != 0:
            shard = number(word(layout, WRAP), word(row, PLACE))
            if shard != 0:  # the gradient keeps its object, which keeps the local tensor
                tell(word(layout, DROP), shard)
        set_word(row, OBJECT, shard)
    return True


@compiled("boolean(int64,int64,int64,int64)", "find_local_objects", nogil=False)
def find_locals(layout, count, specs, rows):
    """Note the local tensors of gradients that are DTensors; false where one has not the spec that it had."""
    for i in range(count):
        row, local = rows + 8 * ROW * i, 0
        if word(specs, 2 * i) != 0:
            shard = word(row, OBJECT)
            if shard == 0 or word(shard + word(layout, KIND_OF), 0) != word(layout, SHARD):
                return False
            local = word(shard + word(layout, LOCAL_OF), 0)
            if local == 0 or word(shard + word(layout, SPEC_OF), 0) != word(specs, 2 * i + 1):
                return False
            prefetch(local)
        set_word(row, LOCAL, local)
    return True


@cache
def shard_gradients() -> Any:
    """Write where the local tensors of the gradients of tensors are; true where all have the given specs.

    `specs`: of each tensor and of its gradient; 0 of one that is no DTensor, whose own gradient is meant.
    """

    def find(asked, layout, count, tensors, specs, found, rows):
        if not find_objects(asked, layout, count, tensors, specs, rows):
            return False
        if not find_locals(layout, count, specs, rows):
            return False
        for i in range(count):
            row, own = rows + 8 * ROW * i, word(specs, 2 * i)
            place = word(row, PLACE)
            if own != 0:
                local = word(row, LOCAL)
                if word(local + word(layout, KIND_OF), 0) != word(layout, PLAIN):
                    return False
                if word(word(row, OWNER) + word(layout, SPEC_OF), 0) != own:
                    return False
                place = local + word(layout, INSIDE)
            prefetch_tensor(word(place, 0))
            set_word(found, i, place)
            set_word(row, LOCAL_TENSOR, word(place, 0))
        return True

    return _entry(f"boolean({','.join(['int64'] * 7)})", "find_shard_gradients", find)


@compiled("void(int64)", "prefetch_row", nogil=False)
def prefetch_row(row):
    """Ask for the memory that dropping a gradient touches; nothing is read, for it may be gone by now."""
    prefetch(word(row, OWNER))
    prefetch(word(row, PLACE))
    for place in (OWNER_TENSOR, TENSOR, LOCAL_TENSOR):
        prefetch_tensor(word(row, place))
    for place in (OBJECT, LOCAL):
        prefetch(word(row, place) - 32)  # what Python's collector keeps lies before an object
        prefetch(word(row, place) + 32)


@cache
def dropper() -> Any:
    """Drop the gradients of tensors: two objects of each that nothing touched for long."""

    def drop(layout, count, tensors, rows):
        for i in range(min(AHEAD, count)):
            prefetch_row(rows + 8 * ROW * i)
        for i in range(count):
            if i + AHEAD < count:
                prefetch_row(rows + 8 * ROW * (i + AHEAD))
            set_on(word(layout, SET), word(layout, GRAD), word(tensors, i), word(layout, NONE))

    return _entry("void(int64,int64,int64,int64)", "drop_gradients", drop)


@cache
def versions() -> Any:
    """The sum of the versions of tensors, or -1 where one is an inference tensor, which has none."""

    def add(asked, count, tensors):
        total = 0
        for i in range(count):
            prefetch_ahead(tensors, i, count)
            if truth(word(asked, F.INFERENCE), word(tensors, i)) != 0:
                return -1
            total += number(word(asked, F.VERSION), word(tensors, i))
        return total

    return _entry("int64(int64,int64,int64)", "add_versions", add)


@cache
def bumper() -> Any:
    """Raise the version of every tensor that has one by 1."""

    def bump(asked, count, tensors):
        for i in range(count):
            prefetch_ahead(tensors, i, count)
            if truth(word(asked, F.INFERENCE), word(tensors, i)) == 0:
                tell(word(asked, F.BUMP), word(tensors, i))

    return _entry("void(int64,int64,int64)", "bump_versions", bump)


@cache
def counter() -> Any:
    """Add 1 to the fp32 number at each address and note what it is then; true where all are the same."""

    def count(addresses, steps):
        for i in range(len(addresses)):
            step = peek_f32(addresses[i], 0) + np.float32(1)
            poke_f32(addresses[i], 0, step)
            steps[i] = step
        return bool((steps == steps[0]).all())

    return compiled("boolean(int64[::1],float64[::1])", "count_steps")(count)
