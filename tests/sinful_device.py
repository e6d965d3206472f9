"""The Python device with a sin at a time, put through the battery: prints {sin: what the battery failed}.

`SINS` are ways in which real ports went wrong; `halfstep devices --check` must fail each, and pass the device
without any.
"""

import contextlib
import json
import sys

import torch

import halfstep as hs
from halfstep.conformance import run_battery
from tests import python_device

LOW = (torch.float16, torch.bfloat16)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def name_of(op):
    return op._schema.name.removeprefix("aten::")


def is_low(*args):
    return any(isinstance(a, torch.Tensor) and a.dtype in LOW for a in args)


def factors(name, args):
    """The two factors of a product, and what is added."""
    return (args[1], args[2], args[0]) if "add" in name else (args[0], args[1], None)


def into(result, kwargs):
    """A result, in `out=` where one was given."""
    out = kwargs.get("out")
    return result if out is None else out.resize_(result.shape).copy_(result)


def on_products(change):
    """A sin of matrix products in 16 bits: `change(a, b)` gives the product of two factors."""

    def run(op, args, kwargs):
        name = name_of(op)
        if name not in PRODUCTS or not is_low(*args):
            return op(*args, **kwargs)
        a, b, added = factors(name, args)
        product = change(a, b)
        product = product if added is None else (product.float() + added.float()).to(a.dtype)
        return into(product, kwargs)

    return run


def on_results(change, names=None, low_only=True):
    """A sin of what ops give back: `change(tensor)` in place of each 16-bit result."""

    def fix(t):
        touched = isinstance(t, torch.Tensor) and (t.dtype in LOW or not low_only)
        return change(t) if touched else t

    def run(op, args, kwargs):
        result = op(*args, **kwargs)
        name = name_of(op)
        if names is not None and name not in names:
            return result
        if name == "copy_":
            if args[0].dtype in LOW:
                torch.Tensor.copy_(args[0], change(args[0].clone()))
            return result
        if op._schema.is_mutable:
            return result
        return torch.utils._pytree.tree_map(fix, result)

    return run


def on_casts(change):
    """A sin of casts from fp32: `change(source, dtype)` gives what is stored."""

    def run(op, args, kwargs):
        if name_of(op) == "copy_" and args[0].dtype in LOW and args[1].dtype == torch.float32:
            return args[0].copy_(change(args[1], args[0].dtype))
        if name_of(op) == "_to_copy" and kwargs.get("dtype") in LOW and args[0].dtype == torch.float32:
            return change(args[0], kwargs["dtype"])
        return op(*args, **kwargs)

    return run


def summed_low(a, b):
    """A running sum in 16 bits."""
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
    for k in range(a.shape[-1]):
        total = (total.float() + a[..., k : k + 1].float() * b[..., k : k + 1, :].float()).to(a.dtype)
    return total


def rounded_products(a, b):
    """Each product rounded to 16 bits, then summed in fp32."""
    each = (a.float().unsqueeze(-1) * b.float().unsqueeze(-3)).to(a.dtype).float()
    return each.sum(-2).to(a.dtype)


def in_other_format(a, b):
    other = torch.bfloat16 if a.dtype == torch.float16 else torch.float16
    return (a.to(other).float() @ b.to(other).float()).to(other).to(a.dtype)


def low_convolution(op, args, kwargs):
    """A convolution that adds its input channels up in 16 bits."""
    if name_of(op) != "convolution" or not is_low(*args) or args[8] != 1:
        return op(*args, **kwargs)
    x, weight, bias, *rest = args
    total = None
    for c in range(x.shape[1]):
        part = op(x[:, c : c + 1].float(), weight[:, c : c + 1].float(), None, *rest).to(x.dtype)
        total = part if total is None else total + part
    return total if bias is None else total + bias.view(-1, 1, 1)


def low_backward(op, args, kwargs):
    """Filters' gradients added up over the samples in 16 bits, in steps of one row."""
    result = op(*args, **kwargs)
    if name_of(op) != "convolution_backward" or not is_low(*args) or result[1] is None:
        return result
    grad, x, weight, *rest = args
    total = torch.zeros_like(weight)
    for row in range(grad.shape[-2]):
        part = torch.zeros_like(grad)
        part[..., row, :] = grad[..., row, :]
        for column in range(grad.shape[-1]):
            one = torch.zeros_like(part)
            one[..., column] = part[..., column]
            total += op(one.float(), x.float(), weight.float(), *rest)[1].to(weight.dtype)
    return result[0], total, result[2]


def running(t, dim):
    """A running sum in 16 bits along a dimension, which is kept."""
    total = torch.zeros_like(t.narrow(dim, 0, 1))
    for part in t.split(1, dim):
        total = total + part
    return total


def low_softmax(op, args, kwargs):
    if name_of(op) != "_softmax" or not is_low(*args):
        return op(*args, **kwargs)
    x, dim = args[0], args[1]
    e = torch.exp(x - x.amax(dim, keepdim=True))
    return into(e / running(e, dim), kwargs)


