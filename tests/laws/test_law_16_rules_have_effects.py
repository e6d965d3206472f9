"""Law 16, a rule has an effect, or it is an error: every option changes something in a small run.

The options are read from the signatures, so that one that is added fails here until it has a row. Seen are
losses, weights, gradients, dtypes, strides, bytes, the ops that ran and files; not a repr, a state dict or a
warning.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.errors import HalfstepError
from tests import ranks
from tests.compiling import traced

Seen = list[Any]


@dataclass(frozen=True)
class Row:
    """A value that is not the default, beside which other options, on what run, and whether it is refused."""

    value: Any
    beside: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    refused: bool = False


class Ops(TorchDispatchMode):
    """Notes which op ran in which dtypes, which is what a choice of kernels comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtypes = [a.dtype for a in args if isinstance(a, torch.Tensor)]
        self.seen.append((str(func), *dtypes))
        return func(*args, **(kwargs or {}))


def plain(tensor: torch.Tensor | None) -> Any:
    """A tensor as something that `==` compares: NaN equals NaN."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return str(tensor.dtype), tensor.stride(), str(tensor.double().tolist())


def bytes_of(state: Any) -> Seen:
    """The dtype and bytes of every tensor in optimizer states."""
    tensors = [v for entry in state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
    return sorted((str(t.dtype), t.numel() * t.element_size()) for t in tensors)


# ---- prepare --------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A convolution, a norm and a head, with a table that no weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.LayerNorm(16), nn.Linear(16, 8)
        self.register_buffer("table", torch.rand(16) * 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.conv(x).flatten(1).view(len(x), 4, -1).mean(2).repeat(1, 4))
        return self.head(h + (h * self.table).mean() * 0)


def training(options: dict[str, Any], bad: tuple[int, ...] = ()) -> Seen:
    """Two steps under `prepare(**options)`, in those of `bad` on a batch that holds inf."""
    torch.manual_seed(0)
    net, second = Net(), nn.Linear(2, 2)
    x = torch.rand(4, 3, 6, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = dict(options)
    model = [net, second] if options.pop("model", None) else net
    optimizers = [] if options.pop("optimizer", True) is None else [optimizer]
    amp = hs.prepare(model, optimizers, **{"kernels": "native", **options})
    seen: Seen = []
    try:
        for i in range(2):
            with amp.autocast():
                out = net(x * (torch.inf if i in bad else 1))
                loss = out.float().square().mean()
            amp.backward(loss)
            seen += [plain(out), plain(loss), *(plain(p.grad) for p in net.parameters())]
            amp.step()
    except (HalfstepError, FloatingPointError) as error:
        seen.append(type(error).__name__)
    return seen + [plain(t) for m in (net, second) for t in (*m.parameters(), *m.buffers())]


def kernels(options: dict[str, Any]) -> Seen:
    """Which ops two steps ran."""
    with Ops() as ops:
        training(options)
    return ops.seen


def train_step(amp: Any, x: torch.Tensor) -> torch.Tensor:
    """No step that anything here makes."""
    raise AssertionError


FULL_HEAD = hs.Plan((hs.PlanRule("head", rule=hs.Rule.FULL),))
PREPARE: dict[str, list[Row]] = {
    "model": [Row("and a second", {"level": "O2"})],
    "optimizer": [Row(None)],
    "level": [Row("O0"), Row("O2"), Row("O3")],
    "dtype": [Row("fp16")],
    "policy": [Row("apex", {"dtype": "bf16"}), Row(hs.Policy().with_rules(full=["conv2d", "linear"]))],
    "plan": [Row(FULL_HEAD)],
    "layout": [Row("channels_last")],
    "loss_scale": [Row(1024.0), Row("dynamic"), Row("headroom"), Row("none", {"dtype": "fp16"})],
    "skip_nonfinite": [
        Row(True, run={"bad": (0,)}),
        Row(False, {"dtype": "fp16"}, {"bad": (0,)}),
    ],
    "on_nonfinite": [
        Row("raise", run={"bad": (0,)}),
        Row("skip", run={"bad": (0,)}),
        Row(
            "continue", {"loss_scale": 2.0}, refused=True
        ),  # without a scale it is the default, less a warning
    ],
    "max_skips": [Row(1, {"dtype": "fp16"}, {"bad": (0, 1)})],
    "step": [Row(train_step, refused=True)],
    "batch": [Row((torch.zeros(1),), refused=True)],
    "seconds": [Row(5.0, refused=True)],
    "enabled": [Row(False)],
    "compile": [Row(True, run={"graphs": True}), Row("fused", refused=True)],
    "kernels": [Row("rounded", run={"kernels": True})],
    "norm_group": [],  # on two ranks, below
    "group": [],
}


def run_prepare(options: dict[str, Any], **run: Any) -> Seen:
    """What is seen of a training, or of the kernels that it took, or how many graphs it compiled."""
    if run.pop("graphs", False):
        with traced() as graphs:
            training(options)
        return [len(graphs)]
    return kernels(options) if run.pop("kernels", False) else training(options, **run)


def on_two_ranks(rank: int) -> dict[str, list[Seen]]:
    """The step without and with each option."""
    alone = [dist.new_group([r]) for r in range(2)][rank]
    groups = {"norm_group": dist.group.WORLD, "group": alone}
    return {
        option: [clipped_step(rank, option, None), clipped_step(rank, option, group)]
        for option, group in groups.items()
    }


def clipped_step(rank: int, option: str, group: Any) -> Seen:
    """A clipped step on gradients that differ by rank; for `group` they are inf on rank 1."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    amp = hs.prepare(
        net, hs.optim.SGD(net.parameters(), lr=0.1), kernels="native", skip_nonfinite=True, **{option: group}
    )
    x = torch.full((2, 4), torch.inf if option == "group" and rank else 1.0 + rank)
    with amp.autocast():
        loss = net(x).float().square().mean()
    amp.backward(loss)
    amp.step(clip_norm=0.01)
    return [plain(p) for p in net.parameters()]


