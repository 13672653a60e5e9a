"""The Slurm script: one torchrun a node, saves before the time limit, requeues and resumes. Text only, no torch."""

from __future__ import annotations

from collections.abc import Mapping

SCRIPT = """\
#!/bin/bash
{options}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# One task a node; its torchrun starts the {processes} ranks of the node. More tasks would each start {processes} more.
if [ "${{SLURM_NTASKS_PER_NODE:-1}}" != 1 ]; then
    echo "--ntasks-per-node must be 1 (one torchrun a node), but is $SLURM_NTASKS_PER_NODE" >&2
    exit 2
fi

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # another for each job, as two may share a node
export MASTER_ADDR MASTER_PORT
{setup}

# Before the time limit Slurm sends USR1 to this script alone (--signal=B:). It passes it on to the ranks, which save
# at the end of their step; then the job goes back into the queue and resumes. Preemption does the same by itself.
stopping=
stop() {{
    stopping=yes
    scancel --signal=USR1 "$SLURM_JOB_ID"
}}
trap stop USR1

# A failed step is started again here, not by torchrun, which cannot tell a failure from a rank that saved and stopped.
attempt=0
while :; do
    # The launcher ignores USR1, which would end it; the ranks have a handler of their own.
    # shellcheck disable=SC2016 # expanded by the inner shell
    srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
        bash -c 'trap "" USR1; exec torchrun --node-rank "$SLURM_NODEID" "$@"' torchrun \\
        {command} &
    step=$!
    wait "$step"
    code=$?
    while [ "$code" -gt 128 ] && kill -0 "$step" 2>/dev/null; do # a signal ended the wait, not the step
        wait "$step"
        code=$?
    done
    if [ "$code" != 0 ] && [ -n "$stopping" ]; then
        echo "stopped before the time limit; back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
    if [ "$code" = 0 ] || [ "$attempt" -ge {restarts} ]; then
        exit "$code"
    fi
    attempt=$((attempt + 1))
    echo "the run ended with exit code $code; starting it again ($attempt of {restarts})" >&2
done
"""


def render_sbatch(
    *,
    options: Mapping[str, str],
    setup: tuple[str, ...],
    command: str,
    restarts: int,
) -> str:
    """The script. setup: lines before the start; command: torchrun's words after its name, quoted for a shell."""
    return SCRIPT.format(
        options="\n".join(f"#SBATCH --{key}={value}" for key, value in options.items()),
        processes=options["gpus-per-node"],
        setup="\n".join(setup),
        command=command,
        restarts=restarts,
    )
