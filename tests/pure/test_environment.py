"""Launchers other than torchrun: their variables are used, or it is said what is missing; none trains alone unasked."""

from __future__ import annotations

import pytest

from triaxis.launch.environment import LaunchError, first_host, launch_warnings, read_launch, speaks

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08],gpu11",
}
MEETING = {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH], ids=["mpirun", "mpiexec"])
def test_mpi_is_used_where_it_is_said_where_to_meet(variables: dict[str, str]) -> None:
    launch = read_launch(variables | MEETING)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (5, 8, 1, 4)
    assert (launch.host, launch.port) == ("head", 29500)
    with pytest.raises(LaunchError, match=r"`MASTER_ADDR` and `MASTER_PORT` must be set, because \w+ is 8"):
        read_launch(variables)


def test_plain_slurm_says_all_there_is_to_know() -> None:
    launch = read_launch(SLURM)
    assert (launch.rank, launch.size, launch.local_rank) == (5, 8, 1)
    assert (launch.host, launch.port) == ("gpu07", 23456)
    assert launch.run_id == "123456s2-23456"
    assert read_launch(SLURM | MEETING).host == "head"
    with pytest.raises(LaunchError, match="srun started several processes"):
        read_launch({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"})


def test_one_process_of_such_a_launcher_is_one_process() -> None:
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).size == 1, "a batch script, not a step"
    assert read_launch({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}).size == 1


def test_torchrun_inside_a_slurm_step_is_torchruns() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", **MEETING}
    one_each = {"GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "1"}
    launch = read_launch(SLURM | torchrun | one_each | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (launch.rank, launch.size, launch.hosted) == (3, 4, True)
    assert not read_launch(torchrun).hosted


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("n[3,5-7]", "n3"), ("rack[02-04]-gpu,x", "rack02-gpu"), ("a,b[1-2]", "a"), ("", "")],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_only_rank_0_of_any_launcher_speaks() -> None:
    assert (
        speaks({})
        and speaks({"RANK": "0"})
        and speaks({"RANK": "x"})
        and speaks(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"})
    )
    assert not any(speaks(variables) for variables in (OPEN_MPI, MPICH, SLURM, {"RANK": "3"}))


def test_a_torchrun_for_each_task_is_explained() -> None:
    """Four nodes, eight tasks a node, and each task a torchrun of eight processes: 256 where 32 are meant."""
    torchrun = {"RANK": "0", "WORLD_SIZE": "32", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8", **MEETING}
    started = SLURM | torchrun | {"GROUP_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "32"}
    with pytest.raises(LaunchError) as caught:
        read_launch(started)
    told = str(caught.value)
    assert "once for each of its 32 tasks" in told and "256 are started where 32 are meant" in told
    assert "--ntasks-per-node=1" in told
    assert read_launch(started | {"SLURM_STEP_NUM_TASKS": "4"}).size == 32, "one torchrun a node"
    del started["SLURM_STEP_NUM_TASKS"]
    assert read_launch(started).size == 32, "the batch script's own torchrun is no step's"


def test_the_deepspeed_launchers_variables() -> None:
    """As deepspeed.launcher.launch of 0.19.8 sets them, on the second of two nodes of four GPUs."""
    variables = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1"}
    launch = read_launch(variables | {"CROSS_SIZE": "2", **MEETING})
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (5, 8, 1, 4)


def test_accelerate_that_starts_one_process_of_several_is_told() -> None:
    accelerate = {"ACCELERATE_MIXED_PRECISION": "no", **MEETING}
    (told,) = launch_warnings(accelerate)
    assert "started one process" in told and "triaxis run -n N" in told
    assert not launch_warnings(accelerate | {"RANK": "0"}) and not launch_warnings(MEETING)
    assert not launch_warnings(accelerate | OPEN_MPI), "mpirun has started the others"
    assert not launch_warnings({"ACCELERATE_MIXED_PRECISION": "no"})
