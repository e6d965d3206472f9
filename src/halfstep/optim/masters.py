"""fp32 master weights for any torch optimizer: its groups hold the masters, the model keeps 16-bit weights.

`MasterWeights` edits the optimizer's groups in place and `revert()` puts everything back; nothing is rebound.
There is one gradient, that of the model's weight: the first reader on the optimizer's side (a step, a scaler,
clipping) widens it to fp32 where it lies, so unscaling and clipping never happen in 16 bits, on either side.
"""

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from collections.abc import Set as AnySet
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError, UnsupportedError
from halfstep.gradients.unscale import unscale_
from halfstep.names import fqn
from halfstep.optim.arguments import check_accumulate
from halfstep.optim.loading import LoadedMasters, MasterHolder
from halfstep.optim.master_link import Link, Master, ModelHooks, weight_of
from halfstep.optim.saved_masters import SavedMasters
from halfstep.policy.levels import LOW_DTYPES
from halfstep.torch_private import pytree
from halfstep.trees import parameters_of

__all__ = ["MasterWeights", "weight_of"]


class MasterWeights:
    """Keep an fp32 master of every fp16 or bf16 parameter an optimizer updates.

    The optimizer's groups then hold the masters (fp32 and fp64 parameters stay as they are), its state moves
    to them, its step reads fp32 gradients and writes the weights back with torch's own cast (ties to even).
    `optimizer.zero_grad()`, `add_param_group`, schedulers and closures work as before; `state_dict()` gains
    an entry `masters`, keyed by FQN. Weights that are set by hand (`nn.init`, a clamp, `.data`) are compared
    with their masters by value before each step and wherever masters are read, and taken over exactly.
    What is set through `optimizer.param_groups` (not by numpy) is in the model at its next forward pass,
    step or save, and counts where both sides of a weight were changed in between. In DDP clear gradients
    to None between steps, as torch does: its reducer takes no zeroed fp32 gradient of a 16-bit weight.

    Args:
        optimizer: any `torch.optim.Optimizer` that reads its parameters from `param_groups`.
        model: one module or several, for names, `swap()` and exact loading of fp32 checkpoints.
        names: `(name, parameter)` pairs, where there is no model.
        initial: exact fp32 values by parameter, e.g. `Conversion.originals`, whose memory they take
            over; otherwise the masters start as the 16-bit weights, those of frozen ones when these train.
        accumulate: "fp32" adds up the gradients of micro-batches in fp32 (4 bytes a parameter instead of 2
            until the step); None in the weights' own dtype, where 256 + 1 is 256 in bf16.

    Raises:
        UnsupportedError: an optimizer with references of its own (LBFGS, wrappers), 8-bit or meta parameters.
        ConfigError: a parameter that is not the model's, or that already has a master; another `accumulate`.

    A moving average of the masters, rather than of the rounded weights:

        >>> import torch
        >>> from torch.optim.swa_utils import AveragedModel
        >>> model = torch.nn.Linear(2, 1).bfloat16()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> masters = MasterWeights(optimizer, model)
        >>> with masters.swap():
        ...     average = AveragedModel(model)
        ...     average.update_parameters(model)
        >>> next(average.parameters()).dtype
        torch.float32
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | Sequence[nn.Module] | None = None,
        names: Iterable[tuple[str, Tensor]] | None = None,
        initial: Mapping[Tensor, Tensor] | None = None,
        accumulate: str | None = None,
    ) -> None:
        check_accumulate(accumulate)
        _refuse_own_references(optimizer)
        self.optimizer = optimizer
        models, wide = _as_models(model), accumulate == "fp32"
        self._models = [weakref.ref(model) for model in models]
        self._link: Link | None = Link(optimizer, models, _names_of(names), initial or {}, wide)
        link, push = self._link, ModelHooks(self._link)
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(link.before_step),
            optimizer.register_step_post_hook(link.after_step),
            optimizer.register_state_dict_post_hook(link.on_state_dict),
            *SavedMasters(link).attach(optimizer),
            *LoadedMasters(link).attach(models),
        ]
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self._handles += [module.register_state_dict_pre_hook(push) for module in modules]
        self._handles += [model.register_forward_pre_hook(push, prepend=True) for model in models]

    @property
    def link(self) -> Link:
        """Return the live link; ConfigError after `revert()`."""
        if self._link is None:
            raise ConfigError("these MasterWeights were reverted; make new ones to train with masters again")
        return self._link

    def masters(self, only: AnySet[Tensor] | None = None) -> dict[Tensor, Tensor]:
        """Return the fp32 master of every 16-bit weight, or of those in `only`: to be read, not written."""
        return self.link.masters(only)

    def seed_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """Set masters to fp32 `values` by weight, and weights to their rounding; others are left alone."""
        self.link.adopt()
        self.link.seed_masters(values)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return `(16-bit weight, fp32 master)` for every parameter that has a master."""
        self.link.sync()
        return list(self.link.pairs.items())

    def named(self) -> list[tuple[str, Tensor]]:
        """Return `(fully qualified name, fp32 master)`, in the optimizer's order."""
        pairs = self.pairs()
        return [(name, master) for name, (_, master) in zip(self.link.names(), pairs)]

    def params(self) -> list[Tensor]:
        """Return what the optimizer updates, masters instead of 16-bit weights: clip and measure these."""
        self.link.sync()
        return parameters_of(self.optimizer)

    def copy_grads(self, inv_scale: float | Tensor | None = None) -> list[Tensor]:
        """Widen the gradients to fp32, then multiply them by `inv_scale`; return those that exist.

        Covers every parameter of the optimizer, also those without a master. The widening comes first, so an
        fp16 gradient does not underflow when it is unscaled. `inv_scale`: a float or a 0-d fp32 tensor.
        """
        self.link.adopt()
        self.link.widen()
        grads = [p.grad for p in parameters_of(self.optimizer) if p.grad is not None]
        if inv_scale is not None:
            is_tensor = isinstance(inv_scale, Tensor)
            unscale_(grads, inv_scale if is_tensor else torch.tensor(inv_scale, device="cpu"))
        return grads

    def write_back(self) -> None:
        """Round the masters into the model's weights (ties to even); each step does it by itself."""
        self.link.write_back()

    def refresh(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Set masters to the model's current weights where these differ from the rounded masters.

        With `values` (FQN to tensor of any float dtype, e.g. an fp32 checkpoint's `state_dict()`)
        the named masters take those exactly, and the weights follow.
        """
        if values is None:
            self.link.pull()
            return
        if not isinstance(values, Mapping):
            raise ConfigError(f"refresh takes a mapping from names to tensors, got {type(values).__name__}")
        self.link.sync()
        weights = dict(zip(self.link.names(), self.link.pairs))
        new_masters = {weights[name]: value for key, value in values.items() if (name := fqn(key)) in weights}
        if values and not new_masters:
            raise ConfigError(f"refresh got no master's name; expected names such as {next(iter(weights))!r}")
        for weight, value in new_masters.items():
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            if got != f"shape {list(weight.shape)}":
                raise ConfigError(
                    f"refresh got {got} for {self.link.pairs[weight]._name!r}, expected the weight's "
                    f"{list(weight.shape)}: give tensors with the values of this model"
                )
        self.link.seed_masters(new_masters)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the masters by fully qualified name, or `group.position` without one."""
        return {name: master.detach().clone() for name, master in self.named()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set the masters from `state_dict()`'s form and round them into the weights.

        Raises:
            CheckpointError: a name is missing or too many, or a shape differs; nothing is changed then.
        """
        self.link.adopt()
        self.link.seed_masters(self.link.match_saved(state))

    @contextmanager
    def swap(self) -> Generator[None]:
        """Make the fp32 masters (same memory) the model's parameters for the block: evaluate, copy, average.

        Replaces the entries of the modules, not the data of the weights, so DDP and autograd do not notice.
        Not for training: gradients of that time belong to the stand-ins. Other 16-bit parameters, buffers and
        the casts of a `Conversion` are for `Conversion.suspended()` to widen:
        `with masters.swap(), conversion.suspended(): ...`.
        """
        with self._exchange_parameters(lambda w, m: nn.Parameter(m.detach(), requires_grad=w.requires_grad)):
            yield

    @contextmanager
    def checkpointing(self) -> Generator[None]:
        """Make the optimizer's parameters the model's for the block, as torch's checkpoint functions want.

        `get_state_dict(model, optimizer)` of `torch.distributed.checkpoint.state_dict` and its kin know an
        optimizer's parameters by those of the model, and with masters the two differ. Here they are the same:
        what is saved are fp32 masters and states by name, what is loaded goes into masters and, at the end,
        into the weights. Nothing else may run within. ConfigError without a model.
        """
        with self._exchange_parameters(lambda w, m: m.requires_grad_(m.requires_grad or w.requires_grad)):
            yield

    @contextmanager
    def _exchange_parameters(self, stand_in: Callable[[Tensor, Tensor], Tensor]) -> Generator[None]:
        if not self._models:
            raise ConfigError("swap() and checkpointing() need a model: MasterWeights(optimizer, model=...)")
        self.link.sync()
        models = [model for weak in self._models if (model := weak()) is not None]
        stand_ins = {w: stand_in(w, m) for w, m in self.link.pairs.items()}
        places = [
            (module, key, p, stand_ins[weight])
            for module in dict.fromkeys(module for model in models for module in model.modules())
            for key, p in module._parameters.items()
            if p is not None and (weight := getattr(p, "_stands_for", p)) in stand_ins
        ]
        try:
            for module, key, _, other in places:
                _put(module, key, other)
            yield
        finally:
            for module, key, weight, _ in places:
                _put(module, key, weight)
            self.link.write_back()

    def revert(self) -> None:
        """Put the parameters back into the optimizer with the masters' values, cast to their present dtype.

        State and gradients take the weights' dtype; the hooks go. Revert a `Conversion` first to get the
        masters into fp32 weights exactly. A second call does nothing.
        """
        if self._link is None:
            return
        for handle in self._handles:
            handle.remove()
        self._link.release()
        self._link, self._handles = None, []


def _as_models(model: nn.Module | Sequence[nn.Module] | None) -> list[nn.Module]:
    if model is None:
        return []
    models = [model] if isinstance(model, nn.Module) else model
    if not isinstance(models, list | tuple) or not all(isinstance(item, nn.Module) for item in models):
        raise ConfigError(f"MasterWeights got model={model!r:.60}, expected a torch.nn.Module or several")
    return list(models)


def _names_of(names: Any) -> dict[Tensor, str]:
    try:
        return {parameter: fqn(name) for name, parameter in names or ()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"MasterWeights got names={names!r:.60}, expected (name, parameter) pairs such as "
            "model.named_parameters()"
        ) from error


def _put(module: nn.Module, key: str, value: Tensor) -> None:
    # RNNs keep a second list of their weights, which only their own __setattr__ maintains.
    if isinstance(module, nn.RNNBase):
        setattr(module, key, value)
    else:
        module._parameters[key] = cast(nn.Parameter, value)


def _refuse_own_references(optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"MasterWeights takes a torch.optim.Optimizer, not {kind}; pass the one it wraps")
    if isinstance(optimizer, MasterHolder) and not getattr(optimizer, "takes_masters", False):
        raise ConfigError(
            f"{kind} keeps masters of its own (its argument master=...); use it without MasterWeights"
        )
    if optimizer.defaults.get("differentiable", False):
        raise UnsupportedError(
            f"{kind}(differentiable=True) cannot have master weights; use O1 (fp32 weights)"
        )
    params = parameters_of(optimizer)
    mine = set(map(id, params))
    if any(type(p) is Master for p in params):
        raise ConfigError(f"this {kind} already has master weights; revert() those first")
    for key in vars(optimizer).keys() - {"param_groups", "state", "defaults"}:
        for leaf in pytree.tree_leaves(getattr(optimizer, key)):
            shared = getattr(leaf, "param_groups", None) is optimizer.param_groups  # a wrapper's inner one
            if id(leaf) in mine or (isinstance(leaf, torch.optim.Optimizer) and not shared):
                raise UnsupportedError(
                    f"{kind} cannot have master weights: it keeps its own references to parameters in "
                    f".{key}. Wrap the inner optimizer, or use O1 (fp32 weights)"
                )


@torch.no_grad()
def fp32_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Return the model's `state_dict` in fp32: exact parameters from their masters; 16-bit buffers widened.

    `optimizer` is one or several, of `halfstep.optim` or with `MasterWeights`; parameters without a master
    are cast from what the model has. New, detached tensors; integer and fp64 entries are copied as they are.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    if any(not isinstance(o, torch.optim.Optimizer) for o in optimizers):
        raise ConfigError("fp32_state_dict takes a model and its optimizer, or several of them")
    masters, new = dict[Tensor, Tensor](), set[Tensor]()
    for holder in holders_of(optimizers):
        masters |= (values := holder.masters())
        new |= set() if isinstance(holder, Link) else values.keys()
    named = dict(model.named_parameters(remove_duplicate=False))
    out: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            continue
        p = named.get(key)
        if p is not None and p in masters:
            out[key] = masters[p] if p in new else masters[p].clone()
            new.discard(p)  # a tied one is in the model under another key too
        elif value.dtype in LOW_DTYPES:
            out[key] = value.detach().to(torch.float32)
        else:
            out[key] = value.detach().clone()
    return out


def holders_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[MasterHolder]:
    """Return the holders of the optimizers' fp32 masters: themselves, their `MasterWeights`, or nothing."""
    return [holder for optimizer in optimizers if (holder := holder_of(optimizer)) is not None]


def holder_of(optimizer: torch.optim.Optimizer) -> MasterHolder | None:
    """Return `holders_of` one optimizer."""
    owners = (p._owner() for p in parameters_of(optimizer) if isinstance(p, Master))
    holder = optimizer if isinstance(optimizer, MasterHolder) else None
    return next((owner for owner in owners if owner is not None), holder)
