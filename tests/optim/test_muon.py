"""Muon: torch's numbers over fp32 masters, AdamW in the same optimizer, ranks, groups and refusals."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from halfstep.optim import AdamW, Muon, muon_groups
from halfstep.trees import parameters_of
from tests.ranks import run

BF16 = torch.bfloat16


def pair(shape: Any, transposed: bool = False, **ours: Any) -> tuple[Tensor, Tensor]:
    """The master of a bf16 matrix after 50 steps of ours, and the fp32 one of torch's Muon."""
    g = torch.Generator().manual_seed(1)

    def draw() -> Tensor:
        t = torch.randn(shape, generator=g).bfloat16()
        return t.t().contiguous().t() if transposed else t

    p = nn.Parameter(draw())
    q = nn.Parameter(p.detach().float())
    options = {k: v for k, v in ours.items() if k not in ("master", "state_dtype")}
    mine, theirs = Muon([p], lr=0.02, **ours), torch.optim.Muon([q], lr=0.02, **options)
    for _ in range(50):
        p.grad = draw()
        q.grad = p.grad.float()
        mine.step()
        theirs.step()
    return mine.master_of(p), q.detach()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(33, 17), (16, 64), (1, 5)])
@pytest.mark.parametrize(
    "options",
    [
        {"master": "exact"},
        {"master": "fp32", "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
        {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3, "momentum": 0.5, "weight_decay": 0.0},
    ],
)
def test_fifty_steps_are_torch_s_bit_for_bit(shape: Any, transposed: bool, options: dict[str, Any]):
    mine, theirs = pair(shape, transposed, **options)
    assert torch.equal(mine, theirs)


def test_small_states_stay_near():
    exact, near = pair((64, 96))[1], pair((64, 96), state_dtype="8bit")[0]
    moved = (exact - torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).bfloat16()).norm()
    assert 0 < (exact - near).norm() < 0.2 * moved


class Net(nn.Module):
    def __init__(self, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))
        self.conv = nn.Conv1d(16, 16, 1)
        self.positions = nn.Parameter(torch.zeros(4, 16))
        self.lm_head = nn.Linear(16, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.embedding(x) + self.positions)
        return self.lm_head(self.conv(x.mT).mT)


HIDDEN = ["body.0.weight", "body.3.weight"]


@pytest.mark.parametrize("tied", [False, True])
def test_groups_put_hidden_matrices_to_muon_and_the_rest_to_adamw(tied: bool):
    model = Net(tied)
    muon, rest = Muon(muon_groups(model, lr=3e-4, betas=(0.9, 0.95))).param_groups
    assert muon["param_names"] == HIDDEN
    assert {*muon["params"], *rest["params"]} == {*model.parameters()}
    assert (rest["algorithm"], rest["lr"], rest["betas"], rest["eps"]) == ("adamw", 3e-4, (0.9, 0.95), 1e-8)
    assert (muon["algorithm"], muon["lr"], muon["eps"]) == ("muon", 1e-3, 1e-7)


def test_a_head_may_be_named_and_a_model_may_know_its_own():
    model = Net()
    assert [n for n, _ in muon_groups(model, heads="body.3")[0]["params"]] == [HIDDEN[0], "lm_head.weight"]
    model.get_output_embeddings = lambda: model.body[0]  # type: ignore[assignment]
    assert [n for n, _ in muon_groups(model)[0]["params"]] == [HIDDEN[1], "lm_head.weight"]
    with pytest.raises(hs.ConfigError, match="heads='score' is the name of no module"):
        muon_groups(model, heads=["body.3", "score"])
    with pytest.raises(hs.ConfigError, match="no hidden matrix"):
        muon_groups(nn.Linear(4, 4))


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(11, (3, 4), generator=g), torch.randint(11, (3, 4), generator=g)


def train(model: Any, steps: range, ranks: Any = (0,), optimizer: Any = None, **options: Any) -> Any:
    """A session over these batches; micro-batches of `ranks` one after the other."""
    optimizer = optimizer or Muon(muon_groups(model), adjust_lr_fn="match_rms_adamw", lr=0.01, **options)
    amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
    for step in steps:
        for rank in ranks:
            x, y = batch(step, rank)
            with amp.autocast():
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            amp.backward(loss / len(ranks))
        amp.step(clip_norm=1.0)
    return amp


