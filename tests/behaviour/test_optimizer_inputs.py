"""torch's own inputs for its generic optimizer tests drive ours beside torch's, in fp32: equal, or refused.

The counts are printed in docs/coverage.md, between its marks;
`python -m tests.behaviour.test_optimizer_inputs` writes them anew.
"""

from __future__ import annotations

import collections
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import optim_db

from halfstep.errors import HalfstepError
from halfstep.optim import SGD, Adam, AdamW

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
MARKS = ("<!-- optimizers -->", "<!-- end of optimizers -->")
OURS = {"AdamW": AdamW, "Adam": Adam, "SGD": SGD}
#: Of how far a weight moved, and of the weight itself: torch's own fp32 arithmetic is as far from exact.
MOVED, ROUNDED = 1e-4, 2.0**-20
HOW = ("foreach", "fused", "capturable")
"""torch's words for how a step runs, of which there is one here."""
OF_TENSORS: list[dict[str, Any]] = [
    {"lr": torch.tensor(0.001), "betas": (torch.tensor(0.9), torch.tensor(0.99))},
    {"lr": torch.tensor(0.001), "betas": (torch.tensor([[[0.9]]]), torch.tensor([[0.99]])), "amsgrad": True},
]


@dataclass(frozen=True, eq=False)
class Case:
    """One way to build both optimizers and one thing that is done with them."""

    kind: str
    theirs: Any
    kwargs: dict[str, Any]
    what: str

    def __str__(self) -> str:
        given = ", ".join(f"{k}={v}" for k, v in self.kwargs.items()) or "defaults"
        return f"{self.kind}({given}): {self.what}"


def inputs_of(kind: str, info: Any) -> Iterator[dict[str, Any]]:
    """Keyword arguments of torch's inputs for a CPU, and those of tensors that it has for CUDA."""
    for given in info.optim_inputs_func(device="cpu", dtype=torch.float32):
        yield {k: v for k, v in given.kwargs.items() if k not in HOW}
    yield from OF_TENSORS if kind != "SGD" else []


def cases() -> list[Case]:
    infos = {info.optim_cls.__name__: info for info in optim_db if info.optim_cls.__name__ in OURS}
    return [
        Case(kind, info.optim_cls, kwargs, what)
        for kind, info in infos.items()
        for kwargs in inputs_of(kind, info)
        for what in SCENES
    ]


# ---- what is done with them: torch's generic tests, in spirit ---------------------------------------------


def weights(count: int = 3) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    shapes = [(10, 5), (7,), (3, 2, 2)][:count]
    return [nn.Parameter(torch.randn(s, generator=g)) for s in shapes]


def give(params: list[nn.Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g)


def steps(make: Any, kwargs: dict[str, Any]) -> list[nn.Parameter]:
    params = weights()
    optimizer = make(params, **kwargs)
    for step in range(5):
        give(params, step)
        optimizer.step()
    return params


def groups(make: Any, kwargs: dict[str, Any]) -> list[nn.Parameter]:
    params = weights()
    optimizer = make([{"params": params[:1], "lr": 1e-2}, {"params": params[1:2]}], **kwargs)
    optimizer.add_param_group({"params": params[2:], "weight_decay": 0.2})
    for step in range(5):
        give(params, step)
        optimizer.step()
    return params


def closures(make: Any, kwargs: dict[str, Any]) -> list[nn.Parameter]:
    params = weights()
    optimizer = make(params, **kwargs)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum(((p - 1) ** 2).sum() for p in params)
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss

    for _ in range(4):
        assert optimizer.step(closure) > 0
    return params


def reload(make: Any, kwargs: dict[str, Any]) -> list[nn.Parameter]:
    params = weights()
    optimizer = make(params, **kwargs)
    for step in range(6):
        give(params, step)
        optimizer.step()
        if step == 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = make(params, **kwargs)
            optimizer.load_state_dict(state)
    return params


def schedule(make: Any, kwargs: dict[str, Any]) -> list[nn.Parameter]:
    params = weights()
    optimizer = make(params, **kwargs)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(5):
        give(params, step)
        optimizer.step()
        scheduler.step()
    return params


def absent(make: Any, kwargs: dict[str, Any]) -> list[nn.Parameter]:
    """Parameters without a gradient: for a while, always, and one without elements."""
    params = weights()
    still, none = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.empty(0))
    optimizer = make([*params, still, none], **kwargs)
    for step in range(5):
        give(params, step)
        none.grad = torch.empty(0)
        if step == 2:
            params[1].grad = None
        optimizer.step()
    return [*params, still]


