"""Law 6, contexts nest: regions survive whatever runs inside, and afterwards the state is what it was."""

import asyncio
import threading

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpointing
from torch import nn

from halfstep.casting import active_policy, autocast, disabled, regions
from halfstep.casting import state as states_
from halfstep.casting.kernel_choice import table_of
from halfstep.policy import Policy
from tests.torch_facts import one_graph

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X, W = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
CARRIERS = ("cpu", "maia", "ipu")


def state() -> tuple[object, ...]:
    torch_state = tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in CARRIERS)
    here = states_.thread()
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        torch_state, torch.is_autocast_cache_enabled(), nesting,
        dict(here.active), list(here.entered), active_policy(),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def state_afterwards_is_state_before():
    before = state()
    yield
    assert state() == before


def ran_in() -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of an op that torch's kernel casts, and of one that ours does."""
    return (X @ W).dtype, X.to(BF16).exp().dtype


OUT, IN16, INF16 = (FP32, BF16), (BF16, FP32), (FP16, FP32)


def test_on_off_and_other_dtypes_nest() -> None:
    with autocast("cpu", BF16):
        assert ran_in() == IN16
        with disabled("cpu"):
            assert ran_in() == OUT
            with autocast("cpu", FP16):
                assert ran_in() == INF16
            assert ran_in() == OUT
        with autocast("cpu", FP32):
            assert ran_in() == OUT
        assert ran_in() == IN16
    assert ran_in() == OUT


def test_policies_nest() -> None:
    low_exp = Policy().with_rules(low=["exp"], full=["matmul"])
    with autocast("cpu", BF16):
        with autocast("cpu", policy=low_exp):
            assert ran_in() == (FP32, BF16)
            with autocast("cpu", policy="torch"):
                assert ran_in() == (BF16, BF16)
        assert ran_in() == IN16


def test_torch_regions_inside_ours_and_around_ours() -> None:
    with torch.autocast("cpu", BF16):
        with autocast("cpu", BF16):
            assert ran_in() == IN16
            with torch.autocast("cpu", enabled=False):
                assert ran_in() == OUT
            with torch.autocast("cpu", FP16):
                assert ran_in() == (FP16, BF16)
        assert ran_in() == (BF16, BF16)
        assert torch.is_autocast_cache_enabled()


def test_one_instance_is_entered_by_itself_and_again() -> None:
    region = autocast("cpu", BF16)

    @region
    def down(depth: int) -> list[tuple[torch.dtype, torch.dtype]]:
        with region, region:
            return [ran_in(), *(down(depth - 1) if depth else [])]

    for _ in range(2):
        assert down(5) == [IN16] * 6
        assert ran_in() == OUT


def test_exceptions_leave_the_state_as_it_was() -> None:
    region = autocast("cpu", BF16)
    with region, pytest.raises(ZeroDivisionError), region, disabled("cpu"):
        raise ZeroDivisionError
    assert ran_in() == OUT
    with region:
        assert ran_in() == IN16


def test_a_region_affects_its_own_thread_only() -> None:
    region = autocast("cpu", BF16)
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    inside, leave = threading.Barrier(3), threading.Barrier(3)

    def work(name: str, enter: bool) -> None:
        if enter:
            with region:
                inside.wait()
                seen[name] = ran_in()
                leave.wait()
        else:
            inside.wait()
            seen[name] = ran_in()
            leave.wait()
        seen[name + " after"] = ran_in()

    threads = [threading.Thread(target=work, args=a) for a in (("a", True), ("b", False))]
    for thread in threads:
        thread.start()
    with autocast("cpu", policy=Policy(compute_dtype=FP16).with_rules(low=["exp"])):
        inside.wait()
        seen["main"] = ran_in()
        leave.wait()
    for thread in threads:
        thread.join()
    assert seen == {"a": IN16, "b": OUT, "main": (FP16, FP16), "a after": OUT, "b after": OUT}


def test_a_decorated_generator_switches_at_each_resume() -> None:
    @autocast("cpu", BF16)
    def numbers(n: int):
        got = []
        for _ in range(n):
            try:
                got.append((yield ran_in()))
            except KeyError:
                got.append(ran_in())
        return got

    running = numbers(3)
    assert next(running) == IN16
    assert ran_in() == OUT
    with disabled("cpu"):
        assert running.send("a") == IN16
        assert ran_in() == OUT
    with autocast("cpu", FP16):
        assert running.throw(KeyError()) == IN16
        assert ran_in() == INF16
    with pytest.raises(StopIteration) as end:
        running.send("c")
    assert end.value.value == ["a", IN16, "c"]


