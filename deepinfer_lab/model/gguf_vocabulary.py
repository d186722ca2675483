"""The tokenizer inside a GGUF file: a byte-level BPE rebuilt from its vocabulary, merges and token types.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Splitting rules: each model's own tokenizer.json, which
`tokenizer.ggml.pre` names.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from deepinfer_lab.errors import CheckpointError, UnsupportedArchitecture

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of sequence, of turn, of message

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# "default" is written by converters for models that split as GPT-2 does.
PRE_TOKENIZERS = ("smollm", "qwen2", "gpt-2", "default")


def byte_level_bpe(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` describes.

    Args:
        metadata: a GGUF file's key-value pairs.
        source: the file's name, for messages.

    Raises:
        CheckpointError: a key is missing, or vocabulary, merges and token types contradict each other.
        UnsupportedArchitecture: another kind of vocabulary, or another splitting rule.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedArchitecture(f"{source}: tokenizer '{kind}'; supported is 'gpt2' (byte-level BPE)")
    tokens: list[str] = _required(metadata, "tokens", source)
    merges: list[str] = _required(metadata, "merges", source)
    types: list[int] = _required(metadata, "token_type", source)
    if len(types) != len(tokens):
        raise CheckpointError(f"{source}: {len(types)} token types for {len(tokens)} tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocabulary[token] != i)
        raise CheckpointError(f"{source}: the token {twice!r} is in the vocabulary twice")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        backend = Tokenizer(models.BPE(vocabulary, pairs))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{source}: merges do not fit the vocabulary ({error})") from error
    pre = metadata.get("tokenizer.ggml.pre", "default")
    backend.pre_tokenizer = _splitter(pre, source)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types, strict=True) if k == CONTROL]
    )
    backend.add_tokens(
        [
            AddedToken(t, special=False, normalized=False)
            for t, k in zip(tokens, types, strict=True)
            if k == USER_DEFINED
        ]
    )
    _add_surroundings(backend, metadata, tokens, source)
    return backend


def eos_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Ids that end an answer: of the sequence, the turn or the message, whichever the file names."""
    return frozenset(metadata[key] for name in END_KEYS if (key := f"tokenizer.ggml.{name}") in metadata)


def _required(metadata: Mapping[str, Any], name: str, source: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise CheckpointError(f"{source}: no '{key}' in the metadata")
    return metadata[key]


def _splitter(pre: str, source: str) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre == "qwen2":
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if pre in ("gpt-2", "default"):
        return gpt2
    raise UnsupportedArchitecture(f"{source}: tokenizer.ggml.pre '{pre}'; supported are {', '.join(PRE_TOKENIZERS)}")


def _add_surroundings(backend: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], source: str) -> None:
    """Let `encode` put BOS before a text and EOS after it, where the file asks for that."""
    template, special = ["$A"], []
    for place, flag, name in ((0, "add_bos_token", "bos_token_id"), (len(template), "add_eos_token", "eos_token_id")):
        if metadata.get(f"tokenizer.ggml.{flag}", False):
            token_id = _required(metadata, name, source)
            if not 0 <= token_id < len(tokens):
                raise CheckpointError(
                    f"{source}: tokenizer.ggml.{name} is {token_id}, the vocabulary has {len(tokens)} tokens"
                )
            template.insert(len(template) if place else 0, tokens[token_id])
            special.append((tokens[token_id], token_id))
    if special:
        # A template string would split spellings with ':' or '$' in them; the list form takes them as they are.
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=list(dict(special).items())
        )
