"""The machine under a GPU test: CUDA, or the false CUDA device (tests/falsecuda), which is CUDA to torch.

Where neither is there, the kernels' tests run on a CPU in Triton's interpreter, the others are skipped.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from halfstep.kernels.codes import BLOCK, STATE_8BIT
from halfstep.kernels.cuda import launch as cuda
from tests import falsecuda

NO_LAUNCH = ("_record_function_enter_new", "_record_function_exit")  # ops of the profiler
Work = Callable[[], object]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = (0, 1, (1, 7), (1, 511), (1, 1024), (3, 513), (70, 16), 1026)


class Cuda:
    """The GPU itself."""

    group, compiler = "nccl", "inductor"
    steps = 200
    lacks: frozenset[str] = frozenset()  # ops that it cannot run
    sizes: tuple[Any, ...] = (*SIZES, (5, 205), (40, 1000), (3, 768), (1, 100_003))

    @property
    def huge(self) -> int:
        """Elements of a tensor that int32 cannot count; SGD needs four bytes for each."""
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        return 2**31 + 5000 if total > 20e9 else pytest.skip("needs 20 GB of GPU memory")

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Waiting for the device is an error inside."""
        torch.cuda.synchronize()
        try:
            self._debug("error")
            yield
        finally:
            self._debug("default")

    def _debug(self, mode: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
            torch.cuda.set_sync_debug_mode(mode)

    def launches(self, work: Work) -> list[str]:
        """Kernels, copies and fills that `work` puts on the device."""
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
            ) as profile:
                work()
                torch.cuda.synchronize()
            events = profile.events()
        return [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]

    def capture(self, work: Work) -> Work:
        """`work` in a CUDA graph, not run yet: what replays it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Work inside goes to a stream of its own, after what is under way and before what follows."""
        side, now = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(now)
        with torch.cuda.stream(side):
            yield
        now.wait_stream(side)


class FalseCuda(Cuda):
    """The false CUDA device: a GPU in all but graphs and time, slow as an interpreter."""

    group, compiler = "nccl", "aot_eager"
    steps = 5
    sizes: tuple[Any, ...] = SIZES
    huge = 2**16 + 5000  # type: ignore[assignment]
    lacks = frozenset({"gru", "gru_cell", "lstm", "lstm_cell"})

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        demand_alignment(monkeypatch, [])

    def launches(self, work: Work) -> list[str]:
        with falsecuda.recorded_ops() as ops:
            work()
        return [name for name in ops.names if name not in NO_LAUNCH]

    def capture(self, work: Work) -> Work:
        """What runs `work` at once, torch saying that it captures: there are no graphs."""

        def replay() -> None:
            with falsecuda.capturing():
                work()

        return replay


class Mapped:
    """A CPU in place of the GPU, for the kernels under a torch for which there is no false CUDA device."""

    sizes: tuple[Any, ...] = SIZES

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._launched: list[str] = []
        demand_alignment(monkeypatch, self._launched)

    def no_waiting(self) -> AbstractContextManager[Any]:
        return DeviceOps(reads=False)

    def launches(self, work: Work) -> list[str]:
        self._launched.clear()
        with DeviceOps() as ops:
            work()
        return self._launched + ops.names


Machine = Cuda | Mapped


def demand_alignment(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    """Refuse wide loads at addresses that are not aligned, as a GPU does; note what is launched."""
    launch = cuda.launch

    def aligned(kernel: Any, device: torch.device, programs: int, *args: Any, **constants: Any) -> None:
        name = kernel.fn.__name__
        launched.append(name)
        with _disable_current_modes(), unwatched():
            for address in wide_loads(name, args, constants):
                assert address % 16 == 0, f"misaligned address in {name}"
        with _disable_current_modes():
            launch(kernel, device, programs, *args, **constants)

    monkeypatch.setattr(cuda, "launch", aligned)


def unwatched() -> AbstractContextManager[Any]:
    """Reading inside is the test's, not the program's."""
    return falsecuda.uncounted() if falsecuda.installed() else nullcontext()


def wide_loads(kernel: str, args: tuple[Any, ...], constants: dict[str, Any]) -> Iterator[int]:
    """What a launch takes for multiples of 16: addresses of gradients, weights, masters and states, and where
    blocks of 8-bit states begin, with their sizes.
    """
    if kernel == "measure" and constants["ALIGNED"]:
        grads, items = args[:2]
        yield from grads[items.view(-1, 4)[:, 0]].tolist()
    if kernel != "update":
        return
    table, grads, items = args[:3]
    used = items.view(-1, 3)[:, 0]
    if constants["GRAD_ALIGNED"]:
        yield from grads[used].tolist()
    if constants["ALIGNED"]:
        yield from table.view(-1, 9)[used, :4].flatten().tolist()
    if constants["STATE"] == STATE_8BIT and (constants["ALIGNED"] or constants["GRAD_ALIGNED"]):
        for p, start, end in items.view(-1, 3).tolist():
            width = int(table.view(-1, 9)[p, 8])
            for block in range(start, end):
                row, column = divmod(block * BLOCK, -(-width // BLOCK) * BLOCK)
                yield from (row * width + column, min(BLOCK, width - column))


class DeviceOps(TorchDispatchMode):
    """Ops by name, views, allocations and numbers left out; without `reads`, reading a tensor raises."""

    def __init__(self, reads: bool = True) -> None:
        super().__init__()
        self.names: list[str] = []
        self._reads = reads

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.__name__.split(".")[0]
        assert self._reads or name not in ("_local_scalar_dense", "equal", "nonzero"), "read on the host"
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
        if not view and not name.startswith("empty") and name != "lift_fresh":
            self.names.append(name)
        return op(*args, **(kwargs or {}))
