"""Every planted fault is named rightly, leaves no trace, and where a cure is proposed, the cure trains."""

import copy
import gc
import math
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from halfstep.compat.torch_amp import autocast
from halfstep.numerics.snapshot import StepParticipants
from halfstep.numerics.trace import trace_step
from tests.numerics.zoo import FAULTS

CURABLE = [f for f in FAULTS if f.cure not in (None, "masters")]


def state_of(case):
    values = [t.clone() for t in (*case.model.parameters(), *case.model.buffers())]
    values += [torch.get_rng_state()]
    session = case.session and (case.session.loss_scale, case.session.steps, case.session.skips)
    return values, copy.deepcopy(case.optimizer.state_dict()), session


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(torch.nan_to_num(a.double(), 7.0), torch.nan_to_num(b.double(), 7.0))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_the_verdict_is_right_and_the_step_leaves_no_trace(fault):
    case = fault.build()
    before = state_of(case)
    bad = trace_step(case.step, *case.batch, underflow=fault.underflow).bad
    assert bad is not None
    assert (bad.phase, bad.module) == (fault.phase, fault.module)
    assert bad.op in fault.op
    assert bad.cause.kind == fault.cause
    assert bad.origin == (fault.cause not in ("data", "weights"))
    assert bad.location.file.endswith("zoo.py")
    if fault.spoils:
        assert fault.spoils in bad.corrupted.lasting
    if fault.cure:
        assert fault.cure in [c.kind for c in bad.cures if c.status != "does not help"]
    assert equal(state_of(case), before)


@pytest.mark.parametrize("fault", CURABLE, ids=lambda f: f.name)
def test_the_cure_trains(fault):
    case = fault.build()
    bad = trace_step(case.step, *case.batch, underflow=fault.underflow).bad
    cure = next(c for c in bad.cures if c.kind == fault.cure)
    assert cure.status == "works"
    start = [p.detach().clone() for p in case.model.parameters()]
    with ExitStack() as stack:
        cure.doses[0].apply(StepParticipants(case.step), stack)
        losses = [float(case.step(*case.batch)) for _ in range(40)]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert any(not torch.equal(a, b) for a, b in zip(start, case.model.parameters()))
    assert all(p.isfinite().all() for p in case.model.parameters())


def found(case, fault):
    bad = trace_step(case.step, *case.batch, underflow=fault.underflow).bad
    place = bad.phase, bad.module, bad.op, bad.where, bad.cause.kind
    return place, {(c.kind, c.code): c.status for c in bad.cures}


def on_this_rank(rank, folder):
    """Traces every fault in a step that ranks take together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    verdicts = {}
    for fault in FAULTS:
        case = fault.build()
        case.model.register_forward_pre_hook(lambda *_: dist.all_reduce(torch.ones(())))
        verdicts[fault.name] = found(case, fault)
    torch.save(verdicts, f"{folder}/rank{rank}")
    gc.collect()  # what holds the group goes first: its threads must not meet an interpreter that ends
    dist.destroy_process_group()


@pytest.mark.long
def test_all_ranks_together_name_the_fault_of_one_and_give_no_other_verdict_on_a_cure(tmp_path):
    """Other loss scales alone are tried over ranks: one that raised would leave the rest waiting."""
    mp.start_processes(on_this_rank, args=(str(tmp_path),), nprocs=2, start_method="fork")
    verdicts = [torch.load(tmp_path / f"rank{rank}", weights_only=False) for rank in range(2)]
    for fault in FAULTS:
        place, cures = found(fault.build(), fault)
        tried = {cure: status for cure, status in cures.items() if cure[0] in ("loss_scale", "loss")}
        together = {cure: tried.get(cure, "untried") for cure in cures}
        assert [one[fault.name] for one in verdicts] == [(place, together)] * 2


def test_the_inputs_told_are_those_of_the_users_call():
    q, k = torch.full((2, 3, 12, 64), 90.0, dtype=torch.float16).unbind(0)

    def step():
        with autocast("cpu", dtype=torch.float16):
            scores = q @ k.transpose(-2, -1)
        scores.float().sum().backward()

    q.requires_grad_()
    bad = trace_step(step, try_cures=False).bad
    assert (bad.op, [str(t) for t in bad.inputs]) == ("matmul", ["fp16[3, 12, 64]", "fp16[3, 64, 12]"])


def test_an_op_is_run_again_as_it_ran_whatever_region_is_open_then():
    w = torch.full((4, 4), 300.0, dtype=torch.float16, requires_grad=True)

    def step():
        with torch.autocast("cpu", enabled=False):
            (w @ w).float().sum().backward()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        bad = trace_step(step, try_cures=False).bad
    assert (bad.op, bad.cause.kind) == ("matmul", "range")


@pytest.mark.parametrize(("ill", "told"), [((5,), "16 values, all in row 5"), ((5, 7), "16 values")])
def test_the_row_of_a_batch_that_is_not_finite_is_named(ill, told):
    weight, y = torch.ones(16, requires_grad=True), torch.ones(16)
    y[list(ill)] = -math.inf
    bad = trace_step(lambda: (weight - y).abs().mean().backward(), try_cures=False).bad
    assert bad.cause.kind == "data"
    assert bad.cause.words.endswith(told)


def test_there_are_enough_faults_and_cures():
    assert len(FAULTS) >= 14
    assert len(CURABLE) >= 8
