"""The step's rules: torch's mathematics, scaling, skipping, groups, errors."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import ConfigError, MasterRangeError, UnsupportedError
from halfstep.gradients.decision import Decision
from halfstep.optim import SGD, Adam, AdamW, Lion, MasterWeights
from halfstep.optim.backends.reference import by_reference
from halfstep.optim.bundles import tensor_groups_of

BF16, FP16 = torch.bfloat16, torch.float16


def params_and_grads(
    dtype: torch.dtype = torch.float32, steps: int = 20
) -> tuple[list[Tensor], list[list[Tensor]]]:
    g = torch.Generator().manual_seed(0)
    values = [torch.randn(33, 5, generator=g), torch.randn(7, generator=g)]
    grads = [[torch.randn(v.shape, generator=g).to(dtype) for v in values] for _ in range(steps)]
    return [v.to(dtype) for v in values], grads


def run(
    optimizer_of: Any, values: list[Tensor], grads: list[list[Tensor]], **step: Any
) -> list[nn.Parameter]:
    params = [nn.Parameter(v.clone()) for v in values]
    optimizer = optimizer_of(params)
    for now in grads:
        for p, g in zip(params, now):
            p.grad = g.clone()
        optimizer.step(**step)
    return params


PEERS: list[tuple[Any, Any, dict[str, Any]]] = [
    (AdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.99)}),
    (AdamW, torch.optim.AdamW, {"maximize": True}),
    (Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (SGD, torch.optim.SGD, {"lr": 0.1}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}),
    (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
]


@pytest.mark.parametrize(("ours", "peer", "options"), PEERS)
def test_fp32_weights_follow_torch(ours: Any, peer: Any, options: dict[str, Any]):
    values, grads = params_and_grads()
    mine = run(lambda p: ours(p, backend="reference", **options), values, grads)
    wide = [v.double() for v in values], [[g.double() for g in now] for now in grads]
    theirs = run(lambda p: peer(p, **options), *wide)
    for p, q, start in zip(mine, theirs, values):
        moved = (q - start).abs().max()
        assert (p - q).abs().max() < 1e-5 * moved + 2.0**-23 * q.abs().max() * 20


def adam_in_float64(w: Tensor, grads: list[Tensor], lr: float, decay: float, decoupled: bool) -> Tensor:
    """Adam without the bias corrections, by the formula."""
    w = w.double()
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for grad in grads:
        g = grad.double() if decoupled else grad.double() + decay * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = (w * (1 - lr * decay) if decoupled else w) - lr * m / (v.sqrt() + 1e-8)
    return w


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("cls", "decoupled"), [(AdamW, True), (Adam, False)])
def test_without_bias_correction_the_moments_are_taken_as_they_are(cls: Any, decoupled: bool, backend: str):
    values, grads = params_and_grads()
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "backend": backend}
    mine = run(lambda p: cls(p, bias_correction=False, **options), values, grads)
    corrected = run(lambda p: cls(p, **options), values, grads)
    for index, (p, q, start) in enumerate(zip(mine, corrected, values)):
        exact = adam_in_float64(start, [now[index] for now in grads], 1e-3, 0.1, decoupled)
        moved = (exact - start).abs().max()
        assert (p - exact).abs().max() < 1e-5 * moved + 2.0**-23 * exact.abs().max() * 20
        assert (p - q).abs().max() > 0.1 * moved


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("cls", [AdamW, Adam])
def test_without_bias_correction_kernels_equal_the_reference(cls: Any, state_dtype: str):
    values, grads = params_and_grads(BF16, steps=5)
    options: dict[str, Any] = {"bias_correction": False, "state_dtype": state_dtype, "weight_decay": 0.1}
    results = [
        run(partial(cls, backend=backend, **options), values, grads, inv_scale=0.5)
        for backend in ("auto", "reference")
    ]
    for p, q in zip(*results):
        assert torch.equal(p, q)


def test_groups_may_differ_in_bias_correction_and_checkpoints_keep_it():
    values, grads = params_and_grads()

    def of(params: list[nn.Parameter]) -> AdamW:
        return AdamW([{"params": params[:1], "bias_correction": False}, {"params": params[1:]}], lr=1e-3)

    mixed = run(of, values, grads)
    plain = run(lambda p: AdamW(p, lr=1e-3, bias_correction=False), values, grads)
    corrected = run(lambda p: AdamW(p, lr=1e-3), values, grads)
    assert torch.equal(mixed[0], plain[0])
    assert torch.equal(mixed[1], corrected[1])
    params = [nn.Parameter(v.clone()) for v in values]
    first = of(params)
    for half in (grads[:10], grads[10:]):
        second = AdamW([{"params": params[:1]}, {"params": params[1:]}])
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        first = pickle.loads(pickle.dumps(second))
        params = [p for group in first.param_groups for p in group["params"]]
        for now in half:
            for p, g in zip(params, now):
                p.grad = g.clone()
            first.step()
    for p, q in zip(params, mixed):
        assert torch.equal(p, q)


def test_defaults_are_torch_s():
    p = [nn.Parameter(torch.zeros(2))]
    for ours, peer in ((AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam), (SGD, torch.optim.SGD)):
        mine, theirs = ours(p).defaults, peer(p).defaults
        assert {k: mine[k] for k in mine.keys() & theirs.keys()} == {
            k: theirs[k] for k in mine.keys() & theirs.keys()
        }


def test_lion_is_the_paper_s_formula():
    values, grads = params_and_grads()
    lr, (b1, b2), decay = 1e-2, (0.9, 0.99), 0.1
    mine = run(
        lambda p: Lion(p, lr=lr, betas=(b1, b2), weight_decay=decay, backend="reference"), values, grads
    )
    for p, start, index in zip(mine, values, range(2)):
        w, m = start.double(), torch.zeros_like(start, dtype=torch.float64)
        for now in grads:
            g = now[index].double()
            w = w - lr * (torch.sign(b1 * m + (1 - b1) * g) + decay * w)
            m = b2 * m + (1 - b2) * g
        assert torch.allclose(p.double(), w, atol=1e-5)


@pytest.mark.parametrize("master", ["exact", "fp32"])
def test_scale_and_clip_equal_gradients_changed_beforehand(master: str):
    values, grads = params_and_grads(BF16)
    scaled = [[g * 1024 for g in now] for now in grads]
    coef = torch.tensor(0.25)
    plain = run(lambda p: AdamW(p, master=master), values, [[g * 0.25 for g in now] for now in grads])
    fused = run(
        lambda p: AdamW(p, master=master), values, scaled, inv_scale=torch.tensor(1 / 1024), clip_coef=coef
    )
    assert all(torch.equal(p, q) for p, q in zip(plain, fused))


def test_gradients_are_read_and_not_changed():
    values, grads = params_and_grads(BF16, 1)
    params = [nn.Parameter(v.clone()) for v in values]
    optimizer = AdamW(params)
    for p, g in zip(params, grads[0]):
        p.grad = g.clone()
    optimizer.measure(inv_scale=0.5)
    optimizer.step(inv_scale=0.5, clip_coef=0.1)
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads[0]) if p.grad is not None)


@pytest.mark.parametrize("flag", [True, torch.tensor(True), torch.tensor(1.0)])
def test_a_skipped_step_changes_nothing(flag: Any):
    values, grads = params_and_grads(BF16, 2)
    params = [nn.Parameter(v.clone()) for v in values]
    optimizer = AdamW(params, lr=0.1)
    for p, g in zip(params, grads[0]):
        p.grad = g.clone()
    optimizer.step(found_inf=torch.tensor(False))
    before = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    optimizer.step(found_inf=flag)
    assert all(torch.equal(p, q) for p, q in zip(params, before[1]))
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            old = before[0]["state"][index][key]
            assert value == old if key == "weight" else torch.equal(value, old), key
    assert int(optimizer.state[params[0]]["step"]) == 1


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("master", ["exact", "fp32", "stochastic", None])
def test_device_path_equals_host_path(master: str | None, state_dtype: str):
    """What accelerators run, on CPU tensors: same numbers, and a skip decided by a device flag."""
    values, grads = params_and_grads(BF16, 4)
    options = {"lr": torch.tensor(0.01), "master": master, "state_dtype": state_dtype, "backend": "reference"}
    host = run(lambda p: AdamW(p, **options), values, [grads[0], grads[2], grads[3]], inv_scale=0.5)
    params = [nn.Parameter(v.clone()) for v in values]
    optimizer = AdamW(params, **options)
    for step, now in enumerate(grads):
        for p, g in zip(params, now):
            p.grad = g.reshape(p.shape).clone()
        for bundle in tensor_groups_of(optimizer.param_groups, optimizer.algorithm):
            bundle.collect(optimizer.state)
            skip = torch.tensor(step == 1)
            by_reference(bundle, Decision(torch.tensor(0.5), skip=skip), optimizer.seed)
    assert all(torch.equal(p, q) for p, q in zip(host, params))


def test_schedulers_groups_and_missing_gradients():
    a, b, unused = (nn.Parameter(torch.ones(4, dtype=BF16)) for _ in range(3))
    groups = [{"params": [a, unused]}, {"params": [b], "lr": 0.5, "master": None, "state_dtype": "8bit"}]
    optimizer = SGD(groups, lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        a.grad, b.grad = torch.full_like(a, 0.25), torch.full_like(b, 0.25)
        optimizer.step()
        schedule.step()
    assert a.tolist() == [1 - 0.25 - 0.125] * 4
    assert b.tolist() == [1 - 0.125 - 0.0625] * 4
    assert unused.tolist() == [1.0] * 4
    assert unused not in optimizer.state


def test_closure_runs_with_gradients():
    p = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = SGD([p], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert p.tolist() == [0.0] * 3


@pytest.mark.parametrize("layout", ["channels_last", "transposed_grad", "transposed"])
def test_memory_layouts_give_the_same_numbers(layout: str):
    g = torch.Generator().manual_seed(1)
    value, grad = (
        torch.randn(4, 6, 3, 5, generator=g).bfloat16(),
        torch.randn(4, 6, 3, 5, generator=g).bfloat16(),
    )
    plain, p = nn.Parameter(value.clone()), nn.Parameter(value.clone())
    if layout == "channels_last":
        p = nn.Parameter(value.clone().to(memory_format=torch.channels_last))
    elif layout == "transposed":
        p = nn.Parameter(value.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3))
    for q in (plain, p):
        optimizer = AdamW([q], lr=0.1)
        q.grad = (
            grad.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3) if "grad" in layout else grad.clone()
        )
        optimizer.step()
        assert torch.equal(optimizer.master_of(q).bfloat16(), q)
    assert torch.equal(plain, p)


def test_weights_replaced_through_data_are_followed():
    p = nn.Parameter(torch.ones(8, dtype=BF16))
    optimizer = SGD([p], lr=0.5)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.data = torch.full((8,), 2.0, dtype=BF16)
    optimizer.step()
    assert p.tolist() == [1.5] * 8


def test_copies_and_pickles_go_on_alone():
    p = nn.Parameter(torch.ones(8, dtype=BF16))
    optimizer = AdamW([p], lr=0.1, seed=3, accumulate="fp32")
    p.grad = torch.ones(8)
    optimizer.step()
    twin = pickle.loads(pickle.dumps(optimizer))
    q = twin.param_groups[0]["params"][0]
    assert (twin.seed, twin.accumulate) == (3, "fp32")
    p.grad, q.grad = torch.ones(8), torch.ones(8)
    optimizer.step()
    twin.step()
    assert torch.equal(p, q)
    assert torch.equal(optimizer.master_of(p), twin.master_of(q))


def test_fp32_accumulation_keeps_what_bf16_loses():
    for accumulate, expected in ((None, 1.0), ("fp32", 1 + 8 * 2.0**-9)):
        p = nn.Parameter(torch.zeros(1, dtype=BF16))
        optimizer = SGD([p], lr=1.0, accumulate=accumulate)
        for scale in (1.0, *[2.0**-9] * 8):
            (p * scale).sum().backward()
        optimizer.step()
        assert optimizer.master_of(p).item() == -expected


@pytest.mark.parametrize("masters", [False, True])
def test_fp32_accumulation_takes_in_gradients_that_were_there(masters):
    p = nn.Parameter(torch.zeros(1, dtype=BF16))
    p.sum().backward()
    if masters:
        MasterWeights(torch.optim.SGD([p], lr=1.0), accumulate="fp32")
    else:
        SGD([nn.Parameter(torch.zeros(1))], lr=1.0, accumulate="fp32").add_param_group({"params": [p]})
    for _ in range(8):
        (p * 2.0**-9).sum().backward()
    assert (p.grad.dtype, p.grad.item()) == (torch.float32, 1 + 8 * 2.0**-9)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("beta", [1.0, torch.tensor(0.999, dtype=BF16, device="cpu")])
def test_decay_rates_that_became_one_are_named(backend, beta):
    p = nn.Parameter(torch.zeros(4))
    optimizer = AdamW([p], lr=0.1, backend=backend)
    optimizer.param_groups[0]["betas"] = (0.9, beta)
    p.grad = torch.ones(4)
    with pytest.raises(ConfigError, match=r"betas.*\[0, 1\)"):
        optimizer.step()
    assert not p.any()


def test_exact_fp16_says_when_a_weight_outgrows_it():
    p = nn.Parameter(torch.tensor([65000.0, 1.0], dtype=FP16))
    for backend in ("auto", "reference"):
        q = nn.Parameter(p.detach().clone())
        optimizer = SGD([q], lr=1.0, backend=backend)
        q.grad = torch.tensor([-1000.0, 0.0], dtype=FP16)
        with pytest.raises(MasterRangeError, match="65504"):
            optimizer.step()
        assert q.tolist() == [65504.0, 1.0]


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (AdamW, {"master": "fp16"}, "master='fp16'"),
    (AdamW, {"state_dtype": "int4"}, "state_dtype='int4'"),
    (AdamW, {"lr": -1.0}, "lr=-1.0"),
    (AdamW, {"betas": (0.9, 1.0)}, r"betas\[1\]"),
    (AdamW, {"eps": -1e-8}, "eps"),
    (AdamW, {"backend": "cuda"}, "backend='cuda'"),
    (Adam, {"bias_correction": "no"}, "bias_correction='no': expected True or False"),
    (AdamW, {"accumulate": "fp64"}, "accumulate='fp64'"),
    (SGD, {"nesterov": True}, "nesterov"),
    (Lion, {"lr": torch.ones(2)}, "shape"),
]


@pytest.mark.parametrize(("cls", "options", "message"), WRONG)
def test_wrong_arguments_are_named(cls: Any, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        cls([nn.Parameter(torch.zeros(2))], **options)


def test_what_cannot_be_updated_is_refused():
    wide = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    wide.grad = torch.ones_like(wide)
    with pytest.raises(UnsupportedError, match="float64"):
        AdamW([wide]).step()
    part = nn.Parameter(torch.zeros(4, 4)[:, ::2])
    part.grad = torch.ones(4, 2)
    with pytest.raises(UnsupportedError, match="contiguous"):
        AdamW([part]).step()
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="dense"):
        AdamW(table.parameters()).step()
    with pytest.raises(ConfigError, match="not a parameter"):
        AdamW([nn.Parameter(torch.zeros(2))]).master_of(wide)
