"""docs/api.md: every example runs as it stands. The public names are there, and no torch before it is needed."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]

EXAMPLE = re.compile(r"<!-- example:? ?(.*?) ?-->\n```python\n(.*?)```", re.DOTALL)
EXAMPLES = EXAMPLE.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
PACKAGES = ("parallel", "models", "engine", "launch")


def make_llama(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.processes
@pytest.mark.parametrize("number", [n for n, (how, _) in enumerate(EXAMPLES) if not how.startswith("file")])
def test_an_example_runs_as_it_stands(number: int, tmp_path: Path) -> None:
    how, text = EXAMPLES[number]
    kind, _, what = how.partition(" ")
    if kind == "folder":
        make_llama(tmp_path / what)
    for other, body in EXAMPLES[:number]:  # files that an example before this one has written
        if other.startswith("file "):
            (tmp_path / other.removeprefix("file ")).write_text(body, encoding="utf-8")
    script = tmp_path / "mine.py"
    script.write_text(text, encoding="utf-8")
    command = [sys.executable]
    if kind == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", what]
    done = subprocess.run(
        [*command, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_block_of_python_is_an_example() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert text.count("```python") == len(EXAMPLES) >= 8


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_there_and_told_to_type_checkers(package: str) -> None:
    module = importlib.import_module(f"triaxis.{package}")
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        (alias.name, node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and alias_of(node, package)
        for alias in node.names
    }
    assert {name for name, _ in typed} == set(dir(module))
    for name, origin in typed:
        assert getattr(module, name) is getattr(importlib.import_module(str(origin)), name)
    with pytest.raises(AttributeError, match=f"module 'triaxis.{package}' has no attribute 'nothing'"):
        _ = module.nothing


def alias_of(node: ast.ImportFrom, package: str) -> bool:
    return (node.module or "").startswith(f"triaxis.{package}.") and node.names[0].asname is not None


def test_configurations_are_public_without_torch() -> None:
    code = (
        "import sys; from triaxis.models import ModelConfig, preset; from triaxis.parallel import Topology; "
        "from triaxis.engine import RunConfig, StepPlan, resolve; import triaxis.launch; "
        "preset('tiny'); assert 'torch' not in sys.modules, 'torch'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr
