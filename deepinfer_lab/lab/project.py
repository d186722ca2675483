"""Where the project's folders are: records, pictures, notebooks, and what a run leaves behind."""

import os
from pathlib import Path

from deepinfer_lab.errors import SettingError

VARIABLE = "DEEPINFER_HOME"


def _is_root(folder: Path) -> bool:
    return (folder / "notebooks").is_dir() and (folder / "data").is_dir()


def root() -> Path:
    """The folder that holds `notebooks/` and `data/`.

    `DEEPINFER_HOME` decides alone where it is set; else the nearest such folder at or above the working folder; else
    the source tree of an editable install.

    Raises:
        SettingError: no such folder, or `DEEPINFER_HOME` names a folder that is not one.
    """
    named = os.environ.get(VARIABLE)
    if named:
        home = Path(named).expanduser().resolve()
        if not _is_root(home):
            raise SettingError(f"{VARIABLE}={named!r} does not hold the folders notebooks/ and data/")
        return home
    here = Path.cwd().resolve()
    source_tree = Path(__file__).resolve().parents[2]
    for folder in (here, *here.parents, source_tree):
        if _is_root(folder):
            return folder
    raise SettingError(
        f"no project folder (one that holds notebooks/ and data/) at or above {here}: change into a clone of the "
        f"repository, or set {VARIABLE} to it"
    )


def data() -> Path:
    """Committed records: `data/<device slug>/<experiment>.json`."""
    return root() / "data"


def build() -> Path:
    """What runs leave behind, ignored by git: executed notebooks, and new records under `build/data/`."""
    return root() / "build"


def figures() -> Path:
    """Pictures that the notebooks write."""
    return root() / "figures"


def notebooks() -> Path:
    """Committed notebooks, with outputs."""
    return root() / "notebooks"


def scripts() -> Path:
    """The notebooks' paired sources, in py:percent form."""
    return notebooks() / "scripts"
