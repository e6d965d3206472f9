"""Muon: matrices move along an orthogonalised momentum, embeddings, heads, norms and vectors by AdamW.

The update equals `torch.optim.Muon` bit for bit, so it is written with that one's operations and not with
those of `algorithms.py`: it takes each matrix by itself, in its own shape, and has no kernels.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from halfstep.distributed import local_of
from halfstep.errors import ConfigError, UnsupportedError, show
from halfstep.kernels import codes as L
from halfstep.optim import algorithms, shards
from halfstep.optim.algorithms import Algorithm, Number, Scalars
from halfstep.optim.base import OnePassOptimizer
from halfstep.optim.optimizers import Keeping

_RULES = (None, "original", "match_rms_adamw")
_ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "bias_correction": True}


def orthogonalize(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return a bf16 matrix near U V^T, where `matrix` is U S V^T, by Newton-Schulz iterations of degree 5.

    Jordan et al., Muon: An optimizer for hidden layers (kellerjordan.github.io/posts/muon), with the
    operations of torch.optim.Muon in their order; its public class has no function for it.
    """
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16().T if tall else matrix.bfloat16()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def lr_of(lr: Number, rule: str | None, shape: torch.Size) -> Number:
    """Return the learning rate of a matrix: by Jordan's rule (None), or Moonshot's (arXiv 2502.16982)."""
    rows, columns = shape
    if rule == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / max(columns, 1)))