def test_groups_of_ranks_change_the_step():
    first = ranks.run(on_two_ranks, 2)[0]
    assert set(first) == {option for option, rows in PREPARE.items() if not rows}
    for option, (without, with_it) in first.items():
        assert without != with_it, option


# ---- plans and policies -----------------------------------------------------------------------------------


def with_plan(options: dict[str, Any], level: str = "O2") -> Seen:
    """A training under a plan of one rule, and the file that it makes."""
    rule = hs.PlanRule(**{"pattern": "head", "rule": hs.Rule.FULL, **options})
    plan = hs.Plan((rule,))
    return [plan.to_toml(), *training({"plan": plan, "level": level})]


def trained_under_plan(options: dict[str, Any], level: str = "O2") -> Seen:
    """A training under a plan of one rule."""
    return with_plan(options, level)[1:]


PLAN_RULE: dict[str, list[Row]] = {
    "pattern": [Row("conv")],
    "dtype": [Row("bf16", {"rule": hs.Rule.KEEP}), Row("bf16", run={"level": "O1"})],
    "rule": [Row(hs.Rule.LOW), Row(hs.Rule.KEEP, {"rule": None, "dtype": "bf16"}, {"level": "O1"})],
    "reason": [Row("a router", run={"file": True})],
    "ops": [Row({"linear": hs.Rule.FULL}, {"rule": None, "dtype": torch.bfloat16})],
    "required": [Row(False, {"pattern": "nowhere"})],
    "output": [
        Row("fp32", {"rule": None, "dtype": "bf16"}),
        Row("fp16", {"rule": None, "ops": {"linear": hs.Rule.LOW}}, {"level": "O1"}),
    ],
    "buffers": [Row(False, {"pattern": "**", "rule": None, "dtype": "bf16"})],
}


def run_plan(options: dict[str, Any], file: bool = False, **run: Any) -> Seen:
    """What is seen of a training; of the file, for an option that is only for people."""
    try:
        return with_plan(options, **run) if file else trained_under_plan(options, **run)
    except hs.PlanError as error:  # a pattern that matches nothing
        return [str(error)]


def under_policy(options: dict[str, Any]) -> Seen:
    """The dtypes and values of ops in a region whose policy has these rules."""
    policy = hs.Policy().with_rules(**options)
    x, w = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)), torch.rand(8, 8)
    with hs.autocast(policy=policy, kernels="native"):
        try:
            ops = [nn.functional.linear(x, torch.ones_like(w)), x.exp(), x.softmax(1), x.bfloat16().exp()]
        except HalfstepError as error:
            return [type(error).__name__]
    return [plain(t) for t in ops]


