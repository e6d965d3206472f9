"""Write docs/api.md from signatures and docstrings: python docs/generate_api.py."""

import enum
import importlib
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import halfstep as hs

HEAD = """\
# The API

Generated from the docstrings by `python docs/generate_api.py`; do not edit. Of methods it has the first
paragraph: `help(name)` shows all. Words are explained in [Concepts](concepts.md).
"""
MODULES = (
    "halfstep.devices",
    "halfstep.formats",
    "halfstep.doctor",
    "halfstep.optim",
    "halfstep.distributed",
    "halfstep.numerics.histogram",
    "halfstep.numerics.watch",
    "halfstep.numerics.trace",
    "halfstep.numerics.lint",
    "halfstep.numerics.replayable",
    "halfstep.conformance",
    "halfstep.trainer",
    "halfstep.checkpoint",
)
PARAMETER = inspect.Parameter
MODULE_NAMES = re.compile(
    r"\b(collections\.abc|typing|torch\.nn\.modules\.module|torch\.optim\.optimizer|halfstep(\.\w+)*)\.(?=\w)"
)


def type_text(annotation: object) -> str:
    """An annotation as it is written, without module names."""
    if annotation is type(None):
        return "None"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return MODULE_NAMES.sub("", text)


def default_text(value: object) -> str:
    """A default as it is written in a call."""
    if isinstance(value, enum.Enum):
        return str(value)
    if repr(value).startswith("<"):
        return "..."
    return repr(value)


def parameter_text(parameter: inspect.Parameter) -> str:
    """One parameter of a signature."""
    stars = {PARAMETER.VAR_POSITIONAL: "*", PARAMETER.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not PARAMETER.empty:
        text += f": {type_text(parameter.annotation)}"
    if parameter.default is not PARAMETER.empty:
        joint = " = " if parameter.annotation is not PARAMETER.empty else "="
        text += joint + default_text(parameter.default)
    return text


def options_of(parameter: inspect.Parameter) -> list[str]:
    """The keywords that `**options: Unpack[SomeTypedDict]` stands for; none where it is anything else."""
    given = typing.get_args(parameter.annotation)
    if parameter.kind is not PARAMETER.VAR_KEYWORD or not given or not typing.is_typeddict(given[0]):
        return []
    return [f"{name}: {type_text(kind)} = ..." for name, kind in given[0].__annotations__.items()]


def parameters_text(thing: Any, *, bound: bool = False) -> tuple[list[str], str]:
    """The parameters of a signature, one text each, and the result; `bound` drops the first one."""
    signature = inspect.signature(thing)
    given = list(signature.parameters.values())[1 if bound else 0 :]
    parts: list[str] = []
    for i, parameter in enumerate(given):
        keyword_only = parameter.kind is PARAMETER.KEYWORD_ONLY
        after_star = any(p.kind in (PARAMETER.VAR_POSITIONAL, PARAMETER.KEYWORD_ONLY) for p in given[:i])
        options = options_of(parameter)
        parts += ["*"] if (keyword_only or options) and not after_star else []
        parts += options or [parameter_text(parameter)]
    result = signature.return_annotation
    return parts, "" if result in (inspect.Signature.empty, None, "None") else f" -> {type_text(result)}"


def signature_text(thing: Any, *, bound: bool = False) -> str:
    """`(x: int, *, y: str = "a") -> bool` on one line; `bound` drops the first parameter."""
    parts, arrow = parameters_text(thing, bound=bound)
    return f"({', '.join(parts)}){arrow}"


def signature_block(name: str, thing: Any) -> list[str]:
    """The signature as code, a line for each parameter where one line would be too long."""
    parts, arrow = parameters_text(thing)
    arrow = "" if inspect.isclass(thing) else arrow
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) > 90:
        line = "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){arrow}"])
    return ["```text", line, "```", ""]


SECTION = re.compile(r"^(Args|Raises|Returns|Yields):$")


def sections(thing: Any) -> tuple[str, dict[str, list[tuple[str, str]]]]:
    """A docstring: its text without sections, and the (name, text) entries of each section."""
    text: list[str] = []
    found: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] | None = None
    for line in inspect.cleandoc(own_doc(thing)).splitlines():
        header = SECTION.match(line)
        if header:
            current = found.setdefault(header[1], [])
        elif current is None or (line and not line.startswith(" ")):
            current = None
            text.append(line)
        elif entry := re.match(r" {4}(\*{0,2}\w+): (.*)", line):
            current.append((entry[1], entry[2]))
        elif line.strip() and current:
            current[-1] = (current[-1][0], f"{current[-1][1]} {line.strip()}")
    return "\n".join(text), found


