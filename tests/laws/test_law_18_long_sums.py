"""Law 18: no sum is longer than its accumulator can carry, in any op or gradient of torch's."""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

import halfstep as hs
from tests.laws import long_sums
from tests.laws.long_sums import Case, Long, Way, cases, module_cases, op_cases

pytestmark = pytest.mark.filterwarnings("ignore")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TABLES = {"O1": "halfstep", "O2": "halfstep", "O3": "low"}
WAYS = {
    f"{level} {word}": Way(functools.partial(hs.autocast, "cpu", dtype, policy=table), dtype, level == "O1")
    for (level, table), (word, dtype) in itertools.product(TABLES.items(), DTYPES.items())
}
_ROUNDED = "its backward takes the result that it gave, rounded: an error of log n units, no sum of 16 bits"
_CANCELS = "a difference of values that are nearly alike"
EXCEPT = {
    "masked.log_softmax": _ROUNDED,
    "nn.functional.linear_cross_entropy": "a loss of logits that were rounded: as large as they are",
    "nn.functional.linear_cross_entropy.chunked": "adds its chunks in the dtype of its argument `acc_dtype`",
    "nn.functional.linear_cross_entropy.chunked_none": "adds its chunks in the dtype of `acc_dtype`",
    "nn.functional.fractional_max_pool2d": "picks at random, and picks the neighbour where that is rounded",
    "prod": "a product that leaves the range of every dtype",
    "pca_lowrank": "random, and free in the signs of its result",
}
_COUNTS = "torch counts its elements in the input's dtype, and fp16 ends at 65,504"
EXCEPT_IN_FP16 = {"masked.std": _COUNTS, "masked.var": _COUNTS}
EXCEPT_IN_FP16_AT_O3 = {
    "nn.functional.normalize": "its derivative takes numbers that are 0 in fp16",
    "nn.HuberLoss": "divides by a number of elements that fp16 does not hold",
}
SLOW = ("linalg.pinv.singular", "nn.Transformer", "nn.TransformerEncoder")
RECURRENT = ("nn.RNN", "nn.GRU", "nn.LSTM")
SLOW_WHERE_LONG = (
    *(*RECURRENT, "nn.MultiLabelMarginLoss"),  # the first have a test of their own
    *("nn.TransformerEncoderLayer, all of size 2", "nn.TransformerDecoderLayer, all of size 2"),  # tokens
)
LARGE = ("nn.AdaptiveMaxPool3d", "nn.AvgPool3d", "nn.BatchNorm2d", "nn.BatchNorm3d", "nn.Conv3d")
EXCEPT_AT_O3 = {
    **dict.fromkeys(("log_softmax", "nn.LogSoftmax", "logsumexp", "nn.functional.cross_entropy"), _ROUNDED),
    **dict.fromkeys(
        ("nn.functional.triplet_margin_loss", "nn.functional.triplet_margin_with_distance_loss"), _CANCELS
    ),
}
Cases = Iterator[tuple[str, list[Case]]]


def outgrown(
    found: Cases, n: int, ways: Mapping[str, Way] = WAYS
) -> tuple[collections.Counter[str], dict[tuple[str, str], str]]:
    """How many ops or modules had a case in each way, and the sums that lost more than rounding."""
    met, lost = set[tuple[str, str]](), dict[tuple[str, str], str]()
    for name, made in found:
        for case in made:
            if name in SLOW or (n > 4096 and {name, case.name} & {*SLOW_WHERE_LONG}):
                continue
            try:
                long = Long(case, n)
            except Exception:
                continue
            for word, way in ways.items():
                try:
                    results = long.growth(way)
                except Exception:
                    continue
                met.add((word, name))
                for i, result in enumerate(results):
                    if result.outgrows(way.dtype) and name not in allowed(word):
                        lost[word, name] = f"{case.name}, result {i} of {len(results)}: {result}"
    return collections.Counter(word for word, _ in met), lost


def allowed(way: str) -> dict[str, str]:
    level, dtype = way.split()
    found = EXCEPT | (EXCEPT_AT_O3 if level == "O3" else {})
    in_fp16 = EXCEPT_IN_FP16 | (EXCEPT_IN_FP16_AT_O3 if level == "O3" else {})
    return found | (in_fp16 if dtype == "fp16" else {})


