"""Every command of README.md and CONTRIBUTING.md is run, as a reader without a GPU would run it, and does what stands there.

A command that no table of `readme_tables.py` names is run as it is, in a copy of the project, and has to succeed and say
something.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml
from readme_tables import CLUSTER, GRID, INSTEAD, NEED_GPU, NOT_RUN, README, ROOT, SAYS, STATUS, Instead, commands
from redrawn import but_redrawn

from deepinfer_lab.cli import main
from deepinfer_lab.cli.load_options import LOADS
from deepinfer_lab.engine.policy import POLICIES
from deepinfer_lab.model.catalog import cache_dir

COPIED = (
    "notebooks", "data", "figures", "sweeps", "tests", "constraints",
    "README.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "environment.yml", "pyproject.toml",
)  # fmt: skip
TIMEOUT_S = 240  # so that nothing hangs; no promise


@dataclass(frozen=True)
class Ran:
    """What came of a command: the copy that it ran in, its exit status, and all that it printed."""

    project: Path
    status: int
    output: str


def run_in_a_copy(what: Instead, project: Path) -> Ran:
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, project / name)
    what.prepare(project)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DEEPINFER_")}
    own = {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "DEEPINFER_CACHE": str(cache_dir()),  # the one setting that stays; the others are not a reader's
        "CUDA_VISIBLE_DEVICES": "",  # with or without a GPU, the same is tested
        "OMP_NUM_THREADS": "1",  # two commands run side by side
    }
    done = subprocess.run(
        what.run, shell=True, cwd=project, env={**kept, **own}, timeout=TIMEOUT_S, encoding="utf-8", errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return Ran(project, done.returncode, done.stdout)


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path
) -> Iterator[dict[str, Future[Ran]]]:
    """The run of each command that a chosen test asks for. Two at a time: most of a command is one core's work."""
    folder = tmp_path_factory.mktemp("readme")
    mine = [i for i in request.session.items if i.path == request.path and i.originalname == test_command.__name__]
    asked = [i.callspec.params["command"] for i in mine if not i.get_closest_marker("skip")]
    runs: dict[str, Future[Ran]] = {}
    with ThreadPoolExecutor(2) as pool:
        same: dict[str, Future[Ran]] = {}
        for command in asked:
            what = INSTEAD.get(command) or Instead("", command)
            if what.run not in same:
                project = folder / str(len(same))
                project.mkdir()
                same[what.run] = pool.submit(run_in_a_copy, what, project)
            runs[command] = same[what.run]
        yield runs
        pool.shutdown(cancel_futures=True)
    shutil.rmtree(folder)  # half a gigabyte


def runnable() -> list[object]:
    """All commands but those of NOT_RUN; those of a tool that this machine lacks are skipped."""
    found = []
    for command in commands():
        tool = "dask" if INSTEAD.get(command) is CLUSTER else "make" if command.startswith("make ") else "python"
        missing = shutil.which(tool, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") is None
        if command not in NOT_RUN:
            marks = [pytest.mark.skip(f"needs {tool}")] if missing else []
            found.append(pytest.param(command, marks=marks, id=command.partition("\n")[0]))
    return found


@pytest.mark.parametrize("command", runnable())
def test_command(command: str, started: dict[str, Future[Ran]]):
    ran = started[command].result()
    failures = [line for line in ran.output.splitlines() if line.startswith("FAILURE: ")]  # `check` says so
    assert but_redrawn(failures) == []
    assert ran.status == STATUS.get(command, int(bool(failures))), ran.output
    assert ran.output.strip()
    assert "Traceback" not in ran.output
    if command in NEED_GPU:
        (line,) = ran.output.splitlines()
        assert re.match(NEED_GPU[command], line)
        return
    assert re.search(SAYS.get(command, ""), ran.output, re.MULTILINE), ran.output
    written = r"(?:--trace|--picture|--json|-o) (\S+)|^written: (.+)$"
    for name in re.findall(written, f"{command}\n{ran.output}", re.MULTILINE):
        file = ran.project / "".join(name).replace("NN_title", "01_tiled_gemm")
        assert file.stat().st_size
        if "--trace" in command:
            assert any(event["ph"] == "X" for event in json.loads(file.read_text(encoding="utf-8"))["traceEvents"])


def test_every_line_of_a_table_is_a_command():
    assert {*INSTEAD, *NOT_RUN, *NEED_GPU, *SAYS} <= set(commands())
    assert not INSTEAD.keys() & NOT_RUN.keys()


def found_by(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that `words` begin with, and the rest of them."""
    command: click.Command = main
    while isinstance(command, click.Group):
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("line", [line for line in INSTEAD if line.startswith("deepinfer-lab ")])
def test_a_command_that_is_replaced_parses_and_is_replaced_by_the_same(line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)  # files that an option names are there
    words = shlex.split(line)
    command, rest = found_by(words[1:])
    assert " ".join(words[: len(words) - len(rest)]) in INSTEAD[line].run
    command.make_context(line, rest)


@pytest.mark.parametrize("line", [line for line in NOT_RUN if line.startswith("pip install -e")])
def test_extras_and_constraints_that_pip_is_given_exist(line: str):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = shlex.split(line)[3]
    assert set(asked.removeprefix(".[").removesuffix("]").split(",")) <= extras.keys()
    assert all((ROOT / file).is_file() for file in re.findall(r"-c (\S+)", line))


def test_the_grid_is_that_of_the_file():
    assert yaml.safe_load(GRID) == yaml.safe_load((ROOT / "sweeps" / "chunk_inflight.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("mention", sorted(set(re.findall(r"`(?:deepinfer-lab|bench) ([^`]* --[^`]*)`", README))))
def test_options_that_the_readme_gives_to_a_command_in_passing_exist(mention: str):
    words = shlex.split(mention)
    command, words = found_by(words if words[0] in main.commands else ["bench", *words])
    options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("name", [*POLICIES, *LOADS])
def test_readme_has_a_line_for_every_policy_and_load(name):
    assert f"| `{name}` | " in README
