"""The Trainer's flags that few lines have, each with why it changes nothing or what to use instead."""

from __future__ import annotations

from triaxis.launch.foreign.meaning import Meant, Translation, fixed, never, nothing, renamed, switched

_SHOWN = nothing("a run shows itself as docs/api.md and --logging-steps say")
_EVALUATION = nothing("an evaluation is the held-out loss, in --dtype, over --eval-batches")
_BATCHES = nothing("batches are made ahead on threads; see --dataloader-num-workers")
_HUB = nothing("of the hub, to which nothing is pushed")
_TRACKER = nothing("of a tracker that is off; metrics.jsonl has every step")
_DDP = nothing("how torch's DDP works; gradients go through buckets, see --bucket-elements")
_HALVES = "a 16-bit evaluation is --dtype bf16's"
REST_VALUES: dict[str, Translation] = {
    **dict.fromkeys(("--log-level", "--log-level-replica", "--torch-empty-cache-steps"), _SHOWN),
    **dict.fromkeys(
        ("--project", "--trackio-space-id", "--trackio-bucket-id", "--trackio-static-space-id"), _TRACKER
    ),
    **dict.fromkeys(("--eval-accumulation-steps", "--include-for-metrics"), _EVALUATION),
    **dict.fromkeys(("--dataloader-prefetch-factor", "--dataloader-multiprocessing-context"), _BATCHES),
    **dict.fromkeys(("--hub-token", "--hub-model-id", "--hub-strategy", "--hub-revision"), _HUB),
    **dict.fromkeys(("--ddp-bucket-cap-mb", "--ddp-backend"), _DDP),
    **dict.fromkeys(
        ("--label-names", "--length-column-name"), nothing("data is text or tokens; see docs/data.md")
    ),
    "--gradient-checkpointing-kwargs": nothing("--recompute runs each block's forward again, exactly"),
    "--activation-checkpointing-kwargs": nothing("--recompute runs each block's forward again, exactly"),
    "--lr-scheduler-kwargs": fixed(
        ("{}", "none"), "use --min-learning-rate-ratio for what is left of the peak"
    ),
    "--optim-args": fixed(("", "none"), "use --adam-beta1, --adam-beta2, --adam-epsilon"),
    "--optim-target-modules": fixed(("", "none"), "all parameters are trained by one optimizer"),
    "--label-smoothing-factor": fixed(("0", "0.0"), "the loss is the plain cross-entropy"),
    "--neftune-noise-alpha": fixed(("0", "0.0", "none"), "nothing is added to embeddings"),
    "--torch-compile-backend": fixed(("", "none", "inductor"), "layers are compiled by torch's inductor"),
    "--torch-compile-mode": fixed(("", "none", "default"), "layers are compiled in inductor's default mode"),
    "--liger-kernel-config": fixed(
        ("", "none", "{}"), "--kernels says what does which operation; see triaxis doctor"
    ),
    "--eval-delay": fixed(("0", "0.0"), "evaluations begin with the first --eval-steps"),
    "--metric-for-best-model": fixed(
        ("loss", "eval_loss"), "the best is the one with the least held-out loss"
    ),
    "--data-seed": lambda value: Meant(
        fault=f"is {value}: --seed decides the order of the data too; use it alone"
    ),
    "--accelerator-config": fixed(
        ("{}", "none"), "use the flags of this engine, or --accelerate-config FILE"
    ),
    "--parallelism-config": fixed(("{}", "none"), "use --tp, --pp, --dp and --ep"),
    "--train-sampling-strategy": fixed(("random",), "rows come in the order of --seed; --pack fills them"),
    "--fp16-opt-level": nothing("of fp16, which is off"),
    "--fp16-backend": nothing("of fp16, which is off"),
    "--half-precision-backend": nothing("of fp16, which is off"),
    "--per-gpu-train-batch-size": renamed("--per-device-train-batch-size"),
    "--fsdp-min-num-params": nothing("each block is gathered as a whole"),
    "--fsdp-transformer-layer-cls-to-wrap": nothing("each block is gathered as a whole"),
    "--sharded-ddp": fixed(("", "none", "no"), "use --zero 0 to 3, or --fsdp"),
    "--torchdynamo": fixed(("", "none"), "use --torch-compile, or --kernels block=compile"),
    "--push-to-hub-model-id": _HUB,
    "--past-index": fixed(("-1",), "a row is a whole text"),
    "--ray-scope": nothing("of a search of hyperparameters"),
    "--tpu-num-cores": fixed(("none",), "this engine runs on GPUs and CPUs"),
    "--mp-parameters": fixed(("",), "use --tp and --pp"),
    "--debug": fixed(("", "none"), "--on-nan and --check-collectives look for faults"),
}
"""Flags with a value that few lines have."""
REST_SWITCHES: dict[str, Translation] = {
    **dict.fromkeys(
        ("--logging-first-step", "--log-on-each-node", "--logging-nan-inf-filter", "--disable-tqdm"), _SHOWN
    ),
    **dict.fromkeys(("--include-num-input-tokens-seen", "--skip-memory-metrics", "--use-cache"), _SHOWN),
    **dict.fromkeys(
        (
            *("--prediction-loss-only", "--eval-do-concat-batches", "--eval-use-gather-object"),
            *("--batch-eval-metrics", "--bf16-full-eval", "--do-eval"),
        ),
        _EVALUATION,
    ),
    **dict.fromkeys(
        (
            *("--dataloader-drop-last", "--dataloader-pin-memory", "--dataloader-persistent-workers"),
            "--dataloader-in-order",
        ),
        _BATCHES,
    ),
    **dict.fromkeys(("--hub-private-repo", "--hub-always-push"), _HUB),
    **dict.fromkeys(("--ddp-broadcast-buffers", "--ddp-static-graph"), _DDP),
    "--average-tokens-across-devices": nothing("the loss is a mean over the global batch's tokens"),
    "--remove-unused-columns": nothing("what a row's other fields are is in docs/data.md"),
    "--restore-callback-states-from-checkpoint": nothing("a checkpoint has all that the run goes on with"),
    "--enable-jit-checkpoint": nothing("SIGTERM and SIGUSR1 save, unless --save-strategy is no"),
    "--activation-checkpointing": switched(Meant(words=("--recompute",)), Meant(words=("--no-recompute",))),
    "--full-determinism": switched(Meant(words=("--deterministic",))),
    "--use-cpu": switched(Meant(words=("--device", "cpu"))),
    "--no-cuda": switched(Meant(words=("--device", "cpu"))),
    "--group-by-length": never("rows come in the order of --seed; --pack fills them"),
    "--fp16-full-eval": never(_HALVES),
    "--torch-compile": switched(Meant(words=("--kernels", "block=compile"))),
    "--use-liger-kernel": switched(Meant(words=("--kernels", "norm=liger,activation=liger"))),
    "--auto-find-batch-size": never("triaxis plan finds what fits before it starts"),
    "--eval-on-start": never("evaluations are after --eval-steps and at the end"),
    "--save-only-model": never(
        "a checkpoint has what the run goes on with; use --save-hf, or triaxis convert"
    ),
    "--push-to-hub": never("use --save-hf DIR, and hf upload"),
    "--load-best-model-at-end": never("use --save-best, which keeps it, and triaxis convert"),
    "--greater-is-better": never("the best is the one with the least held-out loss"),
    "--ignore-data-skip": never("a resumed run goes on with the data that it has not seen"),
    "--include-tokens-per-second": _SHOWN,
    "--include-inputs-for-metrics": _EVALUATION,
    **dict.fromkeys(("--dispatch-batches", "--split-batches"), _BATCHES),
    "--adafactor": never("there are AdamW and SGD; see --optimizer"),
    "--use-mps-device": never("this engine runs on CUDA GPUs and CPUs"),
    "--use-ipex": never("kernels on CPUs are torch's; see triaxis doctor"),
    "--jit-mode-eval": never("an evaluation runs the model as training does"),
    "--do-predict": never("use triaxis generate"),
}
"""Booleans that few lines have."""