def strided(make: Any, kwargs: dict[str, Any]) -> list[nn.Parameter]:
    """Weights and gradients in other memory orders."""
    params = weights()
    params[0] = nn.Parameter(params[0].detach().t().contiguous().t())
    optimizer = make(params, **kwargs)
    for step in range(5):
        give(params, step)
        params[2].grad = torch.stack([torch.full((3, 2, 2), 0.5)] * 2, -1)[..., 0]
        optimizer.step()
    return params


def named(make: Any, kwargs: dict[str, Any]) -> list[nn.Parameter]:
    params = weights()
    optimizer = make([(f"w{i}", p) for i, p in enumerate(params)], **kwargs)
    assert optimizer.param_groups[0]["param_names"] == ["w0", "w1", "w2"]
    for step in range(3):
        give(params, step)
        optimizer.step()
    other = make(params, **kwargs)
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["param_names"] == ["w0", "w1", "w2"]
    give(params, 9)
    other.step()
    return params


def from_torch(make: Any, kwargs: dict[str, Any]) -> list[nn.Parameter]:
    """Three steps of torch's, then three of `make`'s from its checkpoint."""
    return _across(PEER_OF[make], make, kwargs)


def to_torch(make: Any, kwargs: dict[str, Any]) -> list[nn.Parameter]:
    """Three steps of `make`'s, then three of torch's from its checkpoint."""
    return _across(make, PEER_OF[make], kwargs)


PEER_OF: dict[Any, Any] = {
    **{OURS[k]: getattr(torch.optim, k) for k in OURS},
    **{getattr(torch.optim, k): getattr(torch.optim, k) for k in OURS},
}


def _across(first: Any, second: Any, kwargs: dict[str, Any]) -> list[nn.Parameter]:
    params = weights()
    optimizer = first(params, **kwargs)
    for step in range(6):
        if step == 3:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = second(params, **kwargs)
            optimizer.load_state_dict(state)
        give(params, step)
        optimizer.step()
    return params


SCENES: dict[str, Callable[[Any, dict[str, Any]], list[nn.Parameter]]] = {
    scene.__name__: scene
    for scene in (steps, groups, closures, reload, schedule, absent, strided, named, from_torch, to_torch)
}


# ---- the verdict -----------------------------------------------------------------------------------------


def verdict(case: Case) -> str:
    """ "equal", "refused: why", or what is wrong."""
    scene = SCENES[case.what]
    kwargs = {k: v.clone() if isinstance(v, Tensor) else v for k, v in case.kwargs.items()}
    # torch refuses foreach with tensors: its plain loop has the same numbers.
    plain = {k: v.clone() if isinstance(v, Tensor) else v for k, v in case.kwargs.items()}
    theirs = scene(case.theirs, {**plain, "foreach": False})
    try:
        ours = scene(OURS[case.kind], kwargs)
    except HalfstepError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for start, p, q in zip(weights(), ours, theirs):
        bound = MOVED * (q - start).abs().max() + ROUNDED * q.abs().max()
        if not (p - q).abs().max() <= bound:
            return f"off by {(p - q).abs().max().item():.3g} where {bound.item():.3g} is allowed"
    return "equal"


def all_verdicts() -> dict[Case, str]:
    return {case: verdict(case) for case in cases()}


def table(found: dict[Case, str]) -> str:
    """The section of docs/coverage.md."""
    rows: dict[tuple[str, str], collections.Counter[str]] = {}
    for case, said in found.items():
        rows.setdefault((case.kind, case.what), collections.Counter())[said.partition(":")[0]] += 1
    lines = [
        "| optimizer | what is done | cases | equal to torch's | refused in one line |",
        "|---|---|---|---|---|",
    ]
    for (kind, what), count in rows.items():
        lines.append(f"| {kind} | {what} | {count.total()} | {count['equal']} | {count['refused']} |")
    total = collections.Counter(said.partition(":")[0] for said in found.values())
    lines.append(f"| all | | {total.total()} | {total['equal']} | {total['refused']} |")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def found() -> dict[Case, str]:
    return all_verdicts()


