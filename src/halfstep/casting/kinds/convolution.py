"""Convolutions of one, two and three dimensions, transposed or not."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.casting.kinds.kind import (
    F32,
    SIZES,
    Args,
    Candidates,
    Choice,
    Grads,
    Kind,
    OpCall,
    OpClass,
    Reader,
    argument,
    needs_of,
    no_autocast,
    values_of,
    ways,
)
from halfstep.formats import parse_dtype
from halfstep.torch_private import not_compiled

_aten: Any = torch.ops.aten

_SHAPES = {
    "1d": ("dense", "pointwise", "depthwise", "strided-depthwise", "transposed"),
    "2d": (
        "dense",
        "pointwise",
        "narrow-pointwise",
        "stem",
        "grouped",
        "depthwise",
        "strided-depthwise",
        "transposed",
    ),
    "3d": ("dense", "pointwise", "strided-depthwise", "transposed"),
}


def _geometries() -> tuple[str, ...]:
    common = [f"{dims} {shape}" for dims, shapes in _SHAPES.items() for shape in shapes]
    return (*common, *(f"2d {shape} channels_last" for shape in _SHAPES["2d"]))


# --- implementations ---------------------------------------------------------------------------------------


class Geometry(NamedTuple):
    """What `aten::convolution` takes beside its tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


def _last(t: Tensor) -> Tensor:
    """In channels_last, where it has images to lay out."""
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t


def _as_given(t: Tensor, like: Tensor) -> Tensor:
    """In the layout that a convolution of `like` alone would give."""
    if t.dim() != 4 or (like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()):
        return t
    return t.contiguous()


@functools.cache
def sums_in_fp32(dtype: torch.dtype) -> bool:
    """Whether torch's convolutions of a 16-bit dtype on this CPU sum a batch in fp32: one of 4,096 is tried.

    oneDNN's do; where the processor has no instructions for the dtype, torch's own add image by image in 16
    bits, and are slower than fp32.
    """
    image, weight = (torch.ones(n, 1, 1, dtype=dtype, device="cpu") for n in (4096, 1))
    grads = _aten.convolution_backward(
        image, image, weight, None, (1,), (0,), (1,), False, (0,), 1, [False, True, False]
    )
    return grads[1].item() == 4096


def _widens(how: str, dtype: torch.dtype) -> bool:
    return how.startswith("rounded") or not sums_in_fp32(dtype)


