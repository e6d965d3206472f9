"""Capabilities: what is measured, what is remembered where, and what changes the answer."""

import json
import os
import subprocess
import sys

import pytest
import torch

from halfstep.devices import Capability, capabilities, memory
from halfstep.errors import ConfigError, HalfstepWarning, UnsupportedError

CPU = torch.device("cpu")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """No memory of earlier measurements, on disk or in the process; counts those that are made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(capabilities, "_known", {})
    monkeypatch.setattr(capabilities, "_declared", {})
    made = []

    def measure(device, dtype):
        made.append(dtype)
        return {torch.bfloat16: (0.3, ""), torch.float16: (35.0, "")}.get(dtype, (None, "no kernel"))

    monkeypatch.setattr(capabilities, "_measure", measure)
    return made


def python(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_status_follows_from_the_measured_ratio(fresh):
    assert capabilities.capability("cpu", "bf16").status == "native"
    slow = capabilities.capability("cpu", "fp16")
    assert (slow.status, slow.ratio) == ("slow", 35.0)
    absent = capabilities.capability("cpu", "e5m2")
    assert (absent.status, absent.why, absent.ratio) == ("absent", "no kernel", None)
    assert capabilities.is_slow("cpu", torch.float16)
    assert not capabilities.is_slow("cpu", "bf16")


def test_fp32_and_fp64_are_never_slow(fresh, monkeypatch):
    monkeypatch.setattr(capabilities, "_measure", lambda device, dtype: (9.0, ""))
    assert capabilities.capability("cpu", "fp32").ratio == 1.0
    assert capabilities.capability("cpu", "fp64").status == "native"


def test_each_dtype_is_measured_once_and_found_again_on_disk(fresh, monkeypatch):
    first = capabilities.capability("cpu", "fp16")
    assert capabilities.capability(CPU, torch.float16) == first
    monkeypatch.setattr(capabilities, "_known", {})
    assert capabilities.capability("cpu", "fp16") == first
    assert fresh == [torch.float16]
    capabilities.capability("cpu", "bf16")
    assert set(json.loads(capabilities.cache_file(CPU).read_text())) == {"fp16", "bf16"}


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"fp16": 3}', '{"fp16": {"ratio": "fast", "problem": ""}}', "\x00\xff",
     '{"fp16": {"ratio": -1.0, "problem": ""}}', '{"fp16": {}}'],
)  # fmt: skip
def test_a_corrupt_cache_is_measured_again(fresh, content):
    file = capabilities.cache_file(CPU)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert capabilities.capability("cpu", "fp16").ratio == 35.0
    assert json.loads(file.read_text())["fp16"]["ratio"] == 35.0


def test_a_folder_that_cannot_be_written_costs_only_the_memory(fresh, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert capabilities.capability("cpu", "fp16").status == "slow"
    assert capabilities.capability("cpu", "fp16").status == "slow"
    assert fresh == [torch.float16]


def test_nothing_half_written_is_left_when_the_move_fails(fresh, monkeypatch):
    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    assert capabilities.capability("cpu", "bf16").status == "native"
    assert list(capabilities.cache_file(CPU).parent.iterdir()) == []


@pytest.mark.parametrize("limit", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"])
def test_a_limit_on_the_instruction_set_has_its_own_cache(fresh, monkeypatch, limit, no_limits):
    free = capabilities.cache_file(CPU)
    monkeypatch.setenv(limit, "AVX2")
    assert capabilities.cache_file(CPU) != free


def test_a_real_measurement_of_this_cpu_leaves_no_trace():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    ratio, problem = capabilities._measure(CPU, torch.bfloat16)
    assert problem == ""
    assert 0.01 < ratio < 1000
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_measurement_does_not_see_the_callers_region():
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        ratio, problem = capabilities._measure(CPU, torch.float64)
    assert problem == ""
    assert ratio > 1


@pytest.mark.skipif(
    not getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)(),
    reason="needs a CPU with avx512_bf16, so that there is something to hide",
)
def test_bf16_is_measured_anew_where_avx512_is_hidden(tmp_path):
    """With it bf16 takes half to twice fp32's time, as the processor has it; without, forty times that."""
    code = (
        "from halfstep.devices import *; c = capability('cpu', 'bf16'); "
        "print(c.status, default_dtype('cpu'), c.ratio)"
    )
    env = {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    shown = python(code, ONEDNN_MAX_CPU_ISA="", **env).split()
    hidden = python(code, ONEDNN_MAX_CPU_ISA="AVX2", **env).split()
    assert hidden[:2] == ["slow", "torch.bfloat16"]
    assert shown[1] == "torch.bfloat16"
    assert float(shown[2]) < float(hidden[2]) / 3


def test_the_reason_names_the_limit(fresh, monkeypatch, no_limits):
    monkeypatch.setattr(capabilities, "_cpu_facts", lambda: {"avx512_bf16": True})
    monkeypatch.setattr(capabilities.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    why = capabilities._reason(CPU, torch.bfloat16, 40.0, "slow")
    assert why == "ONEDNN_MAX_CPU_ISA=AVX2 hides this CPU's avx512_bf16"


def test_a_cpu_defaults_to_bf16_even_where_it_is_slow(fresh, monkeypatch):
    monkeypatch.setattr(capabilities, "_measure", lambda device, dtype: (40.0, ""))
    assert capabilities.default_dtype("cpu") == torch.bfloat16
    assert capabilities.is_slow("cpu", "bf16")


@pytest.mark.parametrize(
    ("dtypes", "slow", "expected"),
    [
        (("bf16", "fp16"), (), torch.bfloat16),
        (("fp16",), (), torch.float16),
        (("bf16", "fp16"), ("bf16",), torch.float16),
        (("bf16",), ("bf16",), torch.bfloat16),
    ],
)
def test_another_device_defaults_to_what_is_native(fresh, dtypes, slow, expected):
    capabilities.declare("meta", dtypes, tuple(capabilities.parse_dtype(d) for d in slow))
    assert capabilities.default_dtype("meta") == expected


def test_a_device_without_16_bits_says_so(fresh):
    capabilities.declare("meta", (torch.float32,))
    with pytest.raises(UnsupportedError, match="neither bf16 nor fp16"):
        capabilities.default_dtype("meta")
    with pytest.raises(UnsupportedError, match=r"bf16 does not work on meta: its vendor.*use fp32"):
        capabilities.check_dtype("meta", "bf16")


def test_declaring_replaces_what_was_known(fresh):
    assert capabilities.capability("meta", "fp16").status == "native"
    capabilities.declare("meta", (torch.float16,), slow=(torch.float16,))
    assert capabilities.capability("meta", "fp16") == Capability(
        "meta", torch.float16, "slow", "declared by its vendor"
    )
    with pytest.raises(ConfigError, match=r"slow=\['bf16'\] is not among the dtypes"):
        capabilities.declare("meta", (torch.float16,), slow=(torch.bfloat16,))


def test_check_dtype_returns_what_works(fresh):
    assert capabilities.check_dtype("cpu", "half") == torch.float16
    with pytest.raises(UnsupportedError, match="e4m3fn does not work on cpu: no kernel; use bf16 or fp16"):
        capabilities.check_dtype("cpu", "e4m3fn")


def test_unknown_devices_are_refused():
    with pytest.raises(ConfigError, match="unknown device 'tpu9'"):
        capabilities.capability("tpu9", "bf16")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="'cuda' is not usable here"):
            capabilities.default_dtype("cuda")


FAULTS = """
import resource, torch
from halfstep import devices
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.empty(16 << 20).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
plain = faults()
kept = devices.keep_freed_memory()
faults(), faults()
print(plain, int(kept), faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="an option of glibc")
def test_kept_memory_is_not_mapped_again():
    plain, kept, after = map(int, python(FAULTS, OMP_NUM_THREADS="1").split())
    assert kept
    assert after < plain / 10


def test_without_glibc_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(capabilities.platform, "libc_ver", lambda: ("", ""))
    with pytest.warns(HalfstepWarning, match="needs Linux with glibc"):
        assert memory.keep_freed_memory() is False
