"""The rules of the house, held by reading the source.

A rule is a function from a tree of parsed files to the list of offences in it. Each is applied twice: to the package,
where it must find nothing, and to small broken sources, where it must find what is wrong (a rule that never fires holds
nothing).
"""

import ast
import builtins
import importlib
import inspect
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[1]
PACKAGE = "quantshard"

FLOORS = (
    "errors version",
    "formats readable",
    "limits numerics sharding private_torch determinism",
    "recipe_table",
    "recipe kernels",
    "kernel_dispatch state_storage",
    "collectives",
    "tensor",
    "gemm",
    "distributed",
    "modules optimizers",
    "checkpoints",
    "foreign observe",
    "layouts terminal conversion statistics planning",
    "transformer_engine report serving",
    "__init__",
    "trainer compat",
    "integrations",
    "cli",
    "__main__",
)
"""Files and folders of the package from the ground up: each imports only what stands on a lower floor."""

HEIGHT = {unit: height for height, floor in enumerate(FLOORS) for unit in floor.split()}

NO_NOUNS = set(
    "Again Asked Between Both Called Delayed Entered Exact Exported Front Given How Keeps Kept Known Like Low "
    "Missing Native Needed Needs Others Out Pending Plain Planned Prepared Reading Ready Remembered Replaced "
    "Running Saved Scaled Second Shared Staged Stopped Stored Told Traced Unsupported Updated Wanted Way Ways "
    "Where Words Work Written Wrong Group Kind Place Plan Rows Rule Side Slot Source Target Tile".split()
)
"""Words that stood for classes whose subject nobody could guess; with a noun in front or behind they may stand."""

AROUND = ("interop", "tools")
"""Folders around the core, which imports nothing of them; interop imports nothing of tools."""

PUBLIC = (
    "__init__.py", "__main__.py", "layouts.py", "serving.py", "statistics.py", "transformer_engine.py", "integrations",
)  # fmt: skip
"""Import paths of what is in the folders around the core, and `integrations`, which uses interop."""

PROGRAMS = ("cli/", "trainer/", "terminal/", "report/")

MAY_NAME_FORMATS = {"formats", "numerics", "recipe", "state_storage", "kernels"}

PRIVATE_ALLOWED = {
    "_asdict": "public API of named tuples",
    "_fields": "public API of named tuples",
    "_replace": "public API of named tuples",
    "_Unpickler": "pickle in Python, whose memo is a dict: a file cannot request memory",
    "_supports_flash_attn": "how model classes for transformers declare that they can use FlashAttention",
    "_init_weights": "what transformers documents for models to define and calls on them",
}
"""Private names that may be used outside private_torch/, each with its reason."""

FACTORIES = set(
    "as_tensor asarray empty empty_strided eye full linspace logspace normal ones rand randn scalar_tensor tensor "
    "zeros".split()
)
"""Functions of torch whose results have the default dtype where none is named, at least of some arguments."""

ON_A_DEVICE = {function.__name__ for function in _device_constructors()}
"""Functions of torch whose results are on the default device where none is named."""

FUNCTION_LINES, FILE_LINES = 60, 500

Tree = dict[str, str]
"""Source by path within the package: {"modules/linear.py": "..."}."""


# Reading the source


def package() -> Tree:
    root = ROOT / PACKAGE
    return {p.relative_to(root).as_posix(): p.read_text(encoding="utf-8") for p in sorted(root.rglob("*.py"))}


def unit(path: str) -> str:
    """The file or folder of the layer table that `path` belongs to; those in tools/ and interop/ have floors too."""
    parts = path.removesuffix(".py").split("/")
    return parts[1] if parts[0] in AROUND and len(parts) > 1 else parts[0]


def module(path: str) -> str:
    return f"{PACKAGE}/{path}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def modules(paths: tuple[str, ...]) -> set[str]:
    return {module(path) for path in paths} | {f"{PACKAGE}.{unit}" for unit in [*HEIGHT, *AROUND]}


def at(path: str, node: ast.AST) -> str:
    return f"{PACKAGE}/{path}:{getattr(node, 'lineno', 1)}"


