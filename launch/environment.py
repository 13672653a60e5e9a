"""What a launcher such as torchrun tells a process, read from the environment and checked. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


class LaunchError(ValueError):
    """A launcher's variable is missing or malformed on this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The variables by which another launcher than torchrun tells a process its place."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str | None = None


OTHERS = (
    Launcher(name="srun", rank="SLURM_PROCID", size="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID"),
    Launcher(
        name="mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        name="mpiexec",
        rank="PMI_RANK",
        size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    ),
)
SLURM_PORTS = (20000, 10000)
"""The first port and how many; the job's number chooses one, as in our start script."""

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

NO_OVERLAP = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_BLOCKING_WAIT")
"""Variables that are 1 in other programs' recipes, and then keep communication from overlapping with computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """This process among those of the run.

    run_id: the same on all ranks, another for each start; restarts: how often the launcher has started it again
    host, port: where the ranks meet; hosted: the launcher itself has opened it
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    run_id: str = "alone"
    restarts: int = 0
    host: str = ""
    port: int = 0
    hosted: bool = False


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Without any launcher's variables: one process. A missing or malformed one is named. Raises LaunchError."""
    _refuse_launchers_on_top_of_each_other(environment)
    environment = as_torchrun(environment)
    if not any(environment.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return Launch()
    missing = [name for name in NEEDED if not environment.get(name)]
    if missing:
        given = [name for name in (*NEEDED, "LOCAL_RANK") if environment.get(name)]
        raise LaunchError(
            f"`{'`, `'.join(missing)}` must be set in the environment where {', '.join(given)} is, but is not; "
            f"start with torchrun, or unset {' and '.join(given)} to train in one process"
        )
    rank, size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    port = _number(environment, "MASTER_PORT")
    if size < 1:
        raise LaunchError(f"`WORLD_SIZE` must be at least 1, but is {size}; start with torchrun")
    if rank >= size:
        raise LaunchError(f"`RANK` must be less than WORLD_SIZE {size}, but is {rank}; start with torchrun")
    if not 0 < port < 65536:
        raise LaunchError(f"`MASTER_PORT` must be from 1 to 65535, but is {port}; choose a free port")
    # without torchrun's own variable Slurm's; else one machine is meant
    place = next((name for name in ("LOCAL_RANK", "SLURM_LOCALID") if environment.get(name)), "RANK")
    local_rank = _number(environment, place)
    # torchrun's, or the deepspeed launcher's; else one machine is meant
    ranks_here = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if environment.get(name)), None)
    local_size = size if ranks_here is None else _number(environment, ranks_here)
    if ranks_here is not None and local_rank >= local_size:
        raise LaunchError(
            f"`LOCAL_RANK` must be less than {ranks_here} {local_size}, but is {local_rank}; start with torchrun"
        )
    parts = (
        environment.get("TORCHELASTIC_RUN_ID", ""),
        str(port),
        environment.get("TORCHELASTIC_RESTART_COUNT", ""),
    )
    return Launch(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        run_id="-".join("".join(c for c in part if c.isalnum()) for part in parts if part),
        restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT") if parts[2] else 0,
        host=environment["MASTER_ADDR"],
        port=port,
        hosted=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _refuse_launchers_on_top_of_each_other(environment: Mapping[str, str]) -> None:
    """Raises LaunchError where srun has started more torchruns than the run has: some of them would be left over."""
    names = ("SLURM_STEP_NUM_TASKS", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if not all(environment.get(name, "").isdecimal() for name in names):
        return
    tasks, launchers, each = (int(environment[name]) for name in names)
    if tasks <= launchers:
        return
    raise LaunchError(
        f"`SLURM_STEP_NUM_TASKS` must be {launchers}, but is {tasks}: srun has started torchrun once for each of its "
        f"{tasks} tasks, and each torchrun starts {each} processes, so {tasks * each} are started where "
        f"{launchers * each} are meant; start one torchrun a node (#SBATCH --ntasks-per-node=1, or srun "
        "--ntasks-per-node=1 torchrun …), or let srun start the ranks without torchrun (srun python -m "
        "triaxis.launch.train …); where runs of their own are meant, unset SLURM_STEP_NUM_TASKS"
    )


def as_torchrun(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The variables, with those of srun, mpirun or mpiexec under torchrun's names. Raises LaunchError.

    A process that such a launcher started beside others never trains alone without a word.
    """
    if environment.get("RANK") or environment.get("WORLD_SIZE"):
        return environment
    launcher = next((one for one in OTHERS if environment.get(one.size, "1") != "1"), None)
    if launcher is None:
        return environment
    found = {"RANK": launcher.rank, "WORLD_SIZE": launcher.size, "LOCAL_RANK": launcher.local_rank}
    if launcher.local_size is not None:
        found["LOCAL_WORLD_SIZE"] = launcher.local_size
    given = {name: environment[theirs] for name, theirs in found.items() if environment.get(theirs)}
    host, port = environment.get("MASTER_ADDR") or "", environment.get("MASTER_PORT") or ""
    job = environment.get("SLURM_JOB_ID", "")
    if launcher.name == "srun":
        host = host or first_host(environment.get("SLURM_STEP_NODELIST", ""))
        port = port or (str(SLURM_PORTS[0] + int(job) % SLURM_PORTS[1]) if job.isdecimal() else "")
        given["TORCHELASTIC_RUN_ID"] = f"{job}s{environment.get('SLURM_STEP_ID', '')}"
    if not host or not port:
        raise LaunchError(
            f"`MASTER_ADDR` and `MASTER_PORT` must be set, because {launcher.size} is {environment[launcher.size]}: "
            f"{launcher.name} started several processes, which must meet somewhere; name rank 0's machine and a free "
            f"port ({launcher.name} -x MASTER_ADDR=HOST -x MASTER_PORT=29500 … with Open MPI), or use torchrun"
        )
    return {**environment, **given, "MASTER_ADDR": host, "MASTER_PORT": port}


def first_host(nodes: str) -> str:
    """The first name of Slurm's list: `node[03-05,9]-a,other` is `node03-a`."""
    found = re.match(r"([^,\[\]]+)(?:\[([0-9]+)[^\]]*\]([^,\[\]]*))?", nodes)
    return "" if found is None else found[1] + (found[2] or "") + (found[3] or "")


def speaks(environment: Mapping[str, str]) -> bool:
    """Only rank 0 reports what all ranks see alike; a rank that is malformed speaks too."""
    rank = environment.get("RANK") or next(
        (environment.get(one.rank, "") for one in OTHERS if environment.get(one.size, "1") != "1"), ""
    )
    return rank in ("0", "") or not rank.isdigit()


def launch_warnings(environment: Mapping[str, str]) -> list[str]:
    """A line for each variable that keeps communication from overlapping with computation, and one for a lone rank."""
    found = [
        f"warning: {name}=1 is set: communication hardly overlaps with computation; unset it for speed"
        for name in NO_OVERLAP
        if environment.get(name) == "1"
    ]
    # With several processes asked for, accelerate says where they meet; on CPUs it then starts one, but for mpirun.
    asked = "ACCELERATE_MIXED_PRECISION" in environment and environment.get("MASTER_ADDR")
    if asked and "RANK" not in as_torchrun(environment):
        found.append(
            "warning: accelerate launch has started one process, though MASTER_ADDR is set as if there were several "
            "(on CPUs it starts several only by mpirun); use torchrun --nproc-per-node N, or triaxis run -n N"
        )
    return found


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment[name]
    if not value.isdecimal():
        raise LaunchError(f"`{name}` must be a whole number, but is {value!r}; start with torchrun")
    return int(value)
