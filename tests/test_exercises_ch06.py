"""The exercises of chapter 6: right answers pass, wrong ones fail and are told why; the references are the engine's."""

import re

import pytest
import test_exercises as shared
from test_exercises import answered, prose

from minillm.config import EngineConfig
from minillm.lab.answers import ch06, ch06_drive
from minillm.lab.checks import CheckFailed, Draw, NotAnswered
from minillm.metrics import summarize
from minillm.paged_cache import BlockPool
from minillm.request import CompletionOutput, Request, RequestOutput, Timeline
from minillm.sampling import SamplingParams
from minillm.scheduler import Scheduler

CHAPTER = "06_continuous_batching"
BUILT = {"admit": ch06.admit, "schedule": ch06.schedule, "goodput": ch06.goodput}
PREEMPT = "                pool.free(victim.blocks)\n                victim.blocks = []\n"
ADMIT = "    while waiting and len(running) < batch_size:"
WRONG_BUILT = [
    ("admit", [("            break", "            continue")], "passed a large one"),
    ("admit", [("(prompt + 1)", "prompt")], "the token after it"),
    ("admit", [("-(-(prompt + 1) // block_size)", "(prompt + 1) // block_size")], "round up"),
    ("admit", [("left = free - sum(n % block_size == 0 for n in stored)", "left = free")], "were promised"),
    ("admit", [("sum(n % block_size == 0 for n in stored)", "len(stored)")], "whose blocks are full"),
    ("admit", [("n % block_size == 0", "n % block_size == 1")], "stored at place n"),
    ("admit", [("places - len(stored)", "places")], "sit in their places"),
    ("admit", [("admitted == places - len(stored) or ", "")], "more of them than places"),
    ("admit", [("need > left", "need >= left")], "very last free block"),
    ("admit", [("admitted + 1, left - need", "admitted + 1, left")], "fewer for the next"),
    ("schedule", [("    while waiting and len", "    while not running and waiting and len")], "could have joined"),
    ("schedule", [(ADMIT, "    while waiting and not busy and len(running) < batch_size:"),
                  ("    for job in list", "    busy = bool(running)\n    for job in list")], "could have joined"),
    ("schedule", [("< batch_size", "<= batch_size")], "jobs run in a batch of"),
    ("schedule", [(PREEMPT, "                victim.blocks = []\n")], "some leaked"),
    ("schedule", [(PREEMPT, "                pool.free(victim.blocks)\n")], "still holds"),
    ("schedule", [("waiting.insert(0, victim)", "waiting.append(victim)")], "is older than"),
    ("schedule", [("running.pop()", "running.pop(0)")], "is older than"),
    ("schedule", [("                waiting.insert(0, victim)\n", "")], "is lost"),
    ("schedule", [("        if need > pool.num_free:\n            break\n", "")], "raised OutOfBlocks"),
    ("schedule", [("waiting.pop(0)", "waiting.pop()")], "is older than|blocks; it needs|OutOfBlocks"),
    ("schedule", [("pool.blocks_for(job.tokens):\n", "pool.blocks_for(job.tokens - 1):\n")], "blocks; it needs"),
    ("schedule", [("return list(running)", "return running[:1]")], "all of them should get on"),
    ("schedule", [("return list(running)", "return len(running)")], "should be a list"),
    ("schedule", [("if pool.num_free:", "if pool.num_free > 1:")], "preempted, though there were"),
    ("goodput", [("<= ttft and pace", "<= ttft or pace")], "must meet both"),
    ("goodput", [(" and pace <= tpot", "")], "TPOT has a target"),
    ("goodput", [("times[0] - arrival <=", "times[0] <=")], "starts at the arrival"),
    ("goodput", [("gaps = len(times) - 1", "gaps = len(times)")], "n - 1 gaps"),
    ("goodput", [("(times[-1] - times[0]) / gaps", "(times[-1] - arrival) / len(times)")], "starts at the first token"),
    ("goodput", [("else 0.0", 'else float("inf")')], "a single token"),
    ("goodput", [(" if gaps else 0.0", "")], "raised ZeroDivisionError"),
    ("goodput", [("<= ttft", "< ttft"), ("<= tpot", "< tpot")], "on target to the bit"),
    ("goodput", [(" - first)", ")")], "did not start at 0"),
    ("goodput", [("min(arrival for arrival, _", "min(times[0] for _, times")], "at the first arrival"),
    ("goodput", [("max(times[-1] for _, times in requests)", "requests[-1][1][-1]")], "need not be the last to end"),
    ("goodput", [("(max(times[-1] for _, times in requests) - first)", "len(requests)")], "goodput is a rate"),
    ("goodput", [("good += times", "good += len(times) * (times"), ("<= tpot\n", "<= tpot)\n")], "not tokens"),
]  # fmt: skip

