"""Law 18: no sum is longer than its accumulator can carry, in any op or gradient of torch's."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import halfstep as hs
from tests.laws.long_sums import Case, cases, growth, module_cases, op_cases

pytestmark = pytest.mark.filterwarnings("ignore")
REGIONS = {
    "O1": functools.partial(hs.autocast, "cpu", torch.bfloat16),
    "O3": functools.partial(hs.autocast, "cpu", torch.bfloat16, policy="low"),
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
EXCEPT_AT_O3 = {
    **dict.fromkeys(("log_softmax", "logsumexp", "nn.functional.cross_entropy"), _ROUNDED),
    **dict.fromkeys(
        ("nn.functional.triplet_margin_loss", "nn.functional.triplet_margin_with_distance_loss"), _CANCELS
    ),
}
Found = Iterator[tuple[str, list[Case]]]


def outgrown(found: Found, region: Callable[[], object], n: int) -> tuple[int, dict[str, str]]:
    """How many ops or modules had a case, and those with a sum that lost more than rounding."""
    met, lost = set[str](), dict[str, str]()
    for name, made in found:
        for case in made:
            try:
                results = growth(case, region, n)
            except Exception:
                continue
            met.add(name)
            for i, result in enumerate(results):
                if result.outgrows():
                    lost[name] = f"{case.name}, result {i} of {len(results)}: {result}"
    return len(met), lost


def allowed(level: str) -> dict[str, str]:
    return EXCEPT | (EXCEPT_AT_O3 if level == "O3" else {})


@pytest.mark.parametrize("level", REGIONS)
def test_sums_of_some_ops_do_not_outgrow_their_accumulator(level):
    ops, lost = outgrown(op_cases(share=8, each=3), REGIONS[level], 4096)
    assert lost.keys() <= allowed(level).keys()
    assert ops > 5


def test_sums_of_some_modules_do_not_outgrow_their_accumulator():
    slow = ("nn.Transformer", "nn.GRU")
    found = (pair for pair in module_cases(share=8) if pair[0] not in slow)
    modules, lost = outgrown(found, REGIONS["O1"], 4096)
    assert lost == {}
    assert modules > 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n", [4096, 65536])
@pytest.mark.parametrize("level", REGIONS)
def test_sums_of_all_ops_do_not_outgrow_their_accumulator(level, n, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ops, lost = outgrown(op_cases(each=6), REGIONS[level], n)
        modules, also = outgrown(module_cases(), REGIONS[level], n)
    finally:
        torch.set_num_threads(before)
    assert {**lost, **also}.keys() <= allowed(level).keys()
    assert n > 4096 or (ops >= 400 and modules >= 60)


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
    assert any(result.outgrows() for result in growth(case, lambda: None, 4096))
