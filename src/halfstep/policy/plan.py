"""A plan: which module gets which precision, and why, as a list of rules that reads and writes TOML.

A rule names modules by a glob over their path or by class, or buffers by path. Rules are ranked, so that
their order in the file does not matter; a rule that matches nothing and two of equal rank are errors.
`convert/` applies plans.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from halfstep.errors import ConfigError, PlanError
from halfstep.formats import dtype_name, parse_dtype
from halfstep.names import NORMALISATIONS, fqns
from halfstep.policy.levels import LOW_DTYPES, Level, level_of
from halfstep.policy.ops import Rule
from halfstep.policy.policy import Policy, validate_edits
from halfstep.policy.settings import Settings, check_table

Rank = tuple[int, int, int, bool]
_TYPE = "type:"
_MODULE_RULES = (Rule.FULL, Rule.LOW, Rule.KEEP)
NORM_PATTERNS = tuple(f"{_TYPE}{name}" for name in NORMALISATIONS)
ORTHOGONAL = "type:_Orthogonal"  # torch.nn.utils.parametrizations.orthogonal


@dataclass(frozen=True)
class PlanRule:
    """What the modules that `pattern` matches get, and why. The rule reaches everything below a match.

    pattern: a module path in which `*`, `?` and `[...]` match within one component and `**` any number of
    components ("encoder", "blocks.*.attn", "**.head", "**"); or "type:" and a class name or glob, compared
    with the module's class and its bases ("type:LayerNorm", "type:*Norm"). A path whose last component is
    written out may also be a buffer's ("head.center", "**.center"); the rule's dtype is then the buffer's.
    dtype: parameters and floating buffers are stored in it; None leaves them. A module in fp32 also computes
    in fp32, unless `rule`, `output` or `ops` say otherwise: its inputs are widened, its output not rounded.
    One in fp64 computes in fp64 and gives out fp32, or what `output` says.
    rule: what the module's ops do: FULL runs them in fp32, LOW in the compute dtype, KEEP as given.
    ops: edits to the op table inside the module.
    required: False lets the rule match nothing; level defaults are such and yield to required equals.
    output: the dtype of the module's floating outputs. fp32 beside 16-bit weights: the products in it take
    16-bit inputs, add up in fp32 and give out fp32 (`Rule.FP32_OUT`), as a language model's head or a router
    of experts wants. A 16-bit one: its result is rounded at its edge.
    buffers: False leaves floating buffers out of `dtype`, as levels do.
    One rule holds for a module, whole: what it leaves unset stays as the module has it; with `output` alone
    weights are stored as they would be without it.
    Raises PlanError for a pattern that cannot be read, a dtype that no module computes in, and a rule that
    sets nothing.
    """

    pattern: str
    dtype: torch.dtype | None = None
    rule: Rule | None = None
    reason: str = ""
    ops: Mapping[str, Rule] = field(default_factory=dict[str, Rule])
    required: bool = True
    output: torch.dtype | None = None
    buffers: bool = True

    def __post_init__(self) -> None:
        """Check the pattern and the values; freeze the op edits."""
        body = self.pattern.removeprefix(_TYPE) if isinstance(self.pattern, str) else ""
        if not body or (body == self.pattern and "" in body.split(".")):
            raise PlanError(
                f"cannot read plan pattern {self.pattern!r}: expected a module path such as 'blocks.*.attn', "
                "'**' for all, or 'type:LayerNorm'"
            )
        for name in ("dtype", "output"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, self._parsed(name))
        if self.rule is not None and self.rule not in _MODULE_RULES:
            detail = f"given {self.rule!r:.60}"
            raise PlanError(
                f"plan rule {self.pattern!r}: a module can be Rule.FULL, Rule.LOW or Rule.KEEP, {detail}"
            )
        if not isinstance(self.reason, str):
            raise PlanError(f"plan rule {self.pattern!r}: reason={self.reason!r:.60}: expected a text")
        if edits := validate_edits(self.ops):
            named = {rule.value: [op for op, edit in edits.items() if edit is rule] for rule in Rule}
            edits = Policy().with_rules(**named).edits
        object.__setattr__(self, "ops", MappingProxyType(dict(edits)))
        if self.dtype is None and self.rule is None and self.output is None and not self.ops:
            raise PlanError(f"plan rule {self.pattern!r} sets nothing: give it a dtype, rule, output or ops")
        if self.rule is Rule.FULL and self.ops:
            raise PlanError(
                f"plan rule {self.pattern!r}: rule=FULL runs all ops of the module in fp32, so that ops= has "
                "no effect: leave one of the two out"
            )
        if self.dtype == torch.float64 and (self.ops or self.rule is not None):
            raise PlanError(
                f"plan rule {self.pattern!r}: a module in fp64 computes in fp64, so that rule= and ops= have "
                "no effect: leave them out"
            )
        if self.dtype is None and not self.buffers:
            raise PlanError(f"plan rule {self.pattern!r}: buffers=False without a dtype leaves nothing out")

    def _parsed(self, name: str) -> torch.dtype:
        dtype = parse_dtype(getattr(self, name))
        fits = (torch.float32, *LOW_DTYPES, *((torch.float64,) if name == "dtype" else ()))
        if dtype not in fits:
            words = ", ".join(sorted(map(dtype_name, fits)))
            raise PlanError(
                f"plan rule {self.pattern!r}: {name}={dtype_name(dtype)}: expected one of {words}"
            )
        return dtype

    def _values(self) -> tuple[Any, ...]:
        before = (self.pattern, self.dtype, self.rule, self.reason)
        return (*before, tuple(self.ops.items()), self.required, self.output, self.buffers)

    def __hash__(self) -> int:
        return hash(self._values())

    def __reduce__(self) -> tuple[Any, ...]:
        pattern, dtype, rule, reason, edits, *rest = self._values()
        return (PlanRule, (pattern, dtype, rule, reason, dict(edits), *rest))

    def _with_storage_of(self, other: PlanRule) -> PlanRule:
        return replace(self, dtype=other.dtype, buffers=other.buffers)

    @property
    def computes(self) -> Rule | None:
        """What the module's ops do: `rule`; FULL if stored in fp64, or stored and given out in fp32."""
        wide = self.dtype == torch.float32 and self.output in (None, torch.float32) and not self.ops
        wide = wide or self.dtype == torch.float64
        return Rule.FULL if self.rule is None and wide else self.rule

    def rank(self, path: str, module: nn.Module) -> Rank | None:
        """Return how closely this rule matches a module at `path` (higher wins), or None.

        From the closest: (4) the path itself, written out; (3) a glob that matches the path; (2) a class, the
        nearest base first; (0) the pattern "**". `Plan.resolve` adds (1), a rule that matches a module above.
        Among equals more literal characters win, then required rules over defaults.
        """
        if self.pattern == "**":
            return (0, 0, 0, self.required)
        if self.pattern.startswith(_TYPE):
            name_pattern = self.pattern.removeprefix(_TYPE)
            names = [base.__name__ for base in type(module).__mro__ if base not in (nn.Module, object)]
            hits = [i for i, name in enumerate(names) if fnmatchcase(name, name_pattern)]
            return (2, -hits[0], _literals(self.pattern), self.required) if hits else None
        if self.pattern == path:
            return (4, 0, _literals(self.pattern), self.required)
        matches = _globs(self.pattern.split("."), path.split(".") if path else [])
        return (3, 0, _literals(self.pattern), self.required) if matches else None

    def names(self, buffer: str) -> bool:
        """Whether the pattern is a path that ends in the name of this buffer, and gives it a dtype."""
        *above, last = self.pattern.split(".")
        path = buffer.split(".")
        return self.dtype is not None and last == path[-1] and _globs(above, path[:-1])


