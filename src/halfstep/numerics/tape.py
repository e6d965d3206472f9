"""An op-level tape of one training step: what ran, where, in which dtype, where values stopped being finite.

The tape sits below autograd and autocast (a TorchDispatchMode), so it sees every kernel of forward, backward,
recomputation and optimizer. A backward op is tied to the forward line that caused it by autograd's sequence
numbers. It is slow (every result is looked at) and meant for one replayed step; it changes no value. An op
is a `Node`; where it came from, module path, function called and the user's own line, an `OpLocation`.
"""

from __future__ import annotations

import linecache
import math
import os
import re
import sys
import sysconfig
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from halfstep.formats import dtype_name
from halfstep.names import fqn
from halfstep.numerics.histogram import amax
from halfstep.policy.op_names import canonical_op
from halfstep.torch_private import (
    TorchDispatchMode,
    disable_current_modes,
    engine_under,
    gradient_hooks,
    graph_task,
    memory_of,
    node_number,
    pytree,
    running_node,
    schema_of,
    sequence_number,
)
from halfstep.trees import tensors_in

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent.parent)
_RECIPES = str(Path(_HERE) / "recipes")
_STDLIB = sysconfig.get_paths()["stdlib"]
_PACKAGES = tuple({sysconfig.get_paths()[k] for k in ("purelib", "platlib")})

_RECOMPUTES = ("recompute_fn", "unpack_hook", "backward")

# Kernels whose name is not the name of the call that made them, where the call itself is not known.
_REFLECTED = re.compile(r"__[ri](?:true)?(add|sub|mul|div)__")
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


#: Calls by which a script reads a value, as before it decides whether to go on with a step.
_TESTS = ("isfinite", "isnan", "isinf")
_COMPARISONS = tuple(way for name in ("eq", "ne", "lt", "le", "gt", "ge") for way in (name, f"__{name}__"))
READS = ("item", "__float__", "tolist", "numpy", "__array__", *_TESTS, *_COMPARISONS)


@dataclass(frozen=True)
class OpLocation:
    """The place of an op. `file` and `line` are the user's; `node` names the backward node, if any.

    `call` numbers the torch functions the user called (0: unknown), so that the kernels of one call differ
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
        """Return the text of the source line, stripped; empty if there is no source."""
        return linecache.getline(self.file, self.line).strip() if self.file else ""

    @property
    def where(self) -> str:
        """Return `file.py:12` (the file's name without its folder), empty if unknown."""
        return f"{Path(self.file).name}:{self.line}" if self.file else ""

    @property
    def phrase(self) -> str:
        """Return the place as it follows an op: `in 2, train.py:9` or `outside any module, train.py:7`."""
        return within(self.module, self.module_class) + (f", {self.where}" if self.where else "")


def op_label(function: Any, base: str) -> str:
    """Return the op's name in the op table, else as the user called it, else the kernel's, shortened."""
    if function is not None:
        name = getattr(function, "__name__", "")
        reflected = _REFLECTED.fullmatch(name)
        named = canonical_op(function) or (reflected and reflected[1])
        named = named or (name if name in _TESTS else None)  # replaced by another while a script runs
        if named:
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


def _stack() -> Iterable[Any]:
    """Yield the frames of this thread, innermost first; nothing else reads them."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def call_site() -> tuple[str, str, int]:
    """Walk the Python stack outward: (`backward`, `recompute` or "", the user's file, the user's line).

    Inside backward the walk stops at the engine: what lies beyond is the call of backward itself.
    """
    file, line = "", 0
    for frame in _stack():
        code = frame.f_code
        if code.co_name == "_engine_run_backward" and code.co_filename.startswith(_TORCH):
            return "backward", file, line
        if code.co_filename.endswith("checkpoint.py") and code.co_name in _RECOMPUTES:
            return "recompute", file, line
        if not file and is_users(code.co_filename):
            file, line = code.co_filename, frame.f_lineno
    return "", file, line


def running_loop(ends: Iterable[str]) -> str:
    """Return which of these sources, given by ends of paths, has a running function; else nothing."""
    files = (frame.f_code.co_filename.replace(os.sep, "/") for frame in _stack())
    return next((end for file in files for end in ends if file.endswith(end)), "")


def _variables(frame: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield a frame's tensors by their variables' names, plain variables before those in containers."""
    later: list[tuple[str, torch.Tensor]] = []
    for name, value in list(frame.f_locals.items()):
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list | tuple | dict) and len(value) <= 8:
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            later += [(f"{name}[{k!r}]", x) for k, x in pairs if isinstance(x, torch.Tensor)]
    yield from later


