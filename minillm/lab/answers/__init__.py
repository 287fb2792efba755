"""Checks of the exercises, one module a chapter: `from minillm.lab.answers import ch01 as check`.

They rest on `minillm.lab.checks`, and add the usual mistakes of each exercise: a wrong answer that equals
what a known slip gives is told so by name.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping

from minillm.lab import checks


def same(expected: object, given: object, *_: object) -> str | None:
    """What sets two results apart, or None; the arguments of the call do not matter here."""
    return checks.difference(expected, given)


def build(
    name: str,
    answer: Callable,
    right: Callable,
    cases: Callable[[checks.Draw], Iterable],
    mistakes: Mapping[str, Callable],
    compare: Callable[..., str | None] = same,
) -> None:
    """Hold a function to `right` on fresh random cases; print one line, or raise `checks.CheckFailed`.

    `mistakes` maps a remark to the function that somebody who needs it would have written: where the answer
    is wrong and agrees with one of them, the remark is shown, the first that fits. `compare(expected, given,
    *case)` returns what is wrong, or None.
    """

    @functools.wraps(right)
    def reference(*case):
        return right(*copy.deepcopy(case)), case

    def explained(expected, given):
        value, case = expected
        wrong = compare(value, given, *case)
        if wrong is None:
            return None
        for remark, mistake in mistakes.items():
            if compare(mistake(*copy.deepcopy(case)), given, *case) is None:
                return f"{wrong}\n  {remark}"
        return wrong

    checks.check(reference, answer, cases, compare=explained, name=name)


def work_out(
    name: str, answer: float, expected: float, mistakes: Mapping[float, str], *, unit: str = "", tolerance: float = 0.01
) -> None:
    """Check a number worked out with a pencil, within a relative `tolerance`.

    `mistakes` maps wrong numbers to what leads to them. Prints one line, or raises `checks.CheckFailed`.
    """
    answer = checks.plain(answer)
    if isinstance(answer, int | float) and not math.isclose(answer, expected, rel_tol=tolerance):
        for wrong, remark in mistakes.items():
            if math.isclose(answer, wrong, rel_tol=tolerance):
                raise checks.CheckFailed(f"{name}: {f'{answer:,.6g} {unit}'.strip()} is not right; {remark}")
    checks.number(answer, expected, unit=unit, tolerance=tolerance, name=name)
