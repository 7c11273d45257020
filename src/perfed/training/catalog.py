"""The methods there are, read from their files as text: no torch, no running of anybody's code, until one is used.

Only the files that are named are read, with those of the methods they derive from; a list of all methods reads all.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from perfed.core.errors import Problem, nearest
from perfed.core.fields import Evaluates, convert
from perfed.discover import describe, load_file, load_member, parse

METHODS = Path(__file__).parent.parent / "methods"
BASE = Path(__file__).parent.parent / "core" / "method.py"
DESCRIBED = "After the description of"  # so the reference begins of a method whose own paper or code nobody has read


@dataclass(frozen=True)
class Field:
    """One hyper-parameter."""

    name: str
    kind: Any
    default: Any
    meaning: str
    bounds: dict[str, float]

    @property
    def range(self) -> str:
        """Say in words what is allowed."""
        if isinstance(self.kind, type):
            return " and ".join(f"{word} {bound:g}" for word, bound in self.bounds.items())
        return "one of " + ", ".join(self.kind.__args__)

    @property
    def type(self) -> str:
        return self.kind.__name__ if isinstance(self.kind, type) else "choice"


@dataclass(frozen=True)
class Entry:
    """One method: a file and the class in it."""

    name: str
    file: Path
    class_name: str
    doc: str
    fields: dict[str, Field]
    evaluates: str
    category: str
    vectorised: bool
    mixture: bool
    warms_up: str
    public: str

    @property
    def shipped(self) -> bool:
        """Tell a method that comes with perfed from a user's file."""
        return self.file.parent == METHODS

    @property
    def title(self) -> str:
        """The name as the paper writes it."""
        return self.doc.strip().partition(":")[0]

    @property
    def summary(self) -> str:
        """The first line of the file, without the title."""
        return describe(self.doc)

    @property
    def paper(self) -> str:
        """The reference: the docstring's second paragraph, where it names a source."""
        paragraphs = [" ".join(paragraph.split()) for paragraph in self.doc.strip().split("\n\n")]
        return paragraphs[1] if len(paragraphs) > 1 and "http" in paragraphs[1] else ""

    @property
    def described(self) -> bool:
        """Whether the rule is known from descriptions alone, neither from the paper's own text nor from its code."""
        return self.paper.startswith(DESCRIBED)

    def check(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return settings of the right types and inside their ranges; refuse others."""
        checked = {}
        for key, value in settings.items():
            if key not in self.fields:
                raise Problem(f"method '{self.name}' has no setting '{key}'{nearest(key, self.fields)}")
            field = self.fields[key]
            checked[key] = convert(value, field.kind, field.bounds, f"{self.name}.{key}")
        return checked

    def load(self) -> Any:
        """Return the class itself; imports torch and runs the file."""
        try:
            module = load_member("perfed.methods", self.name) if self.shipped else load_file(self.file)
        except Problem as problem:
            if "non-frozen dataclass" not in str(problem):
                raise
            raise Problem(f"'{self.file}': {self.class_name} needs @dataclass(frozen=True), not @dataclass") from None
        kind = getattr(module, self.class_name)
        try:
            kind.refuse_undeclared()
        except Problem as problem:
            raise Problem(f"'{self.file}': {problem}") from None
        return kind


def names() -> list[str]:
    """Return the names of the methods that come with perfed."""
    return sorted(path.stem for path in METHODS.glob("*.py") if path.stem != "__init__")


def methods() -> dict[str, Entry]:
    """Return every method that comes with perfed, by name."""
    return {name: _shipped(METHODS / f"{name}.py") for name in names()}


def is_file(name: Any) -> bool:
    """Tell the path of a user's file from the name of a method."""
    return isinstance(name, str) and (name.endswith(".py") or "/" in name)


def find(name: str) -> Entry:
    """Return a method by its name, or by the path of a file."""
    if is_file(name):
        path = Path(name).expanduser()
        if not path.is_file():
            raise Problem(f"there is no method file '{name}'")
        return _read(path.resolve())
    if name not in names():
        own = f"; did you mean './{name}.py'?" if Path(f"{name}.py").is_file() else nearest(name, names())
        raise Problem(f"there is no method '{name}'{own}")
    return _shipped(METHODS / f"{name}.py")


@cache
def common() -> dict[str, Field]:
    """Return the hyper-parameters that every method has."""
    return _classes(BASE)["Method"].fields


class _Class(NamedTuple):
    """A method's class as its file defines it, with what it inherits."""

    constants: dict[str, Any]
    fields: dict[str, Field]


# constants of a method's class
_DEFAULTS = {"evaluates": "own", "category": "", "vectorised": True, "mixture": False, "warms_up": "", "public": ""}


def _read(path: Path) -> Entry:
    tree = parse(path)
    classes = _defined(tree, path)
    if not classes:
        raise Problem(f"'{path}' holds no method: a class that derives from Method or from another method")
    class_name, (constants, fields) = list(classes.items())[-1]
    doc = ast.get_docstring(tree) or f"{class_name}: no description."
    return Entry(path.stem, path, class_name, doc, fields=fields, **constants)


_shipped = cache(_read)  # perfed's own files stay as they are; a user's may change between two calls


@cache
def _classes(path: Path) -> dict[str, _Class]:
    """Return the methods that one of perfed's own files defines."""
    return _defined(parse(path), path)


def _defined(tree: ast.Module, path: Path) -> dict[str, _Class]:
    """Return the methods that a file defines, by the names of their classes."""
    known, own = _imported(tree, path), {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in known]
        if not bases and node.name != "Method":
            continue
        constants, fields = map(dict, known[bases[0]] if bases else (_DEFAULTS, {}))
        for line in node.body:
            try:
                if (name := _name_given(line)) in _DEFAULTS:
                    constants[name] = ast.literal_eval(line.value)  # pyright: ignore
                if name == "evaluates":
                    convert(constants[name], Evaluates, {}, f"'{path}', line {line.lineno}: evaluates")
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
                    field = _field(line.target.id, line.annotation, line.value)
                    if field is not None:
                        fields[field.name] = field
            except (ValueError, TypeError, IndexError):  # the file is read, not run: a name or a sum has no value yet
                text = 'a setting must be a plain value, or hyper(plain value, "meaning", ...)'
                raise Problem(f"'{path}', line {line.lineno}: {text}") from None
        known[node.name] = own[node.name] = _Class(constants, fields)
    return own


def _name_given(line: ast.stmt) -> str:
    """Return the name that a line gives a value to; empty if it gives none."""
    if isinstance(line, ast.Assign):
        return ast.unparse(line.targets[0])
    return ast.unparse(line.target) if isinstance(line, ast.AnnAssign) and line.value is not None else ""


def _imported(tree: ast.Module, path: Path) -> dict[str, _Class]:
    """Return the methods that a file imports: `from perfed.methods.fedavg import FedAvg` makes FedAvg a base."""
    known = {}
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        if module in ("perfed", "perfed.core.method"):
            source = BASE
        elif module.startswith("perfed.methods.") and not module.startswith("perfed.methods.shared."):
            source = METHODS / f"{module.removeprefix('perfed.methods.')}.py"
            if not source.is_file():
                raise Problem(f"'{path}' imports {module}, which does not exist")
        else:
            continue
        classes = _classes(source)
        known |= {alias.asname or alias.name: classes[alias.name] for alias in node.names if alias.name in classes}
    return known


_KINDS = {"float": float, "int": int, "bool": bool, "str": str}


def _field(name: str, annotation: ast.expr, value: ast.expr) -> Field | None:
    """Read a hyper-parameter; None where the field is something else, such as the model."""
    text = ast.unparse(annotation)
    if text.startswith("Literal["):
        kind: Any = Literal[ast.literal_eval("(" + text.removeprefix("Literal[").removesuffix("]") + ",)")]
    elif text in _KINDS:
        kind = _KINDS[text]
    else:
        return None
    meaning, bounds = "", {}
    if isinstance(value, ast.Call):
        meaning = ast.literal_eval(value.args[1])
        given = {(word.arg or "").replace("_", " "): ast.literal_eval(word.value) for word in value.keywords}
        bounds = {word: bound for word, bound in given.items() if word != "toy"}  # which is the contract's
        value = value.args[0]
    return Field(name, kind, ast.literal_eval(value), meaning, bounds)