def test_sums_of_some_ops_do_not_outgrow_their_accumulator():
    ops, lost = outgrown(op_cases(share=8, each=2), 4096, {"O3 bf16": WAYS["O3 bf16"]})
    assert lost == {}
    assert min(ops.values()) > 5


def test_sums_of_some_modules_do_not_outgrow_their_accumulator():
    found = (pair for pair in module_cases(share=8, each=3) if pair[0] != "nn.GRU")
    modules, lost = outgrown(found, 4096, {"O1 bf16": WAYS["O1 bf16"]})
    assert lost == {}
    assert min(modules.values()) > 3


@pytest.fixture
def limited_memory() -> Iterator[None]:
    """What needs more than 8 GiB, such as the scores of 65,536 tokens, is refused and so no case."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize(("n", "samples", "each"), [(4096, 2, 6), (65536, 1, 2)])
def test_sums_of_all_ops_do_not_outgrow_their_accumulator(threads, n, samples, each):
    ops, lost = outgrown(op_cases(samples=samples, each=each), n)
    assert lost == {}
    assert n > 4096 or min(ops[way] for way in WAYS) >= 400


@pytest.mark.exhaustive
@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize(("n", "each"), [(4096, 6), (65536, 2)])
def test_sums_of_all_modules_do_not_outgrow_their_accumulator(threads, n, each):
    modules, lost = outgrown(module_cases(each=each), n)
    assert lost == {}
    assert n > 4096 or min(modules[way] for way in WAYS) >= 60


@pytest.mark.exhaustive
def test_sums_of_recurrent_layers_do_not_outgrow_their_accumulator(threads):
    """A weight's gradient sums 65,536 terms: 512 steps of 128 sequences."""

    def found() -> Cases:
        for name in RECURRENT:
            torch.manual_seed(0)
            layer = getattr(torch.nn, name.removeprefix("nn."))(2, 3)
            yield f"{name} over steps", [long_sums.steps_case(name, layer, torch.rand(512, 1, 2))]

    layers, lost = outgrown(found(), 65536)
    assert lost == {}
    assert min(layers[way] for way in WAYS) == len(RECURRENT)


@pytest.mark.exhaustive
def test_sums_of_modules_whose_samples_are_large_do_not_outgrow_their_accumulator(monkeypatch):
    monkeypatch.setattr(long_sums, "MOST", 2**23)
    modules, lost = outgrown((pair for pair in module_cases(each=2) if pair[0] in LARGE), 4096)
    assert lost == {}
    assert min(modules.values()) == len(LARGE)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["O1 bf16", "O2 fp16"])
def test_compiled_sums_of_some_ops_and_modules_do_not_outgrow_their_accumulator(way):
    ways = {way: WAYS[way]._replace(backend="inductor")}
    ops, lost = outgrown(op_cases(share=8, samples=1, each=3), 4096, ways)
    modules, also = outgrown(module_cases(share=8, each=3), 4096, ways)
    assert {**lost, **also} == {}
    assert ops[way] > 40
    assert modules[way] > 5


def _added_in_16_bits(x: Tensor) -> Tensor:
    total = torch.zeros_like(x[0])
    for row in x.detach():
        total = total + row
    return total


class _Planted(torch.autograd.Function):
    """x plus w: (n, width) and (width,), the gradient of w added row by row in its own dtype."""

    @staticmethod
    def forward(ctx, x, w):
        return x + w

    @staticmethod
    def backward(ctx, grad):
        return grad, _added_in_16_bits(grad)


def _use_of_rows(x: Tensor, w: Tensor) -> Tensor:
    return torch.zeros(1, x.shape[1], dtype=x.dtype).index_put(
        (torch.zeros(len(x), dtype=torch.long),), x, accumulate=True
    )


PLANTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a sum": lambda x, w: _added_in_16_bits(x),
    "a mean": lambda x, w: _added_in_16_bits(x) / len(x),
    "a product": lambda x, w: _added_in_16_bits(x * w),
    "a gradient of a weight": _Planted.apply,
    "uses of a row": _use_of_rows,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_accumulator_of_16_bits_is_seen(name):
    """Without a region, where nothing of ours stands between."""
    (case,) = (c for c in cases(name, PLANTED[name], torch.rand(8, 3), torch.rand(3)) if c.place == (0, 0))
    assert any(result.outgrows() for result in Long(case, 4096).growth(Way(dtype=torch.bfloat16)))
