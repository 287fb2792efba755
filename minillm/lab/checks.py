"""Checks for the exercises: they say what is wrong, and on which input.

A check draws fresh random inputs of odd shapes, runs the reader's function on copies of them, and
compares with a reference that the engine trusts. It passes with one line, or raises `CheckFailed`.
"""

from __future__ import annotations

import copy
import inspect
import math
import numbers
import random
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal

import numpy as np
import torch

# Slips of unit: the factor between the two numbers, and the question to ask oneself.
PREFIX_SLIPS = (
    (1e3, "a factor of 1,000: check the prefix of the unit"),
    (1e6, "a factor of a million: check the prefix of the unit"),
    (1e9, "a factor of a billion: check the prefix of the unit"),
)
BYTE_SLIPS = (  # these mean something only where bytes are counted
    (1024, "a factor of 1,024: KiB, MiB and GiB step by 1,024"),
    (1.024, "a factor of 1.024: KB are 1,000 bytes, KiB 1,024"),
    (1.024**2, "a factor of 1.049: MB are 10⁶ bytes, MiB 2²⁰"),
    (1.024**3, "a factor of 1.074: GB are 10⁹ bytes, GiB 2³⁰"),
    (8, "a factor of 8: bits or bytes?"),
    (2, "a factor of 2: keys and values are two; or how many bytes does one value take?"),
    (4, "a factor of 4: how many bytes does one value take?"),
)
BYTES = re.compile(r"(bytes?|[kKMGT]?i?B)\b.*")  # "bytes", "KiB", "GB/s"


class CheckFailed(AssertionError):
    """An answer that is not right; the message says what is wrong and on which input."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message alone, since the check's own lines would not help the reader."""
        return str(self).splitlines()


class NotAnswered(CheckFailed):
    """The exercise still holds its placeholder."""


class Draw(random.Random):
    """A source of random inputs: what `random.Random` has, and tensors."""

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Standard normal values; whole numbers from -9 to 9 for an integer dtype."""
        generator = torch.Generator().manual_seed(self.getrandbits(63))
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return torch.randint(-9, 10, shape, generator=generator).to(dtype)

    def tokens(self, length: int, vocab_size: int) -> list[int]:
        """`length` token ids below `vocab_size`."""
        return [self.randrange(vocab_size) for _ in range(length)]


def check(
    reference: Callable,
    answer: Callable,
    cases: Callable[[Draw], Iterable] | Iterable,
    *,
    compare: Callable[[object, object], str | None] | None = None,
    tolerance: float = 1e-4,
    name: str | None = None,
    seed: int | None = None,
) -> None:
    """Hold `answer` to `reference` on every case; print one line, or raise `CheckFailed`.

    `cases` yields the arguments of one call each, a tuple or a mapping of names; as a function it gets a
    `Draw` with a fresh seed, so no two checks see the same numbers. `compare(expected, given)` returns what
    is wrong, or None; by default values must agree within `tolerance` (relative), and types, shapes and
    dtypes exactly. Give the smallest cases first: the first that fails is reported.
    """
    name = name or getattr(answer, "__name__", "answer")
    if answer is None or answer is ...:
        raise NotAnswered(f"not answered yet: {name}")
    if not callable(answer):
        raise CheckFailed(f"{name}: expected a function, got {describe(answer)}")
    if callable(cases):
        cases = cases(Draw(random.SystemRandom().getrandbits(63) if seed is None else seed))
    drawn = list(cases)
    if not drawn:
        raise ValueError("a check needs at least one case")
    for case in drawn:
        wrong = wrong_on(case, reference, answer, compare, tolerance, name)
        if wrong:
            raise CheckFailed(f"{name}: {wrong}\n  on the input {describe_call(reference, case)}")
    print(f"✓ {name}: right on {len(drawn)} random input{'s' if len(drawn) > 1 else ''}")


def wrong_on(case, reference, answer, compare, tolerance: float, name: str) -> str | None:
    """What is wrong with the answer on one case, or None. Each side gets its own copy of the arguments."""
    expected = call(reference, copy.deepcopy(case))
    try:
        given = call(answer, copy.deepcopy(case))
    except NotImplementedError:
        raise NotAnswered(f"not answered yet: {name}") from None
    except Exception as error:  # whatever the reader's code raises is the finding
        return f"raised {type(error).__name__}: {error}{line_of(answer, error)}"
    if (given is None and expected is not None) or given is ...:
        raise NotAnswered(f"not answered yet: {name} (it returned {given!r})")
    return compare(expected, given) if compare else difference(expected, given, tolerance)


def call(function: Callable, case):
    """Call with a mapping as keywords, anything else as positions."""
    return function(**case) if isinstance(case, Mapping) else function(*case)


def line_of(answer: Callable, error: Exception) -> str:
    """Where in the reader's own code the error arose: the deepest frame that lies in it."""
    code = getattr(inspect.unwrap(answer), "__code__", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if code and f.filename == code.co_filename]
    return f"\n  at line {frames[-1].lineno}: {frames[-1].line}" if frames and frames[-1].line else ""