WITH_RULES: dict[str, list[Row]] = {
    "low": [Row(["exp"])],
    "full": [Row(["linear"])],
    "keep": [Row(["linear"]), Row(["exp"])],
    "widest": [Row(["linear"])],
    "banned": [Row(["linear"])],
    "fp32_out": [Row(["linear"])],
}


# ---- optimizers -------------------------------------------------------------------------------------------


def optimization(cls: Any, options: dict[str, Any], bad: bool = False, ops: bool = False) -> Seen:
    """Four steps of two micro-batches on bf16 weights."""
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.randn(64, 64, generator=generator).bfloat16())
    rest = nn.Parameter(torch.ones(64).bfloat16())
    alone = cls is not hs.optim.Muon
    optimizer = cls([w] if alone else [{"params": [w]}, {"params": [rest], "algorithm": "adamw"}], **options)
    noted = Ops()
    seen: Seen = []
    for i in range(4):
        for _ in range(2):
            upstream = torch.randn(64, 64, generator=generator).bfloat16() / (i + 1) ** 2
            (w * rest * (upstream * torch.inf if bad and i == 1 else upstream)).sum().backward()
        seen.append(plain(w.grad))
        if ops:
            with noted:
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return [*seen, plain(w), *map(plain, optimizer.masters().values()), bytes_of(optimizer.state), noted.seen]


KEEPING: dict[str, list[Row]] = {
    "maximize": [Row(True)],
    "master": [Row("fp32"), Row("stochastic"), Row(None)],
    "state_dtype": [Row("bf16"), Row("8bit")],
    "clip_norm": [Row(0.01)],
    "skip_nonfinite": [Row(True, run={"bad": True})],
    "release_gradients": [Row(True)],
    "accumulate": [Row("fp32")],
    "seed": [Row(1, {"master": "stochastic"})],
    "backend": [Row("reference", run={"ops": True})],
    "differentiable": [Row(True, refused=True)],
    "lr": [Row(0.03)],
    "weight_decay": [Row(0.5)],
}
MOMENTS = {"betas": [Row((0.5, 0.6))]}
ADAM = MOMENTS | {"eps": [Row(0.1)], "amsgrad": [Row(True)], "bias_correction": [Row(False)]}
OPTIM: dict[str, dict[str, list[Row]]] = {
    "Adam": KEEPING | ADAM | {"decoupled_weight_decay": [Row(True, {"weight_decay": 0.5})]},
    "AdamW": KEEPING | ADAM,
    "Lion": KEEPING | MOMENTS,
    "Muon": {
        **KEEPING,
        "momentum": [Row(0.5)],
        "nesterov": [Row(False)],
        "ns_coefficients": [Row((2.0, -1.5, 0.5))],
        "eps": [Row(1e3)],
        "ns_steps": [Row(2)],
        "adjust_lr_fn": [Row("match_rms_adamw")],
    },
    "SGD": {
        **KEEPING,
        "state_dtype": [Row(row.value, {"momentum": 0.9}) for row in KEEPING["state_dtype"]],
        "momentum": [Row(0.9)],
        "dampening": [Row(0.5, {"momentum": 0.9})],
        "nesterov": [Row(True, {"momentum": 0.9})],
    },
}


