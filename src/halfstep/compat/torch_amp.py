"""torch.amp's names, new and old, on halfstep: change the import line and go on.

`from halfstep.compat.torch_amp import autocast, GradScaler` stands in for the same import from torch.amp,
torch.cuda.amp or torch.cpu.amp; `install()` does it for code that cannot be edited. Only signatures are
translated here: regions cast by the op table `torch`, scaling is `halfstep.GradScaler`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.amp.autocast_mode import is_autocast_available

from halfstep.casting.context import active_policy, policy_under_trace
from halfstep.casting.context import autocast as _native
from halfstep.casting.functions import custom_bwd
from halfstep.casting.functions import custom_fwd as _custom_fwd
from halfstep.casting.kernel_choice import table_of
from halfstep.devices.capabilities import is_slow, resolve
from halfstep.errors import warn
from halfstep.policy.ops import Rule, rows
from halfstep.policy.policy import Policy
from halfstep.scaling.grad_scaler import GradScaler as _GradScaler
from halfstep.torch_private import constant_when_traced

__all__ = [
    "GradScaler",
    "Installation",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "install",
    "is_autocast_available",
]


# On CUDA an nn.LSTM runs as `_cudnn_rnn`, which the list has; elsewhere under these names.
_CUDA_ELSEWHERE = "table=torch-cuda,low=lstm+gru+rnn_tanh+rnn_relu"


def _is_absent(kind: str) -> bool:
    return kind == "cuda" and not torch.cuda.is_available()


def _present(kind: str) -> str:
    """This device type, or the one that does its work here: CUDA's, where there is none."""
    return resolve(None).type if _is_absent(kind) else kind


_warn_once = functools.cache(warn)


def _choice(
    device: str | torch.device | None,
    dtype: torch.dtype | None,
    enabled: bool,
    policy_of: Callable[[str], Policy | None] = active_policy,
) -> tuple[str, torch.dtype, str | Policy | None]:
    """Device, dtype and policy of a region as torch's arguments mean them; None for the bare old form.

    Torch's defaults: fp16 for CUDA and for the bare old form, else the device's own. Where torch would
    quietly compute in fp32 because CUDA is absent, the CPU (or this machine's accelerator) does the work in
    that dtype by the CUDA list.
    """
    kind = device.type if isinstance(device, torch.device) else device or "cuda"
    low = dtype or torch.get_autocast_dtype(kind)
    if absent := _is_absent(kind):
        kind = _present(kind)
        if enabled and kind == "cpu":
            _warn_once(
                "autocast for CUDA, but CUDA is not available: the CPU runs it in the same dtype, by CUDA's "
                "op list (torch would quietly compute in fp32). Write autocast('cpu') to choose this, or "
                "enabled=False."
            )
    if not enabled:
        return kind, low, None
    return kind, low, policy_of(kind) or (_CUDA_ELSEWHERE if absent else _policy(kind, low))


@constant_when_traced
def _choice_under_trace(
    device: str | torch.device | None, dtype: torch.dtype | None, enabled: bool
) -> tuple[str, torch.dtype, str | None]:
    kind, low, policy = _choice(device, dtype, enabled, policy_under_trace)
    return kind, low, None if policy is None else str(policy)


def _policy(device_type: str, dtype: torch.dtype) -> str | Policy:
    """Torch's casting on this device; its LOW ops run by the kernels that are fastest on this machine.

    (fp16 convolutions on a CPU take up to 160 times fp32's time in torch's own kernels. Rounding inputs and
    outputs around fp32 arithmetic differs from them in the last bit of few elements. With
    HALFSTEP_KERNELS=native, values are torch's bit for bit, but for sums that torch adds up in 16 bits.)
    """
    return "torch" if runs_natively(device_type, dtype) else _as_torch_around_fp32(device_type, dtype)


def runs_natively(device_type: str, dtype: torch.dtype) -> bool:
    """Whether ops in this dtype run by torch's own kernels there, not rounded around fp32 arithmetic."""
    return table_of().name == "native" if device_type == "cpu" else not is_slow(device_type, dtype)


@functools.cache
def _as_torch_around_fp32(device_type: str, dtype: torch.dtype) -> Policy:
    """Torch's rules as edits of our table, whose ops may take other kernels than torch's."""
    torch_rows = rows("torch", device_type)
    names = {**rows("halfstep"), **torch_rows}
    edits = {name: torch_rows[name].rule if name in torch_rows else Rule.KEEP for name in names}
    return Policy(compute_dtype=dtype, edits=edits)


