"""Looks into checkpoints: python -m triaxis.launch.checkpoint ls|show|verify|reshard|diff"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path

from triaxis.engine.checkpoint.folder import BEST, checkpoints_at, leftovers_at, reading
from triaxis.engine.checkpoint.manifest import CheckpointError, Manifest, check_files, read_manifest
from triaxis.launch.command_line import Parser, whole, within
from triaxis.launch.directory import hold_directory
from triaxis.launch.ending import printable, refuse, run_command
from triaxis.parallel.places.legal_values import counted

DESCRIPTION = """Looks into checkpoints. Needs no GPU and no model.

A DIR is a run's output directory (its newest checkpoint is meant, or all of them where that makes sense), its
`checkpoints` folder, or one checkpoint (`…/checkpoints/step-00000100`).

A checkpoint has no topology: a run of any tp, pp, dp and ZeRO stage, or with fully_shard, reads it as it is.
"""
MOST_FILES = 100_000
COLUMNS = ("checkpoint", "state", "step", "tokens", "size", "files", "held-out loss", "stored row's loss")
UNITS = ("B", "KB", "MB", "GB", "TB")


def _parser() -> Parser:
    parser = Parser(prog="triaxis checkpoint", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{ls,show,verify,reshard,diff}")
    for name, purpose in (
        (
            "ls",
            "which checkpoints a run has: step, tokens, size, losses, whether complete, which is the best",
        ),
        ("show", "one checkpoint's state, flags and tensors"),
        ("verify", "compare every file with its checksum; names what is damaged, and exits with 1"),
        ("reshard", "write a checkpoint again in another number of files"),
    ):
        command = commands.add_parser(name, help=purpose, description=purpose)
        command.add_argument(
            "dir", type=Path, metavar="DIR", help="a run's output directory, or a checkpoint"
        )
        if name == "reshard":
            command.add_argument(
                "--files",
                type=within(whole, 1, MOST_FILES),
                required=True,
                help="how many shard files, at most",
            )
            command.add_argument(
                "--out", type=Path, required=True, metavar="DIR",
                help="the output directory to write to: DIR/checkpoints/step-…",
            )  # fmt: skip
    compared = commands.add_parser(
        "diff",
        help="compare two checkpoints tensor by tensor; exit code 1 if they differ",
        description="compare two checkpoints tensor by tensor, by the largest absolute difference; exit code 1 if "
        "they differ",
    )
    compared.add_argument("a", type=Path, metavar="A", help="a run's output directory, or a checkpoint")
    compared.add_argument("b", type=Path, metavar="B", help="another")
    return parser


def _complete(path: Path) -> list[Path]:
    found = checkpoints_at(path)
    if not found:
        raise CheckpointError(
            f"`DIR` must hold a complete checkpoint, but {path} holds none; give a run's output directory, or a folder "
            "with a manifest.json"
        )
    return found


def _size(count: float) -> str:
    unit = 0
    while count >= 1000 and unit + 1 < len(UNITS):
        count, unit = count / 1000, unit + 1
    return f"{count:.1f} {UNITS[unit]}" if unit else f"{count:.0f} B"


def _print_table(rows: Sequence[Sequence[str]], right: int) -> None:
    """Columns as wide as they must be; from column `right` on they end on one line."""
    rows = [[printable(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (
            cell.rjust(width) if column >= right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())


def _list(options: argparse.Namespace) -> int:
    rows: list[tuple[str, ...]] = [COLUMNS]
    complete = checkpoints_at(options.dir)
    faults = []
    best = [path for path in complete if (path / BEST).exists()][-1:]  # each was, when it was saved
    for path in complete:
        try:
            rows.append(_list_row(path, read_manifest(path), best=path in best))
        except CheckpointError as error:
            rows.append((path.name, "damaged", *("" for _ in COLUMNS[2:])))
            faults.append(str(error))
    for path, why in leftovers_at(options.dir):
        rows.append((path.name, "not complete", *("" for _ in COLUMNS[2:])))
        faults.append(f"{path.name}: {why}")
    if len(rows) == 1:
        _complete(options.dir)
    _print_table(rows, right=2)
    for fault in faults:
        print(printable(fault))
    return 0


def _list_row(path: Path, manifest: Manifest, *, best: bool) -> tuple[str, ...]:
    state = manifest.state
    held_out = state.extra.get("held_out_loss")
    return (
        path.name,
        "complete, best" if best else "complete",
        f"{state.step:,}",
        f"{state.tokens:,}",
        _size(manifest.size_bytes),
        str(len(manifest.files)),
        f"{held_out:.4f}" if isinstance(held_out, float) else "",
        "" if state.eval_loss is None else f"{state.eval_loss:.4f}",
    )


def _show(options: argparse.Namespace) -> int:
    path = _complete(options.dir)[-1]
    manifest = read_manifest(path)
    state = manifest.state
    facts: list[tuple[str, str]] = [
        ("checkpoint", str(path)),
        ("step", f"{state.step:,} ({counted(manifest.optimizer_steps, 'update')})"),
        ("tokens", f"{state.tokens:,}"),
        ("stored row's loss", str(state.eval_loss)),
        ("size", f"{_size(manifest.size_bytes)} in {counted(len(manifest.files), 'file')}"),
    ]
    for title, values in (("config", state.config), ("sampler", state.sampler), ("extra", state.extra)):
        facts += [(f"{title}.{name}", str(value)) for name, value in sorted(values.items())]
    _print_table(facts, right=2)
    rows = [("tensor", "dtype", "shape", "chunks", "elements")]
    for name, tensor in sorted(manifest.tensors.items()):
        shape = " × ".join(map(str, tensor.shape))
        rows.append((name, tensor.dtype, shape, str(len(tensor.chunks)), f"{prod(tensor.shape):,}"))
    print()
    _print_table(rows, right=2)
    return 0


def _verify(options: argparse.Namespace) -> int:
    damaged = 0
    for path in _complete(options.dir):
        faults = []
        try:
            manifest = read_manifest(path, files=False)
        except CheckpointError as error:
            manifest, faults = None, [str(error)]
        for name, record in manifest.files.items() if manifest else ():
            try:
                check_files(path, {name: record})
            except CheckpointError as error:
                faults.append(str(error))
        if manifest and not faults:
            print(f"{path}: {counted(len(manifest.files), 'file')}, {_size(manifest.size_bytes)}, as written")
        for fault in faults:
            print(printable(fault))
        damaged += bool(faults)
    return int(damaged > 0)


def _reshard(options: argparse.Namespace) -> int:
    from triaxis.engine.checkpoint.stored import reshard  # torch, which ls, show and verify do without

    source = _complete(options.dir)[-1]
    read_manifest(source)  # before anything is made for it
    with hold_directory(options.out), reading(source):
        written = reshard(source, options.out, options.files)
    manifest = read_manifest(written)
    print(f"wrote {written}: {_size(manifest.size_bytes)} in {counted(len(manifest.files), 'file')}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    from triaxis.engine.checkpoint.stored import StoredTensors, largest_difference

    one, other = (StoredTensors(_complete(path)[-1]) for path in (options.a, options.b))
    ours, theirs = one.manifest.tensors, other.manifest.tensors
    rows = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in ours or name not in theirs:
            rows.append((name, f"only in {'A' if name in ours else 'B'}"))
        elif (ours[name].dtype, ours[name].shape) != (theirs[name].dtype, theirs[name].shape):
            both = (f"{tensor.dtype} {tensor.shape}" for tensor in (ours[name], theirs[name]))
            rows.append((name, " against ".join(both)))
        elif gap := largest_difference(one, other, name):
            rows.append((name, f"{gap:.3e}"))
    steps = [stored.manifest.optimizer_steps for stored in (one, other)]
    if steps[0] != steps[1]:
        rows.append(("updates done", f"{steps[0]} against {steps[1]}"))
    if not rows:
        print(f"{counted(len(ours), 'tensor')}, all equal")
        return 0
    _print_table([("tensor", "largest difference"), *rows], right=2)
    return 1


COMMANDS = {"ls": _list, "show": _show, "verify": _verify, "reshard": _reshard, "diff": _diff}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return COMMANDS[options.command](options)
    except (ValueError, OSError) as error:
        return refuse(f"checkpoint {options.command}", error)


if __name__ == "__main__":
    sys.exit(run_command("checkpoint", main))
