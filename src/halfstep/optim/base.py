"""The optimizer class: torch's interface outside, the one-pass step inside.

What is updated and with which scalars is decided here; arithmetic and storage live in reference.py, slots.py
and the kernels. Subclasses give an algorithm and its arguments, nothing else.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.errors import ConfigError, MasterRangeError, UnsupportedError
from halfstep.optim import _numba_backend, reference, rounding, slots
from halfstep.optim._gradients import GradStats, measure
from halfstep.optim.algorithms import Algorithm, Number, Row

Work = list[tuple[slots.Slot, Tensor, Row, rounding.Int]]
Scalar = float | Tensor | None
Job = tuple[Tensor, Tensor, dict[str, Any], tuple[int, int]]
BACKENDS = ("auto", "reference")


class OnePassOptimizer(torch.optim.Optimizer):
    """Base of the optimizers here: 16-bit weights with masters, one pass over the gradients a step.

    `master` and `state_dtype` may differ between parameter groups. fp32 parameters are updated in place and
    need no master. `backend="reference"` runs plain torch everywhere.
    """

    one_pass = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        seed: int = 0,
        backend: str = "auto",
    ) -> None:
        if backend not in BACKENDS:
            raise ConfigError(f"backend={backend!r}: choose one of {', '.join(map(repr, BACKENDS))}")
        self._slots: dict[Tensor, slots.Slot] = {}
        self.seed = seed
        self.backend = backend
        super().__init__(params, defaults)

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """The algorithm this group runs."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; a group may have its own `master` and `state_dtype`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        slots.check_options(group["master"], group["state_dtype"])
        check_hyperparameters(group)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, "seed": self.seed, "backend": self.backend}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._slots = {}

    # ---- what a step works on -----------------------------------------------------------------------

    def _slot(self, p: Tensor, group: Mapping[str, Any], place: tuple[int, int]) -> slots.Slot:
        slot = self._slots.get(p)
        if slot is not None and slot.fits():
            return slot
        return self._new_slot(p, group, place, None)

    def _new_slot(
        self, p: Tensor, group: Mapping[str, Any], place: tuple[int, int], value: Tensor | None
    ) -> slots.Slot:
        algorithm = self.algorithm(group)
        kind = slots.kind_of(p.dtype, group["master"])
        state_kind = slots.STATE_DTYPES[group["state_dtype"]]
        state = cast("dict[str, Any]", self.state[p])
        slots.fill_state(state, p, algorithm, kind, state_kind, value)
        slot = slots.make_slot(p, state, algorithm, kind, state_kind, self._base_key(group, place))
        self._slots[p] = slot
        return slot

    def _base_key(self, group: Mapping[str, Any], place: tuple[int, int]) -> int:
        names = group.get("param_names")
        name = names[place[1]] if names else f"{place[0]}.{place[1]}"
        return zlib.crc32(f"{self.seed}:{name}".encode())

    def _places(self) -> Iterable[tuple[Tensor, dict[str, Any], tuple[int, int]]]:
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                yield p, group, (g, i)

    def _grad(self, p: Tensor) -> Tensor | None:
        """The flat gradient in p's memory order, or None."""
        grad = p.grad
        if grad is None or p.numel() == 0:
            return None
        if grad.layout != torch.strided:
            raise UnsupportedError(f"{type(self).__name__} takes dense gradients, not {grad.layout}")
        if grad.stride() != p.stride():
            grad = torch.empty_like(p, dtype=grad.dtype).copy_(grad)
        if grad.dtype not in _numba_backend.GRADS:
            grad = grad.to(torch.float32)
        return slots.flat(grad)

    def _compiled(self, p: Tensor) -> bool:
        return self.backend == "auto" and p.device.type == "cpu" and _numba_backend.kernels() is not None

    # ---- the two passes -----------------------------------------------------------------------------

    @torch.no_grad()
    def measure(self, inv_scale: Scalar = None) -> GradStats:
        """Read the gradients once: finite flag, norm and largest magnitude after `inv_scale`."""
        found = [(p, grad) for p, _, _ in self._places() if (grad := self._grad(p)) is not None]
        if found and all(self._compiled(p) for p, _ in found):
            return _numba_backend.measure([grad for _, grad in found], _number(inv_scale))
        return measure([grad for _, grad in found], inv_scale)

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        inv_scale: Scalar = None,
        clip_coef: Scalar = None,
        found_inf: bool | Tensor | None = None,
    ) -> Any:
        """Update every parameter that has a gradient, in one pass.

        Gradients are multiplied by `inv_scale` and `clip_coef` (floats or 0-d tensors) on the way and are not
        changed. Where `found_inf` is true nothing changes, step counts included; on an accelerator the flag
        may be a device tensor and nothing is read back. Returns what `closure` returns. Raises
        MasterRangeError when a weight outgrew an exact fp16 master (it stays at 65504).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        jobs: dict[
            tuple[int, torch.device], list[tuple[Tensor, Tensor, dict[str, Any], tuple[int, int]]]
        ] = {}
        for p, group, place in self._places():
            grad = self._grad(p)
            if grad is not None:
                jobs.setdefault((place[0], p.device), []).append((p, grad, group, place))
        for (_, device), entries in jobs.items():
            if device.type == "cpu":
                if not bool(found_inf):
                    self._step_host(entries, _number(inv_scale) * _number(clip_coef))
            else:
                self._step_device(entries, device, inv_scale, clip_coef, found_inf)
        return loss

    def _step_host(self, entries: list[Job], factor: float) -> None:
        group = entries[0][2]
        algorithm = self.algorithm(group)
        hyper = {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        rows: dict[float, Row] = {}
        work: Work = []
        for p, grad, _, place in entries:
            slot = self._slot(p, group, place)
            step = float(slot.step.add_(1))
            if step not in rows:
                rows[step] = as_fp32(algorithm.scalars(hyper, step))
            work.append((slot, grad, rows[step], rounding.key_of(slot.base_key, int(step))))
        factor = -factor if group["maximize"] else factor
        if self._compiled(entries[0][0]):
            over = _numba_backend.update(algorithm, cast(Any, work), factor)
        else:
            over = bool(reference.update(algorithm, work, as_fp32((factor,))[0], None))
        if over:
            raise MasterRangeError(
                f"a weight in group {entries[0][3][0]} grew over 65504, the largest fp16; it was held there. "
                "Use bf16 weights or master='fp32' and keep that tensor in fp32"
            )

    def _step_device(
        self,
        entries: list[Job],
        device: torch.device,
        inv_scale: Scalar,
        clip_coef: Scalar,
        found_inf: bool | Tensor | None,
    ) -> None:
        raise UnsupportedError("later")

    # ---- masters ------------------------------------------------------------------------------------

    @torch.no_grad()
    def seed_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """Set masters and weights from fp32 `values`, as when a model was made 16-bit after the optimizer.

        Each parameter becomes the rounding of its value, and its master the value itself, where the group's
        `master` can hold it. Parameters of other optimizers are left alone.
        """
        for p, group, place in self._places():
            if p in values:
                self._new_slot(p, group, place, values[p].detach())

    @torch.no_grad()
    def master_of(self, p: Tensor) -> Tensor:
        """The fp32 value of parameter `p` as the optimizer knows it, in a new tensor of p's shape."""
        for q, group, place in self._places():
            if q is p:
                slot = self._slot(p, group, place)
                value = slots.read_weight(slot.kind, slot.weight, slot.extra)
                out = torch.empty_like(p, dtype=torch.float32)
                slots.flat(out).copy_(value)
                return out
        raise ConfigError("master_of takes a parameter of this optimizer")


def _number(value: Scalar) -> float:
    return 1.0 if value is None else float(value)


def as_fp32(row: tuple[Number, ...]) -> Row:
    """Scalars rounded to fp32, so that every backend multiplies by the same number."""
    return tuple(torch.tensor(row, dtype=torch.float64).to(torch.float32).tolist())


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Raise ConfigError for values no optimizer here can mean."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"lr is a tensor of shape {list(lr.shape)}; it must have one element")
    if not isinstance(lr, Tensor) and not lr >= 0:
        raise ConfigError(f"lr={lr}: must be at least 0")
    for name in ("eps", "weight_decay", "momentum"):
        if name in group and not group[name] >= 0:
            raise ConfigError(f"{name}={group[name]}: must be at least 0")
    for i, beta in enumerate(group.get("betas", ())):
        if not 0 <= beta < 1:
            raise ConfigError(f"betas[{i}]={beta}: must be in [0, 1)")