@cache
def parse(source: str) -> ast.Module:
    """Once for all rules."""
    return ast.parse(source)


@cache
def walk(root: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes below, found once for all rules."""
    return tuple(ast.walk(root))


def nodes(tree: Tree) -> Iterator[tuple[str, ast.AST]]:
    for path, source in tree.items():
        for node in walk(parse(source)):
            yield path, node


def imports_by_name(node: ast.AST) -> bool:
    """If it calls importlib.import_module or the like."""
    function = getattr(node, "func", None)
    return getattr(function, "attr", getattr(function, "id", "")) in ("import_module", "__import__")


@cache
def importing(root: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes below that import, found once for all rules."""
    return tuple(node for node in walk(root) if isinstance(node, ast.Import | ast.ImportFrom) or imports_by_name(node))


def imports(tree: Tree) -> Iterator[tuple[str, ast.AST, str]]:
    """(Path, node, module of the package that it imports)."""
    for path, source in tree.items():
        for node in importing(parse(source)):
            for target in own_imports(tree, path, node):
                yield path, node, target


def absolute(path: str, node: ast.ImportFrom) -> str:
    """The module that `from ... import` reads, relative dots resolved."""
    if not node.level:
        return node.module or ""
    here = [PACKAGE, *path.split("/")[:-1]]
    return ".".join(here[: len(here) - node.level + 1] + ([node.module] if node.module else []))


def own_imports(tree: Tree, path: str, node: ast.AST) -> Iterator[str]:
    """The modules of the package that `node` imports; a `from` import of a module's content counts as the module."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        known = modules(tuple(tree))
        base = absolute(path, node)
        names = [full if (full := f"{base}.{alias.name}") in known else base for alias in node.names]
    elif isinstance(node, ast.Call) and imports_by_name(node):
        first = node.args[0] if node.args else None
        names = [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    else:
        names = []
    yield from dict.fromkeys(name for name in names if name.split(".")[0] == PACKAGE)


def functions(parsed: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in walk(parsed) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def docstrings(parsed: ast.Module) -> set[ast.AST]:
    """String statements: docstrings, and the strings below a constant that describe it."""
    return {n.value for n in walk(parsed) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}


def identifiers(node: ast.AST) -> Iterator[str]:
    """The names that `node` itself reads, binds or imports, and the text of a string."""
    for field in ("id", "attr", "arg", "name", "asname", "value"):
        if isinstance(value := getattr(node, field, None), str):
            yield value


# The rules


def imports_go_down(tree: Tree) -> list[str]:
    """Imports go to a lower floor, or stay in their folder."""
    found = [
        f"{PACKAGE}/{path}: {unit(path)!r} has no place; add it to FLOORS in tests/test_house.py"
        for path in tree
        if unit(path) not in HEIGHT
    ]
    for path, node, target in imports(tree):
        here, there = unit(path), unit("/".join(target.split(".")[1:]) or "__init__")
        if here != there and {here, there} <= HEIGHT.keys() and HEIGHT[there] >= HEIGHT[here]:
            found.append(f"{at(path, node)}: {here} imports {there}, which stands on no lower floor")
    return found


def the_core_stands_alone(tree: Tree) -> list[str]:
    """The core imports nothing of interop and tools, and interop nothing of tools."""
    found = []
    for path, node, target in imports(tree):
        here, there = path.split("/")[0], target.split(".")[1:2]
        if here == "tools" or path in PUBLIC or here in PUBLIC:
            continue
        if there and there[0] in AROUND and there[0] != here:
            found.append(f"{at(path, node)}: {here} imports {target}")
    return found


def imports_have_no_cycle(tree: Tree) -> list[str]:
    graph: dict[str, set[str]] = {module(path): set() for path in tree}
    for path, _, target in imports(tree):
        graph[module(path)].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return ["import cycle: " + " <- ".join(error.args[1])]
    return []


def imports_are_not_lazy(tree: Tree) -> list[str]:
    return [
        f"{at(path, node)}: {function.name}() imports {target}; import it at the top of the file"
        for path, source in tree.items()
        for function in functions(parse(source))
        for node in importing(function)
        for target in own_imports(tree, path, node)
    ]


def raised_names_exist(tree: Tree) -> list[str]:
    """What docstrings say of exceptions: classes of the package, or Python's own."""
    classes = {node.name for source in tree.values() for node in walk(parse(source)) if isinstance(node, ast.ClassDef)}
    found = []
    for path, source in tree.items():
        for node in walk(parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                said = (ast.get_docstring(node) or "").partition("Raises:\n")[2].partition("\n\n")[0]
                names = re.findall(r"^    (\w[\w., ]*):", said, re.MULTILINE)
                unknown = [n for name in names for n in re.split(r",? or |, ", name) if not hasattr(builtins, n)]
                found += [f"{at(path, node)}: raises {n}, which is no class" for n in unknown if n not in classes]
    return found


def formats_are_not_named(tree: Tree, names: Iterable[str] = ()) -> list[str]:
    """No row of the format table is named, neither as a constant nor in a string, where code should ask the row."""
    names = set(names) or format_names()
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b", re.IGNORECASE)
    found = []
    for path, source in tree.items():
        if unit(path) in MAY_NAME_FORMATS:
            continue
        skipped = docstrings(parsed := parse(source))
        for node in walk(parsed):
            hits = {hit for text in identifiers(node) for hit in pattern.findall(text)} if node not in skipped else ()
            found += [
                f"{at(path, node)}: names the format {hit}; ask its row, or take it from a recipe" for hit in hits
            ]
    return found


def format_names() -> set[str]:
    formats = importlib.import_module(f"{PACKAGE}.formats")
    return {name for c, row in vars(formats).items() if isinstance(row, formats.Format) for name in (c, row.name)}


def class_names_are_nouns_of_their_own(tree: Tree) -> list[str]:
    """No two classes of the package have one name, and none is a pronoun, an adverb or a bare participle."""
    classes = [(node.name, at(path, node)) for path, node in nodes(tree) if isinstance(node, ast.ClassDef)]
    counts = Counter(name for name, _ in classes)
    return [
        f"{place}: {name} {'is defined twice' if counts[name] > 1 else 'names nothing'}; say what it is"
        for name, place in classes
        if counts[name] > 1 or name.strip("_") in NO_NOUNS
    ]


def sizes_are_small(tree: Tree) -> list[str]:
    """A function's body, its docstring and signature apart, and a file stay within their budgets."""
    found = []
    for path, source in tree.items():
        if (lines := len(source.splitlines())) > FILE_LINES:
            found.append(f"{PACKAGE}/{path}: {lines} lines, more than {FILE_LINES}; split it by noun")
        for function in functions(parse(source)):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            lines = (function.end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > FUNCTION_LINES:
                found.append(f"{at(path, function)}: {function.name}() has {lines} lines, more than {FUNCTION_LINES}")
    return found


def private_torch_is_kept_apart(tree: Tree) -> list[str]:
    """No private name of torch, nor any private attribute that the package does not define, but in private_torch/

    A name that the package defines and objects of torch have too is torch's, except on the `self` or `super()` of a
    file that defines a method of that name: it calls or overrides its own. Names below `torch.ops` are the names of
    operators, whose underscores are not a mark of privacy.
    """
    own = set().union(*map(defined, map(parse, tree.values()))) - names_of_torch_objects()
    found = []
    for path, source in tree.items():
        if path.startswith("private_torch/"):
            continue
        aliases: dict[str, str] = {}
        for node in walk(parsed := parse(source)):
            aliases.update(torch_aliases(path, node, aliases))
        methods = {function.name for function in functions(parsed)}
        for node in walk(parsed):
            if isinstance(node, ast.Attribute) and node.attr in methods and is_own_object(node.value):
                continue
            for name in private_uses(path, node, aliases, own):
                found.append(f"{at(path, node)}: private name {name}; move its use to private_torch/")
    return found


@cache
def names_of_torch_objects() -> set[str]:
    """The attributes of those objects of torch that the package handles most, of classes and of instances."""
    objects = (nn.Module(), torch.optim.SGD([torch.zeros(1)]), torch.Tensor, DTensor)
    return set().union(*map(dir, objects))


def is_own_object(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self", "super()")


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.startswith("__") and name not in PRIVATE_ALLOWED


def defined(parsed: ast.AST) -> set[str]:
    """Names of functions and classes, and of the variables, fields and attributes that are assigned to."""
    own = set()
    for node in walk(parsed):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
    return own


def torch_aliases(path: str, node: ast.AST, aliases: dict[str, str]) -> dict[str, str]:
    """Local names that `node` binds to something of torch, with their full names: {"dist": "torch.distributed"}."""
    bound = {}
    if isinstance(node, ast.Import):
        bound = {a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names}
    elif isinstance(node, ast.ImportFrom):
        bound = {a.asname or a.name: f"{absolute(path, node)}.{a.name}" for a in node.names}
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        bound = {node.targets[0].id: full_name(node.value, aliases)}
    return {local: full for local, full in bound.items() if full.split(".")[0] == "torch"}


def full_name(node: ast.AST, aliases: dict[str, str]) -> str:
    """The dotted name of an attribute chain whose root is bound to something of torch, else ""."""
    if isinstance(node, ast.Attribute):
        return f"{base}.{node.attr}" if (base := full_name(node.value, aliases)) else ""
    return aliases.get(node.id, "") if isinstance(node, ast.Name) else ""


def operations_name_their_overload(tree: Tree) -> list[str]:
    """A packet of overloads tries one after the other, and where one does not fit some versions of torch make an error
    message that nobody sees of the values of its tensors: the host then waits for the device at every call.

    tensor/arithmetic.py may hold packets, to register all their overloads.
    """
    found = []
    for path, source in tree.items():
        aliases: dict[str, str] = {}
        parsed = parse(source)
        parents = {child: node for node in walk(parsed) for child in ast.iter_child_nodes(node)}
        for node in walk(parsed):
            aliases |= torch_aliases(path, node, aliases)
        for node in walk(parsed):
            name = full_name(node, aliases) if isinstance(node, ast.Attribute) else ""
            if not name.startswith("torch.ops.aten.") or name.count(".") > 3:
                continue
            parent = parents[node]
            called = isinstance(parent, ast.Call) and parent.func is node
            if called or not (isinstance(parent, ast.Attribute) or path == "tensor/arithmetic.py"):
                found.append(f"{at(path, node)}: {name} names no overload; say .default, or the one that fits")
    return found


def floats_have_a_named_dtype(tree: Tree) -> list[str]:
    """Nothing but a module's parameters follows `torch.set_default_dtype`, and these ask for it by name.

    Also refused: `torch.where` of two numbers, which takes no dtype, and `torch.Tensor(...)`.
    """
    return [
        f"{place}: {ast.unparse(call)} follows the default dtype; name the one it needs"
        for place, function, call in calls_of_torch(tree)
        if follows_the_default_dtype(function, call)
    ]


def tensors_have_a_named_device(tree: Tree) -> list[str]:
    """Nothing but a module's parameters follows `torch.set_default_device`, and these ask for it by name."""
    return [
        f"{place}: {ast.unparse(call)} follows the default device; name the one it needs"
        for place, function, call in calls_of_torch(tree)
        if function in ON_A_DEVICE and not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]


def calls_of_torch(tree: Tree) -> Iterator[tuple[str, str, ast.Call]]:
    """Where each call of a function of torch is, its name behind "torch.", and the call."""
    for path, source in tree.items():
        aliases: dict[str, str] = {}
        calls = []
        for node in walk(parse(source)):
            aliases |= torch_aliases(path, node, aliases)
            calls += [node] if isinstance(node, ast.Call) else []
        for call in calls:
            name = full_name(call.func, aliases)
            if name.startswith("torch."):
                yield at(path, call), name.removeprefix("torch."), call


def follows_the_default_dtype(function: str, call: ast.Call) -> bool:
    if any(keyword.arg in ("dtype", None) for keyword in call.keywords):
        return False
    if function == "where":
        return len(call.args) == 3 and all(map(is_number, call.args[1:])) and any(map(is_float, call.args[1:]))
    if function == "arange":
        return any(map(is_float, call.args))
    return function in FACTORIES or function == "Tensor"


def is_number(node: ast.expr) -> bool:
    """A number as it is written, with a sign or not, or `torch.nan` and its like."""
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    constant = isinstance(node, ast.Attribute) and node.attr in ("nan", "inf", "pi", "e")
    return constant or (isinstance(node, ast.Constant) and isinstance(node.value, int | float))


def is_float(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return is_float(node.operand)
    return is_number(node) and not (isinstance(node, ast.Constant) and isinstance(node.value, int))


def commands_write_in_one_file(tree: Tree) -> list[str]:
    """In programs, only terminal/outputs.py opens files for writing, makes folders and renames: what is written may lie
    in a folder that somebody else prepared."""
    found = []
    for path, node in nodes(tree):
        if (
            path.removeprefix("tools/").startswith(PROGRAMS)
            and not path.endswith("terminal/outputs.py")
            and isinstance(node, ast.Call)
            and writes(node)
        ):
            found.append(f"{at(path, node)}: {ast.unparse(node.func)}() writes; use terminal/outputs.py")
    return found


def commands_print_in_one_file(tree: Tree) -> list[str]:
    """In programs, only terminal/screen.py prints: what is shown there may be a text of somebody else's."""
    return [
        f"{at(path, node)}: {ast.unparse(node.func)}() shows what is not escaped; use terminal/screen.py"
        for path, node in nodes(tree)
        if path.removeprefix("tools/").startswith(PROGRAMS)
        and not path.endswith("terminal/screen.py")
        and isinstance(node, ast.Call)
        if re.fullmatch(r"print|(\w+\.)*(Console|echo|secho|pprint)|sys\.std(out|err)\.write", ast.unparse(node.func))
    ]


def writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in WRITERS or (name in OF_OS and isinstance(call.func, ast.Attribute) and is_os(call.func.value)):
        return True
    if name != "open" or any(keyword.arg is None for keyword in call.keywords):
        return name == "open"
    mode = [k.value for k in call.keywords if k.arg == "mode"] or call.args[0 if is_method(call) else 1 :][:1]
    return any(not isinstance(m, ast.Constant) or set(str(m.value)) & set("wax+") for m in mode)


WRITERS = {"write_text", "write_bytes", "touch", "mkdir", "makedirs", "symlink_to", "hardlink_to", "copyfile", "copy2"}
OF_OS = {"open", "rename", "replace", "link", "symlink", "mkfifo"}


def is_os(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "os"


def is_method(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute)


def private_uses(path: str, node: ast.AST, aliases: dict[str, str], own: set[str]) -> list[str]:
    """The private names that `node` itself uses."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        base = f"{absolute(path, node)}." if isinstance(node, ast.ImportFrom) else ""
        full = [base + alias.name for alias in node.names]
        return [name for name in full if name.startswith("torch.") and any(map(is_private, name.split(".")))]
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        name = full_name(node, aliases)
        if name.startswith("torch.ops.") or (not name and node.attr in own):
            return []
        return [name or ast.unparse(node)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
        names = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        return [name for name in names if is_private(name) and name not in own]
    return []


# The package keeps the rules, and each rule finds what it is about

LONG = "\n".join(["    x = 1"] * (FUNCTION_LINES + 1))
RULES: dict[Callable[[Tree], list[str]], list[tuple[Tree, int]]] = {
    # rule: sources, and how many offences it finds there
    imports_go_down: [
        ({"formats.py": "import torch"}, 0),
        ({"tensor/a.py": "from quantshard.tensor.ops import rules", "tensor/ops.py": ""}, 0),
        ({"modules/linear.py": "from . import base\nfrom ..recipe import Recipe", "modules/base.py": ""}, 0),
        ({"formats.py": "from quantshard.tensor import QuantizedTensor"}, 1),
        ({"formats.py": "from quantshard import tensor"}, 1),
        ({"formats.py": "from . import errors, tensor"}, 1),
        ({"numerics.py": "import quantshard"}, 1),
        ({"modules/linear.py": "from ..optimizers import FusedAdam"}, 1),
        ({"optimizers/adam.py": "if TYPE_CHECKING:\n    from quantshard.modules.linear import Linear"}, 1),
        ({"surprise.py": ""}, 1),
    ],
    the_core_stands_alone: [
        ({"modules/a.py": "import torch", "tools/cli/a.py": "from quantshard.interop import layouts"}, 0),
        (
            {
                "__init__.py": "from quantshard.tools import planning",
                "interop/a.py": "from quantshard.interop import b",
            },
            0,
        ),
        ({"modules/a.py": "from quantshard.interop import layouts", "interop/a.py": "import quantshard.tools.cli"}, 2),
    ],
    imports_have_no_cycle: [
        ({"tensor.py": "from quantshard import ops", "ops.py": ""}, 0),
        ({"tensor.py": "from quantshard import ops", "ops.py": "from .tensor import QuantizedTensor"}, 1),
        ({"modules/__init__.py": "from .linear import Linear", "modules/linear.py": "from . import Linear"}, 1),
    ],
    imports_are_not_lazy: [
        ({"ops.py": "import quantshard.tensor\ndef f():\n    import torch"}, 0),
        ({"ops.py": "def f():\n    from .tensor import QuantizedTensor"}, 1),
        ({"ops.py": "def f():\n    importlib.import_module('quantshard.tensor.quantized_tensor')"}, 1),
    ],
    raised_names_exist: [
        (
            {
                "a.py": "class AError: ...",
                "b.py": "def f():\n    '''F.\n\n    Raises:\n        AError, OSError: x.\n    '''",
            },
            0,
        ),
        ({"b.py": "def f():\n    '''F.\n\n    Raises:\n        AError: x.\n            or: y.\n    '''"}, 1),
    ],
    partial(formats_are_not_named, names={"FP9", "fp9_row"}): [
        ({"tensor.py": '"""Such as FP9."""\nFP9_MAX = 1\n"""Of fp9_row."""'}, 0),
        ({"formats.py": "FP9 = 1", "recipe.py": "FP9", "kernels/adam.py": "FP9"}, 0),
        ({"tensor.py": "from quantshard.formats import FP9"}, 1),
        ({"tensor.py": "if row is formats.FP9: pass"}, 1),
        ({"tensor.py": "if row.name == 'fp9_row': pass"}, 1),
        ({"cli/main.py": "print(f'use fp9_row instead of {x}')"}, 1),
        ({"tensor.py": "def f(fp9=1): pass"}, 1),
    ],
    class_names_are_nouns_of_their_own: [
        ({"ops.py": "class GatherPlan: ...\nclass ScaleRule: ..."}, 0),
        ({"ops.py": "class GatherPlan: ...", "cli/a.py": "class GatherPlan: ..."}, 2),
        ({"ops.py": "class How: ...\nclass _Told: ..."}, 2),
    ],
    sizes_are_small: [
        ({"ops.py": f"def f():\n    '''Short.'''\n{LONG[10:]}"}, 0),
        ({"ops.py": f"def f():\n    '''Long.'''\n{LONG}"}, 1),
        ({"ops.py": f"class C:\n  async def f():\n{LONG}"}, 1),
        ({"ops.py": "x = 1\n" * (FILE_LINES + 1)}, 1),
    ],
    private_torch_is_kept_apart: [
        ({"private_torch/saving.py": "import torch\ntorch._C.x"}, 0),
        ({"tensor.py": "self._kept = x\nself._kept, self.__class__, x._replace()"}, 0),
        ({"tensor.py": "class C(Module):\n    def _apply(self): return super()._apply(), self._apply"}, 0),
        ({"ops.py": "import torch\naten = torch.ops.aten\naten._to_copy.default, torch.ops.aten._foreach_add_"}, 0),
        ({"tensor.py": "from quantshard.private_torch import _x\nfrom ._y import z"}, 0),
        ({"tensor.py": "import torch._C"}, 1),
        ({"tensor.py": "from torch._C import Graph"}, 1),
        ({"tensor.py": "from torch.distributed.tensor import _dtensor_spec"}, 1),
        ({"tensor.py": "import torch.distributed as dist\ndist.fsdp._fully_shard.x"}, 1),
        ({"tensor.py": "from torch import distributed as dist\ndef _f(): dist._f()"}, 1),
        ({"tensor.py": "import torch\nfsdp = torch.distributed.fsdp\nfsdp._init()"}, 1),
        ({"tensor.py": "param._spec"}, 1),
        ({"tensor.py": "getattr(param, '_spec')"}, 1),
        ({"tensor.py": "dtensor._local_tensor, Tensor._make_wrapper_subclass"}, 2),
        ({"tensor.py": "def _version(): pass\ntensor._version"}, 1),
        ({"tensor.py": "_parameters = 1\nmodule._parameters, getattr(module, '_parameters')"}, 2),
        ({"tensor.py": "self._buffers = {}\nmodule._buffers"}, 2),
        ({"tensor.py": "def _apply(self): return module._apply()", "ops.py": "def f(self): self._apply()"}, 2),
    ],
    operations_name_their_overload: [
        ({"ops.py": "import torch\naten = torch.ops.aten\naten.add.Tensor(x, y), rule(aten.mul.Tensor)"}, 0),
        ({"tensor/arithmetic.py": "import torch\naten = torch.ops.aten\nrule(aten.mul)"}, 0),
        ({"tensor/arithmetic.py": "import torch\naten = torch.ops.aten\naten.mul(x, y)"}, 1),
        ({"mlp.py": "import torch\ncurve(torch.ops.aten.silu_backward)"}, 1),
        ({"ops.py": "import torch\naten = torch.ops.aten\ndef f():\n    aten.add(x, y)"}, 1),
        ({"ops.py": "import torch\ntorch.ops.aten._foreach_maximum_(x, y)"}, 1),
    ],
    commands_write_in_one_file: [
        ({"terminal/outputs.py": "os.open(p, f); p.mkdir()", "layouts/files.py": "open(p, 'wb')"}, 0),
        (
            {"trainer/data/a.py": "open(p), open(p, 'rb'), p.open(mode='r'), replace(order, x=1), t.replace('a', 'b')"},
            0,
        ),
        (
            {"cli/a.py": "open(p, 'w'), open(p, mode='ab'), p.open('x'), open(p, 'r+'), open(p, m), open(p, **o)"},
            6,
        ),
        ({"trainer/data/a.py": "p.write_text(t), p.mkdir(), os.replace(a, b), os.open(p, f), p.parent.touch()"}, 5),
    ],
    commands_print_in_one_file: [
        (
            {
                "terminal/screen.py": "print(x)",
                "doctor.py": "print(x)",
                "cli/diff.py": "say(x), screen.print(x)",
            },
            0,
        ),
        ({"cli/diff.py": "print(x), Console(), rich.console.Console(), typer.echo(x), sys.stdout.write(x)"}, 5),
    ],
    floats_have_a_named_dtype: [
        ({"ops.py": "import torch\ntorch.zeros(3, dtype=torch.float32), torch.zeros_like(x), x.new_zeros(3)"}, 0),
        ({"ops.py": "import torch\ntorch.arange(n), torch.arange(0, 4, 2), torch.where(y, 1, -1)"}, 0),
        ({"ops.py": "import torch\ntorch.where(y, x, 0.0), torch.ones(3, **options)"}, 0),
        ({"ops.py": "import numpy as torch\ntorch.zeros(3)"}, 0),
        ({"ops.py": "import torch\ntorch.zeros(3, 4, device=x.device)"}, 1),
        ({"ops.py": "import torch\ndef f(): return torch.tensor([y])"}, 1),
        ({"ops.py": "from torch import randn as r, Tensor\nr(3), Tensor(3)"}, 2),
        ({"ops.py": "import torch\ntorch.arange(0, 1, 0.5)"}, 1),
        ({"ops.py": "import torch\ntorch.where(y, -1.0, 1), torch.where(y, 0, torch.nan)"}, 2),
    ],
    tensors_have_a_named_device: [
        ({"ops.py": "import torch\ntorch.zeros(3, device=x.device), torch.zeros_like(x), x.new_zeros(3)"}, 0),
        ({"ops.py": "import torch\ntorch.ones(3, **options), torch.frombuffer(b'1')"}, 0),
        ({"ops.py": "import numpy as torch\ntorch.zeros(3)"}, 0),
        ({"ops.py": "import torch\ntorch.arange(3), torch.tensor([y], dtype=d)"}, 2),
        ({"ops.py": "from torch import randint as r\nr(0, 3, (4,))"}, 1),
    ],
}


def rule_name(value: object) -> str | None:
    return getattr(getattr(value, "func", value), "__name__", None)


@pytest.mark.parametrize("rule", [getattr(rule, "func", rule) for rule in RULES], ids=rule_name)
def test_package_keeps(rule: Callable[[Tree], list[str]]):
    tree = package()
    assert tree, f"no source under {ROOT / PACKAGE}"
    offences = rule(tree)
    assert not offences, "\n" + "\n".join(offences)


@pytest.mark.parametrize(
    ("rule", "tree", "count"), [(r, *case) for r, cs in RULES.items() for case in cs], ids=rule_name
)
def test_rule_finds(rule: Callable[[Tree], list[str]], tree: Tree, count: int):
    assert len(found := rule(tree)) == count, found


# The public names


def public_names(source: str) -> set[str]:
    """The public names that a module binds at its top level."""
    bound: set[str] = set()
    for node in parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        else:
            bound |= {n.id for n in walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return {name for name in bound if not name.startswith("_")} - {"annotations"}


def test_all_is_sorted_and_is_what_is_exported():
    exported = [name for name in importlib.import_module(PACKAGE).__all__ if name != "__version__"]
    assert exported == sorted(exported)
    assert set(exported) == public_names((ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8"))


def test_public_names_are_the_bound_ones():
    source = "from .a import B, _c\nfrom . import d as e\nimport f.g\nimport h as _h\nI: int = 1\ndef j(): k = 1"
    assert public_names(source) == {"B", "e", "f", "I", "j"}


def undocumented(names: Iterable[str], values: Iterable[object]) -> list[str]:
    """The functions, classes and modules without a docstring of their own."""
    own = [
        (name, vars(value).get("__doc__") if inspect.isclass(value) else inspect.getdoc(value))
        for name, value in zip(names, values, strict=True)
        if inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)
    ]
    return [name for name, doc in own if not doc or doc.startswith(f"{name}(")]  # dataclasses make up "Name(fields)"


def test_public_names_have_docstrings():
    quantshard = importlib.import_module(PACKAGE)
    assert not undocumented(quantshard.__all__, [getattr(quantshard, name) for name in quantshard.__all__])


def test_missing_docstrings_are_found():
    class Inherits(Path): ...

    assert undocumented(["Path", "Inherits", "f", "x"], [Path, Inherits, lambda: 1, 3]) == ["Inherits", "f"]


# Every file


def machine_paths(text: str) -> list[str]:
    """Absolute paths of the machine that a file was written on."""
    return re.findall(r"(?<![\w.~*-])/(?:work|root)/\S*", text)


def test_no_machine_paths():
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(listed, capture_output=True, text=True)
    if result.returncode:
        pytest.skip("not a git checkout")
    found = {}
    for name in filter(None, result.stdout.split("\0")):
        assert not (ROOT / name).is_symlink(), f"{name} is a link, which leads nowhere in a clone"
        if (path := ROOT / name).is_file() and (paths := machine_paths(path.read_text("utf-8", errors="ignore"))):
            found[name] = paths
    assert not found


def test_machine_paths_are_found():
    work, root = ("/" + name + "/x" for name in ("work", "root"))
    assert machine_paths(f"see {work}, '{root}'") == [work + ",", root + "'"]
    assert not machine_paths(f"a{work} https://example.com{work}")
