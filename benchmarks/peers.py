"""Other engines, behind the same two calls as ours: `fill` a cache with a prompt, then `decode` a number of steps.

Both are optional: what is not installed raises ImportError, and the benchmark says so and goes on.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

from minillm.model import Transformer
from minillm.weights import save_model


class Transformers:
    """`generate` of Hugging Face `transformers`, greedy, with its default cache and attention."""

    def __init__(self, model: Transformer):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with tempfile.TemporaryDirectory() as folder:
            save_model(model, folder, model.dtype)
            peer = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
        for parameter in peer.parameters():
            parameter.data = parameter.data.clone()  # out of the file, into memory like ours
        self.model = peer.to(model.device).eval()
        self.model.generation_config.eos_token_id = None  # every sequence makes all its tokens
        self.model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def fill(self, prompt: list[int], batch: int, steps: int) -> None:
        """As `MiniLLM.fill`, in the peer's own cache."""
        self.prompt = torch.tensor([prompt] * batch, device=self.model.device)
        self.cache = self.model(self.prompt[:1, :-1], use_cache=True).past_key_values
        self.cache.batch_repeat_interleave(batch)

    @torch.inference_mode()
    def decode(self, steps: int) -> tuple[float, list[list[int]]]:
        """As `MiniLLM.decode`."""
        cache, clock = copy.deepcopy(self.cache), Clock()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the newest release would call it `cache`
            made = self.model.generate(
                self.prompt, attention_mask=torch.ones_like(self.prompt), past_key_values=cache, streamer=clock,
                do_sample=False, use_cache=True, max_new_tokens=steps + 1,
            )  # fmt: skip
        return clock.times[-1] - clock.times[1], made[:, self.prompt.shape[1] :].tolist()


class Clock:
    """A streamer for `generate`: notes when the prompt, then each step's tokens, reach the host."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, tokens) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class LlamaCpp:
    """llama.cpp reading the GGUF file as it is: 4-bit weights stay in 4 bits.

    Keys and values are kept in float16, its default, and every sequence has its own copy, as in ours. Neither
    package below compiles anything: the first holds llama.cpp, built for AVX2 and FMA, the second its declarations.

        pip install xllamacpp==2026.10.11549 llama-cpp-py-sync==0.11548
    """

    def __init__(self, file: Path, threads: int):
        import xllamacpp
        from llama_cpp_py_sync._cffi_bindings import get_ffi

        self.threads, self.context, self.ffi = threads, None, get_ffi()
        # The second package brings a library too, but it needs a newer glibc. The numbers after the last point are
        # llama.cpp's builds: the structures must have the same fields, so the pair is pinned one build apart.
        self.lib = lib = self.ffi.dlopen(xllamacpp.xllamacpp.__file__)
        self.silence = self.ffi.callback("ggml_log_callback", lambda *_: None)  # kept: it must outlive its use
        lib.llama_log_set(self.silence, self.ffi.NULL)
        self.model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {file}")
        self.vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.weight_bytes = lib.llama_model_size(self.model)

    def fill(self, prompt: list[int], batch: int, steps: int) -> None:
        """As ours: the prompt without its last token goes through the model once and is copied to each sequence."""
        lib, self.length, self.last = self.lib, len(prompt) - 1, prompt[-1]
        self.close()
        options = lib.llama_context_default_params()
        options.n_seq_max, options.kv_unified = batch, False
        options.n_ctx = batch * 256 * math.ceil((self.length + steps + 1) / 256)  # it rounds each one's part up to 256
        options.n_batch = options.n_ubatch = max(self.length, batch)
        options.n_threads = options.n_threads_batch = self.threads
        self.context = lib.llama_init_from_model(self.model, options)
        if not self.context:
            raise ValueError(f"llama.cpp refuses a context of {options.n_ctx} tokens")
        self.memory = lib.llama_get_memory(self.context)
        self.step(prompt[:-1], range(self.length), [0] * self.length, wanted=False)
        for sequence in range(1, batch):
            lib.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
        self.batch = batch

    def decode(self, steps: int) -> tuple[float, list[list[int]]]:
        """As ours: greedy, timed from the first step's tokens to the last step's."""
        tokens, sequences, made = [self.last] * self.batch, range(self.batch), []
        for sequence in sequences:
            self.lib.llama_memory_seq_rm(self.memory, sequence, self.length, -1)
        for step in range(steps + 1):
            if step == 1:
                began = time.perf_counter()
            self.step(tokens, [self.length + step] * self.batch, sequences)
            logits = self.ffi.buffer(self.lib.llama_get_logits(self.context), 4 * self.batch * self.vocab_size)
            tokens = np.frombuffer(logits, np.float32).reshape(self.batch, -1).argmax(1).tolist()
            made.append(tokens)
        return time.perf_counter() - began, list(map(list, zip(*made, strict=True)))

    def step(self, tokens, positions, sequences, wanted: bool = True) -> None:
        """One pass over a flat run of tokens; logits of all rows if `wanted`."""
        run = self.lib.llama_batch_init(len(tokens), 0, 1)
        run.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
            run.token[i], run.pos[i], run.logits[i] = token, position, wanted
            run.n_seq_id[i], run.seq_id[i][0] = 1, sequence
        failed = self.lib.llama_decode(self.context, run)
        self.lib.llama_batch_free(run)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")

    def close(self) -> None:
        """Free the memory of the last setting."""
        if self.context:
            self.lib.llama_free(self.context)
        self.context = None
