"""Settings of an engine."""

from dataclasses import dataclass
from pathlib import Path

from deepinfer_lab.engine.policy import DEFAULT_ITL_TARGET_MS, Policy
from deepinfer_lab.errors import SettingError

KV_DTYPES = ("auto", "int8")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine.

    Attributes:
        policy: how prefill and decode share the machine, by name: one of `policy.POLICIES`. A GPU is needed for any of them to
            make a difference: on a CPU all run serially, decode first. Or a `Policy` made by hand, for this engine alone.
        chunk_tokens: the most prompt tokens that one cycle prefills.
        max_context: the most tokens of a request, prompt and output; None: as many as the model takes.
        max_batch: the most requests in flight; more wait in a queue.
        block_size: tokens in a KV block.
        kv_cache_mib: memory for K and V, never exceeded; None takes 512 MiB on a CPU and 4,096 MiB on a GPU.
        kv_dtype: "auto" stores K and V in the model's own type, "int8" in one byte a value and a scale a vector.
        prefix_cache: keep blocks of finished requests for others that begin with the same tokens.
        max_in_flight: the most pieces of work that are launched and not committed.
        itl_target_ms: milliseconds between two tokens of a request that `time-sliced` and `adaptive` aim at.
        cuda_graphs: on a GPU, capture forward passes at the start, which takes seconds, and replay them. Otherwise each kernel
            is launched by Python.
        decode_chain: on a GPU that can, all layers of a captured decode step of one sequence are one launch, while no prompt
            is read. It needs all multiprocessors at once: to be turned off where two engines share a GPU.
        decode_share: part of the multiprocessors that prefill leaves to decode under `partition` and `adaptive`, between 0 and
            1; None: a quarter under the one, a sixteenth under the other, which lets decode use all.
        event_log: a file that receives every event as a line of JSON; none by default.

    Raises:
        SettingError: a size below 1, a target of 0 or less, a share that is not between 0 and 1, or a `kv_dtype` that does not
            exist.
    """

    policy: str | Policy = "serial"
    chunk_tokens: int = 256
    max_context: int | None = None
    max_batch: int = 64
    block_size: int = 16
    kv_cache_mib: int | None = None
    kv_dtype: str = "auto"
    prefix_cache: bool = True
    max_in_flight: int = 4
    itl_target_ms: float = DEFAULT_ITL_TARGET_MS
    cuda_graphs: bool = True
    decode_chain: bool = True
    decode_share: float | None = None
    event_log: Path | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "max_context", "max_batch", "block_size", "kv_cache_mib", "max_in_flight"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingError(f"{name} = {value}: allowed is 1 or more")
        if not 0 < self.itl_target_ms < float("inf"):
            raise SettingError(f"itl_target_ms = {self.itl_target_ms}: allowed are finite numbers above 0")
        if self.decode_share is not None and not 0 < self.decode_share < 1:
            raise SettingError(f"decode_share = {self.decode_share}: allowed is between 0 and 1")
        if self.kv_dtype not in KV_DTYPES:
            raise SettingError(f"kv_dtype = {self.kv_dtype!r}: allowed are {', '.join(KV_DTYPES)}")
