"""`data/SHA256SUMS`: which bytes every file of data had when it was published. `sha256sum -c` reads it, too.

A record is made by measuring and filed by `publish`, and nobody edits one. So `publish` seals what it files and what has no
seal yet; for a file that changed on the way, its line stays as it is, and `complaints` tells.
"""

import hashlib
from collections.abc import Collection
from pathlib import Path

from deepinfer_lab.errors import RecordError
from deepinfer_lab.lab import project
from deepinfer_lab.lab.record import write_atomically

FILE = "SHA256SUMS"
BY_TESTS = ("verification.json", "sanitizer.json")  # written by tests on a GPU; `check` holds them to the CUDA sources


def complaints() -> list[str]:
    """Files that changed, are missing, or were never sealed.

    Raises:
        RecordError: a line of the file that is not one.
    """
    sealed, now = _read(), _digests()
    found = []
    for name in sorted(sealed.keys() | now.keys()):
        if name not in now:
            found.append(f"data/{name}: missing, but {FILE} has a line for it")
        elif name not in sealed:
            found.append(f"data/{name}: has no line in {FILE}; `deepinfer-lab publish` adds it")
        elif sealed[name] != now[name]:
            found.append(f"data/{name}: differs from what was published")
    return found


def update(published: Collection[Path]) -> None:
    """Seal the files just published, and those that have no line yet."""
    sealed, now = _read(), _digests()
    fresh = {path.relative_to(project.data()).as_posix() for path in published}
    lines = sealed | {name: digest for name, digest in now.items() if name in fresh or name not in sealed}
    text = "".join(f"{lines[name]}  {name}\n" for name in sorted(lines))
    write_atomically(project.data() / FILE, text)


def _read() -> dict[str, str]:
    path = project.data() / FILE
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        digest, gap, name = line.partition("  ")
        if not gap or len(digest) != 64:
            raise RecordError(f"{path}: {line!r} is not a SHA-256, two spaces and a file's name")
        found[name] = digest
    return found


def _digests() -> dict[str, str]:
    folder = project.data()
    paths = [path for path in folder.glob("*/*.json") if path.name not in BY_TESTS]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
