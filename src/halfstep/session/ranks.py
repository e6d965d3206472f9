"""Over which ranks a session is one run, and what it refuses by name before training (law 14).

A model does not know what wraps it, so DDP is looked for where the answer is first needed, and again after
each DDP that is made around the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.casting.kernel_choice import KernelTable, from_plain, to_plain
from halfstep.casting.kernel_probes import whole_table
from halfstep.convert.sharded import shards_of
from halfstep.distributed import SameGradients, ddp_around, gather, is_sharded, joins_alone, rank, world_size
from halfstep.distributed.shards import find_rank_local
from halfstep.errors import ConfigError, UnsupportedError
from halfstep.policy.levels import LOW_DTYPES
from halfstep.session.checks import check_parameters, name_of
from halfstep.session.setup import Setup
from halfstep.session.steppers import weights_of
from halfstep.torch_private import comm_hooks
from halfstep.trees import each_parameter

MEASURING = 10.0
"""Seconds for which ranks wait at most while the first of them measures kernels."""


class RankGuard:
    """The ranks of one session, and its checks; those that cannot change are made once for each DDP."""

    def __init__(self, setup: Setup, group: Any, norm_group: Any) -> None:
        self._setup, self._given, self._stages = weakref.proxy(setup), group, norm_group
        around = list[Any]()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            around = ddp_around(each_parameter(setup.models))
        self._wrappers = [weakref.ref(ddp) for ddp in around]
        self.asks = True
        """Whether the next call has anything to check."""
        self._checked = self._sharded = False
        self._group: tuple[Any, ...] = ()
        """The ranks that belong together, once they are known."""
        self._same_gradients = SameGradients()

    @property
    def group(self) -> Any:
        """Return the ranks that take or skip steps and save together; None is all of them.

        Those given to `prepare`, else those over which the model is wrapped, which are put together at the
        first call: every one of them must make it.
        """
        if world_size() == 1:
            return None
        self._group = self._group or (joint_group(self._groups()),)
        return self._group[0]

    def _groups(self) -> list[Any]:
        """Return the process groups over which the models are wrapped, or the one that was given."""
        if self._given is not None:
            return [self._given]
        groups = [] if self._stages is None else [self._stages]
        meshes = dict.fromkeys(
            mesh
            for model in self._setup.models
            for p in (*model.parameters(), *shards_of(model))
            if (mesh := getattr(p, "device_mesh", None)) is not None
        )
        groups += [mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)]
        groups += [ddp.process_group for ddp in self._around()]
        return list({id(group): group for group in groups}.values())

    def _around(self) -> list[Any]:
        """Return every DDP around the models."""
        return [ddp for ref in self._wrappers if (ddp := ref()) is not None]

    def trains_in(self, module: nn.Module) -> bool:
        """Whether the module holds weights of the session's models."""
        theirs = set(module.parameters())
        return any(p in theirs for model in self._setup.models for p in model.parameters())

    def on_ddp_wrap(self, ddp: Any, sends: bool) -> None:
        """Record a DDP that is made around the models.

        Where it `sends` (a collective), its ranks get the kernels of their first one.
        """
        self._checked, self.asks, self._group = False, True, ()
        self._wrappers.append(weakref.ref(ddp))
        if sends and self._given is None:
            self.share_kernels([ddp.process_group])

    def share_kernels(self, groups: Sequence[Any] = ()) -> None:
        """Compute by the kernels of the first rank on all ranks, of the groups known by now (law 13)."""
        compute = self._setup.policy.compute_dtype
        if world_size() > 1 and self._setup.device.type == "cpu" and compute in LOW_DTYPES:
            for group in groups or self._groups():
                self._setup.kernels = kernels_of_first_rank(self._setup.kernels, compute, group)

    def check(self) -> None:
        """Raise ConfigError or UnsupportedError for what cannot train as one run."""
        setup, wrappers = self._setup, self._around()
        if setup.reverted:
            raise ConfigError(
                "this session was reverted and takes no more steps: use the session of a new prepare()"
            )
        if not self._checked:
            check_parameters(setup.models, setup.optimizers)
            for ddp in wrappers:
                self._check_wrapper(ddp)
            for optimizer in setup.optimizers:
                self._check_rank_local(optimizer)
            self._sharded = world_size() > 1 and any(map(is_sharded, setup.models))
            self._checked, self.asks = True, self._sharded or bool(wrappers)
        if setup.skip_nonfinite and any(map(joins_alone, wrappers)):
            raise ConfigError(
                "ddp.join() answers for DDP alone, and this session's ranks also tell each other what "
                "they found: use `with hs.distributed.join(ddp, amp):` instead"
            )

    def fit_gradients(self, weights: Iterable[Tensor]) -> None:
        """Make gradients of 16-bit weights fp32 before a backward pass that adds to them.

        Their sum over micro-batches is then rounded once, when the step begins (law 18), at the price of 2
        bytes an element until then. Gradients that DDP is about to send get the weights' dtype: its buffers
        take no other.
        """
        syncing = [ddp for ddp in self._around() if ddp.require_backward_grad_sync]
        sent = {p for ddp in syncing for p in ddp.module.parameters()}
        for p in (*weights, *sent):
            grad = p.grad
            if grad is None or p.dtype not in LOW_DTYPES:
                continue
            if p in sent and grad.dtype != p.dtype:
                p.grad_dtype = None
                p.grad = grad.to(p.dtype)
            elif p not in sent and grad.dtype in LOW_DTYPES:
                p.grad = None  # torch lets no gradient be of another dtype than `grad_dtype`
                p.grad_dtype = torch.float32
                p.grad = grad.float()

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Do `check`, and that all ranks of `fully_shard` have gradients of the same parameters.

        Raises:
            ConfigError: on every rank of a mesh whose ranks have gradients of different parameters.
        """
        self.check()
        if self._sharded:
            self._same_gradients.check(weights_of(optimizer), partial(name_of, self._setup.models))

    def _check_wrapper(self, ddp: Any) -> None:
        for optimizer in self._setup.optimizers:
            refuse_in_ddp(optimizer)
        sent = {getattr(hook, "dtype", None) for hook, _ in comm_hooks(ddp)}
        if self._setup.policy.compute_dtype == torch.bfloat16 and torch.float16 in sent:
            raise ConfigError(
                "compress_hook('fp16') would round gradients of a bf16 level, which have no loss scale, "
                "to zero or to inf: register compress_hook('bf16') instead"
            )

    def _check_rank_local(self, optimizer: torch.optim.Optimizer) -> None:
        issue = find_rank_local(weights_of(optimizer), optimizer)
        if issue is None:
            return
        cure = "give those that ranks have of their own to an optimizer of their own"
        if issue.group is not None:
            cure = "shard with hs.distributed.shard(model) in its place"
            if self._setup.precision.masters:
                raise UnsupportedError(
                    f"parameter {name_of(self._setup.models, issue.parameter)!r} {issue.why}, which fp32 "
                    f"masters of {self._setup.level.name} cannot follow: {cure}"
                )
            if self._stages is not None:
                return
            cure += (
                ", or name the ranks that hold the other parts: build the optimizer from the wrapped model, "
                "and prepare(model, optimizer, norm_group=model.process_group)"
            )
        raise UnsupportedError(
            f"parameter {name_of(self._setup.models, issue.parameter)!r} {issue.why}: the norm that a step "
            f"is clipped by, and what a loss scale is chosen from, would be this rank's alone; {cure}"
        )


def joint_group(groups: Sequence[Any]) -> Any:
    """Return the process group of all ranks that these join (rows and columns of a grid); None if it is all.

    A collective of these ranks where there are several groups.
    """
    if len(groups) < 2:
        return groups[0] if groups else None
    ranks = {rank()}
    for group in groups:
        ranks = set[int]().union(*gather(ranks, group))
    if len(ranks) == world_size():
        return None
    equal_groups = (g for g in groups if ranks == {*torch.distributed.get_process_group_ranks(g)})
    return next(equal_groups, None) or torch.distributed.new_group(
        sorted(ranks), use_local_synchronization=True
    )


def kernels_of_first_rank(table: KernelTable, compute: torch.dtype, group: Any) -> KernelTable:
    """Return the kernels of a group's first rank, on all ranks, with every class measured.

    The others wait, so it measures for `MEASURING` seconds at most; what it has not met by then is native.
    """
    if world_size(group) == 1:
        return table
    first = rank(group) == 0
    mine = gather(
        (to_plain(whole_table(table, compute, MEASURING)), table.measured) if first else None, group
    )
    rows, measured = mine[0]
    return KernelTable(from_plain(rows), name="of rank 0", measured=measured)


def check_groups(group: Any, norm_group: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise ConfigError for what is no process group of this rank.

    UnsupportedError where norms come too late for a group of stages.
    """
    kind = torch.distributed.ProcessGroup if torch.distributed.is_available() else ()
    any_group = "a process group that this rank is in, what new_group([0, 1]) gives ranks 0 and 1 say"
    stages = "the process group of the stages, mesh.get_group('pp') say"
    for name, value, expected in (("group", group, any_group), ("norm_group", norm_group, stages)):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name}={value!r:.80}: expected {expected}")
    if norm_group is not None and any(
        getattr(optimizer, "release_gradients", False) for optimizer in optimizers
    ):
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
    weights = weights_of(optimizer)
    if any(w.dtype in LOW_DTYPES and w.grad_dtype is torch.float32 for w in weights):
        raise UnsupportedError(
            "accumulate='fp32' gives 16-bit weights fp32 gradients, which DistributedDataParallel's buffers "
            "cannot take: leave it out; a session adds up in fp32 what `ddp.no_sync()` does not send yet"
        )
