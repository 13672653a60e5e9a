"""The rules of the house that a machine can check: who imports whom, and what stays free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("launch", "engine", "models", "parallel")
PURE = (
    "parallel.places.topology",
    "parallel.pipeline.schedule",
    "parallel.pipeline.check",
    "parallel.pipeline.draw",
    "parallel.places.layout",
    "parallel.places.partition",
    "parallel.replicas.cut",
    "parallel.replicas.limits",
    "parallel.replicas.reductions",
    "models.config",
    "models.fields",
    "models.kinds",
    "models.positions",
    "models.presets",
    "engine.config",
    "engine.rules",
    "engine.plan",
    "engine.plain_files",
    "engine.checkpoint.manifest",
    "engine.checkpoint.schema",
    "engine.run.resume",
    "launch.environment",
    "launch.flags",
    "launch.schedule",
    "launch.train",
    "launch.hardware.hardware",
    "launch.hardware.collectives",
    "launch.planner.layout",
    "launch.planner.held",
    "launch.planner.cost",
    "launch.published.memory",
    "launch.published.cost",
    "launch.planner.accuracy",
    "launch.published.score",
    "launch.cli",
    "launch.doctor",
    "launch.plan",
    "launch.script",
    "launch.jobs.artefacts",
    "launch.planner.explain",
    "launch.hardware.measured",
    "launch.published.memory_tables",
    "launch.pages.present",
    "launch.pages.report",
    "launch.planner.reprice",
    "launch.jobs.sbatch_check",
    "launch.planner.search",
    "launch.planner.table",
)
DISTRIBUTED = {
    "parallel/worlds/process.py",
    "parallel/worlds/meeting.py",
    "parallel/worlds/neighbours.py",
    "launch/node_meeting.py",
    "launch/run.py",
    "parallel/worlds/process_group.py",
    "parallel/replicas/fsdp.py",
    "parallel/worlds/mesh.py",
    "engine/checkpoint/assignment.py",
    "engine/checkpoint/storage.py",
    "engine/checkpoint/stored.py",
}
ENVIRONMENT = {"os.environ", "os.getenv"}
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down_and_are_absolute(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    allowed = ROOMS[ROOMS.index(room) :]
    for module in imported(path):
        first, _, rest = module.partition(".")
        assert first not in ROOMS, f"write triaxis.{module}"
        if first == "triaxis" and rest:
            assert rest.split(".")[0] in allowed, f"{room} must not import {module}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_launch_reads_the_environment(path: Path) -> None:
    if path.relative_to(ROOT).parts[0] == "launch":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not (isinstance(node, ast.Attribute) and ast.unparse(node) in ENVIRONMENT), (
            f"line {node.lineno}"
        )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_torch_distributed_is_imported_only_where_ranks_are_processes(path: Path) -> None:
    if name_of(path) not in DISTRIBUTED:
        assert not any(module.startswith("torch.distributed") for module in imported(path))


def test_pure_modules_start_without_torch() -> None:
    lines = [f"import triaxis.{name}; assert 'torch' not in sys.modules, {name!r}" for name in PURE]
    subprocess.run([sys.executable, "-c", "import sys\n" + "\n".join(lines)], check=True)
