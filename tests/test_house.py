"""House rules of the code, where a linter has no rule of its own.

Owns the rules; a fault names the file and the line. Generated code is exempt.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = [
    path
    for folder in ("plugin", "transport", "adapters", "proto", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.stem.endswith("_pb2")
]
EXECUTES_DATA = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Every node of every file, with the place that it stands at."""
    return [
        (f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
    ]


def test_every_module_says_what_it_owns() -> None:
    assert not [str(path.relative_to(ROOT)) for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert not {path: length for path, length in lengths.items() if length > 400}


def test_no_function_is_longer_than_60_lines() -> None:
    lengths = {
        f"{place} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for place, node in nodes()
        if isinstance(node, FUNCTIONS)
    }
    assert not {name: length for name, length in lengths.items() if length > 60}


def test_no_error_is_swallowed() -> None:
    def idle(statement: ast.stmt) -> bool:
        return isinstance(statement, ast.Pass) or (
            isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        )

    handlers = [(place, node) for place, node in nodes() if isinstance(node, ast.ExceptHandler)]
    assert not [place for place, node in handlers if all(map(idle, node.body))], "handlers that do nothing"
    assert not [place for place, node in handlers if node.type is None], "handlers that catch everything"


def test_no_data_is_ever_executed() -> None:
    wrong = []
    for place, node in nodes():
        if isinstance(node, ast.Import):
            wrong += [(place, alias.name) for alias in node.names if alias.name.partition(".")[0] in EXECUTES_DATA]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in EXECUTES_DATA:
            wrong.append((place, node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec"):
                wrong.append((place, name))
            wrong += [(place, f"{name}({word.arg})") for word in node.keywords if word.arg == "allow_pickle"]
    assert not wrong


def test_nothing_is_left_unimplemented() -> None:
    assert not [place for place, node in nodes() if isinstance(node, ast.Name) and node.id == "NotImplementedError"]
