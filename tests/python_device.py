"""A PrivateUse1 device written in Python: its memory is the host's, its kernels are the CPU's.

Importing this module makes the device `pydev` appear, as a vendor's plugin does, and registers it with
halfstep. Tensors have real storage: a DLPack capsule of a CPU tensor is relabelled with the device's number,
so views, `.data` and saved tensors share memory as on any device. A process has one such device: tests run
it in processes of their own.
"""

import ctypes

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import halfstep as hs

NAME = "pydev"
_CPU, _EXTENSION = 1, 12  # DLDeviceType kDLCPU and kDLExtDev
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _relabel(t: torch.Tensor, device_type: int) -> torch.Tensor:
    """A tensor over the same memory that belongs to the other device."""
    capsule = torch.utils.dlpack.to_dlpack(t.detach() if t.requires_grad else t)
    # DLManagedTensor begins with the data pointer; the device type follows it.
    where = _capsule_pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    ctypes.c_int32.from_address(where).value = device_type
    return torch._C._from_dlpack(capsule)


def to_host(t: torch.Tensor) -> torch.Tensor:
    return _relabel(t, _CPU)


def to_device(t: torch.Tensor) -> torch.Tensor:
    return _relabel(t, _EXTENSION)


def _is_here(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == NAME


def _outputs(op) -> set[str]:
    """Names of the `out=` arguments of an overload."""
    return {a.name for a in op._schema.arguments if a.kwarg_only and a.alias_info and a.alias_info.is_write}


def _as_tensors(op, args: tuple) -> tuple:
    """Numbers that stand for tensors: torch hands wrapped scalars to Python as plain numbers."""
    wanted = [str(argument.type) == "Tensor" for argument in op._schema.arguments]
    return tuple(
        torch.tensor(a) if tensor and isinstance(a, int | float) else a for a, tensor in zip(args, wanted)
    )


def honest(op, args, kwargs):
    """Run an op as the host runs it."""
    return op(*args, **kwargs)


SIN = honest
"""How kernels run: a test may put a chip that breaks a rule in its place."""


def on_host(op, *args, **kwargs):
    """Run any op on the host memory of its arguments; what it changed in place is given back itself."""
    origin: dict[int, torch.Tensor] = {}

    def down(x: object) -> object:
        if _is_here(x):
            host = to_host(x)
            origin[id(host)] = x
            return host
        return torch.device("cpu") if isinstance(x, torch.device) else x

    def up(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        return origin[id(x)] if id(x) in origin else to_device(x)

    args, outs = _as_tensors(op, args), _outputs(op) & kwargs.keys()
    host_args, host_kwargs = pytree.tree_map(down, (args, {k: v for k, v in kwargs.items() if k not in outs}))
    for name in outs:
        host_kwargs[name] = torch.empty(0, dtype=kwargs[name].dtype)
        origin[id(host_kwargs[name])] = kwargs[name]
    with torch._C._AutoDispatchBelowAutograd(), torch.autocast("cpu", enabled=False):
        result = SIN(op, host_args, host_kwargs)
    for name in outs:
        _hand_over(kwargs[name], host_kwargs[name])
    return result if result is None else pytree.tree_map(up, result)


def _hand_over(out: torch.Tensor, host: torch.Tensor) -> None:
    """Give an output what was computed on the host; one of another size gets the new memory."""
    if out.shape == host.shape:
        to_host(out).copy_(host)
    else:
        out.data = to_device(host)


def _resize(t, size, *, memory_format=None):
    larger = to_host(t).clone().resize_(size)
    t.data = to_device(larger)
    return t


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return to_device(torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype()))


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    kind = torch.contiguous_format if memory_format is None else memory_format
    return to_device(torch.empty(size, dtype=dtype or torch.get_default_dtype(), memory_format=kind))


def _copy_from(source, target, non_blocking=False):
    if not _is_here(target):
        host_reads.append("copy")
    elif not _is_here(source) and not non_blocking:
        host_uploads.append("copy")
    there = to_host(target) if _is_here(target) else target
    SIN(torch.ops.aten.copy_.default, (there, to_host(source) if _is_here(source) else source), {})
    return target


def _item(t):
    host_reads.append("item")
    return to_host(t).item()


def _through_cpu_kernel(op):
    """A kernel that looks at shapes and storages and never at the data works for tensors of any device."""
    kernel = torch.library.get_kernel(op, "CPU")

    def run(keyset, *args, **kwargs):
        return kernel.call_boxed(keyset, *args, **kwargs)

    return run


# Ops whose kernel torch builds from other ops unless the device brings one; ours brings the CPU's.
_OWN_KERNELS = ("native_layer_norm", "native_group_norm")
_LIBRARY = torch.library.Library("aten", "IMPL")
_FALLBACK = torch.library.Library("_", "IMPL")


def _convolution(*args):
    return on_host(torch.ops.aten.convolution.default, *args)


def _convolution_backward(grad, x, weight, stride, padding, dilation, transposed, out_padding, groups, mask):
    bias = [weight.shape[1] * groups if transposed else weight.shape[0]] if mask[2] else None
    geometry = (stride, padding, dilation, transposed, out_padding, groups, mask)
    return on_host(torch.ops.aten.convolution_backward.default, grad, x, weight, bias, *geometry)


def _lstm_cell(from_input, from_hidden, cell, input_bias=None, hidden_bias=None):
    """New hidden state, new cell state, and the activated gates for backward."""
    gates = from_input + from_hidden
    for bias in (input_bias, hidden_bias):
        gates = gates if bias is None else gates + bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new_cell = f * cell + i * g
    return o * new_cell.tanh(), new_cell, torch.cat((i, f, g, o), 1)


def _lstm_cell_backward(grad_hidden, grad_cell, cell, new_cell, gates, has_bias):
    i, f, g, o = gates.chunk(4, 1)
    squashed = new_cell.tanh()
    grad_hidden = torch.zeros_like(squashed) if grad_hidden is None else grad_hidden
    total = grad_hidden * o * (1 - squashed * squashed)
    total = total if grad_cell is None else total + grad_cell
    grad_gates = torch.cat(
        (
            total * g * i * (1 - i),
            total * cell * f * (1 - f),
            total * i * (1 - g * g),
            grad_hidden * squashed * o * (1 - o),
        ),
        1,
    )
    return grad_gates, total * f, grad_gates.sum(0) if has_bias else None


def check_and_unscale(grads, found_inf, inv_scale):
    """The vendor's finite-check-and-unscale, as `register(finite_check=...)` takes it."""
    for grad in grads:
        host = to_host(grad)
        if not bool(host.isfinite().all()):
            found_inf.fill_(1.0)
        host.copy_((host.float() * to_host(inv_scale)).to(host.dtype))
    calls.append("finite_check")


def update_scale(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval):
    """The vendor's scale update, as `register(update_scale=...)` takes it."""
    calls.append("update_scale")
    if to_host(found_inf) != 0:
        scale.mul_(backoff_factor)
        growth_tracker.zero_()
        return
    growth_tracker.add_(1)
    if to_host(growth_tracker) == growth_interval:
        scale.mul_(growth_factor)
        growth_tracker.zero_()


calls: list[str] = []  # which of the vendor's kernels for the scaler ran
host_reads: list[str] = []  # values that the host waited for
host_uploads: list[str] = []  # values of the host that it waited to hand over
product_error = 0.0


def _mm(a, b):
    return on_host(torch.ops.aten.mm.default, a, b) * (1 + product_error)


def _addmm(bias, a, b, *, beta=1, alpha=1):
    return _mm(a, b) * alpha + bias * beta


def _install_kernels() -> None:
    key = "PrivateUse1"
    _FALLBACK.fallback(on_host, key)
    _LIBRARY.impl("empty_strided", _empty_strided, key)
    _LIBRARY.impl("empty.memory_format", _empty, key)
    _LIBRARY.impl("resize_", _resize, key)
    _LIBRARY.impl("_copy_from", _copy_from, key)
    _LIBRARY.impl("_local_scalar_dense", _item, key)
    _LIBRARY.impl("convolution_overrideable", _convolution, key)
    _LIBRARY.impl("convolution_backward_overrideable", _convolution_backward, key)
    aten = torch.ops.aten
    views = (
        aten.as_strided,
        aten.view,
        aten._reshape_alias,
        aten.unfold,
        aten.view_as_real,
        aten.view_as_complex,
    )
    storages = (aten.set_.source_Storage, aten.set_.source_Storage_storage_offset, aten.set_.source_Tensor)
    for op in (*(view.default for view in views), *storages):
        _LIBRARY.impl(op, _through_cpu_kernel(op), key, with_keyset=True)
    _LIBRARY.impl("_thnn_fused_lstm_cell", _lstm_cell, key)
    _LIBRARY.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward, key)
    _LIBRARY.impl("mm", _mm, key)
    _LIBRARY.impl("addmm", _addmm, key)
    for name in _OWN_KERNELS:
        op = getattr(torch.ops.aten, name).default
        _LIBRARY.impl(op, lambda *a, _op=op, **k: on_host(_op, *a, **k), key)


