"""NCCL's place among torch's process groups: gloo on the same bytes, for tensors of the device alone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from tests.falsecuda import control


def provide() -> None:
    """Put the group where a CUDA build has NCCL's; called before torch.distributed reads it."""
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._DEFAULT_PG_NCCL_TIMEOUT = timedelta(minutes=10)


def _on_host(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_on_host(each) for each in value]
    if not value.is_cuda:
        raise RuntimeError("No backend type associated with device type cpu")
    control.submit("nccl")
    return torch.ops.falsecuda.on_cpu(value.detach())


class Done(c10d.Work):
    """Work that is over; its future gives the tensors of the device."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future

    def result(self) -> Any:
        return self._result


class ProcessGroupNCCL(c10d.ProcessGroup):
    """Collectives by gloo, each over when it returns; averages are sums divided, as NCCL gives them."""

    class Options(c10d.Backend.Options):
        """NCCL's options, which say nothing here."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__("nccl")
            self.is_high_priority_stream = is_high_priority_stream

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        super().__init__(rank, size)
        timeout = options._timeout if options is not None else timedelta(minutes=10)
        self._gloo = c10d.ProcessGroupGloo(store, rank, size, timeout)
        self.options = options

    @property
    def pg_name(self) -> str:
        return torch.distributed.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def getBackendName(self) -> str:
        return "nccl"

    def getSize(self) -> int:
        return self.size()

    def _set_sequence_number_for_group(self) -> None: ...

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...

    def _run(self, name: str, outputs: Any, *arguments: Any) -> Done:
        getattr(self._gloo, name)(*arguments).wait()
        return Done(outputs)

    # ---- reductions ----

    def allreduce(self, tensors: Any, opts: Any = None) -> Done:
        self._reduce([_on_host(t) for t in tensors], opts)
        return Done(tensors)

    def _reduce(self, tensors: list[torch.Tensor], opts: Any) -> None:
        operation = c10d.ReduceOp.SUM if opts is None else opts.reduceOp
        average = operation == c10d.ReduceOp.AVG
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.SUM if average else operation
        for t in tensors:
            self._gloo.allreduce([t], options).wait()
            if average:
                t.div_(self.size())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Done:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> Done:
        return self._run("reduce", tensors, _on_host(tensors), opts)

    def _reduce_scatter_base(self, output: Any, source: Any, opts: Any = None) -> Done:
        whole = _on_host(source).clone()
        self._reduce([whole], opts)
        _on_host(output).copy_(whole.chunk(self.size())[self.rank()].reshape(output.shape))
        return Done([output])

    def reduce_scatter_tensor_coalesced(self, outputs: Any, sources: Any, opts: Any = None) -> Done:
        for output, source in zip(outputs, sources):
            self._reduce_scatter_base(output, source, opts)
        return Done(outputs)

    # ---- the others ----

    def broadcast(self, tensors: Any, opts: Any) -> Done:
        return self._run("broadcast", tensors, _on_host(tensors), opts)

    def allgather(self, outputs: Any, sources: Any, opts: Any = None) -> Done:
        return self._run("allgather", outputs, _on_host(outputs), _on_host(sources))

    def _allgather_base(self, output: Any, source: Any, opts: Any = None) -> Done:
        parts = list(_on_host(output).chunk(self.size()))
        self._gloo.allgather([parts], [_on_host(source).reshape(parts[0].shape)]).wait()
        return Done([output])

    def allgather_into_tensor_coalesced(self, outputs: Any, sources: Any, opts: Any = None) -> Done:
        for output, source in zip(outputs, sources):
            self._allgather_base(output, source)
        return Done(outputs)

    def gather(self, outputs: Any, sources: Any, opts: Any) -> Done:
        host = _on_host(sources)
        parts = [[torch.empty_like(host[0]) for _ in range(self.size())]]
        self._gloo.allgather(parts, host).wait()
        for output, part in zip(outputs[0] if outputs else [], parts[0]):
            _on_host(output).copy_(part)
        return Done(outputs)

    def scatter(self, outputs: Any, sources: Any, opts: Any) -> Done:
        return self._run("scatter", outputs, _on_host(outputs), _on_host(sources), opts)

    def alltoall(self, outputs: Any, sources: Any, opts: Any = None) -> Done:
        return self._run("alltoall", outputs, _on_host(outputs), _on_host(sources))

    def send(self, tensors: Any, destination: int, tag: int) -> Done:
        return self._run("send", tensors, _on_host(tensors), destination, tag)

    def recv(self, tensors: Any, source: int, tag: int) -> Done:
        return self._run("recv", tensors, _on_host(tensors), source, tag)

    def barrier(self, opts: Any = None) -> Done:
        self._gloo.barrier().wait()
        return Done([])

    # What newer callers name the same collectives.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
