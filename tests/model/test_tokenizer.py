"""Tokens equal to transformers', text equal whether decoded at once or token by token."""

import json

import pytest
import tokenizers
from checkpoints import byte_vocabulary, fallback_tokenizer, tokenizer_metadata
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_lab.errors import ChatError, CheckpointError, UnsupportedArchitecture
from deepinfer_lab.model.gguf_source import GgufSource
from deepinfer_lab.model.token_stream import TokenStream
from deepinfer_lab.model.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "In 2024, 12345 of 67,890 (18.2%) were 0.",
    "  two spaces  inside and   at the end  ",
    "line\nline\n\n\n  indented\r\n\ttabbed",
    "def f(x: int) -> int:\n    return x ** 2  # don't\n",
    "naïve café, Straße, Ελληνικά, русский, עברית, العربية",
    "双流调度器 カーネル 커널",
    "🙂 👩‍👩‍👧‍👦 🇪🇺 e\u0301 \u200b",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "<|im_start|><|im_start|>twice, and <|not_special|>",
    "a" * 300,
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <b>2+2</b>?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure? ✓"},
]


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> Tokenizer:
    return GgufSource(smollm2_path).tokenizer


@pytest.fixture(scope="module")
def reference(smollm2_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


def streamed(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_equals_transformers(smollm2, reference, text):
    ids = smollm2.encode(text)
    assert ids == reference(text).input_ids
    for skip in (True, False):
        assert smollm2.decode(ids, skip_special=skip) == reference.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
    assert smollm2.decode(ids, skip_special=False) == text


def test_smollm_splits_all_digits(smollm2):
    assert [smollm2.decode([i]) for i in smollm2.encode("x²12 ½")] == ["x", "²", "1", "2", " ", "½"]


def test_vocabulary_and_end(smollm2):
    assert smollm2.vocab_size == 49_152
    assert {smollm2.decode([i], skip_special=False) for i in smollm2.eos_ids} == {"<|im_end|>"}


def test_chat_equals_transformers(smollm2, reference):
    for messages in (MESSAGES, MESSAGES[1:]):
        for prompt in (True, False):
            assert smollm2.render_chat(messages, prompt) == reference.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )


# SmolLM2's vocabulary has no token for the bytes of a few control characters and of planes 4 to 11.
HAS_TOKENS = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_categories=["Cc"], include_characters="\n\t")


@settings(deadline=None, max_examples=100)
@given(text=st.text(HAS_TOKENS, max_size=60))
def test_any_text_survives(smollm2, text):
    ids = smollm2.encode(text)
    assert smollm2.decode(ids, skip_special=False) == text
    assert "".join(streamed(smollm2, ids, skip_special=False)) == text


@settings(deadline=None, max_examples=100)
@given(ids=st.lists(st.integers(0, 49_151), max_size=30))
def test_any_ids_decode_as_the_library_does(smollm2, reference, ids):
    assert "".join(streamed(smollm2, ids)) == reference.backend_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", ["a\x04b", "\U00040000"])
def test_bytes_without_a_token_are_dropped_as_transformers_does(smollm2, reference, text):
    ids = smollm2.encode(text)
    assert ids == reference(text).input_ids
    assert smollm2.decode(ids) != text


def test_a_character_over_several_tokens_comes_out_whole(smollm2):
    ids = smollm2.encode("ok 𓂀𓂀 done")
    pieces = streamed(smollm2, ids)
    assert "".join(pieces) == "ok 𓂀𓂀 done"
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces.count("") > 3, "the hieroglyphs take several tokens each"


def test_an_unfinished_character_is_flushed(smollm2):
    ids = smollm2.encode("𓂀")[:-1]
    *pushed, flushed = streamed(smollm2, ids)
    assert "".join(pushed) == ""
    assert flushed == "\ufffd"


