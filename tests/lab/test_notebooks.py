import os
from pathlib import Path

import nbformat
import pytest
from click.testing import CliRunner
from papermill.engines import NotebookExecutionManager

from deepinfer_lab.cli import main
from deepinfer_lab.errors import NotebookError, SettingError
from deepinfer_lab.lab import notebooks
from deepinfer_lab.lab.parameters import declared, parse

PARAMETERS = """\
mode: str = "auto"  # replay, measure or auto
count: int = 2  # how many
rate: float = 1.0  # requests a second
quick: bool = False  # fewer rows
sizes: list[int] = [1, 2]  # chunk sizes"""


def write(home: Path, name: str, *cells: str, parameters: str = PARAMETERS) -> Path:
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        cells=[nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})]
        + [nbformat.v4.new_code_cell(cell) for cell in cells],
    )
    path = home / "notebooks" / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def printed(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))


def test_run_passes_mode_and_typed_parameters_to_those_that_declare_them(home: Path):
    source = write(
        home, "00_first", "import os; print(os.environ['DEEPINFER_MODE'], count, rate, quick, sizes, os.getcwd())"
    )
    write(home, "01_second", "print(other)", parameters="other: int = 7  # another")
    before = source.read_bytes()
    runs = notebooks.run(mode="replay", params={"count": "5", "rate": "2", "quick": "true", "sizes": "[8]"})
    assert [run.name for run in runs] == ["00_first", "01_second"]
    assert runs[0].parameters == {"count": 5, "rate": 2.0, "quick": True, "sizes": [8]}
    assert runs[1].parameters == {}
    assert runs[0].output == home.resolve() / "build" / "00_first.ipynb"
    assert printed(runs[0].output) == f"replay 5 2.0 True [8] {home.resolve() / 'notebooks'}\n"
    assert printed(runs[1].output) == "7\n"
    assert source.read_bytes() == before
    assert "DEEPINFER_MODE" not in os.environ


def test_a_failing_notebook_says_where_keeps_its_copy_and_lets_the_others_run(home: Path):
    write(home, "00_breaks", "print('so far')", "\nboom = 1 / 0", "print('never')")
    write(home, "01_good", "print('good')")
    told = []
    broken, good = notebooks.run(out=home / "elsewhere", done=told.append)
    assert told == [broken, good]
    assert "'00_breaks' failed in cell In [3] (boom = 1 / 0): ZeroDivisionError" in broken.error
    copy = home.resolve() / "elsewhere" / "00_breaks.ipynb"
    assert str(copy) in broken.error
    assert "so far" in printed(copy)
    assert good.error is None
    assert printed(good.output) == "good\n"


def test_a_dead_kernel_is_reported(home: Path):
    write(home, "00_dies", "import os; os._exit(9)")
    (run,) = notebooks.run()
    assert "'00_dies': the kernel died" in run.error


MEASURES = """\
from deepinfer_lab.lab.experiment import Experiment, obtain, provenance
provenance._commit = lambda: ("c" * 40, False)
def rows(params):
    yield {"a": 1}
    if params["heavy"]:
        raise MemoryError
def measured(name, heavy):
    experiment = Experiment(name, rows, {"heavy": False}, True, "")
    return obtain(experiment, mode=mode, device="unused", params={"heavy": heavy})
print(measured("light", False).status)"""


def test_a_run_says_what_came_of_each_experiment_and_goes_on_where_it_was(home: Path):
    write(home, "00_heavy", MEASURES, "print(measured('big', True))")
    write(home, "01_light", MEASURES)
    first = notebooks.run(mode="measure")
    assert [[(each.experiment, each.status) for each in run.outcomes] for run in first] == [
        [("light", "OK"), ("big", "OOM")],
        [("light", "kept")],
    ]
    assert "RecordError: what follows needs whole records, but big ended as OOM after 1 rows" in first[0].error
    assert first[1].error is None
    again = notebooks.run(mode="measure", environment={"DEEPINFER_AGAIN": "1"})
    assert [each.status for run in again for each in run.outcomes] == ["OK", "OOM", "OK"]
    assert {"DEEPINFER_AGAIN", "DEEPINFER_TIME_LIMIT", "DEEPINFER_JOURNAL"}.isdisjoint(os.environ)


def test_an_experiment_that_kills_its_kernel_is_named(home: Path):
    write(home, "00_dies", MEASURES.replace('yield {"a": 1}', "__import__('os')._exit(9)"))
    (run,) = notebooks.run(mode="measure")
    assert [(each.experiment, each.status) for each in run.outcomes] == [("light", "broken off")]
    assert "the kernel died" in run.error


def test_the_command_ends_with_a_summary_and_status_1(home: Path):
    write(home, "00_heavy", MEASURES, "print(measured('big', True))")
    write(home, "01_light", MEASURES)
    done = CliRunner().invoke(main, ["run", "--mode", "measure", "--again", "--time-limit", "100"])
    assert done.exit_code == 1
    lines = [line.split()[:-1] for line in done.output.splitlines()]
    for line in (["00_heavy", "FAILED"], ["light", "OK"], ["big", "OOM"], ["01_light", "done"]):
        assert line in lines
    assert "00_heavy: notebook '00_heavy' failed" in done.output


