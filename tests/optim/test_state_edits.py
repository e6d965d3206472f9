"""What the user sees is what the next step uses: edits, replaced tensors, versions."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.errors import ConfigError, UnsupportedError
from halfstep.gradients.decision import Decision
from halfstep.optim import SGD, Adam, AdamW, Lion
from tests.optim import edits

BF16, FP32 = torch.bfloat16, torch.float32
ROOT = Path(__file__).parents[2]


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Another process, since what went wrong once ended with a segmentation fault."""
    command = [sys.executable, "-X", "faulthandler", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


MOMENTUM_WARMS_UP = """
import torch, halfstep as hs
p = [torch.nn.Parameter(torch.linspace(-1, 1, 70)) for _ in range(2)]
ours, theirs = hs.optim.SGD(p[:1], lr=0.1), torch.optim.SGD(p[1:], lr=0.1)
for momentum in (0.0, 0.0, 0.9, 0.9, 0.5, 0.0, 0.9):
    for q, optimizer in zip(p, (ours, theirs)):
        q.grad = q.detach() * 0.5
        optimizer.param_groups[0].update(momentum=momentum, dampening=0.1)
        optimizer.step()
assert torch.allclose(*p, rtol=1e-5), p
"""

SMALLER_AND_TRANSPOSED = """
import torch, halfstep as hs
for change in (lambda t: t[:10], lambda t: t.t()):
    p = [torch.nn.Parameter(torch.arange(144.0).view(12, 12)) for _ in range(2)]
    ours, theirs = hs.optim.SGD(p[:1], lr=0.1), torch.optim.SGD(p[1:], lr=0.1)
    for step in range(4):
        for q, optimizer in zip(p, (ours, theirs)):
            if step == 2:
                q.data = change(q.data)
            q.grad = None
            q.grad = torch.arange(float(q.numel())).view(q.shape)
            optimizer.step()
    assert torch.allclose(*p), p
"""


@pytest.mark.parametrize("script", [MOMENTUM_WARMS_UP, SMALLER_AND_TRANSPOSED])
def test_what_crashed_once_gives_torch_s_numbers(script: str):
    done = child("-c", script)
    assert done.returncode == 0, done.stderr


def test_random_edits_give_torch_s_numbers_or_a_refusal():
    done = child("-m", "tests.optim.edits", "0", "40", "--fp32")
    assert done.returncode == 0, done.stdout + done.stderr


#: Seeds of the long runs; 10000 took an hour on one core.
SEEDS = int(os.environ.get("HALFSTEP_EDITS", "400"))


@pytest.mark.exhaustive
def test_random_edits_of_bf16_weights_and_all_formats_too():
    done = child("-m", "tests.optim.edits", "0", str(SEEDS))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_random_edits_touch_no_byte_behind_a_tensor():
    done = child("-m", "tests.optim.edits", "20000", str(SEEDS // 4), "--guard")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_guard_is_one():
    script = (
        "import ctypes, torch; from tests.optim import edits; edits.guard = True\n"
        "t = edits.guarded(torch.ones(5)); ctypes.memset(t.data_ptr() + 20, 0, 1)"
    )
    assert child("-c", script).returncode < 0


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_a_gradient_whose_sign_is_to_be_turned_is_read_so(make: Any):
    sides = [nn.Parameter(torch.ones(9)) for _ in range(2)]
    optimizers = [make([p], lr=0.1) for p in sides]
    for step in range(6):
        for p, optimizer, sign in zip(sides, optimizers, (torch.neg, torch._neg_view)):
            p.grad = sign(torch.ones(9)) if step % 3 == 2 else torch.ones(9)
            optimizer.step()
        assert torch.equal(*sides)
    turned = nn.Parameter(torch._neg_view(torch.ones(9)))
    with pytest.raises(UnsupportedError, match="sign"):
        make([turned])


# ---- versions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    ("make", "dtype", "options"),
    [
        (AdamW, FP32, {}),
        (AdamW, BF16, {"master": "exact"}),
        (AdamW, BF16, {"master": "fp32", "state_dtype": "8bit"}),
        (SGD, FP32, {"momentum": 0.9}),
        (Lion, BF16, {"master": None}),
    ],
)
def test_autograd_sees_every_change_of_a_weight(make: Any, dtype: Any, options: Any, backend: str):
    p = nn.Parameter(torch.ones(9, dtype=dtype))
    optimizer = make([p], lr=0.1, backend=backend, **options)
    for step in range(4):
        p.grad = torch.ones_like(p)
        before = p._version
        optimizer.step(decision=Decision() if step == 3 else None, measures=step == 3)
        assert p._version > before


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_backward_through_a_graph_from_before_the_step_raises_as_in_torch(dtype: torch.dtype):
    p = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = AdamW([p], lr=0.1)
    for _ in range(2):
        losses = [(p * p).sum() for _ in range(2)]
        optimizer.zero_grad()
        losses[0].backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[1].backward()


def test_released_gradients_bump_versions_too():
    p = nn.Parameter(torch.ones(4))
    optimizer = AdamW([p], lr=0.1, release_gradients=True)
    for _ in range(2):
        old = p._version
        (p * 2).sum().backward()
        optimizer.step()
        assert p._version > old


# ---- what the user sees in `state` is what the next step uses --------------------------------------------


def stepped(make: Any = AdamW, **options: Any) -> tuple[nn.Parameter, Any]:
    p = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
    optimizer = make([p], lr=0.1, **options)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    return p, optimizer


def test_a_cleared_state_starts_anew():
    p, optimizer = stepped()
    optimizer.state.clear()
    optimizer.step()
    assert float(optimizer.state[p]["step"]) == 1
    assert torch.allclose(optimizer.state[p]["exp_avg"], torch.full((3, 4), 0.1))


def test_a_buffer_that_was_set_is_used():
    p, optimizer = stepped(SGD, momentum=0.5)
    before = p.detach().clone()
    optimizer.state[p]["momentum_buffer"] = torch.full((3, 4), 100.0)
    optimizer.step()
    assert torch.allclose(p, before - 0.1 * 51)


def test_a_deleted_buffer_of_sgd_begins_with_the_gradient():
    p, optimizer = stepped(SGD, momentum=0.5, dampening=0.5)
    before = p.detach().clone()
    del optimizer.state[p]["momentum_buffer"]
    optimizer.step()
    assert torch.allclose(p, before - 0.1)


def test_what_a_state_lacks_or_has_in_the_wrong_shape_is_named():
    p, optimizer = stepped()
    moments = dict(optimizer.state[p])
    del optimizer.state[p]["exp_avg_sq"]
    with pytest.raises(ConfigError, match=r"parameter 0 of group 0 has no 'exp_avg_sq'"):
        optimizer.step()
    optimizer.state[p] = {**moments, "exp_avg": torch.ones(2)}
    with pytest.raises(ConfigError, match=r"'exp_avg' of parameter 0 of group 0 has shape \[2\]"):
        optimizer.step()
    optimizer.state[p] = moments
    optimizer.step()


def test_a_weight_in_another_shape_goes_on_with_its_bits():
    """Seed 10239 of law 15: a row was made a column, and its lacking bits stayed a row."""
    ends = []
    for shape in ([1, 4], [4, 1]):
        p = nn.Parameter(torch.tensor([[0.5, -1.0, 0.25, 3.0]], dtype=BF16))
        optimizer = AdamW([p], lr=1e-3)
        for step in range(3):
            if step == 1:
                p.data = p.data.view(shape)
                with torch.no_grad():
                    p.view(-1)[0] = 0
            p.grad = None
            p.grad = torch.full_like(p, 0.5)
            optimizer.step()
        ends.append((p.view(-1), optimizer.state[p]["lacking"].view(-1)))
    assert all(torch.equal(a, b) for a, b in zip(*ends))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("option", ["8bit", "16bit"])
def test_a_state_format_that_a_group_cannot_have_is_named_in_the_step(option: str, backend: str):
    """Seed 12474 of law 15: blocks have no bounds of a third moment."""
    p = nn.Parameter(torch.ones(20, 20, dtype=BF16))
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p], amsgrad=True, backend=backend)
    optimizer.param_groups[0]["state_dtype"] = option
    with pytest.raises(ConfigError, match=f"state_dtype='{option}'"):
        optimizer.step()


