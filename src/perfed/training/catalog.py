"""The methods there are, read from their files as text: no torch, no running of anybody's code, until one is used."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from perfed.core.errors import Problem, nearest
from perfed.core.fields import convert

HERE = Path(__file__).parent.parent
RUN_SETS = ("seed", "cohort", "population")  # fields of every method that the run fills in


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
        """What is allowed, in words."""
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

    @property
    def summary(self) -> str:
        """The first line of the file, without the name."""
        return self.doc.strip().partition("\n")[0].partition(": ")[2].rstrip(".")

    @property
    def title(self) -> str:
        """The name as the paper writes it."""
        return self.doc.strip().partition(":")[0]

    @property
    def paper(self) -> str:
        """The reference: the docstring's second paragraph, where it names a source."""
        paragraphs = [" ".join(p.split()) for p in self.doc.strip().split("\n\n")]
        return paragraphs[1] if len(paragraphs) > 1 and "http" in paragraphs[1] else ""

    def check(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Settings of the right types and inside their ranges; a Problem otherwise."""
        out = {}
        for key, value in settings.items():
            if key not in self.fields or key in RUN_SETS:
                known = [name for name in self.fields if name not in RUN_SETS]
                raise Problem(f"method '{self.name}' has no setting '{key}'{nearest(key, known)}")
            field = self.fields[key]
            out[key] = convert(value, field.kind, field.bounds, f"{self.name}.{key}")
        return out

    def load(self) -> Any:
        """The class itself; imports torch and runs the file."""
        if self.file.parent == HERE / "methods":
            return getattr(importlib.import_module(f"perfed.methods.{self.name}"), self.class_name)
        return getattr(load_file(self.file), self.class_name)


def load_file(path: Path) -> ModuleType:
    """A user's Python file as a module; what it raises becomes one sentence."""
    name = f"perfed_user_{path.stem}_{abs(hash(str(path.resolve()))):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Problem(f"'{path}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise Problem(f"'{path}' cannot be loaded: {type(error).__name__}: {error}") from error
    return module


@cache
def methods() -> dict[str, Entry]:
    """Every method that comes with perfed, by name."""
    files = sorted(p for p in (HERE / "methods").glob("*.py") if p.stem != "__init__")
    return {path.stem: _read(path) for path in files}


@cache
def common() -> dict[str, Field]:
    """The hyper-parameters that every method has."""
    fields = _classes(HERE / "core" / "method.py")["Method"][1]
    return {name: field for name, field in fields.items() if name not in RUN_SETS}


def find(name: str) -> Entry:
    """A method by its name, or by the path of a file."""
    if name.endswith(".py") or "/" in name:
        path = Path(name).expanduser()
        if not path.is_file():
            raise Problem(f"there is no method file '{name}'")
        return _read(path.resolve())
    if name not in methods():
        raise Problem(f"there is no method '{name}'{nearest(name, methods())}")
    return methods()[name]


_DEFAULTS = {"evaluates": "own", "category": "", "vectorised": True}  # constants of a method's class


def _read(path: Path) -> Entry:
    classes = _classes(path)
    if not classes:
        raise Problem(f"'{path}' holds no method: a class that derives from Method or from another method")
    class_name, (says, fields) = list(classes.items())[-1]
    doc = ast.get_docstring(ast.parse(path.read_text())) or f"{class_name}: no description."
    return Entry(path.stem, path, class_name, doc, fields=fields, **says)


def _classes(path: Path) -> dict[str, tuple[dict[str, Any], dict[str, Field]]]:
    """The methods a file defines: name -> (class constants, fields), with what is inherited."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        where = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise Problem(f"'{path}' is not valid Python{where}") from None
    known: dict[str, tuple[dict[str, Any], dict[str, Field]]] = {}
    for node in tree.body:  # `from perfed.methods.fedavg import FedAvg` makes FedAvg a base
        if isinstance(node, ast.ImportFrom) and node.module in ("perfed", "perfed.core.method"):
            inherited = _classes(HERE / "core" / "method.py")
            known |= {a.asname or a.name: inherited[a.name] for a in node.names if a.name in inherited}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("perfed.methods."):
            base = (node.module or "").removeprefix("perfed.methods.")
            if base.startswith("shared."):  # tools: no class in there is a method
                continue
            if not (HERE / "methods" / f"{base}.py").is_file():
                raise Problem(f"'{path}' imports perfed.methods.{base}, which does not exist")
            inherited = _classes(HERE / "methods" / f"{base}.py")
            known |= {a.asname or a.name: inherited[a.name] for a in node.names if a.name in inherited}
    own = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in known]
        if not bases and node.name != "Method":
            continue
        says, fields = map(dict, known[bases[0]] if bases else (_DEFAULTS, {}))
        for line in node.body:
            try:
                if isinstance(line, ast.Assign) and (name := ast.unparse(line.targets[0])) in _DEFAULTS:
                    says[name] = ast.literal_eval(line.value)
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
                    field = _field(line.target.id, line.annotation, line.value)
                    if field is not None:
                        fields[field.name] = field
            except (ValueError, TypeError, IndexError):  # the file is read, not run: a name or a sum has no value yet
                text = 'a setting must be a plain value, or hyper(plain value, "meaning", ...)'
                raise Problem(f"'{path}', line {line.lineno}: {text}") from None
        known[node.name] = own[node.name] = (says, fields)
    return own


_KINDS = {"float": float, "int": int, "bool": bool, "str": str}


def _field(name: str, annotation: ast.expr, value: ast.expr) -> Field | None:
    text = ast.unparse(annotation)
    if text.startswith("Literal["):
        kind: Any = Literal[ast.literal_eval("(" + text.removeprefix("Literal[").removesuffix("]") + ",)")]
    elif text in _KINDS:
        kind = _KINDS[text]
    else:
        return None  # the model, or a class variable
    meaning, bounds = "", {}
    if isinstance(value, ast.Call):
        meaning = ast.literal_eval(value.args[1])
        bounds = {(k.arg or "").replace("_", " "): ast.literal_eval(k.value) for k in value.keywords}
        value = value.args[0]
    return Field(name, kind, ast.literal_eval(value), meaning, bounds)
