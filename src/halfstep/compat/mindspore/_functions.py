"""Function transforms and files under MindSpore's names: value_and_grad, grad, jit, set_seed, checkpoints."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from halfstep import checkpoint
from halfstep.compat.mindspore._tensor import Parameter, Tensor, as_tensor, check_kind, plain_tensor
from halfstep.errors import CheckpointError, ConfigError, UnsupportedError, warn
from halfstep.names import fqns
from halfstep.torch_private import pytree

__all__ = [
    "grad",
    "jit",
    "load_checkpoint",
    "load_param_into_net",
    "save_checkpoint",
    "set_seed",
    "value_and_grad",
]

Position = int | tuple[int, ...] | None


def value_and_grad(
    fn: Callable[..., Any],
    grad_position: Position = 0,
    weights: Any = None,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """A function that returns what `fn` returns, and gradients of it.

    With `has_aux=False` the gradients are those of the sum of ALL floating outputs of `fn`, every element of
    each, as in MindSpore 2.10: for `return loss, logits` the logits count. With `has_aux=True` only the
    first output is differentiated; write that where the others are for looking at.

    Args:
        fn: a Cell or function of tensors.
        grad_position: which positional arguments to differentiate by: a number, a tuple, or None.
        weights: a Parameter, or a sequence of them, or None.
        has_aux: whether outputs after the first are left out of the differentiation.

    Returns:
        A function giving (outputs, gradients): one gradient for a single position or Parameter, a tuple for
        several, a pair (by position, by weight) where both are given; zeros for what has no influence.

    A HalfstepWarning is issued once where `has_aux` is False and the outputs that count hold more than the
    loss, as logits returned with it do.

    Raises:
        ValueError: neither positions nor weights, or `has_aux` with a single output. TypeError: positions
            that are no integers, `has_aux` that is no bool. UnsupportedError (a RuntimeError): a position
            that the call has no argument for, or none at all.
    """
    _check_what(fn, grad_position, weights, has_aux)
    warned = has_aux

    @functools.wraps(fn)
    def value_and_gradients(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        nonlocal warned
        positions = () if grad_position is None else grad_position
        positions = (positions,) if isinstance(positions, int) else tuple(positions)
        by_weight = (
            [] if weights is None else [weights] if isinstance(weights, torch.Tensor) else list(weights)
        )
        inputs = list(args)
        if not positions and not by_weight:
            raise UnsupportedError(
                "value_and_grad got no position and no weight: nothing to differentiate by"
            )
        for i in positions:
            if not 0 <= i < len(inputs):
                raise UnsupportedError(
                    f"value_and_grad is to differentiate by argument {i}, but the call gave {len(inputs)} by "
                    "position"
                )
            inputs[i] = _differentiable(args[i], i)
        with torch.enable_grad():
            outputs = fn(*inputs, **kwargs)
            counted = _select_outputs(outputs, has_aux)
            warned = warned or _tell_of_more(getattr(fn, "__name__", type(fn).__name__), counted)
        grads = gradients_of(counted, [*(inputs[i] for i in positions), *by_weight])
        of_inputs = _one_or_all(grads[: len(positions)], len(positions) == 1)
        of_weights = _one_or_all(grads[len(positions) :], isinstance(weights, torch.Tensor))
        chosen = of_weights if grad_position is None else of_inputs
        both = weights is not None and grad_position is not None
        values = pytree.tree_map_only(torch.Tensor, lambda t: as_tensor(t.detach()), outputs)
        return values, (of_inputs, of_weights) if both else chosen

    return value_and_gradients


def _check_what(fn: Any, grad_position: Any, weights: Any, has_aux: Any) -> None:
    if not callable(fn):
        raise TypeError(f"For 'value_and_grad', 'fn' must be a function or Cell, but got {type(fn).__name__}")
    if grad_position is None and weights is None:
        raise ConfigError("`grad_position` and `weight` can not be None at the same time.")
    check_kind("value_and_grad", "has_aux", has_aux, bool)
    listed = grad_position if isinstance(grad_position, tuple | list) else (grad_position,)
    for position in listed:
        check_kind("value_and_grad", "grad_position", position, int, type(None))


def _differentiable(argument: Any, position: int) -> Tensor:
    if not isinstance(argument, torch.Tensor) or not argument.is_floating_point():
        kind = argument.dtype if isinstance(argument, torch.Tensor) else type(argument).__name__
        raise UnsupportedError(
            f"value_and_grad is to differentiate by argument {position}, which is {kind}: give a floating "
            "tensor (x.astype(ms.float32)), or name other positions"
        )
    leaf = as_tensor(argument.detach())
    leaf.requires_grad_()
    return leaf


def _tell_of_more(name: str, counted: list[torch.Tensor]) -> bool:
    """Warn where the first output is one number, a loss, and others are more; whether it did."""
    if len(counted) < 2 or counted[0].numel() != 1 or all(t.numel() == 1 for t in counted[1:]):
        return False
    shapes = ", ".join(str(list(t.shape)) for t in counted[1:])
    warn(
        f"{name} returns a loss and {shapes} beside it, and value_and_grad(has_aux=False) "
        "differentiates the sum of all of them, as in MindSpore: has_aux=True counts the loss alone"
    )
    return True


def _select_outputs(outputs: Any, has_aux: bool) -> list[torch.Tensor]:
    if has_aux:
        if not isinstance(outputs, tuple | list) or len(outputs) < 2:
            raise ValueError("When has_aux is True, origin fn requires more than one outputs.")
        outputs = outputs[0]
    leaves = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    return [plain_tensor(t) for t in leaves if t.is_floating_point() and t.requires_grad]


def gradients_of(outputs: list[torch.Tensor], inputs: list[torch.Tensor], factors: Any = None) -> Any:
    """Gradients of the outputs' sum, each times its factor; zeros for what has no influence."""
    ones = [torch.ones_like(t) for t in outputs] if factors is None else factors
    grads: Any = torch.autograd.grad(outputs, inputs, ones, allow_unused=True) if outputs else ()
    pairs = zip(inputs, grads or (None,) * len(inputs))
    return tuple(as_tensor(torch.zeros_like(t) if g is None else g).detach() for t, g in pairs)