def users_names(tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the names of the user's variables that hold these tensors, outermost function first."""
    tensors_by_key = {key_of(t): t for t in tensors if t.numel()}
    frames = [f for f in _stack() if is_users(f.f_code.co_filename)] if tensors_by_key else []
    names: dict[str, torch.Tensor] = {}
    for frame in reversed(frames):
        for name, value in _variables(frame):
            key = key_of(value)
            if key in tensors_by_key:
                names.setdefault(name, tensors_by_key.pop(key))
    return names


def within(module: str, kind: str) -> str:
    """Say where an op ran; `kind` is the class of the module, empty outside of all."""
    if module:
        return f"in {module}"
    return f"in the root module ({kind})" if kind else "outside any module"


class CallMode(TorchFunctionMode):
    """A mode that sees the torch functions a script calls, also in backward, where torch hides them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            return self.on_call(func, args, kwargs or {})
        self.on_backward(func, args)
        with engine_under(self):
            return func(*args, **(kwargs or {}))

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function."""
        return func(*args, **kwargs)

    def on_backward(self, func: Any, args: Any) -> None:
        """Run autograd's engine."""


def is_finite(t: Tensor) -> bool:
    """Whether every element is finite (reads the device); integer tensors always are."""
    if not (t.is_floating_point() or t.is_complex()) or t.numel() == 0 or t.is_meta:
        return True
    return math.isfinite(amax(t).item())


#: What an error says that values raised which are not finite.
_OF_VALUES = re.compile(r"\b(nan|inf|infinite|infinity|finite|nonfinite)\b", re.IGNORECASE)
#: Functions between a call that reads and the tape.
_RELAYS = ("<genexpr>", "note_read", "on_call", "__torch_function__", "_on_read", "call_instead")


def reads_nonfinite(call: str, args: Any) -> bool:
    """Whether a call reads a value that is not finite; comparing many elements with others is a mask."""
    value = args[0] if args else None
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    if call in _COMPARISONS and value.dim() and not (len(args) > 1 and args[1] is value):
        return False
    with disable_current_modes():
        return not is_finite(value.detach())


@dataclass(eq=False)
class Node:
    """One op that ran. `parents[i]`: which node made the i-th tensor argument, as which of its results
    (None: it came from outside the step).

    `origins`: indices of the nodes whose non-finite results reached this one; its own index if it is one.
    `names`: for an origin, its tensors by the names of the user's variables.
    """

    index: int
    func: Any
    phase: str
    location: OpLocation
    args: Any = ()
    kwargs: Any = None
    outs: list[Tensor] = field(default_factory=list)
    parents: list[tuple[Node, int] | None] = field(default_factory=list)
    origins: frozenset[int] = frozenset()
    intended: bool = False
    outside: list[Tensor] = field(default_factory=list)
    dropped: bool = False
    names: dict[str, Tensor] = field(default_factory=dict)

    @property
    def aten(self) -> str:
        """Return the full name of the kernel: `aten.mm.default`."""
        return str(self.func)

    @property
    def base(self) -> str:
        """Return the op's name without namespace and overload: `mm`."""
        return schema_of(self.func).name.split("::")[-1]

    @property
    def op(self) -> str:
        """Return the op as the user called it (`linear`), or the kernel's name where no call is known.

        A cast is a `cast`, unless it rounds the result of the same call: that is part of the op.
        """
        if self.base == "_to_copy":
            maker = self.parents[0][0] if self.parents and self.parents[0] else None
            if maker is None or maker.base == "_to_copy" or not 0 < self.location.call == maker.location.call:
                return "cast"
        return op_label(self.location.function, self.base)

    def tensors(self) -> list[Tensor]:
        """Return the tensor arguments, as they were before the op ran."""
        return tensors_in((self.args, self.kwargs))

    def user_tensors(self) -> list[Tensor]:
        """Return the tensors of the user's call, where this op only rounds its result; else its own."""
        if self.base != "_to_copy" or self.op == "cast" or not self.outs:
            return self.tensors()
        return self._tensors_of_call(self.outs[0].dtype)

    def _tensors_of_call(self, dtype: torch.dtype) -> list[Tensor]:
        """Follow ops of the same call to their first tensors; a cast by autocast counts as its input."""
        tensors: list[Tensor] = []
        for t, parent in zip(self.tensors(), self.parents):
            maker = None if parent is None else parent[0]
            same_call = maker is not None and not maker.dropped and maker.location.call == self.location.call
            if maker is None or not same_call or (maker.base == "_to_copy" and t.dtype == dtype):
                tensors.append(t)
            else:
                tensors += maker._tensors_of_call(dtype)
        return tensors


@dataclass(frozen=True)
class End:
    """A value that must be finite and is not: `kind` is loss, gradient, parameter, buffer or state."""

    kind: str
    name: str
    origins: frozenset[int]


# Their results are memory nobody has written yet; whatever lies in it means nothing.
_UNWRITTEN = frozenset(
    ["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"]
)
# They write without looking at what was there before.
_OVERWRITES = frozenset(["copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_"])
# They show memory that was filled elsewhere: by a worker, by numpy, by a file.
_ARRIVES = frozenset(["set_", "lift_fresh", "from_file", "_pin_memory", "_reinterpret_tensor", "frombuffer"])
# They only move values: what was not finite before the step is named where it is first used.
_MOVES = frozenset(["copy_", "clone", "stack", "cat", "index", "index_select", "index_copy_", "fill_"])
# Beside the result they return the logarithm of a sum, -inf for a row without terms or a path that is none.
_ONLY_FIRST = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_ctc_loss")
_NO_SEQUENCE = 1 << 62
#: How much memory the arguments and results of past ops may hold for later re-runs.
_KEPT_BYTES = 1 << 30
# Moving and reading values is not arithmetic.
_UNCOUNTED = frozenset(
    ["_local_scalar_dense", "copy_", "clone", "detach", "zeros_like", "zero_", "alias", "_unsafe_view"]
)
_FILLS = (
    "masked_fill", "full", "fill", "full_like", "new_full", "scalar_tensor", "index_fill", "where",
    "lift_fresh",
)  # fmt: skip
# Ops that are there to turn infinities into finite values; the end of a kernel's name.
_MAY_SWALLOW = (
    "softmax", "exp", "where", "masked_fill", "masked_fill_", "clamp", "clamp_", "clamp_min",
    "clamp_max", "maximum", "minimum", "amax", "amin", "max", "min", "nan_to_num", "sigmoid", "tanh",
    "erf", "logsumexp", "flash_attention_for_cpu", "efficient_attention", "_backward",
    "_backward_data", "unscale_", "topk", "gather", "index", "index_select", "sort", "select_backward",
    "relu", "hardtanh", "masked_select",
)  # fmt: skip


def _storage(t: Tensor) -> int:
    try:
        return memory_of(t)
    except (RuntimeError, NotImplementedError):
        return id(t)


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def key_of(t: Tensor) -> tuple[Any, ...]:
    """Return the identity of a tensor's memory: the same for the aliases that autograd makes."""
    if t.layout != torch.strided:
        return (id(t),)
    return (_storage(t), t.storage_offset(), tuple(t.shape), t.stride(), t.dtype)


class Tape(TorchDispatchMode):
    """Context manager that records one step. Read `nodes`, `ends`, `counts` after it has closed.

    Args:
        model: names modules by its paths; without it the first module called is taken for the model.
        observers: called with each finished node and whether its results are finite.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        observers: Iterable[Callable[[Node, bool], None]] = (),
    ) -> None:
        super().__init__()
        self.batch = ""
        """What the step's batch is called in words."""
        self.root_amax = 0.0
        self.nodes: list[Node] = []
        self.candidates: dict[int, Node] = {}
        self.ends: list[End] = []
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.used_collectives = False
        self._received: dict[int, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.passed: list[Node] = []
        self.swallowed: list[tuple[Node, frozenset[int]]] = []
        self.reads: list[End] = []
        """Values that were not finite when the script read them."""
        self.backward_seen = False
        self.backward_call: tuple[str, int] = ("", 0)
        self._bad: dict[int, tuple[frozenset[int], Tensor]] = {}
        self._made: dict[tuple[Any, ...], tuple[Node, int, tuple[int, int]]] = {}
        self.originals: dict[tuple[Any, ...], Tensor] = {}
        self._kept: OrderedDict[int, tuple[Node, int]] = OrderedDict()
        self._left = _KEPT_BYTES
        self._locations: dict[int, list[tuple[str, OpLocation]]] = {}
        self._lines: dict[str, OpLocation] = {}
        self._observers = tuple(observers)
        self._steps: list[bool] = []  # of optimizers under way: whether a closure was given
        self.rates: list[float] = []
        self.calls: list[tuple[Any, int, bool]] = []
        self.call_count = 0
        self._model = model
        self._names: dict[nn.Module, str] = {}
        self._running: list[nn.Module] = []
        self._stack = ExitStack()

    def __enter__(self) -> Tape:
        if self._model is not None:
            self._learn(self._model)
        after_step = register_optimizer_step_post_hook(self._after_step)
        # The hook that ends a tape must be torch's last: a hook may not be removed before it was called.
        hooks: Any = after_step.hooks_dict_ref()
        hooks.move_to_end(after_step.id, last=False)
        for handle in (
            after_step,
            register_optimizer_step_pre_hook(self._before_step),
            register_module_forward_pre_hook(self.enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._stack.callback(handle.remove)
        self._stack.enter_context(_Calls(self))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()
        self._made.clear()
        self._running.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps.append(any(map(callable, (*args, *kwargs.values()))))
        self.rates += [float(g["lr"]) for g in optimizer.param_groups if "lr" in g]

    def _after_step(self, *_: object) -> None:
        self._steps.pop()

    def _learn(self, root: nn.Module) -> None:
        """Name a tree of modules, the first with weights without a prefix, and hook its gradients."""
        first = next(root.parameters(), None) is not None and "" not in self._names.values()
        prefix = [] if first else [type(root).__name__]
        for name, module in root.named_modules():
            self._names.setdefault(module, ".".join([*prefix, *filter(None, [fqn(name)])]))
        for name, parameter in root.named_parameters():
            if parameter.is_leaf and parameter.requires_grad:
                hook = partial(self._on_gradient, ".".join([*prefix, fqn(name)]))
                self._stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
                # It must come before the hook of an optimizer that uses each gradient up at once, and the
                # engine reads the dict in the order of insertion, whatever move_to_end says.
                hooks = gradient_hooks(parameter)
                others = list(hooks.items())[:-1]
                for key, _ in others:
                    del hooks[key]
                hooks.update(others)

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.gradients[name] = parameter.grad
            self.check("gradient", name, parameter.grad)

    def enter_module(self, module: nn.Module, args: Any = ()) -> None:
        """Note that a module's forward begins, or that it did before the tape."""
        if module not in self._names:
            self._learn(module)
        self._running.append(module)

    def _leave_module(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._running and self._running[-1] is module:
            self._running.pop()

    def check(self, kind: str, name: str, value: Tensor) -> bool:
        """Note `value` as an end of the step; return whether it is finite."""
        with disable_current_modes():
            finite = is_finite(value)
        if finite:
            return True
        origins, _ = self._bad.get(_storage(value), (frozenset(), value))
        self.ends.append(End(kind, name, origins))
        return False

    def note_read(self, value: Tensor) -> None:
        """Note a value that is not finite and that the script reads, as its guards do; not what we read."""
        reader = next(f.f_code.co_filename for f in _stack() if f.f_code.co_name not in _RELAYS)
        if reader.startswith(_HERE) and not is_users(reader):
            return
        with disable_current_modes():
            origins, _ = self._bad.get(_storage(value), (frozenset[int](), value))
            if not origins:  # no op made it: it came so
                phase, file, line = call_site()
                location = OpLocation("", "", None, file, line)
                node = Node(len(self.nodes), torch.ops.aten.isfinite.default, phase or "forward", location)
                node.outside, node.names = [value], users_names([value])
                self.nodes.append(node)
                origins = frozenset([node.index])
            if not all(i in self.candidates and self.candidates[i].intended for i in origins):
                self.reads.append(End("loss", "loss", origins))

    def end_early(self, error: BaseException | None) -> None:
        """Take what was read for the ends of a step that has no other; else what the error is about."""
        about = _OF_VALUES.search(str(error)) if error is not None else None
        origins = frozenset(i for i, node in self.candidates.items() if not node.intended and about)
        self.ends = self.ends or self.reads or ([End("loss", "loss", origins)] if origins else [])
        for index in {i for end in self.ends for i in end.origins}:
            self.candidates.setdefault(index, self.nodes[index])

    def mark_backward(self, loss: Tensor) -> None:
        """Note where backward begins."""
        if self.check("loss", "loss", loss):
            with disable_current_modes():
                self.root_amax = max(self.root_amax, float(amax(loss)) if loss.numel() == 1 else 0.0)

    def _phase(self, stack_phase: str) -> str:
        in_closure = self._steps[-1:] == [True] and (torch.is_grad_enabled() or graph_task() != -1)
        if self._steps and not in_closure:
            return "optimizer"
        if graph_task() != -1:
            self.backward_seen = True
            return stack_phase or "backward"
        after = (
            self.backward_seen
            and not torch.is_grad_enabled()
            and not (self._running and self._names[self._running[-1]])
        )
        return "optimizer" if after else "forward"

    def _locate(self, func: Any) -> tuple[str, OpLocation]:
        stack_phase, file, line = call_site()
        phase = self._phase(stack_phase)
        sequence = sequence_number() - 1
        function, call, region = self.calls[-1] if self.calls else (None, 0, False)
        module = self._running[-1] if self._running else None
        path, kind = ("", "") if module is None else (self._names[module], type(module).__name__)
        location = OpLocation(path, kind, function, file, line, "", call, region)
        if phase != "backward":
            if not file:
                location = self._lines.get(location.module, location)
            self._lines.setdefault(location.module, location)
            entries = self._locations.setdefault(sequence, [])
            if not entries or phase == "recompute":
                entries.append((schema_of(func).name.split("::")[-1], location))
            return phase, location
        return phase, self._forward_location(location)

    def _forward_location(self, op_location: OpLocation) -> OpLocation:
        """Return the forward call of the running backward node; a custom backward keeps its own line."""
        node: Any = running_node()
        sequence = _NO_SEQUENCE if node is None else node_number(node)
        entries = self._locations.get(sequence) if sequence < _NO_SEQUENCE else None
        if node is None or not entries:
            file, line = self.backward_call
            return op_location if op_location.file else replace(op_location, file=file, line=line)
        name = node.name().lower()
        matching = (s for base, s in reversed(entries) if base.replace("_", "") in name)
        location = next(matching, entries[-1][1])
        if op_location.file:
            module, kind, region = location.module, location.module_class, location.in_region
            return replace(op_location, module=module, module_class=kind, node=node.name(), in_region=region)
        return replace(location, node=node.name())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one kernel and record it."""
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        if "c10d" in func.namespace or func.namespace == "fsdp":  # fsdp's lay out memory for collectives
            return self._collective(func, args, kwargs)
        phase, location = self._locate(func)
        node = Node(len(self.nodes), func, phase, location)
        written = tensors_written(func, args, kwargs)
        # What an op overwrites is copied first: its re-run needs the values it was given.
        copies = {id(t): t.detach().clone() for t in written if t.layout == torch.strided}
        for t in written:
            if id(t) in copies:
                self.originals.setdefault(key_of(t), copies[id(t)])
        leaves, spec = pytree.tree_flatten((args, kwargs))
        inputs = [x for x in leaves if isinstance(x, Tensor)]
        node.parents = [self._maker(t) for t in inputs]
        node.args, node.kwargs = pytree.tree_unflatten([copies.get(id(x), x) for x in leaves], spec)
        out = func(*args, **kwargs)
        results = [*tensors_in(out), *(t for t in written)]
        if node.base in _UNWRITTEN:
            return out
        node.outs = results
        if node.base in _ARRIVES:
            return out
        self.nodes.append(node)
        self._count(node, results, inputs)
        bad = self._judge(node, inputs, copies)
        for observer in self._observers:
            observer(node, not bad)
        for place, t in enumerate(results):
            # Autograd counts an op's own write later than here (`_foreach` ones not at all), and gives a view
            # the count of what it shows.
            version = _version(inputs[0] if func.is_view and inputs else t)
            self._made[key_of(t)] = node, place, (version, version + (id(t) in copies))
        self._keep(node, bad)
        return out

    def _maker(self, t: Tensor) -> tuple[Node, int] | None:
        """Return the op that wrote `t`; None where it was written since, through another view."""
        entry = self._made.get(key_of(t))
        return entry[:2] if entry is not None and _version(t) in entry[2] else None

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record a collective, which is not rerun: it would wait for the other ranks, or is not over.

        Faults of this rank's inputs are followed through; those of others show when the result is read.
        """
        self.used_collectives = True
        out = func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        origins = [self._bad[_storage(t)][0] for t in inputs if _storage(t) in self._bad]
        for t in (*inputs, *tensors_in(out)):
            self._received[_storage(t)] = t
            if origins:
                self._bad.setdefault(_storage(t), (frozenset().union(*origins), t))
        return out

    def was_received(self, t: Tensor) -> bool:
        """Whether a collective wrote the memory of `t`."""
        return _storage(t) in self._received

    def _count(self, node: Node, results: list[Tensor], inputs: list[Tensor]) -> None:
        if node.func.is_view or node.base in _UNCOUNTED or node.func.namespace == "halfstep":
            return
        dtype = next((t.dtype for t in (*results, *inputs) if t.is_floating_point()), None)
        if dtype is not None:
            self.counts[(node.phase, node.op, dtype_name(dtype))] += 1

    def _judge(self, node: Node, inputs: list[Tensor], copies: dict[int, Tensor]) -> bool:
        """Decide whether the node's results are finite, and whether it is an origin or passed it on."""
        if node.func.is_view:
            return False
        looked = node.outs[:1] if node.base.startswith(_ONLY_FIRST) else node.outs
        nonfinite = [t for t in looked if not is_finite(t)]
        if not nonfinite:
            self._note_swallowed(node, inputs, copies)
            for t in looked:
                self._bad.pop(_storage(t), None)
            return False
        unread = copies if node.base in _OVERWRITES else {}
        culprits = [t for t in inputs if id(t) not in unread and not is_finite(copies.get(id(t), t))]
        entries = [self._bad.get(_storage(t)) for t in culprits]
        node.outside = [t for t, k in zip(culprits, entries) if k is None]
        node.origins = frozenset().union(*(k[0] for k in entries if k is not None))
        if node.outside and not node.origins and node.base in _MOVES and node.phase == "forward":
            return False
        fresh_nan = _has_nan(nonfinite) and not any(_has_nan([copies.get(id(t), t)]) for t in culprits)
        masks = all(self.candidates[i].intended for i in node.origins)
        if not culprits or node.outside or (masks and fresh_nan):
            node.intended = (not culprits and _writes_infinity(node)) or _adds_mask(node, nonfinite)
            node.origins |= {node.index}
            self.candidates[node.index] = node
            if len(self.candidates) <= 16:
                node.names = users_names([copies.get(id(t), t) for t in inputs])
        else:
            self.passed.append(node)
        for t in nonfinite:
            self._bad[_storage(t)] = (node.origins, t)
        return True

    def _note_swallowed(self, node: Node, inputs: list[Tensor], copies: dict[int, Tensor]) -> None:
        """Note an op that takes in nonfinite values and gives finite ones: a softmax over a mask may."""
        if not self._bad or node.base.endswith(_MAY_SWALLOW) or node.base in _OVERWRITES:
            return
        if not any(t.is_floating_point() for t in node.outs):
            return
        for t in inputs:
            entry = self._bad.get(_storage(t))
            if entry is not None and not is_finite(copies.get(id(t), t)):
                self.swallowed.append((node, entry[0]))

    def _keep(self, node: Node, bad: bool) -> None:
        """Keep arguments and results while the budget lasts; those of origins always."""
        if bad and node.index in self.candidates and len(self.candidates) <= 16:
            node.args, node.kwargs = _detach(node.args), _detach(node.kwargs)
            return
        size = sum(t.numel() * t.element_size() for t in node.outs)
        self._kept[node.index] = (node, size)
        self._left -= size
        while self._left < 0 and self._kept:
            old, freed = self._kept.popitem(last=False)[1]
            self._left += freed
            for t in old.outs:
                if self._made.get(key_of(t), (None,))[0] is old:
                    del self._made[key_of(t)]
            old.args, old.kwargs, old.outs, old.parents, old.dropped = (), None, [], [], True


def _detach(tree: Any) -> Any:
    leaves, spec = pytree.tree_flatten(tree)
    return pytree.tree_unflatten([x.detach().clone() if isinstance(x, Tensor) else x for x in leaves], spec)


def tensors_written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that the op changes in place, by its schema, and running statistics."""
    tensors: list[Tensor] = []
    for i, argument in enumerate(schema_of(func).arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in ("running_mean", "running_var"):
            value = args[i] if i < len(args) else (kwargs or {}).get(argument.name)
            tensors += tensors_in(value)
    return tensors


def _has_nan(tensors: list[Tensor]) -> bool:
    return any(bool(torch.isnan(t).any()) for t in tensors if t.is_floating_point() or t.is_complex())


def _writes_infinity(node: Node) -> bool:
    """Whether the op's arguments ask for an infinity (`masked_fill(mask, -inf)`): a mask."""
    if node.base.removesuffix("_") not in _FILLS:
        return False
    scalars = [x for x in pytree.tree_flatten((node.args, node.kwargs))[0] if isinstance(x, float)]
    return any(math.isinf(x) for x in scalars)


def _adds_mask(node: Node, nonfinite: list[Tensor]) -> bool:
    """Whether all inputs from before the step are a mask of zeros and -inf, and the op applied it."""
    if node.base not in ("add", "add_", "baddbmm") or not node.outside or _has_nan(nonfinite):
        return False
    return all(bool(((t == 0) | (t == -math.inf)).all()) for t in node.outside)


class _Calls(CallMode):
    """A mode that records which torch function the user called, and the root of each backward."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)

    def on_backward(self, func: Any, args: Any) -> None:
        self._tape.backward_call = call_site()[1:]
        if func is torch.Tensor.backward:
            self._tape.mark_backward(args[0])

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        tape = self._tape
        tape.call_count += 1
        if getattr(func, "__name__", "") in READS and reads_nonfinite(func.__name__, args):
            tape.note_read(args[0])
        # As the user's call sees it: where kernels run torch hides autocast.
        in_region = any(torch.is_autocast_enabled(kind) for kind in self._devices)
        tape.calls.append((func, tape.call_count, in_region))
        try:
            return func(*args, **kwargs)
        finally:
            tape.calls.pop()
