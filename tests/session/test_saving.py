"""Session.save and Session.load in one process: exact, checked, no pickle; the file is the export."""

import json
import resource
import subprocess
import sys

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.casting.kernel_choice import KernelTable, Row
from halfstep.casting.kinds.kind import ROUNDED, SIZES
from halfstep.checkpoint import checksum_of
from halfstep.errors import CheckpointError


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 33), nn.LayerNorm(33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 3))


def build(level="O2", dtype="bf16", kind="ours", seed=0, **options):
    model = net(seed)
    if kind == "ours":
        optimizer = hs.optim.AdamW(model.parameters(), lr=0.02, **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return model, optimizer, scheduler, hs.prepare(model, optimizer, level=level, dtype=dtype)


def train(run, steps):
    model, _, scheduler, amp = run
    for step in steps:
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        with amp.autocast():
            loss = model(x).float().square().mean()
        amp.backward(loss)
        amp.step(clip_norm=1.0, scheduler=scheduler)


def values(run):
    model, optimizer, scheduler, amp = run
    state = optimizer.state_dict()
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    for number, entry in state["state"].items():
        tensors |= {f"{number}.{k}": v.clone() for k, v in entry.items() if isinstance(v, torch.Tensor)}
    tensors |= {f"master {k}": v for k, v in state.get("masters", {}).items()}
    return tensors, scheduler.last_epoch, amp.state_dict()


def assert_same(one, other):
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name
    assert one[1:] == other[1:]


SETTINGS = [
    ("O0", None, "ours", {}),
    ("O1", "fp16", "torch", {}),
    ("O2", "bf16", "ours", {}),
    ("O2", "fp16", "ours", {"state_dtype": "8bit"}),
    ("O2", "bf16", "ours", {"master": "fp32", "state_dtype": "bf16"}),
    ("O2", "bf16", "torch", {}),
    ("O3", "bf16", "torch", {}),
]


@pytest.mark.parametrize(("level", "dtype", "kind", "options"), SETTINGS)
def test_a_loaded_run_goes_on_bit_for_bit(tmp_path, level, dtype, kind, options):
    run = build(level, dtype, kind, **options)
    train(run, range(4))
    place = {"next": 4, "generator": torch.get_rng_state()}
    run[3].save(tmp_path / "a", schedulers=[run[2]], position=place, extra={"epoch": 2})
    train(run, range(4, 8))
    again = build(level, dtype, kind, seed=9, **options)
    torch.manual_seed(77)
    loaded = again[3].load(tmp_path / "a", schedulers=[again[2]])
    assert loaded.extra == {"epoch": 2}
    assert loaded.position["next"] == 4
    train(again, range(4, 8))
    assert_same(values(run), values(again))


def test_a_checkpoint_before_the_first_step_is_whole(tmp_path):
    run = build()
    run[3].save(tmp_path / "a")
    again = build(seed=5)
    again[3].load(tmp_path / "a")
    torch.manual_seed(1)
    train(run, range(3))
    torch.manual_seed(1)
    train(again, range(3))
    assert_same(values(run), values(again))


@pytest.mark.parametrize("master", ["exact", "fp32"])
@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_it_loads_into_another_master_or_state_format(tmp_path, master, state):
    run = build(master="exact", state_dtype="fp32")
    train(run, range(3))
    run[3].save(tmp_path / "a")
    again = build(seed=5, master=master, state_dtype=state)
    again[3].load(tmp_path / "a")
    for p, q in zip(run[0].parameters(), again[0].parameters()):
        assert torch.equal(run[1].master_of(p), again[1].master_of(q))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_file_is_the_export_and_torch_reads_it(tmp_path):
    run = build()
    train(run, range(2))
    run[3].save(tmp_path / "a")
    safetensors = pytest.importorskip("safetensors.torch")
    (file,) = (tmp_path / "a").glob("*.safetensors")
    found = safetensors.load_file(file)
    wanted = {name: run[1].master_of(p) for name, p in run[0].named_parameters()}
    for name, value in wanted.items():
        assert torch.equal(found[name], value)
    model = net(4)
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint import load as dcp_load

    state = model.state_dict()
    dcp_load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path / "a")), no_dist=True)
    for name, value in wanted.items():
        assert torch.equal(state[name], value)


def test_keep_last_and_replacing(tmp_path):
    run = build()
    (tmp_path / "step-best").mkdir()
    for step in (1, 2, 10):
        run[3].save(tmp_path / f"step-{step}", keep_last=2)
    assert run[3].save(str(tmp_path / "step-10")) == tmp_path / "step-10"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-2", "step-best"]