def test_a_gradient_of_another_shape_is_named():
    p, optimizer = stepped()
    p.data = p.data[:2]
    with pytest.raises(ConfigError, match=r"shape \[3, 4\] on cpu, the parameter \[2, 4\]"):
        optimizer.step()


@pytest.mark.parametrize("master", ["exact", "fp32"])
def test_a_master_in_another_form_keeps_its_value(master: str):
    p = nn.Parameter(torch.linspace(-1, 1, 700).bfloat16())
    optimizer = AdamW([p], lr=1e-3, master=master)
    p.grad = torch.ones_like(p)
    optimizer.step()
    value = optimizer.master_of(p)
    optimizer.param_groups[0]["master"] = "fp32" if master == "exact" else "exact"
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(optimizer.master_of(p), value)
    assert ("lacking" in optimizer.state[p]) == (master == "fp32")


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_weight_set_from_outside_counts_more_than_its_master(dtype: torch.dtype, backend: str):
    p = nn.Parameter(torch.linspace(-1, 1, 70).to(dtype))
    optimizer = SGD([p], lr=0.25, master="fp32", backend=backend)
    for _ in range(2):
        p.grad = torch.full_like(p, 0.001)
        optimizer.step()
    kept = optimizer.master_of(p)
    p.data[:35] = 0.5
    optimizer.step()
    assert torch.allclose(optimizer.master_of(p)[:35], torch.tensor(0.5 - 0.00025), rtol=1e-4)
    assert torch.allclose(optimizer.master_of(p)[35:], kept[35:] - 0.00025, rtol=0, atol=1e-6)
    assert not torch.equal(kept[35:].to(dtype).float(), kept[35:])


