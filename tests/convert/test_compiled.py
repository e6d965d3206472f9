"""`prepare(compile=True)`: eager code's numbers, nothing compiled twice, and nothing left after revert."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.convert.compiled import Compiled
from tests.compiling import traced
from tests.torch_facts import one_graph

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace.*"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A class that is not torch's, of which `model.compile()` compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.gelu(self.norm(self.first(x))))


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def prepared(**options: Any) -> tuple[Net, hs.Session]:
    model = network()
    return model, hs.prepare(model, hs.optim.SGD(model.parameters(), lr=0.1), **options)


def step(model: nn.Module, amp: hs.Session) -> float:
    with amp.autocast():
        loss = model(X).float().square().mean()
    amp.backward(loss)
    amp.step()
    return float(loss.detach())


@one_graph
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_steps_are_those_of_eager_code_and_nothing_is_compiled_after_the_first(level: str) -> None:
    model, amp = prepared(level=level)
    wanted = [step(model, amp) for _ in range(3)]
    with traced() as graphs:
        model, amp = prepared(level=level, compile=True)
        assert step(model, amp) == wanted[0]
        count = len(graphs)
        assert count
        assert [step(model, amp) for _ in range(2)] == wanted[1:]
        assert len(graphs) == count
        amp.revert()
        model(X)
        assert len(graphs) == count, "compiled after revert"
        assert vars(model).keys() == vars(network()).keys()


def test_revert_gives_a_compilation_of_before_back() -> None:
    model = network()
    model.compile(backend="eager")
    before = dict(vars(model))
    compiled = Compiled([model])
    assert vars(model) != before
    assert compiled
    compiled.revert()
    assert vars(model) == before
    compiled.revert()
    assert not compiled
    assert vars(model) == before


def test_no_compiled_model_is_kept() -> None:
    model = network()
    compiled, gone = Compiled([model]), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    compiled.revert()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_model_whose_session_is_gone_is_undone_by_name(level: str) -> None:
    model, amp = prepared(level=level, compile=True)
    del amp
    gc.collect()
    hs.revert(model)
    assert vars(model).keys() == vars(network()).keys()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_copies_are_plain_modules(level: str) -> None:
    model, amp = prepared(level=level, compile=True)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert vars(copied).keys() == vars(network()).keys()
        with amp.autocast():
            assert torch.allclose(copied(X).float(), network()(X).float(), atol=0.02)


class Holding(torch.optim.SGD):
    """Keeps references of its own, which masters cannot take the place of."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.held = [p for group in self.param_groups for p in group["params"]]


def test_what_prepare_refuses_is_not_left_compiled() -> None:
    model = network()
    with pytest.raises(hs.UnsupportedError, match="Holding"):
        hs.prepare(model, Holding(model.parameters()), "O2", compile=True)
    assert vars(model).keys() == vars(network()).keys()


def test_a_session_that_is_not_enabled_compiles_nothing() -> None:
    model, _ = prepared(compile=True, enabled=False)
    assert vars(model).keys() == vars(network()).keys()


@pytest.mark.parametrize("kind", [nn.Sequential, type("Chain", (nn.Sequential,), {})])
def test_what_torch_would_compile_nothing_of_is_refused(kind: type[nn.Sequential]) -> None:
    model = kind(nn.Linear(8, 2), nn.ReLU())
    with pytest.raises(hs.ConfigError, match=f"nothing of {kind.__name__}.*torch's own.*torch.compile"):
        hs.prepare(model, compile=True)
    assert "forward" not in vars(model)
    with traced() as graphs:
        own = kind(Net(), nn.ReLU())
        hs.prepare(own, compile=True)
        own(X)
        assert graphs


@pytest.mark.parametrize("value", ["rounded", 1, None])
def test_a_word_that_is_none_says_where_options_go(value: Any) -> None:
    model = network()
    with pytest.raises(hs.ConfigError, match=r"compile=.*expected True or False; .*model\.compile\(\.\.\.\)"):
        prepared(compile=value)
    with pytest.raises(hs.ConfigError, match="compile="):
        hs.tune(model, None, lambda amp, x: Tensor(), X, compile=value)


def test_a_plan_says_that_models_are_compiled() -> None:
    text = '[settings]\nlevel = "O2"\ndtype = "bf16"\ncompile = true\n'
    plan = hs.Plan.from_toml(text)
    assert plan.settings is not None
    assert plan.settings.compile
    assert hs.Plan.from_toml(plan.to_toml()) == plan
    with traced() as graphs:
        model, amp = prepared(plan=plan)
        step(model, amp)
        assert graphs
    assert "compile" not in hs.Plan.from_toml(text.replace("compile = true\n", "")).to_toml()
    with pytest.raises(hs.PlanError, match="compile must be a bool"):
        hs.Plan.from_toml(text.replace("true", "1"))
