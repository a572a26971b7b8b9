"""How the code is built: who imports whom, and what no linter checks."""

import ast
from functools import lru_cache
from pathlib import Path

import pytest

import compvl

PACKAGE = Path(compvl.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_modidx.py")
# Every room imports from the lines above its own, and from itself.
LAYERS = [
    {"compvl"},
    {"core"},
    {"images", "stats", "downloads", "losses", "plotting"},
    {"metrics"},
    {"text"},
    {"microworld"},
    {"models"},
    {"attribution"},
    {"data"},
    {"benchmarks"},
    {"evaluate"},
    {"train"},
    {"paper"},
    {"app"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
LONGEST = 40
REASON = "longer than 40 lines:"


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = ("compvl", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


@lru_cache
def tree(module: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def base_of(module: str, node: ast.ImportFrom) -> str:
    """The absolute name of what a `from … import` statement imports from."""
    if not node.level:
        return node.module
    is_package = MODULES[module].name == "__init__.py"
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def imports_of(module: str) -> list[tuple[str, str]]:
    """(module, name) of everything that a module imports from the package, in functions too."""
    found = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if alias.name in MODULES]
        elif isinstance(node, ast.ImportFrom):
            base = base_of(module, node)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if inner in MODULES:
                    found.append((inner, ""))
                elif base in MODULES:
                    found.append((base, alias.name))
    return found


def room(module: str) -> str:
    """The first part of a module's name below the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "compvl"


def test_every_room_has_a_layer():
    rooms = {room(module) for module in MODULES}
    assert rooms <= LEVEL.keys(), f"give these a layer: {sorted(rooms - LEVEL.keys())}"


def test_imports_go_downwards():
    upward = []
    for module in MODULES:
        for other, _ in imports_of(module):
            here = room(module)
            there = room(other)
            if here != there and LEVEL[there] >= LEVEL[here]:
                upward.append(f"{module} imports {other}")
    assert not upward, "\n".join(upward)


def test_no_import_cycle():
    graph = {module: {other for other, _ in imports_of(module)} for module in MODULES}
    done = set()

    def visit(module, path):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, [*path, module])
            done.add(module)

    for module in MODULES:
        visit(module, [])


def test_private_names_stay_in_their_module():
    leaks = []
    for module in MODULES:
        for other, name in imports_of(module):
            if name.startswith("_") and name != "__version__":
                leaks.append(f"{module} imports {name} from {other}")
    assert not leaks, "\n".join(leaks)


def test_no_public_name_is_defined_twice():
    homes = {}
    for module in MODULES:
        for node in tree(module).body:
            names = []
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            for name in names:
                if not name.startswith("_"):
                    homes.setdefault(name, set()).add(module)
    twice = {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}
    assert not twice, twice


def code_lines(function: ast.FunctionDef, lines: list[str]) -> int:
    """Lines of a function's body without its docstring, comments and blank lines."""
    first = function.body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    start = first.end_lineno if is_docstring else first.lineno - 1
    body = [line.strip() for line in lines[start : function.end_lineno]]
    return sum(bool(line) and not line.startswith("#") for line in body)


def too_long(module: str) -> list[str]:
    """Functions of more than 40 lines that do not say why."""
    lines = MODULES[module].read_text(encoding="utf-8").split("\n")
    found = []
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef) and code_lines(node, lines) > LONGEST:
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno]).lower()
            if REASON not in text:
                found.append(f"{node.name} has {code_lines(node, lines)} lines")
    return found


def is_chained(node: ast.AST) -> bool:
    """Whether a conditional expression has another one as a branch."""
    branches = (node.body, node.orelse) if isinstance(node, ast.IfExp) else ()
    return any(isinstance(branch, ast.IfExp) for branch in branches)


def saves_lines(node: ast.AST) -> bool:
    """Whether one assignment does what several should; a swap is fine."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    left = {ast.unparse(part) for part in target.elts}
    return left != {ast.unparse(part) for part in node.value.elts}


def dense(module: str) -> list[str]:
    """Expressions that save lines at the reader's cost."""
    found = []
    for node in ast.walk(tree(module)):
        if len(getattr(node, "generators", ())) > 1:
            found.append(f"line {node.lineno}: a comprehension with several fors")
        if is_chained(node):
            found.append(f"line {node.lineno}: a chained conditional expression")
        if saves_lines(node):
            found.append(f"line {node.lineno}: several assignments in one")
    return found


def undocumented(module: str) -> list[str]:
    """Public functions and classes without a docstring."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    public = [
        node
        for node in tree(module).body
        if isinstance(node, kinds) and not node.name.startswith("_")
    ]
    return [f"{node.name} has no docstring" for node in public if not ast.get_docstring(node)]


@pytest.mark.parametrize("check", [too_long, dense, undocumented])
def test_code_reads_at_first_sight(check):
    found = {module: check(module) for module in MODULES}
    problems = [f"{module}: {problem}" for module, some in found.items() for problem in some]
    assert not problems, f"{len(problems)} findings:\n" + "\n".join(problems)