SLOTS = (50, 2, 13.375, 2.718)
AS_GOOD = (1, "it grows", "a newcomer waits for a batch to end", "lengths are equal and all arrive together")
WRONG_NUMBERS = [  # check, right answers, which one is wrong, the wrong value, what the message says
    (ch06.slots, SLOTS, 0, 0.5, "used: .*a share in % is asked for"),
    (ch06.slots, SLOTS, 0, 45, "used: 45 % is not right; it is too small"),
    (ch06.slots, SLOTS, 1, 0.5, "gain: .*its inverse"),
    (ch06.slots, SLOTS, 1, 4, "gain: .*over one slot"),
    (ch06.slots, SLOTS, 2, 12.5, "one_long: .*work for a few steps"),
    (ch06.slots, SLOTS, 2, 13.5, "one_long: .*seven are short"),
    (ch06.slots, SLOTS, 2, 1, "one_long: .*busy all the time"),
    (ch06.slots, SLOTS, 2, 0.13375, "one_long: .*a share in %"),
    (ch06.slots, SLOTS, 3, 16 / 9, "exponential: .*all equally likely"),
    (ch06.slots, SLOTS, 3, 2.593, "exponential: .*the last one included"),
    (ch06.slots, SLOTS, 3, 1.718, "exponential: .*starts with 1"),
    (ch06.slots, SLOTS, 3, 2.079, "exponential: .*logarithm"),
    (ch06.slots, SLOTS, 3, 2.829, "exponential: .*ends at 1/B"),
    (ch06.slots, SLOTS, 3, "e", "exponential: expected a number"),
    (ch06.as_good, AS_GOOD, 0, 2, "equal: .*first row"),
    (ch06.as_good, AS_GOOD, 0, 0, "equal: .*delivers nothing"),
    (ch06.as_good, AS_GOOD, 1, "it shrinks", "larger_batch: .*left to right"),
    (ch06.as_good, AS_GOOD, 1, "it stays", "larger_batch: .*other rows"),
    (ch06.as_good, AS_GOOD, 2, "its steps are longer", "arrivals: .*TPOT"),
    (ch06.as_good, AS_GOOD, 2, "its slots are empty at the end of a batch", "arrivals: .*end together"),
    (ch06.as_good, AS_GOOD, 3, "lengths are equal", "conclusion: .*over time"),
    (ch06.as_good, AS_GOOD, 3, "the batch is large", "conclusion: .*longer longest"),
    (ch06.as_good, AS_GOOD, 3, "answers are short", "conclusion: .*spread"),
]  # fmt: skip


def test_each_exercise_states_what_it_is_for_and_has_three_hints():
    shared.test_each_exercise_states_what_it_is_for_and_has_three_hints(CHAPTER)


def test_an_unanswered_exercise_fails_its_check_with_a_readable_message_and_nothing_else_fails():
    shared.test_an_unanswered_exercise_fails_its_check_with_a_readable_message_and_nothing_else_fails(CHAPTER)


@pytest.mark.parametrize("cell", BUILT)
def test_a_right_answer_passes_whatever_is_drawn(cell, capsys):
    for _ in range(10):
        BUILT[cell](answered(CHAPTER, cell))
        assert re.fullmatch(r"✓ \w+: right on \d+ random inputs\n", capsys.readouterr().out)


@pytest.mark.parametrize(("cell", "edits", "message"), WRONG_BUILT, ids=lambda value: str(value)[:40])
def test_a_wrong_answer_fails_and_is_told_why(cell, edits, message):
    """B3: weak checks let wrong code pass. E1 and E3 as a reader would make them."""
    wrong = answered(CHAPTER, cell, *edits)
    for _ in range(8):
        with pytest.raises(CheckFailed, match=f"(?s){message}") as failed:
            BUILT[cell](wrong)
        assert not isinstance(failed.value, NotAnswered)
        assert "\n  on the input " in str(failed.value)


@pytest.mark.parametrize(("check", "right", "place", "wrong", "message"), WRONG_NUMBERS, ids=lambda v: str(v)[:30])
def test_a_wrong_number_or_choice_fails_and_is_told_why(check, right, place, wrong, message, capsys):
    """B3 for what is worked out or concluded."""
    check(*right)
    assert all(line.startswith("✓ ") for line in capsys.readouterr().out.splitlines())
    answers = list(right)
    answers[place] = wrong
    with pytest.raises(CheckFailed, match=f"^{message}"):
        check(*answers)


