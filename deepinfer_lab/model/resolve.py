"""From what a user calls a model to an open weight source."""

import re
import shutil
from pathlib import Path

from deepinfer_lab.errors import CacheFull, DownloadError, ModelNotFound
from deepinfer_lab.model.catalog import CATALOG, NO_SPACE, accepted_forms, obtain
from deepinfer_lab.model.few_bit_source import FewBitSource, is_few_bit
from deepinfer_lab.model.gguf_source import GgufSource
from deepinfer_lab.model.hf_source import HfSource
from deepinfer_lab.model.source import WeightSource

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json", "tokenizer.json",
             "tokenizer_config.json", "chat_template.jinja")  # fmt: skip


def resolve(spec: str) -> WeightSource:
    """Open a model, downloading it where needed.

    Args:
        spec: a catalog name, a folder in Hugging Face format (float weights, or few-bit ones of another tool), a .gguf
            file, or a hub id `org/name`. A path that exists wins over a hub id.

    Raises:
        ModelNotFound: `spec` is none of these.
        DownloadError, CacheFull, ChecksumError: the model could not be fetched.
        CheckpointError, UnsupportedArchitecture, QuantisationError: as the source does.
    """
    if spec in CATALOG:
        return GgufSource(obtain(spec), spec)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".gguf":
        if not path.exists():
            raise ModelNotFound(f"no file {path}")
        return GgufSource(path)
    if HUB_ID.fullmatch(spec) and not path.exists():
        return _open_folder(_snapshot(spec), spec)
    raise ModelNotFound(f"'{spec}' is no model; a model is {accepted_forms()}")


def _open_folder(folder: Path, name: str | None = None) -> WeightSource:
    return FewBitSource(folder, name) if is_few_bit(folder) else HfSource(folder, name)


def _snapshot(hub_id: str) -> Path:
    """The local folder of a hub repository, downloaded where it is not cached already."""
    from huggingface_hub import constants, snapshot_download  # slow to import, and most runs need no hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
    except GatedRepoError as error:
        raise DownloadError(
            f"'{hub_id}' is gated: accept its terms on the hub and log in with 'hf auth login'"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(
            f"no model '{hub_id}' on the hub (and no such folder); a model is {accepted_forms()}"
        ) from error
    except LocalEntryNotFoundError as error:
        raise DownloadError(
            f"'{hub_id}' is not in the hub's cache, and the hub cannot be reached: {_first_line(error)}. "
            f"By hand: copy the model's folder here and pass its path"
        ) from error
    except OSError as error:
        if error.errno in NO_SPACE:
            folder = constants.HF_HUB_CACHE
            free = shutil.disk_usage(folder).free
            raise CacheFull(
                f"{folder} has {free} bytes free, too few for '{hub_id}': free some, or set HF_HOME"
            ) from error
        raise DownloadError(f"'{hub_id}' could not be fetched: {_first_line(error)}") from error
    except Exception as error:  # which HTTP client raises depends on the hub library's version
        raise DownloadError(f"'{hub_id}' could not be fetched: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