def difference(expected, given, tolerance: float = 1e-4, where: str = "the result") -> str | None:
    """What sets `given` apart from `expected`, in words; None if they agree within a relative tolerance."""
    if isinstance(expected, torch.Tensor):
        return tensor_difference(expected, given, tolerance, where)
    if isinstance(expected, bool) or expected is None or isinstance(expected, str):
        same = type(given) is type(expected) and given == expected
        return None if same else f"{where} should be {expected!r}, got {describe(given)}"
    if isinstance(expected, numbers.Real):
        return number_difference(expected, given, tolerance, where)
    if isinstance(expected, Mapping):
        if not isinstance(given, Mapping):
            return f"{where} should be a dict, got {describe(given)}"
        if set(expected) != set(given):
            return f"{where} should have the keys {sorted(map(str, expected))}, got {sorted(map(str, given))}"
        pairs = [(expected[key], given[key], f"{where}[{key!r}]") for key in expected]
    elif isinstance(expected, Sequence):
        if not isinstance(given, Sequence) or isinstance(given, str):
            return f"{where} should be a {type(expected).__name__}, got {describe(given)}"
        if len(expected) != len(given):
            return f"{where} should have {len(expected)} items, got {len(given)}: {describe(given)}"
        pairs = [(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(expected, given, strict=True))]
    else:
        return None if expected == given else f"{where} should be {describe(expected)}, got {describe(given)}"
    return next((found for pair in pairs if (found := difference(*pair[:2], tolerance, pair[2]))), None)


def number_difference(expected, given, tolerance: float, where: str) -> str | None:
    """Difference of two real numbers, in whatever form the second one comes."""
    given = plain(given)
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        return f"{where} should be a number, got {describe(given)}"
    if math.isnan(given) and not math.isnan(expected):
        return f"{where} is NaN, expected {expected:.6g}"
    close = given == expected if isinstance(expected, int) else math.isclose(given, expected, rel_tol=tolerance)
    both_nan = math.isnan(given) and math.isnan(expected)
    near_zero = not isinstance(expected, int) and expected == 0 and abs(given) <= tolerance
    return None if close or both_nan or near_zero else f"{where} should be {expected:.6g}, got {given:.6g}"


def plain(value):
    """A real number as an int or a float, if `value` is one: a fraction, a decimal, a tensor of one value, too."""
    if isinstance(value, torch.Tensor | np.ndarray) and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, bool | int):
        return value
    return float(value) if isinstance(value, numbers.Real | Decimal) else value


def tensor_difference(expected: torch.Tensor, given, tolerance: float, where: str) -> str | None:
    """Difference of two tensors: type, shape, dtype, NaN, and the element that is furthest off."""
    if not isinstance(given, torch.Tensor):
        return f"{where} should be a tensor, got {describe(given)}"
    if given.shape != expected.shape:
        return f"{where} should have shape {list(expected.shape)}, got {list(given.shape)}"
    if given.dtype != expected.dtype:
        return f"{where} should have dtype {short(expected.dtype)}, got {short(given.dtype)}"
    if not given.numel():
        return None
    a, b = expected.detach().to("cpu", torch.float64), given.detach().to("cpu", torch.float64)
    strange = b.isnan() & ~a.isnan()
    if strange.any():
        return f"{where} has NaN in {int(strange.sum())} of {b.numel()} places, the first at {place(strange, 0)}"
    agree = torch.isclose(b, a, rtol=tolerance, atol=tolerance * float(finite_scale(a)), equal_nan=True)
    if agree.all():
        return None
    error = torch.where(agree, 0.0, (b - a).abs().nan_to_num(nan=math.inf))
    at = int(error.flatten().argmax())
    spot = place(~agree, at, exact=True)
    values = f"{a.flatten()[at]:.6g}, got {b.flatten()[at]:.6g}"
    return f"{where} is off in {int((~agree).sum())} of {b.numel()} places, most at {spot}: should be {values}"


def finite_scale(values: torch.Tensor) -> torch.Tensor:
    """Root mean square of the finite values: the size that an absolute error is judged by."""
    finite = values[values.isfinite()]
    return finite.square().mean().sqrt() if finite.numel() else torch.tensor(0.0)


