"""One step of another package's optimizer in a new instance, and a trial of whether that is the same step."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from halfstep.errors import UnsupportedError
from halfstep.torch_private import pytree
from halfstep.trees import needs_closure

Group = dict[str, Any]
Kind = type[torch.optim.Optimizer]
STEPS = 12
"""Of a trial: more than the intervals at which common optimizers do something else."""
_INSTEAD = "Give hs.prepare the optimizer itself: at level O2 it gets fp32 masters"


def run_alone(
    kind: Kind,
    options: Group,
    group: Mapping[str, Any],
    values: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    states: Sequence[Group],
    method: str = "step",
    args: Sequence[Any] = (),
) -> tuple[Group, list[Tensor], list[Group]]:
    """Run a method of a new optimizer over fp32 `values`, which may change in place.

    Its parameter group has the options of `group`, its parameters have these gradients and states. Returns
    the options, values and states afterwards.
    """
    params = [nn.Parameter(value) for value in values]
    optimizer = kind([{**group, "params": params}], **options)
    for p, grad, state in zip(params, grads, states):
        p.grad = grad
        if state:
            optimizer.state[p] = state
    run = getattr(kind, method)
    run = run.__wrapped__ if getattr(run, "hooked", False) else run  # global hooks are for the outer step
    run(optimizer, *args)
    after = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return after, [p.detach() for p in params], [dict(optimizer.state.get(p, {})) for p in params]


def check_kind(kind: Kind, options: Group, params: Any) -> Group:
    """Return the options of a group of this optimizer, after a trial on small fp32 tensors.

    `params` are what the optimizer shall update: tensors, `(name, tensor)` pairs or groups of these.
    UnsupportedError where a bucket of parameters in a new instance a step would not be the same.
    """
    tensors = [t for t in _tensors_in(params) if not isinstance(t, UninitializedParameter)]
    shapes = list({t.dim(): tuple(min(n, 6) for n in t.shape) for t in tensors}.values()) or [(6, 4)]
    device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    shapes = (shapes * 3)[: max(3, len(shapes))]
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        optimizer = kind(
            [torch.zeros(shape, device=device, requires_grad=True) for shape in shapes], **options
        )
        if needs_closure(optimizer):
            raise UnsupportedError(
                f"compact({kind.__name__}): its step computes the loss by a closure, as often as it likes, "
                "which no bucket of parameters can: call its own step(closure) on fp32 weights"
            )
        defaults = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                problem = _differs(kind, options, defaults, shapes, device)
            except Exception as error:
                problem = f"in a trial on small dense tensors it raised {type(error).__name__}: {error}"
    if problem:
        raise UnsupportedError(f"compact({kind.__name__}): {problem}")
    return defaults


def _tensors_in(params: Any) -> Iterator[Tensor]:
    for item in [params] if isinstance(params, Tensor) else params:
        if isinstance(item, Mapping):
            yield from _tensors_in(item["params"])
        elif isinstance(t := item[-1] if isinstance(item, tuple) else item, Tensor):
            yield t


def _differs(kind: Kind, options: Group, defaults: Group, shapes: Sequence[Any], device: Any) -> str:
    """Return what makes some steps of all parameters together others than those of each alone, or nothing."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw() -> list[Tensor]:
        return [3 * torch.randn(shape, generator=generator, device="cpu").to(device) for shape in shapes]

    values, grads, lr = draw(), [draw() for _ in range(STEPS)], defaults.get("lr")
    groups = [defaults, {**defaults, "lr": lr / 2} if isinstance(lr, float) else defaults]
    parts = [range(len(shapes) - 1), range(len(shapes) - 1, len(shapes))]
    together = _steps(kind, options, list(zip(groups, parts)), values, grads)
    alone = [
        row
        for group, part in zip(groups, parts)
        for n in part
        for row in _steps(kind, options, [(group, range(n, n + 1))], values, grads)
    ]
    if not _same(together, alone):
        return (
            "its update of a parameter depends on other parameters, or on torch's random numbers, so "
            f"that they cannot be stepped a bucket at a time. {_INSTEAD}"
        )
    states: list[Group] = [{} for _ in values]
    for method, now in [("train", [None] * len(values)), *(("step", now) for now in grads)]:
        if not hasattr(kind, method):
            continue
        for g, part in enumerate(parts):
            done = [
                run_alone(kind, options, groups[g], [values[n].clone()], [_copy(now[n])], [states[n]], method)
                for n in part
            ]
            groups[g] = done[0][0]
            for n, (_, (value,), (state,)) in zip(part, done):
                values[n], states[n] = value, state
    if not _same(together, [(values[n], groups[g]) for g, part in enumerate(parts) for n in part]):
        return f"it keeps more from step to step than `state` and `param_groups`. {_INSTEAD}"
    return ""


def _steps(
    kind: Kind, options: Group, groups: Sequence[tuple[Group, range]], values: Any, grads: Any
) -> list[tuple[Tensor, Group]]:
    """Return value and group of the parameters after some steps of one optimizer."""
    params = {n: nn.Parameter(values[n].clone()) for _, part in groups for n in part}
    optimizer: Any = kind(
        [{**group, "params": [params[n] for n in part]} for group, part in groups], **options
    )
    if hasattr(optimizer, "train"):
        optimizer.train()
    for now in grads:
        for n, p in params.items():
            p.grad = now[n].clone()
        optimizer.step()
    after = [
        (part, {k: v for k, v in g.items() if k != "params"})
        for (_, part), g in zip(groups, optimizer.param_groups)
    ]
    return [(params[n].detach(), group) for part, group in after for n in part]


def _copy(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.clone()


def _same(a: Any, b: Any) -> bool:
    """Whether nests hold the same values, bit for bit but for NaN, which is one."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other_spec and all(
        torch.allclose(x, y, 0.0, 0.0, equal_nan=True) if isinstance(x, Tensor) else x == y
        for x, y in zip(leaves, others)
    )
