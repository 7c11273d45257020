"""What the sources may and may not do: which room knows which, no code from data, and sentences that can be read."""

import ast
import re
from pathlib import Path

import pytest

import perfed

SOURCE = Path(perfed.__file__).parent
MODULES = {path.relative_to(SOURCE).with_suffix("").as_posix(): path for path in sorted(SOURCE.rglob("*.py"))}
FORBIDDEN = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}


def imports(tree, module):
    """Every module that a file imports, anywhere in it, by its full name."""
    package = ["perfed", *module.split("/")][: -1 if not module.endswith("__init__") else None]
    package = [part for part in package if part != "__init__"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def sins(tree, module="x"):
    """What a file does that could run code from data."""
    found = [name for name in imports(tree, module) if name.partition(".")[0] in FORBIDDEN]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("torch.load", "eval", "exec", "np.loads", "os.system") or called.endswith("read_pickle"):
                found.append(called)
            found += [
                f"{called}({word.arg})"
                for word in node.keywords
                if word.arg == "allow_pickle"
                and not (isinstance(word.value, ast.Constant) and word.value.value is False)
            ]
            if called in ("np.load", "numpy.load") and not any(word.arg == "allow_pickle" for word in node.keywords):
                found.append(f"{called} without allow_pickle=False")
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and any(a.name == "load" for a in node.names):
            found.append("from torch import load")
    return found


def parsed(module):
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def test_the_lint_itself():
    for text in ("import pickle", "from joblib import load", "import torch\ntorch.load('x')", "from torch import load",
                 "np.load(f, allow_pickle=True)", "np.load(f)", "np.load(f, allow_pickle=x)", "eval('1')"):  # fmt: skip
        assert sins(ast.parse(text)), text
    assert not sins(ast.parse("import torch\nnp.load(f, allow_pickle=False)\nmodel.eval()\nsafe.load(f)"))


# The text that is run there is made of the operations of a traced step alone: nothing of it is read from a file.
ALLOWED = {"accel/codegen": ["exec"]}


def test_no_module_opens_pickles():
    assert len(MODULES) > 40
    assert {module: found for module in MODULES if (found := sins(parsed(module), module))} == ALLOWED


# ---------------------------------------------------------------------- who opens the files of a run folder

# What a Path can do to a file or see of it; in these modules only a `files.Folder` may, which follows no links.
DOINGS = set("open read_text write_text read_bytes write_bytes unlink mkdir rmdir touch rename exists is_file".split())  # noqa: SIM905
DOINGS |= {"iterdir", "glob", "rglob", "stat", "symlink_to"}
OPENERS = ["training/folder", "training/settings", "training/results", "training/train", "training/prepare"]
OPENERS += ["training/newcomers", "training/observers/checkpoint", "training/observers/log", "report/folder"]
OPENERS += ["report/comparison", "report/tables", "studies/compare", "cli/models", "cli/train"]
ELSEWHERE = {"path.read_bytes()", "catalog.is_file(name)", "out.mkdir(parents=True, exist_ok=True)"}  # files of users
ELSEWHERE |= {"Folder(folder).exists(folder / PLAN)", "cls.open(folder)", "Comparison.open(run)"}


@pytest.mark.parametrize("module", OPENERS)
def test_files_of_a_run_folder_are_opened_in_one_place(module):
    calls = [node for node in ast.walk(parsed(module)) if isinstance(node, ast.Call)]
    doings = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in DOINGS]
    others = [ast.unparse(call) for call in doings if not ast.unparse(call.func.value).endswith("files")]
    assert set(others) - ELSEWHERE == set()


# ---------------------------------------------------------------------- which room knows which

# From the ground up: a module knows its own room and those below it.
ROOMS = ["core", "discover", "methods", "accel", "wire", "engines", "federation", "data", "models", "training"]
ROOMS += ["studies", "report", "contract", "api", "cli"]
# The idea is carried out by whoever is above it, and the machine is plugged into engines: nobody else may name them.
ONLY = {
    "methods": {"methods", "training", "studies", "report", "contract", "api", "cli"},
    "accel": {"accel", "engines"},
}


