"""The import direction: what each part may know of the others, read from the source by an AST walk."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DEVICE_SIDE = ["pallas_kernels", "attention", "decoder", "step", "runner", "engine", "llm"]
STATE_SIDE = ["config", "block_table", "batch", "step"]
HOST_SIDE = ["request", "scheduler", "engine", "llm"]
WITHOUT_JAX = [
    "request",
    "scheduler",
    "sampling_params",
    "block",
    "block_budget",
    "block_ledger",
    "prefix_cache",
    "plan",
    "outputs",
    "engine_config",
    "text",
]


def imports(path: pathlib.Path) -> set[str]:
    """Modules a file imports when it is imported itself, as dotted names; `from a import b` counts as a and a.b."""
    found = set()
    tree = ast.parse(path.read_text())
    typing_only = {
        node
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(module: str) -> list[pathlib.Path]:
    """The files of a module of pagedjax or of a package beside it."""
    for folder in (ROOT / "pagedjax" / module, ROOT / module):
        if folder.is_dir():
            return sorted(folder.rglob("*.py"))
    return [ROOT / "pagedjax" / f"{module}.py"]


def reaches(module: str) -> set[str]:
    """Everything of this project that importing a module imports, directly or not, and all else they name."""
    seen: set[str] = set()
    todo = list(files(module))
    visited = set()
    while todo:
        path = todo.pop()
        if path in visited:
            continue
        visited.add(path)
        for name in imports(path):
            seen.add(name)
            parts = name.split(".")
            if parts[0] in ("pagedjax", "pallas_kernels"):
                for target in (ROOT.joinpath(*parts).with_suffix(".py"), ROOT.joinpath(*parts, "__init__.py")):
                    if target.exists() and target != ROOT / "pagedjax" / "__init__.py":
                        todo.append(target)
    return seen


def dotted(module: str) -> str:
    return module if module == "pallas_kernels" else f"pagedjax.{module}"


def test_the_kernels_stand_alone() -> None:
    allowed = {"jax", "numpy", "pallas_kernels", "__future__"} | set(sys.stdlib_module_names)
    for path in files("pallas_kernels"):
        compilers = {"numba", "llvmlite"} if path.parent.name == "_cpu" else set()
        others = {name.split(".")[0] for name in imports(path)} - allowed - compilers
        assert not others, f"{path} imports {others}"


def test_numba_is_imported_once_a_program_is_traced_for_a_cpu() -> None:
    program = """
import sys
import jax.numpy as jnp
import pagedjax, pallas_kernels
pagedjax.LLM, pallas_kernels.layer_matmul
compilers = {"numba", "llvmlite"}
found = compilers & set(sys.modules)
assert not found, found
pallas_kernels.layer_matmul(jnp.ones((2, 3)), jnp.ones((1, 3, 16)), 0)
assert compilers <= set(sys.modules)
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, env=environment, check=True)


@pytest.mark.parametrize("chain", [DEVICE_SIDE, STATE_SIDE, HOST_SIDE])
def test_nothing_imports_what_is_built_on_it(chain: list[str]) -> None:
    for index, module in enumerate(chain):
        later = {dotted(name) for name in chain[index + 1 :]}
        assert not reaches(module) & later, f"{module} reaches {reaches(module) & later}"


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_the_host_side_needs_no_jax(module: str) -> None:
    assert not {name for name in reaches(module) if name.split(".")[0] in ("jax", "jaxlib", "flax", "pallas_kernels")}


def test_the_block_table_knows_no_model_and_no_scheduler() -> None:
    known = {name for name in reaches("block_table") if name.startswith("pagedjax.")}
    assert not {name for name in known if name.split(".")[1] in ("config", "decoder", "scheduler", "request", "engine")}


def test_only_the_public_face_imports_the_engine() -> None:
    for path in sorted((ROOT / "pagedjax").rglob("*.py")):
        if path.name not in ("llm.py", "outbox.py", "__init__.py"):
            assert "pagedjax.engine" not in imports(path), path


def test_planning_needs_no_jax(tmp_path: pathlib.Path) -> None:
    """As it runs, with what it imports when it is needed; `reaches` would count the reader of GGUF files."""
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 8, "vocab_size": 8}))
    program = f"""
import sys
import pagedjax.capacity
assert "LLM" in dir(pagedjax), dir(pagedjax)
print(pagedjax.capacity.plan({str(tmp_path)!r}, "H100", dtype="float16", trace=[(5, 5)]))
found = {{"jax", "jaxlib", "flax"}} & set(sys.modules)
assert not found, found
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], cwd=ROOT, check=True)