class autocast(_native):
    """torch.amp.autocast(device_type, dtype, enabled, cache_enabled), and the old forms without device.

    `autocast()` and `autocast(True, torch.float16)` are torch.cuda.amp's: on CUDA in fp16; without CUDA on
    this machine's accelerator or CPU by CUDA's op list (the table `torch-cuda`), with one warning. Inside a
    region of halfstep's its policy stays in force, otherwise ops run by the table `torch`.
    `cache_enabled` is accepted; there is no weight cache. Raises ConfigError and
    UnsupportedError as `halfstep.autocast` does.
    """

    def __init__(
        self,
        device_type: str | torch.device | bool | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if isinstance(device_type, bool):  # torch.cuda.amp.autocast(enabled, dtype, cache_enabled)
            device_type, enabled = None, device_type
        choose = _choice_under_trace if torch.compiler.is_compiling() else _choice
        kind, low, policy = choose(device_type, dtype, enabled)
        super().__init__(kind, low, enabled, policy)
        self.device, self.fast_dtype = kind, low
        self._enabled, self._cache_enabled = enabled, False


def custom_fwd(
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: str | torch.dtype | None = None,
) -> Callable[..., Any]:
    """torch.amp.custom_fwd and torch.cuda.amp.custom_fwd, as `halfstep.custom_fwd`.

    `device_type="cuda"` without CUDA is the device that runs `autocast("cuda")` here.
    """
    kind = None if device_type is None else _present(device_type)
    return _custom_fwd(fwd, device_type=kind, cast_inputs=cast_inputs)


class GradScaler(_GradScaler):
    """torch.amp.GradScaler(device, init_scale, ...) and torch.cuda.amp.GradScaler(init_scale, ...).

    Works on whatever device the losses are, CUDA or not (where torch's for CUDA would turn itself off, one
    warning says that it works); `step` returns an Outcome (torch's return value is `outcome.result`).
    Further keywords are `halfstep.GradScaler`'s.
    """

    _device_meant: str | None = None
    """What a call without a device means: CUDA for what stands in for torch.amp's and torch.cuda.amp's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], int | float):
            args = (kwargs.pop("device", None), *args)
        super().__init__(*args, **kwargs)
        device = (args[0] if args else kwargs.get("device")) or self._device_meant
        if device and self.is_enabled() and _is_absent(torch.device(device).type):
            _warn_once(
                "GradScaler for CUDA, but CUDA is not available: it scales losses and gradients all the "
                "same, for autocast computes in 16 bits here too (torch would turn it off). Write "
                "GradScaler('cpu') to choose this, or enabled=False."
            )


class _StandIn(type):
    """Of a class that stands in torch's place: whatever of halfstep's does that job is an instance of it."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _GradScaler if issubclass(cls, _GradScaler) else _native)


class _CpuAutocast(autocast, metaclass=_StandIn):
    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True
    ) -> None:
        super().__init__("cpu", dtype, enabled, cache_enabled)


def _stand_in(name: str, ours: type) -> Any:
    return _StandIn(name, (ours,), {"__module__": __name__, "__qualname__": name})


_Autocast, _CudaAutocast = (_stand_in(name, autocast) for name in ("_Autocast", "_CudaAutocast"))
_Scaler, _CudaScaler, _CpuScaler = (
    _stand_in(name, GradScaler) for name in ("_Scaler", "_CudaScaler", "_CpuScaler")
)
_Scaler._device_meant = _CudaScaler._device_meant = "cuda"


# Public names only: torch's own modules (Dynamo, FSDP's scaler) keep reaching its classes where those live.
# Each place has objects of its own, by which `_put_back` knows what a name stood for.
_PLACES: Mapping[str, Mapping[str, Any]] = {
    "torch": {"autocast": _Autocast, "GradScaler": _Scaler},
    "torch.amp": {
        "autocast": _Autocast,
        "GradScaler": _Scaler,
        "custom_fwd": functools.partial(custom_fwd),
        "custom_bwd": functools.partial(custom_bwd),
    },
    "torch.cuda.amp": {
        "autocast": _CudaAutocast,
        "GradScaler": _CudaScaler,
        "custom_fwd": functools.partial(custom_fwd),
        "custom_bwd": functools.partial(custom_bwd),
    },
    "torch.cpu.amp": {"autocast": _CpuAutocast, "GradScaler": _CpuScaler},
}


@dataclass(frozen=True)
class Installation:
    """What `install` replaced: "torch.name" and "module.name".

    `replaced` holds torch's names and those that modules had imported before (`from torch.amp import
    autocast`).
    """

    replaced: tuple[str, ...]


class install:
    """Put halfstep's autocast, GradScaler, custom_fwd and custom_bwd in torch's place within the `with`.

    For code that cannot be edited. Names that modules imported earlier are replaced too; default arguments,
    class attributes and what closures hold still mean torch's own. At the end every name gets torch's back,
    also in modules imported inside. Called without `with`, it holds until the process ends. Process-wide, so
    for one thread at a time; called again inside, it changes nothing. `torch.jit.script` can compile torch's
    own autocast alone: script such functions before.
    """

    def __init__(self) -> None:
        if not _in_force:
            _in_force.append(self)
            self._put_ours()
        self.installation = Installation(tuple(f"{m.__name__}.{name}" for m, name, *_ in _in_force[0]._swaps))

    def __enter__(self) -> Installation:
        return self.installation

    def __exit__(self, *_: object) -> None:
        if self in _in_force:
            _in_force.clear()
            self._put_back()

    def _put_ours(self) -> None:
        places = [(sys.modules[place], names) for place, names in _PLACES.items()]
        self._swaps = [
            (m, name, getattr(m, name), replacement)
            for m, names in places
            for name, replacement in names.items()
        ]
        ours = {id(torchs): replacement for _, _, torchs, replacement in self._swaps}
        self._swaps += [
            (module, name, value, ours[id(value)]) for module, name, value in _find_bindings(ours)
        ]
        for module, name, _, replacement in self._swaps:
            setattr(module, name, replacement)

    def _put_back(self) -> None:
        for module, name, torchs, _ in self._swaps:
            setattr(module, name, torchs)
        back = {id(replacement): torchs for _, _, torchs, replacement in self._swaps}
        for module, name, value in _find_bindings(back):
            setattr(module, name, back[id(value)])


_in_force: list[install] = []


def _find_bindings(values: Collection[int]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield module, name and value where a module, not torch's nor halfstep's, binds one of these objects."""
    for path, module in list(sys.modules.items()):
        if path.split(".")[0] not in ("torch", "halfstep"):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in values:
                    yield module, name, value
