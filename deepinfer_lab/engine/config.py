"""Settings of an engine."""

from dataclasses import dataclass

from deepinfer_lab.errors import SettingError


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        policy: how prefill and decode share the machine, by name.
        chunk_tokens: the most prompt tokens that one cycle prefills.
        max_batch: the most requests in flight; more wait in a queue.
        block_size: tokens in a KV block.
        kv_cache_mib: memory for K and V; None takes 512 MiB on a CPU and 4,096 MiB on a GPU.

    Raises:
        SettingError: a size below 1.
    """

    policy: str = "serial"
    chunk_tokens: int = 256
    max_batch: int = 64
    block_size: int = 16
    kv_cache_mib: int | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "max_batch", "block_size", "kv_cache_mib"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name} = {value}: allowed is 1 or more")
