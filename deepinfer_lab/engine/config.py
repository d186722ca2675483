"""Settings of an engine."""

from dataclasses import dataclass
from pathlib import Path

from deepinfer_lab.errors import SettingError

KV_DTYPES = ("auto", "int8")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        policy: how prefill and decode share the machine, by name.
        chunk_tokens: the most prompt tokens that one cycle prefills.
        max_batch: the most requests in flight; more wait in a queue.
        block_size: tokens in a KV block.
        kv_cache_mib: memory for K and V, never exceeded; None takes 512 MiB on a CPU and 4,096 MiB on a GPU.
        kv_dtype: "auto" stores K and V in the model's own type, "int8" in one byte a value and a scale a vector.
        prefix_cache: keep blocks of finished requests for others that begin with the same tokens.
        max_in_flight: the most pieces of work that are launched and not committed.
        event_log: a file that receives every event as a line of JSON; none by default.

    Raises:
        SettingError: a size below 1, or a `kv_dtype` that does not exist.
    """

    policy: str = "serial"
    chunk_tokens: int = 256
    max_batch: int = 64
    block_size: int = 16
    kv_cache_mib: int | None = None
    kv_dtype: str = "auto"
    prefix_cache: bool = True
    max_in_flight: int = 4
    event_log: Path | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "max_batch", "block_size", "kv_cache_mib", "max_in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name} = {value}: allowed is 1 or more")
        if self.kv_dtype not in KV_DTYPES:
            raise SettingError(f"kv_dtype = {self.kv_dtype!r}: allowed are {', '.join(KV_DTYPES)}")