def test_a_tensor_that_stands_for_others_is_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    p = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    with pytest.raises(UnsupportedError, match="plain tensors, not a TwoTensor"):
        AdamW([p])


def test_edits_cover_what_they_name():
    assert len({edit.__name__ for edit in edits.EDITS}) == len(edits.EDITS) > 45


def test_an_inference_region_around_a_step_leaves_a_state_to_train_with():
    p = nn.Parameter(torch.ones(4))
    optimizer = Adam([p])
    p.grad = torch.ones(4)
    with torch.inference_mode():
        optimizer.step()
    optimizer.step()
    assert not any(t.is_inference() for t in optimizer.state[p].values())


def test_tensors_without_memory_are_named():
    p = nn.Parameter(torch.ones(5))
    optimizer = SGD([p], lr=0.1)
    p.grad = torch.ones(5)
    p.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match="parameter 0 of group 0, its gradient or a state has no memory"):
        optimizer.step()


def test_channels_last_and_permuted_weights_step_where_they_are():
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        g = torch.Generator().manual_seed(0)
        values = [torch.randn(s, generator=g).bfloat16() for s in ((4, 3, 2, 2), (3, 1, 2, 2), (2, 5, 1, 1))]
        params = [nn.Parameter(v.to(memory_format=layout)) for v in values]
        optimizer = AdamW(params, lr=0.1)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=g).bfloat16()
            optimizer.step()
        results.append([*params, *optimizer.masters().values()])
    assert all(map(torch.equal, *results))


def test_a_state_that_stands_for_other_tensors_is_named():
    from torch.testing._internal.two_tensor import TwoTensor

    p, optimizer = stepped()
    optimizer.state[p]["exp_avg"] = TwoTensor(torch.ones(3, 4), torch.ones(3, 4))
    with pytest.raises(ConfigError, match="'exp_avg' of parameter 0 of group 0 is a TwoTensor"):
        optimizer.step()


def test_a_plain_dict_in_place_of_the_state_starts_anew():
    weights = [nn.Parameter(torch.linspace(-1, 1, 70).to(BF16)) for _ in range(2)]
    for p in weights:
        p.grad = torch.ones_like(p)
    used, fresh = (AdamW([p], lr=0.1) for p in weights)
    used.init_states()
    used.state = {}
    used.step()
    fresh.step()
    assert torch.equal(*weights)
