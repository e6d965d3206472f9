"""Which machine a result was taken on, and where it goes: results/<cpu and instruction set>/NAME.json."""

import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"

_CLASSES = (
    ("amx", "AVX512_CORE_AMX", "amx_bf16"),
    ("avx512-bf16", "AVX512_CORE_BF16", "avx512_bf16"),
    ("avx512", "AVX512_CORE", "avx512bw"),
    ("avx2", "AVX2", "avx2"),
)
"""(name, the oneDNN limit that allows at most this class, the processor flag it needs), fastest first."""


def _cpuinfo(field: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(rf"^{field}\s*:(.*)$", text, re.MULTILINE)
    return found.group(1).strip() if found else ""


def cpu() -> str:
    """The processor's name, such as `AMD EPYC`."""
    return str(torch.cpu.get_capabilities().get("cpu_name") or _cpuinfo("model name") or platform.machine())


def instruction_set() -> str:
    """The fastest class of instructions that this processor has and the environment allows."""
    flags = set(_cpuinfo("flags").split())
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    limits = [row[1] for row in _CLASSES]
    allowed = _CLASSES[limits.index(limit) :] if limit in limits else _CLASSES
    found = next((name for name, _, flag in allowed if flag in flags), "plain")
    hidden = limit == "AVX512_CORE_AMX" and "avx512_fp16" in flags
    return f"{found}-without-fp16" if hidden and found == "amx" else found


def folder(name: str | None = None) -> Path:
    """Where this machine's results go, by its processor or `name`; made if it is not there."""
    words = name or f"{cpu()} {instruction_set()}"
    made = RESULTS / "-".join(re.findall(r"[a-z0-9]+", words.lower()))
    made.mkdir(parents=True, exist_ok=True)
    return made


def result(name: str) -> Path:
    """The file of benchmark `name` on this machine."""
    return folder() / f"{name}.json"


def save(name: str, document: Mapping[str, object], out: Path | None, **more: object) -> None:
    """Write `document` with the machine's facts on top, to `out` or else to the benchmark's own file."""
    text = json.dumps({"machine": facts(**more), **document}, indent=1)
    (out or result(name)).write_text(text + "\n")


def facts(**more: object) -> dict[str, object]:
    """What a result says of its machine: processor, instruction set, torch, Python, torch's threads."""
    return {
        "cpu": cpu(),
        "instruction_set": instruction_set(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        **more,
    }
