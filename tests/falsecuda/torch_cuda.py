"""What a CUDA build of torch has in `torch._C` and a CPU build lacks, so that `torch.cuda` runs as it is."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import _C

from tests.falsecuda import control

TOTAL_MEMORY = 80 << 30


@dataclass(frozen=True)
class DeviceProperties:
    """An H100 in name and numbers."""

    name: str = "False CUDA device"
    major: int = 9
    minor: int = 0
    total_memory: int = TOTAL_MEMORY
    multi_processor_count: int = 132
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    L2_cache_size: int = 50 << 20
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""
    uuid: str = "00000000-0000-0000-0000-000000000000"
    pci_bus_id: int = 0


class Stream(_C.Stream):
    """`torch._C._CudaStreamBase`: a name; all streams are one queue."""

    def __new__(cls, priority: int = 0, stream_ptr: int | None = None, **given: Any) -> Any:
        if stream_ptr is not None:
            given = {"stream_id": stream_ptr >> 8, "device_index": 0, "device_type": 1}
        if given:
            return super().__new__(cls, **given)
        return super().__new__(cls, device="cuda", priority=priority)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id << 8

    @property
    def priority(self) -> int:
        return 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1


class Event(_C.Event):
    """`torch._C._CudaEventBase`."""

    def __new__(cls, enable_timing: bool, blocking: bool, interprocess: bool, external: bool = False) -> Any:
        assert not interprocess, "the false CUDA device has no events between processes"
        return super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)

    @property
    def cuda_event(self) -> int:
        return self.event_id


class Graph:
    """`torch._C._CUDAGraph`, which the device has not."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the false CUDA device has no CUDA graphs")


def _device_of(index: int = 0) -> int:
    if index not in (-1, 0):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return 0


def _stream_data(id: int) -> tuple[int, int, int]:
    return id, 0, 1  # torch counts CUDA as device type 1


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    control.library().falsecuda_stream(stream_id)


def _set_sync_debug_mode(mode: int) -> None:
    warnings.warn(
        "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing "
        "operations",
        stacklevel=3,
    )
    _debug_mode[0] = mode
    control.library().falsecuda_debug_mode(mode)


_debug_mode = [0]


def _statistics(rows: dict[str, control.Memory]) -> dict[str, Any]:
    return {
        name: {pool: row._asdict() for pool in ("all", "small_pool", "large_pool")}
        for name, row in rows.items()
    }


def _memory_stats(device: int) -> dict[str, Any]:
    size, count = control.memory()
    none = control.Memory(0, 0, 0, 0)
    rows = {
        **dict.fromkeys(("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"), size),
        **dict.fromkeys(("allocation", "segment", "active"), count),
        **dict.fromkeys(("inactive_split", "inactive_split_bytes"), none),
    }
    oversize = dict.fromkeys(("oversize_allocations", "oversize_segments"), none._asdict())
    return {**_statistics(rows), **oversize, "num_alloc_retries": 0, "num_ooms": 0}


def _host_memory_stats() -> dict[str, Any]:
    size, count = control.memory(pinned=True)
    return {
        "allocations": count._asdict(),
        "allocated_bytes": size._asdict(),
        "active_requests": count._asdict(),
        "active_bytes": size._asdict(),
    }


def _reset(pinned: bool, peaks: bool) -> Any:
    return lambda *device: control.library().falsecuda_reset_memory(int(pinned), int(peaks))


def _init() -> None:
    torch.cuda.default_generators = (torch.ops.falsecuda.default_generator(),)  # type: ignore[assignment]
    torch.cuda._get_device_properties = lambda device: DeviceProperties()  # type: ignore[attr-defined]


def _synchronize() -> None:
    torch.accelerator.synchronize()


def _free_and_total() -> tuple[int, int]:
    return TOTAL_MEMORY - control.memory()[0].current, TOTAL_MEMORY


