"""Whether what is committed hangs together: notebooks, their scripts, records, figures, and the CUDA sources behind them.

What passing guarantees:
- Every notebook ran from top to bottom and is the notebook of its script (`guards`).
- Every file of data has the bytes that were published (`seal`), and is well-formed and filed where it belongs.
- Every record that a notebook's code names was printed with its banner, and `data/` still has the record of that time. Of one
  that no device has yet, a warning says so.
- No CUDA source behind a record has changed, see `data_files.kernel_state`; the GPU tests' own reports cover every source.
- `figures/` holds one picture for each table that a notebook prints, with that table's fingerprint in it, and no other.
- A number with a decimal point in a notebook's prose stands somewhere in outputs, code or published tables.

What it does not: it runs nothing. That outputs are what the records give is for `pytest --nbval` to say. Python code may have
changed since a record was made, and so may have the choice among kernels; the commit beside each record tells when.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import nbformat

from deepinfer_lab.errors import RecordError
from deepinfer_lab.figures.style import described
from deepinfer_lab.lab import data_files, evidence, guards, project, provenance, record, seal
from deepinfer_lab.lab.data_files import DataFile
from deepinfer_lab.lab.evidence import Evidence
from deepinfer_lab.lab.experiments import EXPERIMENTS
from deepinfer_lab.lab.notebooks import discover


@dataclass(frozen=True)
class Standing:
    """One notebook, what its outputs stand on, and the files of its records."""

    name: str
    evidence: Evidence
    records: list[DataFile]


@dataclass(frozen=True)
class Findings:
    """What `check` saw. Failures must not be published. Warnings are true and may be meant."""

    notebooks: list[Standing]
    failures: list[str]
    warnings: list[str]


def check() -> Findings:
    """Look at the whole project. Reads only."""
    failures = guards.check_folder(project.notebooks())
    try:
        failures += seal.complaints()
    except RecordError as error:
        failures.append(str(error))
    files: list[DataFile] = []
    for path in data_files.data_paths():
        try:
            files.append(data_files.read(path))
            failures += _file_complaints(files[-1])
        except RecordError as error:
            failures.append(str(error))
    notebooks, unmeasured = [], []
    published = "\n".join(path.read_text(encoding="utf-8") for path in project.data().glob("published/*.json"))
    for notebook in discover():
        try:
            content = nbformat.read(notebook.path, as_version=4)
            found = evidence.gather(content, EXPERIMENTS)
        except (nbformat.reader.NotJSONError, nbformat.ValidationError):
            continue  # the guards have said so
        except SyntaxError as error:
            failures.append(f"{notebook.name}: a cell is not Python: {error}")
            continue
        records = [file for banner in found.banners for file in files if (file.name, file.utc) == banner]
        notebooks.append(Standing(notebook.name, found, records))
        missing = [name for name in found.experiments if not any(project.data().glob(f"*/{name}.json"))]
        unmeasured += [f"{notebook.name}: no device has a record of {name} yet" for name in missing]
        complaints = [*_record_complaints(found, records, missing), *_figure_complaints(found)]
        complaints += [
            f"its prose says {number}, and no output, code or published table does"
            for number in evidence.unfounded(content, published)
        ]
        failures += [f"{notebook.name}: {complaint}" for complaint in complaints]
    shown = {name for each in notebooks for name in each.evidence.figures}
    failures += [
        f"figures/{path.name}: no notebook prints its table"
        for path in sorted(project.figures().glob("*"))
        if path.stem not in shown
    ]
    return Findings(notebooks, failures, [*unmeasured, *_mixed(files)])


def _file_complaints(file: DataFile) -> Iterator[str]:
    path = file.path
    where = f"data/{path.parent.name}/{path.name}"
    if file.changed:
        yield f"{where}: stale, made with other versions of {', '.join(file.changed)}"
    if path.name in seal.BY_TESTS:
        covered = data_files.content(path).get("kernels", {})
        for name in sorted(provenance.kernel_hashes().keys() - covered.keys()):
            yield f"{where}: {name} was never tested"
    if path.stem in EXPERIMENTS:
        found = record.load(path)
        belongs = f"{found.provenance['device_slug']}/{found.experiment}"
        if belongs != f"{path.parent.name}/{path.stem}":
            yield f"{where}: holds the record of {belongs}"


def _record_complaints(found: Evidence, records: Sequence[DataFile], missing: Sequence[str]) -> Iterator[str]:
    have = {(file.name, file.utc) for file in records}
    for experiment, utc in found.banners:
        if (experiment, utc) not in have:
            yield f"missing record: data/ has none of {experiment} from {utc}"
    for experiment in found.experiments:
        if experiment not in missing and experiment not in {name for name, _ in found.banners}:
            yield f"names the experiment {experiment}, but prints no banner of its record"


def _figure_complaints(found: Evidence) -> Iterator[str]:
    for name, line in found.figures.items():
        path = project.figures() / f"{name}.svg"
        if not path.is_file():
            yield f"prints the table of figures/{path.name}, which is missing"
        elif described(path) != line:
            yield (
                f"figures/{path.name} is not the picture of the table printed, '{line}', but of "
                f"'{described(path) or 'none'}'. A run redraws figures/: `deepinfer-lab run --mode replay` brings it back"
            )


def _mixed(files: Sequence[DataFile]) -> Iterator[str]:
    """Files of one device that come from several commits, from several environments, or from uncommitted code."""
    devices: dict[str, list[DataFile]] = defaultdict(list)
    for file in files:
        if file.provenance:
            devices[file.path.parent.name].append(file)
    for device, members in devices.items():
        commits: dict[str, list[str]] = defaultdict(list)
        for file in members:
            commits[file.commit].append(file.name)
        if len(commits) > 1:
            listed = "; ".join(f"{commit}: {', '.join(names)}" for commit, names in commits.items())
            yield f"{device}: records of {len(commits)} commits. {listed}"
        measured = [file for file in members if file.path.name not in seal.BY_TESTS]
        for key in provenance.ENVIRONMENT:
            # How many threads tests have, which report no times, is a matter of how many run side by side.
            values = {str(file.provenance.get(key)) for file in (measured if key == "threads" else members)}
            if len(values) > 1:
                yield f"{device}: records of {len(values)} environments: {key} is {', '.join(sorted(values))}"
        dirty = [file.name for file in members if file.provenance.get("dirty")]
        if dirty:
            yield f"{device}: measured with code that was not committed: {', '.join(dirty)}"
