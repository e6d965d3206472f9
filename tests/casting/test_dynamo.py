"""Regions in compiled code: the dtypes of eager code, whatever breaks, whoever made the region."""

import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from halfstep.compat import torch_amp
from tests.torch_facts import one_graph

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*Dynamo does not know how to trace.*"),
]
BF16, FP16 = torch.bfloat16, torch.float16
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
W = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
OUTSIDE, OUTSIDE_FP16 = hs.autocast("cpu", BF16), hs.autocast("cpu", FP16)
EDITED = hs.Policy().with_rules(full=["mm", "matmul"])
LSTM, GRU, LINEAR = nn.LSTM(8, 8), nn.GRU(8, 8), nn.Linear(8, 8)


def inside(x):
    with hs.autocast("cpu", BF16):
        y = x @ W
        return y, y.exp(), y.sum()


def item(x):
    with hs.autocast("cpu", BF16):
        y = x @ W
        factor = y.float().abs().max().item()
        return y, (y * factor) @ W, y.exp()


def branch(x):
    with hs.autocast("cpu", BF16):
        y = x @ W
        z = y @ W if y.sum() > 0 else (-y) @ W
        return y, z, z.exp()


def lstm(x):
    with hs.autocast("cpu", BF16):
        y, _ = LSTM(x)
        return y, y @ W, y.exp()


def gru(x):
    with hs.autocast("cpu", BF16):
        y, _ = GRU(x)
        return y, y @ W, y.exp()


def prints(x):
    with hs.autocast("cpu", BF16):
        y = x @ W
        print(end="")
        return y, y.float() @ W, y.exp()


def backward(x):
    w = W.detach().clone().requires_grad_()
    with hs.autocast("cpu", BF16):
        y = x @ w
        loss = y.exp().sum()
        loss.backward()
        return y, loss, w.grad, x @ w


def outside(x):
    with OUTSIDE:
        y = x @ W
        return y, y.exp()


def outside_broken(x):
    with OUTSIDE:
        y = x @ W
        torch._dynamo.graph_break()
        return y, y.float() @ W, y.exp()


def closed_over():
    region = hs.autocast("cpu", BF16)

    def function(x):
        with region:
            return x @ W, (x @ W).exp()

    return function


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.region, self.linear = hs.autocast("cpu", BF16), LINEAR

    def forward(self, x):
        with self.region:
            return self.linear(x), self.linear(x).exp()


@hs.autocast("cpu", BF16)
def decorated(x):
    return x @ W, (x @ W).exp()


@hs.autocast("cpu", BF16)
def decorated_broken(x):
    y = x @ W
    torch._dynamo.graph_break()
    return y, y.float() @ W, y.exp()


def compat(x):
    with torch_amp.autocast("cpu", BF16):
        y = x @ W
        return y, y.exp(), y.softmax(-1)


def compat_broken(x):
    with torch_amp.autocast("cpu", BF16):
        y = x @ W
        torch._dynamo.graph_break()
        return y, y.float() @ W, y.exp()


def nested(x):
    with hs.autocast("cpu", BF16):
        a = x @ W
        with hs.autocast("cpu", enabled=False):
            b = x @ W
            with hs.autocast("cpu", FP16):
                c = x @ W
        d = x @ W
    return a, b, c, d, x @ W


def nested_broken(x):
    with hs.autocast("cpu", BF16):
        a = x @ W
        with hs.autocast("cpu", enabled=False):
            torch._dynamo.graph_break()
            b = x @ W
            with hs.autocast("cpu", FP16):
                c = x @ W
                torch._dynamo.graph_break()
                d = x @ W
        e = x @ W
    return a, b, c, d, e, x @ W


def compat_in_native(x):
    with hs.autocast("cpu", BF16, policy=EDITED), torch_amp.autocast("cpu", BF16):
        return x @ W, nn.functional.linear(x, W)


def broken_between(x):
    with hs.autocast("cpu", BF16):
        a = x @ W
    torch._dynamo.graph_break()
    b = x @ W
    with hs.autocast("cpu", BF16):
        c = x @ W
    return a, b, c


def entered_again(x):
    region = hs.autocast("cpu", BF16)
    with region:
        a = x @ W
        with region:
            b = x @ W
        c = x @ W
    with region:
        d = x @ W
    return a, b, c, d, x @ W


def outside_entered_again(x):
    with OUTSIDE:
        a = x @ W
        with OUTSIDE_FP16, OUTSIDE:
            b = x @ W
        c = x @ W
    with OUTSIDE_FP16:
        d = x @ W
    return a, b, c, d, x @ W


def fp16(x):
    with hs.autocast("cpu", FP16):
        y = x @ W
        return y, y.exp(), LINEAR(x)


