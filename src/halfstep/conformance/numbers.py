"""What a 16-bit kernel must get right whatever its dtype says: sums, products, range, subnormals, ties.

Each check runs ops on 16-bit tensors of the device, without a region, and compares them with float64 on the
CPU or with a value known beforehand. The allowance is what one rounding of an exact result to the dtype can
be off, and fp32 accumulation besides; a kernel that sums in 16 bits misses it by a hundred times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep import devices
from halfstep.formats import format_of

Status = Literal["passes", "falls back", "absent", "fails"]
Outcome = tuple[Status, str]
Numbers = Callable[[torch.device, torch.dtype], Outcome]

LONG = 4096
"""Terms of the long sums: in fp16 their running sum is off by some percent, in bf16 it stops growing."""


_ROWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: torch.softmax(x * 4, 1),
    lambda x: F.layer_norm(x * 4, (LONG,)),
    lambda x: x.sum(1, dtype=torch.float32),
    lambda x: x.mean(1, dtype=torch.float32),
)


def checks() -> Iterator[tuple[str, Numbers]]:
    """Name and function of every check of numbers."""
    products = (torch.mm, (4, LONG), (LONG, 4)), (torch.addmm, (4,), (4, LONG), (LONG, 4))
    yield "long sums, matrix product", _long_sums(2.0, *products, (F.linear, (4, LONG), (4, LONG)))
    yield "long sums, batched product", _long_sums(1.0, (torch.bmm, (2, 3, LONG), (2, LONG, 3)))
    filters = (1, LONG // 16, 4, 4), (3, LONG // 16, 4, 4)
    yield "long sums, convolution", _long_sums(1.0, (F.conv2d, *filters))
    yield "long sums, gradients", _long_gradients
    yield "long rows, softmax and norms", _long_sums(2.0, *((op, (2, LONG)) for op in _ROWS))
    yield "products are kept whole", _whole_products
    yield "products beyond the range cancel", _wide_products
    yield "products below the range add up", _tiny_products
    yield "overflow gives inf", _overflow
    yield "NaN and inf get through", _specials
    yield "subnormals are kept", _subnormals
    yield "ties go to even", _ties
    yield "range and precision are the dtype's", _format
    yield "a flag that is set stays set", _flag


def _unit(low: torch.dtype) -> float:
    """Return the unit roundoff: half the spacing above 1."""
    return format_of(low).epsilon / 2


def _uniform(low: torch.dtype, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)).to(low)


def _error(got: Tensor, exact: Tensor) -> float:
    """Return the largest difference, relative to the largest exact value."""
    return float((got.detach().cpu().double() - exact).abs().max() / exact.abs().max())


def _within(error: float, low: torch.dtype, roundings: float, what: str) -> Outcome:
    allowed = roundings * _unit(low) + LONG * 2.0**-24
    detail = f"{what} within {error:.1e} of float64"
    return ("passes", detail) if error <= allowed else ("fails", f"{detail}; allowed are {allowed:.1e}")


def _long_sums(roundings: float, *cases: tuple[Any, ...]) -> Numbers:
    """Ops on 16-bit tensors of the device against the same in float64; a case: op and shapes."""

    def check(at: torch.device, low: torch.dtype) -> Outcome:
        worst = 0.0
        for op, *shapes in cases:
            inputs = [_uniform(low, *shape) for shape in shapes]
            exact = op(*(t.double() for t in inputs))
            worst = max(worst, _error(op(*(t.to(at) for t in inputs)), exact))
        return _within(worst, low, roundings, f"sums of {LONG} terms")

    return check


def _long_gradients(at: torch.device, low: torch.dtype) -> Outcome:
    """Gradients that are long sums: of a weight over a batch, of a filter over its places."""
    worst = 0.0
    for op, shapes in ((F.linear, ((LONG, 3), (5, 3))), (F.conv2d, ((4, 2, 34, 34), (3, 2, 3, 3)))):
        ours, exact = _gradients(op, shapes, at, low), _gradients(op, shapes, "cpu", torch.float64)
        worst = max([worst, *(_error(g, e) for g, e in zip(ours, exact, strict=True))])
    return _within(worst, low, 2.0, "gradients")


def _gradients(op: Any, shapes: Any, at: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """By input and weight, which are the same numbers in every dtype."""
    drawn = (_uniform(torch.bfloat16, *shape).to(dtype).to(at) for shape in shapes)
    x, weight = (values.requires_grad_() for values in drawn)
    y = op(x, weight)
    return torch.autograd.grad(y, (x, weight), torch.ones(y.shape, dtype=dtype).to(at))


def _product(at: torch.device, low: torch.dtype, left: list[float], right: list[float]) -> float:
    """Return the inner product of two lists that the dtype holds exactly, as a 1x1 matrix product."""
    a, b = (torch.tensor([each], dtype=torch.float64).to(low) for each in (left, right))
    return float((a.to(at) @ b.T.contiguous().to(at)).cpu().double())


def _expect(got: float, expected: float, what: str) -> Outcome:
    return ("passes", what) if got == expected else ("fails", f"{what}: gave {got}, expected {expected}")


def _whole_products(at: torch.device, low: torch.dtype) -> Outcome:
    """(1 + e)^2 - (1 + 2e) is e^2: rounded to 16 bits before the sum, the product loses it."""
    e = format_of(low).epsilon
    return _expect(_product(at, low, [1 + e, -1.0], [1 + e, 1 + 2 * e]), e * e, "(1+e)^2 - (1+2e)")


def _wide_products(at: torch.device, low: torch.dtype) -> Outcome:
    big = 2.0**9 if low is torch.float16 else 2.0**60
    return _expect(_product(at, low, [big, big, big], [big, -big, 0.5]), big / 2, "products that cancel")


def _tiny_products(at: torch.device, low: torch.dtype) -> Outcome:
    small = 2.0**-14 if low is torch.float16 else 2.0**-62
    return _expect(_product(at, low, [small] * 256, [small] * 256), 256 * small**2, "256 tiny products")


def _overflow(at: torch.device, low: torch.dtype) -> Outcome:
    top = float(torch.finfo(low).max)
    cast = float(torch.tensor([top * 1.01 if low is torch.float16 else 3.4e38]).to(at).to(low).cpu())
    summed = float((torch.tensor([top], dtype=low).to(at) * 2).cpu())
    matrix = _product(at, low, [top, top], [1.0, 1.0])
    results = {"a cast": cast, "a product": summed, "a matrix product": matrix}
    errors = [f"{name} gave {value}" for name, value in results.items() if value != float("inf")]
    return ("fails", f"{', '.join(errors)}, expected inf") if errors else ("passes", "")


def _specials(at: torch.device, low: torch.dtype) -> Outcome:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, nan], [inf, 1.0]], dtype=low).to(at)
    eye = torch.ones(2, 2, dtype=low).to(at)
    product, same = (x @ eye).cpu().double(), torch.relu(x).cpu().double()
    if not bool(product[0].isnan().all()) or product[1].tolist() != [inf, inf]:
        return "fails", f"a matrix product of NaN and inf gave {product.tolist()}"
    if not bool(same[0, 1].isnan()) or float(same[1, 0]) != inf:
        return "fails", f"relu of NaN and inf gave {same.tolist()}"
    back = x.float().cpu()
    cast_fails = not bool(back[0, 1].isnan()) or float(back[1, 0]) != inf
    return ("fails", f"the cast to fp32 gave {back.tolist()}") if cast_fails else ("passes", "")


def _subnormals(at: torch.device, low: torch.dtype) -> Outcome:
    """Check that the smallest numbers survive casts both ways, additions, products and matrix products."""
    smallest = float(torch.finfo(low).smallest_normal) * format_of(low).epsilon
    values = torch.arange(1, 9, dtype=torch.float64) * smallest
    cast = values.float().to(at).to(low)
    one = torch.ones(1, dtype=low).to(at)
    results = {
        "a cast": cast,
        "the cast back": cast.float(),
        "an addition": cast + torch.zeros(8, dtype=low).to(at),
        "a product": cast * one,
        "a matrix product": (cast.reshape(8, 1) @ one.reshape(1, 1)).reshape(8),
    }
    for name, got in results.items():
        if got.cpu().double().tolist() != values.tolist():
            return "fails", f"{name} of the subnormals {smallest} to {8 * smallest} gave {got.cpu().tolist()}"
    return "passes", f"from {smallest}"


def _ties(at: torch.device, low: torch.dtype) -> Outcome:
    """Half-way values, and values a little to either side, in a cast and in a matrix product."""
    half = _unit(low)
    near = torch.tensor([1 + half, 1 + 3 * half, 1 + half * (1 + 2.0**-8), 1 + half * (1 - 2.0**-8)])
    exact = torch.cat([near, -near])
    expected = exact.to(low).double().tolist()
    result = exact.to(at).to(low).cpu().double().tolist()
    if result != expected:
        return "fails", f"the cast of {exact.tolist()} gave {result}, expected {expected}"
    sums = [_product(at, low, [1.0, n * half], [1.0, 1.0]) for n in (1, 3)]
    return _expect(max(abs(sums[0] - 1), abs(sums[1] - 1 - 4 * half)), 0.0, "ties of sums of products")


def _format(at: torch.device, low: torch.dtype) -> Outcome:
    """Check values that differ in fp16 and bf16, in memory and in a matrix product."""
    e, top = format_of(low).epsilon, float(torch.finfo(low).max)
    small = float(torch.finfo(low).smallest_normal)
    values = [1 + e, top, small, -1 - e]
    result = torch.tensor(values).to(at).to(low).cpu().double().tolist()
    if result != values:
        return "fails", f"a cast of {values} gave {result}: another format than it says"
    products = [_product(at, low, [value], [1.0]) for value in values]
    if products != values:
        return "fails", f"a matrix product by 1 of {values} gave {products}: another format inside"
    return "passes", ""


def _flag(at: torch.device, low: torch.dtype) -> Outcome:
    """found_inf is an OR: a finite tensor after one that was not leaves it at 1."""
    kernel = devices.declared(at.type).finite_check
    if kernel is None:
        return "falls back", "no kernel registered; torch's or ordinary ops do it"
    found_inf, inverse = torch.ones((), device=at), torch.ones((), device=at)
    kernel([torch.ones(3, dtype=low).to(at)], found_inf, inverse)
    return _expect(float(found_inf), 1.0, "found_inf, set before a finite gradient")
