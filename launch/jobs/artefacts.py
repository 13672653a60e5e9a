"""What starts a run elsewhere: the torchrun command, a Slurm script, Kubernetes manifests. Text only, no torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from triaxis.launch.gpu_environment import DEFAULTS, DETERMINISTIC
from triaxis.launch.jobs.sbatch import render_sbatch
from triaxis.launch.writing import check_target, write_text

PROGRAM = "triaxis.launch.train"
SHUTDOWN_SECONDS = 240
"""How long torchrun leaves its ranks to save after SIGTERM, before it kills them."""

CPUS_PER_GPU = 8
GRACE_SECONDS = SHUTDOWN_SECONDS + 60


VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
ONE_LINE = r"[^\x00-\x1f\x7f]*"
TIME = r"(?:[0-9]{1,4}-)?[0-9]{1,6}(?::[0-9]{2}){0,2}"
SLURM_NAMES = r"[A-Za-z0-9_][A-Za-z0-9_.,+@-]{0,200}"
IMAGE = r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,300}"
LABEL = r"[a-z0-9](?:[a-z0-9.-]{0,250}[a-z0-9])?"
MOUNT = r"/[A-Za-z0-9._/-]{0,300}"
"""Grammars of what comes to stand in a script outside of quotes, or in a manifest."""


def _match(field: str, grammar: str, value: str, what: str) -> None:
    if not re.fullmatch(grammar, value, re.ASCII):
        raise ValueError(f"`{field}` must be {what}, but is {value[:80]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: `flags` of triaxis.launch.train, on `nodes` × `gpus_per_node` ranks.

    setup: shell lines before the start (modules, a virtual environment); environment: variables for every rank
    """

    name: str
    flags: tuple[str, ...]
    nodes: int = 1
    gpus_per_node: int = 8
    max_restarts: int = 3
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {getattr(self, name)}")
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", self.name):
            raise ValueError(
                f"`name` must be a name that Slurm and Kubernetes both take (a-z, 0-9 and -, from a letter, at most "
                f"52), but is {self.name!r}; for example {job_name(self.name)!r}"
            )
        for name, value in self.environment.items():
            _match("env", VARIABLE, name, "a variable's name (letters, digits and _)")
            _match("env", ONE_LINE, value, "one line of printable text")
        for line in self.setup:
            _match("setup", ONE_LINE, line, "one line of printable text")


def job_name(text: str) -> str:
    """A text as a job's name: `llama2-70b` and `Qwen2.5 7B` give `llama2-70b` and `qwen2-5-7b`."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:52].rstrip("-")
    return name if name[:1].isalpha() else f"run-{name}"[:52].rstrip("-")


def recovery_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """What lets a restarted run go on: checkpoints, and resuming from the newest; not where the flags say otherwise."""
    given = {flag.split("=")[0].lstrip("-").replace("-", "_") for flag in flags if flag.startswith("--")}
    wanted: tuple[str, ...] = ()
    if not given & {"save_strategy", "save_steps", "save_minutes"}:
        wanted += ("--save_strategy", "steps", "--save_steps", "500")
    if "resume" not in given:
        wanted += ("--resume", "auto")
    return wanted


def torchrun_arguments(job: Job, *launcher: str) -> tuple[str, ...]:
    """The words of the start command; `launcher`: torchrun's options that say where and how ranks start."""
    return ("torchrun", *launcher, "--shutdown-timeout", str(SHUTDOWN_SECONDS), "-m", PROGRAM, *job.flags)


def torchrun_command(job: Job, head: str = "HEAD_NODE", node: str = "NODE_NUMBER", port: int = 29500) -> str:
    """The command to type: on the one node, or on each, with `head` the first one's name and `node` its number.

    torchrun's static meeting: unlike c10d's, it unpickles nothing that comes to its port.
    """
    return shlex.join(_torchrun(job, head, node, port))


def _torchrun(job: Job, head: str, node: str, port: int) -> tuple[str, ...]:
    each = ("--nproc-per-node", str(job.gpus_per_node), "--max-restarts", str(job.max_restarts))
    if job.nodes == 1:
        return torchrun_arguments(job, *each)
    meeting = ("--node-rank", node, "--master-addr", head, "--master-port", str(port))
    return torchrun_arguments(job, "--nnodes", str(job.nodes), *each, *meeting)


