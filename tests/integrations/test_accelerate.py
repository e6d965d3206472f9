"""A loop in accelerate's words trains bit for bit as the same loop written for halfstep."""

import copy
import gc
import io
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.errors import ConfigError
from halfstep.integrations.accelerate import Accelerator

OPTIMIZERS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "ours": lambda p: hs.optim.AdamW(p, lr=1e-2),
}


@pytest.fixture(autouse=True)
def fresh():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def batches(n, spoiled=()):
    g = torch.Generator().manual_seed(1)
    for i in range(n):
        x = torch.randn(8, 6, generator=g)
        yield x, x[:, :1] * (float("inf") if i in spoiled else 1.0)


def accelerated(kind="ours", clip=None, accumulate=1, **how):
    """A model, the Accelerator, its optimizer and scheduler, and a step in accelerate's words."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **how)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    norms = []

    def step(x, y):
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            if clip and accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    return model, accelerator, optimizer, schedule, step, norms


def by_hand(kind, n, clip=None, accumulate=1, **how):
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    if how["dtype"] == "fp16":
        how["loss_scale"] = hs.DynamicLossScale(init=1024.0)
    amp = hs.prepare(model, optimizer, **how)
    norms = []
    for i, (x, y) in enumerate(batches(n)):
        with amp.autocast():
            out = model(x)
        amp.backward(F.mse_loss(out.float(), y) / accumulate)
        if (i + 1) % accumulate == 0:
            amp.unscale()
            if clip:
                norms.append(torch.nn.utils.get_total_norm([p.grad.float() for p in model.parameters()]))
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip, norms[-1])
            amp.step(scheduler=schedule)
    return model, norms


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_host_s_loop_is_the_loop_written_by_hand(kind, level, dtype):
    model, _, _, _, step, norms = accelerated(kind, 0.5, 2, level=level, dtype=dtype)
    for x, y in batches(8):
        step(x, y)
    expected, expected_norms = by_hand(kind, 8, 0.5, 2, level=level, dtype=dtype)
    assert same(model, expected)
    assert norms == pytest.approx([*map(float, expected_norms)], rel=1e-6)


@pytest.mark.parametrize(("level", "dtype"), [("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16")])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_each_clip_clips_what_it_was_given_when_it_is_called(kind, level, dtype):
    model = net()
    accelerator = Accelerator(cpu=True, level=level, dtype=dtype)
    model, _ = accelerator.prepare(model, OPTIMIZERS[kind](model.parameters()))
    ((x, y),) = batches(1)
    accelerator.backward(F.mse_loss(model(x), y) * 100)
    for part, limit in ((model[0], 0.5), (model[2], 0.25), (model, 0.125)):
        norm = accelerator.clip_grad_norm_(part.parameters(), limit)
        held = accelerator.session.optimizers[0].param_groups[0]["params"]
        grads = [p.grad for p in part.parameters() if p.grad is not None] or [held[0].grad]
        assert norm > limit
        assert torch.nn.utils.get_total_norm([g.float() for g in grads]).item() <= limit * 1.01


def test_a_skipped_step_does_not_move_the_host_s_scheduler():
    _, accelerator, optimizer, schedule, step, _ = accelerated(level="O2", dtype="fp16")
    skipped = []
    for x, y in batches(4, spoiled=[1]):
        step(x, y)
        skipped.append(accelerator.optimizer_step_was_skipped)
    assert skipped == [False, True, False, False]
    assert schedule.get_last_lr() == pytest.approx([1e-2 * 0.9**3])
    assert not optimizer.outcome.reason


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_from_the_host_s_checkpoint_bit_for_bit(kind, tmp_path):
    model, accelerator, optimizer, _, step, _ = accelerated(kind, level="O2", dtype="fp16")
    all_batches = list(batches(6, spoiled=[1]))
    for x, y in all_batches[:3]:
        step(x, y)
    accelerator.save_state(str(tmp_path))
    for x, y in all_batches[3:]:
        step(x, y)
    AcceleratorState._reset_state(reset_partial_state=True)
    again, accelerator, resumed, _, step, _ = accelerated(kind, level="O2", dtype="fp16")
    accelerator.load_state(str(tmp_path))
    for x, y in all_batches[3:]:
        step(x, y)
    assert same(model, again)
    assert resumed.outcome.scale == optimizer.outcome.scale == 512.0
    assert accelerator.session.skips.total == 1


def test_mixed_precision_is_taken_as_the_dtype():
    model, accelerator, *_ = accelerated(mixed_precision="bf16", level="O2")
    assert next(model.parameters()).dtype == torch.bfloat16
    assert accelerator.session.policy.compute_dtype == torch.bfloat16
    assert model(torch.ones(1, 6)).dtype == torch.float32


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 16)

    def forward(self, x):
        h = self.inner(x)
        return torch.einsum("bi,bi->b", h, h)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_plan_s_rule_for_ops_of_the_whole_model_holds(level):
    plan = hs.Plan((hs.PlanRule("**", ops={"einsum": hs.Rule.FULL}, reason="range"),))
    torch.manual_seed(0)
    model = Squares()
    accelerator = Accelerator(cpu=True, level=level, dtype="fp16", plan=plan)
    model, _ = accelerator.prepare(model, OPTIMIZERS["ours"](model.parameters()))
    assert model(torch.full((2, 6), 3000.0)).isfinite().all()


def test_a_call_that_fails_leaves_no_region_open():
    model = net()
    accelerator = Accelerator(cpu=True, dtype="bf16")
    model, _ = accelerator.prepare(model, OPTIMIZERS["ours"](model.parameters()))
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, 5))
    assert hs.active_policy() is None
    assert copy.deepcopy(model)(torch.ones(1, 6)).dtype == torch.float32


def test_a_model_called_by_several_threads_has_a_region_in_each():
    class Waiting(nn.Linear):
        def forward(self, x):
            barrier.wait(30)  # all are inside at once, and leave in any order
            return super().forward(x)

    barrier = threading.Barrier(3)
    model = nn.Sequential(Waiting(6, 6), nn.Linear(6, 1))
    model, _ = Accelerator(cpu=True, dtype="bf16", level="O1").prepare(
        model, OPTIMIZERS["ours"](model.parameters())
    )
    x = torch.randn(4, 6)

    def call(_):
        for _ in range(20):
            out = model(x)
        return out, hs.active_policy()

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(call, range(3)))
    assert all(torch.equal(out, results[0][0]) and policy is None for out, policy in results)


def test_copies_and_pickles_of_a_model_compute_as_it_does():
    model = net()
    model, _ = Accelerator(cpu=True, dtype="bf16").prepare(model, OPTIMIZERS["ours"](model.parameters()))
    x, file = torch.randn(4, 6), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), model(x))
        assert hs.active_policy() is None


def test_a_model_that_the_host_compiles_runs():
    model = net()
    accelerator = Accelerator(cpu=True, dtype="bf16", dynamo_backend="eager")
    compiled, _ = accelerator.prepare(model, OPTIMIZERS["ours"](model.parameters()))
    x = torch.randn(4, 6)
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_at_bf16_a_step_on_inf_is_skipped_where_asked(kind):
    model, accelerator, _, schedule, step, _ = accelerated(
        kind, level="O2", dtype="bf16", skip_nonfinite=True
    )
    for x, y in batches(4, spoiled=[1]):
        step(x, y)
    assert accelerator.session.skips.total == 1
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert schedule.get_last_lr() == pytest.approx([1e-2 * 0.9**3])


def test_max_skips_and_the_other_options_are_taken():
    *_, step, _ = accelerated(
        dtype="bf16", skip_nonfinite=True, max_skips=2, layout="channels_last", kernels="native"
    )
    with pytest.raises(hs.LossScaleCollapsed):
        for x, y in batches(3, spoiled=range(3)):
            step(x, y)


def test_an_option_that_no_host_can_give_is_refused_at_once():
    with pytest.raises(ConfigError, match="unknown level 'O9'"):
        Accelerator(cpu=True, level="O9")
    with pytest.raises(ConfigError, match=r"level='auto' .* choose O0 to O3"):
        Accelerator(cpu=True, level="auto")
    with pytest.raises(ConfigError, match="layout='auto'"):
        Accelerator(cpu=True, layout="auto")
    with pytest.raises(TypeError, match="levl"):
        Accelerator(cpu=True, levl="O2")


def test_two_words_for_the_dtype_have_to_agree():
    with pytest.raises(ConfigError, match=r"mixed_precision='bf16' \(an argument, .*beside dtype='fp16'"):
        Accelerator(cpu=True, dtype="fp16", mixed_precision="bf16")
    for dtype in ("bfloat16", torch.bfloat16, None):
        _, accelerator, *_ = accelerated(dtype=dtype, mixed_precision="bf16")
        assert accelerator.session.policy.compute_dtype == torch.bfloat16


def test_what_cannot_be_prepared_is_refused():
    with pytest.raises(ConfigError, match="expected 'no', 'fp16' or 'bf16'"):
        Accelerator(cpu=True, mixed_precision="fp8")
    accelerator = Accelerator(cpu=True)
    model = net()
    with pytest.raises(ConfigError, match="without its model"):
        accelerator.prepare(OPTIMIZERS["ours"](model.parameters()))
    accelerator.prepare(model, OPTIMIZERS["ours"](model.parameters()))
    with pytest.raises(ConfigError, match="or after another"):
        accelerator.prepare(net(), OPTIMIZERS["ours"](net().parameters()))


def test_a_model_alone_stays_the_host_s():
    accelerator = Accelerator(cpu=True, level="O2")
    model = accelerator.prepare(net())
    assert accelerator.session is None
    assert next(model.parameters()).dtype == torch.float32
    loss = model(torch.ones(1, 6)).sum()
    accelerator.backward(loss)
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) > 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_networks_clip_one_at_a_time(kind, level, dtype):
    """Only one has gradients at first, later the other keeps those it has stepped on."""
    noise = [torch.randn(16, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]

    def networks():
        torch.manual_seed(0)
        return nn.Linear(8, 1), nn.Linear(4, 8)

    def losses(judge, maker, z):
        yield (
            lambda: (
                judge(maker(z).detach()).float().square().mean() + (judge(z.repeat(1, 2)) - 1).square().mean()
            )
        )
        yield lambda: (judge(maker(z)).float() - 1).square().mean()

    nets = networks()
    optimizers = [OPTIMIZERS[kind](net.parameters()) for net in nets]
    accelerator = Accelerator(cpu=True, level=level, dtype=dtype)
    judge, first, maker, second = accelerator.prepare(nets[0], optimizers[0], nets[1], optimizers[1])
    norms = []
    for z in noise:
        for loss, net, optimizer in zip(losses(judge, maker, z), (judge, maker), (first, second)):
            optimizer.zero_grad()
            accelerator.backward(loss())
            norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.1)))
            optimizer.step()
            assert optimizer.outcome.taken

    judge, maker = plain = networks()
    expected = []
    optimizers = [OPTIMIZERS[kind](net.parameters()) for net in plain]
    for z in noise:
        for loss, net, optimizer in zip(losses(judge, maker, z), plain, optimizers):
            optimizer.zero_grad()
            loss().backward()
            expected.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.1)))
            optimizer.step()
    assert norms == pytest.approx(expected, rel=0.05)


def train(model, accelerator, optimizer, n=3):
    for x, y in batches(n):
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_accelerator_trains_a_model_for_each_fold(kind):
    expected, accelerator, optimizer, *_ = accelerated(kind, level="O2", dtype="fp16")
    train(expected, accelerator, optimizer)
    AcceleratorState._reset_state(reset_partial_state=True)
    model, accelerator, optimizer, *rest = accelerated(kind, level="O2", dtype="fp16")
    train(model, accelerator, optimizer, 5)
    del rest
    first = weakref.ref(model), weakref.ref(accelerator.session)
    model, optimizer = accelerator.free_memory(model, optimizer)
    gc.collect()
    assert [ref() for ref in first] == [None, None]
    second = net()
    second, optimizer = accelerator.prepare(second, OPTIMIZERS[kind](second.parameters()))
    train(second, accelerator, optimizer)
    assert same(second, expected)
    assert accelerator.session.steps == 3


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_that_was_trained_is_trained_again(level):
    model, accelerator, optimizer, *_ = accelerated(level=level, dtype="bf16")
    train(model, accelerator, optimizer)
    exact = {
        name: value.clone() for name, value in hs.optim.fp32_state_dict(model, optimizer.optimizer).items()
    }
    hooks = len(model._forward_pre_hooks)
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    AcceleratorState._reset_state(reset_partial_state=True)
    again = Accelerator(cpu=True, level=level, dtype="fp16")
    model, optimizer = again.prepare(model, hs.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0))
    assert len(model._forward_pre_hooks) == hooks
    assert accelerator.session.reverted
    train(model, again, optimizer, 1)
    after = hs.optim.fp32_state_dict(model, optimizer.optimizer)
    assert seen == [torch.float16]
    assert all(torch.equal(after[name], value) for name, value in exact.items())


def test_a_closure_is_run_before_the_step():
    expected, accelerator, optimizer, *_ = accelerated(level="O2", dtype="bf16")
    train(expected, accelerator, optimizer)
    AcceleratorState._reset_state(reset_partial_state=True)
    model, accelerator, optimizer, *_ = accelerated(level="O2", dtype="bf16")
    for x, y in batches(3):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            return loss

        with torch.no_grad():
            optimizer.step(closure)
    assert same(model, expected)


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"level": "O2", "dtype": "fp16"}, "fp16"),
        ({"level": "O1", "mixed_precision": "bf16"}, "bf16"),
        ({"level": "O0"}, "no"),
        ({"level": "16-mixed"}, "fp16"),
    ],
)
def test_mixed_precision_says_what_is_trained(how, word):
    accelerator = Accelerator(cpu=True, **how)
    assert accelerator.mixed_precision == word
    model = net()
    accelerator.prepare(model, hs.optim.AdamW(model.parameters()))
    assert accelerator.mixed_precision == word


def test_the_launcher_s_word_counts_as_the_argument_s(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    _, accelerator, *_ = accelerated(level="O1")
    assert accelerator.session.policy.compute_dtype == torch.float16
    AcceleratorState._reset_state(reset_partial_state=True)
    assert Accelerator(cpu=True, mixed_precision="bf16").mixed_precision == "bf16"
    with pytest.raises(ConfigError, match=r"or ACCELERATE_MIXED_PRECISION\) beside dtype='bf16'"):
        Accelerator(cpu=True, dtype="bf16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match="expected 'no', 'fp16' or 'bf16'"):
        Accelerator(cpu=True)


def test_what_is_saved_within_evaluating_are_the_fp32_masters(tmp_path):
    model, accelerator, optimizer, *_ = accelerated(level="O2", dtype="bf16")
    train(model, accelerator, optimizer)
    exact = hs.optim.fp32_state_dict(model, optimizer.optimizer)
    with accelerator.session.evaluating():
        accelerator.save_model(model, str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == exact.keys()
    assert all(torch.equal(saved[name], value) for name, value in exact.items())
