"""Text to token ids and back: a thin wrap of the `tokenizers` library.

Three things are ours: a tokenizer rebuilt from what a GGUF file stores of it, the model's chat template, and a
`Detokenizer` that spells tokens as they come, without ever giving out half a character.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

CHECKPOINTS = Path(__file__).parent / "checkpoints"
ROLES = ("system", "developer", "user", "assistant", "tool")
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")  # what a chat template may ask for by name
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# GGUF's `tokenizer.ggml.pre`: the expressions that cut text into words, one after the other, before any merge.
SPLITS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "qwen2": [CL100K % r"\p{N}"],
    "llama-bpe": [CL100K % r"\p{N}{1,3}"],
    "default": [r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],  # llama.cpp's, for files that name none
}


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer of "smollm2", "tiny", "draft", a Hugging Face folder (tokenizer.json) or a GGUF file.

    Raises ValueError (CheckpointError) naming the file and what in it is missing or not supported.
    """
    from minillm.weights import find_checkpoint  # pulls in torch, which encoding text does not need

    path = find_checkpoint(name_or_path)
    if path.is_dir():
        return from_folder(path)
    from minillm.gguf_format import open_gguf  # here, so that other tokenizers load without the package `gguf`

    return from_gguf(path, open_gguf(path))


class Tokenizer:
    """A vocabulary, with what the model's makers say of it: ids that end a text, and the shape of a chat.

    `special_tokens` gives the texts of bos_token, eos_token and the like to the chat template. `source` is the
    file that errors name. Raises ValueError for a decoder that we cannot follow token by token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
        special_tokens: dict[str, str] | None = None,
        source: str | Path = "this tokenizer",
    ):
        self.backend = backend
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.vocab_size = backend.get_vocab_size()
        self.chat_template = chat_template
        self.special_tokens = special_tokens or {}
        self.source = source
        self.special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self.byte_level, self.strips_space = decoder_kind(backend, source)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, with the model's own start token if it has one and `add_special_tokens` is set.

        Control tokens written out in the text, such as "<|im_end|>", become control tokens, as in transformers
        and vLLM: a prompt may be a rendered chat. Raises ValueError for anything but text.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a str, got {type(text).__name__}")
        if not text.isascii():
            text.encode()  # a lone surrogate is no text: UnicodeEncodeError, a ValueError, says where it is
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids. Broken UTF-8 becomes U+FFFD; ids past the vocabulary (padding rows) spell nothing."""
        if ids and min(ids) < 0:
            raise ValueError(f"token ids start at 0, got {min(ids)}")
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder."""
        return Detokenizer(self, skip_special_tokens)

    def chat_prompt(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text that the model was trained to see for these messages, up to where its answer starts.

        Each message has a `role` and a `content`. The template runs sandboxed: it comes with the model, not from us.
        Raises ValueError for messages out of shape, a model without a template, a template that refuses or fails.
        """
        if self.chat_template is None:
            raise ValueError(f"{self.source} has no chat template: the model knows no chats; prompt with text")
        messages = [messages] if isinstance(messages, (str, dict)) else list(messages)
        if not messages:
            raise ValueError("messages is empty; a chat needs at least one message")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("content"), str):
                raise ValueError(f"message {index} must be a dict with 'role' and a string 'content', got {message!r}")
            if message.get("role") not in ROLES:
                raise ValueError(f"message {index} has role {message.get('role')!r}; use one of {', '.join(ROLES)}")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.special_tokens
            )
        except Exception as error:  # a template is the model's own program: it may fail in any way
            raise ValueError(f"the chat template of {self.source} refuses these messages: {error}") from error

    def encode_chat(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of `chat_prompt`; the template has written its own start token, so none is added."""
        return self.encode(self.chat_prompt(messages, add_generation_prompt), add_special_tokens=False)

    @cached_property
    def _template(self) -> jinja2.Template:
        """Compiled with what Hugging Face templates expect of their surroundings."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.chat_template)


class Detokenizer:
    """Spells tokens one by one. The pieces joined are exactly `decode` of all the ids, however odd they are.

    Bytes are held back until they make a whole character, or cannot any more. Work per token does not grow.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self.tokenizer = tokenizer
        self.skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = bytearray()  # a run of byte tokens, which a SentencePiece vocabulary judges as a whole
        self.at_start = tokenizer.strips_space

    def add(self, token: int) -> str:
        """The text that this token completes; "" while a character is unfinished, or for a skipped token."""
        if token < 0:
            raise ValueError(f"token ids start at 0, got {token}")
        piece = None if token in self.skipped else self.tokenizer.backend.id_to_token(token)
        if piece is None:
            return ""
        if self.tokenizer.byte_level:
            return self.utf8.decode(spelled(piece))
        if (byte := byte_token(piece)) is not None:
            self.held.append(byte)
            return ""
        return self._strip(self._release() + piece.replace("▁", " "))

    def finish(self) -> str:
        """What is still held back; U+FFFD for a character that never came whole. Ends the text."""
        if self.tokenizer.byte_level:
            return self.utf8.decode(b"", final=True)
        return self._strip(self._release())

    def _release(self) -> str:
        run, self.held = bytes(self.held), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip(self, text: str) -> str:
        """SentencePiece puts a space before the first word; the text itself has none."""
        if self.at_start and text:
            self.at_start = False
            return text.removeprefix(" ")
        return text


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character to byte. Printable bytes stand for themselves, others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


BYTE_OF = byte_alphabet()


def spelled(piece: str) -> bytes:
    """Bytes of a byte-level token; one with other characters in it (an added token) is plain text."""
    try:
        return bytes(BYTE_OF[character] for character in piece)
    except KeyError:
        return piece.encode()


def byte_token(piece: str) -> int | None:
    """The byte of a SentencePiece token such as "<0x0A>"; None for any other."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return int(piece[3:5], 16)
        except ValueError:
            return None
    return None


def decoder_kind(backend: tokenizers.Tokenizer, source: str | Path) -> tuple[bool, bool]:
    """(byte level?, strips the first space?): bytes under GPT-2's alphabet, or SentencePiece with byte fallback."""
    stored = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    if stored.get("type") == "ByteLevel":
        return True, False
    steps = [step["type"] for step in stored.get("decoders", ())]
    if steps[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[3:] in ([], ["Strip"]):
        return False, bool(steps[3:])
    raise ValueError(f"{source} has decoder {steps or stored.get('type')}; supported: ByteLevel, or SentencePiece BPE")


def refuse(message: str):
    raise jinja2.TemplateError(message)


def from_folder(folder: Path) -> Tokenizer:
    """A Hugging Face folder's tokenizer.json; the checkpoints that ship with the package share one beside them."""
    file = folder / "tokenizer.json"
    if not file.is_file() and folder.resolve().parent == CHECKPOINTS:
        file = CHECKPOINTS / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json; tokenizers in other formats are not read")
    try:
        backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is not a tokenizer that the tokenizers library reads: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    names = ("tokenizer_config.json", "generation_config.json", "config.json")
    settings, generation, config = (settings_in(folder / name) for name in names)
    texts = {name: settings.get(name) for name in SPECIAL}
    texts = {name: text["content"] if isinstance(text, dict) else text for name, text in texts.items() if text}
    eos = generation.get("eos_token_id")
    eos = config.get("eos_token_id") if eos is None else eos
    eos = eos if isinstance(eos, list) else [eos, backend.token_to_id(texts.get("eos_token", ""))]
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name, in older files
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return Tokenizer(backend, (i for i in eos if i is not None), template, texts, file)


def settings_in(file: Path) -> dict:
    from minillm.formats import read_json

    return read_json(file) if file.is_file() else {}


def from_gguf(file: Path, reader) -> Tokenizer:
    """A byte-level BPE rebuilt from the tokens, merges and token types that an opened GGUF file holds."""
    from gguf import TokenType

    fields = {name: field for name, field in reader.fields.items() if name.startswith("tokenizer.")}

    def get(name: str, default=None):
        return fields[f"tokenizer.{name}"].contents() if f"tokenizer.{name}" in fields else default

    kind, pre = get("ggml.model"), get("ggml.pre", "default")
    if kind != "gpt2":
        raise ValueError(f"{file}: tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) is supported")
    if pre not in SPLITS:
        raise ValueError(f"{file}: tokenizer.ggml.pre is {pre!r}; supported: {', '.join(SPLITS)}")
    tokens, merges, types = get("ggml.tokens"), get("ggml.merges"), get("ggml.token_type")
    if not tokens or not merges or not types or len(types) != len(tokens):
        raise ValueError(f"{file}: tokenizer.ggml.tokens, .merges and .token_type must all be there, and match")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    for token, of_type in zip(tokens, types, strict=True):
        if of_type in (TokenType.CONTROL, TokenType.USER_DEFINED):
            added = AddedToken(token, special=of_type == TokenType.CONTROL, normalized=False)
            (backend.add_special_tokens if added.special else backend.add_tokens)([added])
    ids = {name: get(f"ggml.{name}_token_id") for name in ("bos", "eos", "eot", "unknown", "padding")}
    if get("ggml.add_bos_token", pre == "llama-bpe") and ids["bos"] is not None:
        bos = tokens[ids["bos"]]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, ids["bos"])]
        )
    texts = zip(SPECIAL, (ids[name] for name in ("bos", "eos", "unknown", "padding")), strict=True)
    texts = {name: tokens[i] for name, i in texts if i is not None}
    eos = (ids[name] for name in ("eos", "eot") if ids[name] is not None)
    return Tokenizer(backend, eos, get("chat_template"), texts, file)
