"""Compiles the GPU kernels without a GPU and reads their PTX; run by test_cuda.py in a process of its own.

python tests/optim/assembly.py 80 [all]      exit 77 where Triton cannot compile here
"""

import itertools
import re
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from halfstep.kernels import codes as L
from halfstep.kernels.cuda import update as K

ALGORITHMS = {L.ADAMW: 2, L.ADAM: 2, L.SGD: 0, L.SGD_MOMENTUM: 1, L.SGD_NESTEROV: 1, L.LION: 1}
"""With their number of moments."""
KINDS = {
    L.PLAIN: 4, L.BF16_EXACT: 4, L.BF16_MASTER: 6, L.BF16_NONE: 2, L.BF16_STOCHASTIC: 2, L.FP16_EXACT: 4,
    L.FP16_MASTER: 6, L.FP16_NONE: 2,
}  # fmt: skip
"""How weights are kept, with the bytes that are read of each element."""
STATES = {L.STATE_FP32: 4, L.STATE_BF16: 2, L.STATE_8BIT: 1}
GRADS = {L.BF16: 2, L.FP16: 2, L.FP32: 4}
TYPES = {
    "table": "*i64", "grads": "*i64", "items": "*i64", "rows": "*fp32", "keys": "*i32", "skip": "*u8",
    "over": "*i32", "sums": "*fp32", "peaks": "*i32", "count": "i32", "inv_value": "fp32", "flags": "*u8",
    "inv_scale": "*fp32", "stats": "*fp32", "hyper": "*fp64", "lr": "*fp32", "factor": "fp32",
    "clip": "*fp32", "limit": "fp32", "finite": "*u8", "scale": "*fp32", "clean": "*i32",
    "overflows": "*i32", "out": "*i32",
}  # fmt: skip
FUSED = re.compile(r"\bfma|div\.full|div\.approx|sqrt\.approx|\.ftz")
"""In PTX a correctly rounded division or square root is one instruction; any fma is a contraction."""
WIDE, HALF = r"ld\.global\S*\.v4\.[a-z]32", r"ld\.global\S*\.v2\.[a-z]32"


def ptx(arch: int, kernel: Any, constants: dict[str, Any], warps: int = 4) -> str:
    names = kernel.arg_names
    types = {n: "constexpr" if n in constants else TYPES[n] for n in names}
    places = {(names.index(n),): value for n, value in constants.items()}
    options = {"num_warps": warps, "enable_fp_fusion": False}
    target = GPUTarget("cuda", arch, 32)
    return triton.compile(ASTSource(kernel, types, places, {}), target=target, options=options).asm["ptx"]


def variants(every: bool) -> Iterator[tuple[int, int, int, int, bool, bool]]:
    """Algorithm, kind, states, gradients, and whether the rest and the gradients are aligned."""
    most = list(itertools.product((L.ADAMW,), KINDS, STATES))
    most += list(itertools.product(ALGORITHMS, (L.BF16_EXACT,), STATES))
    few = [(L.ADAMW, L.BF16_EXACT, state) for state in STATES]
    few += [(L.SGD_NESTEROV, L.PLAIN, L.STATE_8BIT), (L.LION, L.FP16_MASTER, L.STATE_BF16)]
    for algorithm, kind, state in most if every else few:
        if ALGORITHMS[algorithm] or state == L.STATE_FP32:
            grad = L.FP32 if kind == L.PLAIN else L.FP16 if kind >= L.FP16_EXACT else L.BF16
            yield algorithm, kind, state, grad, True, True
    for state in STATES:
        yield L.ADAMW, L.BF16_EXACT, state, L.BF16, True, False
    yield L.ADAMW, L.BF16_EXACT, L.STATE_FP32, L.FP32, False, True


def check_update(arch: int, algorithm: int, kind: int, state: int, grad: int, own: bool, its: bool) -> None:
    """One variant: each thread has 8 elements, of which wide loads take 16 bytes each."""
    constants = {"ALGORITHM": algorithm, "KIND": kind, "GRAD": grad, "STATE": state, "TILE": 1024}
    constants |= {"ALIGNED": own, "GRAD_ALIGNED": its} | ({} if kind == L.FP16_EXACT else {"over": None})
    text = ptx(arch, K.update, constants, 2 if state == L.STATE_8BIT else 4)
    case = (arch, algorithm, kind, state, grad, own, its)
    assert not FUSED.search(text), case
    moments = ALGORITHMS[algorithm]
    halves = (KINDS[kind] + (moments * STATES[state] if state != L.STATE_8BIT else 0)) * own
    expected = (halves + GRADS[grad] * its) // 2
    wide, half = (len(re.findall(pattern, text)) for pattern in (WIDE, HALF))
    assert wide >= expected, (case, wide, expected)
    if state == L.STATE_8BIT and own:
        assert half >= moments, (case, half)
    if moments == 2:
        assert "div.rn.f32" in text, case
        assert "sqrt.rn.f32" in text, case


def main() -> None:
    arch = int(sys.argv[1])
    rule = {"GROWTH": 2.0, "BACKOFF": 0.5, "INTERVAL": 2000, "HYSTERESIS": 1, "LEAST": 1.0, "MOST": 2.0**24}
    try:
        adjusted = ptx(arch, K.adjusted, rule)
    except Exception as error:
        print(f"Triton cannot compile here: {type(error).__name__}: {error}")
        sys.exit(77)
    assert not FUSED.search(adjusted)
    for variant in variants("all" in sys.argv):
        check_update(arch, *variant)
    for grad in GRADS:
        text = ptx(arch, K.measure, {"GRAD": grad, "ALIGNED": True, "TILE": 1024})
        assert not FUSED.search(text)
        assert len(re.findall(WIDE, text)) >= GRADS[grad] // 2
    text = ptx(arch, K.total, {"LANES": 1024})
    assert "sqrt.rn.f64" in text
    assert not FUSED.search(text)
    text = ptx(arch, K.scalars, {"ALGORITHM": L.ADAMW, "LANES": 128})
    assert "div.rn.f32" in text
    assert not FUSED.search(text)


if __name__ == "__main__":
    main()
