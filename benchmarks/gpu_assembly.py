"""Registers, instructions and loads of the update kernel, compiled for a GPU that need not be there.

    python benchmarks/gpu_assembly.py [80]

AdamW with exact bf16 masters. Instructions are those of the inner loop, in which a thread updates 8 elements.
Needs Triton, which brings the assembler and the disassembler.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from halfstep.kernels import codes as L
from halfstep.kernels.cuda.update import update

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TYPES = {"rows": "*fp32", "keys": "*i32", "skip": "*u8"}
VARIANTS = {
    "fp32 states": (L.STATE_FP32, True, True),
    "fp32 states, gradient off alignment": (L.STATE_FP32, True, False),
    "fp32 states, all off alignment": (L.STATE_FP32, False, False),
    "bf16 states": (L.STATE_BF16, True, True),
    "8-bit states": (L.STATE_8BIT, True, True),
    "8-bit states, gradient off alignment": (L.STATE_8BIT, True, False),
    "8-bit states, all off alignment": (L.STATE_8BIT, False, False),
}


def compiled(arch: int, state: int, aligned: bool, gradient: bool) -> bytes:
    """The machine code of one variant."""
    chosen: dict[str, Any] = {"ALGORITHM": L.ADAMW, "KIND": L.BF16_EXACT, "GRAD": L.BF16, "STATE": state}
    chosen |= {"ALIGNED": aligned, "GRAD_ALIGNED": gradient, "TILE": 1024, "over": None}
    names = update.arg_names
    types = {n: "constexpr" if n in chosen else TYPES.get(n, "*i64") for n in names}
    source = ASTSource(update, types, {(names.index(n),): v for n, v in chosen.items()}, {})
    options = {"num_warps": 2 if state == L.STATE_8BIT else 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["cubin"]


def facts(code: bytes) -> tuple[int, int, int, int]:
    """Registers, instructions in the longest loop, loads and those of 128 bits."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code)
        tools = (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
        sass, usage = (
            subprocess.run([TOOLS / name, how, file.name], capture_output=True, text=True, check=True).stdout
            for name, how in tools
        )
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None
    labels, count, longest = dict[str, int](), 0, 0
    for line in sass.splitlines():
        if label := re.match(r"\s*\.(L_\w+):", line):
            labels[label[1]] = count
        if re.search(r"/\*[0-9a-f]{4,5}\*/", line):
            count += 1
            back = re.search(r"BRA.*`\(\.(L_\w+)\)", line)
            if back and back[1] in labels:
                longest = max(longest, count - labels[back[1]])
    loads = re.findall(r"LDG\S*", sass)
    return int(registers[1]), longest, len(loads), sum(".128" in load for load in loads)


def main() -> None:
    arch = int(sys.argv[1]) if len(sys.argv) > 1 else 80
    print("| variant | registers | instructions an element | loads | of 128 bits |\n|---|---|---|---|---|")
    for name, variant in VARIANTS.items():
        registers, instructions, loads, wide = facts(compiled(arch, *variant))
        print(f"| {name} | {registers} | {instructions / 8:.0f} | {loads} | {wide} |")


if __name__ == "__main__":
    main()
