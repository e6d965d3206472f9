"""Where an op came from: module path, the torch function called, and the user's own source line."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from halfstep.names import fqn
from halfstep.policy.op_names import canonical_op
from halfstep.torch_private import engine_under

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent.parent)
_RECIPES = str(Path(_HERE) / "recipes")
_STDLIB = sysconfig.get_paths()["stdlib"]
_PACKAGES = tuple({sysconfig.get_paths()[k] for k in ("purelib", "platlib")})

_RECOMPUTES = ("recompute_fn", "unpack_hook", "backward")

# Kernels whose name is not the name of the call that made them, where the call itself is not known.
_REFLECTED = {
    "__rdiv__": "div",
    "__rtruediv__": "div",
    "__rsub__": "sub",
    "__radd__": "add",
    "__rmul__": "mul",
    "__iadd__": "add",
    "__imul__": "mul",
    "__itruediv__": "div",
}
_KERNEL_NAMES = {
    "mm": "matmul",
    "bmm": "matmul",
    "addmm": "linear",
    "convolution": "conv",
    "native_layer_norm": "layer_norm",
    "native_batch_norm": "batch_norm",
    "native_group_norm": "group_norm",
    "_to_copy": "cast",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
}


@dataclass(frozen=True)
class OpLocation:
    """The place of an op. `file` and `line` are the user's; `node` names the backward node, if any.

    `call` numbers the torch functions the user called (0: unknown), so that the kernels of one call are told
    from those of the next. `in_region`: whether autocast was on, in backward where the forward op ran.
    """

    module: str
    module_class: str
    function: Any
    file: str
    line: int
    node: str = ""
    call: int = 0
    in_region: bool = False

    @property
    def code(self) -> str:
        """The text of the source line, stripped; empty if the source is not at hand."""
        return linecache.getline(self.file, self.line).strip() if self.file else ""

    @property
    def where(self) -> str:
        """`file.py:12` (the file's name without its folder), empty if unknown."""
        return f"{Path(self.file).name}:{self.line}" if self.file else ""


def op_label(function: Any, base: str) -> str:
    """The op's name as the op table has it, else as the user called it, else the kernel's, tidied."""
    if function is not None:
        named = canonical_op(function) or _REFLECTED.get(getattr(function, "__name__", ""))
        if named is not None:
            return named
    kernel = base.removesuffix("_") if not base.endswith("__") else base
    kernel = kernel.removesuffix("_backward")
    return _KERNEL_NAMES.get(kernel, kernel.removeprefix("_"))


@cache
def is_users(file: str) -> bool:
    """Whether a source file is the user's: not Python's, torch's or ours (recipes count as a user's)."""
    if file.startswith("<"):
        return False
    if file.startswith(_HERE):
        return file.startswith(_RECIPES)
    if file.startswith(_TORCH):
        return False
    return file.startswith(_PACKAGES) or not file.startswith(_STDLIB)


def look() -> tuple[str, str, int]:
    """Walks the Python stack outward: (`backward`, `recompute` or "", the user's file, the user's line).

    Inside backward the walk stops at the engine: what lies beyond is the call of backward itself.
    """
    frame = sys._getframe(2)
    file, line = "", 0
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_engine_run_backward" and code.co_filename.startswith(_TORCH):
            return "backward", file, line
        if code.co_filename.endswith("checkpoint.py") and code.co_name in _RECOMPUTES:
            return "recompute", file, line
        if not file and is_users(code.co_filename):
            file, line = code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "", file, line


def _variables(frame: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """A frame's tensors by the names the user gave them, plain variables before what lies in containers."""
    later: list[tuple[str, torch.Tensor]] = []
    for name, value in list(frame.f_locals.items()):
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list | tuple) and len(value) <= 8:
            later += [(f"{name}[{i}]", x) for i, x in enumerate(value) if isinstance(x, torch.Tensor)]
        elif isinstance(value, dict) and len(value) <= 8:
            later += [(f"{name}[{k!r}]", x) for k, x in value.items() if isinstance(x, torch.Tensor)]
    yield from later


def _shows(t: torch.Tensor) -> tuple[Any, ...] | None:
    if t.layout != torch.strided or t.is_meta:
        return None
    try:
        return t.data_ptr(), tuple(t.shape), t.stride()
    except (RuntimeError, NotImplementedError):
        return None


def users_names(tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the names of the user's variables that hold them now, outermost function first."""
    wanted = {_shows(t): t for t in tensors if t.numel()}
    wanted.pop(None, None)
    frames: list[Any] = []
    frame: Any = sys._getframe(1)
    while frame is not None and wanted:
        if is_users(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    found: dict[str, torch.Tensor] = {}
    for one in reversed(frames):
        for name, value in _variables(one):
            key = _shows(value)
            if key in wanted:
                found.setdefault(name, wanted.pop(key))
    return found


def within(module: str, kind: str) -> str:
    """Where an op ran, in words: `kind` is the class of the module, empty outside of all."""
    if module:
        return f"in {module}"
    return f"in the root module ({kind})" if kind else "outside any module"


def starts_backward(function: Any) -> bool:
    """Whether this torch function runs autograd's engine."""
    return function in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def run_backward(mode: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function that runs the engine, from a mode's handler: torch switches the mode off in there, and
    what Python code backward calls (own Functions, recomputation) must see it again."""
    with engine_under(mode):
        return function(*args, **kwargs)


class ModuleStack:
    """Context manager that knows which module's forward is running, by global hooks removed at the end.

    `adopt` is called once for each tree of modules with the names of its parameters.
    """

    def __init__(
        self, model: nn.Module | None, adopt: Callable[[Iterable[tuple[str, nn.Parameter]]], None]
    ) -> None:
        self._names: dict[int, str] = {}
        self._running: list[nn.Module] = []
        self._keep: list[nn.Module] = []
        self._handles: list[Any] = []
        self._adopt = adopt
        self._model = model

    def __enter__(self) -> ModuleStack:
        if self._model is not None:
            self._learn(self._model)
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._running.clear()

    def _learn(self, root: nn.Module) -> None:
        has_weights = next(root.parameters(), None) is not None
        first = not self._keep and has_weights
        if first:
            self._keep.append(root)
        prefix = "" if first else type(root).__name__
        for name, module in root.named_modules():
            path = ".".join(part for part in (prefix, fqn(name)) if part)
            self._names.setdefault(id(module), path)
        self._adopt(
            (".".join(part for part in (prefix, fqn(name)) if part), parameter)
            for name, parameter in root.named_parameters()
        )

    def _before(self, module: nn.Module, args: Any) -> None:
        self.enter(module)

    def enter(self, module: nn.Module) -> None:
        """Notes that a module's forward begins."""
        if id(module) not in self._names:
            self._learn(module)
        self._running.append(module)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._running and self._running[-1] is module:
            self._running.pop()

    def name_of(self, module: nn.Module) -> str:
        """The path of a module, its class name if it was never seen."""
        return self._names.get(id(module), type(module).__name__)

    @property
    def path(self) -> str:
        """Path of the innermost running module; empty at the root or outside every module."""
        return self.name_of(self._running[-1]) if self._running else ""

    @property
    def kind(self) -> str:
        """Class of the innermost running module; empty outside every module."""
        return type(self._running[-1]).__name__ if self._running else ""
