"""A Hugging Face `config.json` as a `ModelConfig`. Anything that the decoder would compute otherwise is refused by name."""

from pathlib import Path
from typing import Any

from deepinfer_lab.errors import CheckpointError, UnsupportedArchitecture
from deepinfer_lab.model.config import Architecture, Llama3Scaling, ModelConfig

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
MODEL_TYPES = {architecture: name for name, architecture in ARCHITECTURES.items()}
# Settings that change the forward pass, and what they must be where they are given.
REQUIRED = {"hidden_act": "silu", "mlp_bias": False, "partial_rotary_factor": 1.0}


def model_config(settings: dict[str, Any], path: Path) -> ModelConfig:
    """Translate the settings in the `config.json` at `path`.

    Raises:
        CheckpointError: a setting is missing or of the wrong kind.
        UnsupportedArchitecture: another model family, or a feature that the decoder does not implement.
    """
    architecture = _architecture(settings, path)
    for key, value in REQUIRED.items():
        if settings.get(key, value) != value:
            raise UnsupportedArchitecture(f"{path}: {key} is {settings[key]!r}, supported is {value!r}")

    def size(key: str, default: int | None = None) -> int:
        value = settings.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise CheckpointError(f"{path}: {key} is {value!r}, expected a positive integer")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    context, layers = size("max_position_embeddings"), size("num_hidden_layers")
    _refuse_sliding_window(settings, context, layers, path)
    theta, scaling = _rope(settings, path)
    return ModelConfig(
        architecture=architecture,
        vocab_size=size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", heads if architecture == "llama" else None),
        # Qwen3's default is a number of its own; elsewhere the heads share the hidden size.
        head_dim=size("head_dim", 128 if architecture == "qwen3" else hidden // heads),
        max_context=context,
        rms_norm_eps=_number(settings, "rms_norm_eps", path),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=architecture == "qwen2" or bool(settings.get("attention_bias", False)),
        qk_norm=architecture == "qwen3",
        tied_embeddings=bool(settings.get("tie_word_embeddings", False)),
    )


def quantisation(settings: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """What the `config.json` at `path` says of how its weights are quantised; None for float weights.

    Raises:
        CheckpointError: `quantization_config` is not an object.
    """
    value = settings.get("quantization_config") or None
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{path}: quantization_config is {value!r}, expected an object")
    return value


def _architecture(settings: dict[str, Any], path: Path) -> Architecture:
    names = settings.get("architectures") or [
        MODEL_TYPES.get(settings.get("model_type", ""), settings.get("model_type"))
    ]
    if names[0] not in ARCHITECTURES:
        raise UnsupportedArchitecture(f"{path}: architecture '{names[0]}'; supported are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[names[0]]


def _refuse_sliding_window(settings: dict[str, Any], context: int, layers: int, path: Path) -> None:
    window = settings.get("sliding_window")
    kinds = settings.get("layer_types")
    if kinds is not None:
        used = any(kind != "full_attention" for kind in kinds)
    else:  # Qwen's older spelling: layers from max_window_layers on have the window
        used = settings.get("use_sliding_window", False) and settings.get("max_window_layers", 0) < layers
    if used and (window is None or window < context):
        raise UnsupportedArchitecture(
            f"{path}: some layers attend to a window of {window} tokens; supported is full attention in every layer"
        )


def _rope(settings: dict[str, Any], path: Path) -> tuple[float, Llama3Scaling | None]:
    """RoPE's base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    theta = _number({"rope_theta": 10_000.0, **settings, **rope}, "rope_theta", path)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedArchitecture(f"{path}: RoPE scaling '{kind}'; supported are default and llama3")
    return theta, Llama3Scaling(
        factor=_number(rope, "factor", path),
        low_freq_factor=_number(rope, "low_freq_factor", path),
        high_freq_factor=_number(rope, "high_freq_factor", path),
        original_context=int(_number(rope, "original_max_position_embeddings", path)),
    )


def _number(settings: dict[str, Any], key: str, path: Path) -> float:
    value = settings.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"{path}: {key} is {value!r}, expected a positive number")
    return float(value)
