"""Text to token ids and back, for the vocabularies of Llama, Qwen2 and Qwen3 checkpoints."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from deepinfer_lab.errors import ChatError, CheckpointError
from deepinfer_lab.model import chat, gguf_vocabulary
from deepinfer_lab.model.token_stream import TokenStream, byte_spelling

TEMPLATE_FILE = "chat_template.jinja"


class Tokenizer:
    """A model's vocabulary with its chat template and end-of-sequence ids.

    Args:
        backend: the Hugging Face `tokenizers` object that splits and looks up.
        eos_ids: ids that end an answer.
        bos_id: the id that begins a text, if the model has one.
        chat_template: Jinja source, or None for a model without one.
        source: the file this came from, for error messages.

    Raises:
        UnsupportedArchitecture: a vocabulary that is neither byte-level nor SentencePiece-like with byte fallback.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        chat_template: str | None = None,
        source: str = "tokenizer",
    ) -> None:
        backend.no_truncation()  # some tokenizer.json files were saved with a training length
        backend.no_padding()
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template
        self._backend = backend
        self._bos_id = bos_id
        self._source = source
        self._adds_bos = bos_id is not None and backend.encode("").ids[:1] == [bos_id]
        self._token_bytes, self._leading_spaces = byte_spelling(json.loads(backend.to_str())["decoder"], source)
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Read a `tokenizer.json`, and what the files beside it say of BOS, EOS and the chat template.

        EOS ids come from `generation_config.json`, else `config.json`, else `tokenizer_config.json`; the template from
        `chat_template.jinja`, else `tokenizer_config.json`. All of these files may be absent.

        Raises:
            CheckpointError: the file is missing, or one of them cannot be parsed.
            UnsupportedArchitecture: as the class does.
        """
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file, expected a tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a readable tokenizer.json ({error})") from error
        settings = read_json(path.with_name("tokenizer_config.json"), missing={})
        eos_ids = _ids(backend, settings.get("eos_token"))
        for name in ("config.json", "generation_config.json"):
            found = read_json(path.with_name(name), missing={}).get("eos_token_id")
            if found is not None:
                eos_ids = frozenset(found if isinstance(found, list) else [found])
        bos_id = next(iter(_ids(backend, settings.get("bos_token"))), None)
        template_file = path.with_name(TEMPLATE_FILE)
        if template_file.is_file():
            template = template_file.read_text(encoding="utf-8")
        else:
            template = _default_template(settings.get("chat_template"))
        return cls(backend, eos_ids=eos_ids, bos_id=bos_id, chat_template=template, source=str(path))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], source: str = "GGUF file") -> "Tokenizer":
        """Build from a GGUF file's metadata; see `gguf_vocabulary.byte_level_bpe` for what is supported and raised."""
        bos_id = metadata.get("tokenizer.ggml.bos_token_id")
        template = metadata.get("tokenizer.chat_template")
        backend = gguf_vocabulary.byte_level_bpe(metadata, source)
        return cls(
            backend, eos_ids=gguf_vocabulary.eos_ids(metadata), bos_id=bos_id, chat_template=template, source=source
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's embedding may have more rows, as padding."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def save(self, folder: Path) -> None:
        """Write the files from which `from_file(folder / "tokenizer.json")` makes an equal tokenizer."""
        self._backend.save(str(folder / "tokenizer.json"))
        bos = None if self._bos_id is None else self._backend.id_to_token(self._bos_id)
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}), encoding="utf-8")
        ids = json.dumps({"eos_token_id": sorted(self.eos_ids)})
        (folder / "generation_config.json").write_text(ids, encoding="utf-8")
        if self.chat_template is not None:
            (folder / TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8", newline="")

    def encode(self, text: str, *, specials: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in it, such as `<|im_start|>`, are always recognised.

        A byte for which the vocabulary has no token is left out, as the `tokenizers` library does.

        Args:
            text: any text; the empty one gives no ids but those that `specials` adds.
            specials: add what the model expects around a text, usually a BOS token. A text that begins with one already,
                as a rendered chat may, gets no second.
        """
        ids = self._backend.encode(text, add_special_tokens=specials).ids
        return ids[1:] if specials and self._adds_bos and ids[1:2] == [self._bos_id] else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`. Ids outside the vocabulary (padding rows of an embedding) give no text."""
        stream = self.stream(skip_special=skip_special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, *, skip_special: bool = True) -> TokenStream:
        """An incremental decoder; what it returns, joined, is what `decode` returns."""
        skipped = self._special if skip_special else frozenset()

        def bytes_of(token_id: int) -> bytes:
            if token_id in skipped or token_id < 0:
                return b""
            token = self._backend.id_to_token(token_id)
            return b"" if token is None else self._token_bytes(token)

        return TokenStream(bytes_of, self._leading_spaces)

    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt text for `messages` ([{"role": ..., "content": ...}, ...]).

        Raises:
            ChatError: the model has no chat template, or its template does not accept these messages.
        """
        if self.chat_template is None:
            raise ChatError(f"{self._source}: this model has no chat template; give it a plain prompt")
        bos = self._backend.id_to_token(self._bos_id) if self._bos_id is not None else ""
        eos = self._backend.id_to_token(min(self.eos_ids)) if self.eos_ids else ""
        return chat.render(
            self.chat_template, messages, add_generation_prompt=add_generation_prompt, bos_token=bos, eos_token=eos
        )


def read_json(path: Path, *, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in a file. `missing` stands in for a file that is not there, if given.

    Raises:
        CheckpointError: the file is not there, or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if missing is not None:
            return missing
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _ids(backend: tokenizers.Tokenizer, token: str | dict[str, Any] | None) -> frozenset[int]:
    spelling = token.get("content") if isinstance(token, dict) else token
    found = backend.token_to_id(spelling) if spelling else None
    return frozenset() if found is None else frozenset({found})


def _default_template(value: str | list[dict[str, str]] | None) -> str | None:
    if isinstance(value, list):  # several named ones, of which the plain chat is "default"
        return {item["name"]: item["template"] for item in value}.get("default")
    return value
