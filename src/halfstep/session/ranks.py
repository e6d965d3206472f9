"""What a session refuses by name before training, because it cannot be right over ranks (law 14).

A model does not know what wraps it, so DDP is looked for once, at the first backward pass or step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from halfstep.convert.sharded import shards_of
from halfstep.distributed import SameGradients, ddp_around, is_sharded, joins_alone, world_size
from halfstep.errors import ConfigError, UnsupportedError
from halfstep.optim.masters import weight_of
from halfstep.policy.levels import LOW_DTYPES
from halfstep.session.steppers import parameters_of


class RankGuard:
    """The checks of one session; those that cannot change are made once."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], compute: torch.dtype
    ) -> None:
        self._models, self._optimizers, self._compute = models, optimizers, compute
        self._wrappers: list[weakref.ref[Any]] | None = None
        self._sharded, self._same_gradients = False, SameGradients()
        self._weights: dict[int, tuple[list[int], list[torch.Tensor]]] = {}
        self._prepared = [weakref.ref(weight_of(p)) for o in optimizers for p in parameters_of(o)]

    def check(self, shares_flag: bool) -> None:
        """Raise ConfigError or UnsupportedError; `shares_flag`: steps tell each other what they found."""
        if self._wrappers is None:
            self._check_parameters()
            wrappers = (
                ddp_around(p for model in self._models for p in model.parameters())
                if world_size() > 1
                else []
            )
            for ddp in wrappers:
                self._check_wrapper(ddp)
            self._wrappers = [weakref.ref(ddp) for ddp in wrappers]
            self._sharded = world_size() > 1 and any(map(is_sharded, self._models))
        if not shares_flag:
            return
        for ref in self._wrappers:
            ddp = ref()
            if ddp is not None and joins_alone(ddp):
                raise ConfigError(
                    "ddp.join() answers for DDP alone, and this session's ranks also tell each other what "
                    "they found: use `with hs.distributed.join(ddp, amp):` instead"
                )

    def check_step(self, shares_flag: bool, optimizer: torch.optim.Optimizer) -> None:
        """`check`, and that all ranks of `fully_shard` have gradients of the same parameters.

        Raises:
            ConfigError: on every rank of a mesh whose ranks have gradients of different parameters.
        """
        self.check(shares_flag)
        if self._sharded:
            self._same_gradients.check(self._weights_of(optimizer), self._name_of)

    def _weights_of(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """The model's parameters that the optimizer updates, listed anew where a group was added or cut."""
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        known = self._weights.get(id(optimizer))
        if known is None or known[0] != sizes:
            known = self._weights[id(optimizer)] = sizes, list(map(weight_of, parameters_of(optimizer)))
        return known[1]

    def _name_of(self, weight: torch.Tensor) -> str:
        names = (name for model in self._models for name, p in model.named_parameters() if p is weight)
        return next(names, "a parameter")

    def _check_parameters(self) -> None:
        """The optimizers must still hold the model's own parameters."""
        mine = {id(p) for model in self._models for p in (*model.parameters(), *shards_of(model))}
        prepared = {id(p) for ref in self._prepared if (p := ref()) is not None}
        for optimizer in self._optimizers:
            held, kind = [weight_of(p) for p in parameters_of(optimizer)], type(optimizer).__name__
            gone = [p for p in held if id(p) not in mine]
            added = sum(id(p) not in prepared for p in gone)
            if added:
                raise ConfigError(
                    f"{added} of {len(held)} parameters of this {kind} were added to it after prepare and "
                    "are not the model's: amp.revert(), add the layer to the model and its parameters to the "
                    "optimizer, then prepare again (or give prepare all models)"
                )
            if gone:
                raise ConfigError(
                    f"{len(gone)} of {len(held)} parameters of this {kind} are no longer the "
                    "model's: they were replaced after prepare (fully_shard and tensor parallel do that) and "
                    "would never train. Shard the model first, then build the optimizer, then prepare"
                )

    def _check_wrapper(self, ddp: Any) -> None:
        for optimizer in self._optimizers:
            refuse_in_ddp(optimizer)
        for hook, _ in getattr(ddp, "_comm_hooks", ()):
            if getattr(hook, "dtype", None) is torch.float16 and self._compute == torch.bfloat16:
                raise ConfigError(
                    "compress_hook('fp16') would round gradients of a bf16 level, which have no loss scale, "
                    "to zero or to inf: register compress_hook('bf16') instead"
                )


def check_norm_group(group: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ConfigError for what is no process group, UnsupportedError where norms come too late for one."""
    if group is None:
        return
    if not torch.distributed.is_available() or not isinstance(group, torch.distributed.ProcessGroup):
        raise ConfigError(
            f"norm_group={group!r:.80}: expected the process group of the stages, mesh.get_group('pp') say"
        )
    if any(getattr(optimizer, "release_gradients", False) for optimizer in optimizers):
        raise UnsupportedError(
            "norm_group with release_gradients, which clips by this rank's own norm of the step before: "
            "give one of the two"
        )


def refuse_in_ddp(optimizer: Any) -> None:
    """Raise UnsupportedError for an optimizer whose options DDP breaks."""
    if getattr(optimizer, "release_gradients", False):
        raise UnsupportedError(
            "release_gradients updates each parameter before DistributedDataParallel has averaged its "
            "gradient, so ranks would diverge: leave it out, or use fully_shard, which reduces first"
        )
    weights = [weight_of(p) for p in parameters_of(optimizer)]
    if any(w.dtype in LOW_DTYPES and w.grad_dtype is torch.float32 for w in weights):
        raise UnsupportedError(
            "accumulate='fp32' gives 16-bit weights fp32 gradients, which DistributedDataParallel's buffers "
            "cannot take: leave it out, or accumulate fewer micro-batches"
        )
