"""Torch's private names that halfstep uses, each with what it is for and what is lost without it.

A torch that lacks one gets another way, or an UnsupportedError that names it at the first use. No other
module may use a private name of torch: `tests/test_torch_private.py` finds those that do, and names what a
new torch lacks. Not counted as private: `_version` of tensors (torch's notes on autograd tell of it) and
`_parameters`, `_buffers` and `_modules` of modules, which every torch has had.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import math
import pkgutil
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from halfstep.errors import UnsupportedError

__all__ = [
    "DispatchKey",  # the type of a dispatch key: the keys under which autocast's kernels stand
    "OpOverload",  # the type of an op: tables of rules and kernels are by op
    "OpOverloadPacket",  # the type of an op's overloads: `policy.with_rules` is given functions
    "TorchDispatchMode",  # sees every op below autograd: the tape, the doctor, measured FLOPs and memory
    "is_traceable_wrapper_subclass",  # tells quantised and other wrapped weights, which optimizers refuse
    "pytree",  # nests of tensors, cast and moved as torch does: region inputs and outputs, hooks, replays
]

_SAVED = "to save 16-bit tensors for backward"
_BELOW = "to run an op below its cast"
_CALLER = "to know in backward which thread called it"
_HOOKS = "to call every optimizer's hooks"
_MANY = "to work on many tensors at once"
_STATISTICS = "to keep running statistics in fp32"
_FOREACH = ("norm", "add_", "addcmul_", "copy_", "div", "mul_", "sqrt")

#: Name here: torch's name without "torch.", and for what.
_NAMES = {
    # --- which op runs, where ---
    "dispatch_key": ("_C._dispatch_key_parse", "to cast on a device that torch has no autocast list for"),
    "has_kernel": ("_C._dispatch_has_kernel", "to give rules to the ops that this torch has"),
    "has_kernel_for": ("_C._dispatch_has_kernel_for_dispatch_key", "to see what torch itself casts"),
    "has_fallback": ("_C._dispatch_has_backend_fallback", "to let ops without a rule through on own devices"),
    "all_op_names": ("_C._dispatch_get_all_op_names", "to know which ops a rule can be for"),
    "exclude_key": ("_C._dispatch_tls_set_dispatch_key_excluded", _BELOW),
    "is_key_excluded": ("_C._dispatch_tls_is_dispatch_key_excluded", _BELOW),
    "keys_below": ("_C._dispatch_keyset_full_after", _BELOW),
    "without_subclasses": ("_C.DisableTorchFunctionSubclass", "to read a shard's gradient without its class"),
    "nn_functions": ("_C._nn", "to know ops by the functions that users name"),
    # --- autograd ---
    "graph_task": ("_C._current_graph_task_id", "to tell ops in backward from ops in forward"),
    "running_node": ("_C._current_autograd_node", "to run backward in the dtype of its forward"),
    "sequence_number": ("_C._autograd._get_sequence_nr", "to know under which region a node was made"),
    "has_thread_state": ("_C._is_key_in_tls", _CALLER),
    "thread_state": ("_C._get_obj_in_tls", _CALLER),
    "functorch_level": ("_C._functorch.maybe_current_level", "to leave ops inside vmap and grad to torch"),
    "is_jit_tracing": ("_C._is_tracing", "to leave ops that torch.jit traces to torch"),
    "can_save_hooks": ("_C._autograd._saved_tensors_hooks_is_enabled", _SAVED),
    "top_save_hooks": ("_C._autograd._top_saved_tensors_default_hooks", _SAVED),
    "profiling": ("autograd._profiler_enabled", "to show an optimizer's step in a profile"),
    # --- lists of tensors in one call ---
    "fused_attention_choice": ("_fused_sdp_choice", "to know which attention kernel torch runs"),
    "unscale_and_check": ("_amp_foreach_non_finite_check_and_unscale_", "to unscale and check at once"),
    **{f"foreach_{name}": (f"_foreach_{name}", _MANY) for name in _FOREACH},
    # --- modules ---
    "BatchNorm": ("nn.modules.batchnorm._BatchNorm", _STATISTICS),
    "InstanceNorm": ("nn.modules.instancenorm._InstanceNorm", _STATISTICS),
    "NormWithStatistics": ("nn.modules.batchnorm._NormBase", _STATISTICS),
    "Convolution": ("nn.modules.conv._ConvNd", "to try channels-last memory on every convolution"),
    # --- optimizers ---
    "disable_dynamo": ("_compile._disable_dynamo", "to keep step() out of compiled code without its import"),
    "global_step_pre_hooks": ("optim.optimizer._global_optimizer_pre_hooks", _HOOKS),
    "global_step_post_hooks": ("optim.optimizer._global_optimizer_post_hooks", _HOOKS),
    # --- tools that look ---
    "disable_current_modes": ("utils._python_dispatch._disable_current_modes", "to look without being seen"),
    "default_store": (
        "distributed.distributed_c10d._get_default_store",
        "to say what happened to a rank",
    ),
    "set_timeout": ("distributed.distributed_c10d._set_pg_timeout", "to notice a rank that hangs"),
}


def __getattr__(name: str) -> Any:
    """Return what torch calls otherwise; UnsupportedError where this torch does not have it."""
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, use = _NAMES[name]
    try:
        value = globals()[name] = pkgutil.resolve_name(f"torch.{path}")
    except (ImportError, AttributeError) as error:
        raise _lacking(f"torch.{path}", use) from error
    return value


def _lacking(name: str, use: str) -> UnsupportedError:
    return UnsupportedError(
        f"torch {torch.__version__} has no {name}, which halfstep needs {use}: use a torch that "
        "halfstep was tested with (its README names them), or a newer halfstep"
    )


def _of(owner: Any, name: str, use: str) -> Any:
    """Return the attribute of an object of torch's; UnsupportedError where there is none."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise _lacking(f"{type(owner).__name__}.{name}", use) from error


