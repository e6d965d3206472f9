"""A weight that is set by hand is what it was set to, wherever it is looked at next.

Programs drawn from a seed change weights in every way that users do, between steps, saves and evaluations.
The oracle is a few lines of torch: fp32 values (16-bit ones at O3) with a plain optimizer of torch, and the
rule for edits of 16-bit weights. Each weight's loss is half its square, so that its gradient is its value.
"""

import copy
import random

import pytest
import torch
from torch import nn

import halfstep as hs

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, eps=1e-3),
    "ours SGD exact": lambda p: hs.optim.SGD(p, lr=0.05, momentum=0.5),
    "ours AdamW exact": lambda p: hs.optim.AdamW(p, lr=0.05, weight_decay=0.1, eps=1e-3),
    "ours SGD fp32": lambda p: hs.optim.SGD(p, lr=0.05, momentum=0.5, master="fp32"),
    "ours AdamW fp32": lambda p: hs.optim.AdamW(p, lr=0.05, weight_decay=0.1, eps=1e-3, master="fp32"),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 2))
        self.bias = nn.Parameter(torch.randn(3))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x):
        return half_squares(self.parameters())


def half_squares(weights):
    return sum((wide * wide).sum() for wide in (w.float() for w in weights)) * 0.5


EDITS = {
    "fill": lambda t, r: t.fill_(r.uniform(-1, 1)),
    "zero": lambda t, r: t.zero_(),
    "init": lambda t, r: t.copy_(torch.tensor([r.gauss(0, 1) for _ in range(t.numel())]).view(t.shape)),
    "row": lambda t, r: t[0].fill_(r.uniform(-1, 1)),
    "prune": lambda t, r: t[-1].zero_(),
    "element": lambda t, r: t.view(-1)[0].fill_(r.uniform(-1, 1)),
    "clamp": lambda t, r: t.clamp_(-0.3, 0.3),
    "decay": lambda t, r: t.mul_(0.75),
}


