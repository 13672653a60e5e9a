"""What is wrong with a Slurm script that somebody wrote. Text only, no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong in a script. line: from 1; fatal: the run would not start as meant."""

    line: int
    fatal: bool
    text: str


@dataclass(frozen=True, slots=True)
class _Script:
    """options: of #SBATCH lines, with their line numbers; commands: (line number, joined text) of the rest."""

    options: dict[str, tuple[int, str]]
    commands: tuple[tuple[int, str], ...]

    def number(self, *names: str) -> tuple[int, int] | None:
        """(line, value) of the first of the options that is given as a number; gpu:8 and gpu:a100:8 are 8."""
        for name in names:
            line, value = self.options.get(name, (0, ""))
            found = re.search(r"(\d+)$", value)
            if line and found:
                return line, int(found[1])
        return None


_SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "t": "time", "J": "job-name", "p": "partition"}
_LAUNCHER = re.compile(r"\b(torchrun|torch\.distributed\.(?:run|launch)|deepspeed|accelerate\s+launch)\b")
_PROCESSES = re.compile(
    r"--(?:nproc[-_]per[-_]node|num_gpus|num_processes)[ =]+[\"']?(\$?\{?\w+(?::?-\w+)?\}?)"
)
_NODES = re.compile(r"--nnodes[ =]+[\"']?(\d+)\b")


def check_sbatch(text: str) -> tuple[Finding, ...]:
    """What is wrong with a Slurm script that starts torchrun or a launcher like it, worst first."""
    script = _parse(text)
    starts = [
        (line, command)
        for line, command in script.commands
        if _LAUNCHER.search(command) and not command.startswith(("echo", "printf"))
    ]
    if not starts:
        last = len(text.splitlines()) or 1
        return (Finding(line=last, fatal=False, text="starts no torchrun; there is nothing to check"),)
    findings = [found for line, command in starts for found in _start_findings(script, line, command)]
    findings += _job_findings(script)
    return tuple(sorted(findings, key=lambda found: (not found.fatal, found.line)))


def _start_findings(script: _Script, line: int, command: str) -> Iterator[Finding]:
    found = _LAUNCHER.search(command)
    assert found is not None, "the caller looked for it"
    launcher = found[1]
    nodes = (script.number("nodes") or (0, 1))[1]
    processes = _processes(script, command)
    tasks_line, tasks = _tasks_per_node(script, nodes)
    by_srun = re.search(r"\bsrun\b", command[: found.start()]) is not None
    own = re.search(r"\bsrun\b[^|;&]*?--ntasks-per-node[ =]+1\b", command) is not None
    if by_srun and tasks > 1 and not own:
        times = (
            f"{tasks} × {processes} = {tasks * processes} processes" if processes else f"{tasks} launchers"
        )
        yield Finding(
            line=tasks_line,
            fatal=True,
            text=f"`--ntasks-per-node` must be 1, but is {tasks}: srun (line {line}) starts {launcher} once for each "
            f"task, and each starts a process for every GPU, so {times} a node"
            + (f" where {processes} are meant" if processes else "")
            + "; use --ntasks-per-node=1 (and give it the CPUs of all with --cpus-per-task)",
        )
    if not by_srun and nodes > 1:
        yield Finding(
            line=line,
            fatal=True,
            text=f"{launcher} must be started by srun, but is not: it would run on the first of the {nodes} nodes "
            f"only, and wait there for the others; write srun {launcher} …",
        )
    gpus = script.number("gpus-per-node", "gres", "gpus-per-task")
    if processes and gpus and processes > gpus[1]:
        yield Finding(
            line=line,
            fatal=True,
            text=f"processes a node must be at most its {gpus[1]} GPUs (line {gpus[0]}), but are {processes}",
        )
    given = _NODES.search(command)
    if given and int(given[1]) != nodes:
        yield Finding(
            line=line,
            fatal=True,
            text=f"`--nnodes` must be the {nodes} nodes of the job, but is {given[1]}; "
            "write --nnodes=$SLURM_JOB_NUM_NODES",
        )
    cpus = script.number("cpus-per-task")
    if by_srun and cpus and "cpus-per-task" not in command and "SRUN_CPUS_PER_TASK" not in _all(script):
        yield Finding(
            line=line,
            fatal=False,
            text=f"srun does not take over --cpus-per-task={cpus[1]} since Slurm 22.05, so ranks may share a core; "
            "write srun --cpus-per-task=$SLURM_CPUS_PER_TASK",
        )