def test_each_push_looks_at_one_token_only():
    seen = []

    def bytes_of(token_id):
        seen.append(token_id)
        return b"\xf0\x9f\x99\x82"[token_id % 4 : token_id % 4 + 1]

    stream = TokenStream(bytes_of, 0)
    pieces = [stream.push(i) for i in range(4000)]
    assert seen == list(range(4000))
    assert pieces == ["", "", "", "🙂"] * 1000


def test_ids_outside_the_vocabulary_give_no_text(smollm2):
    assert smollm2.decode([-1, 49_152, 10**6]) == ""


# --- other vocabularies in GGUF metadata ---


def from_metadata(**changes: object) -> Tokenizer:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in {**tokenizer_metadata(), **changes}.items()}
    return Tokenizer.from_gguf({key: value for key, value in metadata.items() if value is not None}, "m.gguf")


def spelt(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i], skip_special=False) for i in tokenizer.encode(text)]


def test_merges_control_and_user_defined_tokens():
    tokenizer = from_metadata()
    assert spelt(tokenizer, "hello<|end|><think>") == ["hell", "o", "<|end|>", "<think>"]
    assert tokenizer.decode(tokenizer.encode("hello<|end|><think>")) == "hello<think>"


@pytest.mark.parametrize(
    ("pre", "merges", "text", "expected"),
    [
        ("smollm", ["1 2", "Ġ 1"], "12 1", ["1", "2", " ", "1"]),
        ("gpt-2", ["1 2", "Ġ 1"], "12 1", ["12", " 1"]),
        ("default", ["1 2", "Ġ 1"], "12 1", ["12", " 1"]),
        ("qwen2", ["1 2", "Ġ 1"], "12 1", ["1", "2", " ", "1"]),
        ("gpt-2", [") Ċ"], "a)\n", ["a", ")", "\n"]),
        ("qwen2", [") Ċ"], "a)\n", ["a", ")\n"]),
    ],
)
def test_splitting_rules(pre, merges, text, expected):
    tokens = [*byte_vocabulary(), *(merge.replace(" ", "") for merge in merges)]
    tokenizer = from_metadata(pre=pre, merges=merges, tokens=tokens, token_type=[1] * len(tokens), eos_token_id=None)
    assert spelt(tokenizer, text) == expected
    assert tokenizer.eos_ids == frozenset()


def test_qwen2_split_equals_transformers():
    from transformers import Qwen2Tokenizer

    vocabulary = {token: i for i, token in enumerate([*byte_vocabulary(), "he", "ll", "hell", "Ġt", ")Ċ"])}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "t"), (")", "Ċ")]
    reference = Qwen2Tokenizer(vocab={**vocabulary, "<|endoftext|>": len(vocabulary)}, merges=merges)
    tokenizer = from_metadata(
        pre="qwen2", tokens=[*vocabulary, "<|endoftext|>"], token_type=[1] * len(vocabulary) + [3],
        merges=[" ".join(merge) for merge in merges],
    )  # fmt: skip
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text).input_ids, text


def test_bos_and_eos_are_added_where_the_file_says():
    end = tokenizer_metadata()["eos_token_id"]
    tokenizer = from_metadata(add_bos_token=True, bos_token_id=end + 1)
    assert tokenizer.encode("he") == [end + 1, *tokenizer.encode("he", specials=False)]
    assert tokenizer.encode("<think>he") == tokenizer.encode("he"), "no second BOS"
    assert tokenizer.encode("<think>he", specials=False) == tokenizer.encode("he")
    both = from_metadata(add_bos_token=True, bos_token_id=end + 1, add_eos_token=True)
    assert both.encode("he") == [*tokenizer.encode("he"), end]


