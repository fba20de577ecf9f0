"""Results of a paper's evaluation: computed again, compared, or stored.

    python -m tools.evaluation.reproduce_dapple                              # compares everything with what is stored
    python -m tools.evaluation.reproduce_dapple --only=vgg-19/C,'table 5'    # only parts whose name has one of these
    python -m tools.evaluation.reproduce_dapple --write                      # accepts what differs

Exits with 1, and says which, if a number differs by more than 2 % in either direction, a text differs, a claim has
another verdict, band or figure of the paper than the stored one, or the page isn't that of the stored results.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import math
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from dapple_tf.tools import command
from dapple_tf.tools.evaluation.claims import Claim
from dapple_tf.tools.evaluation.document import TEMPLATES, fill, picture

TOLERANCE = 0.02
"""The difference of numbers, as a fraction of the larger, that counts as a change: in either direction."""
FOLDER = pathlib.Path(__file__).resolve().parents[2] / "docs" / "results"
_ONLY_ONE = {True: "is stored, but not computed", False: "isn't stored"}

Record = dict[str, Any]
"""Record of an experiment: numbers, texts, truth values, lists and dicts."""
Results = Mapping[str, Any]
"""Part -> its record."""

FLAGS = flags.FlagValues()

_ONLY = flags.DEFINE_list("only", [], "Compute only parts whose name has one of these in it.", flag_values=FLAGS)
_WRITE = flags.DEFINE_boolean("write", False, "Store the results, and write the page.", flag_values=FLAGS)
_DIRECTORY = flags.DEFINE_string("directory", str(FOLDER), "Folder of what is stored.", flag_values=FLAGS)
_JOBS = flags.DEFINE_integer("jobs", None, "Processes; by default one for each core.", 1, flag_values=FLAGS)


class Evaluation(NamedTuple):
    """A paper's evaluation.

    Attributes:
        name: of its JSON file, its page and its template.
        title: the picture's.
        settings: setting -> its title, the paper's own first.
        parts: name -> what computes its record; the ones that take long come first.
        claims: the claims, by results.
        texts: mark of the template -> its text, by results and claims, but for the tables of all claims.
        constants: limits that verdicts depend on, besides bands.
    """

    name: str
    title: str
    settings: Mapping[str, str]
    parts: Mapping[str, Callable[[], Record]]
    claims: Callable[[Results], Sequence[Claim]]
    texts: Callable[[Results, Sequence[Claim]], Mapping[str, str]]
    constants: Callable[[], Mapping[str, float]]

    def files(self, results: Results) -> dict[str, str]:
        """Returns what results make: name of a file -> its text."""
        claims = self.claims(results)
        template = (TEMPLATES / f"{self.name}.md").read_text(encoding="utf-8")
        return {
            f"{self.name}.md": fill(template, self.texts(results, claims)),
            f"{self.name}.svg": picture(claims, self.settings, self.title),
        }

    def content(self, results: Results) -> dict[str, Any]:
        """Returns the stored records."""
        claims = {claim.name: claim.stored() for claim in self.claims(results)}
        return {
            "constants": {name: f"{value:.6g}" for name, value in self.constants().items()},
            "claims": claims,
            "parts": dict(results),
        }

    def changes(self, stored: Mapping[str, Any], fresh: Results, folder: pathlib.Path) -> list[str]:
        """Returns the differences between stored and computed records."""
        before = stored["parts"]
        said = [f"{name}: is stored, but there is no such part" for name in before if name not in self.parts]
        for name, record in fresh.items():
            said += differences(before.get(name, {}), record, name)
        try:
            content, files = self.content({**before, **fresh}), self.files(before)
        except KeyError as error:  # records that an older version wrote, or that are missing
            return [*said, f"{folder / self.name}.json: what is stored has no {error}; write it with --write"]
        for key in ("constants", "claims"):
            said += differences(stored.get(key, {}), content[key], key)
        for name, text in files.items():
            path = folder / name
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                said.append(f"{path}: isn't what the stored results give; write it with --write")
        return said

    def write(self, results: Results, folder: pathlib.Path) -> None:
        """Writes the records, the page and the picture."""
        text = json.dumps(self.content(results), indent=1) + "\n"
        (folder / f"{self.name}.json").write_text(text, encoding="utf-8")
        for name, text in self.files(results).items():
            (folder / name).write_text(text, encoding="utf-8")


def rounded(value: Any) -> Any:
    """Returns a record with six digits of each number, as it is stored."""
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def differences(stored: Any, fresh: Any, where: str) -> Iterator[str]:
    """Yields what differs: numbers by more than `TOLERANCE`, anything else at all.

    >>> list(differences({"ms": 100.0, "plan": "8:8"}, {"ms": 97.0, "plan": "8:8"}, "row"))
    ['row: ms: 100 is stored, 97 now']
    """
    if isinstance(stored, Mapping) and isinstance(fresh, Mapping):
        for key in dict.fromkeys([*stored, *fresh]):
            if key not in fresh or key not in stored:
                yield f"{where}: {key}: {_ONLY_ONE[key in stored]}"
            else:
                yield from differences(stored[key], fresh[key], f"{where}: {key}")
    elif isinstance(stored, list) and isinstance(fresh, list) and len(stored) == len(fresh):
        for index, (before, after) in enumerate(zip(stored, fresh, strict=True)):
            yield from differences(before, after, f"{where}: {index}")
    elif _is_number(stored) and _is_number(fresh):
        if not math.isclose(stored, fresh, rel_tol=TOLERANCE, abs_tol=1e-9):
            yield f"{where}: {stored:.6g} is stored, {fresh:.6g} now"
    elif stored != fresh:
        yield f"{where}: {stored} is stored, {fresh} now"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _compute(part: Callable[[], Record]) -> Record:
    logging.getLogger("dapple_tf").setLevel(logging.WARNING)
    record: Record = rounded(part())
    return record


def compute(evaluation: Evaluation, names: Sequence[str], jobs: int) -> dict[str, Record]:
    """Returns name -> record, with a line on standard error as each is done."""
    began = time.monotonic()
    records: dict[str, Record] = {}

    def done(name: str, record: Record) -> None:
        records[name] = record
        passed = time.monotonic() - began
        print(f"[{len(records)}/{len(names)}, {passed:.0f} s] {name}", file=sys.stderr, flush=True)

    if jobs == 1:
        for name in names:
            done(name, _compute(evaluation.parts[name]))
    else:
        with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(_compute, evaluation.parts[name]): name for name in names}
            for future in concurrent.futures.as_completed(futures):
                done(futures[future], future.result())
    return records


def reproduce(evaluation: Evaluation) -> None:
    """Computes, compares and says what differs, or writes it: the command of each evaluation."""
    folder = pathlib.Path(_DIRECTORY.value)
    path = folder / f"{evaluation.name}.json"
    stored: dict[str, Any] = {"claims": {}, "parts": {}}
    if path.exists():
        stored = json.loads(path.read_text(encoding="utf-8"))
    for text in _ONLY.value:
        known = f"no part has it in its name; the parts are: {', '.join(evaluation.parts)}"
        command.check(any(text in name for name in evaluation.parts), f"--only={text}: {known}")
    names = [name for name in evaluation.parts if not _ONLY.value or any(text in name for text in _ONLY.value)]
    fresh = compute(evaluation, names, _JOBS.value or len(os.sched_getaffinity(0)))
    said = evaluation.changes(stored, fresh, folder)
    for text in said:
        print(text)
    if _WRITE.value:
        merged = {**stored["parts"], **fresh}
        evaluation.write({name: merged[name] for name in evaluation.parts if name in merged}, folder)
        print(f"{len(said)} differences, which are stored now; {folder / evaluation.name}.md")
    elif said:
        print(f"FAILED: {len(said)} differences from {path}; --write accepts them")
        sys.exit(1)
    else:
        print(f"{len(names)} parts and {len(stored['claims'])} claims are as stored in {path}")
