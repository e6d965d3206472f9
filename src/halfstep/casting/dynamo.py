"""What `torch.compile` must know of regions: which frames of ours are not to be compiled, and that a region
made outside compiled code is a context manager all the same.

Dynamo traces into the functions of a region when it meets them inside code that it compiles. When the code
breaks the graph, Python calls the same functions, and Dynamo must let these calls be: a region that is
compiled on its own changes nothing outside its graph.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_eval_frame: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
_skip = _eval_frame._FrameAction.SKIP
_BUILDER = "torch._dynamo.variables.builder"


def not_compiled(function: F) -> F:
    """Decorate a function whose own frame, and those it calls, Dynamo runs as they are.

    Called from code that is being compiled it is still traced into.
    """
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(_skip, _skip))
    return function


def never_compiled(function: F) -> F:
    """Decorate a function that Dynamo neither compiles nor traces into: code that calls it breaks there."""
    function._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]
    return not_compiled(function)


def constant_when_traced(function: F) -> F:
    """Decorate a function that Dynamo calls once, putting the answer into the graph.

    That is what `torch.compiler.assume_constant_result` does, which imports Dynamo.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def put_back_when_broken(device_types: Sequence[str]) -> None:
    """Have autocast's dtypes of these devices restored when the trace that is under way comes to its end.

    Dynamo restores everything else that a trace changes, and fails where this differs.
    """
    translator = sys.modules.get("torch._dynamo.symbolic_convert")
    if translator is None:
        return
    before = [(kind, torch.get_autocast_dtype(kind)) for kind in device_types]

    def put_back() -> None:
        for kind, dtype in before:
            torch.set_autocast_dtype(kind, dtype)

    tracing = getattr(translator.tls, "current_tx", None)
    if tracing is not None:  # export that traces without Dynamo has none
        tracing.output.add_cleanup_hook(put_back)


def traced_from_outside(kind: type) -> None:
    """Let Dynamo enter instances of a context manager that were made outside the code it compiles.

    It does so for instances made inside, and for torch's own managers; others it refuses, or breaks the graph
    at. Works on Dynamo once that is imported, which torch does at the first compilation.
    """
    _kinds.append(kind)
    if _BUILDER in sys.modules:
        _teach(sys.modules[_BUILDER])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


_kinds: list[type] = []


def _teach(builder: ModuleType) -> None:
    made: Any = builder.VariableBuilder
    wrap = made._wrap
    if getattr(wrap, "_knows_regions", False):
        return
    from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable

    def _wrap(self: Any, value: Any) -> Any:
        if not isinstance(value, tuple(_kinds)):
            return wrap(self, value)
        self.install_guards(builder.GuardBuilder.TYPE_MATCH)
        variable = GenericContextWrappingVariable(value, source=self.source)
        return self.tx.output.side_effects.track_object_existing(value, variable)

    _wrap._knows_regions = True  # pyright: ignore[reportFunctionMemberAccess]
    made._wrap = _wrap


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls `_teach` once Dynamo's builder has been imported, then is gone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the builder as the other finders do, with a loader that teaches it."""
        if fullname != _BUILDER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_teach(module: ModuleType) -> None:
                load(module)
                _teach(module)

            spec.loader.exec_module = load_and_teach
        return spec
