"""Models of transformers, made from a config: rotary positions, gradients of normalisations and tables."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import halfstep as hs

BF16 = torch.bfloat16
POSITION = 4096
ROTARY = ["Llama", "Qwen2", "Gemma"]


def tiny(name: str, **options: Any) -> nn.Module:
    """One layer of width 32, without dropout."""
    torch.manual_seed(0)
    widths = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(**widths | options)
    for key in vars(config):
        if "drop" in key and isinstance(getattr(config, key), float):
            setattr(config, key, 0.0)
    return getattr(transformers, f"{name}Model")(config)


class Phases(TorchFunctionMode):
    """Keeps what is given to `cos`."""

    seen: Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.cos, Tensor.cos):
            self.seen = args[0].detach()
        return func(*args, **(kwargs or {}))


def rotary(name: str, level: str) -> tuple[Tensor, Tensor]:
    """Phases, and the cosines that attention is given, of one token at the position."""
    model = tiny(
        name, vocab_size=64, num_key_value_heads=2, head_dim=64, max_position_embeddings=2 * POSITION
    )
    dtype = None if level == "O0" else "bf16"
    amp = hs.prepare(model, hs.optim.SGD(model.parameters(), lr=0.1), level=level, dtype=dtype)
    given: list[Tensor] = []
    model.rotary_emb.register_forward_hook(lambda module, args, out: given.append(out[0].detach().float()))
    with Phases() as phases, amp.autocast():
        model(torch.zeros(1, 1, dtype=torch.long), position_ids=torch.full((1, 1), POSITION))
    return phases.seen.double(), given[0]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_positions_are_those_of_fp32(name, level):
    phases, cosines = rotary(name, "O0")
    low_phases, low_cosines = rotary(name, level)
    assert float(phases.max()) >= POSITION
    assert float((low_phases - phases).abs().max()) <= 1e-3
    assert float((low_cosines - cosines).abs().max()) <= 5e-3


ROWS = 65536
TEXT = {"vocab_size": 64, "max_position_embeddings": 160}
TEXTS: dict[str, dict[str, Any]] = {
    "Bert": TEXT,
    "Roberta": TEXT,
    "Electra": {**TEXT, "embedding_size": 32},
    "Albert": {**TEXT, "embedding_size": 32},
    "DistilBert": {**TEXT, "dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2},
    "GPT2": {**TEXT, "n_embd": 32, "n_layer": 1, "n_head": 2},
    "OPT": {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "GPTNeoX": TEXT,
    "Phi": {**TEXT, "num_key_value_heads": 2},
    "CLIPText": {**TEXT, "projection_dim": 32},
}
IMAGES: dict[str, dict[str, Any]] = {
    "ViT": {"image_size": 32, "patch_size": 4},
    "Dinov2": {"image_size": 32, "patch_size": 4},
}


class Sums:
    """What gradients of normalisations and tables are in fp64, of the values that they were given."""

    def __init__(self, model: nn.Module) -> None:
        self.right: dict[Tensor, Tensor] = {}
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.register_forward_hook(self.normalised)
            elif type(module).forward is nn.Embedding.forward:
                module.register_forward_hook(self.looked_up)

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        self.right[weight] = self.right.get(weight, 0) + gradient

    def normalised(self, module: nn.LayerNorm, args: tuple[Tensor, ...], out: Tensor) -> None:
        x = args[0].detach()

        def arrived(grad: Tensor) -> None:
            g, wide = (t.double().reshape(-1, x.shape[-1]) for t in (grad, x))
            self.add(
                module.weight, (g * nn.functional.layer_norm(wide, wide.shape[1:], eps=module.eps)).sum(0)
            )
            self.add(module.bias, g.sum(0))

        out.register_hook(arrived)

    def looked_up(self, module: nn.Embedding, args: tuple[Tensor, ...], out: Tensor) -> None:
        def arrived(grad: Tensor) -> None:
            index = args[0].expand(grad.shape[:-1]).reshape(-1)
            rows = torch.zeros(module.weight.shape, dtype=torch.float64)
            rows.index_add_(0, index, grad.double().reshape(len(index), -1))
            if module.padding_idx is not None:
                rows[module.padding_idx] = 0
            self.add(module.weight, rows)

        if out.requires_grad:
            out.register_hook(arrived)


def of_text(name: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    index = torch.randint(4, 64, (ROWS // 128, 128), generator=torch.Generator().manual_seed(0))
    return tiny(name, **TEXTS[name]), lambda model: model(index).last_hidden_state


def of_images(name: str) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    images = torch.randn(ROWS // 64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return tiny(name, **IMAGES[name]), lambda model: model(images).last_hidden_state


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", [*TEXTS, *IMAGES])
def test_gradients_of_normalisations_and_tables_over_65536_rows(name, level):
    model, run = of_text(name) if name in TEXTS else of_images(name)
    sums = Sums(model)
    amp = hs.prepare(model, hs.optim.SGD(model.parameters(), lr=0.1), level=level, dtype="bf16")
    with amp.autocast():
        out = run(model).float()
        loss = (out * torch.linspace(0.25, 0.75, out.numel()).view_as(out)).sum()
    amp.backward(loss)
    assert out.shape[0] * out.shape[1] >= ROWS
    assert len(sums.right) >= 4
    for weight, right in sums.right.items():
        assert float((weight.grad.double() - right).norm() / right.norm()) < 1e-2


def trained_gpt2(level: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of normalisations in fp32, before and after 60 steps of SGD on a made-up text."""
    torch.manual_seed(0)
    widths = {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**widths, **drops))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if "ln_" in n}
    optimizer = hs.optim.SGD(model.parameters(), lr=0.02)
    amp = hs.prepare(model, optimizer, level=level, dtype=None if level == "O0" else "bf16")
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        tokens = [torch.randint(0, 64, (32,), generator=generator)]
        for _ in range(63):
            tokens.append((tokens[-1] * 5 + 1) % 64)
        index = torch.stack(tokens, 1)
        with amp.autocast():
            loss = model(input_ids=index, labels=index).loss
        amp.backward(loss)
        amp.step()
    after = hs.optim.fp32_state_dict(model, optimizer)
    return before, {n: after[n] for n in before}


@pytest.mark.long
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_norms_of_gpt2_move_as_in_fp32(level):
    start, right = trained_gpt2("O0")
    for name, got in trained_gpt2(level)[1].items():
        assert float((got - right[name]).norm() / (right[name] - start[name]).norm()) < 0.02, name
