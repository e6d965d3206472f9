"""Levels O0 to O3: four rows that say which role each dtype plays.

A level is data; `Level.policy` turns it and a 16-bit dtype into a policy, `Plan.for_level` into a plan. The
words of Lightning and Accelerate ("bf16-mixed", "16-true", "no") name the same rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from halfstep.errors import ConfigError
from halfstep.formats import dtype_name, format_of, parse_dtype
from halfstep.policy.policy import Policy

Role = Literal["full", "low", "as computed"]
LOW_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Level:
    """One row: for each role whether it is fp32 ("full") or the 16-bit dtype ("low"), and what follows.

    cast_ops: ops are cast by the policy's table; without it no op is lifted to fp32. norm_fp32: normalisation
    weights and statistics stay fp32. masters: the optimizer updates fp32 copies. needs_scale_in_fp16: fp16
    comes with a dynamic loss scale. Inputs and buffers are data: no level casts them, ops do where they meet.
    """

    name: str
    param_role: Role
    compute_role: Role
    output_role: Role
    cast_ops: bool
    norm_fp32: bool
    masters: bool
    needs_scale_in_fp16: bool
    summary: str

    def check_dtype(self, dtype: str | torch.dtype | None) -> torch.dtype:
        """Return the compute dtype this level takes from `dtype`; ConfigError for one it cannot run in."""
        if self.compute_role == "full":
            if dtype is not None and dtype_of(dtype) != torch.float32:
                name = dtype_name(dtype_of(dtype))
                raise ConfigError(
                    f"level {self.name} is fp32 throughout, given {name}: leave dtype out, or choose O1 to O3"
                )
            return torch.float32
        if dtype is None:
            raise ConfigError(f"level {self.name} needs a 16-bit dtype: give fp16 or bf16")
        parsed = dtype_of(dtype)
        if parsed not in LOW_DTYPES:
            name = dtype_name(parsed)
            raise ConfigError(f"level {self.name} runs in fp16 or bf16, given {name}: level O0 is fp32")
        return parsed

    def policy(self, dtype: str | torch.dtype | None = None, table: str | None = None) -> Policy:
        """Return the policy of this level for `dtype` (fp16 or bf16; None at O0).

        table: None takes "halfstep", or "low", which lifts nothing to fp32, where the level casts no ops.
        """
        low = self.check_dtype(dtype)
        outputs: dict[Role, torch.dtype | None] = {"full": torch.float32, "low": low, "as computed": None}
        lifts = self.cast_ops or low == torch.float32
        return Policy(
            param_dtype=low if self.param_role == "low" else torch.float32,
            compute_dtype=low,
            output_dtype=outputs[self.output_role],
            table=table if table is not None else ("halfstep" if lifts else "low"),
        )

    def needs_scale(self, dtype: str | torch.dtype | None) -> bool:
        """Return whether this level in this dtype comes with a dynamic loss scale."""
        return self.needs_scale_in_fp16 and self.check_dtype(dtype) == torch.float16


def _row(name: str, roles: tuple[Role, Role, Role], flags: str, summary: str) -> Level:
    names = ("cast_ops", "norm_fp32", "masters", "needs_scale_in_fp16")
    return Level(name, *roles, **{flag: flag in flags.split() for flag in names}, summary=summary)


LEVELS: Mapping[str, Level] = MappingProxyType(
    {
        level.name: level
        for level in (
            _row("O0", ("full", "full", "as computed"), "", "fp32 throughout"),
            _row(
                "O1",
                ("full", "low", "as computed"),
                "cast_ops needs_scale_in_fp16",
                "fp32 weights; each op runs in the precision its rule gives",
            ),
            _row(
                "O2",
                ("low", "low", "full"),
                "cast_ops norm_fp32 masters needs_scale_in_fp16",
                "16-bit weights with fp32 masters; normalisation fp32; outputs fp32",
            ),
            _row(
                "O3",
                ("low", "low", "as computed"),
                "",
                "weights and ops in 16 bits, no masters, no loss scale",
            ),
        )
    }
)

WORDS: Mapping[str, tuple[str, torch.dtype | None]] = MappingProxyType(
    {
        **dict.fromkeys(("32-true", "32", "fp32", "float32", "no"), ("O0", None)),
        **dict.fromkeys(("16-mixed", "16", "fp16", "float16"), ("O1", torch.float16)),
        **dict.fromkeys(("bf16-mixed", "bf16", "bfloat16"), ("O1", torch.bfloat16)),
        **dict.fromkeys(("16-true", "fp16-true"), ("O3", torch.float16)),
        "bf16-true": ("O3", torch.bfloat16),
    }
)


def dtype_of(x: str | torch.dtype) -> torch.dtype:
    """Return the dtype that a name or a torch dtype given as dtype= means.

    Raises:
        ConfigError: there is none; the message offers those that a level computes in.
    """
    try:
        format_of(x)
    except ConfigError:
        near = difflib.get_close_matches(str(x).lower(), ("fp16", "half", "float16", "bf16", "bfloat16"), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"unknown number format {x!r} as dtype=: a level computes in fp16 or bf16, O0 in fp32{hint}"
        ) from None
    return parse_dtype(x)


def level_of(word: str | int | Level | None) -> tuple[Level, torch.dtype | None]:
    """Return the level that a name or a word of Lightning or Accelerate means, and the dtype it fixes.

    "O2" -> (O2, None); "bf16-mixed" -> (O1, bfloat16); "16-true" -> (O3, float16); 32 -> (O0, None).
    Raises ConfigError for anything else, None included.
    """
    if isinstance(word, Level):
        return word, None
    if word is None:
        raise ConfigError(f"level=None: expected one of {', '.join(LEVELS)}; leave it out for O1")
    text = str(word).strip()
    if text.upper() in LEVELS:
        return LEVELS[text.upper()], None
    if text.lower() in WORDS:
        name, dtype = WORDS[text.lower()]
        return LEVELS[name], dtype
    if f"O{text}" in LEVELS:
        raise ConfigError(f"unknown level {word!r}: did you mean 'O{text}', with the letter O?")
    if len(text) == 2 and text[0] == "0":
        raise ConfigError(f"unknown level {text!r}: it begins with the letter O, as in O{text[1]}")
    near = difflib.get_close_matches(text.lower(), list(WORDS), n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(
        f"unknown level {text!r}: expected one of {', '.join(LEVELS)}, a word such as bf16-mixed, or "
        f"'auto' where the choice can be measured{hint}"
    )