def test_a_decorated_generator_closes() -> None:
    closed = []

    @autocast("cpu", BF16)
    def endless():
        try:
            while True:
                yield
        finally:
            closed.append(ran_in())

    running = endless()
    next(running)
    running.close()
    assert closed in ([IN16], [OUT])


def test_a_with_that_spans_a_yield_behaves_as_torchs() -> None:
    def spanning(region):
        with region:
            yield ran_in()[0]
        yield ran_in()[0]

    for make in (autocast, torch.autocast):
        running = spanning(make("cpu", BF16))
        assert next(running) is BF16
        assert ran_in()[0] is BF16
        assert next(running) is FP32


def test_decorated_coroutines_leave_while_they_wait() -> None:
    seen = []

    @autocast("cpu", BF16)
    async def cast(n: int) -> int:
        for _ in range(n):
            seen.append(("cast", ran_in()))
            await asyncio.sleep(0)
        return n

    async def plain(n: int) -> None:
        for _ in range(n):
            seen.append(("plain", ran_in()))
            await asyncio.sleep(0)

    @autocast("cpu", BF16)
    async def items():
        for i in range(2):
            await asyncio.sleep(0)
            yield i, ran_in()

    async def both() -> None:
        assert (await asyncio.gather(cast(3), plain(3)))[0] == 3
        async for i, dtypes in items():
            seen.append((i, dtypes))
            seen.append(("plain", ran_in()))

    asyncio.run(both())
    assert {dtypes for name, dtypes in seen if name == "plain"} == {OUT}
    assert {dtypes for name, dtypes in seen if name != "plain"} == {IN16}
    assert len(seen) == 10


# --- activation checkpointing ---

RECOMPUTED: list[tuple[torch.dtype, ...]] = []


def block(x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, W)
    low = F.pad(y[None], (1, 1), "reflect")[0]
    with torch.no_grad():
        RECOMPUTED.append((y.exp().dtype,))
    z = y.exp()
    RECOMPUTED.append((y.dtype, low.dtype, z.dtype))
    return (z * z).sum() + low.float().sum()


REGIONS = {
    "default": lambda: autocast("cpu", BF16),
    "fp16": lambda: autocast("cpu", FP16),
    "edited": lambda: autocast("cpu", policy=Policy().with_rules(low=["exp"], full=["linear"])),
    "torch": lambda: autocast("cpu", BF16, policy="torch"),
    "torch.autocast": lambda: torch.autocast("cpu", BF16),
    "torch.autocast without cache": lambda: torch.autocast("cpu", BF16, cache_enabled=False),
}


