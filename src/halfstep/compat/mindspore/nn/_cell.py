"""Cell: torch.nn.Module with MindSpore's method names. Precision is `halfstep.to_float`'s."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch

from halfstep.casting.context import active_policy, autocast
from halfstep.compat.mindspore._functions import signature_of
from halfstep.compat.mindspore._tensor import Parameter, check_kind, check_whole
from halfstep.compat.mindspore.common.initializer import initialize
from halfstep.compat.mindspore.dtype import bfloat16, float16, float32
from halfstep.compat.mindspore.ops import Primitive
from halfstep.convert.hooks import to_float
from halfstep.errors import ConfigError, UnsupportedError, warn

__all__ = ["Cell"]


class NothingToRun(UnsupportedError, AttributeError):
    """A Cell whose class does not say what it computes; an AttributeError as in MindSpore."""


class Cell(torch.nn.Module):
    """A module whose computation is `construct`; evaluation mode until `set_train()`, as in MindSpore.

    Any torch.nn.Module may sit inside a Cell, and a Cell inside any Module.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let `construct` and torch's `forward` be one method, whichever a class defines."""
        super().__init_subclass__(**kwargs)
        namespace = vars(cls)
        if "construct" in namespace and "forward" not in namespace:
            cls.forward = Cell.forward
        elif "construct" not in namespace and cls.forward is not Cell.forward:
            cls.construct = cls.forward

    def __init__(self, auto_prefix: bool = True, flags: Mapping[str, Any] | None = None) -> None:
        """MindSpore's arguments are taken: names here are paths in any case, and no graph has flags."""
        super().__init__()
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run `construct`."""
        return self.construct(*args, **kwargs)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Compute; to be defined by every Cell."""
        raise NothingToRun(f"{type(self).__name__} has no construct(): define what it computes")

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Keep parameters with MindSpore's methods."""
        if type(param) is torch.nn.Parameter:
            param = Parameter(param.data, name, param.requires_grad)
        super().register_parameter(name, param)

    def to_float(self, dst_type: torch.dtype) -> Self:
        """Make this cell and all in it compute in `dst_type`; the last call wins (`halfstep.to_float`).

        Raises ValueError for anything but float16, bfloat16 and float32.
        """
        if dst_type not in (float16, float32, bfloat16):
            raise ConfigError(
                "For 'to_float', the argument 'dst_type' must be mstype.float32, mstype.float16 or "
                f"mstype.bfloat16, but got type: {type(dst_type)} and value: {dst_type}."
            )
        to_float(self, dst_type, keep_parts=True)
        return self

    def set_train(self, mode: bool = True) -> Self:
        """Training mode on or off, for everything inside."""
        return self.train(mode)

    def _ignore(self, *_given: Any, **_named: Any) -> Self:
        """Taken, with nothing to do: cells run as written and alone, gradients flow where asked for."""
        return self

    set_grad = add_flags = set_inputs = set_broadcast_flag = set_jit_config = _ignore

    def recompute(self, **mode: Any) -> None:
        """Told to save no memory here: see torch.utils.checkpoint."""
        warn(
            f"{type(self).__name__}.recompute() saves no memory here; wrap the call in "
            "torch.utils.checkpoint.checkpoint instead"
        )

    def insert_child_to_cell(self, child_name: str, child_cell: torch.nn.Module) -> None:
        """Put a cell inside by name."""
        self.add_module(child_name, child_cell)

    def insert_param_to_cell(self, param_name: str, param: Any, check_name_contain_dot: bool = True) -> None:
        """Put a parameter inside by name."""
        self.register_parameter(param_name, param)

    def parameters_and_names(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """(name, parameter) of everything inside; `parameter.name` is set to it."""
        for name, parameter in self.named_parameters():
            if isinstance(parameter, Parameter):
                parameter.name = name
            yield name, parameter

    def get_parameters(self) -> Iterator[torch.nn.Parameter]:
        """All parameters; their `name` is set to their path."""
        return (parameter for _, parameter in self.parameters_and_names())

    def trainable_params(self) -> list[torch.nn.Parameter]:
        """The parameters that get gradients, as optimizers take them."""
        return [p for p in self.get_parameters() if p.requires_grad]

    def untrainable_params(self) -> list[torch.nn.Parameter]:
        """The parameters that get none."""
        return [p for p in self.get_parameters() if not p.requires_grad]

    def parameters_dict(self) -> OrderedDict[str, torch.nn.Parameter]:
        """Parameters by name."""
        return OrderedDict(self.parameters_and_names())

    def cells(self) -> list[torch.nn.Module]:
        """The cells directly inside."""
        return list(self.name_cells().values())

    def name_cells(self) -> OrderedDict[str, torch.nn.Module]:
        """The cells directly inside, by name."""
        return OrderedDict((n, c) for n, c in self.named_children() if not isinstance(c, Primitive))

    def cells_and_names(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """(path, cell) of this cell and of everything inside."""
        return self.named_modules()


def in_dtype_of(x: torch.Tensor, weight: torch.Tensor) -> AbstractContextManager[Any]:
    """The region in which an fp32 weight meets a tensor that was cast by hand: ops run in the tensor's dtype.

    (MindSpore 2.10 refuses the mix on the CPU, and asks for `to_float`.)
    """
    by_hand = x.dtype in (float16, bfloat16) and weight.dtype == float32
    if by_hand and active_policy(x.device.type) is None:
        return autocast(x.device.type, x.dtype, policy="low")
    return nullcontext()


def promotes(x: torch.Tensor) -> bool:
    """Whether a bias addition promotes here: MindSpore adds it after the product, in the widest dtype."""
    policy = active_policy(x.device.type)
    return policy is not None and policy.table == "mindspore"


# --- layers as rows ---

_COUNTS = {
    *("in_channels", "out_channels", "group", "num_features", "num_groups", "num_channels"),
    *("vocab_size", "embedding_size", "embed_dim", "num_heads", "input_size", "hidden_size", "num_layers"),
}
_SIZES = {"kernel_size", "stride", "dilation"}
_CALLED = {
    "alpha": "negative_slope",
    "axis": "dim",
    "embedding_size": "embedding_dim",
    "epsilon": "eps",
    "group": "groups",
    "has_bias": "bias",
    "vocab_size": "num_embeddings",
}
"""What torch's layers call the arguments that MindSpore's call otherwise."""
_BEGIN = {
    "weight_init": "weight",
    "bias_init": "bias",
    "gamma_init": "weight",
    "beta_init": "bias",
    "embedding_table": "weight",
}
"""Parameters, by the argument that says how they begin."""
_OURS = {"activation", "pad_mode", "use_one_hot"}


class Renamed:
    """Before a layer of torch's among the bases: MindSpore's names, order and defaults of its arguments.

    They stand in the class statement, `...` for no default; those in `by_name` are given by name only. Each
    becomes an attribute where torch's layer has none of that name; what a call gives beyond them is torch's.
    """

    __signature__: inspect.Signature

    def __init_subclass__(cls, by_name: Collection[str] = (), **takes: Any) -> None:
        super().__init_subclass__()
        if takes:
            cls.__signature__ = signature_of(takes, by_name)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        parameters = type(self).__signature__.parameters
        more = {name: value for name, value in kwargs.items() if name not in parameters}
        bound = type(self).__signature__.bind(*args, **{n: v for n, v in kwargs.items() if n in parameters})
        bound.apply_defaults()
        arguments: dict[str, Any] = bound.arguments
        for name, value in arguments.items():
            _check(self, name, value)
        base: Any = super()
        base.__init__(**self._for_torch(arguments), **more)
        for name, value in arguments.items():
            if name in _BEGIN:
                initialize(getattr(self, _BEGIN[name]), value)
            elif not hasattr(self, name):
                setattr(self, name, value)

    def _for_torch(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of torch's layer."""
        named = {n: value for n, value in arguments.items() if n not in _BEGIN and n not in _OURS}
        return {_CALLED.get(name, name): value for name, value in named.items()}


def _check(layer: Any, name: str, value: Any) -> None:
    """TypeError for a value of another kind, ValueError for a number below 1, as in MindSpore."""
    owner = type(layer).__name__
    if name == "has_bias":
        check_kind(owner, name, value, bool)
    if name == "normalized_shape":
        check_kind(owner, name, value, tuple, list)
    if name == "reduction":
        check_reduction(owner, value)
    sizes: Any = value if isinstance(value, tuple) and name in _SIZES else (value,)
    for size in sizes if name in _COUNTS | _SIZES else ():
        check_whole(owner, name, size)


def check_reduction(owner: str, value: Any) -> None:
    """ValueError for what is no way to make one number of many."""
    if value not in ("none", "mean", "sum"):
        raise ConfigError(
            f"For '{owner}', the 'reduction' must be in ['none', 'mean', 'sum'], but got {value}."
        )