def fp16_broken(x):
    with hs.autocast("cpu", FP16):
        y = x @ W
        torch._dynamo.graph_break()
        return y, y.float() @ W, LINEAR(x), y.exp()


def checkpointed(x):
    with hs.autocast("cpu", BF16):
        y = checkpoint(lambda a: (a @ W).relu() @ W, x, use_reentrant=False)
    return y, y.exp()


def asks(x):
    with hs.autocast("cpu", BF16):
        known = hs.active_policy("cpu") is not None
    return (x * known, x * (hs.active_policy("cpu") is None))


WHOLE = {
    f.__name__: f
    for f in (
        *(inside, outside, decorated, compat, nested, compat_in_native, entered_again),
        *(outside_entered_again, fp16, checkpointed, asks),
    )
} | {"closed_over": closed_over(), "attribute": Holder()}
BROKEN = {
    f.__name__: f
    for f in (
        *(item, branch, lstm, gru, prints, backward, outside_broken, decorated_broken, compat_broken),
        *(nested_broken, broken_between, fp16_broken),
    )
}
BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.exhaustive,
            pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
        ],
    ),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def same(function, backend, fullgraph):
    compiled = torch.compile(function, backend=backend, fullgraph=fullgraph)
    for _ in range(2):
        got, expected = compiled(X), function(X)
        assert [t.dtype for t in got] == [t.dtype for t in expected]
        for a, b in zip(got, expected):
            torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.is_autocast_enabled("maia")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "fullgraph", [False, pytest.param(True, marks=one_graph)], ids=["default", "fullgraph"]
)
@pytest.mark.parametrize("name", WHOLE)
def test_a_region_in_one_graph(name, fullgraph, backend):
    same(WHOLE[name], backend, fullgraph)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_region_whose_body_breaks_the_graph(name, backend):
    same(BROKEN[name], backend, fullgraph=False)


AROUND = ["inside", "nested", "item", "outside_broken"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in AROUND else [pytest.mark.exhaustive])
        for name in {**WHOLE, **BROKEN}
    ],
)
def test_a_region_around_compiled_code(name, backend):
    function = {**WHOLE, **BROKEN}[name]
    compiled = torch.compile(function, backend=backend)
    for region in (OUTSIDE_FP16, hs.autocast("cpu", enabled=False), OUTSIDE):
        with region:
            assert [t.dtype for t in compiled(X)] == [t.dtype for t in function(X)]


FIRST = """
import torch
from halfstep.compat import torch_amp
x, w = torch.ones(4, 8), torch.ones(8, 8)
def function(x):
    with torch_amp.autocast({arguments}):
        return x @ w, (x @ w).exp()
compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
print([t.dtype for t in compiled(x)] == [t.dtype for t in function(x)] != [x.dtype] * 2)
"""


@one_graph
@pytest.mark.parametrize("arguments", [pytest.param("'cpu', torch.bfloat16", marks=pytest.mark.long), ""])
def test_the_first_region_of_a_process_is_met_by_the_compiler(arguments):
    code = textwrap.dedent(FIRST.format(arguments=arguments))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "True", done.stderr[-2000:]


@one_graph
def test_fp16_arithmetic_of_ours_is_never_compiled():
    """A loop over many shapes compiled our frames once for each, up to Dynamo's limit of recompilations."""
    compiled_frames = []

    def backend(graph, _):
        compiled_frames.append(graph)
        return graph

    linear = nn.Linear(1024, 1024)

    def step(x):
        with hs.autocast("cpu", FP16):
            return linear(x)

    def train(x):
        with hs.autocast("cpu", FP16):
            y = torch.compile(step, backend=backend, dynamic=False)(x)
            torch._dynamo.graph_break()
            linear(x.relu()).float().square().mean().backward()
        return y

    compiled = torch.compile(train, backend=backend, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        for rows in (1024, 1025, 1026):
            assert compiled(torch.randn(rows, 1024)).dtype == FP16
    assert len(compiled_frames) == 3  # `step`, once a shape


class Exported(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.linear = W, LINEAR
        self.function = function

    def forward(self, x):
        return self.function(x)


def many_rules(x):
    """Every kind of rule, off and other regions within, ops with two inputs and of fp64."""
    y = x @ W
    with hs.autocast("cpu", BF16, policy=EDITED):
        a = x @ W
    with hs.autocast("cpu", BF16):
        low = LINEAR(x)
        both = (
            torch.cat([low, low.exp()]),
            low + low.exp(),
            low.softmax(-1),
            nn.functional.layer_norm(low, (8,)),
        )
        loss = nn.functional.cross_entropy(low, torch.zeros(4, dtype=torch.long))
        with hs.autocast("cpu", enabled=False):
            off = x @ W
        with hs.autocast("cpu", FP16):
            other = x @ W
        wide = low.double() @ W.double()
    return y, a, low, *both, loss, off, other, wide, x @ W


@pytest.mark.filterwarnings("ignore:A model attribute", "ignore:While compiling, we found certain side")
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=one_graph)], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", ["decorated", "compat", "nested", "outside", "fp16", "many_rules"])
def test_an_exported_program_has_the_casts_of_its_regions(name, strict):
    function = {**WHOLE, "many_rules": many_rules}[name]
    exported = torch.export.export(Exported(function), (X,), strict=strict)
    for got, expected in zip(exported.module()(X), function(X), strict=True):
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got.float(), expected.float(), rtol=2e-2, atol=2e-2)
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("maia")


