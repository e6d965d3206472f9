"""torch.amp's names, new and old, on halfstep: change the import line and go on.

`from halfstep.compat.torch_amp import autocast, GradScaler` stands in for the same import from torch.amp,
torch.cuda.amp or torch.cpu.amp; `install()` does it for code that cannot be edited. Only signatures are
translated here: regions cast by the op table `torch`, scaling is `halfstep.GradScaler`.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.amp.autocast_mode import is_autocast_available

from halfstep.casting.context import active_policy, traced_policy
from halfstep.casting.context import autocast as _native
from halfstep.casting.functions import custom_bwd, custom_fwd
from halfstep.casting.kernel_choice import table_of
from halfstep.devices.capabilities import is_slow, resolve
from halfstep.errors import HalfstepWarning
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


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, HalfstepWarning, stacklevel=5)


def _choice(
    device: str | torch.device | None,
    dtype: torch.dtype | None,
    enabled: bool,
    here: Callable[[str], Policy | None] = active_policy,
) -> tuple[str, torch.dtype, str | Policy | None]:
    """Device, dtype and policy of a region as torch's arguments mean them; None for the bare old form.

    Torch's defaults: fp16 for CUDA and for the bare old form, else the device's own. Where torch would
    quietly compute in fp32 because CUDA is absent, the CPU (or this machine's accelerator) does the work in
    that dtype by the CUDA list.
    """
    kind, absent = device.type if isinstance(device, torch.device) else device or "cuda", False
    low = dtype or torch.get_autocast_dtype(kind)
    if kind == "cuda" and not torch.cuda.is_available():
        kind, absent = resolve(None).type, True
        if enabled and kind == "cpu":
            _warn_once(
                "autocast for CUDA, but CUDA is not available: the CPU runs it in the same dtype, by CUDA's "
                "op list (torch would quietly compute in fp32). Write autocast('cpu') to choose this, or "
                "enabled=False."
            )
    if not enabled:
        return kind, low, None
    return kind, low, here(kind) or (_CUDA_ELSEWHERE if absent else _policy(kind, low))


@constant_when_traced
def _traced_choice(
    device: str | torch.device | None, dtype: torch.dtype | None, enabled: bool
) -> tuple[str, torch.dtype, str | None]:
    kind, low, policy = _choice(device, dtype, enabled, traced_policy)
    return kind, low, None if policy is None else str(policy)


def _policy(device_type: str, dtype: torch.dtype) -> str | Policy:
    """Torch's casting on this device; its LOW ops run by the kernels that are fastest on this machine.

    (fp16 convolutions on a CPU take up to 160 times fp32's time in torch's own kernels. Rounding inputs and
    outputs around fp32 arithmetic differs from them in the last bit of few elements. With
    HALFSTEP_KERNELS=native, values are torch's bit for bit.)
    """
    native = table_of().name == "native" if device_type == "cpu" else not is_slow(device_type, dtype)
    return "torch" if native else _as_torch_around_fp32(device_type, dtype)


@functools.cache
def _as_torch_around_fp32(device_type: str, dtype: torch.dtype) -> Policy:
    """Torch's rules as edits of our table, whose ops may take other kernels than torch's."""
    wanted = rows("torch", device_type)
    names = {**rows("halfstep"), **wanted}
    edits = {name: wanted[name].rule if name in wanted else Rule.KEEP for name in names}
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
        choose = _traced_choice if torch.compiler.is_compiling() else _choice
        kind, low, policy = choose(device_type, dtype, enabled)
        super().__init__(kind, low, enabled, policy)
        self.device, self.fast_dtype = kind, low
        self._enabled, self._cache_enabled = enabled, False


class GradScaler(_GradScaler):
    """torch.amp.GradScaler(device, init_scale, ...) and torch.cuda.amp.GradScaler(init_scale, ...).

    Works on whatever device the losses are, CUDA or not; `step` returns an Outcome (torch's return value is
    `outcome.result`). Further keywords are `halfstep.GradScaler`'s.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], int | float):
            args = (kwargs.pop("device", None), *args)
        super().__init__(*args, **kwargs)


class _StandIn(type):
    """Of a class that stands in torch's place: whatever of halfstep's does that job is an instance of it."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _GradScaler if issubclass(cls, _GradScaler) else _native)


class _Autocast(autocast, metaclass=_StandIn):
    pass


class _CudaAutocast(autocast, metaclass=_StandIn):
    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> None:
        super().__init__("cuda", dtype, enabled, cache_enabled)


class _CpuAutocast(autocast, metaclass=_StandIn):
    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.bfloat16, cache_enabled: bool = True
    ) -> None:
        super().__init__("cpu", dtype, enabled, cache_enabled)


_Scaler, _TorchScaler, _CudaScaler, _CpuScaler = (
    _StandIn(name, (GradScaler,), {"__module__": __name__, "__qualname__": name})
    for name in ("_Scaler", "_TorchScaler", "_CudaScaler", "_CpuScaler")
)


# Public names only: torch's own modules (Dynamo, FSDP's scaler) keep reaching its classes where those live.
# Each place has objects of its own, by which `_give_back` knows what a name stood for.
_PLACES: Mapping[str, Mapping[str, Any]] = {
    "torch": {"autocast": _Autocast, "GradScaler": _TorchScaler},
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
    """What `install` replaced, and what it could not reach: "torch.name", "module.name", "module.function".

    `replaced` holds torch's names and those that modules had imported before (`from torch.amp import
    autocast`). `unreached` holds functions and classes that keep one of torch's as a default argument or an
    attribute; they still mean torch's own. What is hidden in closures and objects cannot be seen at all.
    """

    replaced: tuple[str, ...]
    unreached: tuple[str, ...]


class install:
    """Put halfstep's autocast, GradScaler, custom_fwd and custom_bwd in torch's place within the `with`.

    For code that cannot be edited. Names that modules imported earlier are replaced too; what keeps torch's
    elsewhere is listed in the Installation and in one warning. `torch.jit.script` still sees torch's own,
    which alone it can compile. At the end every name gets torch's back, also in modules imported inside.
    Entered and never left, it holds until the process ends. Process-wide, so for one thread at a time;
    entered again inside, it changes nothing. Called and never entered it does nothing, and says so.
    """

    _entered = False

    def __del__(self) -> None:
        if not self._entered and not sys.is_finalizing():
            warnings.warn(
                "install() was called and not entered, so torch's autocast and GradScaler are still torch's: "
                "write `with install():` around the code, or install().__enter__() to keep it",
                HalfstepWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Installation:
        self._entered = True
        if _in_force:
            return _in_force[0].installation
        places = [(sys.modules[place], name) for place, names in _PLACES.items() for name in names]
        named = {(place, name): getattr(place, name) for place, name in places}
        ours = {id(torchs): _PLACES[place.__name__][name] for (place, name), torchs in named.items()}
        self._torchs = {**named, **{(m, name): value for m, name, value in _bound(ours)}}
        self._ours, self._script = ours, torch.jit.script
        unreached = tuple(sorted(_keepers(ours)))
        if unreached:
            warnings.warn(
                f"install() cannot reach {len(unreached)} places that keep torch's own: "
                f"{', '.join(unreached[:10])}{' ...' if len(unreached) > 10 else ''}",
                HalfstepWarning,
                stacklevel=2,
            )
        self.installation = Installation(tuple(f"{m.__name__}.{name}" for m, name in self._torchs), unreached)
        self._put_ours()
        _in_force.append(self)
        return self.installation

    def __exit__(self, *_: object) -> None:
        if self in _in_force:
            _in_force.clear()
            self._put_back()

    def _put_ours(self) -> None:
        for (module, name), torchs in self._torchs.items():
            own = _PLACES.get(module.__name__, {}).get(name)
            setattr(module, name, self._ours[id(torchs)] if own is None else own)
        torch.jit.script = self._script_with_torchs_own

    def _put_back(self) -> None:
        torch.jit.script = self._script
        back: dict[int, Any] = {}
        for (module, name), torchs in self._torchs.items():
            setattr(module, name, torchs)
            if (own := _PLACES.get(module.__name__, {}).get(name)) is not None:
                back[id(own)] = torchs
        for module, name, value in _bound(back):
            setattr(module, name, back[id(value)])

    def _script_with_torchs_own(self, obj: Any, *args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
        self._put_back()
        try:
            return self._script(obj, *args, _frames_up=_frames_up + 1, **kwargs)
        finally:
            self._put_ours()


_in_force: list[install] = []


def _foreign_modules() -> list[ModuleType]:
    """Modules that are neither torch's nor halfstep's."""
    own = ("torch", "halfstep")
    return [m for name, m in list(sys.modules.items()) if m and name.split(".")[0] not in own]


def _bound(values: Collection[int]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield module, name and value for every module-level name that is bound to one of these objects."""
    for module in _foreign_modules():
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in values:
                yield module, name, value


def _keepers(values: Collection[int]) -> Iterator[str]:
    """Yield "module.function" and "module.Class.name" for what keeps one of these objects within."""
    for module in _foreign_modules():
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            if isinstance(value, FunctionType):
                defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
                if any(id(default) in values for default in defaults):
                    yield f"{module.__name__}.{name}"
            elif isinstance(value, type):
                for key, member in list(vars(value).items()):
                    if id(member) in values:
                        yield f"{module.__name__}.{name}.{key}"