class HostCollective(dist.ProcessGroup):
    """The device's collective: gloo on the host memory that its tensors are made of."""

    def __init__(self, store, rank: int, size: int, timeout) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return f"{NAME}ccl"

    def _run(self, what: str, *args):
        return getattr(self._gloo, what)(*pytree.tree_map(lambda x: to_host(x) if _is_here(x) else x, args))

    def allreduce(self, *args):
        return self._run("allreduce", *args)

    def broadcast(self, *args):
        return self._run("broadcast", *args)

    def allgather(self, *args):
        return self._run("allgather", *args)

    def barrier(self, *args):
        return self._run("barrier", *args)


def register() -> None:
    """Tell halfstep what the device can do and which kernels it brings."""
    hs.devices.register(
        NAME,
        dtypes=("bf16", "fp16"),
        finite_check=check_and_unscale,
        update_scale=update_scale,
        collective=HostCollective,
    )


_clone_storage = torch.UntypedStorage.clone


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Storages are cloned by torch through the device's allocator, which Python cannot bring."""
    if storage.device.type != NAME:
        return _clone_storage(storage)
    over = torch.empty(0, dtype=torch.uint8, device=NAME).set_(storage)
    return to_device(to_host(over).clone()).untyped_storage()


torch.UntypedStorage.clone = _clone
_setup_privateuseone_for_python_backend(NAME)
_install_kernels()
register()