class Program:
    """One run: the training and what its weights have to be."""

    def __init__(self, kind, seed, path):
        self.random = random.Random(f"{kind} {seed}")
        torch.manual_seed(seed)
        self.kind, self.path, self.ours = kind, path, kind.startswith("ours")
        self.level = self.random.choice(["O1", "O2", "O2", "O2", "O3"])
        self.low = self.random.choice(list(DTYPES))
        self.model = Net()
        self.weights = list(self.model.parameters())
        self.optimizer = OPTIMIZERS[kind](self.weights)
        self.held = DTYPES[self.low] if self.level == "O3" and not self.ours else torch.float32
        self.truth = [nn.Parameter(p.detach().clone().to(self.held)) for p in self.weights]
        self.slack = [torch.zeros_like(t, dtype=torch.float32) for t in self.truth]
        self.oracle = OPTIMIZERS[kind.split()[1] if self.ours else kind](self.truth)
        self.through_model, self.through_groups = set(), set()
        self.snapshots = []
        self.prepare()

    def prepare(self):
        self.amp = hs.prepare(
            self.model, self.optimizer, level=self.level, dtype=self.low, loss_scale="none", kernels="native"
        )
        if self.ours and self.level == "O3":  # whose masters start as the 16-bit values
            share = 2**-8 if self.low == "bf16" else 2**-11
            self.slack = [slack + t.detach().abs() * share for slack, t in zip(self.slack, self.truth)]
            self.settle("prepared")

    @property
    def two_tensors(self):
        return self.level == "O2" and not self.ours

    def stored(self, i):
        dtype = torch.float32 if self.level == "O1" else DTYPES[self.low]
        return self.truth[i].detach().to(dtype, copy=True)

    # ---- what is seen -------------------------------------------------------------------------------

    def check(self, where, found, coarse=False):
        self.through_model, self.through_groups = set(), set()
        for i, value in enumerate(found):
            wanted = self.truth[i].detach()
            slack = self.slack[i]
            if coarse or (self.ours and self.level == "O3"):  # 16 bits are shown of what it keeps
                least = 2**-120 if self.low == "bf16" else 2**-24
                slack = slack + 2**-7 * wanted.float().abs() + least
            far = (value.detach().float() - wanted.float()).abs() > slack
            assert not far.any(), f"{where}: weight {i} is {value.tolist()}, was set to {wanted.tolist()}"

    def evaluate(self):
        with self.amp.evaluating():
            self.check("evaluating()", self.model.parameters())

    def copies(self):
        self.check("deepcopy", copy.deepcopy(self.model).parameters())
        if self.ours:
            _, optimizer = copy.deepcopy((self.model, self.optimizer))
            if self.level != "O1":
                self.check("deepcopy with optimizer", optimizer.masters().values())

    def exports(self):
        self.check("fp32_state_dict", hs.optim.fp32_state_dict(self.model, self.optimizer).values())
        if self.two_tensors:
            self.check("MasterWeights.state_dict", self.amp.masters[0].state_dict().values())

    def states(self):
        saved = self.optimizer.state_dict()
        if self.two_tensors:
            self.check("optimizer.state_dict", saved["masters"].values())
        if self.random.random() < 0.5:
            self.optimizer.load_state_dict(copy.deepcopy(saved))
            self.settle("own state loaded")

    def model_state(self):
        self.through_groups = set()
        for i, value in enumerate(self.model.state_dict().values()):
            if not self.ours:
                assert torch.equal(value, self.stored(i)), f"model.state_dict: weight {i}"

    def reverted(self):
        self.amp.revert()
        self.check("revert()", self.model.parameters())
        assert all(p.dtype == torch.float32 for p in self.model.parameters())
        self.prepare()

    def settle(self, where):
        """After a step or a load: what `hs.optim` holds, where that is known to some bits only."""
        if self.ours and self.level != "O1":
            held = [self.optimizer.masters()[p] for p in self.weights]
            self.check(where, held)
            self.keep(held)

    @torch.no_grad()
    def keep(self, values):
        for truth, value, slack in zip(self.truth, values, self.slack):
            truth.copy_(value)
            slack.zero_()

    # ---- what is done -------------------------------------------------------------------------------

    def step(self):
        with self.amp.autocast():
            loss = self.model(torch.ones(1))
        weights = [p.detach().clone() for p in self.weights] if self.ours else [*map(self.stored, range(4))]
        assert loss.detach() == half_squares(weights).to(loss.dtype), "forward()"
        if self.ours:  # whose rounding of ties is its own
            self.check("forward()", weights, coarse=self.level != "O1")
        self.amp.backward(loss)
        self.amp.step()
        for truth, weight in zip(self.truth, weights):
            truth.grad = weight.to(self.held)
        self.oracle.step()
        self.through_model, self.through_groups = set(), set()
        if self.ours:
            for truth, slack in zip(self.truth, self.slack):
                slack += truth.detach().float().abs() * 2**-18 + 2**-22
        self.settle("step()")

    def edit_model(self):
        i, edit = self.random.randrange(4), self.random.choice(list(EDITS))
        self.one_side(i, self.through_groups)
        self.through_model.add(i)
        self.edit(i, edit, self.weights[i], self.stored(i))

    @torch.no_grad()
    def edit(self, i, name, target, before):
        number = self.random.random()
        target = target if self.random.random() >= 0.5 else target.data
        EDITS[name](target, random.Random(number))
        after = before.clone()
        EDITS[name](after, random.Random(number))
        self.was_set(i, before, after)

    @torch.no_grad()
    def was_set(self, i, before, after):
        """The rule: an element that changed is what it was set to, any other what it was.

        Exact masters keep that to half a unit of 16 bits.
        """
        changed = after != before
        self.truth[i].copy_(torch.where(changed, after.to(self.held), self.truth[i]))
        if self.kind.endswith("exact") and self.level != "O1":
            share, least = (2**-8, 2**-133) if self.low == "bf16" else (2**-11, 2**-25)
            slack = after.float().abs() * share + least
            self.slack[i] = torch.maximum(self.slack[i], slack) if not changed.all() else slack

    def edit_groups(self):
        i, edit = self.random.randrange(4), self.random.choice(list(EDITS))
        held = [p for group in self.optimizer.param_groups for p in group["params"]][i]
        if not self.two_tensors:
            return self.edit(i, edit, held, self.stored(i))
        self.one_side(i, self.through_model)
        self.through_groups.add(i)
        return self.edit(i, edit, held, self.truth[i].detach().clone())

    def one_side(self, i, others):
        """Both sides of a weight may be changed, but not without a look between."""
        if self.two_tensors and i in others:
            self.amp.masters[0].pairs()
            self.through_model, self.through_groups = set(), set()

    def load_weights(self):
        dtype = self.random.choice([torch.float32, DTYPES[self.low]])
        given = {
            name: torch.randn(
                p.shape, generator=torch.Generator().manual_seed(self.random.randrange(999))
            ).to(dtype)
            for name, p in self.model.named_parameters()
            if self.random.random() < 0.6
        }
        for i, name in enumerate(dict(self.model.named_parameters())):
            if name in given:
                before = self.stored(i)
                self.was_set(i, before, given[name].to(before.dtype))
                if self.level == "O2" and dtype == torch.float32:
                    self.keep_one(i, given[name])
        self.through_groups = set()
        self.through_model |= {0, 1, 2, 3}
        self.model.load_state_dict(given, strict=False)

    @torch.no_grad()
    def keep_one(self, i, value):
        self.truth[i].copy_(value)
        self.slack[i].zero_()

    def snapshot(self):
        held = [t.detach().clone() for t in self.truth], [s.clone() for s in self.slack]
        states = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict())
        self.through_model, self.through_groups = set(), set()
        self.snapshots.append((*held, copy.deepcopy(self.oracle.state_dict()), *states))

    def resume(self):
        if not self.snapshots:
            return self.snapshot()
        truth, slack, oracle, weights, states = self.random.choice(self.snapshots)
        loads = [(self.model, weights), (self.optimizer, states)]
        if self.random.random() < 0.5 and not self.ours:
            loads.reverse()
        for part, state in loads:
            part.load_state_dict(copy.deepcopy(state))
        self.restored(truth, slack, oracle)
        return self.settle("resumed")

    def restored(self, truth, slack, oracle):
        self.keep(truth)
        self.slack = [s.clone() for s in slack]
        self.oracle.load_state_dict(copy.deepcopy(oracle))
        self.through_model, self.through_groups = set(), set()

    def save(self):
        self.amp.save(self.path)
        truth, slack = [t.detach().clone() for t in self.truth], [s.clone() for s in self.slack]
        oracle = copy.deepcopy(self.oracle.state_dict())
        self.through_model, self.through_groups = set(), set()
        for _ in range(self.random.randrange(3)):
            self.do(["step", "edit_model", "edit_groups"])
        self.amp.load(self.path)
        self.restored(truth, slack, oracle)
        self.settle("Session.load")

    def do(self, names):
        getattr(self, self.random.choice(names))()

    def run(self, length=12):
        often = ["step", "step", "edit_model", "edit_model", "edit_groups", "edit_groups"]
        looks = ["evaluate", "copies", "exports", "states", "model_state", "reverted"]
        others = ["load_weights", "snapshot", "resume"]
        for _ in range(self.random.randrange(3)):
            self.step()
        for _ in range(length):
            self.do([*often, *looks, *others])
        if self.random.random() < 0.2:
            self.save()
        self.evaluate()
        self.amp.revert()
        self.check("revert()", self.model.parameters())


def run(kind, seeds, path):
    for seed in seeds:
        try:
            Program(kind, seed, path / "saved").run()
        except Exception as error:
            error.add_note(f"kind {kind!r}, seed {seed}")
            raise


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_no_edit_is_lost(kind, tmp_path):
    run(kind, range(25), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_no_edit_is_lost_in_5000_programs(kind, tmp_path):
    run(kind, range(25, 860), tmp_path)
