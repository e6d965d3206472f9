"""ops that take functions (GradOperation, HyperMap, MultitypeFuncGraph) and others of training cells."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from halfstep.compat.mindspore._tensor import as_tensor, plain_tensor
from halfstep.errors import ConfigError, UnsupportedError

_KINDS: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,),
    "Number": (int, float),
    "Int64": (int,),
    "Float32": (float,),
    "Bool": (bool,),
    "Tuple": (tuple,),
    "List": (list,),
    "String": (str,),
    "None": (type(None),),
}


class GradOperation:
    """Makes gradient functions: `GradOperation(get_by_list=True)(network, weights)(*inputs)`.

    Args:
        get_all: gradients by all inputs, not by the first alone.
        get_by_list: gradients by the weights given (a Cell's trainable parameters if none are).
        sens_param: the last argument of the call is the gradient of the output, ones otherwise.
    """

    def __init__(self, get_all: bool = False, get_by_list: bool = False, sens_param: bool = False) -> None:
        for name, value in {"get_all": get_all, "get_by_list": get_by_list, "sens_param": sens_param}.items():
            if not isinstance(value, bool):
                raise TypeError(
                    f"For 'GradOperation', the '{name}' should be bool, but got {type(value).__name__}"
                )
        self.get_all, self.get_by_list, self.sens_param = get_all, get_by_list, sens_param

    def __call__(self, fn: Callable[..., Any], weights: Any = None) -> Callable[..., Any]:
        """A function of the inputs of `fn` (and `sens`) that gives gradients."""
        if self.get_by_list and weights is None:
            weights = getattr(fn, "trainable_params", list)()
        single = isinstance(weights, torch.Tensor)
        by_weight = [weights] if single else list(weights or ())

        def gradients(*inputs: Any) -> Any:
            inputs, sens = (inputs[:-1], inputs[-1]) if self.sens_param else (inputs, None)
            by_input = [
                as_tensor(x.detach()).requires_grad_()
                if isinstance(x, torch.Tensor) and x.is_floating_point()
                else x
                for x in inputs
            ]
            found = [x for x in by_input if isinstance(x, torch.Tensor) and x.requires_grad]
            if not (self.get_all or self.get_by_list):
                found = found[:1]
            wanted = found if self.get_all or not self.get_by_list else []
            with torch.enable_grad():
                outputs = fn(*by_input)
            grads = _backward(outputs, sens, [*wanted, *by_weight])
            of_inputs, of_weights = grads[: len(wanted)], grads[len(wanted) :]
            of_weights = of_weights[0] if single else of_weights
            if self.get_all and self.get_by_list:
                return of_inputs, of_weights
            if self.get_by_list:
                return of_weights
            return of_inputs if self.get_all else of_inputs[0]

        return gradients


def _backward(outputs: Any, sens: Any, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
    given = [plain_tensor(t) for t in (outputs if isinstance(outputs, tuple | list) else [outputs])]
    factors = sens if isinstance(sens, tuple | list) else [sens] * len(given)
    pairs = [(t, f) for t, f in zip(given, factors) if t.requires_grad]
    ones = [
        torch.ones_like(t) if f is None else torch.as_tensor(f, dtype=t.dtype).expand(t.shape)
        for t, f in pairs
    ]
    found = torch.autograd.grad([t for t, _ in pairs], inputs, ones, allow_unused=True) if pairs else ()
    found = found or (None,) * len(inputs)
    return tuple(as_tensor(torch.zeros_like(t) if g is None else g).detach() for t, g in zip(inputs, found))


class MultitypeFuncGraph:
    """A function with one body for each combination of kinds: `@graph.register("Tensor", "Number")`."""

    def __init__(self, name: str, read_value: bool = False) -> None:
        self.name = name
        self._bodies: list[tuple[tuple[str, ...], Callable[..., Any]]] = []

    def register(self, *type_names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorate the body for these kinds of arguments ("Tensor", "Number", "Bool", "Tuple" ...)."""
        if unknown := [name for name in type_names if name not in _KINDS]:
            raise UnsupportedError(
                f"{self.name}.register({unknown[0]!r}): expected one of {', '.join(_KINDS)}"
            )

        def keep(body: Callable[..., Any]) -> Callable[..., Any]:
            self._bodies.append((type_names, body))
            return body

        return keep

    def __call__(self, *args: Any) -> Any:
        """Run the body that fits; TypeError where none does."""
        for names, body in self._bodies:
            if len(names) == len(args) and all(isinstance(a, _KINDS[n]) for a, n in zip(args, names)):
                return body(*args)
        kinds = ", ".join(type(a).__name__ for a in args)
        raise TypeError(f"For '{self.name}', no body is registered for ({kinds})")


class HyperMap:
    """Applies a function to the leaves of tuples and lists side by side, as in `HyperMap()(f, gradients)`."""

    def __init__(self, ops: Callable[..., Any] | None = None, reverse: bool = False) -> None:
        self._function = ops

    def __call__(self, *args: Any) -> Any:
        """`function` (unless given before) and one or more nests of the same form."""
        function, nests = (args[0], args[1:]) if self._function is None else (self._function, args)
        return _mapped(function, *nests)


def _mapped(function: Callable[..., Any], *nests: Any) -> Any:
    if isinstance(nests[0], tuple | list):
        return tuple(_mapped(function, *parts) for parts in zip(*nests, strict=True))
    return function(*nests)


partial = functools.partial


def depend(value: Any, expr: Any) -> Any:
    """`value`; `expr` was computed before it, since everything runs in the order written."""
    return value


def clip_by_value(x: Any, clip_value_min: Any = None, clip_value_max: Any = None) -> Any:
    """Every tensor of `x` held between the bounds."""
    if isinstance(x, tuple | list):
        return type(x)(clip_by_value(t, clip_value_min, clip_value_max) for t in x)
    return as_tensor(torch.clamp(x, clip_value_min, clip_value_max))


def clip_by_global_norm(x: Any, clip_norm: float = 1.0, use_norm: Any = None) -> tuple[Any, ...]:
    """The tensors times clip_norm / max(clip_norm, their norm together), which is taken in fp32."""
    if use_norm is not None:
        raise ConfigError("For 'clip_by_global_norm', 'use_norm' must be None, as in MindSpore")
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t.float()) for t in x]))
    factor = clip_norm / norm.clamp(min=clip_norm)
    return tuple(as_tensor((t.float() * factor).to(t.dtype)) for t in x)


def clip_by_norm(x: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Any:
    """A tensor, or tensors side by side, times min(1, max_norm / their norm together), taken in fp32.

    Raises:
        RuntimeError: with `error_if_nonfinite`, a norm that is inf or NaN.
    """
    listed = [x] if isinstance(x, torch.Tensor) else list(x)
    norms = torch.stack([torch.linalg.vector_norm(t.float(), norm_type) for t in listed])
    total = torch.linalg.vector_norm(norms, norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise UnsupportedError(f"clip_by_norm: the norm of order {norm_type} is {total.item()}")
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    clipped = tuple(as_tensor((t.float() * factor).to(t.dtype)) for t in listed)
    return clipped[0] if isinstance(x, torch.Tensor) else clipped


def tuple_to_array(input_x: tuple[Any, ...]) -> Any:
    """A tensor of the numbers of a tuple."""
    return as_tensor(torch.tensor(input_x))
