"""Random edits of parameters, gradients, groups and states between steps: ours beside a peer, seed by seed.

Run by hand or in a child process: `python -m tests.optim.edits FIRST COUNT [--guard] [--fp32]`. The peer of
fp32 weights is torch's optimizer of the same kind (of Lion the paper's lines in torch); that of 16-bit
weights is our plain reference. Equal numbers, or a refusal by
name: anything else is printed and counted as a failure. With `--guard` tensors of the user's end where a page
begins that may not be touched.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import mmap
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import HalfstepError
from halfstep.optim import SGD, Adam, AdamW, Lion, compact

PAGE = mmap.PAGESIZE
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class PlainLion(torch.optim.Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675), algorithm 2."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = (-p.grad if group.get("maximize") else p.grad).to(p.dtype)
                m = self.state[p].get("exp_avg", torch.zeros_like(p)).to(p.dtype)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                # each product rounded, as ours: a last bit can turn the sign of a sum that is nearly zero
                p.sub_((m * beta1 + g * (1 - beta1)).sign_(), alpha=group["lr"])
                self.state[p]["exp_avg"] = m.mul_(beta2).add_(g * (1 - beta2))


KINDS: dict[str, tuple[Any, Any]] = {
    "AdamW": (AdamW, torch.optim.AdamW),
    "Adam": (Adam, torch.optim.Adam),
    "SGD": (SGD, torch.optim.SGD),
    "Lion": (Lion, PlainLion),
}
COMPACTED: dict[str, tuple[Any, Any]] = {
    kind.__name__: (partial(compact, kind), kind)
    for kind in (
        torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adafactor, torch.optim.SGD,
        torch.optim.Adadelta,
    )
}  # fmt: skip
guard = False
fp32_only = False


def guarded(t: Tensor) -> Tensor:
    """A copy of `t` whose memory ends at a page that must not be touched; itself where that is off."""
    if not guard or t.numel() == 0 or not t.is_contiguous():
        return t
    size = t.numel() * t.element_size()
    pages = -(-size // PAGE) + 1
    memory = mmap.mmap(-1, pages * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + (pages - 1) * PAGE), PAGE, 0):
        raise OSError("mprotect")
    where = (pages - 1) * PAGE - size
    return torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=where).view(t.shape).copy_(t)


@dataclass
class Side:
    """One optimizer with its parameters; `draw` gives both sides the same random tensors."""

    params: list[nn.Parameter]
    optimizer: Any
    generator: torch.Generator
    torchs: bool
    low: bool
    rebuild: Callable[[Any], Any] = field(repr=False, default=lambda o: o)

    def draw(self, shape: Any, dtype: torch.dtype = FP32) -> Tensor:
        return guarded(torch.randn(shape, generator=self.generator).to(dtype))

    def pick(self, rng: random.Random) -> nn.Parameter:
        return rng.choice(self.params)

    def entry(self, rng: random.Random) -> tuple[Any, list[str]]:
        """A state entry and the names of its tensors of the parameter's shape."""
        p = self.pick(rng)
        entry = self.optimizer.state.get(p, {})
        known = [k + end for k in ("exp_avg", "exp_avg_sq", "momentum_buffer") for end in ("", "_codes")]
        names = [k for k in known if isinstance(entry.get(k), Tensor)]
        return entry, names


# ---- edits: of parameters ---------------------------------------------------------------------------------


