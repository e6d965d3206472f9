"""compact: any optimizer's own numbers over 16-bit weights and small states, or a refusal by what it does."""

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
import halfstep.optim.compacted as module
from halfstep.optim import compact
from halfstep.trees import parameters_of
from tests.ranks import run

BF16 = torch.bfloat16
SHAPES = [(20, 33), (7,), (3, 2, 4, 5), (33, 20), ()]
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    "Adam": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "AdamW": (torch.optim.AdamW, {"fused": True}),
    "Adamax": (torch.optim.Adamax, {"weight_decay": 0.1}),
    "ASGD": (torch.optim.ASGD, {"t0": 3}),
    "NAdam": (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"foreach": False}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Muon": (torch.optim.Muon, {"lr": 0.02}),
}


@pytest.fixture(autouse=True)
def buckets_of_a_few(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BUCKET", 700)


def drawn(shapes: Any, g: torch.Generator, dtype: Any = BF16) -> list[Tensor]:
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def grouped(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:1], "lr": 0.003}, {"params": params[1:]}]


@pytest.mark.parametrize("master", ["exact", "fp32"])
@pytest.mark.parametrize("name", KINDS)
def test_with_fp32_states_it_is_that_optimizer_over_fp32_weights(name: str, master: str):
    kind, options = KINDS[name]
    g = torch.Generator().manual_seed(0)
    shapes = [shape for shape in SHAPES if len(shape) == 2] if name == "Muon" else SHAPES
    params = [nn.Parameter(t) for t in drawn(shapes, g)]
    wide = [nn.Parameter(p.detach().float()) for p in params]
    mine, theirs = compact(kind, grouped(params), master=master, **options), kind(grouped(wide), **options)
    for step in range(12):
        for p, q, grad in zip(params, wide, drawn(shapes, g)):
            p.grad, q.grad = (grad, grad.float()) if step != 5 else (None, None)
        mine.step()
        theirs.step()
        mine.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.01
    assert all(torch.equal(mine.master_of(p), q) for p, q in zip(params, wide))
    for p, q in zip(params, wide):
        kept = {key: value for key, value in mine.state[p].items() if key not in ("lacking", "master")}
        assert kept.keys() == theirs.state[q].keys()


def moved(state_dtype: str, kind: Any = torch.optim.NAdam, **options: Any) -> tuple[Tensor, Any]:
    g = torch.Generator().manual_seed(0)
    (p,) = (nn.Parameter(t) for t in drawn([(64, 70)], g))
    optimizer = compact(kind, [p], state_dtype=state_dtype, **options)
    for grads in (drawn([(64, 70)], g) for _ in range(30)):
        p.grad = grads[0]
        optimizer.step()
    return optimizer.master_of(p) - torch.randn(64, 70, generator=torch.Generator().manual_seed(0)).to(
        BF16
    ), optimizer


@pytest.mark.parametrize(("state_dtype", "most"), [("bf16", 0.01), ("8bit", 0.1)])
def test_small_states_stay_near_and_take_their_bytes(state_dtype: str, most: float):
    exact, (near, optimizer) = moved("fp32")[0], moved(state_dtype)
    assert 0 < (near - exact).norm() < most * exact.norm()
    ((p, entry),) = optimizer.state.items()
    kept = sum(t.numel() * t.element_size() for t in entry.values() if t.dim()) / p.numel()
    assert kept == pytest.approx({"bf16": 6, "8bit": 4}[state_dtype], abs=0.05)


def test_states_say_their_sign():
    names = moved("8bit", torch.optim.RMSprop, momentum=0.9, centered=True)[1].state
    ((_, entry),) = names.items()
    assert {key for key in entry if key.endswith("codes")} == {
        "square_avg_codes", "grad_avg_signed_codes", "momentum_buffer_codes",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["NAdam", "RMSprop", "Adafactor", "SGD"])
