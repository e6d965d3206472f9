"""The machine under a GPU test: CUDA, or a CPU mapped in its place, with Triton's interpreter for kernels.

The mapped machine is as strict as a GPU where it can be: it refuses wide loads at addresses that are not
aligned, copies reach the host when they are waited for, not before, and reading a tensor raises inside
`no_waiting`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from halfstep.devices.transfer import AsyncCopy
from halfstep.gradients import cuda
from halfstep.kernels.codes import BLOCK, STATE_8BIT
from halfstep.optim import backends
from halfstep.optim import cuda as cuda_graphs
from tests import falsecuda

NO_LAUNCH = ("_record_function_enter_new", "_record_function_exit")  # ops of the profiler
Work = Callable[[], object]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = (0, 1, (1, 7), (1, 511), (1, 1024), (3, 513), (70, 16), 1026)


class Cuda:
    """The GPU itself."""

    group, compiler = "nccl", "inductor"
    steps = 200
    sizes: tuple[Any, ...] = (*SIZES, (5, 205), (40, 1000), (3, 768), (1, 100_003))

    @property
    def huge(self) -> int:
        """Elements of a tensor that int32 cannot count; SGD needs four bytes for each."""
        total = torch.cuda.get_device_properties(DEVICE).total_memory
        return 2**31 + 5000 if total > 20e9 else pytest.skip("needs 20 GB of GPU memory")

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    @contextmanager
    def no_waiting(self, session: bool = False) -> Iterator[None]:
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

    def flag(self, found_inf: Tensor) -> Tensor:
        return found_inf

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
    steps = 8
    sizes: tuple[Any, ...] = SIZES
    huge = 2**16 + 5000  # type: ignore[assignment]

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
    """A CPU in place of the GPU."""

    group, compiler = "gloo", "aot_eager"
    steps = 8
    sizes: tuple[Any, ...] = SIZES
    huge = 2**16 + 5000

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._launched: list[str] = []
        self._monkeypatch = monkeypatch
        self._real = cuda.launch
        monkeypatch.setattr(cuda, "launch", self._launch)
        monkeypatch.setattr(backends, "send_to_host", late_copy)

    def _launch(self, kernel: Any, device: torch.device, programs: int, *args: Any, **constants: Any) -> None:
        name = kernel.fn.__name__
        self._launched.append(name)
        with _disable_current_modes():
            for address in wide_loads(name, args, constants):
                assert address % 16 == 0, f"misaligned address in {name}"
            self._real(kernel, device, programs, *args, **constants)

    def synchronize(self) -> None: ...

    def no_waiting(self, session: bool = False) -> AbstractContextManager[Any]:
        """Sessions may read on a CPU; the tests of law 10 have a device of their own for them."""
        return nullcontext() if session else DeviceOps(reads=False)

    def flag(self, found_inf: Tensor) -> Tensor:
        """A skip that a step may read, as it does on a CPU."""
        found_inf.of_host = True  # type: ignore[attr-defined]
        return found_inf

    def launches(self, work: Work) -> list[str]:
        self._launched.clear()
        with DeviceOps() as ops:
            work()
        return self._launched + ops.names

    def capture(self, work: Work) -> Work:
        def replay() -> None:
            with self._monkeypatch.context() as patched:
                patched.setattr(cuda_graphs, "capturing", lambda device: True)
                work()

        return replay

    def side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()


Machine = Cuda | Mapped


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


def late_copy(t: Tensor) -> AsyncCopy:
    """`send_to_host` of a flag that arrives when its event is waited for."""
    with _disable_current_modes():
        sent, copy = t.clone(), torch.zeros_like(t)
    copy.of_host = True  # type: ignore[attr-defined]

    class Event:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            copy.copy_(sent)

    return AsyncCopy(copy, Event())  # type: ignore[arg-type]


class DeviceOps(TorchDispatchMode):
    """Ops on tensors of the mapped device by name, views and allocations left out; without `reads`, reading
    one raises.

    Tensors that are made of Python numbers are the host's, and so is what is computed of them alone.
    """

    def __init__(self, reads: bool = True) -> None:
        super().__init__()
        self.names: list[str] = []
        self._reads = reads

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.__name__.split(".")[0]
        given = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)]
        hosted = name == "lift_fresh" or (given and all(hasattr(t, "of_host") for t in given))
        result = op(*args, **(kwargs or {}))
        if hosted and isinstance(result, Tensor):
            result.of_host = True  # type: ignore[attr-defined]
        elif not hosted:
            assert self._reads or name not in ("_local_scalar_dense", "equal", "nonzero"), "read on the host"
            view = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
            if not view and not name.startswith("empty"):
                self.names.append(name)
        return result
