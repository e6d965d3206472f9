"""The detector: its readers, its metric, and two processes that take and skip the same steps."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import detect  # noqa: E402
from detection import data, metrics, model  # noqa: E402

SMALL = [
    "--epochs",
    "1",
    "--batch-size",
    "16",
    "--train-images",
    "64",
    "--image-size",
    "32",
    "--cfg",
    "yolov5n.yaml",
]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def one_of_two(rank: int, port: int, folder: str) -> None:
    """Train as `rank` of two in fp16; rank 1 finds an inf after its third backward."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()})

    def poison(step: int, net: torch.nn.Module) -> None:
        if rank == 1 and step == 2:
            net.head[1].bias.grad[0] = float("inf")

    result = detect.train(detect.arguments([*SMALL, "--amp", "--dtype", "fp16"]), poison)
    Path(folder, f"{rank}.json").write_text(json.dumps([result.taken, result.traffic_share]))
    torch.distributed.destroy_process_group()


@pytest.mark.long
def test_two_processes_skip_the_same_step_and_send_half_the_bytes(tmp_path):
    mp.spawn(one_of_two, (free_port(), str(tmp_path)), nprocs=2)
    (taken, share), (taken_too, _) = (json.loads((tmp_path / f"{r}.json").read_text()) for r in (0, 1))
    assert taken == taken_too
    assert not taken[2]
    assert any(taken)
    assert share <= 0.51


@pytest.mark.exhaustive
def test_two_processes_learn_and_mixed_precision_keeps_the_score():
    scores = {}
    for how in ([], ["--pyamp"]):
        command = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node", "2"]
        command += ["--master_port", str(free_port()), str(EXAMPLES / "detect.py"), "--data", "digits"]
        command += ["--cfg", "yolov5s.yaml", "--weights", "", "--epochs", "6", "--batch-size", "64", *how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        scores[bool(how)] = float(done.stdout.splitlines()[-1].split("mAP@0.5 ")[1].split(",")[0])
    assert scores[False] > 0.5
    assert scores[True] > 0.5
    assert scores[True] > scores[False] - 0.02


def make_images(folder: Path) -> None:
    from PIL import Image

    (folder / "images").mkdir()
    (folder / "labels").mkdir()
    for n in range(5):
        Image.new("RGB", (40, 20), (10 * n, 0, 0)).save(folder / "images" / f"{n}.png")
        (folder / "labels" / f"{n}.txt").write_text("1 0.5 0.25 0.2 0.1\n0 0.75 0.5 0.5 1.0\n")


def test_yolo_and_coco_labels_read_the_same(tmp_path):
    make_images(tmp_path)
    boxes = [{"image_id": n, "category_id": 7, "bbox": [16, 4, 8, 2]} for n in range(5)]
    boxes += [{"image_id": n, "category_id": 3, "bbox": [20, 0, 20, 20]} for n in range(5)]
    table = {
        "images": [{"id": n, "file_name": f"images/{n}.png", "width": 40, "height": 20} for n in range(5)],
        "annotations": boxes,
        "categories": [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}],
    }
    (tmp_path / "coco.json").write_text(json.dumps(table))
    yolo, held_out = data.load(str(tmp_path), 16, 0)
    coco, _ = data.load(str(tmp_path / "coco.json"), 16, 0)
    assert (len(yolo), len(held_out)) == (4, 1)
    assert coco.names == ["cat", "dog"]
    assert torch.equal(yolo.pixels, coco.pixels)
    for a, b in zip(yolo.labels, coco.labels):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "labels" / "1.txt").write_text("1 0.5 7 0.2 0.1\n"), "between 0 and 1"),
        (lambda folder: [p.unlink() for p in (folder / "images").iterdir()], "holds no images"),
    ],
)
def test_bad_labels_are_named(tmp_path, break_it, message):
    make_images(tmp_path)
    break_it(tmp_path)
    with pytest.raises(SystemExit, match=message):
        data.load(str(tmp_path), 16, 0)
    with pytest.raises(SystemExit, match="expected 'digits'"):
        data.load(str(tmp_path / "nowhere"), 16, 0)


def test_average_precision_of_a_case_worked_by_hand():
    truth = [torch.tensor([[0, 0.5, 0.5, 0.2, 0.2], [0, 0.1, 0.1, 0.2, 0.2]])]
    found = [
        torch.tensor(
            [
                [0.9, 0, 0.5, 0.5, 0.2, 0.2],  # hit: precision 1, recall 1/2
                [0.8, 0, 0.9, 0.9, 0.2, 0.2],  # miss: precision 1/2
                [0.7, 0, 0.1, 0.1, 0.2, 0.2],  # hit: precision 2/3, recall 1
            ]
        )
    ]
    assert metrics.mean_average_precision(found, truth, 3) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)


def test_overlap_of_boxes():
    a = torch.tensor([0.5, 0.5, 0.2, 0.2])
    overlap, generalised = model.iou(a, torch.tensor([0.6, 0.5, 0.2, 0.2]))
    assert float(overlap) == pytest.approx(1 / 3, rel=1e-4)
    assert float(generalised) == pytest.approx(1 / 3, rel=1e-4)
    assert float(model.iou(a, torch.tensor([0.9, 0.5, 0.2, 0.2]))[1]) == pytest.approx(-1 / 3, rel=1e-3)