def torchrun_script(job: Job) -> str:
    """A shell script around the command; with several nodes it takes the first node's name."""
    lines = ["#!/bin/bash"]
    if job.nodes > 1:
        lines += [
            f"# Run on each of the {job.nodes} nodes: bash torchrun.sh FIRST_NODE NUMBER (0 on the first node)",
            "head=${1:?give the name of the first node}",
            "node=${2:?give the number of this node: 0 on the first}",
        ]
    lines += [*job.setup, *_exports(_environment(job))]
    shell = {"@HEAD@": '"$head"', "@NODE@": '"$node"'}
    command = _folded(_torchrun(job, "@HEAD@", "@NODE@", 29500), 4, shell)
    return "\n".join([*lines, f"exec {command}"]) + "\n"


def _exports(environment: Mapping[str, str]) -> list[str]:
    return [f"export {key}={shlex.quote(value)}" for key, value in environment.items()]


def slurm_script(
    job: Job,
    *,
    time: str = "24:00:00",
    cpus_per_gpu: int = CPUS_PER_GPU,
    partition: str | None = None,
    account: str | None = None,
    warning_seconds: int = GRACE_SECONDS,
) -> str:
    """An sbatch script; see sbatch.py. Raises ValueError for a field that is not what Slurm takes."""
    _match("time", TIME, time, "a limit as Slurm reads it, such as 90, 12:00:00 or 2-12:00:00")
    for option, value in (("partition", partition), ("account", account)):
        if value is not None:
            _match(option, SLURM_NAMES, value, "a name of letters, digits and _ . , + @ -")
    shell = {
        "@NODES@": '"$SLURM_JOB_NUM_NODES"',
        "@ID@": '"$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$attempt"',
        "@ADDRESS@": '"$MASTER_ADDR"',
        "@PORT@": '"$MASTER_PORT"',
    }
    words = torchrun_arguments(
        job,
        *("--nnodes", "@NODES@", "--nproc-per-node", str(job.gpus_per_node), "--max-restarts", "0"),
        *("--rdzv-id", "@ID@", "--master-addr", "@ADDRESS@", "--master-port", "@PORT@"),
    )
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.gpus_per_node),
        "cpus-per-task": str(cpus_per_gpu * job.gpus_per_node),
        "mem": "0",
        "time": time,
        "signal": f"B:USR1@{warning_seconds}",
        **({"partition": partition} if partition else {}),
        **({"account": account} if account else {}),
    }
    return render_sbatch(
        options=options,
        setup=(*_exports(_environment(job, cpus_per_gpu)), *job.setup),
        command=_folded(words[1:], 8, shell),
        restarts=job.max_restarts,
    )


NETWORK = {"NCCL_IB_DISABLE": "0"}
"""InfiniBand is used where there is any. Card and interface: --env NCCL_IB_HCA=…"""


def _environment(job: Job, cpus_per_gpu: int = CPUS_PER_GPU) -> dict[str, str]:
    """What every rank finds: torchrun alone would leave it one thread."""
    fixed = DETERMINISTIC if "--deterministic" in job.flags else {}
    return {"OMP_NUM_THREADS": str(cpus_per_gpu), **DEFAULTS, **NETWORK, **fixed, **job.environment}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where Kubernetes finds things. claim: a persistent volume claim that all nodes can write, mounted at `mount`;
    the run's folder is there, so that a restarted run finds its checkpoints."""

    image: str
    claim: str
    mount: str = "/data"
    namespace: str = "default"

    def __post_init__(self) -> None:
        _match("image", IMAGE, self.image, "the name of a container image")
        _match("claim", LABEL, self.claim, "a name that Kubernetes takes (a-z, 0-9, . and -)")
        _match("namespace", LABEL, self.namespace, "a name that Kubernetes takes (a-z, 0-9, . and -)")
        _match("mount", MOUNT, self.mount, "an absolute path of letters, digits and . _ / -")


