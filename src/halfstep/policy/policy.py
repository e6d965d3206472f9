"""A precision policy: dtypes by role, a rule table by name, and edits to that table.

A policy is an immutable, hashable value with a one-line text form ("p=fp32,c=bf16,o=fp32"). It decides only;
`casting/` runs ops under it and `convert/` applies its parameter dtype.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, cast

import torch

from halfstep.errors import ConfigError, show
from halfstep.formats import dtype_name, parse_dtype
from halfstep.policy import op_names, ops
from halfstep.policy.op_names import canonical_op
from halfstep.policy.ops import OpRow, Rule
from halfstep.trees import cast_floats

P = ParamSpec("P")
R = TypeVar("R")
OpLike = str | Callable[..., Any]

_ROLE_KEYS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("p", "param", "params"), "param_dtype"),
        **dict.fromkeys(("c", "compute"), "compute_dtype"),
        **dict.fromkeys(("o", "output"), "output_dtype"),
    }
)
_GRAMMAR = (
    "a policy reads like 'p=fp32,c=bf16,o=fp32', with optional 'table=NAME' and 'full=op+op' "
    "(also low, fp32_out, keep, widest, banned); or is one dtype, or one table name"
)
_DICT_GRAMMAR = (
    "a policy's dict reads like {'table': 'mlu', 'full': ['exp', 'tanh']} or "
    "{'exp': 'full', 'matmul': 'low'}, rules being low, fp32_out, full, keep, widest, banned"
)


@dataclass(frozen=True)
class Policy:
    """Dtypes by role plus the rules that ops run under.

    param_dtype: what weights are stored in. compute_dtype: what LOW ops run in, bf16 unless given, whatever
    the device (a table's name alone, policy="mlu", asks the device). output_dtype: what
    `cast_to_output` gives, None to leave outputs as computed. (What ranks sum gradients in is DDP's: see
    `hs.distributed.compress_hook`.) table: one of `ops.TABLES`. edits: op name -> rule, overriding the table.
    """

    param_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.bfloat16
    output_dtype: torch.dtype | None = None
    table: str = "halfstep"
    edits: Mapping[str, Rule] = field(default_factory=dict[str, Rule])

    def __post_init__(self) -> None:
        """Check the dtypes and the table name; freeze the edits."""
        for role in ("param_dtype", "compute_dtype"):
            object.__setattr__(self, role, parse_dtype(getattr(self, role)))
        if self.output_dtype is not None:
            object.__setattr__(self, "output_dtype", parse_dtype(self.output_dtype))
        ops.rows(self.table)
        edits = validate_edits(self.edits)
        for name in edits:
            _check_canonical(name)
        object.__setattr__(self, "edits", MappingProxyType(dict(sorted(edits.items()))))

    def __hash__(self) -> int:
        roles = (self.param_dtype, self.compute_dtype, self.output_dtype)
        return hash((*roles, self.table, tuple(self.edits.items())))

    def __reduce__(self) -> tuple[Any, ...]:
        roles = (self.param_dtype, self.compute_dtype, self.output_dtype)
        return (Policy, (*roles, self.table, dict(self.edits)))

    def __str__(self) -> str:
        parts = [f"p={dtype_name(self.param_dtype)}", f"c={dtype_name(self.compute_dtype)}"]
        if self.output_dtype is not None:
            parts.append(f"o={dtype_name(self.output_dtype)}")
        if self.table != "halfstep":
            parts.append(f"table={self.table}")
        for rule in Rule:
            names = [name for name, edit in self.edits.items() if edit is rule]
            if names:
                parts.append(f"{rule.value}={'+'.join(names)}")
        return ",".join(parts)

    @classmethod
    def parse(cls, text: str | Policy | Mapping[str, Any]) -> Policy:
        """Read a policy from its text form, or from a dict (`dict_to_text`); a Policy passes through.

        One dtype ("bf16") sets params, compute and output, as in jmp; one table name ("torch") keeps the
        default dtypes. Raises ConfigError for an unknown key, dtype, table or op, or a key given twice.
        """
        if isinstance(text, Policy):
            return text
        if isinstance(text, Mapping):
            return cls.parse(dict_to_text(text)) if text else cls()
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"a policy is a Policy or its text, got {text!r}: {_GRAMMAR}")
        if text.strip() in ops.TABLES:
            return cls(table=text.strip())
        if "=" not in text:
            try:
                dtype = parse_dtype(text)
            except ConfigError as error:
                raise ConfigError(f"unknown policy {text!r}: {_GRAMMAR} ({', '.join(ops.TABLES)})") from error
            return cls(dtype, dtype, dtype)
        roles: dict[str, Any] = {}
        rules: dict[str, list[str]] = {}
        for part in text.split(","):
            key, equals, value = (word.strip() for word in part.partition("="))
            name = _ROLE_KEYS.get(key, key)
            if not equals or not value or name in roles or name in rules:
                raise ConfigError(f"cannot read {part.strip()!r} in policy {text!r}: {_GRAMMAR}")
            if name in _ROLE_KEYS.values():
                roles[name] = parse_dtype(value)
            elif name == "table":
                roles[name] = value
            elif name in {rule.value for rule in Rule}:
                rules[name] = value.split("+")
            else:
                raise ConfigError(f"unknown key {key!r} in policy {text!r}: {_GRAMMAR}")
        return cls(**roles).with_rules(**rules)

    def with_dtype(self, compute_dtype: str | torch.dtype) -> Policy:
        """Return this policy with another compute dtype."""
        return replace(self, compute_dtype=parse_dtype(compute_dtype))

    def with_rules(
        self,
        low: Iterable[OpLike] = (),
        full: Iterable[OpLike] = (),
        keep: Iterable[OpLike] = (),
        widest: Iterable[OpLike] = (),
        banned: Iterable[OpLike] = (),
        fp32_out: Iterable[OpLike] = (),
    ) -> Policy:
        """Return this policy with rules set for ops given by name, torch function, method or own function.

        Each argument is a rule (see `Rule`) and takes the ops that get it.
        Own Python functions must be decorated with `halfstep.op`. Raises ConfigError for an op that does not
        exist (with close matches) and for an op named under two rules.
        """
        ops_of = {Rule.LOW: low, Rule.FULL: full, Rule.KEEP: keep, Rule.WIDEST: widest, Rule.BANNED: banned}
        ops_of[Rule.FP32_OUT] = fp32_out
        edits: dict[str, Rule] = {}
        for rule, named in ops_of.items():
            if not isinstance(named, Iterable):
                raise ConfigError(f"{rule.value}={show(named)}: expected a list of ops, by name or function")
            for op_like in [named] if isinstance(named, str) else named:
                name = _resolve(op_like)
                if edits.setdefault(name, rule) is not rule:
                    raise ConfigError(
                        f"op {name!r} is named under both {edits[name].value} and {rule.value}: keep one"
                    )
        return replace(self, edits={**self.edits, **edits})

    def rule_of(self, op_name: OpLike, device_type: str | None = None) -> Rule | None:
        """Return the rule of an op by name or function, None for one that runs in whatever it is given.

        ConfigError for an op that does not exist.
        """
        rows = self.rows(device_type)
        has_row = isinstance(op_name, str) and op_name in rows
        row = rows.get(cast("str", op_name) if has_row else _resolve(op_name))
        return None if row is None else row.rule

    def rows(self, device_type: str | None = None) -> Mapping[str, OpRow]:
        """Return the rows in force by op name: the table, resolved for the compute dtype, then the edits."""
        if device_type is not None and not isinstance(device_type, str):
            raise ConfigError(f"a device type is a word such as 'cpu' or 'cuda', got {device_type!r:.60}")
        return _rows_in_force(self, device_type)

    def cast_to_param(self, tree: Any) -> Any:
        """Cast the floating tensors of a tree of lists, tuples and dicts to the parameter dtype."""
        return cast_floats(tree, self.param_dtype)

    def cast_to_compute(self, tree: Any) -> Any:
        """Cast the floating tensors of a tree to the compute dtype."""
        return cast_floats(tree, self.compute_dtype)

    def cast_to_output(self, tree: Any) -> Any:
        """Cast the floating tensors of a tree to the output dtype; the tree itself when that is None."""
        return tree if self.output_dtype is None else cast_floats(tree, self.output_dtype)


def names_dtype(policy: str | Policy | Mapping[str, Any] | None) -> bool:
    """Whether a policy names the dtype to compute in; a table's name or a text without c= does not."""
    if isinstance(policy, Mapping):
        return any(_ROLE_KEYS.get(key) == "compute_dtype" for key in policy)
    if policy is None or policy in ops.TABLES:
        return False
    if isinstance(policy, Policy) or "=" not in policy:
        return True
    keys = (part.partition("=")[0].strip() for part in policy.split(","))
    return any(_ROLE_KEYS.get(key, key) == "compute_dtype" for key in keys)


def dict_to_text(entries: Mapping[str, Any]) -> str:
    """Return the text form of a policy that came as a dict, not yet checked: `Policy.parse` reads it.

    Keys are those of the text ("table", "compute" ...), a rule over its ops ("full": ["exp", "tanh"]), or an
    op beside its rule ("exp": "full"). Raises ConfigError for anything else.
    """
    parts, ops_of = list[str](), dict[str, list[str]]()
    rules = {rule.value for rule in Rule}
    for key, value in entries.items():
        word = value.value if isinstance(value, Rule) else value
        if key in rules and not isinstance(word, str) and isinstance(word, Iterable):
            ops_of.setdefault(key, []).extend(_resolve(op) for op in cast("Iterable[OpLike]", word))
        elif key in rules and isinstance(word, str):
            ops_of.setdefault(key, []).append(word)
        elif key in _ROLE_KEYS and isinstance(value, torch.dtype):
            parts.append(f"{key}={dtype_name(value)}")
        elif (key == "table" or key in _ROLE_KEYS) and isinstance(word, str):
            parts.append(f"{key}={word}")
        elif isinstance(word, str) and word in rules:
            ops_of.setdefault(word, []).append(_resolve(key))
        else:
            raise ConfigError(f"{key!r}: {value!r:.60}: {_DICT_GRAMMAR}")
    return ",".join([*parts, *(f"{rule}={'+'.join(named)}" for rule, named in ops_of.items() if named)])


def validate_edits(edits: Any) -> Mapping[str, Rule]:
    """Edits to an op table as they were given; ConfigError unless they map op names to rules."""
    if not isinstance(edits, Mapping):
        raise ConfigError(f"edits of ops map names to rules, such as {{'exp': Rule.FULL}}, got {edits!r:.60}")
    for name, rule in cast("Mapping[object, object]", edits).items():
        if not isinstance(name, str) or not isinstance(rule, Rule):
            raise ConfigError(f"edit {name!r}: {rule!r:.60}: expected an op's name and a Rule, Rule.FULL say")
    return cast("Mapping[str, Rule]", edits)


def _check_canonical(name: str) -> None:
    """Raise ConfigError for an edit that would never take effect.

    An own function, or an op of another library, may be known where the policy goes or comes from.
    """
    foreign = ("." in name or "::" in name) and canonical_op(name) is None
    if not foreign and (op_name := _resolve(name)) != name:
        raise ConfigError(
            f"edit {name!r}: the op is called {op_name!r}; or use with_rules(), which knows both"
        )


@functools.lru_cache(maxsize=256)
def _rows_in_force(policy: Policy, device_type: str | None) -> Mapping[str, OpRow]:
    in_force: dict[str, OpRow] = {}
    for name, row in ops.rows(policy.table, device_type).items():
        in_force[name] = replace(row, rule=row.rule_for(policy.compute_dtype), only_in=None)
    for name, rule in policy.edits.items():
        in_force[name] = OpRow(name, rule, "set by with_rules", name in ops.TAKES_DTYPE and rule is Rule.FULL)
    return MappingProxyType(in_force)


def _resolve(op_like: OpLike) -> str:
    if not isinstance(op_like, str) and not callable(op_like):
        raise ConfigError(f"got {op_like!r:.60} for an op: expected its name or function")
    name = canonical_op(op_like)
    if name is not None:
        return name
    shown = op_like if isinstance(op_like, str) else getattr(op_like, "__name__", repr(op_like))
    module = "" if isinstance(op_like, str) else getattr(op_like, "__module__", None) or ""
    if callable(op_like) and not module.startswith("torch"):
        raise ConfigError(
            f"{shown!r} is not a torch op: decorate the function with @halfstep.op to give it a rule"
        )
    near = difflib.get_close_matches(shown.rpartition(".")[2], op_names.list_names(), n=4, cutoff=0.6)
    hint = f"did you mean {', '.join(near)}?" if near else "see docs/ops.md for the names"
    raise ConfigError(f"unknown op {shown!r}: expected the name of an aten op; {hint}")