# --- ops, nodes, modules, wrappers -------------------------------------------------------------------------

#: An op's schema: its name, and which arguments are tensors, which decides what is cast.
schema_of = attrgetter("_schema")


def takes_scale_and_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step divides by a scale and skips by a flag on the device, as torch's GradScaler asks."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


#: `namespace::name`, by which rules know a packet of overloads.
overload_packet_name = attrgetter("_qualified_op_name")

#: What runs an op in C++; the overload object itself goes through Python first, at 1 us a call.
call_of = attrgetter("_op")

#: The number that autograd gave a node when forward made it.
node_number = methodcaller("_sequence_nr")

#: The values of a sparse tensor as they are stored; the public `values()` wants it coalesced.
stored_values = methodcaller("_values")

#: A parameter's hooks after its gradient, in order: the tape must come before an optimizer.
gradient_hooks = attrgetter("_post_accumulate_grad_hooks")

#: An optimizer's hooks before and after `load_state_dict`, which ours calls as torch's does.
load_hooks = attrgetter("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")

#: A module's hooks after `load_state_dict`, among which a prepared model has its session.
hooks_after_load = attrgetter("_load_state_dict_post_hooks")

#: A module's hooks before and after its forward, and torch's notes on them: without them a conversion cannot
#: find or remove its own hooks by their number, and lint finds none.
hooks_of = attrgetter(
    *("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)

#: Takes a library's kernels out of the dispatcher; torch does so only when the object dies.
destroy = methodcaller("_destroy")

#: The rank whose weights all take when ranks of `ddp.join()` have run out of batches.
joined_rank = attrgetter("_authoritative_rank")

#: Whether `ddp.join()` is entered.
is_joining = attrgetter("_join_config.enable")

#: An optimizer's own hooks before and after its step, which our step calls as torch's does.
step_hooks = attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@contextmanager
def engine_under(mode: Any) -> Generator[None]:
    """Within, autograd's engine runs with `mode` on, which else misses recomputation and own Functions."""
    autograd: Any = torch.autograd
    engine = autograd._engine_run_backward

    def within(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return engine(*args, **kwargs)

    autograd._engine_run_backward = within
    try:
        yield
    finally:
        autograd._engine_run_backward = engine


def memory_of(t: Tensor) -> int:
    """Return what tells one storage from another, fake ones too, which have no address."""
    return t.untyped_storage()._cdata


def has_load_hooks(optimizer: Any) -> bool:
    """Return whether `Optimizer.__init__` has run: a class that calls it late has no hooks before."""
    return hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks")


def check_same_shapes(group: Any, tensors: Sequence[Tensor]) -> None:
    """Ask, as DDP does first, whether all ranks have the same model; nothing where torch cannot."""
    check: Any = getattr(torch.distributed, "_verify_param_shape_across_processes", None)
    if check is not None:
        check(group, tensors)


def in_forward_ad() -> bool:
    """Return whether forward-mode differentiation is on, which functions of autograd do not support."""
    return forward_ad._current_level >= 0


def flat_weights(module: nn.Module) -> tuple[list[str], list[Any]] | None:
    """Return the names and weights that a recurrent layer passes to its kernel; None for another module."""
    weights: Any = getattr(module, "_flat_weights", None) if isinstance(module, nn.RNNBase) else None
    return None if weights is None else (cast(Any, module)._flat_weights_names, weights)


def set_flat_weights(module: nn.Module, weights: list[Any]) -> None:
    """Set the weights that a recurrent layer passes to its kernel: it does not look at its parameters."""
    cast(Any, module)._flat_weights = weights


def local_tensor(t: Any) -> Any:
    """Return a DTensor's memory on this rank without autograd, any other tensor itself."""
    return getattr(t, "_local_tensor", t)


def set_local_tensor(t: Any, like: Any) -> None:
    """Give a DTensor the memory and placement of another; `.data` alone keeps the old ones."""
    local, spec = like._local_tensor, like._spec
    t.data = like
    t._local_tensor, t._spec = local, spec


def place_of_shard(shape: Any, mesh: Any, placements: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and offsets of what this rank holds, by which files know the pieces of a tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)


def is_strided_shard(placement: Any) -> bool:
    """Return whether a placement cuts a dimension twice, whose pieces are not contiguous."""
    return type(placement).__name__ == "_StridedShard"


def is_one_box(t: Any) -> bool:
    """Return whether what a rank holds of a DTensor is one contiguous box of the whole.

    A strided shard is where shards of the same dimension after it make as many pieces as it skips over, which
    is how fully_shard over tensor parallelism cuts.
    """
    for number, placement in enumerate(t.placements):
        dim, later = getattr(placement, "dim", None), range(number + 1, len(t.placements))
        pieces = math.prod(t.device_mesh.size(d) for d in later if t.placements[d].is_shard(dim))
        if placement.is_partial() or (is_strided_shard(placement) and placement.split_factor != pieces):
            return False
    return True


def device_types(group: Any) -> set[str]:
    """Return the types of devices that a process group can send from."""
    return {device.type for device in group._device_types}


def ddp_ignored(ddp: Any) -> list[Tensor]:
    """Return the parameters that a DDP ignores by its arguments, and not those that it reduces late.

    Private: it lists the late ones among the ignored, and apart from them in this list alone.
    """
    late = {id(p) for p in getattr(ddp, "_delay_all_reduce_params", ())}
    named = ddp.module.named_parameters()
    return [p for name, p in named if name in ddp.parameters_to_ignore and id(p) not in late]


def comm_hooks(ddp: Any) -> Sequence[tuple[Any, Any]]:
    """Return the hooks that a DDP sends gradients through, to refuse fp16 ones at a bf16 level."""
    return getattr(ddp, "_comm_hooks", ())


# --- fully_shard -------------------------------------------------------------------------------------------

_SHARDS = "to prepare a model that fully_shard has cut up"


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return the groups of parameters that `fully_shard` made for this module; [] where it was not applied.

    FSDPModule tells its groups nowhere in public. Without them no 16-bit weights under `fully_shard`.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return []
    state = _of(module, "_get_fsdp_state", _SHARDS)()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = _of(state, "_fsdp_param_group", _SHARDS)  # torch 2.11 makes one group for a call
    return [] if group is None else [group]


def fsdp_shards(group: Any) -> list[Tensor]:
    """Return the shards of a group; while it is gathered, modules hold whole tensors instead."""
    return [_of(param, "sharded_param", _SHARDS) for param in _of(group, "fsdp_params", _SHARDS)]


def fsdp_has_read_dtypes(group: Any) -> bool:
    """Return whether a group has seen its first forward, after which it takes no other dtypes."""
    return any(hasattr(param, "orig_dtype") for param in _of(group, "fsdp_params", _SHARDS))


def fsdp_read_again(group: Any) -> None:
    """Make a group take the data that its parameters have now; it keeps references of its own to them."""
    for param in _of(group, "fsdp_params", _SHARDS):
        _of(param, "reset_sharded_param", _SHARDS)()


def fsdp_policy_holders(group: Any) -> list[Any]:
    """Return what has a `mp_policy` that the first forward reads: the group, each of its parameters, or both.

    A MixedPrecisionPolicy can be given to `fully_shard` and not changed later. Without it the levels cannot
    choose in which dtype fp32 shards are gathered.
    """
    holders = [h for h in (group, *_of(group, "fsdp_params", _SHARDS)) if hasattr(h, "mp_policy")]
    if not holders:
        raise _lacking(f"{type(group).__name__}.mp_policy", _SHARDS)
    return holders


# --- torch.compile -----------------------------------------------------------------------------------------
#
# Dynamo traces into the functions of a region when it meets them inside code that it compiles. When the code
# breaks the graph, Python calls the same functions, and Dynamo must let these calls be: a region that is
# compiled on its own changes nothing outside its graph.

F = TypeVar("F", bound=Callable[..., Any])

_BUILDER = "torch._dynamo.variables.builder"


def not_compiled(function: F) -> F:
    """Decorate a function whose own frame, and those it calls, Dynamo runs as they are.

    Called from code that is being compiled it is still traced into.
    """
    frames: Any = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
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


def allow_in_graph(kind: type) -> None:
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
    variable_builder: Any = builder.VariableBuilder
    wrap = variable_builder._wrap
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
    variable_builder._wrap = _wrap


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


def graph_break(why: str) -> None:
    """End the graph that Dynamo is making here; without it torch 2.11 cannot compile code with a region."""
    torch._dynamo.graph_break(why)


def dynamo_traces_autocast() -> bool:
    """Return whether Dynamo traces the functions that switch autocast; torch 2.11 does not.

    Where it does not, code that it compiles breaks at each region, and runs the region as it is.
    """
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    rule = getattr(rules, "manual_torch_name_rule_map", {}).get("torch._C.set_autocast_enabled")
    return rule is None or rule.__name__ != "SkipFunctionVariable"
