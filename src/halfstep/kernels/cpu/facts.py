# Numba infers types: parameters have none, and its intrinsics are called without their first argument.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportCallIssue=false
"""Reads address, device, dtype, sizes and strides of many tensors in one call: 65 ns each, a third of Python.

The C function that says them is the one every DLPack consumer uses (DLPack 1.3, `DLPackExchangeAPI`,
dltensor_from_py_object_no_sync); it takes borrowed Python objects, so the interpreter lock stays held.
"""

import ctypes
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from halfstep.kernels.cpu.bits import compiled, peek_f32, poke_f32

WORD = ir.IntType(64)
AT = 5  # place of dltensor_from_py_object_no_sync among the words of DLPackExchangeAPI
HEAD = 4  # words of a tensor before its sizes and strides: address, device, dtype and rank, byte offset


class Functions(NamedTuple):
    """Addresses of what the kernels call and compare with."""

    ask: int
    forget_error: int
    none: int


@cache
def functions() -> Functions | None:
    """The addresses, or None where torch does not offer the exchange."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    at = get(capsule, b"dlpack_exchange_api")
    if ctypes.cast(at, ctypes.POINTER(ctypes.c_uint32))[0] != 1:  # the major version
        return None
    ask = ctypes.cast(at, ctypes.POINTER(ctypes.c_void_p))[AT]
    clear = ctypes.cast(ctypes.pythonapi.PyErr_Clear, ctypes.c_void_p).value
    return Functions(ask, clear, id(None)) if ask and clear else None


@intrinsic
def ask_for(typingctx, function, thing, target):
    """Call `int function(PyObject *, DLTensor *)`; 0 where the object is a tensor that has an address."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(32), [WORD, WORD]).as_pointer()
        return builder.call(builder.inttoptr(args[0], kind), args[1:])

    return types.int32(types.int64, types.int64, types.int64), codegen


@intrinsic
def forget_error(typingctx, function):
    """Call `void function(void)`."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), []).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


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


@cache
def reader() -> Any:
    """Write the facts of `count` objects, HEAD + 2 * rank words each; the words written, or -1.

    All arguments are numbers: the functions, the count, and addresses of a DLTensor, of the facts, of the
    tensors' addresses (the comparer's) and of the objects.
    """

    def read(ask, clear, none, count, scratch, facts, addresses, objects):
        k = 0
        for i in range(count):
            thing = word(objects, i)
            if thing == none:
                return -1
            if ask_for(ask, thing, scratch) != 0:
                forget_error(clear)
                return -1
            set_word(facts, k, word(scratch, 0))
            set_word(facts, k + 1, word(scratch, 1))
            set_word(facts, k + 2, word(scratch, 2))
            set_word(facts, k + 3, word(scratch, 5))
            sizes, strides = word(scratch, 3), word(scratch, 4)
            k += HEAD
            for d in range(word(scratch, 2) & 0xFFFFFFFF):
                set_word(facts, k, word(sizes, d))
                set_word(facts, k + 1, word(strides, d))
                k += 2
        return k

    return compiled(f"int64({','.join(['int64'] * 8)})", "read_facts", nogil=False)(read)


@cache
def comparer() -> Any:
    """Whether objects have the facts that `reader` wrote; with `moves` addresses may differ and are noted."""

    def same(ask, clear, none, count, scratch, facts, addresses, objects, moves):
        k = 0
        for i in range(count):
            thing = word(objects, i)
            if thing == none:
                return False
            if ask_for(ask, thing, scratch) != 0:
                forget_error(clear)
                return False
            if word(facts, k + 1) != word(scratch, 1) or word(facts, k + 2) != word(scratch, 2):
                return False
            if word(facts, k + 3) != word(scratch, 5):
                return False
            if moves:
                set_word(addresses, i, word(scratch, 0))
            elif word(facts, k) != word(scratch, 0):
                return False
            sizes, strides = word(scratch, 3), word(scratch, 4)
            k += HEAD
            for d in range(word(scratch, 2) & 0xFFFFFFFF):
                if word(facts, k) != word(sizes, d) or word(facts, k + 1) != word(strides, d):
                    return False
                k += 2
        return True

    return compiled(f"boolean({','.join(['int64'] * 8)},boolean)", "same_facts", nogil=False)(same)


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