def test_no_folder_without_our_mark_is_removed(tmp_path):
    """A save used to delete every `.*.tmp` beside it, whatever lay where it writes, and older namesakes."""
    own = "0123abcd.tmp"
    strangers = [".my-experiment.tmp", f".step-1.{own}", f".notes.{own}", "step-0", ".step-5.old", "step-6"]
    for name in strangers:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    (tmp_path / "step-0" / "manifest.json").write_text('{"name": "a web page"}')
    run = build()
    for step in (1, 2, 3):
        run[3].save(tmp_path / f"step-{step}", keep_last=1)
    for taken in ("step-5", "step-6"):
        with pytest.raises(CheckpointError, match="is no checkpoint of halfstep, so that it is not replaced"):
            run[3].save(tmp_path / taken)
    with pytest.raises(CheckpointError, match="choose another name"):
        run[3].save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*strangers, "step-3"])
    assert all((tmp_path / name / "notes.txt").read_text() == "mine" for name in strangers)


def test_what_a_user_keeps_inside_a_checkpoint_outlives_it(tmp_path):
    amp = build()[3]
    for step in (1, 2):
        amp.save(tmp_path / f"step-{step}")
        (tmp_path / f"step-{step}" / "log.txt").write_text("mine")
        amp.save(tmp_path / f"step-{step}" / "best")
    amp.save(tmp_path / "step-2")
    amp.save(tmp_path / "step-3", keep_last=1)
    for step in (1, 2):
        assert sorted(p.name for p in (tmp_path / f"step-{step}").iterdir()) == ["best", "log.txt"]
        amp.load(tmp_path / f"step-{step}" / "best")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-2", "step-3"]


def test_a_link_is_never_replaced_nor_what_it_points_to(tmp_path):
    amp = build()[3]
    amp.save(tmp_path / "archive")
    (tmp_path / "runs").mkdir()
    for name in ("step-0", "latest"):
        (tmp_path / "runs" / name).symlink_to(tmp_path / "archive")
    with pytest.raises(CheckpointError, match="latest is a link, so that it is not replaced"):
        amp.save(tmp_path / "runs" / "latest")
    amp.save(tmp_path / "runs" / "step-3", keep_last=1)
    amp.load(tmp_path / "runs" / "step-0")


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_evaluating_refuses_sessions_and_keeps_what_is_set(tmp_path, kind):
    model, _, _, amp = run = build(kind=kind)
    train(run, range(2))
    best = {name: value.clone() for name, value in model.state_dict().items()}
    train(run, range(2))
    with amp.evaluating():
        for call in (amp.save, amp.load):
            with pytest.raises(CheckpointError, match="call it after the block"):
                call(tmp_path / "best")
        model.load_state_dict(best)
    assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items())
    amp.save(tmp_path / "best")
    amp.load(tmp_path / "best")


