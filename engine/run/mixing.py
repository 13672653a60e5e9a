"""Sets of data that a run mixes: where each of them is, what of that is saved, and how a run goes on from it.

A checkpoint keeps, for every set, how many samples it has given. A run may go on with other weights, more sets or
fewer: each set that was there goes on at its own next sample, a new one begins, and the place of one that is left out
is kept for when it comes back. Sets are known by their content, wherever they lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triaxis.engine.checkpoint.manifest import RunState
from triaxis.engine.config import ConfigError
from triaxis.engine.data.course import Course
from triaxis.engine.data.joined import OpenSet
from triaxis.engine.data.loader import Loader
from triaxis.engine.data.usage import told_usage


class Mix:
    """The sets that a run trains on, and where it is in them. The order of samples is the loader's course."""

    def __init__(self, sets: Sequence[OpenSet], loader: Loader) -> None:
        self.sets, self._loader = tuple(sets), loader
        self._away: tuple[Mapping[str, Any], ...] = ()  # saved sets that are not read now

    @property
    def weighed(self) -> bool:
        """Whether `--data` gives weights: what is read may then change when the run goes on."""
        return self.sets[0].weighed

    def saved(self, samples: int) -> dict[str, object]:
        """What a checkpoint keeps after so many samples of the run, JSON."""
        course = self._loader.course
        present = [
            {
                "name": one.name,
                "fingerprint": one.source.fingerprint,
                "weight": one.weight,
                "begun": begun,
                "taken": taken,
            }
            for one, begun, taken in zip(self.sets, course.begun, course.taken(samples), strict=True)
        ]
        return {"sets": present, "since": course.since, "away": list(self._away)}

    def go_on(self, state: RunState) -> list[str]:
        """Goes on from a checkpoint; tells what is other than it was, a line each.

        Raises ConfigError where a set's name stands for another content now.
        """
        sampler: Mapping[str, Any] = state.sampler
        if "sets" not in sampler:  # of a version that knew one set, which begins at 0
            return []
        before, known = sampler["sets"], {one["fingerprint"]: one for one in sampler["away"]}
        if [(one["fingerprint"], one["weight"]) for one in before] == [
            (one.source.fingerprint, one.weight) for one in self.sets
        ]:
            self._away = tuple(sampler["away"])
            self._loader.course = self._course(sampler["since"], [one["begun"] for one in before])
            return []
        known |= {one["fingerprint"]: one for one in before}
        self._refuse_other_content(known)
        here = [one.source.fingerprint for one in self.sets]
        self._away = tuple(one for fingerprint, one in known.items() if fingerprint not in here)
        begun = [known[fingerprint]["taken"] if fingerprint in known else 0 for fingerprint in here]
        self._loader.course = self._course(sampler["samples"], begun)
        return _changes(self.sets, before, known)

    def _course(self, since: int, begun: Sequence[int]) -> Course:
        return course_of(self.sets, self._loader.seed, since, begun)

    def _refuse_other_content(self, known: Mapping[str, Mapping[str, Any]]) -> None:
        faults = [
            f"the set {one.name} must stay as it was saved, but its content is another (fingerprint "
            f"{old['fingerprint']} became {one.source.fingerprint}); bring the old back, or give the new one a name of "
            "its own"
            for one in self.sets
            for old in known.values()
            if old["name"] == one.name and one.source.fingerprint not in known
        ]
        if faults:
            raise ConfigError(tuple(faults))

    def told(self, samples: int, batch: int, epochs: float | None) -> list[str]:
        """What becomes of the rows of each set in a run of so many samples, a line each."""
        taken = self._loader.course.taken(samples)
        if len(self.sets) == 1:
            return [told_usage(len(self.sets[0].source), taken[0], batch, epochs)]
        total = sum(one.weight for one in self.sets)
        told = [f"{len(self.sets)} sets of data, by weight:"]
        for one, count in zip(self.sets, taken, strict=True):
            used = told_usage(len(one.source), count, batch, None)
            told.append(f"  {one.name}: {one.weight:,} of every {total:,} samples; {used}")
        return told


def course_of(
    sets: Sequence[OpenSet], seed: int, since: int = 0, begun: Sequence[int] | None = None
) -> Course:
    """The order of samples in which these weights hold from the run's sample `since` on."""
    rows = [len(one.source) for one in sets]
    return Course(rows, seed=seed, weights=[one.weight for one in sets], since=since, begun=begun)


def _changes(
    sets: Sequence[OpenSet], before: Sequence[Mapping[str, Any]], known: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    old = ", ".join(_part(one["name"], one["weight"], sum(o["weight"] for o in before)) for one in before)
    new = ", ".join(_part(one.name, one.weight, sum(o.weight for o in sets)) for one in sets)
    told = [f"changed since it was saved: sets of data {old} → {new}"]
    for one in sets:
        saved = known.get(one.source.fingerprint)
        told.append(
            f"  {one.name} begins"
            if saved is None
            else f"  {one.name} goes on at its own sample {saved['taken']:,}, counted from 0"
        )
    here = {one.source.fingerprint for one in sets}
    told += [
        f"  {one['name']} is not read any more; its place, sample {one['taken']:,}, is kept"
        for one in before
        if one["fingerprint"] not in here
    ]
    return told


def _part(name: str, weight: int, total: int) -> str:
    return f"{name} {100 * weight / total:g}%"


def is_mixed(state: RunState) -> bool:
    """Whether a run was of several sets when it was saved."""
    sampler: Mapping[str, Any] = state.sampler
    return len(sampler.get("sets", ())) > 1


def told_saved(state: RunState) -> str:
    """The sets of a checkpoint, as `--data` has them."""
    sampler: Mapping[str, Any] = state.sampler
    return " ".join(f"{one['name']}:{one['weight']}" for one in sampler["sets"])
