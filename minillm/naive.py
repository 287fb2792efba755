"""Naive generation: to pick each next token, run the whole sequence through the model again.

Correct, short, and the reference that every later path is held to. Making n tokens costs work that
grows with n²; chapter 1 measures it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from minillm.config import ModelConfig
from minillm.model import Transformer
from minillm.sampling import SamplingParams, StopCondition, sample


class NoCache:
    """Attention that remembers nothing: every sequence comes whole, starting at position 0.

    `lengths` are the tokens of each sequence in the flat run, in order; None means one sequence.
    """

    def __init__(self, lengths: Sequence[int] | None = None):
        self.lengths = None if lengths is None else list(lengths)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention inside each sequence; q [T, n_heads, D], k and v [T, n_kv_heads, D] -> like q."""
        lengths = [q.shape[0]] if self.lengths is None else self.lengths
        if any(not isinstance(n, int) or n < 0 for n in lengths):
            raise ValueError(f"lengths must be integers of 0 or more, got {lengths}")
        if sum(lengths) != q.shape[0]:
            raise ValueError(f"lengths {lengths} add up to {sum(lengths)}, but the run has {q.shape[0]} tokens")
        if not lengths:
            return torch.empty_like(q)
        if len(set(lengths)) == 1:  # a rectangle: one batched product
            q, k, v = (x.unflatten(0, (len(lengths), lengths[0])).transpose(1, 2) for x in (q, k, v))
            return causal_attention(q, k, v).transpose(1, 2).flatten(0, 1)
        runs = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([causal_attention(*(x.transpose(0, 1)[None] for x in run))[0].transpose(0, 1) for run in runs])


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [B, n_heads, T, D], k and v [B, n_kv_heads, T, D] -> [B, n_heads, T, D]; token t sees tokens 0 to t."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def check_prompt(prompt_ids: Sequence[int], params: SamplingParams, config: ModelConfig, several=False) -> None:
    """Refuse, before any work, what the model cannot serve. Raises ValueError naming the value and the limit.

    `several`: the caller can make more than one sample (`params.n`).
    """
    if not isinstance(prompt_ids, (list, tuple)):
        raise ValueError(f"prompt_ids must be a list of token ids, got {type(prompt_ids).__name__}")
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
    if params.n != 1 and not several:
        raise ValueError(f"n={params.n}: these functions make one sample; call them once for each, with its own seed")
    if not prompt_ids:
        raise ValueError("the prompt is empty: give at least one token id, for example the tokenizer's end-of-text id")
    plain = set(map(type, prompt_ids)) == {int} and min(prompt_ids) >= 0 and max(prompt_ids) < config.vocab_size
    for position, token in enumerate(() if plain else prompt_ids):  # a long prompt is not searched without need
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"prompt_ids[{position}] is {token!r}: token ids are integers")
        if not 0 <= token < config.vocab_size:
            raise ValueError(
                f"prompt_ids[{position}] is {token}, outside the vocabulary of 0 to {config.vocab_size - 1}"
            )
    # The last new token is never fed back, so one position less would do. We count it, as serving systems do.
    if len(prompt_ids) + params.max_tokens > config.max_context:
        room = config.max_context - len(prompt_ids)
        raise ValueError(
            f"{len(prompt_ids)} prompt tokens + max_tokens={params.max_tokens} exceed the model's context of "
            f"{config.max_context}: shorten the prompt" + (f" or ask for at most {room} tokens" if room > 0 else "")
        )


@torch.inference_mode()
def stream(model: Transformer, prompt_ids: Sequence[int], params: SamplingParams, tokenizer=None) -> Iterator[int]:
    """Yield new tokens as they are made, the one that ends generation included.

    Stop strings need a `tokenizer`. Raises ValueError for a prompt or parameters that cannot be served,
    and for logits that are not numbers.
    """
    check_prompt(prompt_ids, params, model.config)
    stop = StopCondition(params, model.config.eos_token_ids, tokenizer)
    generator = params.make_generator()
    ids, reason = list(prompt_ids), None
    while reason is None:
        tokens = torch.tensor(ids, device=model.device)
        positions = torch.arange(len(ids), device=model.device)
        hidden = model(tokens, positions, NoCache())  # every token so far, again
        token = sample(model.logits(hidden[-1:]), [params], [generator]).item()
        ids.append(token)
        reason = stop.add(token)
        yield token


def generate(model: Transformer, prompt_ids: Sequence[int], params: SamplingParams, tokenizer=None) -> list[int]:
    """New tokens only, by full recomputation at every step; see `stream`."""
    return list(stream(model, prompt_ids, params, tokenizer))