def test_what_a_killed_save_left_is_cleared_and_an_empty_folder_is_used(tmp_path):
    run, empty = build(), tmp_path / "step-2"
    code = f"""
import os, halfstep as hs, torch
os.rename = lambda *_: os._exit(9)
hs.prepare(torch.nn.Linear(2, 2)).save({str(tmp_path / "step-1")!r})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert [p.name.startswith(".step-1.") for p in tmp_path.iterdir()] == [True]
    empty.mkdir()
    run[3].save(empty)
    run[3].save(empty, keep_last=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]


@pytest.mark.parametrize("at", [9, 200, -1, -3000])
def test_a_flipped_bit_is_found_before_anything_changes(tmp_path, at):
    run = build()
    train(run, range(2))
    run[3].save(tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)
    other = build(seed=3)
    before = values(other)
    with pytest.raises(CheckpointError, match=r"rank-00000-of-00001.safetensors is corrupt: its checksum"):
        other[3].load(tmp_path / "a")
    assert_same(before, values(other))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda m: m["files"].update({"../x.safetensors": {"sha256": "", "bytes": 1}}),
            "a file outside of the folder",
        ),
        (lambda m: m.update(format=9), "layout 9"),
        (lambda m: m.pop("files"), "not a manifest"),
        (lambda m: m["optimizers"][0].update(algorithm="Lion"), r"\['Lion'\] saved it, here are \['AdamW'\]"),
    ],
)
def test_a_lying_manifest_is_refused(tmp_path, edit, message):
    run = build()
    run[3].save(tmp_path / "a")
    path = tmp_path / "a" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    edit(manifest)
    manifest["sha256"] = checksum_of(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        run[3].load(tmp_path / "a")


def test_another_model_level_or_place_is_named(tmp_path):
    run = build()
    run[3].save(tmp_path / "a")
    other = nn.Linear(5, 33)
    amp = hs.prepare(other, hs.optim.AdamW(other.parameters()), level="O2", dtype="bf16")
    with pytest.raises(CheckpointError, match="of another model: missing"):
        amp.load(tmp_path / "a")
    with pytest.raises(CheckpointError, match="saved with level O2"):
        build("O1")[3].load(tmp_path / "a")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        run[3].load(tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"0 schedulers, 1 were given"):
        run[3].load(tmp_path / "a", schedulers=[run[2]])


def test_a_full_disk_leaves_what_was_there(tmp_path):
    run = build()
    run[3].save(tmp_path / "a", extra=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"no room for it: about [\d,]+ bytes are needed"):
            run[3].save(tmp_path / "a", extra=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert run[3].load(tmp_path / "a").extra == 1


class Named(nn.Module):
    """Module names that are also the words of the files."""

    def __init__(self):
        super().__init__()
        self.optimizer, self.rank, self.rest = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x):
        return self.rest(self.rank(self.optimizer(x)))


def test_modules_may_be_named_like_the_parts_of_a_checkpoint(tmp_path):
    def run():
        model = Named()
        optimizer = hs.optim.AdamW(model.parameters(), lr=0.1)
        return model, hs.prepare(model, optimizer, level="O2", dtype="bf16")

    (model, amp), (other, again) = run(), run()
    amp.backward(model(torch.ones(2, 3)).float().sum())
    amp.step()
    amp.save(tmp_path / "a")
    again.load(tmp_path / "a")
    for one, two in zip(model.parameters(), other.parameters()):
        assert torch.equal(one, two)


def test_any_flipped_bit_of_the_manifest_is_found(tmp_path):
    run = build()
    run[3].save(tmp_path / "a", extra={"lr": 0.5})
    path = tmp_path / "a" / "manifest.json"
    data = path.read_bytes()
    other = build(seed=3)
    before = values(other)
    for number in range(60):
        changed = bytearray(data)
        changed[(number * 7919) % len(data)] ^= 1 << number % 7
        path.write_bytes(changed)
        with pytest.raises(CheckpointError):
            other[3].load(tmp_path / "a")
    assert_same(before, values(other))
    path.write_bytes(data)
    assert other[3].load(tmp_path / "a").extra == {"lr": 0.5}


def test_a_save_in_the_background_is_of_the_moment_of_the_call(tmp_path):
    run, held = build(), []
    train(run, range(2))
    run[3].save(tmp_path / "step-1", schedulers=[run[2]], background=True)
    before = values(run)
    train(run, range(2, 4))
    run[3].save(tmp_path / "step-2", schedulers=[run[2]], background=True, keep_last=1)
    held.append(values(run))
    train(run, range(4, 6))
    run[3].wait_until_saved()
    assert [p.name for p in tmp_path.iterdir()] == ["step-2"]
    again = build(seed=5)
    again[3].load(tmp_path / "step-2", schedulers=[again[2]])
    assert_same(held[0], values(again))
    assert before[0].keys() == held[0][0].keys()
    train(again, range(4, 6))
    assert_same(values(run), values(again))


def test_what_fails_in_the_background_is_told_at_the_next_call(tmp_path, capfd):
    run = build()
    run[3].save(tmp_path / "a", extra=1)
    with pytest.raises(
        CheckpointError, match="keep_last=2 for a: expected a whole number, 1 or more, and a name"
    ):
        run[3].save(tmp_path / "a", keep_last=2, background=True)
    for ask in (
        lambda: run[3].save(tmp_path / "b"),
        lambda: run[3].load(tmp_path / "a"),
        run[3].wait_until_saved,
    ):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            run[3].save(tmp_path / "a", extra=2, background=True)
            with pytest.raises(CheckpointError, match="no room for it"):
                ask()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        run[3].wait_until_saved()
        assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert run[3].load(tmp_path / "a").extra == 1


def test_choices_of_kernels_stand_in_the_manifest(tmp_path):
    def run():
        ops = [Row(ROUNDED, "linear", "bf16", "plain", size, 1, "iw") for size in SIZES]
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return hs.prepare(model, optimizer, kernels=KernelTable(ops))

    first, second = run(), run()
    first.save(tmp_path / "a")
    second.load(tmp_path / "a")
    assert second.state_dict() == first.state_dict()
