"""Addresses of functions of torch's that compiled code calls on tensors, looked up by name.

Most are of torch's stable C interface (`aoti_torch_get_*`, torch/csrc/inductor/aoti_torch/c/shim.h of torch
2.13), the others are what C++ code calls through torch's headers. All take the C++ tensor that a tensor of
Python holds. `optim/tensor_facts.py` tries them out before use.
"""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

_NAMES = (
    "aoti_torch_get_layout",
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_dim",
    "aoti_torch_get_dtype",
    "aoti_torch_get_device_type",
    "aoti_torch_get_device_index",
    "_ZN2at6native6is_negERKNS_6TensorE",  # bool at::native::is_neg(const Tensor &)
    "_ZN2at6native12is_inferenceERKNS_6TensorE",  # bool at::native::is_inference(const Tensor &)
    "_ZNK2at10TensorBase8_versionEv",  # int64_t at::TensorBase::_version() const
    "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",  # void bump_version(const Tensor &)
    "_ZNK3c1010TensorImpl4gradEv",  # const Tensor &c10::TensorImpl::grad() const
)
LAYOUT, ADDRESS, SIZES, STRIDES, DIM, DTYPE, DEVICE, INDEX, NEGATIVE, INFERENCE, VERSION, BUMP, GRAD = range(
    13
)
NOTHING = 13
"""The word after the functions: what the undefined tensor holds, which stands for no gradient."""


@cache
def table() -> Any:
    """The functions' addresses by the numbers above, an int64 array; None where one is not to be found."""
    folder = Path(str(torch.__file__)).parent / "lib"
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    try:
        libraries = [ctypes.CDLL(str(folder / f"{name}{suffix}")) for name in ("libtorch_cpu", "libc10")]
    except OSError:
        return None
    found: list[int] = []
    for name in _NAMES:
        function = next((getattr(one, name) for one in libraries if hasattr(one, name)), None)
        if function is None:
            return None
        found.append(ctypes.cast(function, ctypes.c_void_p).value or 0)
    ask = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(found[GRAD])
    nothing = ask(torch.zeros(1)._cdata)
    return np.array([*found, ctypes.c_int64.from_address(nothing).value if nothing else 0], np.int64)


@cache
def inside() -> int | None:
    """Bytes from the start of a tensor of Python to the C++ one in it; None where it cannot be seen."""
    tensors = [torch.zeros(n) for n in (1, 2, 3)]
    return place_in(tensors, [t._cdata for t in tensors], torch.Tensor.__basicsize__)


def place_in(objects: Sequence[object], words: Sequence[int], size: int) -> int | None:
    """At which byte of its `size` bytes each Python object holds its word; None where at none."""
    for place in range(0, size, 8):
        held = [ctypes.c_int64.from_address(id(one) + place).value for one in objects]
        if held == list(words):
            return place
    return None


_DESCR_SET = 55
"""Py_tp_descr_set of Python's stable interface: `int function(descriptor, owner, value)`."""


@cache
def objects() -> tuple[int, int, int] | None:
    """The functions that make a C++ tensor's Python object (a new reference), drop one and set a gradient."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    try:
        library = ctypes.CDLL(str(Path(str(torch.__file__)).parent / "lib" / f"libtorch_python{suffix}"))
        # PyObject *THPVariable_Wrap(const at::TensorBase &)
        made = library._Z16THPVariable_WrapRKN2at10TensorBaseE
    except (OSError, AttributeError):
        return None
    slot_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_int)(
        ("PyType_GetSlot", ctypes.pythonapi)
    )
    both = (ctypes.cast(one, ctypes.c_void_p).value for one in (made, ctypes.pythonapi.Py_DecRef))
    wrap, drop = (word or 0 for word in both)
    return wrap, drop, slot_of(type(torch.Tensor.grad), _DESCR_SET)
