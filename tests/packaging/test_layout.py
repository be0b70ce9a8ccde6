"""What import-linter cannot see: the extension is no source file, so its importers are checked here."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "hetero"


def imports_extension(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(name.name == "hetero._cpu" for name in node.names):
            return True
        if isinstance(node, ast.ImportFrom):
            names = {name.name for name in node.names}
            if node.module == "hetero._cpu" or (node.module in {"hetero", None} and "_cpu" in names):
                return True
    return False


def test_extension_has_few_importers() -> None:
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if imports_extension(path.read_text())
    }
    own = {"cpu.py", "cpu_parts.py", "cpu_pool.py", "cpu_weights.py", "kernel_choice.py"}
    assert importers == own | {"quant/fields.py", "quant/ggml.py"}