def data_moved(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    p.data = guarded(p.data.clone())


def data_smaller(side: Side, rng: random.Random) -> None:
    p, count = side.pick(rng), rng.randrange(1, 10)
    p.data = p.data[:count]
    if rng.random() < 0.8:
        p.grad = None
        p.grad = side.draw(p.shape, p.dtype)


def data_larger(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    p.data = guarded(torch.cat([p.data, p.data]))
    p.grad = None
    p.grad = side.draw(p.shape, p.dtype)


def data_transposed(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    p.data = p.data.t() if p.dim() == 2 else p.data
    p.grad = None
    p.grad = side.draw(p.shape, p.dtype)


def data_relaid(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    p.data = p.data.transpose(0, -1).contiguous().transpose(0, -1)


def data_sliced(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    p.data = torch.cat([p.data, p.data], -1)[..., : p.shape[-1]]


def data_wide(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    p.grad = None
    p.data = p.data.double()
    p.grad = side.draw(p.shape).double()


def data_other_low(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    if side.low:
        p.grad = None
        p.data = p.data.to(rng.choice([BF16, FP16, FP32]))
        p.grad = side.draw(p.shape, p.dtype)


def data_copied_into(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    p.data.copy_(side.draw(p.shape, p.dtype))


def weight_changed_in_place(side: Side, rng: random.Random) -> None:
    with torch.no_grad():
        side.pick(rng).mul_(0.5).clamp_(-1, 1)


def weight_resized(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    with torch.no_grad():
        p.data.resize_(p.shape[:1])
        p.data.fill_(0.5)
    p.grad = None
    p.grad = side.draw(p.shape, p.dtype)


def empty(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    p.grad = None
    p.data = p.data[:0]
    p.grad = torch.zeros_like(p)


# ---- edits: of gradients ----------------------------------------------------------------------------------


def grad_dropped(side: Side, rng: random.Random) -> None:
    side.pick(rng).grad = None


def grad_relaid(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    if p.grad is not None:
        p.grad = p.grad.transpose(0, -1).contiguous().transpose(0, -1)


def grad_expanded(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    p.grad = None
    p.grad = torch.full((), 0.25, dtype=p.dtype).expand(p.shape)


def grad_sliced(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    if p.grad is not None:
        p.grad = torch.stack([p.grad, p.grad], -1)[..., 0]


def grad_of_other_dtype(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    p.grad_dtype = None
    # a bf16 gradient gives torch a bf16 buffer, where ours computes in fp32
    p.grad = side.draw(p.shape, rng.choice([BF16, FP16, torch.float64] if side.low else [torch.float64]))


def grad_data_smaller(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    if p.grad is not None:
        p.grad.data = p.grad.data[:1]


def grad_resized(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    if p.grad is not None:
        p.grad.resize_(1)


def grad_sparse(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    if p.grad is not None:
        p.grad = p.grad.to_sparse()


# ---- edits: of groups -------------------------------------------------------------------------------------


def number(side: Side, rng: random.Random) -> None:
    group = rng.choice(side.optimizer.param_groups)
    group["lr"] = rng.choice([1e-3, 1e-2, 0.0])
    group["weight_decay"] = rng.choice([0.0, 0.1])
    group["maximize"] = rng.choice([True, False])
    if "betas" in group:
        group["betas"] = rng.choice([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)])
    if "eps" in group:
        group["eps"] = rng.choice([1e-8, 1e-3])


def momentum(side: Side, rng: random.Random) -> None:
    group = rng.choice(side.optimizer.param_groups)
    if "momentum" in group:
        group["momentum"] = rng.choice([0, 0.5, 0.9])
        group["dampening"] = rng.choice([0, 0.1])
        group["nesterov"] = group["momentum"] > 0 and group["dampening"] == 0 and rng.random() < 0.5


def amsgrad(side: Side, rng: random.Random) -> None:
    group = rng.choice(side.optimizer.param_groups)
    if "amsgrad" in group:
        group["amsgrad"] = not group["amsgrad"]


def grown(side: Side, rng: random.Random) -> None:
    dtype = side.params[0].dtype
    p = nn.Parameter(side.draw((rng.randrange(1, 9), 3), dtype))
    p.grad = side.draw(p.shape, dtype)
    side.params.append(p)
    side.optimizer.add_param_group({"params": [p], "lr": 1e-3})


def shrunk(side: Side, rng: random.Random) -> None:
    group = rng.choice(side.optimizer.param_groups)
    if len(side.params) > 1 and len(group["params"]) > 1:
        gone = group["params"].pop()
        side.params[:] = [p for p in side.params if p is not gone]


def reordered(side: Side, rng: random.Random) -> None:
    rng.choice(side.optimizer.param_groups)["params"].reverse()


def replaced(side: Side, rng: random.Random) -> None:
    group = rng.choice(side.optimizer.param_groups)
    old = group["params"][0]
    new = nn.Parameter(guarded(old.detach().clone()))
    new.grad = side.draw(new.shape, new.dtype)
    group["params"][0] = new
    side.params[:] = [new if p is old else p for p in side.params]


def master_of_group(side: Side, rng: random.Random) -> None:
    if side.low:
        rng.choice(side.optimizer.param_groups)["master"] = rng.choice(MASTERS)


def states_of_group(side: Side, rng: random.Random) -> None:
    if side.low:
        rng.choice(side.optimizer.param_groups)["state_dtype"] = rng.choice(STATES)


# ---- edits: of states -------------------------------------------------------------------------------------


def state_cleared(side: Side, rng: random.Random) -> None:
    side.optimizer.state.clear()


def entry_cleared(side: Side, rng: random.Random) -> None:
    side.optimizer.state.pop(side.pick(rng), None)


def entry_replaced(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    if p in side.optimizer.state:
        side.optimizer.state[p] = copy.deepcopy(side.optimizer.state[p])


def states_swapped_for_a_dict(side: Side, rng: random.Random) -> None:
    old = side.optimizer.state
    side.optimizer.state = collections.defaultdict(dict, {p: dict(entry) for p, entry in old.items()})


def moment_deleted(side: Side, rng: random.Random) -> None:
    entry, names = side.entry(rng)
    if names:
        del entry[rng.choice(names)]


def moment_set(side: Side, rng: random.Random) -> None:
    entry, names = side.entry(rng)
    for name in names:
        if entry[name].dtype == FP32:
            entry[name] = side.draw(entry[name].shape).abs()


def moment_changed_in_place(side: Side, rng: random.Random) -> None:
    entry, names = side.entry(rng)
    for name in names:
        if entry[name].is_floating_point():
            entry[name].mul_(0.5)


def moment_data_moved(side: Side, rng: random.Random) -> None:
    entry, names = side.entry(rng)
    for name in names:
        entry[name].data = guarded(entry[name].data.clone())


def moment_smaller(side: Side, rng: random.Random) -> None:
    entry, names = side.entry(rng)
    if names:
        name = rng.choice(names)
        entry[name] = guarded(entry[name][:1].clone())


def moment_data_smaller(side: Side, rng: random.Random) -> None:
    entry, names = side.entry(rng)
    if names:
        name = rng.choice(names)
        entry[name].data = guarded(entry[name].data[:1].clone())


def moment_resized(side: Side, rng: random.Random) -> None:
    entry, names = side.entry(rng)
    if names:
        entry[rng.choice(names)].resize_(1)


def moment_relaid(side: Side, rng: random.Random) -> None:
    entry, names = side.entry(rng)
    for name in names:
        if entry[name].dim() and entry[name].dtype == FP32:
            entry[name] = entry[name].transpose(0, -1).contiguous().transpose(0, -1)


def moment_of_other_dtype(side: Side, rng: random.Random) -> None:
    entry, names = side.entry(rng)
    for name in names:
        if entry[name].is_floating_point():
            # torch would go on in bf16, where ours computes in fp32
            entry[name] = entry[name].to(
                rng.choice([torch.float64, BF16, FP16] if side.low else [torch.float64])
            )


def moments_swapped(side: Side, rng: random.Random) -> None:
    entry, names = side.entry(rng)
    if len(names) == 2 and all(entry[name].dtype == FP32 for name in names):
        entry[names[0]], entry[names[1]] = entry[names[1]].abs(), entry[names[0]].abs()


def step_set(side: Side, rng: random.Random) -> None:
    (entry, _), step = side.entry(rng), rng.randrange(1, 50)
    if isinstance(entry.get("step"), Tensor) and "momentum" not in side.optimizer.defaults:
        entry["step"] = torch.tensor(float(step))


def step_filled(side: Side, rng: random.Random) -> None:
    (entry, _), step = side.entry(rng), rng.randrange(1, 50)
    if isinstance(entry.get("step"), Tensor) and "momentum" not in side.optimizer.defaults:
        entry["step"].fill_(step)


def note_kept_in_state(side: Side, rng: random.Random) -> None:
    p = side.pick(rng)
    if p in side.optimizer.state:
        side.optimizer.state[p]["note"] = torch.ones(3)


# ---- edits: of the whole ----------------------------------------------------------------------------------


def reloaded(side: Side, rng: random.Random) -> None:
    side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))


def rebuilt(side: Side, rng: random.Random) -> None:
    """A new optimizer that loads the old one's state."""
    new = side.rebuild([{"params": list(group["params"])} for group in side.optimizer.param_groups])
    new.load_state_dict(side.optimizer.state_dict())
    side.optimizer = new


def nothing(side: Side, rng: random.Random) -> None:
    pass


EDITS: list[Callable[[Side, random.Random], None]] = [
    data_moved, data_smaller, data_larger, data_transposed, data_relaid, data_sliced, data_wide,
    data_other_low, data_copied_into, weight_changed_in_place, weight_resized, empty, grad_dropped,
    grad_relaid, grad_expanded, grad_sliced, grad_of_other_dtype, grad_data_smaller, grad_resized,
    grad_sparse, number, momentum, amsgrad, grown, shrunk, reordered, replaced,
    master_of_group, states_of_group, state_cleared, entry_cleared, entry_replaced,
    states_swapped_for_a_dict, moment_deleted, moment_set, moment_changed_in_place,
    moment_data_moved, moment_smaller, moment_data_smaller, moment_resized, moment_relaid,
    moment_of_other_dtype, moments_swapped, step_set, step_filled, note_kept_in_state, reloaded,
    rebuilt, nothing,
]  # fmt: skip


# ---- two sides, step by step ------------------------------------------------------------------------------


def sides(seed: int, rng: random.Random, kinds: dict[str, tuple[Any, Any]] = KINDS) -> list[Side]:
    """Ours and its peer, from the same start."""
    low = rng.random() < 0.5 and not fp32_only
    dtype = rng.choice([BF16, BF16, FP16]) if low else FP32
    name = rng.choice(list(kinds))
    shapes = [
        rng.choice([(6, 4), (5,), (3, 3), (2, 3, 4), (70, 9), (1,)]) for _ in range(rng.randrange(1, 5))
    ]
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": rng.choice([0.0, 0.1])}
    if name == "SGD":
        options["momentum"] = rng.choice([0, 0.9])
    masters = ["exact", "exact", *(m for m in MASTERS if dtype is BF16 or m != "stochastic")]
    own = {"master": rng.choice(masters), "state_dtype": rng.choice(STATES), "seed": rng.randrange(9)}
    made: list[Side] = []
    for turn in range(2):
        generator = torch.Generator().manual_seed(seed)
        params = [nn.Parameter(guarded(torch.randn(s, generator=generator).to(dtype))) for s in shapes]
        build = _builder(kinds[name], low, bool(turn), options, own)
        groups = [{"params": params[:1]}, {"params": params[1:]}] if len(params) > 2 else params
        made.append(Side(params, build(groups), generator, bool(turn) and not low, low, build))
    return made


STATES = ["fp32", "bf16", "8bit"]
MASTERS: list[Any] = ["exact", "fp32", "stochastic", None]


def _builder(kinds: Any, low: bool, peer: bool, options: dict[str, Any], own: dict[str, Any]) -> Any:
    if not low:
        kind = kinds[peer]
        return lambda groups: kind(groups, **options)
    backend = {"backend": "reference" if peer else "auto"} if isinstance(kinds[0], type) else {}
    return lambda groups: kinds[0](groups, **options, **own, **backend)


def take(side: Side, edits: list[Callable[..., None]], seed: int, refill: bool) -> str:
    """Gradients, edits and one step; what was raised, or nothing."""
    rng = random.Random(seed)
    for p in side.params:
        if refill or p.grad is None or p.grad.shape != p.shape:
            p.grad = None
            p.grad = side.draw(p.shape, p.dtype)
    for edit in edits:
        try:
            edit(side, rng)
        except HalfstepError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"raised {type(error).__name__}: {error}"
    try:
        side.optimizer.step()
    except HalfstepError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    return ""


def differ(ours: Side, peer: Side) -> str:
    """Where the weights differ, or nothing."""
    for i, (p, q) in enumerate(zip(ours.params, peer.params, strict=True)):
        if p.shape != q.shape:
            return f"parameter {i}: shapes {list(p.shape)} and {list(q.shape)}"
        if ours.low:
            same = torch.equal(p.detach().nan_to_num(7), q.detach().nan_to_num(7))
        else:
            same = torch.allclose(p.float(), q.float(), rtol=1e-4, atol=2e-5, equal_nan=True)
        if not same:
            return f"parameter {i}: off by {(p.float() - q.float()).abs().max().item():.3g}"
    return ""


def run(seed: int) -> tuple[str, str]:
    """One seed: ("same" | "refused" | "both raised" | "only torch raised" | "FAILED", what happened)."""
    rng = random.Random(seed)
    ours, peer = sides(seed, rng)
    story: list[str] = []
    for _ in range(rng.randrange(4, 8)):
        edits = rng.choices(EDITS, k=rng.choice([0, 1, 1, 2]))
        story.append("+".join(edit.__name__ for edit in edits) or "-")
        own, refill = rng.randrange(1 << 30), rng.random() < 0.8
        said = [take(side, edits, own, refill) for side in (ours, peer)]
        what = f"{type(ours.optimizer).__name__} {' '.join(story)}: ours {said[0]!r}, peer {said[1]!r}"
        if any(said):
            if ours.low:
                same = said[0].partition(":")[0] == said[1].partition(":")[0]
                calm = "refused" if said[0].startswith("refused") else "both raised"
                return (calm if same else "FAILED"), what
            if said[0].startswith("refused"):
                return "refused", what
            if said[0]:
                return ("both raised" if said[1] else "FAILED"), what
            return "only torch raised", what
        wrong = differ(ours, peer)
        if wrong:
            return "FAILED", f"{what}: {wrong}"
    return "same", ""


def main(first: int, count: int) -> int:
    """Run seeds; print failures and counts."""
    torch.set_num_threads(1)
    found: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + count):
        print(f"\rseed {seed}", end="", file=sys.stderr, flush=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome, what = run(seed)
        found[outcome] += 1
        if outcome == "FAILED":
            print(seed, what, flush=True)
    print(dict(found))
    return found["FAILED"]


if __name__ == "__main__":
    guard, fp32_only = "--guard" in sys.argv, "--fp32" in sys.argv
    sys.exit(min(1, main(int(sys.argv[1]), int(sys.argv[2]))))