def signature_of(takes: Mapping[str, Any], by_name: Collection[str] = ()) -> inspect.Signature:
    """Of arguments in this order with these defaults; `...` stands for none."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    none = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(name, kinds[name in by_name], default=none if default is ... else default)
            for name, default in takes.items()
        ]
    )


def _one_or_all(grads: tuple[Tensor, ...], single: bool) -> Any:
    return grads[0] if single else grads


def grad(
    fn: Callable[..., Any], grad_position: Position = 0, weights: Any = None, has_aux: bool = False
) -> Callable[..., Any]:
    """As `value_and_grad`, giving the gradients alone, or with `has_aux` (gradients, other outputs)."""
    both = value_and_grad(fn, grad_position, weights, has_aux)

    @functools.wraps(fn)
    def gradients(*args: Any, **kwargs: Any) -> Any:
        outputs, grads = both(*args, **kwargs)
        return (grads, tuple(outputs[1:])) if has_aux else grads

    return gradients


def jit(function: Callable[..., Any] | None = None, **_options: Any) -> Callable[..., Any]:
    """Decorate a function that MindSpore would compile; here it runs as written.

    A branch on a tensor (`if is_finite:`) therefore works, where `torch.compile(fullgraph=True)` refuses it;
    the price is one read of the flag a step. MindSpore's options are accepted and have no effect.
    """
    return jit if function is None else function


def set_seed(seed: int) -> None:
    """Seed weight initialisation, dropout and the shuffling of data sets."""
    torch.manual_seed(seed)


def save_checkpoint(save_obj: Any, ckpt_file_name: str | Path) -> None:
    """Write a network, or a list of {"name", "data"}, to a file, whole or not at all; ".ckpt" is added.

    The file is one of torch's (`halfstep.checkpoint`), not MindSpore's.
    """
    if isinstance(save_obj, torch.nn.Module):
        state = save_obj.state_dict()
        names = fqns(state)
        state = {names[name]: value for name, value in state.items()}
    else:
        state = {item["name"]: torch.as_tensor(item["data"]) for item in save_obj}
    path = str(ckpt_file_name)
    plain = {name: plain_tensor(value.detach()) for name, value in state.items()}
    checkpoint.save(path if path.endswith(".ckpt") else f"{path}.ckpt", plain)


def load_checkpoint(ckpt_file_name: str | Path, net: torch.nn.Module | None = None) -> dict[str, Parameter]:
    """Read a file of `save_checkpoint` as {name: Parameter}; into `net` as well, where it is given.

    Raises CheckpointError for a damaged file, or one that holds something else.
    """
    state = checkpoint.load(ckpt_file_name)
    if not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise CheckpointError(f"{ckpt_file_name} holds more than named tensors: it is not of save_checkpoint")
    named = {name: Parameter(value, name, value.is_floating_point()) for name, value in state.items()}
    if net is not None:
        load_param_into_net(net, named)
    return named


def load_param_into_net(
    net: torch.nn.Module, parameter_dict: Mapping[str, torch.Tensor]
) -> tuple[Sequence[str], Sequence[str]]:
    """Copy values into the network by name; returns the names it has and the dict lacks, and the reverse."""
    plain = {name: plain_tensor(value.detach()) for name, value in parameter_dict.items()}
    result = net.load_state_dict(plain, strict=False)
    return result.missing_keys, result.unexpected_keys
