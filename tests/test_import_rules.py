"""Who may import whom. The table is the architecture; see docs/ARCHITECTURE.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "ds4"

# Longest matching prefix wins. A module may import foreign packages and ds4 modules not listed.
FORBIDDEN = {
    "ds4.errors": {"trio", "socket", "time", "cuda", "numba", "ds4"},
    "ds4.ids": {"trio", "socket", "time", "cuda", "numba", "ds4"},
    "ds4.collectives": {"trio", "cuda", "numba", "ds4.cpu", "ds4.cuda", "ds4.protocol",
                        "ds4.frontends"},
    "ds4.gguf": {"trio", "socket", "cuda", "numba", "gguf", "ds4.model", "ds4.cpu", "ds4.cuda",
                 "ds4.protocol", "ds4.frontends", "ds4.partition"},
    "ds4.model": {"trio", "socket", "cuda", "numba", "gguf", "time", "ds4.cpu", "ds4.cuda",
                  "ds4.protocol", "ds4.frontends"},
    "ds4.protocol": {"trio", "socket", "time", "cuda", "numba", "ds4.cpu", "ds4.cuda",
                     "ds4.frontends", "ds4.gguf", "ds4.model"},
    "ds4.partition": {"trio", "socket", "time", "cuda", "numba", "ds4.cpu", "ds4.cuda",
                      "ds4.protocol", "ds4.frontends"},
    "ds4.scheduler": {"trio", "socket", "time", "cuda", "numba", "ds4.cpu", "ds4.cuda",
                      "ds4.protocol", "ds4.frontends"},
    "ds4.sessions": {"trio", "socket", "time", "cuda", "numba", "ds4.cpu", "ds4.cuda",
                     "ds4.protocol", "ds4.frontends"},
    "ds4.steps": {"trio", "socket", "time", "cuda", "numba", "ds4.cpu", "ds4.cuda"},
    "ds4.sampling": {"trio", "socket", "time", "cuda", "numba", "ds4.cpu", "ds4.cuda"},
    "ds4.cpu": {"trio", "cuda", "ds4.cuda", "ds4.protocol", "ds4.frontends"},
    "ds4.cuda": {"trio", "ds4.protocol", "ds4.frontends"},
    "ds4.world": {"cuda", "numba", "ds4.cpu", "ds4.cuda", "ds4.frontends"},
    "ds4.backend": {"trio", "socket", "time", "cuda", "numba", "ds4.cpu", "ds4.cuda",
                    "ds4.protocol", "ds4.frontends"},
    "ds4.frontends": {"cuda", "numba", "ds4.cuda", "ds4.cpu"},
    "ds4": {"ds4.frontends"},
}  # fmt: skip
# The entry point has to name a frontend.
EXEMPT = {"ds4.__main__"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, *, is_package: bool) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: None if is_package and node.level == 1 else -1]
                base = ".".join([*parent, base]).rstrip(".")
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def violations(module: str, imported: set[str]) -> list[str]:
    if module in EXEMPT:
        return []
    rules = [rule for rule in FORBIDDEN if module == rule or module.startswith(rule + ".")]
    if not rules:
        return []
    forbidden = FORBIDDEN[max(rules, key=len)]
    return sorted(
        name for name in imported for bad in forbidden if name == bad or name.startswith(bad + ".")
    )


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=module_name)
def test_module_keeps_to_the_import_rules(path: Path):
    module = module_name(path)
    imported = imports_of(path.read_text(), module, is_package=path.name == "__init__.py")
    assert violations(module, imported) == [], f"{module} must not import these"


def test_the_rules_catch_a_violation():
    source = "import trio\nfrom ds4.cuda import memory\nfrom . import x\n"
    imported = imports_of(source, "ds4.protocol.frame", is_package=False)
    assert violations("ds4.protocol.frame", imported) == ["ds4.cuda", "ds4.cuda.memory", "trio"]


def test_importing_ds4_loads_neither_numba_nor_cuda_nor_a_server():
    code = (
        "import sys, ds4; bad = {'numba', 'cuda', 'starlette', 'hypercorn', 'gguf'} "
        "& set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