def masters(optimizer: Any) -> list[Tensor]:
    whole = (
        getattr(value, "full_tensor", lambda value=value: value)() for value in optimizer.masters().values()
    )
    return [value.clone() for value in whole]


def test_the_rest_takes_the_steps_of_adamw():
    both, alone = Net().bfloat16(), Net().bfloat16()
    mine = Muon(muon_groups(both, lr=0.01, weight_decay=0.3), state_dtype="8bit")
    rest = [(name, p) for name, p in alone.named_parameters() if name not in HIDDEN]
    peer = AdamW(rest, lr=0.01, weight_decay=0.3, state_dtype="8bit")
    for step in range(3):
        for p, q in zip(both.parameters(), alone.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            q.grad = p.grad.clone()
        mine.step()
        peer.step()
    for name, q in rest:
        assert torch.equal(both.get_parameter(name), q)


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_a_saved_run_goes_on_bit_for_bit(state_dtype: str, tmp_path: Any):
    straight = train(Net(), range(6), state_dtype=state_dtype)
    first = train(Net(), range(3), state_dtype=state_dtype)
    first.save(tmp_path / "run")
    model = Net()
    second = hs.prepare(
        model,
        Muon(muon_groups(model), adjust_lr_fn="match_rms_adamw", lr=0.01, state_dtype=state_dtype),
        level="O2",
        dtype="bf16",
    )
    second.load(tmp_path / "run")
    for step in range(3, 6):
        x, y = batch(step)
        with second.autocast():
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        second.backward(loss)
        second.step(clip_norm=1.0)
    for a, b in zip(masters(straight.optimizers[0]), masters(second.optimizers[0]), strict=True):
        assert torch.equal(a, b)


def test_bytes_are_those_of_one_small_momentum():
    p = nn.Parameter(torch.randn(512, 512).bfloat16())
    p.grad = torch.randn_like(p)
    optimizer = Muon([p], state_dtype="8bit")
    optimizer.step()
    tensors = [p, p.grad, *(t for t in optimizer.state[p].values() if isinstance(t, Tensor))]
    assert sum(t.numel() * t.element_size() for t in tensors) / p.numel() == pytest.approx(7.0, abs=0.01)


def in_parallel(rank: int, how: str) -> list[Tensor]:
    if how == "ddp":
        model = Net()
        optimizer = Muon(muon_groups(model), adjust_lr_fn="match_rms_adamw", lr=0.01)
        amp = hs.prepare(model, optimizer, level="O2", dtype="bf16")
        called: Any = DDP(model)
        for step in range(3):
            x, y = batch(step, rank)
            with amp.autocast():
                loss = nn.functional.cross_entropy(called(x).flatten(0, 1), y.flatten())
            amp.backward(loss)
            amp.step(clip_norm=1.0)
        return masters(optimizer)
    model = hs.distributed.shard(Net(), ordered=True)
    return masters(train(model, range(3), [rank], state_dtype=STATES[how]).optimizers[0])


STATES = {"ddp": "fp32", "shards": "fp32", "8-bit shards": "8bit"}


@pytest.mark.parametrize("how", STATES)
def test_two_ranks_equal_one(how: str):
    alone = masters(train(Net(), range(3), [0, 1], state_dtype=STATES[how]).optimizers[0])
    for other in run(in_parallel, 2, how):
        for a, b in zip(alone, other, strict=True):
            assert torch.equal(a, b)


def edit(optimizer: Muon, rng: random.Random, g: torch.Generator) -> None:
    """One of the edits that loops make between steps."""
    group = rng.choice(optimizer.param_groups)
    p = rng.choice(group["params"])
    choice = rng.randrange(9)
    if choice == 0:
        group["lr"], group["weight_decay"] = rng.choice([0.1, 1e-3]), rng.choice([0.0, 0.3])
    elif choice == 1 and group["algorithm"] == "muon":
        group["momentum"], group["nesterov"], group["ns_steps"] = rng.random(), rng.random() < 0.5, 3
    elif choice == 2:
        group["state_dtype"], group["master"] = (
            rng.choice(["fp32", "bf16", "8bit"]),
            rng.choice(["exact", "fp32"]),
        )
    elif choice == 3:
        group["algorithm"] = "adamw" if group["algorithm"] == "muon" else "muon"
        group.setdefault("betas", (0.5, 0.9))
        for q in group["params"]:
            optimizer.state.pop(q, None)
    elif choice == 4:
        p.data = torch.randn(p.shape, generator=g).to(p.dtype)
    elif choice == 5:
        p.data = p.data.t().contiguous().t()
    elif choice == 6:
        p.grad = None
    elif choice == 7:
        optimizer.state.pop(p, None)
    elif choice == 8:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_a_step_after_edits_is_that_of_a_fresh_optimizer():
    for seed in range(20):
        rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
        params = [nn.Parameter(torch.randn(s, generator=g).bfloat16()) for s in [(20, 6), (8, 32), (5, 17)]]
        groups = [{"params": params[:2]}, {"params": params[2:], "algorithm": "adamw"}]
        optimizer = Muon(groups, lr=0.02, state_dtype=rng.choice(["fp32", "8bit"]))
        for _ in range(4):
            for p in params:
                p.grad = None
                p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
            for _ in range(rng.randrange(3)):
                edit(optimizer, rng, g)
            fresh = copy.deepcopy(optimizer)
            pairs = list(zip(parameters_of(optimizer), parameters_of(fresh)))
            for p, q in pairs:
                q.grad = p.grad
            optimizer.step()
            fresh.step()
            assert all(torch.equal(p, q) for p, q in pairs), seed


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"ns_coefficients": (1.0, 2.0)}, hs.ConfigError, "expected three numbers"),
        ({"ns_steps": 100}, hs.ConfigError, "ns_steps=100: expected a whole number from 0 to 99"),
        ({"adjust_lr_fn": "mine"}, hs.ConfigError, "adjust_lr_fn='mine': choose one of None, 'original'"),
        ({"algorithm": "adam"}, hs.ConfigError, "algorithm='adam': choose 'muon' or 'adamw'"),
        (
            {"params": [torch.nn.Parameter(torch.ones(3))]},
            hs.UnsupportedError,
            "not a parameter of shape .3.",
        ),
        ({"momentum": -1}, hs.ConfigError, "momentum=-1: must be a number of at least 0"),
    ],
)
def test_what_muon_cannot_mean_is_refused(options: dict[str, Any], error: Any, text: str):
    optimizer = Muon([nn.Parameter(torch.ones(3, 3))])
    with pytest.raises(error, match=text):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 2))], **options})
    assert len(optimizer.param_groups) == 1