def test_ends_of_turns_end_an_answer():
    assert from_metadata(eot_token_id=5, eom_token_id=7).eos_ids == {tokenizer_metadata()["eos_token_id"], 5, 7}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": "llama"}, UnsupportedArchitecture, "tokenizer 'llama'; supported is 'gpt2'"),
        ({"pre": "deepseek-llm"}, UnsupportedArchitecture, "'deepseek-llm'; supported are smollm, qwen2"),
        ({"tokens": None}, CheckpointError, r"no 'tokenizer\.ggml\.tokens'"),
        ({"merges": None}, CheckpointError, r"no 'tokenizer\.ggml\.merges'"),
        ({"token_type": [1]}, CheckpointError, "1 token types for 261 tokens"),
        ({"merges": ["h zz"]}, CheckpointError, "merges do not fit the vocabulary"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, CheckpointError, "'a' is in the vocabulary twice"),
        ({"add_bos_token": True, "bos_token_id": 999}, CheckpointError, "bos_token_id is 999"),
        ({"add_bos_token": True}, CheckpointError, r"no 'tokenizer\.ggml\.bos_token_id'"),
    ],
)
def test_metadata_that_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        from_metadata(**changes)


# --- tokenizer.json ---


@pytest.fixture
def folder(tmp_path):
    fallback_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("text", ["hi there", "  hi", "日本 hi 🙂🙂", "a\nb", "hi\n", "<s>hi</s>", ""])
def test_byte_fallback_vocabulary(folder, text):
    tokenizer, library = Tokenizer.from_file(folder / "tokenizer.json"), fallback_tokenizer()
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids
    for skip in (True, False):
        pieces = streamed(tokenizer, ids, skip_special=skip)
        assert "".join(pieces) == library.decode(ids, skip_special_tokens=skip)
        assert not any("\ufffd" in piece for piece in pieces)


def test_broken_byte_fallback(folder):
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    ids = [tokenizer.encode("日")[1], tokenizer.encode("hi")[0]]
    assert streamed(tokenizer, ids) == ["", "\ufffd hi", ""]


def test_saved_truncation_is_switched_off(tmp_path):
    library = fallback_tokenizer()
    library.enable_truncation(4)
    library.enable_padding(length=8)
    library.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_file(tmp_path / "tokenizer.json").encode("abcdefgh")) == 9


@pytest.mark.parametrize("where", ["config string", "config list", "jinja file"])
def test_chat_template_places(folder, where):
    template = "{% for m in messages %}{{ bos_token }}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    listed = [{"name": "tool", "template": "no"}, {"name": "default", "template": template}]
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    config["chat_template"] = {"config string": template, "config list": listed, "jinja file": "no"}[where]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if where == "jinja file":
        (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<s>hi</s>"
    assert tokenizer.eos_ids == {2}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{% for %}", "chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", "does not accept these messages"),
        ("{{ ''.__class__.__mro__ }}", "does not accept these messages"),
        ("{{ messages.append(1) }}", "does not accept these messages"),
    ],
)
def test_chat_errors(template, message):
    backend = fallback_tokenizer()
    with pytest.raises(ChatError, match=message):
        Tokenizer(backend, chat_template=template).render_chat([{"role": "user", "content": "hi"}])


def test_template_helpers():
    first_only = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
    template = first_only + "{{ strftime_now('%%') }}"
    tokenizer = Tokenizer(fallback_tokenizer(), chat_template=template)
    assert tokenizer.render_chat([{"content": "<é>"}, {"content": "x"}]) == '{"content": "<é>"}%'


def test_save_and_read_back(tmp_path, smollm2):
    smollm2.save(tmp_path)
    again = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert again.eos_ids == smollm2.eos_ids
    assert again.render_chat(MESSAGES) == smollm2.render_chat(MESSAGES)
    for text in TEXTS:
        assert again.encode(text) == smollm2.encode(text)


def test_missing_and_broken_files(tmp_path, folder):
    with pytest.raises(CheckpointError, match="no such file"):
        Tokenizer.from_file(tmp_path / "other" / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not readable as JSON"):
        Tokenizer.from_file(folder / "tokenizer.json")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"not a readable tokenizer\.json"):
        Tokenizer.from_file(folder / "tokenizer.json")


def test_other_decoders_are_refused():
    backend = fallback_tokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(UnsupportedArchitecture, match="WordPiece"):
        Tokenizer(backend)