def room(name):
    """The room of a module's dotted name below perfed; empty for perfed itself."""
    return name.removeprefix("perfed").lstrip(".").partition(".")[0]


def wrong(module):
    """What a module imports, anywhere in it, that it must not know."""
    mine = module.partition("/")[0].removesuffix(".py")
    found = set()
    for name in imports(parsed(module), module):
        other = room(name)
        if not name.startswith("perfed.") or other not in ROOMS:
            continue
        if ROOMS.index(other) > ROOMS.index(mine) or mine not in ONLY.get(other, ROOMS):
            found.add(name)
    return found


def test_every_module_is_in_a_room():
    assert {module.partition("/")[0] for module in MODULES} - {"__init__", "__main__"} == set(ROOMS)


@pytest.mark.parametrize("module", [module for module in MODULES if module not in ("__init__", "__main__")])
def test_a_module_knows_its_room_and_those_below(module):
    assert wrong(module) == set()


# ---------------------------------------------------------------------- sentences and names that can be read


NO_NAMES = {"one", "at", "found", "some", "held", "said", "how", "those"}  # a name is a noun that says what a thing is
QUESTIONS = ("Whether", "How", "Which", "What", "Who", "Whose", "Where", "When", "Why")

# What strangers call, by the place of its class or module.
STRANGERS_CALL = {
    "core.method.Method": "init_server init_client broadcast local aggregate refine extend personalise newcomer "
    "before_round phase cohort_of at show extra_traffic notes check pull gradient start clipped update "
    "descend rate at_rate score models tuned predict",
    "core.data.Data": "fold mean map mask steps count",
    "core.model.Model": "part init zeros flat state_dict module apply features loss grad",
    "core.model.Part": "take put add only",
    "core.clients.Clients": "split ready to",
    "engines.base.Engine": "exchange refine evaluate save restore save_extension restore_extension close weighted_sum",
    "engines.client_states.States": "take put",
    "engines.scores.Scores": "means by_client",
    "federation.federation.Federation": "sample step begin requests receive end look evaluate evaluations show shared",
    "federation.federation": "step evaluate cohort_size",
    "federation.admit": "inspect",
    "federation.reduce": "mean",
    "federation.faults.Faults": "draw",
    "federation.traffic.Traffic": "count",
    "wire.base.Transform": "client server",
    "contract.runner": "check_method",
    "training.results.Run": "network result clients client accuracies scores curve seconds summary gain",
    "api": "run load begin start resume carry_out train_all",
}


def documented(tree):
    """Every docstring of a file: what it belongs to, and its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, ast.get_docstring(node) or ""


def is_property(node):
    return any("property" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", []))


def riddles(tree):
    """Docstrings that lean on what stands above them, or ask in place of saying what a function does."""
    for node, text in documented(tree):
        line, function = text.partition("\n")[0], isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        asks = line.replace(",", " ").partition(" ")[0] in QUESTIONS
        if line.startswith("The same") or (function and not is_property(node) and asks):
            yield line


def bound(tree):
    """Every name that a file gives to a value: variables, arguments, errors, imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name