@pytest.mark.filterwarnings("ignore:A model attribute", "ignore:While compiling, we found certain side")
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=one_graph)], ids=["non-strict", "strict"])
def test_an_op_that_a_policy_bans_is_refused_by_export(strict):
    banned = hs.Policy().with_rules(banned=["exp"])

    def refused(x):
        with hs.autocast("cpu", BF16, policy=banned):
            return (x @ W).exp()

    with pytest.raises(Exception, match="exp is banned under bf16"):
        torch.export.export(Exported(refused), (X,), strict=strict)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + self.norm(self.conv(x)).relu()


def residual():
    return nn.Sequential(nn.Conv2d(3, 8, 3), Residual(8), Residual(8), nn.Flatten(), nn.LazyLinear(4))


def language_model(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64, n_layer=2, n_head=2, n_embd=32, bos_token_id=None, eos_token_id=None
        )
        return transformers.GPT2LMHeadModel(config)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(intermediate_size=64, num_key_value_heads=1, **sizes)
    )


def graphs(name, level):
    """Graphs and frames after each of three steps of a compiled model, and breaks in all."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = residual() if name == "residual" else language_model(name)
    batch = torch.randn(2, 3, 8, 8) if name == "residual" else torch.randint(0, 64, (2, 8))
    if name == "residual":
        model(batch)
    amp = None
    if level != "torch.autocast":
        amp = hs.prepare(model, hs.optim.SGD(model.parameters(), lr=0.1), level=level, dtype="bf16")
    fast, seen = torch.compile(model, backend="eager"), []
    for _ in range(3):
        with torch.autocast("cpu", BF16) if amp is None else amp.autocast():
            out = fast(batch)
        loss = (out if name == "residual" else out.logits).float().square().mean()
        loss.backward() if amp is None else amp.backward(loss)
        if amp is not None:
            amp.step()
        seen.append((counters["stats"]["unique_graphs"], counters["frames"]["total"]))
    return seen, sum(counters["graph_break"].values())


@one_graph
@pytest.mark.long
@pytest.mark.parametrize("name", ["residual", "gpt2", "llama"])
def test_a_prepared_model_is_as_many_graphs_as_under_torchs_autocast_and_none_later(name):
    (wanted, *_), breaks = graphs(name, "torch.autocast")
    for level in ("O1", "O2", "O3"):
        seen, broken = graphs(name, level)
        assert seen == [seen[0]] * 3, (level, "compiled after the first step", seen)
        assert broken == breaks, level
        outputs = int(level == "O2" and name != "residual")  # torch compiles hooks apart from `forward`
        assert seen[0][0] == wanted[0] + outputs, (level, seen[0], wanted)
        assert seen[0][1] <= wanted[1] + outputs, (
            level,
            seen[0],
            wanted,
        )  # the first in a process may see more


@one_graph
@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_torchs_option_rounds_between_joined_ops_as_eager_mode_does():
    torch.manual_seed(119)
    x, w, b = torch.randn(2, 15, 32), torch.randn(17, 32), torch.randn(17)

    def f(x, w, b):
        with hs.autocast("cpu", BF16, kernels="native"):
            y = torch.nn.functional.linear(x, w, b)
            return torch.nn.functional.gelu(y).float() * 1.5 + y.float()

    eager, options = f(x, w, b), {"emulate_precision_casts": True}
    joined = (torch.compile(f, backend="inductor", fullgraph=True)(x, w, b) - eager).abs()
    torch._dynamo.reset()
    rounded = (torch.compile(f, backend="inductor", fullgraph=True, options=options)(x, w, b) - eager).abs()
    assert rounded.max() < 1e-5 < 1e-3 < joined.max()
    assert (rounded > 1e-6).sum() < 20 < 100 < (joined > 1e-6).sum()
