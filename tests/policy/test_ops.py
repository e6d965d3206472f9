"""The op tables against torch's registrations, what its CPU autocast does, and what was measured."""

import json
import operator
import re
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from halfstep.casting import regions
from halfstep.conformance.op_samples import SAMPLES
from halfstep.errors import ConfigError
from halfstep.policy import ops
from halfstep.policy.op_names import canonical_op
from halfstep.policy.ops import TABLES, Rule, rows

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/amd-epyc-avx512-bf16"
MEASURED = json.loads((RESULTS / "op_rules.json").read_text())["ops"]
CPU_ROWS = rows("torch", "cpu")
HALFSTEP = TABLES["halfstep"]
ALL_OPS = sorted(set().union(*TABLES.values(), CPU_ROWS))
NOT_ON_CPU = {
    *("_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"),
    *("cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"),
}
# This fused kernel has no fp16 form on CPU; fp16 is rounded around fp32 arithmetic there.
NO_FP16_ON_CPU = {"mkldnn_rnn_layer"}
IN_16_BITS = [n for n, r in TABLES["low"].items() if r.rule not in (Rule.FULL, Rule.BANNED)]
# Some torch from 2.11 on does not have these, or casts them on no device; tables list the ops of every torch.
NOT_IN_EVERY_TORCH = {"cholesky", "qr", "rms_norm", "linalg_matrix_sqrth"}


def skip_what_torch_lacks(name: str) -> None:
    if name in NOT_IN_EVERY_TORCH and not hasattr(torch.ops.aten, name):
        pytest.skip(f"torch {torch.__version__} has no aten::{name}")


def registered(key: str) -> set[str]:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    regions.release()  # ours, where an earlier test of this process used them
    return {name[6:].partition(".")[0] for name in names if has(name, key)}


def floating(tree: object) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [t for t in leaves if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())]


@pytest.mark.parametrize(("device", "key"), [("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")])
def test_torch_rows_are_exactly_the_ops_this_torch_registers(device: str, key: str) -> None:
    assert set(rows("torch", device)) == registered(key)


def test_torch_tables_list_nothing_that_no_torch_registers() -> None:
    unregistered = set(TABLES["torch"]) - registered("AutocastCUDA")
    assert unregistered - NOT_IN_EVERY_TORCH <= {"_cudnn_rnn"}  # builds with CUDA register it
    assert set(ops._TORCH_BY_DEVICE["cpu"]) - registered("AutocastCPU") <= NOT_IN_EVERY_TORCH


def _skip_what_onednn_lacks(name: str, dtype: torch.dtype) -> None:
    """Its recurrent layer has no bf16 kernel below AVX-512; torch's own autocast fails there too."""
    if name == "mkldnn_rnn_layer" and dtype is torch.bfloat16:
        fn, args = SAMPLES[name]("cpu", dtype)
        try:
            fn(*args)
        except RuntimeError:
            pytest.skip("oneDNN has no bf16 recurrent layer for this instruction set")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(CPU_ROWS))
def test_torch_cpu_rows_are_what_cpu_autocast_does(name: str) -> None:
    _skip_what_onednn_lacks(name, torch.bfloat16)
    rule = CPU_ROWS[name].rule
    given = torch.float32 if rule is Rule.LOW else torch.bfloat16
    fn, args = SAMPLES[name]("cpu", given)
    if rule is Rule.WIDEST:
        leaves, spec = pytree.tree_flatten(args)
        first = next(i for i, leaf in enumerate(leaves) if floating(leaf))
        leaves[first] = leaves[first].float()
        args = pytree.tree_unflatten(leaves, spec)
    with torch.autocast("cpu", torch.bfloat16):
        out = floating(fn(*args))
    expected = {torch.bfloat16} if rule is Rule.LOW else {torch.float32, torch.complex64}
    if name == "linalg_matrix_rank":
        with pytest.raises(RuntimeError, match="other than float and double"):
            fn(*args)
    else:
        assert out
        assert {t.dtype for t in out} <= expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALL_OPS)
def test_every_op_has_a_sample_that_runs(name: str) -> None:
    skip_what_torch_lacks(name)
    fn, args = SAMPLES[name]("cpu", torch.float32)
    assert all(t.dtype in (torch.float32, torch.complex64) for t in floating(args))
    if name in NOT_ON_CPU:
        with pytest.raises(NotImplementedError):
            fn(*args)
    else:
        assert pytree.tree_leaves(fn(*args)) != []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", [n for n, r in TABLES["low"].items() if r.rule not in (Rule.FULL, Rule.BANNED)]
)
def test_ops_left_in_16_bits_have_16_bit_kernels(name: str, dtype: torch.dtype) -> None:
    if name in NOT_ON_CPU or (dtype == torch.float16 and name in NO_FP16_ON_CPU):
        pytest.skip("not on CPU in this dtype")
    _skip_what_onednn_lacks(name, dtype)
    fn, args = SAMPLES[name]("cpu", dtype)
    out = [t.dtype for t in floating(fn(*args))]
    assert out[0] == dtype


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [n for n, r in TABLES["low"].items() if r.rule is Rule.FULL])
def test_ops_that_o3_lifts_to_fp32_have_no_16_bit_kernel(name: str) -> None:
    skip_what_torch_lacks(name)
    fn, args = SAMPLES[name]("cpu", torch.bfloat16)
    if name == "istft":
        assert args[0].dtype == torch.complex64
    elif name == "trace":  # torch 2.11 has none, later ones do
        assert args[0].dtype == torch.bfloat16
    else:
        with pytest.raises(RuntimeError):
            fn(*args)