def test_every_input_of_torch_s_gives_torch_s_numbers_or_one_line(found: dict[Case, str]):
    wrong = [
        f"{case}: {said}"
        for case, said in found.items()
        if said.partition(":")[0] not in ("equal", "refused")
    ]
    assert not wrong, "\n".join(wrong)
    assert all("\n" not in said for said in found.values())


def test_the_counts_in_the_document_are_these(found: dict[Case, str]):
    text = PAGE.read_text()
    start, end = (text.index(mark) for mark in MARKS)
    assert text[start + len(MARKS[0]) : end].strip().endswith(table(found)), (
        "run python -m tests.behaviour.test_optimizer_inputs"
    )


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("AdamW", {"betas": (1.0, 0.0)}, r"betas\[0\]=1.0"),
    ("AdamW", {"weight_decay": -1}, "weight_decay=-1"),
    ("Adam", {"lr": -1e-2}, "lr=-0.01"),
    ("Adam", {"eps": -1}, "eps=-1"),
    ("SGD", {"momentum": -0.5}, "momentum=-0.5"),
    ("SGD", {"momentum": 0.5, "dampening": 0.5, "nesterov": True}, "nesterov"),
    ("AdamW", {"differentiable": True}, "differentiable=True"),
    ("AdamW", {"amsgrad": True, "state_dtype": "8bit"}, "amsgrad"),
]


@pytest.mark.parametrize(("kind", "kwargs", "message"), WRONG)
def test_wrong_inputs_are_refused_at_construction(kind: str, kwargs: dict[str, Any], message: str):
    with pytest.raises(HalfstepError, match=message):
        OURS[kind](weights(), **kwargs)


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(2, dtype=torch.float64), "float64"),
        (lambda: torch.zeros(2, dtype=torch.complex64), "complex64"),
        (lambda: torch.zeros(4, 4)[:, ::2], "contiguous"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
    ],
)
def test_parameters_that_no_step_updates_are_refused_at_construction(kind: str, make: Any, message: str):
    p = make().requires_grad_()
    with pytest.raises(HalfstepError, match=message):
        OURS[kind]([p])


def test_a_refused_group_is_not_added():
    optimizer = AdamW(weights(1))
    with pytest.raises(HalfstepError, match="float64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("kind", OURS)
def test_groups_carry_torch_s_keys(kind: str):
    ours, theirs = OURS[kind](weights()), PEER_OF[OURS[kind]](weights())
    missing = {k: v for k, v in theirs.param_groups[0].items() if k != "params"}
    assert {k: ours.param_groups[0].get(k, "missing") for k in missing} == missing


def test_numbers_of_numpy_and_torch_are_numbers():
    import numpy as np

    kinds: list[Any] = [np.float32, np.float64, torch.tensor, float]
    results = []
    for number in kinds:
        params = weights(1)
        optimizer = AdamW(params, lr=number(0.125), betas=(number(0.5), number(0.75)), eps=number(0.25))
        for step in range(3):
            give(params, step)
            optimizer.step()
        optimizer.param_groups[0]["weight_decay"] = number(0.5)
        optimizer.step()
        results.append(params[0])
    assert all(torch.equal(results[0], p) for p in results[1:])


def main() -> None:
    """Write the counts into docs/coverage.md; print what is neither equal nor refused."""
    found = all_verdicts()
    for case, said in found.items():
        if said != "equal":
            print(f"{case}: {said}")
    section = f"{MARKS[0]}\n{ABOUT}\n\n{table(found)}\n\n{MARKS[1]}"
    text = PAGE.read_text() if PAGE.exists() else "# Coverage\n"
    pattern = re.compile(re.escape(MARKS[0]) + ".*" + re.escape(MARKS[1]), re.S)
    text = pattern.sub(lambda _: section, text) if MARKS[0] in text else f"{text.rstrip()}\n\n{section}\n"
    PAGE.write_text(text)


ABOUT = """## Optimizers

torch's inputs for its generic optimizer tests (`OptimizerInfo`), in ten scenes. Equal: fp32 weights after 4
to 6 steps are within 1e-4 of how far they moved, plus 2^-20 of their size."""


if __name__ == "__main__":
    main()