def options_of(cls: type) -> set[str]:
    """The names of all arguments of an optimizer's constructor, those of its bases included."""
    bases = cls.__mro__[: cls.__mro__.index(torch.optim.Optimizer)]
    each = [p for c in bases for p in inspect.signature(c.__init__).parameters.values()]
    named = {p.name for p in each if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return named - {"self", "params", "defaults"}


def classes_of_optim() -> set[str]:
    """The optimizers that `hs.optim` exports."""
    each = {name: getattr(hs.optim, name) for name in hs.optim.__all__}
    return {n for n, c in each.items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}


def optimizer_options(name: str) -> set[str]:
    """AdamW takes no decoupled_weight_decay of its own."""
    return options_of(getattr(hs.optim, name)) - ({"decoupled_weight_decay"} if name == "AdamW" else set())


MASTER_WEIGHTS: dict[str, list[Row]] = {
    "model": [Row("the module of the weights")],
    "names": [Row("those of the module")],
    "initial": [Row("fp32 values")],
    "accumulate": [Row("fp32")],
}


def pair_of(**values: float) -> nn.Module:
    """A module of bf16 weights in this order."""
    net = nn.Module()
    for name, value in values.items():
        net.register_parameter(name, nn.Parameter(torch.full((4,), value).bfloat16()))
    return net


def masters_of(net: nn.Module, options: dict[str, Any]) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer over the weights, in their order, and its masters."""
    given = {
        "model": net,
        "names": list(net.named_parameters()),
        "initial": {p: p.detach().float() + 1e-4 for p in net.parameters()},
    }
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return optimizer, hs.MasterWeights(optimizer, **{k: given.get(k, v) for k, v in options.items()})


def with_masters(options: dict[str, Any]) -> Seen:
    """A step of two micro-batches, and the weights after a state whose order is another is loaded."""
    net, other = pair_of(a=1.0, b=2.0), pair_of(b=8.0, a=4.0)
    optimizer, masters = masters_of(net, options)
    for _ in range(2):
        (net.a * 3 + net.b).sum().backward()
    seen = [plain(p.grad) for p in net.parameters()]
    optimizer.step()
    seen += [plain(m) for m in masters.masters().values()]
    try:
        optimizer.load_state_dict(masters_of(other, {"model": other})[0].state_dict())
    except HalfstepError as error:
        seen.append(type(error).__name__)
    return [*seen, *map(plain, net.parameters()), *map(plain, masters.masters().values())]


# ---- the property -----------------------------------------------------------------------------------------

TABLES: dict[str, tuple[set[str], dict[str, list[Row]], Callable[..., Seen]]] = {
    "prepare": (set(inspect.signature(hs.prepare).parameters), PREPARE, run_prepare),
    "PlanRule": ({f.name for f in dataclasses.fields(hs.PlanRule)}, PLAN_RULE, run_plan),
    "with_rules": (
        set(inspect.signature(hs.Policy.with_rules).parameters) - {"self"},
        WITH_RULES,
        under_policy,
    ),
    "MasterWeights": (
        set(inspect.signature(hs.MasterWeights).parameters) - {"optimizer"},
        MASTER_WEIGHTS,
        with_masters,
    ),
    **{
        name: (
            optimizer_options(name),
            OPTIM.get(name, {}),
            lambda options, name=name, **run: optimization(getattr(hs.optim, name), options, **run),
        )
        for name in sorted(classes_of_optim())
    },
}
CASES = [
    pytest.param(table, option, n, id=f"{table}-{option}-{n}")
    for table, (_, rows, _) in TABLES.items()
    for option, own in rows.items()
    for n in range(len(own))
]


@pytest.mark.parametrize("table", TABLES)
def test_every_option_has_a_row(table):
    options, rows, _ = TABLES[table]
    assert set(rows) == options, "give the option a Row: a value, and the run in which it is seen"


@pytest.mark.parametrize(("table", "option", "n"), CASES)
def test_an_option_is_seen_in_a_run_or_refused(table, option, n):
    _, rows, run = TABLES[table]
    row = rows[option][n]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = run(dict(row.beside), **row.run)
        if row.refused:
            with pytest.raises(HalfstepError, match=option):
                run({**row.beside, option: row.value}, **row.run)
            return
        assert run(dict(row.beside), **row.run) == before, "the run itself is not the same twice"
        assert run({**row.beside, option: row.value}, **row.run) != before


@pytest.mark.parametrize("name", ["foreach", "fused", "capturable"])
def test_torch_s_words_for_how_a_step_runs_are_refused(name):
    """There is one way; a group of torch's may hold them."""
    w = nn.Parameter(torch.ones(4))
    with pytest.raises(TypeError, match=f"{name}=True: leave it out"):
        hs.optim.AdamW([w], **{name: True})
    theirs = torch.optim.AdamW([w], **({name: True} if name != "capturable" else {}))
    hs.optim.AdamW([w]).load_state_dict(theirs.state_dict())