def test_default_table_covers_every_op_torch_casts_anywhere() -> None:
    assert set(CPU_ROWS) | set(TABLES["torch"]) <= set(HALFSTEP)


PEERS = {
    "torch": TABLES["torch"],
    "torch cpu": CPU_ROWS,
    **{name: TABLES[name] for name in ("apex", "mindspore", "mlu")},
}


@pytest.mark.parametrize("peer", PEERS)
def test_rows_that_differ_from_a_peer_cite_a_measurement(peer: str) -> None:
    differ = [n for n, r in PEERS[peer].items() if n in HALFSTEP and HALFSTEP[n].rule is not r.rule]
    assert differ
    assert [name for name in differ if "measured" not in HALFSTEP[name].reason] == []


CITATION = re.compile(
    r"measured (\w+): error against float64 x([\d.]+) of fp32 rounded once,"
    r" gradients x([\d.]+), bytes x([\d.]+) of fp32(?: \(torch's own kernel x([\d.]+) and x([\d.]+)\))?"
)


def test_cited_numbers_are_the_measured_ones() -> None:
    reasons = {row.reason for row in HALFSTEP.values() if "measured" in row.reason}
    assert len(reasons) > 15
    for reason in reasons:
        cited = CITATION.search(reason)
        assert cited, reason
        found = MEASURED[cited[1]]["bf16"]
        ours = ("keep_over_round", "grad_keep_over_round", "bytes_keep_over_full")
        torchs = ("torch_over_round", "grad_torch_over_round")
        errs_more = any(found[t] > 1.05 * found[k] for t, k in zip(torchs, ours, strict=False))
        assert errs_more == (cited[5] is not None), reason
        for key, number in zip((*ours, *torchs), cited.groups()[1:], strict=True):
            if number is not None:
                assert float(number) == pytest.approx(found[key], rel=0.02, abs=0.006), (reason, key)


@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_keep_loses_nothing_over_fp32_rounded_once(op: str, dtype: str) -> None:
    assert MEASURED[op][dtype]["keep_over_round"] <= 1.02
    assert MEASURED[op][dtype]["grad_keep_over_round"] <= 1.06
    assert MEASURED[op][dtype]["bytes_keep_over_full"] <= 0.85


@pytest.mark.parametrize("table", TABLES)
def test_every_row_says_why_and_names_a_real_op(table: str) -> None:
    for name, row in TABLES[table].items():
        assert row.name == name
        assert row.reason
        assert hasattr(torch.ops.aten, name) or name in NOT_IN_EVERY_TORCH, name
        assert row.rule is not Rule.BANNED or name in ops.REMEDIES


def test_banned_only_in_fp16() -> None:
    row = HALFSTEP["binary_cross_entropy"]
    assert row.rule_for(torch.float16) is Rule.BANNED
    assert row.rule_for(torch.bfloat16) is Rule.FULL


@pytest.mark.parametrize(
    ("op", "rule"), [("dot", Rule.FULL), ("batch_norm", Rule.FULL), ("softmax", Rule.FULL)]
)
def test_mlu_runs_the_courses_ops_in_fp32(op: str, rule: Rule) -> None:
    assert TABLES["mlu"][op].rule is rule
    assert TABLES["mlu"]["sigmoid"].rule is rule
    assert TABLES["mlu"]["linear"].rule is Rule.LOW


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("exp", "exp"),
        ("torch.exp", "exp"),
        ("torch.nn.functional.linear", "linear"),
        ("aten::conv2d", "conv2d"),
        (torch.exp, "exp"),
        (torch.Tensor.exp, "exp"),
        (torch.Tensor.exp_, "exp"),
        (torch.ops.aten.exp, "exp"),
        (torch.ops.aten.sum.dim_IntList, "sum"),
        (F.linear, "linear"),
        (F.layer_norm, "layer_norm"),
        (F.cross_entropy, "cross_entropy_loss"),
        (F.grid_sample, "grid_sampler"),
        (F.max_pool2d, "max_pool2d"),
        (F.scaled_dot_product_attention, "scaled_dot_product_attention"),
        (torch.linalg.vector_norm, "linalg_vector_norm"),
        (torch.fft.fft, "fft_fft"),
        (operator.matmul, "matmul"),
        (torch.Tensor.__matmul__, "matmul"),
        (torch.ger, "addr"),
        ("expp", None),
        ("", None),
        (len, None),
        (print, None),
        (F.interpolate, None),
        (lambda x: x, None),
        ("nolib::noop", None),
    ],
)
def test_canonical_op(op: object, name: str | None) -> None:
    assert canonical_op(op) == name


def test_unknown_table_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"unknown op table 'tourch': .*torch"):
        rows("tourch")


def test_tables_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TABLES["halfstep"]["exp"] = None  # type: ignore[index]


def test_docs_are_generated_from_the_tables() -> None:
    text = (ROOT / "docs/ops.md").read_text(encoding="utf-8")
    generator = runpy.run_path(str(ROOT / "docs/generate_ops.py"))
    assert text == generator["page"](), "run python docs/generate_ops.py"
    assert all(f"| `{name}` |" in text for name in ALL_OPS)