def undocumented(function):
    """What a docstring does not say: it names each argument, under Args or in a sentence, and what comes back."""
    text, arguments = ast.get_docstring(function) or "", function.args
    names = [each.arg for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
    names += [each.arg for each in (arguments.vararg, arguments.kwarg) if each is not None]
    lines = [line.strip() for line in text.splitlines()]
    missing = [] if text else ["a docstring"]
    missing += [name for name in names if name not in {"self", "cls", *re.findall(r"\w+", text)}]
    gives = function.returns is None or ast.unparse(function.returns) != "None"
    if gives and not text.startswith(("Return", "Yield")) and not {"Returns:", "Yields:"} & set(lines):
        missing.append("Returns")
    return missing


def home(place):
    """The module of a place, and the class in it, if the place is one."""
    *rooms, last = place.split(".")
    return ("/".join(rooms), [last]) if last[0].isupper() else ("/".join([*rooms, last]), [])


def function_of(place, name):
    """The definition of a function, or of a class's method."""
    module, inside = home(place)
    node = parsed(module)
    for part in [*inside, name]:
        (node,) = [each for each in node.body if getattr(each, "name", None) == part]
    return node


@pytest.mark.parametrize("text", [
    '"""The same on the device."""', 'class A:\n    """The same."""', 'def f():\n    """The same for people."""',
    'def f():\n    """Whether it is so."""', 'class A:\n    def f(self):\n        """What, in the end, comes out."""',
    'async def f():\n    """How many."""',
])  # fmt: skip
def test_the_lint_of_docstrings(text):
    assert len(list(riddles(ast.parse(text)))) == 1
    good = '"""What travels."""\nclass A:\n    """How."""\n    @property\n    def f(self):\n        """What it is."""\n'
    assert not list(riddles(ast.parse(good + 'def g():\n    """Return the same tree."""\n\ndef h(): pass\n')))


@pytest.mark.parametrize("text", [
    "one = 1", "for at in x: pass", "[found for found in x]", "{some: 1 for some in x}", "with a as held: pass",
    "lambda said: 0", "def f(how): pass", "def f(*, those=1): pass", "def f(*one): pass", "def f(**at): pass",
    "import a as found", "from a import some", "import held.a", "try: pass\nexcept E as said: pass", "how += 1",
    "(those := 1)", "a, (one, b) = x", "at: int = 1", "match x:\n    case [found, *_]: pass",
    "match x:\n    case [*some]: pass", "global one\none = 1",
])  # fmt: skip
def test_the_lint_of_names(text):
    assert NO_NAMES & set(bound(ast.parse(text)))
    assert not NO_NAMES & set(
        bound(ast.parse("row = one\nself.at = a.found\nf(how=1)\ndef some(): held()\nimport a.one"))
    )


@pytest.mark.parametrize(("text", "missing"), [
    ("def f(): pass", ["a docstring", "Returns"]),
    ('def f(x) -> None:\n    """Do."""', ["x"]),
    ('def f(self, *, x) -> None:\n    """Do."""', ["x"]),
    ('def f(*x) -> None:\n    """Do."""', ["x"]),
    ('def f(**x) -> None:\n    """Do."""', ["x"]),
    ('def f(x) -> None:\n    """Do, with Args: none."""', ["x"]),
    ('def f() -> int:\n    """Count."""', ["Returns"]),
    ('def f():\n    """Count."""', ["Returns"]),
    ('def f(x) -> int:\n    """Count.\n\n    Returns:\n        It.\n    """', ["x"]),
    ('def f(x) -> int:\n    """Count.\n\n    Args:\n        x: it.\n    """', ["Returns"]),
    ('def f(self) -> None:\n    """Do."""', []),
    ('def f(x) -> int:\n    """Return it.\n\n    Args:\n        x: it.\n    """', []),
    ('def f(x) -> int:\n    """Count.\n\n    Args:\n        x: it.\n\n    Returns:\n        It.\n    """', []),
])  # fmt: skip
def test_the_lint_of_sections(text, missing):
    assert undocumented(ast.parse(text).body[0]) == missing


@pytest.mark.parametrize("module", MODULES)
def test_a_docstring_stands_by_itself(module):
    assert list(riddles(parsed(module))) == []


@pytest.mark.parametrize("module", MODULES)
def test_a_name_says_what_a_thing_is(module):
    assert NO_NAMES & set(bound(parsed(module))) == set()


@pytest.mark.parametrize(
    ("place", "name"), [(place, name) for place in STRANGERS_CALL for name in STRANGERS_CALL[place].split()]
)
def test_what_strangers_call_says_what_it_takes_and_gives(place, name):
    assert undocumented(function_of(place, name)) == []