def _muon(
    w: Tensor, g: Tensor, states: list[Tensor], p: Tensor, group: Mapping[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """Jordan et al. 2024; of a shard every rank orthogonalises the whole matrix and keeps its own part."""
    here, lr, momentum = local_of(p), group["lr"], group["momentum"]
    w, g, m = (t.as_strided(here.shape, here.stride()) for t in (w, g, *states))
    m = m.lerp(g, 1 - momentum)
    u = g.lerp(m, momentum) if group["nesterov"] else m
    if here is not p:
        u = shards.as_dtensor("momentum_buffer", u.bfloat16(), p).full_tensor()
    u = orthogonalize(u, group["ns_coefficients"], group["ns_steps"], group["eps"])
    u = u if here is p else shards.local_part("momentum_buffer", u, p)
    step, w = lr_of(lr, group["adjust_lr_fn"], p.shape), w * (1 - lr * group["weight_decay"])
    w = w - u * step if isinstance(step, Tensor) else w.add(u, alpha=-step)
    return _flat(w, here), [_flat(m, here)]


def _flat(t: Tensor, like: Tensor) -> Tensor:
    """Return the elements in the order of memory that `like` has."""
    return torch.empty_like(like, dtype=t.dtype).copy_(t).as_strided((t.numel(),), (1,))


def _scalars(group: Mapping[str, Any], step: Number) -> Scalars:
    """Return what bounds the state; the update takes the rest from the group."""
    return (0.0, 1 - group["momentum"], 0.0, 0.0, 0.0, 0.0, 0.0)


def _bounds(old: list[Tensor], g: Tensor, s: Scalars) -> list[Tensor]:
    return [old[0] * (1 - s[1]) + g * s[1]]


MUON = Algorithm("Muon", L.NO_KERNEL, ("momentum_buffer",), _scalars, _muon, _bounds, True, whole=True)


class Muon(OnePassOptimizer):
    """Muon for matrices and AdamW for the rest, arguments and numbers as in `torch.optim.Muon`.

    Args:
        params: parameters or parameter groups, best those of `muon_groups(model)`. A group with
            `algorithm="adamw"` takes AdamW's step, with `betas` (0.9, 0.999) and `eps` 1e-8 unless it says
            others; any other group holds matrices only.
        lr: the learning rate, also AdamW's where its group has none.
        weight_decay: multiplied by the learning rate, the share of a weight that each step takes away.
        momentum: the decay rate of the momentum.
        nesterov: True looks ahead along the momentum.
        ns_coefficients: three numbers, the polynomial of a Newton-Schulz iteration.
        eps: the least norm that a matrix is divided by.
        ns_steps: how many iterations.
        adjust_lr_fn: how a matrix's shape changes the learning rate. None or "original": by the root of
            rows over columns where that is above 1; "match_rms_adamw": so that updates are as large as
            AdamW's, and one learning rate serves both.

    The orthogonalisation runs in bf16, as torch's, and enlarges the rounding errors of an 8-bit momentum, at
    a cost in loss; those of a bf16 one do no harm. Under `fully_shard` each rank gathers one matrix at a time
    (2 bytes an element) and orthogonalises it whole. UnsupportedError for a parameter that is no matrix.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **options: Unpack[Keeping],
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        defaults |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps}
        defaults |= {"adjust_lr_fn": adjust_lr_fn, "algorithm": "muon"}
        super().__init__(params, defaults, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch, of matrices, or of any parameters where it says `algorithm="adamw"`."""
        adamw = isinstance(param_group, dict) and param_group.get("algorithm") == "adamw"
        super().add_param_group({**_ADAMW, **param_group} if adamw else param_group)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """Muon, or AdamW where the group says so; ConfigError or UnsupportedError for one that cannot run."""
        if group["algorithm"] == "adamw":
            return algorithms.ADAMW
        if group["algorithm"] != "muon":
            raise ConfigError(f"algorithm={show(group['algorithm'])}: choose 'muon' or 'adamw'")
        _check_options(group)
        for p in group["params"]:
            if p.dim() != 2 and not isinstance(p, UninitializedParameter):
                raise UnsupportedError(
                    f"Muon updates matrices, not a parameter of shape {list(p.shape)}: put it into a group "
                    "with algorithm='adamw', as hs.optim.muon_groups(model) does"
                )
        return MUON


def _check_options(group: Mapping[str, Any]) -> None:
    coefficients, steps, rule = (group[name] for name in ("ns_coefficients", "ns_steps", "adjust_lr_fn"))
    if not isinstance(coefficients, Sequence) or len(coefficients) != 3:
        raise ConfigError(f"ns_coefficients={show(coefficients)}: expected three numbers")
    if not isinstance(steps, int) or not 0 <= steps < 100:
        raise ConfigError(f"ns_steps={show(steps)}: expected a whole number from 0 to 99")
    if rule not in _RULES:
        raise ConfigError(f"adjust_lr_fn={show(rule)}: choose one of {', '.join(map(repr, _RULES))}")


def muon_groups(
    model: nn.Module, heads: str | Sequence[str] | None = None, **adamw: Any
) -> list[dict[str, Any]]:
    """Return two parameter groups, the hidden matrices of a model for Muon and all the rest for AdamW.

    Hidden matrices are parameters of two dimensions, both above 1, named `weight` or `..._weight`, of any
    module but an embedding or a head. A tensor that one of these shares is theirs. Frozen ones are left out.

    Args:
        model: the model, before or after `prepare` and wrappers.
        heads: patterns of names of the layers that make the output, such as "lm_head" or "*.classifier". None
            takes what transformers' `get_output_embeddings()` says, else the model's last `nn.Linear`.
        adamw: options of the AdamW group, such as lr=3e-4 and betas=(0.9, 0.95).

    Raises:
        ConfigError: a pattern that is no module's name, or a model without hidden matrices.
    """
    theirs = {id(p) for m in _ends(model, heads) for p in m.parameters(recurse=False)}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = [(name, p) for name, p in named if id(p) not in theirs and _is_hidden(name, p)]
    if not hidden:
        raise ConfigError("muon_groups found no hidden matrix in the model: train it by hs.optim.AdamW")
    inside = {name for name, _ in hidden}
    rest = [(name, p) for name, p in named if name not in inside]
    groups: list[dict[str, Any]] = [{"params": hidden}, {"params": rest, "algorithm": "adamw", **adamw}]
    return groups if rest else groups[:1]


def _is_hidden(name: str, p: Tensor) -> bool:
    return name.endswith("weight") and p.dim() == 2 and min(p.shape) > 1


def _ends(model: nn.Module, heads: str | Sequence[str] | None) -> Iterator[nn.Module]:
    """Yield the modules at a model's beginning and end: embeddings and heads."""
    yield from (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    if heads is None:
        known: Any = getattr(model, "get_output_embeddings", lambda: None)()
        yield from [m for m in model.modules() if isinstance(m, nn.Linear)][-1:] if known is None else [known]
        return
    for pattern in [heads] if isinstance(heads, str) else heads:
        found = [m for name, m in model.named_modules() if name and fnmatchcase(name, pattern)]
        if not found:
            raise ConfigError(f"heads={pattern!r} is the name of no module: {_some_names(model)}")
        yield from found


def _some_names(model: nn.Module) -> str:
    return ", ".join(name for name, _ in list(model.named_modules())[-5:]) + " are the last ones"