def own_doc(thing: Any) -> str:
    """The docstring of a thing itself, not one that it inherits."""
    return (vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__) or ""


def body(thing: Any) -> list[str]:
    """A docstring as markdown: paragraphs, examples as code, and a list for each section."""
    text, found = sections(thing)
    arguments = found.setdefault("Args", [])
    made = getattr(thing.__init__ if inspect.isclass(thing) else thing, "__annotations__", {})
    for kind in map(typing.get_args, made.values()):  # `**options: Unpack[SomeTypedDict]`
        if len(kind) == 1 and typing.is_typeddict(kind[0]):
            arguments += sections(kind[0])[1].get("Args", [])
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        code = block.lstrip().startswith(">>>")
        lines += ["```pycon", inspect.cleandoc(block), "```", ""] if code else [escaped(block), ""]
    for title, entries in found.items():
        if entries:
            shown = "Arguments" if title == "Args" else title
            lines += [f"{shown}:", "", *(f"- `{name}`: {escaped(words)}" for name, words in entries), ""]
    return lines


def paragraph(thing: Any) -> str:
    """The first paragraph of a docstring on one line, safe for markdown outside of code spans."""
    return escaped((inspect.getdoc(thing) or "").split("\n\n")[0])


def escaped(text: str) -> str:
    """Text on one line, in which only code spans are markdown."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(p if p.startswith("`") else re.sub(r"[*<]", r"\\\g<0>", p) for p in parts)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class of ours defines or inherits from one of ours."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("halfstep"):
            continue
        for name, member in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            function = getattr(member, "__func__", member)
            if isinstance(member, property) or inspect.isfunction(function):
                yield name, member


def member_line(name: str, member: Any) -> str:
    """One bullet for one method or property."""
    if isinstance(member, property):
        return f"- `{name}`: {paragraph(member)}"
    bound = not isinstance(member, staticmethod)
    function = getattr(member, "__func__", member)
    return f"- `{name}{signature_text(function, bound=bound)}`: {paragraph(function)}"


def class_lines(name: str, cls: type) -> list[str]:
    """A class: how it is made, what it is, what it offers."""
    if issubclass(cls, enum.Enum):
        return [f"### `{name}`", "", paragraph(cls), "", *(f"- `{name}.{row.name}`" for row in cls), ""]
    if issubclass(cls, Exception):
        bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
        return [f"### `{name}`", "", f"{paragraph(cls)} Bases: {bases}.", ""]
    made = [] if getattr(cls, "_is_protocol", False) else signature_block(name, cls)
    bullets = [member_line(*member) for member in members(cls)]
    return [f"### `{name}`", "", *made, *body(cls), *(["Members:", "", *bullets, ""] if bullets else [])]


def entry(name: str, thing: Any) -> list[str]:
    """What the page says about one public name."""
    if inspect.isclass(thing):
        return class_lines(name, thing)
    if isinstance(thing, ModuleType):
        return [f"### `{name}`", "", f"{paragraph(thing)} See [below](#{anchor(thing.__name__)}).", ""]
    if isinstance(thing, Mapping):
        return [f"### `{name}`", "", f"A table with the rows {', '.join(f'`{key}`' for key in thing)}.", ""]
    if not inspect.isroutine(thing):
        return [f"### `{name}`", "", f"The {'type' if callable(thing) else 'constant'} `{thing}`.", ""]
    return [f"### `{name}`", "", *signature_block(name, thing), *body(thing)]


def anchor(heading: str) -> str:
    """The link target of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions, classes and tables in `__all__`, or the functions and classes a module defines."""
    named = getattr(module, "__all__", None)
    names = [
        name
        for name, thing in vars(module).items()
        if (name in named if named else not name.startswith("_"))
        and (module is hs or inspect.isclass(thing) or inspect.isfunction(thing))
        and (named or thing.__module__ == module.__name__)
    ]
    for name in sorted(names, key=lambda n: (n.lower(), n)):
        yield name, getattr(module, name)


def page() -> str:
    """The whole page as markdown."""
    lines = [HEAD, "## halfstep", "", "`import halfstep as hs`", ""]
    for name, thing in public(hs):
        lines += entry(name, thing)
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        lines += [f"## {module_name}", "", paragraph(module), ""]
        for name, thing in public(module):
            known = getattr(hs, name, None) is thing
            lines += [f"`{name}`: see above.", ""] if known else entry(name, thing)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("api.md").write_text(page(), encoding="utf-8")
