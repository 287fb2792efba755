"""Sampling: from the scores of every token to the one that comes next, and when to stop.

A row of logits becomes a distribution in a fixed order, the one of `transformers`: temperature, top-k
(Fan et al., 2018), top-p (Holtzman et al., 2020). One uniform number from the request's own generator then
picks the token, so what a request gets does not depend on what else is in its batch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

HEAD = 1024  # tokens that top-p looks at first; a nucleus is nearly always smaller


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks for. Raises ValueError naming the setting that makes no sense.

    max_tokens: new tokens at most. temperature: 0 is greedy, and then top_k and top_p change nothing.
    top_k: keep the k most likely tokens, 0 keeps all. top_p: keep the most likely tokens until their mass
    reaches top_p. seed: the same tokens every time; None draws from entropy. stop: a string or several; the
    text ends before the first one found. stop_token_ids: tokens that end generation, beside the model's
    own, which `ignore_eos` switches off. n: independent samples of one prompt.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self):
        for name, least in (("max_tokens", 1), ("top_k", 0), ("n", 1)):
            value = getattr(self, name)
            if not is_int(value) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if not is_real(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature!r}")
        if not is_real(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if self.seed is not None and not is_int(self.seed):
            raise ValueError(f"seed must be an integer or None, got {self.seed!r}")
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if not isinstance(value, (str, list, tuple, set, frozenset)):
                raise ValueError(f"{name} must be a list, got {value!r}")
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {text!r}")
        ids = tuple(self.stop_token_ids)
        for token in ids:
            if not is_int(token) or token < 0:
                raise ValueError(f"stop_token_ids must hold token ids (integers from 0), got {token!r}")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)

    def make_generator(self, index: int = 0) -> torch.Generator:
        """The CPU generator of sample `index` (0 to n - 1): its own stream, and the same again for the same seed."""
        generator = torch.Generator("cpu")
        if self.seed is None:
            generator.seed()
        else:  # PyTorch's CPU generator keeps 32 bits of its seed: hash, so that all bits of both count
            digest = hashlib.sha256(f"{self.seed}/{index}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:4], "little"))
        return generator


def is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The distribution that each row is drawn from: logits [N, vocab_size] -> the same shape, rows adding up to 1.

    float64 stays float64, anything else becomes float32. At temperature 0 all mass is on the largest logit.
    Raises ValueError naming the row where a logit is NaN or the largest is not finite.
    """
    best = greedy(logits, params)
    rows = [row for row, p in enumerate(params) if p.temperature > 0]
    if len(rows) == len(params):
        return filtered(logits, params)
    probs = torch.zeros(logits.shape, dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    probs.scatter_(1, best[:, None], 1.0)
    if rows:
        probs[rows] = filtered(logits[rows], [params[row] for row in rows])
    return probs


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
) -> torch.Tensor:
    """The next token of each row: logits [N, vocab_size] -> int64 [N] on the CPU.

    `generators[i]` belongs to row i and gives one float64 number; a greedy row draws none and may have None.
    Raises ValueError as `probabilities` does.
    """
    if len(generators) != len(params):
        raise ValueError(f"{len(params)} rows need as many generators, got {len(generators)}")
    tokens = greedy(logits, params).cpu()
    rows = [row for row, p in enumerate(params) if p.temperature > 0]
    if rows:
        if len(rows) < len(params):
            logits = logits[rows]
        uniform = torch.cat([torch.rand(1, dtype=torch.float64, generator=generators[row]) for row in rows])
        tokens[rows] = draw(filtered(logits, [params[row] for row in rows]), uniform).cpu()
    return tokens


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution: probs [N, vocab_size] and uniform [N] in [0, 1) -> tokens [N].

    Never a token of probability zero, wherever the sum of a row is rounded.
    """
    cdf = probs.double().cumsum(-1)  # dtype= in cumsum would be seven times slower on a CPU
    target = uniform.to(cdf.device)[:, None] * cdf[:, -1:]
    tokens = torch.searchsorted(cdf, target, right=True).clamp_(max=probs.shape[1] - 1)
    for row in (probs.gather(1, tokens) == 0).nonzero()[:, 0].tolist():  # past the end, or a parallel sum out of order
        possible = probs[row].nonzero()[:, 0]
        tokens[row] = possible[(torch.searchsorted(possible, tokens[row]) - 1).clamp(min=0)]
    return tokens[:, 0]


def greedy(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The most likely token of each row [N], after the checks that hold for every row."""
    if logits.dim() != 2 or logits.shape[0] != len(params):
        raise ValueError(
            f"logits must be [{len(params)}, vocab_size], a row for each request, got {list(logits.shape)}"
        )
    if logits.is_cpu and logits.dtype in (torch.float32, torch.float64):
        # NumPy compares many values at a time, PyTorch one by one: several times slower for a large vocabulary.
        best = torch.from_numpy(logits.detach().numpy().argmax(-1))
        top = logits.gather(1, best[:, None])[:, 0]
    else:
        top, best = logits.max(-1)
    for row, value in enumerate(top.tolist()):  # NaN wins every maximum, so the largest shows any bad row
        if not math.isfinite(value):
            raise ValueError(
                f"row {row} of the logits has {value} as its largest value; "
                "there must be a finite one, and neither NaN nor infinity"
            )
    return best


def filtered(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Temperature, top-k, top-p, softmax, for rows [N, vocab_size] whose temperature is above 0."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if any(p.temperature != 1 for p in params):
        scores = scale(scores, [p.temperature for p in params])
    vocab_size = scores.shape[1]
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size]
    if rows:
        scores = replace_rows(scores, rows, keep_top_k(scores[rows], [params[row].top_k for row in rows]))
    rows = [row for row, p in enumerate(params) if p.top_p < 1]
    if rows:
        scores = replace_rows(scores, rows, keep_top_p(scores[rows], [params[row].top_p for row in rows]))
    return scores.softmax(-1)