def _literals(pattern: str) -> int:
    """Return how many characters of a pattern stand for themselves."""
    return len(re.sub(r"\[[^\]]*\]|[*?]", "", pattern))


def _globs(pattern: list[str], path: list[str]) -> bool:
    """Whether components match; in time of their product, however many `**` there are."""
    reached = {0}
    for part in pattern:
        if part == "**":
            reached = set(range(min(reached), len(path) + 1)) if reached else reached
        else:
            reached = {i + 1 for i in reached if i < len(path) and fnmatchcase(path[i], part)}
    return len(path) in reached


@dataclass(frozen=True)
class Plan:
    """Rules that together give every module its precision. An immutable value; `+` adds rules.

    settings: level, dtype, layout and whether to compile, which the rules were made for, or None;
        `prepare(plan=...)` takes them.
    """

    rules: tuple[PlanRule, ...] = ()
    settings: Settings | None = None

    def __post_init__(self) -> None:
        """Freeze the rules; refuse a pattern written twice."""
        if not isinstance(self.rules, list | tuple) or not all(isinstance(r, PlanRule) for r in self.rules):
            raise PlanError(f"a plan is a list of PlanRule, got {self.rules!r:.60}")
        object.__setattr__(self, "rules", tuple(self.rules))
        keys: set[tuple[str, bool]] = set()
        for rule in self.rules:
            key = (rule.pattern, rule.required)
            if key in keys:
                raise PlanError(f"two plan rules have the pattern {rule.pattern!r}: merge them into one")
            keys.add(key)

    @classmethod
    def empty(cls) -> Plan:
        """Return the plan that changes nothing."""
        return cls()

    @classmethod
    def for_level(cls, level: str | Level, dtype: str | torch.dtype | None = None) -> Plan:
        """Return the rules a level stands for: none at O0 and O1, which leave modules as they are."""
        row, fixed = level_of(level)
        low = row.check_dtype(dtype if dtype is not None else fixed)
        if row.param_role == "full":
            return cls()
        reason = f"{row.name}: {row.summary}"
        rules = [PlanRule("**", dtype=low, reason=reason, required=False, buffers=False)]
        if row.norm_fp32:
            reason = f"{row.name}: fp32 weights and statistics cost little and keep small updates"
            rules += [
                PlanRule(pattern, dtype=torch.float32, reason=reason, required=False, output=low)
                for pattern in NORM_PATTERNS
            ]
        reason = "torch has no LU and QR in 16 bits, and its matrix exponential gives gradients of NaN there"
        rules.append(PlanRule(ORTHOGONAL, rule=Rule.FULL, reason=reason, required=False, output=low))
        return cls(tuple(rules))

    def with_rules(self, *rules: PlanRule) -> Plan:
        """Return this plan with rules added."""
        return Plan((*self.rules, *rules), self.settings)

    def __add__(self, other: Plan) -> Plan:
        if not isinstance(other, Plan):
            raise PlanError(f"a plan adds a plan, got {other!r:.60}: give single rules to with_rules()")
        return Plan((*self.rules, *other.rules), other.settings or self.settings)

    def __bool__(self) -> bool:
        return bool(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def resolve(self, model: nn.Module) -> Mapping[str, PlanRule]:
        """Return the rule that holds for each module, by module path; modules without one are absent.

        The same for buffers that a rule names; others are their module's. The root's path is "". Wrappers
        of DDP and torch.compile do not count in patterns. Raises PlanError for a required rule that matches
        nothing, for two rules of equal rank on one module, and for one shared under two paths whose rules
        differ.
        """
        if not isinstance(model, nn.Module):
            raise PlanError(f"a plan is resolved for a torch.nn.Module, got {type(model).__name__}")
        modules = dict(model.named_modules(remove_duplicate=False))
        public = fqns(modules)
        matched: set[PlanRule] = set()
        resolved: dict[str, PlanRule] = {}
        owner: dict[int, str] = {}
        for path, module in modules.items():
            ranks = [(rule.rank(public[path], module), rule) for rule in self.rules]
            matches = [(rank, rule) for rank, rule in ranks if rank is not None]
            matched.update(rule for _, rule in matches)
            above = resolved.get(_nearest_above(path, resolved))
            if above is not None and above.dtype == torch.float64:  # all of it, norms too
                matches = [(rank, rule) for rank, rule in matches if rule.required]
            chosen = _closest(matches, public[path], above)
            if (
                chosen is not None
                and chosen is not above
                and chosen.dtype is None
                and chosen.output is not None
            ):
                rest = [(rank, rule) for rank, rule in matches if rule is not chosen]
                stored = _closest(rest, public[path], above)  # an output alone says nothing of weights
                chosen = chosen if stored is None else chosen._with_storage_of(stored)
            if chosen is not None:
                resolved[path] = chosen
            first = owner.setdefault(id(module), path)
            if resolved.get(first) != chosen:
                raise PlanError(
                    f"one module is shared as {first!r} and {path!r}, but {_text(resolved.get(first))} "
                    f"holds for the first and {_text(chosen)} for the second: give both the same rule"
                )
        resolved.update(self._of_buffers(modules, owner, public, matched))
        for rule in self.rules:
            if rule.required and rule not in matched:
                raise PlanError(_no_match(rule, public.values(), modules.values()))
        return MappingProxyType(resolved)

    def _of_buffers(
        self,
        modules: Mapping[str, nn.Module],
        owner: Mapping[int, str],
        public: Mapping[str, str],
        matched: set[PlanRule],
    ) -> dict[str, PlanRule]:
        """Return the rules that name buffers, by the path under which a buffer's module is found first."""
        rules: dict[str, PlanRule] = {}
        candidates = [rule for rule in self.rules if rule.dtype is not None and rule.required]
        for path, module in modules.items() if candidates else ():
            for key in module._buffers:
                shown = f"{public[path]}.{key}".lstrip(".")
                matches = [(_rank_of_name(rule), rule) for rule in candidates if rule.names(shown)]
                matched.update(rule for _, rule in matches)
                chosen = _closest(matches, shown, None)
                place = f"{owner[id(module)]}.{key}".lstrip(".")
                if chosen is not None and rules.setdefault(place, chosen) is not chosen:
                    raise PlanError(
                        f"buffer {place!r} is shared as {shown!r}, and {_text(rules[place])} holds for the "
                        f"first, {_text(chosen)} for the second: give both the same rule"
                    )
        return rules

    def to_toml(self) -> str:
        """Return the plan as TOML that `from_toml` reads back to an equal plan."""
        tables = ["# A halfstep plan: [[rule]] tables, each a pattern, what it sets and why.\n"]
        if self.settings is not None:
            tables += [toml_table("[settings]", self.settings.to_table())]
            tables += [toml_table("[[measured]]", vars(row)) for row in self.settings.measured]
        return "\n".join(tables + [_rule_to_toml(rule) for rule in self.rules])

    @classmethod
    def from_toml(cls, text: str) -> Plan:
        """Read a plan; PlanError names the rule and key that cannot be read."""
        if not isinstance(text, str):
            raise PlanError(f"a plan is read from TOML text, got {type(text).__name__}: read the file first")
        try:
            document = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise PlanError(f"this plan is not TOML: {error}") from error
        tables = document.pop("rule", [])
        settings, measured = document.pop("settings", None), document.pop("measured", [])
        if document or not isinstance(tables, list):
            extra = ", ".join(map(repr, document)) or "a [rule] table"
            raise PlanError(f"a plan holds [[rule]] tables, [settings] and [[measured]] only, given {extra}")
        rules = tuple(_rule_from_toml(table, index) for index, table in enumerate(tables, 1))
        return cls(rules, None if settings is None else Settings.from_tables(settings, measured))

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """Read a plan from a TOML file; PlanError names the file where it cannot be read."""
        try:
            return cls.from_toml(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the plan {path}: {error}") from error
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error


def _rank_of_name(rule: PlanRule) -> Rank:
    """Return how closely a rule names a buffer: a path written out first, then more literal characters."""
    literal = _literals(rule.pattern)
    return (4 if literal == len(rule.pattern) else 3, 0, literal, rule.required)


def _nearest_above(path: str, resolved: Mapping[str, PlanRule]) -> str:
    while path:
        path = path.rpartition(".")[0]
        if path in resolved:
            return path
    return ""


def _closest(matches: list[tuple[Rank, PlanRule]], path: str, above: PlanRule | None) -> PlanRule | None:
    """Choose among a module's own matches and the rule of the nearest module above."""
    matches = sorted(matches, key=lambda pair: pair[0], reverse=True)
    if len(matches) > 1 and matches[0][0] == matches[1][0]:
        first, second = matches[0][1].pattern, matches[1][1].pattern
        raise PlanError(
            f"plan rules {first!r} and {second!r} match {path!r} equally closely: "
            f"write one of them more closely, or add a rule for {path!r} itself"
        )
    if matches and (matches[0][0][0] > 1 or above is None):
        return matches[0][1]
    return above


def _text(rule: PlanRule | None) -> str:
    return "no rule" if rule is None else f"rule {rule.pattern!r}"


def _no_match(rule: PlanRule, paths: Iterable[str], modules: Iterable[nn.Module]) -> str:
    if rule.pattern.startswith(_TYPE):
        names = sorted({type(module).__name__ for module in modules})
        near = difflib.get_close_matches(rule.pattern.removeprefix(_TYPE), names, n=3) or names[:8]
        return f"plan rule {rule.pattern!r} matches no module; classes in this model: {', '.join(near)}"
    names = [path for path in paths if path]
    near = difflib.get_close_matches(rule.pattern, names, n=3) or names[:8]
    return f"plan rule {rule.pattern!r} matches no module; module paths in this model: {', '.join(near)}"


_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def _toml(value: Any) -> str:
    """Return a text (every control character escaped), a flag, a number, or a table of texts in one line."""
    if isinstance(value, str):
        written = (_ESCAPES.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in value)
        return f'"{"".join(written)}"'
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_toml(key)} = {_toml(item)}' for key, item in value.items())} }}"
    return str(value).lower() if isinstance(value, bool) else format(float(value), ".6g")


def toml_table(head: str, values: Mapping[str, Any]) -> str:
    """Write a table; what is None is left out."""
    lines = [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
    return "\n".join([head, *lines]) + "\n"


def _rule_to_toml(rule: PlanRule) -> str:
    values = {
        "pattern": rule.pattern,
        "dtype": None if rule.dtype is None else dtype_name(rule.dtype),
        "rule": None if rule.rule is None else rule.rule.value,
        "output": None if rule.output is None else dtype_name(rule.output),
        "buffers": None if rule.buffers else False,
        "ops": {name: edit.value for name, edit in rule.ops.items()} or None,
        "required": None if rule.required else False,
        "reason": rule.reason,
    }
    return toml_table("[[rule]]", values)


_KEYS = {
    "pattern": str,
    "dtype": str,
    "rule": str,
    "reason": str,
    "ops": dict,
    "required": bool,
    "output": str,
    "buffers": bool,
}


def _rule_from_toml(table: Any, index: int) -> PlanRule:
    where = f"rule {index} of the plan"
    values = check_table(where, table, _KEYS)
    try:
        if "rule" in values:
            values["rule"] = _rule_word(values["rule"])
        values["ops"] = {name: _rule_word(word) for name, word in values.get("ops", {}).items()}
        return PlanRule(**values)
    except ConfigError as error:
        raise PlanError(f"{where}: {error}") from error


def _rule_word(word: Any) -> Rule:
    words = [rule.value for rule in Rule]
    if word not in words:
        raise PlanError(f"unknown rule {word!r}: expected one of {', '.join(words)}")
    return Rule(word)