def test_small_states_go_back_into_torch_s_optimizer(name: str):
    kind, options = KINDS[name]
    _, optimizer = moved("8bit", kind, **options)
    ((p, _),) = optimizer.state.items()
    wide = compact(kind, [p], **options)
    wide.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model = nn.Module()
    model.w = nn.Parameter(optimizer.master_of(p))
    theirs = kind([model.w], **options)
    hs.prepare(model, theirs, level="O1", dtype="bf16")
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for key, value in theirs.state[model.w].items():
        assert torch.equal(value, wide.state[p][key]), key


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(12, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 40), nn.Linear(40, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def loss_of(model: Any, step: int, rank: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(8, 12, generator=g), torch.randn(8, 3, generator=g)
    return nn.functional.mse_loss(model(x).float(), y)


def session(optimizer_of: Any = None, level: str = "O2", dtype: str = "bf16", **own: Any) -> tuple[Any, Any]:
    model = Net()
    optimizer = (optimizer_of or compact)(torch.optim.NAdam, model.parameters(), lr=0.01, **own)
    return model, hs.prepare(model, optimizer, level=level, dtype=dtype)


def train(model: Any, amp: Any, steps: range, ranks: Any = (0,), called: Any = None) -> Any:
    for step in steps:
        for rank in ranks:
            with amp.autocast():
                loss = loss_of(called or model, step, rank) / len(ranks)
            amp.backward(loss)
        amp.step(clip_norm=0.5)
    return list(hs.optim.fp32_state_dict(model, amp.optimizers).values())


@pytest.mark.parametrize(("level", "dtype"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16")])
def test_in_a_session_it_is_near_the_optimizer_with_fp32_masters(level: str, dtype: str):
    """Torch's own rounds its masters to even, here ties go away from zero: bits of the weights differ."""
    mine = train(*session(level=level, dtype=dtype), range(6))
    model, peer = session(lambda kind, params, lr: kind(params, lr=lr), level, dtype)
    theirs = train(model, peer, range(6))
    for a, b, p in zip(mine, theirs, Net().parameters()):
        assert (a - b).norm() < 0.05 * (b - p).norm()


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("master", ["exact", "fp32", "stochastic"])
def test_a_saved_run_goes_on_bit_for_bit(state_dtype: str, master: str, tmp_path: Any):
    own = {"state_dtype": state_dtype, "master": master}
    straight = train(*session(**own), range(6))
    model, amp = session(**own)
    train(model, amp, range(3))
    amp.save(tmp_path / "run")
    other, again = session(**own)
    train(other, again, range(2))
    again.load(tmp_path / "run")
    resumed = train(other, again, range(3, 6))
    fresh_model, fresh = session(**own)
    fresh.load(tmp_path / "run")
    fresh_resumed = train(fresh_model, fresh, range(3, 6))
    assert all(map(torch.equal, straight, resumed))
    assert all(map(torch.equal, straight, fresh_resumed))


def test_another_optimizer_s_checkpoint_is_refused(tmp_path: Any):
    model, amp = session()
    train(model, amp, range(2))
    amp.save(tmp_path / "run")
    _, other = session(lambda kind, params, lr: compact(torch.optim.RMSprop, params, lr=lr))
    with pytest.raises(hs.CheckpointError, match=r"\['NAdam'\] saved it, here are \['RMSprop'\]"):
        other.load(tmp_path / "run")


def test_a_scaler_clips_and_skips_as_with_every_optimizer():
    results = []
    for scaled in (False, True):
        model = Net().half()
        optimizer = compact(torch.optim.NAdam, model.parameters(), lr=0.01)
        scaler = hs.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
        for step in range(4):
            scaler.scale(loss_of(lambda x, model=model: model(x.half()), step)).backward()
            if step == 2 and scaled:
                model.layers[0].weight.grad[0, 0] = torch.inf
            if step != 2 or scaled:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        results.append(list(optimizer.masters().values()))
    assert all(torch.allclose(a, b, rtol=0, atol=2e-3) for a, b in zip(*results))


def test_a_bare_step_clips_and_skips():
    p, q = (nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer = compact(torch.optim.SGD, [p], lr=1.0, clip_norm=1.0, skip_nonfinite=True)
    p.grad = torch.full((4, 4), 5.0)
    q.grad = p.grad.clone()
    optimizer.step()
    nn.utils.clip_grad_norm_([q], 1.0)
    torch.optim.SGD([q], lr=1.0).step()
    assert torch.allclose(p, q)
    assert torch.equal(p.grad, torch.full((4, 4), 5.0))
    before = copy.deepcopy(optimizer.state_dict())
    p.grad = torch.full((4, 4), torch.nan)
    with pytest.warns(UserWarning, match="was skipped"):
        optimizer.step()
    assert torch.allclose(p, q)
    assert optimizer.state_dict() == before


def test_fp16_out_of_range_is_an_error():
    p = nn.Parameter(torch.full((2,), 60000.0).half())
    p.grad = torch.full((2,), -60000.0).half()
    with pytest.raises(hs.MasterRangeError):
        compact(torch.optim.SGD, [p], lr=1.0).step()


def test_it_is_an_optimizer_for_schedulers_hooks_copies_and_pickles():
    p = nn.Parameter(torch.ones(20, 20).bfloat16())
    optimizer = compact(torch.optim.NAdam, [("w", p)], lr=0.5, state_dtype="8bit")
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults["momentum_decay"] == 4e-3
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda o, *_: seen.append(o))
    others: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda o, *_: others.append(o))
    p.grad = torch.ones_like(p)
    optimizer.step()
    handle.remove()
    scheduler.step()
    assert (seen, others) == ([optimizer], [optimizer])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (q,) = parameters_of(twin)
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(p)
        before = p.detach().clone()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.step()
        twin.step()
        assert torch.equal(p, q)
        p.data.copy_(before)
        optimizer.load_state_dict(state)


# ---- what it refuses ------------------------------------------------------------------------------------


class Plain(torch.optim.Optimizer):
    """Base of the optimizers below."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def rate(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rate = self.rate()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * rate)


class OfAll(Plain):
    """Its step length goes by all gradients, as Prodigy's and LAMB's with a global norm."""

    def rate(self) -> float:
        return 1 / sum(float(p.grad.norm()) for p in parameters_of(self))


class OfFirstGroup(Plain):
    """It reads the learning rate of the first group for all."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        super().step(closure)


class Counting(Plain):
    """It keeps its count of steps to itself."""

    steps = 0

    def rate(self) -> float:
        self.steps += 1
        return 1 / self.steps


class InGroup(Plain):
    """It counts its steps in a group, as schedule-free optimizers do: nothing is wrong with that."""

    def rate(self) -> float:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        return 1 / self.param_groups[0]["steps"]


class Noisy(Plain):
    def rate(self) -> float:
        return float(torch.rand(()))


class Referring(Plain):
    """It keeps the memory of a weight, which is what the weight is at any time."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in parameters_of(self):
            last = self.state[p].setdefault("last", p.detach())
            p.sub_(p.grad).lerp_(last, 0.5)


OTHERS = "its update of a parameter depends on other parameters"
MORE = "it keeps more from step to step than `state` and `param_groups`"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (torch.optim.LBFGS, "computes the loss by a closure"),
        (torch.optim.SparseAdam, "does not support dense gradients"),
        (OfAll, OTHERS),
        (OfFirstGroup, OTHERS),
        (Noisy, OTHERS),
        (Counting, MORE),
        (Referring, MORE),
    ],
)
def test_what_does_not_go_a_bucket_at_a_time_is_refused_by_what_it_does(kind: Any, text: str):
    with pytest.raises(hs.UnsupportedError, match=text):
        compact(kind, Net().bfloat16().parameters(), lr=0.1)


def test_what_counts_in_its_groups_is_taken():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, peer = compact(InGroup, [p]), InGroup([q])
    for _ in range(3):
        p.grad = q.grad = torch.ones(3)
        optimizer.step()
        peer.step()
    assert torch.equal(p, q)
    assert optimizer.param_groups[0]["steps"] == 3


def test_a_trial_draws_no_random_number():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with pytest.raises(hs.UnsupportedError):
        compact(Noisy, [nn.Parameter(torch.ones(2))])
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"lr": -1.0}, ValueError, "Invalid learning rate"),
        ({"beta": 3}, TypeError, "beta"),
        ({"master": "kahan"}, hs.ConfigError, "master='kahan': choose one of"),
        ({"state_dtype": "4bit"}, hs.ConfigError, "state_dtype='4bit': choose one of"),
        ({"differentiable": True}, hs.UnsupportedError, "in a trial .* a leaf Variable that requires grad"),
        ({"clip_norm": -1}, hs.ConfigError, "clip_norm=-1"),
    ],
)
def test_wrong_options_are_refused(options: Any, error: Any, text: str):
    with pytest.raises(error, match=text):
        compact(torch.optim.NAdam, [nn.Parameter(torch.ones(2))], **options)


def test_a_state_that_does_not_fit_is_refused_by_name():
    _, optimizer = moved("8bit")
    ((_, entry),) = optimizer.state.items()
    entry["exp_avg_codes"] = entry["exp_avg_codes"][:3]
    with pytest.raises(hs.ConfigError, match=r"the state 'exp_avg' of 0\.0 has shape"):
        optimizer.step()


def test_other_attributes_are_none():
    optimizer = compact(torch.optim.NAdam, [nn.Parameter(torch.ones(2))])
    with pytest.raises(AttributeError, match="'Compact' object has no attribute 'train'"):
        optimizer.train()


class Averaging(torch.optim.SGD):
    """Swaps weights with their running mean for evaluation, as schedule-free optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in parameters_of(self):
            if p.grad is not None:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p, 0.1)

    @torch.no_grad()
    def swap(self) -> None:
        for p in parameters_of(self):
            mean = self.state[p]["mean"]
            p.copy_(mean), mean.copy_(p.clone())


class Particular(Plain):
    """It counts in a tensor of its group, averages in bf16 and starts from a copy of each weight."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        if len({group["lr"] for group in self.param_groups}) > 1:
            raise ValueError("one learning rate for all groups")
        for group in self.param_groups:
            group["count"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    start = state.setdefault("start", p.clone())
                    mean = state.setdefault("mean", torch.zeros_like(p, dtype=BF16))
                    mean.lerp_(p.grad.to(BF16), 0.1)
                    p.lerp_(start, 0.01).sub_(mean.float() / group["count"], alpha=group["lr"])


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
def test_states_in_16_bits_copies_of_weights_and_tensors_of_groups_stay_what_they_are(state_dtype: str):
    g = torch.Generator().manual_seed(0)
    shapes = [(40, 30), (9, 9), (33, 20)]
    params = [nn.Parameter(t) for t in drawn(shapes, g)]
    wide = [nn.Parameter(p.detach().float()) for p in params]
    mine, theirs = compact(Particular, params, state_dtype=state_dtype), Particular(wide)
    for _ in range(4):
        for p, q, grad in zip(params, wide, drawn(shapes, g)):
            p.grad, q.grad = grad, grad.float()
        mine.step()
        theirs.step()
    assert mine.param_groups[0]["count"] == 4
    assert all(torch.equal(mine.master_of(p), q) for p, q in zip(params, wide))
    again = compact(Particular, params, state_dtype=state_dtype)
    again.load_state_dict(copy.deepcopy(mine.state_dict()))
    for p in params:
        assert all(
            torch.equal(again.state[p][key], value) for key, value in mine.state[p].items() if key != "weight"
        )
    found = {key: t.dtype for key, t in again.state[params[0]].items() if key != "weight"}
    assert found == {
        "lacking": torch.int16, "start": torch.float32, "mean": BF16,
    }  # fmt: skip


def test_a_tensor_that_is_the_learning_rate_stays_the_one_that_was_given():
    lr, p = torch.tensor(0.5), nn.Parameter(torch.ones(3, 3))
    optimizer = compact(torch.optim.NAdam, [p], lr=lr)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert optimizer.param_groups[0]["lr"] is lr
    lr.zero_()
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(before, p)


def test_a_group_s_own_options_are_those_of_the_trial():
    """torch's Muon of vectors is refused by its own message; a package's wants a mark in every group."""
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        compact(torch.optim.Muon, [nn.Parameter(torch.ones(3))])
    p = nn.Parameter(torch.ones(3))
    optimizer = compact(Marked, [{"params": [p], "mark": True}])
    p.grad = torch.ones(3)
    optimizer.step()
    assert torch.allclose(p, torch.full((3,), 0.9))


class Marked(Plain):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        if not all(group.get("mark") for group in self.param_groups):
            raise ValueError("a group has no mark")


def test_its_own_methods_run_on_masters():
    g = torch.Generator().manual_seed(0)
    params = [nn.Parameter(t) for t in drawn([(9, 9), (40, 30), (5,)], g)]
    wide = [nn.Parameter(p.detach().float()) for p in params]
    mine, theirs = compact(Averaging, params, lr=0.1), Averaging(wide, lr=0.1)
    for p, q, grad in zip(params, wide, drawn([(9, 9), (40, 30), (5,)], g)):
        p.grad, q.grad = grad, grad.float()
    for optimizer in (mine, theirs):
        optimizer.step()
        optimizer.swap()
    assert all(torch.equal(mine.master_of(p), q) for p, q in zip(params, wide))


# ---- memory -----------------------------------------------------------------------------------------------


# ---- ranks and memory -----------------------------------------------------------------------------------


def in_parallel(rank: int) -> list[Tensor]:
    model, amp = session(state_dtype="8bit")
    return train(model, amp, range(3), [rank], called=DDP(model))


def test_two_ranks_equal_one():
    alone = train(*session(state_dtype="8bit"), range(3), [0, 1])
    for other in run(in_parallel, 2):
        assert all(map(torch.equal, alone, other))


def test_shards_are_refused():
    for error in run(sharded, 1):
        assert "steps whole parameters, and one of shape [40, 12] is sharded" in error


def sharded(rank: int) -> str:
    model = torch.distributed.fsdp.fully_shard(Net())
    with pytest.raises(hs.UnsupportedError) as caught:
        compact(torch.optim.NAdam, model.parameters())
    return str(caught.value)


class Living(TorchDispatchMode):
    """Counts the bytes that ops made and that live, beside those that were there, and the most there were."""

    def __init__(self, there: list[Tensor]) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {t.data_ptr(): 0 for t in there}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, list | tuple) else [result]:
            if isinstance(t, Tensor):
                self.note(t.untyped_storage())
        return result

    def note(self, memory: torch.UntypedStorage) -> None:
        if memory.data_ptr() and memory.data_ptr() not in self.sizes:
            self.sizes[memory.data_ptr()] = memory.nbytes()
            weakref.finalize(memory, self.sizes.pop, memory.data_ptr())
            self.most = max(self.most, sum(self.sizes.values()))


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
def test_a_step_takes_the_memory_of_one_bucket_beside_weights_and_states(
    state_dtype: str, monkeypatch: pytest.MonkeyPatch
):
    """Of 24 matrices the fp32 copies of two live at a time, for weights, gradients and two states."""
    monkeypatch.setattr(module, "BUCKET", 2 * 96 * 512)
    params = [nn.Parameter(torch.randn(96, 512).bfloat16()) for _ in range(24)]
    optimizer = compact(torch.optim.NAdam, params, state_dtype=state_dtype, foreach=False)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    entries = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
    living = Living([*params, *(p.grad for p in params), *entries])
    with living:
        optimizer.step()
    of_states = 96 * 512 * 24 * {"fp32": 0, "bf16": 4, "8bit": 2}[state_dtype]  # new ones in the place of old
    bucket, temporaries = 2 * 96 * 512 * 16, 2 * (1 << 20)
    assert 0 < living.most - of_states < bucket + temporaries, (living.most, of_states, bucket)