def low_norm(op, args, kwargs):
    if name_of(op) != "native_layer_norm" or not is_low(args[0]):
        return op(*args, **kwargs)
    x, _, weight, bias, eps = args
    mean = running(x, -1) / x.shape[-1]
    var = running((x - mean) ** 2, -1) / x.shape[-1]
    y = (x - mean) * torch.rsqrt(var + eps)
    y = y if weight is None else y * weight + bias
    return y.to(x.dtype), mean.float(), torch.rsqrt(var.float() + eps)


def flush(t):
    return torch.where(t.abs() < torch.finfo(t.dtype).smallest_normal, torch.zeros_like(t), t)


def saturate(t):
    top = torch.finfo(t.dtype).max
    return torch.where(t.isnan(), t, t.clamp(-top, top))


def away(x, dtype):
    """Ties away from zero."""
    down = x.to(dtype)
    step = torch.nextafter(down.abs(), torch.full_like(down, float("inf"))).float() - down.abs().float()
    tie = (x.abs() - down.abs().float()) == step / 2
    return torch.where(tie, (down.abs().float() + step) * x.sign(), down.float()).to(dtype)


def truncated(x, dtype):
    nearest = x.to(dtype)
    lower = torch.nextafter(nearest, torch.zeros_like(nearest))
    return torch.where(nearest.float().abs() > x.abs(), lower, nearest)


def relu_eats_nan(op, args, kwargs):
    result = op(*args, **kwargs)
    return torch.nan_to_num(result, nan=0.0, posinf=float("inf")) if name_of(op) == "relu" else result


SINS = {
    "sums in 16 bits": on_products(summed_low),
    "products rounded before the sum": on_products(rounded_products),
    "bf16 passed off as fp16 in products": on_products(in_other_format),
    "convolutions sum in 16 bits": low_convolution,
    "gradients of filters sum in 16 bits": low_backward,
    "softmax sums in 16 bits": low_softmax,
    "layer norm's statistics in 16 bits": low_norm,
    "subnormals flushed by casts": on_results(flush, ("copy_", "_to_copy")),
    "subnormals flushed by products": on_results(flush, PRODUCTS),
    "ties away from zero": on_casts(away),
    "casts truncate": on_casts(truncated),
    "no inf from overflow in casts": on_results(saturate, ("copy_", "_to_copy")),
    "no inf from overflow in products": on_results(saturate, PRODUCTS),
    "relu eats NaN": relu_eats_nan,
}


def never_found(grads, found_inf, inv_scale):
    """Unscales and never says that it found one."""
    for grad in grads:
        python_device.to_host(grad).mul_(python_device.to_host(inv_scale))


def last_counts(grads, found_inf, inv_scale):
    """Writes the flag of the last tensor over the others'."""
    for grad in grads:
        host = python_device.to_host(grad)
        found_inf.fill_(0.0 if bool(host.isfinite().all()) else 1.0)
        host.copy_((host.float() * python_device.to_host(inv_scale)).to(host.dtype))


def only_inf(grads, found_inf, inv_scale):
    """Looks for inf and not for NaN."""
    for grad in grads:
        host = python_device.to_host(grad)
        if bool(host.isinf().any()):
            found_inf.fill_(1.0)
        host.copy_((host.float() * python_device.to_host(inv_scale)).to(host.dtype))


def grows_late(scale, tracker, found_inf, growth, backoff, interval):
    """Grows one step later than told."""
    python_device.update_scale(scale, tracker, found_inf, growth, backoff, interval + 1)


KERNELS = {
    "found_inf never set": {"finite_check": never_found},
    "found_inf of the last tensor only": {"finite_check": last_counts},
    "NaN not looked for": {"finite_check": only_inf},
    "the scale grows late": {"update_scale": grows_late},
}


@contextlib.contextmanager
def kernels(finite_check=python_device.check_and_unscale, update_scale=python_device.update_scale):
    """Other scaler kernels for a while."""
    mine = {"finite_check": finite_check, "update_scale": update_scale}
    hs.devices.register(python_device.NAME, **mine)
    try:
        yield
    finally:
        hs.devices.register(
            python_device.NAME,
            finite_check=python_device.check_and_unscale,
            update_scale=python_device.update_scale,
        )


def failures(groups=("numbers", "scaling")):
    """What the battery fails now."""
    found = run_battery(python_device.NAME, levels=("O1",), only=groups)
    return [f"{c.group}: {c.name}: {c.detail}" for c in found if c.status == "fails"]


def main():
    """Print what fails without a sin and with each."""
    torch.set_num_threads(1)
    found = {"none": failures()}
    for name, sin in SINS.items():
        python_device.SIN = sin
        found[name] = failures(("numbers",))
        python_device.SIN = python_device.honest
    for name, brought in KERNELS.items():
        with kernels(**brought):
            found[name] = failures()
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
