"""The shape of a decoder-only transformer, in the field's own terms."""

from dataclasses import dataclass
from typing import Literal

from deepinfer_lab.errors import UnsupportedArchitecture

Architecture = Literal["llama", "qwen2", "qwen3"]


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's frequency-dependent RoPE scaling (`rope_type: llama3` in a Hugging Face config)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int  # tokens


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of one model. All lengths are in elements, contexts in tokens.

    Raises:
        UnsupportedArchitecture: sizes that cannot belong together (heads that KV heads do not divide, odd head_dim).
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedArchitecture(
                f"{self.num_heads} query heads over {self.num_kv_heads} KV heads: the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise UnsupportedArchitecture(f"head_dim {self.head_dim}: rotary embedding needs an even head_dim")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