def replace_rows(scores: torch.Tensor, rows: list[int], new: torch.Tensor) -> torch.Tensor:
    """`scores` with some rows exchanged; the caller's tensor stays as it was."""
    return new if len(rows) == len(scores) else scores.index_copy(0, torch.tensor(rows, device=scores.device), new)


def scale(scores: torch.Tensor, temperatures: list[float]) -> torch.Tensor:
    """scores / temperature. A row that would overflow is first shifted to a maximum of 0, which softmax cannot see."""
    smallest = torch.finfo(scores.dtype).tiny
    divisor = torch.tensor(temperatures, dtype=torch.float64).clamp(min=smallest).to(scores)[:, None]
    top = scores.amax(-1, keepdim=True)
    overflows = (top / divisor).abs() > torch.finfo(scores.dtype).max / 4
    return (scores - torch.where(overflows, top, 0)) / divisor


def keep_top_k(scores: torch.Tensor, top_k: list[int]) -> torch.Tensor:
    """-inf for every score below its row's k-th largest; scores tied with that one all stay."""
    k = torch.tensor(top_k, device=scores.device)[:, None]
    threshold = scores.topk(max(top_k)).values.gather(1, k - 1)
    return scores.masked_fill(scores < threshold, -math.inf)


def keep_top_p(scores: torch.Tensor, top_p: list[float]) -> torch.Tensor:
    """-inf for every score outside its row's nucleus.

    A token stays if the mass before it, counted from the most likely, is below top_p: so the one that crosses
    the line stays, and so does the first. Of equal scores, those of higher ids stay first.
    Sorting the whole vocabulary costs more than the rest of sampling together. So we look at the HEAD
    largest, and sort everything only in rows whose nucleus may reach beyond them. Which way a row goes is its
    own affair, so its result is the same to the last bit in any batch.
    """
    drop = torch.tensor([1 - p for p in top_p], dtype=torch.float64).to(scores)[:, None]  # mass to leave out
    if scores.shape[1] <= HEAD:
        return sort_and_cut(scores, drop)
    ids = scores.topk(HEAD).indices.sort(dim=-1).values  # topk leaves the order of ties open: by id, then by score
    values, order = scores.gather(1, ids).sort(dim=-1, stable=True)
    ids = ids.gather(1, order)
    mass = scores.softmax(-1).gather(1, ids)
    leave = (1 - mass.sum(-1, keepdim=True)) + mass.cumsum(-1) <= drop
    leave[:, -1] = False
    kept = torch.full_like(scores, -math.inf).scatter_(1, ids, values.masked_fill(leave, -math.inf))
    last = values[:, :1]  # a nucleus that ends above the last score seen holds none of the unseen ones
    wide = ~((leave & (values > last)).any(-1) | last[:, 0].isinf())
    if bool(wide.any()):
        kept[wide] = sort_and_cut(scores[wide], drop[wide])
    return kept


def sort_and_cut(scores: torch.Tensor, drop: torch.Tensor) -> torch.Tensor:
    """-inf for the smallest scores of each row [N, vocab_size] whose mass together is at most `drop` [N, 1]."""
    values, ids = scores.sort(dim=-1, stable=True)
    leave = values.softmax(-1).cumsum(-1) <= drop
    leave[:, -1] = False
    return scores.masked_fill(torch.zeros_like(leave).scatter_(1, ids, leave), -math.inf)


class StopCondition:
    """Watches one sample's tokens and says when it is done.

    `text` is what the tokens spell so far, cut before a stop string; it stays empty without a tokenizer.
    Each token is decoded once. Raises ValueError where `params.stop` comes without a tokenizer to find it with.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: Iterable[int] = (), tokenizer=None):
        if params.stop and tokenizer is None:
            raise ValueError(f"stop strings {list(params.stop)} need a tokenizer; without one, use stop_token_ids")
        self.params = params
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_token_ids)
        self.detokenizer = None if tokenizer is None else tokenizer.detokenizer()
        self.num_tokens = 0
        self.text = ""
        self.reason: str | None = None

    def add(self, token: int) -> str | None:
        """Counts one new token; "stop" or "length" if it is the last, else None. It counts as generated even so."""
        if self.reason:
            raise ValueError(f"token {token} comes after the end: generation finished with {self.reason!r}")
        self.num_tokens += 1
        if self.detokenizer and self._append(self.detokenizer.add(token)):
            self.reason = "stop"
            return self.reason
        if token in self.stop_ids:
            self.reason = "stop"
        elif self.num_tokens == self.params.max_tokens:
            self.reason = "length"
        if self.reason and self.detokenizer and self._append(self.detokenizer.finish()):
            self.reason = "stop"
        return self.reason

    @property
    def settled(self) -> int:
        """Characters of `text` that a stream may send: what is left could be the start of a stop string."""
        if self.reason:
            return len(self.text)
        longest = max((len(stop) for stop in self.params.stop), default=1) - 1
        for start in range(max(0, len(self.text) - longest), len(self.text)):
            if any(stop.startswith(self.text[start:]) for stop in self.params.stop):
                return start
        return len(self.text)

    def _append(self, piece: str) -> bool:
        """Adds text; True if a stop string is now in it, and then the text ends before the first one."""
        before = len(self.text)
        self.text += piece
        found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self.params.stop]
        found = [start for start in found if start >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)