def test_a_matrix_that_became_a_vector_is_refused_at_the_step():
    p = nn.Parameter(torch.ones(3, 3))
    optimizer = Muon([p])
    p.data = torch.ones(3)
    p.grad = torch.ones(3)
    with pytest.raises(hs.UnsupportedError, match="put it into a group with algorithm='adamw'"):
        optimizer.step()


def test_torch_s_state_goes_on_here():
    g = torch.Generator().manual_seed(0)
    q = nn.Parameter(torch.randn(9, 7, generator=g))
    theirs = torch.optim.Muon([q], lr=0.02)
    for _ in range(2):
        q.grad = torch.randn(9, 7, generator=g)
        theirs.step()
    p = nn.Parameter(q.detach().clone())
    mine = Muon([p])
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert mine.param_groups[0]["lr"] == 0.02
    for _ in range(2):
        p.grad = q.grad = torch.randn(9, 7, generator=g)
        mine.step()
        theirs.step()
    assert torch.equal(p, q)


def test_clipping_skipping_and_releasing_are_those_of_every_optimizer():
    def weights(**options: Any) -> Tensor:
        g = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(8, 8, generator=g))
        optimizer = Muon([p], lr=0.1, eps=100.0, **options)
        (p * torch.randn(8, 8, generator=g)).sum().backward()
        optimizer.step()
        return p.detach()

    plain = weights()
    assert not torch.equal(weights(clip_norm=0.1), plain)
    assert torch.equal(weights(release_gradients=True), plain)
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.full((2, 2), torch.inf)
    with pytest.warns(UserWarning, match="was skipped"):
        Muon([p], skip_nonfinite=True).step()
    assert torch.equal(p, torch.ones(2, 2))