_PRESENT: dict[str, Any] = {
    "_CudaStreamBase": Stream,
    "_CudaEventBase": Event,
    "_CudaDeviceProperties": DeviceProperties,
    "_CUDAGraph": Graph,
    "_graph_pool_handle": lambda: (0, 0),
    "_has_cuda": True,
    "_cuda_CUDAAllocator_AllocatorState": type("AllocatorState", (), {}),
    "_set_cached_tensors_enabled": lambda enabled: None,
    "_cuda_init": _init,
    "_cuda_isInBadFork": lambda: False,
    "_cuda_getDeviceCount": lambda: 1,
    "_cuda_getDevice": lambda: 0,
    "_cuda_setDevice": _device_of,
    "_cuda_exchangeDevice": lambda device: 0,  # functions of their own: Dynamo has a handler for each
    "_cuda_maybeExchangeDevice": lambda device: 0,
    "_cuda_canDeviceAccessPeer": lambda device, peer: False,
    "_cuda_getArchFlags": lambda: "sm_90",
    "_cuda_getCompiledVersion": lambda: 13000,
    "_cuda_isCurrentStreamCapturing": lambda: bool(control.library().falsecuda_is_capturing()),
    "_cuda_getCurrentStream": lambda device: _stream_data(control.library().falsecuda_stream(-1)),
    "_cuda_getDefaultStream": lambda device: _stream_data(0),
    "_cuda_setStream": _set_stream,
    "_cuda_getCurrentRawStream": lambda device: control.library().falsecuda_stream(-1) << 8,
    "_cuda_synchronize": _synchronize,
    "_cuda_set_sync_debug_mode": _set_sync_debug_mode,
    "_cuda_get_sync_debug_mode": lambda: _debug_mode[0],
    "_cuda_sleep": lambda cycles: control.submit("sleep"),
    "_cuda_memoryStats": _memory_stats,
    "_cuda_resetPeakMemoryStats": _reset(pinned=False, peaks=True),
    "_cuda_resetAccumulatedMemoryStats": _reset(pinned=False, peaks=False),
    "_cuda_hostMemoryStats": _host_memory_stats,
    "_cuda_resetPeakHostMemoryStats": _reset(pinned=True, peaks=True),
    "_cuda_resetAccumulatedHostMemoryStats": _reset(pinned=True, peaks=False),
    "_cuda_emptyCache": lambda: None,
    "_cuda_ipc_collect": lambda: None,
    "_cudart": SimpleNamespace(
        cudaMemGetInfo=lambda device: _free_and_total(),
        cudaDeviceSynchronize=lambda: _synchronize() or 0,
        cudaError=SimpleNamespace(success=0),
    ),
}


def provide() -> None:
    """Put what is missing into `torch._C`; called before `torch.cuda` is imported."""
    for name, value in _PRESENT.items():
        setattr(_C, name, value)
    torch.version.cuda = "13.0"


class _TensorType(type):
    """The type of `torch.cuda.FloatTensor`, which is asked whether a tensor is one."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype == cls.dtype


def complete() -> None:
    """Do what must be done once torch is imported."""
    torch.cuda.FloatTensor = _TensorType("FloatTensor", (), {"dtype": torch.float32})  # type: ignore[misc]
    torch.backends.cudnn.is_acceptable = lambda tensor: False  # type: ignore[assignment]
    torch.cuda.nccl.is_available = lambda tensors: True
    torch.cuda.nccl.version = lambda: (2, 27, 0)
    _make_storages()


def _make_storages() -> None:
    """Make storages of CUDA, which a CPU build cannot: for copies of models, torch.save and load, FSDP."""
    real_new, real_resize = torch.UntypedStorage.__new__, torch.UntypedStorage.resize_

    def new(cls: type, *args: Any, device: Any = None, **rest: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return real_new(cls, *args, device=device, **rest)
        values = torch.tensor(args[0] if args and not isinstance(args[0], int) else [], dtype=torch.uint8)
        size = args[0] if args and isinstance(args[0], int) else len(values)
        made = torch.empty(size, dtype=torch.uint8, device="cuda")
        return (made.copy_(values) if len(values) else made).untyped_storage()

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return real_resize(self, size)
        torch.ops.falsecuda.resize_storage(self, size)
        return self

    torch.UntypedStorage.__new__ = new  # type: ignore[assignment]
    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
