"""What the project says it needs is said once, and is what it uses."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
NAMED = {
    *("torch", "cupy-cuda12x", "numpy", "matplotlib", "seaborn"),
    *("jupyterlab", "jupytext", "papermill", "pytest", "nbval"),
}


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=! ]", requirement)[0]


def test_every_package_that_the_readme_promises_is_declared():
    declared = {name_of(r) for r in [*PROJECT["dependencies"], *EXTRAS["cuda12"], *EXTRAS["test"]]}
    assert declared >= NAMED


def test_no_requirement_names_a_torch_build():
    assert "torch>=2.5" in PROJECT["dependencies"]
    assert (ROOT / "constraints/cpu.txt").read_text(encoding="utf-8").split() == ["torch==2.13.0"]


def test_cuda_extras_never_bring_two_cupys():
    for extra in ("cuda12", "cuda13"):
        assert sum(name_of(r).startswith("cupy") for r in EXTRAS[extra]) == 1
    assert not any(name_of(r).startswith("cupy") for r in PROJECT["dependencies"])


def test_conda_environment_installs_the_project_and_nothing_else():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    (pip,) = (d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    python = PROJECT["requires-python"]
    assert environment["name"] == PROJECT["name"]
    assert {name_of(d) for d in conda} == {"python", "pip"}
    assert any(d.startswith(f"python{python}") for d in conda), f"environment.yml must ask for python{python}"
    assert pip == ["--constraint constraints/replay.txt", "--editable .[cuda12,explore,test]"]
    assert {"cuda12", "explore", "test"} <= EXTRAS.keys()


def test_replay_constraints_pin_what_is_declared():
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints/replay.txt").read_text(encoding="utf-8").split()
        if "==" in line
    )
    extras = [
        requirement for name in ("cuda12", "explore", "cluster", "compare", "test") for requirement in EXTRAS[name]
    ]
    declared = {name_of(r) for r in [*PROJECT["dependencies"], *extras]}
    missing = {d.lower().replace("_", "-") for d in declared} - {p.lower().replace("_", "-") for p in pinned}
    assert missing == {"torch", "deepinfer-lab"}  # the build of torch is the user's choice


@pytest.mark.parametrize("package", ["torch", "cupy", "matplotlib", "seaborn", "numpy", "papermill", "jupytext"])
def test_named_packages_are_imported_somewhere(package):
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "deepinfer_lab").rglob("*.py")]
    assert any(re.search(rf"^\s*(import|from) {package}\b", source, re.MULTILINE) for source in sources)


def test_every_make_target_of_the_readme_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = set(re.findall(r"make (run|test|lab|help|model|clean)\b", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"run", "test", "lab", "help"} <= asked <= targets