@pytest.mark.parametrize("blank", [None, ..., lambda *_: None, lambda *_: ...])
def test_every_check_says_when_it_is_not_answered(blank):
    for check in BUILT.values():
        with pytest.raises(NotAnswered, match="^not answered yet: "):
            check(blank)
    for check in (ch06.slots, ch06.as_good):
        with pytest.raises(NotAnswered, match="^not answered yet: "):
            check(*[blank if not callable(blank) else None] * 4)


# Other ways to be right: a check must not insist on the way that the solution takes.


def careful(waiting, running, pool, batch_size):
    """As the engine does: one token of growth promised to everybody, and nobody joins in a step that preempts."""
    preempted = False
    for job in list(running):
        while job in running and len(job.blocks) < pool.blocks_for(job.tokens):
            if pool.num_free:
                job.blocks.append(pool.allocate())
                continue
            preempted, victim = True, running.pop()
            pool.free(victim.blocks)
            victim.blocks = []
            waiting.insert(0, victim)
    while waiting and len(running) < batch_size and not preempted:
        promised = sum(pool.blocks_for(job.tokens + 1) - len(job.blocks) for job in running)
        need = pool.blocks_for(waiting[0].tokens)
        alone = not running  # a job that fills the pool alone may come in although there is no block left for more
        if pool.blocks_for(waiting[0].tokens + (not alone)) + promised > pool.num_free:
            break
        job = waiting.pop(0)
        job.blocks = [pool.allocate() for _ in range(need)]
        running.append(job)
    return tuple(running)


def test_a_more_careful_scheduler_passes():
    for _ in range(30):
        ch06.schedule(careful)


# What the checks take for right, held to the engine.


def test_the_admission_rule_is_the_schedulers():
    """With whole prompts and nothing stored beyond them, as many join as the engine's scheduler lets in."""
    for waiting, _, free, places, size in ch06.admit_cases(Draw(3)):
        if not free or not places:
            continue
        scheduler = Scheduler(EngineConfig(block_size=size, max_batch_size=places, token_budget=10_000), 10_000, free)
        queued = []
        for number, prompt in enumerate(waiting):
            try:
                scheduler.add(Request(number, [1] * prompt, SamplingParams(max_tokens=9 * size)))
            except ValueError:
                break  # it could never run: in the exercise it would stop those behind it
            queued.append(prompt)
        joined = len(scheduler.schedule().requests)
        assert joined == ch06.right_admit(queued, [], free, places, size)


def test_goodput_is_that_of_the_metrics():
    for requests, ttft, tpot in ch06.goodput_cases(Draw(5)):
        outputs = []
        for number, (arrival, times) in enumerate(requests):
            line = Timeline(arrival, arrival, list(times), times[-1])
            done = CompletionOutput(0, "", [1] * len(times), "length", None, line)
            outputs.append(RequestOutput(number, [1], [done], True))
        expected = summarize(outputs, ttft=ttft, tpot=tpot).goodput
        assert ch06.right_goodput(requests, ttft, tpot) == pytest.approx(expected)


def test_the_check_preempts_in_some_of_its_cases():
    """A pool that never runs dry would test nothing."""
    preempted = 0

    def watched(waiting, running, pool, batch_size):
        nonlocal preempted
        before, granted = list(running), careful(waiting, running, pool, batch_size)
        preempted += any(job in waiting for job in before)
        return granted

    for case in ch06_drive.schedule_cases(Draw(2)):
        assert ch06_drive.drive(watched, *case) == ""
    assert preempted >= 10
    assert BlockPool(1, 1).num_free == 1


def test_a_known_mistake_never_breaks_the_check_that_looks_for_it():
    for cases, mistakes in [
        (ch06.admit_cases, ch06.ADMIT_MISTAKES),
        (ch06.goodput_cases, ch06.GOODPUT_MISTAKES),
    ]:
        for mistake in mistakes.values():
            for case in cases(Draw(11)):
                mistake(*case)


def test_the_conditions_in_the_text_are_those_that_the_check_uses():
    """B4: a constant typed twice drifts."""
    *most, last = ch06.LENGTHS
    assert f"answers of {', '.join(map(str, most))} and {last} tokens" in prose(CHAPTER)
    assert f"batches of {ch06.SLOTS}, in each one answer of {ch06.LONG:,} tokens and seven of {ch06.SHORT}" in prose(
        CHAPTER
    )
    assert f"batches of {ch06.SLOTS}, lengths exponential" in prose(CHAPTER) and ch06.SLOTS == 8