def convolve(how: str, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return the convolution, rounded once."""
    dtype, original = x.dtype, x
    if _widens(how, dtype):
        x, weight = x.to(F32), weight.to(F32)
        bias = None if bias is None else bias.to(F32)
    if how.endswith("channels_last"):
        out = _aten.convolution(_last(x), _last(weight), bias, *geometry)
        return _as_given(out.to(dtype), original)
    return _aten.convolution(x, weight, bias, *geometry).to(dtype)


def convolve_backward(
    how: str, grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, mask: list[bool]
) -> Grads:
    """Return the gradients that `mask` asks for (input, weight, bias), each rounded once.

    That of the input is no function of the input, nor that of the weight one of the weight: detached, they
    get no gradient of zeros where these are differentiated again.
    """
    x, weight = x if mask[1] else x.detach(), weight if mask[0] else weight.detach()
    dtype, original = x.dtype, x
    if _widens(how, dtype):
        grad, x, weight = grad.to(F32), x.to(F32), weight.to(F32)
    last = how.endswith("channels_last")
    if last:
        grad, x, weight = _last(grad), _last(x), _last(weight)
    sizes = [grad.shape[1]] if mask[2] else None
    grads = _aten.convolution_backward(grad, x, weight, sizes, *geometry, mask)
    out = [t.to(dtype) if need else None for t, need in zip(grads, mask, strict=True)]
    return tuple(_as_given(t, original) if last and t is not None else t for t in out)


class Convolution(torch.autograd.Function):
    """A convolution of any number of dimensions, transposed or not; x: (batch, channels, ...)."""

    @staticmethod
    @not_compiled
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, choice: Choice
    ) -> Tensor:
        """Compute the result; all arguments are of one 16-bit dtype."""
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.choice = geometry, choice
        return convolve(choice.forward, x, weight, bias, geometry)

    @staticmethod
    @not_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> Grads:
        """One call where both directions are made alike, else two."""
        x, weight = ctx.saved_tensors
        grad, choice, needs = grad_outputs[0], ctx.choice, ctx.needs_input_grad
        common = (grad, x, weight, ctx.geometry)
        to_x = to_weight = to_bias = None
        with no_autocast():
            alike = choice.input == choice.weight and not torch.is_grad_enabled()
            if alike or not needs[0]:
                mask = list(needs[:3])
                to_x, to_weight, to_bias = convolve_backward(choice.weight, *common, mask)
            else:
                to_x = convolve_backward(choice.input, *common, [True, False, False])[0]
                if needs[1] or needs[2]:
                    mask = [False, needs[1], needs[2]]
                    _, to_weight, to_bias = convolve_backward(choice.weight, *common, mask)
        return to_x, to_weight, to_bias, None, None


# --- probes ------------------------------------------------------------------------------------------------

#: Batch, channels and positions.
_BASES = {"tiny": (2, 8, 64), "small": (4, 24, 196), "medium": (8, 48, 196), "large": (8, 48, 784)}
#: Channels of a convolution's probe as a multiple of the base's, where they are not the base's.
_WIDER = {"pointwise": 3, "narrow-pointwise": 2, "depthwise": 2, "strided-depthwise": 2, "grouped": 2}


def _tensors(cls: OpClass) -> tuple[Tensor, Tensor, Tensor, Geometry]:
    """What a class is measured on; its geometry reads like `2d dense` or `2d depthwise channels_last`."""
    kind, shape, *layout = cls.geometry.split()
    dims, dtype = int(kind[0]), parse_dtype(cls.dtype)
    batch, channels, positions = _BASES[cls.size]
    extent = max(4, round(positions ** (1 / dims)))
    transposed, narrow = shape == "transposed", shape == "narrow-pointwise"
    kernel = 1 if shape.endswith("pointwise") else 4 if transposed else 3
    wide = _WIDER.get(shape, 1) * channels
    groups = {"depthwise": wide, "strided-depthwise": wide, "grouped": 4}.get(shape, 1)
    into = 3 if shape == "stem" else channels // 2 if narrow else wide
    stride = 2 if transposed or shape.startswith("strided") else 1
    padding = 1 if transposed else kernel // 2
    geometry = Geometry((stride,) * dims, (padding,) * dims, (1,) * dims, transposed, (0,) * dims, groups)
    x = values_of((batch * (4 if narrow else 1), into, *(extent,) * dims), dtype, 1)
    weight = values_of((wide, into // groups, *(kernel,) * dims), dtype, 2)
    if layout:
        x, weight = (t.contiguous(memory_format=torch.channels_last) for t in (x, weight))
    grad = torch.empty_like(_aten.convolution(x.float(), weight.float(), None, *geometry), dtype=dtype)
    return x, weight, grad.copy_(values_of(tuple(grad.shape), dtype, 3)), geometry


def _candidates(cls: OpClass, direction: str) -> Candidates:
    x, weight, grad, geometry = _tensors(cls)
    names = ["rounded", "native"]
    if cls.geometry[:2] == "2d" and cls.size != SIZES[0] and not cls.geometry.endswith("channels_last"):
        names = ["rounded", "rounded_channels_last", "native", "channels_last"]
    if direction == "forward":
        return ways(names, convolve, x, weight, None, geometry)
    mask = [direction == "input", direction == "weight", False]
    return ways(names, convolve_backward, grad, x, weight, geometry, mask)


def _layer(cls: OpClass) -> tuple[Callable[..., Tensor], list[Tensor]]:
    x, weight, _, geometry = _tensors(cls)

    def convolution(x: Tensor, weight: Tensor) -> Tensor:
        return torch.convolution(x, weight, None, *geometry)

    return convolution, [x.float(), weight.float()]


# --- how torch's ops are read ------------------------------------------------------------------------------


def _each(value: Any, dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values * dims if len(values) == 1 else values


def _read_forward_geometry(args: Args, dims: int) -> Geometry | None:
    """conv1d, conv2d, conv3d: stride, padding (words too), dilation, groups."""
    stride, padding, dilation = (argument(args, i, d) for i, d in ((3, 1), (4, 0), (5, 1)))
    dilation = _each(dilation, dims)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        spans = [d * (k - 1) for d, k in zip(dilation, args[1].shape[2:], strict=True)]
        if any(span % 2 for span in spans):
            return None
        padding = tuple(span // 2 for span in spans)
    spatial_args = _each(stride, dims), _each(padding, dims), dilation
    return Geometry(*spatial_args, False, (0,) * dims, argument(args, 6, 1))


def _read_transposed_geometry(args: Args, dims: int) -> Geometry:
    """conv_transpose1d to 3d: stride, padding, output padding, groups, dilation."""
    stride, padding, extra, dilation = (argument(args, i, d) for i, d in ((3, 1), (4, 0), (5, 0), (7, 1)))
    spatial_args = _each(stride, dims), _each(padding, dims), _each(dilation, dims)
    return Geometry(*spatial_args, True, _each(extra, dims), argument(args, 6, 1))


def _read_full_geometry(args: Args, dims: int) -> Geometry:
    """convolution and _convolution, which name everything."""
    stride, padding, dilation, extra = (_each(args[i], dims) for i in (3, 4, 5, 7))
    return Geometry(stride, padding, dilation, args[6], extra, args[8])


def _convolution(
    read: Callable[[Args, int], Geometry | None],
) -> Reader:
    def site(args: Args, kwargs: Mapping[str, Any]) -> OpCall | None:
        x, weight = args[0], args[1]
        dims = weight.dim() - 2
        single = x.dim() == dims + 1
        if dims not in (1, 2, 3) or not (single or x.dim() == dims + 2):
            return None
        geometry = read(args, dims)
        if geometry is None or x.shape[0 if single else 1] != weight.shape[
            0 if geometry.transposed else 1
        ] * (1 if geometry.transposed else geometry.groups):
            return None

        def run(choice: Choice, low: Args, _: Mapping[str, Any]) -> Any:
            batch = low[0].unsqueeze(0) if single else low[0]
            bias = low[2] if len(low) > 2 else None
            if torch.is_grad_enabled():
                out = Convolution.apply(batch, low[1], bias, geometry, choice)
            else:
                out = convolve(choice.forward, batch, low[1], bias, geometry)
            return out.squeeze(0) if single else out

        positions = x.numel() / x.shape[0 if single else 1]
        work = positions * weight.numel() / (1 if geometry.transposed else math.prod(geometry.stride))
        shape = _shape_of(weight, geometry)
        if f"{dims}d {shape}" not in _geometries():
            shape = "pointwise" if shape == "narrow-pointwise" else "dense"
        if shape.endswith("depthwise"):
            work *= 16  # bound by memory, not by products
        return OpCall("convolution", f"{dims}d {shape}{_layout(x)}", work, needs_of(x, weight), run)

    return site


#: Products for each value read or written below which a pointwise convolution is bound by memory.
_NARROW = 32


def _shape_of(weight: Tensor, geometry: Geometry) -> str:
    if geometry.transposed:
        return "transposed"
    if geometry.groups > 1:
        if weight.shape[1] > 1:
            return "grouped"
        return "strided-depthwise" if max(geometry.stride) > 1 else "depthwise"
    if weight.shape[1] <= 4:
        return "stem"
    if any(k > 1 for k in weight.shape[2:]):
        return "dense"
    out, into = weight.shape[:2]
    return "narrow-pointwise" if out * into < _NARROW * (out + into) else "pointwise"


def _layout(x: Tensor) -> str:
    last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
    return " channels_last" if last else ""


def _readers() -> dict[str, Reader]:
    full = _convolution(_read_full_geometry)
    readers = dict.fromkeys(
        ("aten::convolution", "aten::_convolution", "aten::_convolution.deprecated"), full
    )
    for dims in (1, 2, 3):
        ahead, back = _convolution(_read_forward_geometry), _convolution(_read_transposed_geometry)
        readers |= dict.fromkeys((f"aten::conv{dims}d", f"aten::conv{dims}d.padding"), ahead)
        readers |= dict.fromkeys((f"aten::conv_transpose{dims}d", f"aten::conv_transpose{dims}d.input"), back)
    return readers


CONVOLUTION = Kind(
    geometries=_geometries(),
    limits=(5e5, 1e7, 6e7),
    probe=_candidates,
    readers=_readers(),
    layer=_layer,
)
