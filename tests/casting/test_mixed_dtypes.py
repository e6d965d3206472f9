"""Ops that join tensors or write into one take 16 bits and fp32 beside each other in a region."""

import functools
import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

import halfstep as hs

ROWS, PICKED = torch.tensor([3, 0, 2, 1]), torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]] * 2)
MASK = torch.tensor([[True, False, True, False]] * 4)


def set_by_mask(a, b):
    a[MASK] = b[MASK]
    return a


def set_by_index(a, b):
    a[ROWS] = b
    return a


JOINED = {
    "masked_scatter": lambda a, b: a.masked_scatter(MASK, b),
    "scatter": lambda a, b: a.scatter(0, PICKED, b),
    "scatter_add": lambda a, b: a.scatter_add(0, PICKED, b),
    "scatter_reduce": lambda a, b: a.scatter_reduce(0, PICKED, b, "sum"),
    "index_add": lambda a, b: a.index_add(0, ROWS, b),
    "index_copy": lambda a, b: a.index_copy(0, ROWS, b),
    "index_put": lambda a, b: a.index_put((ROWS,), b, accumulate=True),
    "index_reduce": lambda a, b: a.index_reduce(0, ROWS, b, "amax"),
    "put": lambda a, b: a.put(PICKED, b),
    "lerp": lambda a, b: a.lerp(b, 0.5),
    "heaviside": lambda a, b: a.heaviside(b),
    "meshgrid": lambda a, b: torch.stack(torch.meshgrid(a[0], b[0], indexing="ij")),
    "embedding_bag": lambda a, b: F.embedding_bag(PICKED, a, mode="sum", per_sample_weights=b),
}
WRITTEN = {
    "x[mask]": set_by_mask,
    "x[index]": set_by_index,
    "masked_scatter_": lambda a, b: a.masked_scatter_(MASK, b),
    "scatter_": lambda a, b: a.scatter_(0, PICKED, b),
    "scatter_add_": lambda a, b: a.scatter_add_(0, PICKED, b),
    "scatter_reduce_": lambda a, b: a.scatter_reduce_(0, PICKED, b, "amax"),
    "index_add_": lambda a, b: a.index_add_(0, ROWS, b),
    "index_copy_": lambda a, b: a.index_copy_(0, ROWS, b),
    "index_put_": lambda a, b: a.index_put_((ROWS,), b),
    "index_reduce_": lambda a, b: a.index_reduce_(0, ROWS, b, "amax"),
    "put_": lambda a, b: a.put_(PICKED, b),
    "lerp_": lambda a, b: a.lerp_(b, 0.5),
}
each_pair = pytest.mark.parametrize(
    ("one", "other"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)


def pair(one, other):
    g = torch.Generator().manual_seed(0)
    return torch.randn(4, 4, generator=g).to(one), torch.randn(4, 4, generator=g).to(other)


@each_pair
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", JOINED)
def test_what_joins_tensors_gives_the_widest(name, one, other):
    a, b = (t.requires_grad_() for t in pair(one, other))
    with hs.autocast("cpu", "bf16"):
        out = JOINED[name](a, b)
    assert out.dtype == torch.float32
    assert torch.equal(out, JOINED[name](a.float(), b.float()))
    if name not in (
        "index_reduce",
        "heaviside",
    ):  # torch lacks the derivative of the first, the other has none
        out.sum().backward()
        assert (a.grad.dtype, b.grad.dtype) == (one, other)


@each_pair
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_into_a_tensor_is_cast_to_it(name, one, other):
    a, b = pair(one, other)
    expected = WRITTEN[name](a.clone(), b.to(one))
    with hs.autocast("cpu", "bf16"):
        out = WRITTEN[name](a, b)
    assert out is a
    assert torch.equal(a, expected)


def test_what_cannot_be_written_is_torch_s_own_error():
    a, b = torch.zeros(4, 4, dtype=torch.int64), torch.ones(4, 4)
    with hs.autocast("cpu", "bf16"), pytest.raises(RuntimeError, match=r"scatter\(\)"):
        a.scatter_(0, PICKED, b)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("product", [torch.mm, torch.matmul, lambda a, b: torch.addmm(b, a, b)])
def test_products_of_compressed_sparse_rows_run_in_a_region(product):
    a, b = pair(torch.float32, torch.float32)
    b.requires_grad_()
    with hs.autocast("cpu", "bf16"):
        out = product(a.relu().to_sparse_csr(), b)
    assert out.dtype == torch.bfloat16
    low = [t.bfloat16().float() for t in (a.relu(), b)]
    assert torch.equal(out, product(*low).bfloat16())
    out.float().sum().backward()
    assert b.grad.dtype == torch.float32


TORCHS_ERROR = {
    "_batch_norm_with_update", "_chunk_cat", "_native_batch_norm_legit", "_softmax_backward_data",
    "histogram", "histogramdd", "isclose", "allclose", "native_batch_norm", "native_group_norm",
    "nn.functional.batch_norm", "nn.functional.instance_norm", "nn.functional.linear_cross_entropy",
    "sparse.mm.reduce", "sparse.mm", "addbmm_", "addmm_", "addmv_", "baddbmm_",
}  # fmt: skip
"""Ops that take no mixture under torch.autocast either: kernels below those that users call, running
statistics of another dtype than the weights, products added in place, comparisons."""


def attempt(call, region):
    """How a call ends in a region: "", our error or torch's."""
    try:
        with region:
            call()
    except hs.HalfstepError:
        return "ours"
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return str(error) or "raised"
    return ""


def cast_every_other(sample, first, second):
    """The arguments with fp32 tensors alternately in two dtypes, and how many there are."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.dtype == torch.float32]
    for count, i in enumerate(places):
        leaves[i] = leaves[i].detach().clone().to(second if count % 2 else first)
    return tree_unflatten(leaves, spec), len(places)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_no_op_of_torch_fails_on_16_bits_beside_fp32_where_it_takes_either():
    """Every op of OpInfo with two tensors, as function, method and in place; none where torch's works."""
    pairs, worse, new = 0, set(), set()
    dtypes = (torch.float32, torch.bfloat16)
    for info in op_db:
        if torch.float32 not in info.supported_dtypes("cpu") or info.name.startswith("jiterator"):
            continue
        forms = {"": info.op, "()": info.method_variant, "_": info.inplace_variant}
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), 6):
            for (form, f), mixture in itertools.product(forms.items(), (dtypes, dtypes[::-1])):
                if f is None or cast_every_other(sample, *mixture)[1] < 2:
                    continue
                pairs += 1

                def call(first, second, f=f, sample=sample):
                    (x, args, kwargs), _ = cast_every_other(sample, first, second)
                    f(x, *args, **kwargs)

                mixed = functools.partial(call, *mixture)
                if attempt(mixed, hs.autocast("cpu", "bf16")) in ("", "ours"):
                    continue
                if attempt(mixed, torch.autocast("cpu", torch.bfloat16)) == "":
                    worse.add(info.name + form)
                alone = [attempt(functools.partial(call, d, d), hs.autocast("cpu", "bf16")) for d in dtypes]
                if alone == ["", ""] and info.name + form.rstrip("()") not in TORCHS_ERROR:
                    new.add(info.name + form)
    assert pairs > 4000
    assert not worse, f"torch.autocast takes these: {worse}"
    assert not new, new
