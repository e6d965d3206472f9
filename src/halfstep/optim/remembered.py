"""What an optimizer remembers of its parameters between steps, and when it no longer holds.

A slot says where a parameter, its master and its states lie and in which formats. Slots are made from what
the user sees in `param_groups` and `state`; the plan check says at every step whether they still fit.
"""

import zlib
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from halfstep.errors import ConfigError
from halfstep.gradients.stats import AnyStats, clip_coefficient
from halfstep.optim import arguments, backends, entries, storage
from halfstep.optim.algorithms import Algorithm
from halfstep.optim.cpu_plan import HostPlan
from halfstep.optim.hand_edits import HandEdits
from halfstep.optim.plan_check import PlanCheck

Group = dict[str, Any]
Place = tuple[int, int]
MASTER_KEYS = ("master", "lacking")


class Remembering(torch.optim.Optimizer):
    """Base of `OnePassOptimizer`: its parameters, and what is remembered of each."""

    seed: int

    def _start_memory(self) -> None:
        """Remember nothing."""
        self.key_shifts: dict[Tensor, int] = {}
        """Added to the random keys of tensors that are not the beginning of what they are a shard of."""
        self._slots: dict[Tensor, storage.Slot] = {}
        self._kept_dtype: dict[Tensor, torch.dtype] = {}
        self._index: dict[Tensor, Place] = {}
        self._plan: HostPlan | None = None
        self.looked: AnyStats | None = None
        """What the last step found in the gradients, where it was asked to look."""
        self._check: PlanCheck | None = None
        self._checks: dict[Tensor, PlanCheck] = {}
        self._edits = HandEdits()
        self._kept_masters: dict[Tensor, Group] = {}
        """What the state held of each weight's master: one that is cleared starts only moments anew."""

    def algorithm(self, group: Mapping[str, Any]) -> Algorithm:
        """The algorithm this group runs."""
        raise TypeError(f"{type(self).__name__} names no algorithm; use AdamW, Adam, SGD or Lion")

    def places(self) -> Iterator[tuple[Tensor, Group, Place]]:
        """Every parameter with its group, and its place: number of the group and number within."""
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                yield p, group, (g, i)

    def _find(self, p: Tensor) -> tuple[Group, Place]:
        place = self._index.get(p)
        if place is None or not self._is_at(p, *place):
            self._index = {q: where for q, _, where in self.places()}
            place = self._index.get(p)
        if place is None:
            raise ConfigError(f"a tensor of shape {list(p.shape)} is not a parameter of this optimizer")
        return self.param_groups[place[0]], place

    def _is_at(self, p: Tensor, g: int, i: int) -> bool:
        params = self.param_groups[g]["params"] if g < len(self.param_groups) else ()
        return i < len(params) and params[i] is p

    def _slot(self, p: Tensor, group: Group, place: Place, value: Tensor | None = None) -> storage.Slot:
        """What is remembered of `p`, or made anew from its entry of the state."""
        slot = self._slots.get(p)
        if slot is not None and value is None:
            return slot
        weight = storage.local_tensor(p)
        entry = self._entry(p)
        formats = self.formats(weight, group)
        if self._kept_dtype.setdefault(p, weight.dtype) != weight.dtype:
            value = self._before_widening(p, entry) if value is None else value
            entry.pop("lacking", None)  # the bits of a weight of another dtype
            self._kept_masters.pop(p, None)
            self._kept_dtype[p] = weight.dtype
        self._plan = self._check = None
        entry.update(self._lost_master(p, entry))
        with torch.inference_mode(False), torch.no_grad():
            entries.settle(entry, weight, *formats, self.name_of(group, place), value)
            slot = storage.make_slot(p, entry, *formats, self._base_key(group, place))
        self._edits.know(p, entry.get("lacking"))
        self._kept_masters[p] = {key: entry[key] for key in MASTER_KEYS if key in entry}
        slot.shift = self.key_shifts.get(p, 0)
        self._slots[p] = slot
        return slot

    def _seed(self, p: Tensor, group: Group, place: Place, value: Tensor) -> None:
        """Set master and weight from `value` (fp32); a frozen weight gets no other state before it trains."""
        known = cast("Group", self.state.get(p, {}))
        if p.requires_grad or p in self._slots or any(key not in MASTER_KEYS for key in known):
            self._slot(p, group, place, value)
            return
        weight, entry = storage.local_tensor(p), self._entry(p)
        with torch.inference_mode(False), torch.no_grad():
            entries.settle_master(entry, weight, self.formats(weight, group)[1], value)
        self._edits.know(p, entry.get("lacking"))
        self._kept_masters[p], self._kept_dtype[p] = dict(entry), weight.dtype
        if not entry:
            del self.state[p]

    def _lost_master(self, p: Tensor, entry: Mapping[str, Any]) -> Group:
        """The master that was there before `entry` was cleared; nothing where `entry` has one."""
        return {} if any(key in entry for key in MASTER_KEYS) else self._kept_masters.get(p, {})

    @torch.no_grad()
    def _before_widening(self, p: Tensor, entry: Mapping[str, Any]) -> Tensor | None:
        """The exact value of a 16-bit weight that was made fp32 since the last step (`model.float()`).

        Its master where the weight is what it was, wider, else the weight; None for any other.
        """
        kept = self._kept_dtype.get(p)
        if p.dtype != torch.float32 or kept not in storage.LOW_DTYPES:
            return None
        weight = storage.local_tensor(p).detach()
        low = weight.to(kept)
        exact = entries.known_value({**entry, **self._lost_master(p, entry)}, low)
        if exact is None:
            return None
        same = (low.to(torch.float32) == weight) & self._edits.untouched(p, low)
        return torch.where(same, exact, weight)

    def _whole_entry(self, p: Tensor, entry: Mapping[str, Any]) -> Group:
        """`entry` and the master that belongs to it, in fp32 where the weight was widened."""
        whole = {**entry, **self._lost_master(p, entry)}
        exact = self._before_widening(p, entry)
        if exact is not None:
            whole = {key: value for key, value in whole.items() if key not in MASTER_KEYS}
            whole["master"] = exact
        return whole

    def _entry(self, p: Tensor) -> dict[str, Any]:
        return self.state[p] if isinstance(self.state, defaultdict) else self.state.setdefault(p, {})

    def _recall(self) -> None:
        """Forget what no longer holds: the plan check of every step."""
        check = self._check
        if check is None or not check.holds(self.param_groups, self._options(), self.state):
            self._forget()

    def _slot_alone(self, p: Tensor, group: Group, place: Place) -> storage.Slot:
        """`_slot` with a plan check of its own: gradients that are released come one at a time."""
        options, known = [self._options_of(group)], {p: self._entry(p)}
        check = self._checks.get(p)
        if check is None or not check.holds([], options, known):
            self._slots.pop(p, None)
            slot = self._slot(p, group, place)
            self._checks[p] = PlanCheck([], options, known, slot.held)
        return self._slot(p, group, place)

    def _forget(self) -> None:
        self._plan = self._check = None
        self._slots.clear()

    def _options(self) -> list[tuple[Any, ...]]:
        algorithm = self.algorithm
        return [(algorithm(g), g["master"], g["state_dtype"]) for g in self.param_groups]

    def _options_of(self, group: Group) -> tuple[Any, ...]:
        return self.algorithm(group), group["master"], group["state_dtype"]

    def _remember(self) -> None:
        """Make the plan check of the slots there are."""
        held = [t for p, _, _ in self.places() if p in self._slots for t in self._slots[p].held]
        self._check = PlanCheck(self.param_groups, self._options(), self.state, held)

    def formats(self, p: Tensor, group: Group) -> tuple[Algorithm, int, int]:
        """The algorithm of a group, and in which formats it keeps this weight and its states."""
        algorithm = self.algorithm(group)
        arguments.check_storage(group)
        return (
            algorithm,
            storage.kind_of(p.dtype, group["master"]),
            storage.state_kind_of(p, group["state_dtype"]),
        )

    def name_of(self, group: Group, place: Place) -> str:
        """How errors call a parameter."""
        names = group.get("param_names")
        return repr(names[place[1]]) if names else f"parameter {place[1]} of group {place[0]}"

    def _base_key(self, group: Group, place: Place) -> int:
        names = group.get("param_names")
        name = names[place[1]] if names else f"{place[0]}.{place[1]}"
        return zlib.crc32(f"{self.seed}:{name}".encode())

    def _planned(self) -> bool:
        """Whether the plan of an earlier step holds; one that does not is forgotten."""
        if self._plan is not None:
            self._recall()
        plan = self._plan
        if plan is not None and not plan.ready():
            plan = self._plan = None
        return plan is not None

    def _step_by_plan(
        self,
        inv_scale: backends.Scalar,
        clip_coef: backends.Scalar,
        found_inf: bool | Tensor | None,
        look: bool,
        clip_norm: float | None,
    ) -> bool:
        """`step` by the plan that the last one left; false where none holds, and nothing was done."""
        self._edits.take()
        if self._plan is None or found_inf or not self._planned():  # plans are of CPUs alone
            return False
        plan, scale, looked = self._plan, backends.number(inv_scale), None
        if clip_norm is not None:
            looked = plan.measure(scale)
            clip_coef = clip_coefficient(looked.norm, clip_norm)
        seen_on_the_way = look and looked is None
        over, seen = plan.update(scale * backends.number(clip_coef), scale if seen_on_the_way else None)
        self.looked = seen if seen_on_the_way else looked
        self._edits.after_plan()
        backends.check_range(over)
        return True

    def expect_writes(self, weights: Iterable[Tensor]) -> None:
        """Each of these is about to be written once, with the values that it has: no edit by hand."""
        self._edits.expect(weights)

    @contextmanager
    def _without_strangers(self) -> Generator[None]:
        """Within, `state` has no entry of a parameter that left its group: a file could not name it."""
        whole, known = self.state, {p for p, _, _ in self.places()}
        try:
            if any(isinstance(p, Tensor) and p not in known for p in whole):
                kept = {k: v for k, v in whole.items() if not isinstance(k, Tensor) or k in known}
                self.state = cast(Any, kept)
            yield
        finally:
            self.state = whole