def place(mask: torch.Tensor, flat: int, exact: bool = False) -> list[int]:
    """Index of the flat position `flat`, or of the first place that is set in `mask`."""
    flat = flat if exact else int(mask.flatten().nonzero()[0])
    return [int(i) for i in torch.unravel_index(torch.tensor(flat), mask.shape)]


def number(answer, expected: float, *, unit: str = "", tolerance: float = 0.01, name: str = "your number") -> None:
    """Check a number that was worked out; relative `tolerance`. A slip of unit is named in the message."""
    if answer is None or answer is ...:
        raise NotAnswered(f"not answered yet: {name}")
    answer = plain(answer)
    if isinstance(answer, bool) or not isinstance(answer, numbers.Real):
        raise CheckFailed(f"{name}: expected a number{in_unit(unit)}, got {describe(answer)}")
    if not math.isfinite(answer):
        raise CheckFailed(f"{name}: {answer} is not a finite number")
    given = f"{answer:,.6g} {unit}".strip()
    if not math.isclose(answer, expected, rel_tol=tolerance, abs_tol=tolerance if expected == 0 else 0):
        raise CheckFailed(f"{name}: {given} is not right{hint(answer, expected, tolerance, unit)}")
    print(f"✓ {name}: {given}")


def in_unit(unit: str) -> str:
    """The unit after "a number": " in bytes", " in tokens/s", " of requests", " times the work"."""
    if not unit or unit.startswith("times "):
        return unit and f" {unit}"
    return f" {'in' if BYTES.fullmatch(unit) or '/' in unit else 'of'} {unit}"


def hint(answer: float, expected: float, tolerance: float, unit: str = "") -> str:
    """What a wrong number's ratio to the right one suggests, without giving the answer away."""
    if answer == 0 or expected == 0:
        return ""
    ratio = expected / answer
    if ratio < 0:
        return "; its sign is wrong"
    side, ratio = ("small", ratio) if ratio > 1 else ("large", 1 / ratio)
    # At most 0.8%, so that 1,000 and 1,024 are told apart.
    slips = PREFIX_SLIPS + (BYTE_SLIPS if BYTES.fullmatch(unit) else ())
    slip = next((words for factor, words in slips if math.isclose(ratio, factor, rel_tol=min(tolerance, 0.008))), None)
    if slip:
        return f"; it is too {side} by {slip}"
    return f"; it is too {side}{' by more than a factor of 10' if ratio > 10 else ''}"


def choice(answer, correct, options: Mapping[object, str] | Sequence, *, name: str = "your choice") -> None:
    """Check the conclusion of an experiment, one of `options` (a mapping also tells why a wrong one is wrong)."""
    if answer is None or answer is ...:
        raise NotAnswered(f"not answered yet: {name}; choose one of {', '.join(map(repr, options))}")
    if answer not in list(options):
        raise CheckFailed(f"{name}: {answer!r} is not one of {', '.join(map(repr, options))}")
    if answer != correct:
        why = f": {options[answer]}" if isinstance(options, Mapping) else "; look at the experiment once more"
        raise CheckFailed(f"{name}: {answer!r} is not right{why}")
    print(f"✓ {name}: {answer!r}")


def short(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def describe(value, most: int = 80) -> str:
    """A value in a few words: small ones in full, tensors by shape, anything longer than `most` characters cut."""
    if isinstance(value, torch.Tensor):
        shape = f"a {short(value.dtype)} tensor of shape {list(value.shape)}"
        if value.numel() > 8:
            return shape
        return f"{shape} {[round(v, 4) for v in value.flatten().tolist()]}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    if isinstance(value, torch.nn.Module):
        return f"a {type(value).__name__}"
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return f"[{', '.join(map(describe, value[:4]))}{', ...' if len(value) > 4 else ''}]"
    text = repr(value)
    text = text if len(text) <= most else f"{text[: most - 20]}... ({len(text)} characters)"
    return f"{text} ({type(value).__name__})" if isinstance(value, (str, list, tuple, dict)) else text


def describe_call(reference: Callable, case) -> str:
    """The arguments of a case, each with the name that the reference gives it, long enough to be tried again."""
    if not isinstance(case, Mapping):
        try:
            case = inspect.signature(reference).bind(*case).arguments
        except (TypeError, ValueError):
            case = {f"argument {i}": value for i, value in enumerate(case)}
    return ", ".join(f"{name} = {describe(value, most=600)}" for name, value in case.items())
