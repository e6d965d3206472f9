"""Trainers over ranks: where they end, who is told what, means over the samples of all, checkpoints."""

import shutil

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import halfstep as hs
from tests.ranks import run


class Stream:
    """Batches without a length, `count` of them in a pass."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter([(torch.ones(4, 3), torch.ones(4, 1))] * self.count)


class StopAtPass(hs.trainer.Callback):
    def on_epoch_end(self, trainer):
        trainer.stop("one pass")


def trained(rank, counts, trace):
    torch.manual_seed(3)
    model = nn.Linear(3, 1)
    trainer = hs.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, dtype="bf16", wrap=DDP,
        callbacks=[StopAtPass()], trace=trace, progress=False,
    )  # fmt: skip
    history = trainer.fit(Stream(counts[rank]), steps=9)
    return trainer.step, history.stopped


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("counts", [(3, 3), (5, 3)])
def test_ranks_stop_together_where_one_of_them_is_asked_to(counts, trace):
    (step, stopped), (other, why) = run(trained, 2, counts, trace)
    assert (step, other) == (4, 4)
    assert {stopped, why} <= {"one pass", "another rank stopped"}


X, Y = torch.randn(30, 3, generator=torch.Generator().manual_seed(1)), torch.arange(30).remainder(4)
SHARES = [[slice(0, 8), slice(8, 16), slice(16, 20)], [slice(20, 25), slice(25, 30)], []]


def classifier(**options):
    torch.manual_seed(3)
    model = nn.Linear(3, 4)
    options = {"metrics": {"accuracy": hs.trainer.accuracy}, "progress": False, "kernels": "native"} | options
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return hs.Trainer(model, optimizer, nn.functional.cross_entropy, dtype="bf16", **options)


class Noted:
    def __init__(self):
        self.logged = []

    def log(self, step, values):
        self.logged.append(values)


def evaluated(rank):
    noted = Noted()
    trainer = classifier(wrap=DDP, loggers=[noted])
    values = trainer.evaluate([(X[own], Y[own]) for own in SHARES[rank]])
    part = trainer.evaluate([(X[own], Y[own]) for own in SHARES[2 * rank]])
    with pytest.raises(hs.DataError, match="the loader gave no batches"):
        trainer.evaluate([])
    return values, part, noted.logged[0]


def stopped_early(rank):
    stopping = hs.trainer.EarlyStopping([(X[own], Y[own]) for own in SHARES[rank]], patience=1, least=0.05)
    trainer = classifier(wrap=DDP, callbacks=[stopping])
    history = trainer.fit([(X[:4], Y[:4])], epochs=20)
    return trainer.step, stopping.best, history.stopped


def uneven(rank):
    trainer = classifier(wrap=DDP)
    batches = [(X[:2], Y[:2])] * (4 - 2 * rank)
    with pytest.raises(hs.DataError) as by_epochs:
        trainer.fit(batches, epochs=2)
    history = trainer.fit(batches, steps=5)
    return str(by_epochs.value), history.stopped, trainer.step


def everything(rank):
    return evaluated(rank), stopped_early(rank), uneven(rank)


@pytest.fixture(scope="module")
def on_ranks():
    return list(zip(*run(everything, 2)))


def test_evaluate_gives_every_rank_the_mean_over_the_samples_of_all(on_ranks):
    first, second = on_ranks[0]
    assert first == second
    whole, part, logged = first
    alone = classifier().evaluate([(X[own], Y[own]) for share in SHARES for own in share])
    assert whole == pytest.approx(alone, rel=1e-12)
    assert logged == {"test loss": whole["loss"], "test accuracy": whole["accuracy"]}
    assert part == classifier().evaluate([(X[own], Y[own]) for own in SHARES[0]])


def test_early_stopping_decides_alike_on_every_rank(on_ranks):
    first, second = on_ranks[1]
    assert first == second
    assert first[0] < 20
    assert "has not improved" in first[2]


def test_uneven_loaders_are_refused_on_every_rank_before_the_first_step(on_ranks):
    first, second = on_ranks[2]
    assert first == second
    assert "different steps (rank 0 after 8, rank 1 after 4)" in first[0]
    assert first[1:] == ("", 5)


def left_early(rank):
    model = DDP(nn.Linear(3, 1))
    done = []
    try:
        with hs.distributed.watchdog(lambda: len(done)):
            for _ in range(4 - 2 * rank):
                model(torch.ones(2, 3)).sum().backward()
                done.append(1)
    except hs.RankError as error:
        return str(error)
    return "ended"


def test_a_rank_that_ended_before_the_others_is_named_and_not_called_killed():
    first, second = run(left_early, 2)
    assert second == "ended"
    assert "rank 1 had ended (at step 2)" in first
    assert "out of batches" in first


def one_process(folder=None):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return hs.Trainer(
        model, optimizer, nn.functional.mse_loss, level="O2", dtype="bf16", scheduler=scheduler,
        checkpoints=folder, progress=False, trace=False,
    )  # fmt: skip


def weights(trainer):
    return hs.optim.fp32_state_dict(trainer.model, trainer.optimizer)


def test_session_load_reads_a_trainer_s_checkpoint_and_no_single_file(tmp_path):
    trainer, other = one_process(tmp_path), one_process()
    trainer.fit(Stream(2), steps=1)
    loaded = other.amp.load(trainer.save(), schedulers=[other.scheduler])
    assert loaded.extra == {"step": 1, "epoch": 0}
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(trainer).items())
    torch.save({}, tmp_path / "one.pt")
    with pytest.raises(hs.errors.CheckpointError, match=r"is one file; .* reads the folders"):
        trainer.amp.load(tmp_path / "one.pt")


def saved_over_ranks(rank, folder, way):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = nn.Linear(3, 4)
    if way == "shards":
        fully_shard(model)
    optimizer = hs.optim.AdamW(model.parameters(), lr=0.1)
    trainer = hs.Trainer(
        model, optimizer, nn.functional.cross_entropy, dtype="bf16", progress=False, kernels="native",
        wrap=DDP if way == "ddp" else None, checkpoints=folder, checkpoint_every=2,
    )  # fmt: skip
    share = [(X[own], Y[own]) for own in SHARES[0]]
    first = trainer.fit(share, steps=7, resume=True).steps[0].step
    values = hs.optim.fp32_state_dict(model, optimizer)
    return first, {name: hs.distributed.local_of(t).clone() for name, t in values.items()}


def stopped_and_resumed(rank, folder):
    found = []
    for way in ("ddp", "shards"):
        whole = saved_over_ranks(rank, f"{folder}/{way}", way)
        if rank == 0:
            shutil.rmtree(f"{folder}/{way}/step-00000006")
            shutil.rmtree(f"{folder}/{way}/step-00000004")
        torch.distributed.barrier()
        found.append((whole, saved_over_ranks(rank, f"{folder}/{way}", way)))
    return found


def test_ranks_save_by_the_session_and_resume_as_if_never_stopped(tmp_path):
    for own in run(stopped_and_resumed, 2, str(tmp_path)):
        for (began, whole), (resumed_at, resumed) in own:
            assert (began, resumed_at) == (1, 3)
            assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