def test_an_interruption_keeps_and_names_what_finished(home: Path, monkeypatch: pytest.MonkeyPatch):
    write(home, "00_good", "print('done')")
    write(home, "01_slow", "print('begun')", "print('never')")
    start = NotebookExecutionManager.cell_start

    def interrupted_at_the_last_cell(self, cell, cell_index=None, **rest):
        # Raised here, not sent as a signal: Python loses a KeyboardInterrupt that falls into a weak reference's callback.
        if "never" in cell.source:
            raise KeyboardInterrupt
        return start(self, cell, cell_index, **rest)

    monkeypatch.setattr(NotebookExecutionManager, "cell_start", interrupted_at_the_last_cell)
    with pytest.raises(KeyboardInterrupt) as error:
        notebooks.run()
    finished, interrupted = (home.resolve() / "build" / f"{name}.ipynb" for name in ("00_good", "01_slow"))
    assert str(error.value) == (
        f"interrupted in notebook '01_slow', partly executed in {interrupted}; finished: {finished}"
    )
    assert printed(finished) == "done\n"
    assert printed(interrupted) == "begun\n"


def test_nothing_runs_when_something_is_unknown(home: Path):
    write(home, "00_first", "print(1)")
    write(home, "01_second", "print(1)", parameters="other: int = 7  # another")
    for arguments, message in [
        ({"params": {"speed": "1"}}, r"'speed' is declared by none .*00_first: mode, count, rate.*; 01_second: other"),
        ({"names": ["01"], "params": {"count": "1"}}, r"'count' is declared by none .*allowed: 01_second: other"),
        ({"params": {"count": "many"}}, r"'00_first': parameter 'count' is 'many', not a whole number"),
        ({"names": ["07"]}, r"'07' does not exist; there are: 00_first, 01_second"),
    ]:
        with pytest.raises(NotebookError, match=message):
            notebooks.run(**arguments)
    with pytest.raises(SettingError, match="'fast' from the option `mode`"):
        notebooks.run(mode="fast")
    assert not (home / "build").exists()


def test_an_empty_folder_is_an_error(home: Path):
    with pytest.raises(NotebookError, match="no notebooks in"):
        notebooks.run()


def test_select_takes_names_and_numbers_and_refuses_ambiguity():
    available = ["00_first", "01_second", "01_third"]
    assert notebooks.select(available, None) == available
    assert notebooks.select(available, ["01_third", "00", "00_first"]) == ["01_third", "00_first"]
    with pytest.raises(NotebookError, match="'01' is ambiguous; there are: 01_second, 01_third"):
        notebooks.select(available, ["01"])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", "3", 3),
        ("rate", "3", 3.0),
        ("rate", "1e-3", 0.001),
        ("rate", 2, 2.0),
        ("quick", "True", True),
        ("quick", "false", False),
        ("mode", "3", "3"),
        ("sizes", "[]", []),
    ],
)
def test_values_are_parsed_as_the_default_is_typed(home: Path, name: str, value: object, expected: object):
    result = parse(declared(write(home, "00_first"))[name], value, "00_first")
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("count", "1.5", "a whole number"),
        ("count", True, "a whole number"),
        ("rate", "fast", "a number"),
        ("quick", "1", "true or false"),
        ("mode", 3, "text"),
        ("sizes", "1,2", "a JSON list of int"),
        ("sizes", "[1, true]", "a JSON list of int"),
        ("sizes", '["a"]', "a JSON list of int"),
    ],
)
def test_values_of_another_kind_are_refused(home: Path, name: str, value: object, allowed: str):
    with pytest.raises(NotebookError, match=f"parameter '{name}' is .*, not {allowed}"):
        parse(declared(write(home, "00_first"))[name], value, "00_first")


def test_declared_reads_defaults_kinds_and_comments(home: Path):
    found = declared(write(home, "00_first", parameters='a: float = 1  # one\nb: list[float] = [1]  # two\nc = "x"'))
    assert [(p.name, p.kind, p.item, p.default, p.help) for p in found.values()] == [
        ("a", "float", None, 1, "one"), ("b", "list", "float", [1], "two"), ("c", "str", None, "x", ""),
    ]  # fmt: skip
    assert parse(found["b"], "[2, 0.5]", "00_first") == [2.0, 0.5]


@pytest.mark.parametrize("line", ["a: int = len('x')", "a: str = 1", "a: dict = {}", "a = None"])
def test_declared_refuses_defaults_that_no_command_line_could_give(home: Path, line: str):
    with pytest.raises(NotebookError, match="'00_first': parameter 'a': default"):
        declared(write(home, "00_first", parameters=line))