def pytorch_job(job: Job, cluster: Cluster) -> str:
    """A PyTorchJob of the training operator (kubeflow.org/v1). torchrun reads the operator's PET_ variables."""
    pod = _pod(job, cluster, "pytorch")
    return _yaml(
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": job.name, "namespace": cluster.namespace},
            "spec": {
                "nprocPerNode": str(job.gpus_per_node),
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": RESTARTS},
                "elasticPolicy": {
                    "rdzvBackend": "c10d",
                    "minReplicas": job.nodes,
                    "maxReplicas": job.nodes,
                    "maxRestarts": job.max_restarts,
                },
                "pytorchReplicaSpecs": {
                    "Worker": {"replicas": job.nodes, "restartPolicy": "OnFailure", "template": {"spec": pod}}
                },
            },
        }
    )


RESTARTS = 10
"""Restarts of a pod that was evicted or failed; each resumes from the newest checkpoint."""


def train_job(job: Job, cluster: Cluster) -> str:
    """A TrainJob of the Kubeflow trainer (trainer.kubeflow.org/v1alpha1) and the runtime it refers to, in one file.

    The runtime is part of it because where volumes go in a TrainJob itself has changed between releases.
    """
    pod = _pod(job, cluster, "node")
    container = pod["containers"][0]
    trainer = {
        "image": container.pop("image"),
        "command": container.pop("command"),
        "env": container.pop("env"),
        "numNodes": job.nodes,
        "numProcPerNode": job.gpus_per_node,
        "resourcesPerNode": container.pop("resources"),
    }
    container["image"] = cluster.image
    metadata = {"name": job.name, "namespace": cluster.namespace}
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**metadata, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": RESTARTS},
                    "replicatedJobs": [
                        {
                            "name": "node",
                            "template": {"metadata": step, "spec": {"template": {"spec": pod}}},
                        }
                    ],
                }
            },
        },
    }
    wanted = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    train = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {"runtimeRef": wanted, "trainer": trainer},
    }
    return _yaml(runtime, train)


def _pod(job: Job, cluster: Cluster, container: str) -> dict[str, Any]:
    """A node's pod: one torchrun, its GPUs, the volume, and shared memory for the data loaders and NCCL."""
    command = torchrun_arguments(job)
    if job.setup:
        command = ("bash", "-c", "\n".join([*job.setup, f"exec {shlex.join(command)}"]))
    return {
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [
            {
                "name": container,
                "image": cluster.image,
                "command": list(command),
                "workingDir": cluster.mount,
                "env": [{"name": key, "value": value} for key, value in _environment(job).items()],
                "resources": {"limits": {"nvidia.com/gpu": job.gpus_per_node}},
                "volumeMounts": [
                    {"name": "data", "mountPath": cluster.mount},
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": cluster.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def write_artefacts(
    directory: Path, job: Job, cluster: Cluster, *, overwrite: bool = False
) -> tuple[Path, ...]:
    """Writes every form of the job into the folder, with the flags that let it resume; what was written.

    Raises OSError or ValueError where it cannot.
    """
    job = replace(job, flags=(*job.flags, *recovery_flags(job.flags)))
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "torchrun.sh": torchrun_script(job),
        "slurm.sbatch": slurm_script(job),
        "pytorchjob.yaml": pytorch_job(job, cluster),
        "trainjob.yaml": train_job(job, cluster),
    }
    for name in files:  # all of them, or none
        check_target(directory / name, "write", overwrite=overwrite)
    for name, text in files.items():
        write_text(directory / name, text, "write", overwrite=overwrite)
    return tuple(directory / name for name in files)


def _yaml(*documents: Mapping[str, Any]) -> str:
    import yaml  # only where a manifest is asked for

    return str(yaml.safe_dump_all(documents, sort_keys=False, width=110))


def _folded(words: Sequence[str], indent: int, shell: Mapping[str, str]) -> str:
    """A command over several lines, an option and its values each; `shell` has words that the shell expands."""
    lines: list[list[str]] = []
    for word in words:
        quoted = shell.get(word) or shlex.quote(word)
        if word.startswith("-") or not lines:
            lines.append([quoted])
        else:
            lines[-1].append(quoted)
    return (" \\\n" + " " * indent).join(" ".join(line) for line in lines)