def _job_findings(script: _Script) -> Iterator[Finding]:
    for line, command in script.commands:
        if re.search(r"MASTER_ADDR=.*scontrol show hostname", command) and not re.search(
            r"head|sed|awk|\[0\]", command
        ):
            yield Finding(
                line=line,
                fatal=True,
                text="`MASTER_ADDR` must be one name, but is the list of all nodes; add | head -n 1",
            )
        if re.search(r"MASTER_ADDR=\"?(\$\(hostname|localhost|127\.)", command) and "srun" in command:
            yield Finding(
                line=line,
                fatal=True,
                text="`MASTER_ADDR` must be the same on all nodes, but each sets its own name; set it before srun",
            )
        port = re.search(r"MASTER_PORT=[\"']?(\d+)\b", command)
        if port:
            yield Finding(
                line=line,
                fatal=False,
                text=f"`MASTER_PORT` is {port[1]} for every job, so two on one node collide; "
                "derive it: MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
            )
    if "requeue" not in script.options and "requeue" not in _all(script):
        yield Finding(
            line=1,
            fatal=False,
            text="no --requeue: a preempted job or a lost node ends the run; add #SBATCH --requeue",
        )
    if "signal" not in script.options:
        yield Finding(
            line=1,
            fatal=False,
            text="no --signal: at the time limit all since the last checkpoint is lost; "
            "`python -m triaxis.launch.script slurm` writes a script that saves first",
        )


def _processes(script: _Script, command: str) -> int | None:
    """Processes that one launcher starts: a number, or what a variable in the script or of Slurm stands for."""
    found = _PROCESSES.search(command)
    if found is None:
        return None
    value = found[1]
    if value.isdecimal():
        return int(value)
    name = re.sub(r"\W.*$", "", value.strip("${}"))
    for _, line in script.commands:
        assigned = re.search(rf"\b{re.escape(name)}=[\"']?(\d+)\b", line)
        if assigned:
            return int(assigned[1])
    gpus = script.number("gpus-per-node", "gres")
    return gpus[1] if gpus and (name.startswith("SLURM_GPUS") or value in ("gpu", "auto")) else None


def _tasks_per_node(script: _Script, nodes: int) -> tuple[int, int]:
    """(line, tasks a node): as given, or all tasks over the nodes."""
    given = script.number("ntasks-per-node", "tasks-per-node")
    if given:
        return given
    every = script.number("ntasks")
    return (every[0], -(-every[1] // nodes)) if every else (1, 1)


def _all(script: _Script) -> str:
    return "\n".join(command for _, command in script.commands)


def _parse(text: str) -> _Script:
    options: dict[str, tuple[int, str]] = {}
    commands: list[tuple[int, str]] = []
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        directive = re.match(r"#SBATCH\s+(?:--([\w-]+)|-(\w))(?:[ =]+(\S+))?", line)
        if directive:
            name = directive[1] or _SHORT.get(directive[2], directive[2])
            options[name] = (number, directive[3] or "")
            continue
        if not joined and line.lstrip().startswith("#"):
            continue
        start = start if joined else number
        joined += line.rstrip().removesuffix("\\") + " "
        if not line.rstrip().endswith("\\"):
            if joined.strip():
                commands.append((start, joined.strip()))
            joined = ""
    return _Script(options, tuple(commands))