@pytest.mark.parametrize("around", [None, "same", "disabled", "fp16", "edited"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("region", REGIONS)
def test_recomputation_sees_the_policy_of_forward(
    region: str, reentrant: bool, depth: int, around: str | None
) -> None:
    RECOMPUTED.clear()
    with REGIONS["edited"]():
        F.linear(torch.randn(1, 4, requires_grad=True), W).exp()
    x = torch.randn(4, 4, requires_grad=True)

    def nested(x: torch.Tensor, depth: int = depth) -> torch.Tensor:
        inner = (lambda a: nested(a, depth - 1)) if depth else block
        return checkpointing.checkpoint(inner, x, use_reentrant=reentrant)

    with checkpointing.set_checkpoint_early_stop(False), REGIONS[region]():
        loss = nested(x)
        if around == "same":
            loss.backward()
    if around == "disabled":
        with disabled("cpu"):
            loss.backward()
    elif around in ("fp16", "edited"):
        with REGIONS[around]():
            loss.backward()
    elif around is None:
        loss.backward()
    expected = {"default": (BF16, BF16, FP32), "fp16": (FP16, FP16, FP32), "edited": (FP32, FP32, BF16)}
    first = expected.get(region, (BF16, FP32, BF16))
    assert len(RECOMPUTED) >= 4
    assert [first[2:], first] * (len(RECOMPUTED) // 2) == RECOMPUTED
    assert x.grad is not None


@pytest.mark.parametrize("around", [None, "fp16"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("outer", [None, "fp16", "torch.autocast"])
def test_a_region_inside_what_is_recomputed(outer: str | None, reentrant: bool, around: str | None) -> None:
    RECOMPUTED.clear()
    x = torch.randn(4, 4, requires_grad=True)

    def inner(x: torch.Tensor) -> torch.Tensor:
        with REGIONS["edited"]():
            return block(x)

    with checkpointing.set_checkpoint_early_stop(False), REGIONS[outer]() if outer else disabled("cpu"):
        loss = checkpointing.checkpoint(inner, x, use_reentrant=reentrant)
    with REGIONS[around]() if around else disabled("cpu"):
        loss.backward()
    assert RECOMPUTED == [(BF16,), (FP32, FP32, BF16)] * 2


def test_forward_in_one_thread_and_backward_in_another() -> None:
    RECOMPUTED.clear()
    x = torch.randn(4, 4, requires_grad=True)
    losses: list[torch.Tensor] = []

    def forward() -> None:
        with REGIONS["edited"]():
            losses.append(checkpointing.checkpoint(block, x, use_reentrant=False))

    def earlier() -> None:  # at the same numbers: autograd counts anew in every thread
        with REGIONS["default"]():
            block(x)

    kept: list[threading.Thread] = []
    for work in (earlier, forward, lambda: losses[0].backward()):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        kept.append(thread)
    assert RECOMPUTED[2:] == [(BF16,), (FP32, FP32, BF16)] * 2


def test_backward_on_another_thread_of_a_region_sees_it() -> None:
    """Autograd hands its worker threads the state of the thread that called backward."""
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(ran_in())
            return grad

    x = torch.randn(2, requires_grad=True)
    with autocast("cpu", BF16):
        Look.apply(x).sum().backward()
    Look.apply(x).sum().backward()
    assert seen == [IN16, OUT]


# --- compiled code ---


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.body(x)
        with autocast("cpu", enabled=False):
            wide = self.body(x)
        return y, y.exp(), y.softmax(-1), wide


EDITED = Policy().with_rules(low=["exp"], full=["softmax"])
INSIDE = {
    "bf16": lambda x: run_in(x, dtype=BF16),
    "default": lambda x: run_in(x),
    "fp16": lambda x: run_in(x, dtype="fp16"),
    "edited": lambda x: run_in(x, policy=EDITED),
    "text": lambda x: run_in(x, policy="c=bf16,low=exp"),
    "decorated": autocast("cpu", policy=EDITED)(lambda x: NET(x)),
}
NET = Net()


def run_in(x, dtype=None, policy=None):
    with autocast("cpu", dtype, policy=policy):
        return NET(x)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@one_graph
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", INSIDE)
def test_a_region_inside_compiled_code(case: str, backend: str, fresh_dynamo) -> None:
    x = torch.randn(3, 8)
    eager = INSIDE[case](x)
    compiled = torch.compile(INSIDE[case], backend=backend, fullgraph=True)
    for _ in range(2):
        got = compiled(x)
        assert [t.dtype for t in got] == [t.dtype for t in eager]
        for mine, theirs in zip(got, eager, strict=True):
            torch.testing.assert_close(mine, theirs)
    got[0].float().sum().backward()


@one_graph
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_called_in_regions_is_compiled_for_each(backend: str, fresh_dynamo) -> None:
    x = torch.randn(3, 8)
    compiled = torch.compile(NET, backend=backend, fullgraph=True)
    regions_in_turn = [
        autocast("cpu", BF16), autocast("cpu", policy=EDITED), torch.autocast("cpu", BF16), autocast("cpu",
        FP16), autocast("cpu", policy=EDITED), autocast("cpu", BF16, policy="torch"), disabled("cpu"),
    ]  # fmt: skip
    for region in regions_in_turn:
        with region:
            eager, got = NET(x), compiled(x)
        assert [t.dtype for t in got] == [t.dtype for t in eager]


@one_graph
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_inductor_runs_the_policy(fresh_dynamo) -> None:
    def step(x, w):
        with autocast("cpu", policy=EDITED):
            return (x @ w).exp()

    x = torch.randn(4, 4)
    got = torch.compile(step, fullgraph=True)(x, W.detach())
    assert got.dtype is BF16
    torch.testing.assert_close(got, step(x, W.detach()), rtol=2e-2, atol=2e-2)


def test_carriers_tell_policies_apart() -> None:
    codes = {
        regions._code_for(Policy().with_rules(low=[name]), table_of())
        for name in ("exp", "log", "tan", "pow", "sum")
    }
    assert len(codes) == 5
    code = regions._code_for(EDITED, table_of())
    assert regions._policies[code] == (EDITED, table_of())
