"""Whether a run that goes on reads what it was saved with."""

from __future__ import annotations

from triaxis.engine.checkpoint.manifest import RunState
from triaxis.engine.config import ConfigError
from triaxis.engine.run.inputs import PYTHON, RunInputs
from triaxis.engine.run.mixing import is_mixed, told_saved

SAVED = ("training data", "tokenizer")
"""What decides the numbers of a run that goes on; evaluation may change, and code does."""


def check_same_inputs(state: RunState, inputs: RunInputs, data: str) -> None:
    """Raises ConfigError where a run goes on with other data than it began with. Alike on all ranks."""
    saved = state.extra.get("fingerprints")
    rows = len(inputs.training.source)
    python = _told_python(saved, inputs)
    weighed = inputs.mix.weighed  # sets may then come and go; each is known by its own fingerprint
    if not weighed and is_mixed(state):
        raise ConfigError(
            (
                f"`data` must give weights, as it did when {told_saved(state)} was saved, but is {data}; they may be "
                "others, and sets may be left out",
            )
        )
    if state.sampler["rows"] != rows and not weighed:
        raise ConfigError(
            (
                f"`data` must stay as it was saved, with {state.sampler['rows']} rows, but {data} has {rows}; "
                f"{python or 'bring the old data back'}, or start anew in another --output-dir",
            )
        )
    if not isinstance(saved, dict):
        return  # of a version that kept none
    kept = SAVED[1:] if weighed else SAVED
    changed = [what for what in kept if what in saved and saved[what] != inputs.fingerprints[what]]
    if changed:
        raise ConfigError(
            tuple(
                f"the {what} must stay as saved, but the content is another (fingerprint {saved[what]} became "
                f"{inputs.fingerprints[what]}{f' in {data}' if what == 'training data' else ''}); "
                f"{python if python and what == 'training data' else 'bring the old back'}, or start anew in another "
                "--output-dir"
                for what in changed
            )
        )


def _told_python(saved: object, inputs: RunInputs) -> str:
    """What to do where the default data is another; "" for data that people named."""
    if PYTHON not in inputs.fingerprints:
        return ""
    before = saved.get(PYTHON, "another") if isinstance(saved, dict) else "another"
    return (
        f"it is the text of Python's own library, which differs from build to build: saved with {before}, here with "
        f"{inputs.fingerprints[PYTHON]}; go on with that Python"
    )


def changed_inputs(state: RunState, inputs: RunInputs) -> list[str]:
    """What else is not as it was: a line for each."""
    saved = state.extra.get("fingerprints")
    told = ("evaluation data", "version of triaxis", "version of PyTorch")
    if not isinstance(saved, dict):
        return []
    return [
        f"changed since it was saved: {what}"
        for what in told
        if what in saved and saved[what] != inputs.fingerprints[what]
    ]
