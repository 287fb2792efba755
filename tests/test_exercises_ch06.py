"""The exercises of chapter 6: answers right and wrong for `test_exercises.py`; the references are the engine's."""

import pytest
from solutions import cells, code, prose

from minillm.config import EngineConfig
from minillm.lab.answers import ch06, ch06_drive, ch06_goodput
from minillm.lab.checks import Draw
from minillm.metrics import summarize
from minillm.paged_cache import BlockPool
from minillm.request import CompletionOutput, Request, RequestOutput, Timeline
from minillm.sampling import SamplingParams
from minillm.scheduler import Scheduler

CHAPTER = "06_continuous_batching"
BUILT = {"admit": ch06.admit, "schedule": ch06.schedule, "goodput": ch06.goodput}
PREEMPT = "                pool.free(victim.blocks)\n                victim.blocks = []\n"
ADMIT = "    while waiting and len(running) < batch_size:"
RUN = """    for job in list(running):
        while job in running and len(job.blocks) < pool.blocks_for(job.tokens):
            if pool.num_free:
                job.blocks.append(pool.allocate())
            else:
                victim = running.pop()  # the newest, at last the job itself
                pool.free(victim.blocks)
                victim.blocks = []
                waiting.insert(0, victim)
"""
JOIN = """    while waiting and len(running) < batch_size:
        need = pool.blocks_for(waiting[0].tokens)
        if need > pool.num_free:
            break
        job = waiting.pop(0)
        job.blocks = [pool.allocate() for _ in range(need)]
        running.append(job)
"""
EVERYBODY = """    if sum(pool.blocks_for(job.tokens) - len(job.blocks) for job in running) > pool.num_free:
        while running:
            waiting.insert(0, running.pop())
            pool.free(waiting[0].blocks)
            waiting[0].blocks = []
    for job in running:
        while len(job.blocks) < pool.blocks_for(job.tokens):
            job.blocks.append(pool.allocate())
"""
KEPT = [
    ("    good = 0\n", "    good, kept = 0, []\n"),
    ("good += times", "met = times"),
    ("    first = min(", "        good, kept = good + met, kept + [(arrival, times)] * met\n    first = min("),
]
MEDIAN = "__import__('statistics').median"
# Cases E1 and E3, as a reader would make them.
WRONG_BUILT = [
    ("admit", [("            break", "            continue")], "passed a large one"),
    ("admit", [("(prompt + 1)", "prompt")], "the token after it"),
    ("admit", [("-(-(prompt + 1) // block_size)", "(prompt + 1) // block_size")], "round up"),
    ("admit", [("left = free - sum(n % block_size == 0 for n in stored)", "left = free")], "were promised"),
    ("admit", [("sum(n % block_size == 0 for n in stored)", "len(stored)")], "whose blocks are full"),
    ("admit", [("free - sum(n", "free - any(n")], "every full one is promised"),
    ("admit", [("-(-(prompt + 1) // block_size)", "-(-prompt // block_size) + 1")], "not one block more"),
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
    ("schedule", [("if pool.num_free:", "if pool.num_free > 1:")], "joined again in the same step|preempted, though"),
    ("schedule", [(RUN + JOIN, JOIN + RUN)], "preempted, though there were"),
    ("schedule", [(RUN, EVERYBODY)], "joined again in the same step"),
    ("schedule", [(RUN, EVERYBODY.replace("while running", "while running[1:]"))],
     "joined again in the same step"),
    ("schedule", [("blocks.append(", "blocks.insert(0, ")], "should keep its blocks .*, in order"),
    ("schedule", [("return list(running)", "return [job.number for job in running]")], "the jobs themselves, got 0"),
    ("schedule", [("victim.blocks = []", "victim.blocks = None")], "should be a list, got None"),
    ("schedule", [("blocks_for(waiting[0].tokens)", "blocks_for(waiting[0].tokens + 1)")], "could have joined"),
    ("schedule", [("need > pool.num_free", "need >= pool.num_free")], "could have joined"),
    ("goodput", [("<= ttft and pace", "<= ttft or pace")], "must meet both"),
    ("goodput", [("good += times", "good += not gaps or times")], "TTFT still counts"),
    ("goodput", [*KEPT, ("    first =", "    requests = kept or requests\n    first =")], "over all requests"),
    ("goodput", [*KEPT, ("arrival for arrival, _ in requests", "arrival for arrival, _ in kept or requests")],
     "also where that request missed"),
    ("goodput", [(" and pace <= tpot", "")], "TPOT has a target"),
    ("goodput", [("times[0] - arrival <=", "times[0] <=")], "starts at the arrival"),
    ("goodput", [("gaps = len(times) - 1", "gaps = len(times)")], "n - 1 gaps"),
    ("goodput", [("(times[-1] - times[0]) / gaps", "(times[-1] - arrival) / len(times)")], "starts at the first token"),
    ("goodput", [("else 0.0", 'else float("inf")')], "a single token"),
    ("goodput", [(" if gaps else 0.0", "")], "raised ZeroDivisionError"),
    ("goodput", [("<= ttft", "< ttft"), ("<= tpot", "< tpot")], "on target to the bit"),
    ("goodput", [(" - first)", ")")], "did not start at 0"),
    ("goodput", [("min(arrival for arrival, _", "min(times[0] for _, times")], "at the first arrival"),
    ("goodput", [("min(arrival for arrival, _ in requests)", "requests[0][0]")], "need not be the first to arrive"),
    ("goodput", [("(times[-1] - times[0]) / gaps", f"{MEDIAN}(b - a for a, b in zip(times, times[1:]))")],
     "mean gap, not the median"),
    ("goodput", [("(times[-1] - times[0]) / gaps", f"{MEDIAN}_high(b - a for a, b in zip(times, times[1:]))")],
     "mean gap, not the median"),
    ("goodput", [("(times[-1] - times[0]) / gaps", "max(b - a for a, b in zip(times, times[1:]))")],
     "mean gap, not the largest"),
    ("goodput", [("max(times[-1] for _, times in requests)", "requests[-1][1][-1]")], "need not be the last to end"),
    ("goodput", [("(max(times[-1] for _, times in requests) - first)", "len(requests)")], "goodput is a rate"),
    ("goodput", [("good += times", "good += len(times) * (times"), ("<= tpot\n", "<= tpot)\n")], "not tokens"),
]  # fmt: skip

RIGHT = {
    ch06.slots: (50, 2, 13.375, 52, 52),
    ch06.as_good: (
        1.11,
        "a newcomer waits for a batch to end",
        "nobody knows the lengths beforehand",
        "lengths are alike within a batch and all are there at once",
    ),
}
WRONG_NUMBERS = [  # check, which argument is wrong, the wrong value, what the message says
    (ch06.slots, 0, 0.5, "used: .*a share in % is asked for"),
    (ch06.slots, 0, 45, "used: 45 % is not right; it is too small"),
    (ch06.slots, 1, 0.5, "gain: .*its inverse"),
    (ch06.slots, 1, 4, "gain: .*over one slot"),
    (ch06.slots, 2, 12.5, "one_long: .*work for a few steps"),
    (ch06.slots, 2, 13.5, "one_long: .*seven are short"),
    (ch06.slots, 2, 1, "one_long: .*busy all the time"),
    (ch06.slots, 2, 0.13375, "one_long: .*a share in %"),
    (ch06.slots, 3, 80, "sorted_static: .*sort all eight"),
    (ch06.slots, 3, 40, "sorted_static: .*the first one ran before it"),
    (ch06.slots, 3, 104, "sorted_static: .*its own longest"),
    (ch06.slots, 3, "e", "sorted_static: expected a number"),
    (ch06.slots, 4, 80, "continuous: .*joins when the first is done"),
    (ch06.slots, 4, 40, "continuous: .*no slot ever empty"),
    (ch06.slots, 4, 12, "continuous: .*still runs"),
    (ch06.slots, 4, 60, "continuous: .*too large"),
    (ch06.as_good, 0, 2.28, "sorted_queue: .*sort the static"),
    (ch06.as_good, 0, 0.9, "sorted_queue: .*other way round"),
    (ch06.as_good, 1, "its steps are longer", "arrivals: .*TPOT"),
    (ch06.as_good, 1, "its slots are empty at the end of a batch", "arrivals: .*end together"),
    (ch06.as_good, 2, "sorting takes too long", "hindrance: .*far less time"),
    (ch06.as_good, 2, "long answers fill the memory", "hindrance: .*same blocks"),
    (ch06.as_good, 3, "lengths are equal", "conclusion: .*over time"),
    (ch06.as_good, 3, "the batch is large", "conclusion: .*longer longest"),
    (ch06.as_good, 3, "answers are short", "conclusion: .*spread"),
]  # fmt: skip
MISTAKES = [(ch06.admit_cases, ch06.ADMIT_MISTAKES), (ch06_goodput.goodput_cases, ch06_goodput.GOODPUT_MISTAKES)]


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


OTHER_WAYS = [("schedule", careful)]


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
    for requests, ttft, tpot in ch06_goodput.goodput_cases(Draw(5)):
        outputs = []
        for number, (arrival, times) in enumerate(requests):
            line = Timeline(arrival, arrival, list(times), times[-1])
            done = CompletionOutput(0, "", [1] * len(times), "length", None, line)
            outputs.append(RequestOutput(number, [1], [done], True))
        expected = summarize(outputs, ttft=ttft, tpot=tpot).goodput
        assert ch06_goodput.right_goodput(requests, ttft, tpot) == pytest.approx(expected)


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


def test_the_conditions_in_the_text_are_those_that_the_check_uses():
    """B4: a constant typed twice drifts."""
    *most, last = ch06.LENGTHS
    assert f"answers of {', '.join(map(str, most))} and {last} tokens" in prose(CHAPTER)
    assert f"batches of {ch06.SLOTS}, in each one answer of {ch06.LONG:,} tokens and seven of {ch06.SHORT}" in prose(
        CHAPTER
    )
    assert "twice over, in four slots" in prose(CHAPTER) and len(ch06.LENGTHS) == 4


def test_the_chapter_compares_its_replay_with_the_published_figures_as_they_are():
    """B4: what the text says of the last table of the published comparison, in numbers and in words."""
    source, namespace = code(".", CHAPTER), {}
    parts = {
        "setup": source["setup"].partition("here = lab.setup()")[0],
        "problem-run": source["problem-run"].partition("requests = ")[0],
        "three-setup": source["three-setup"].partition("longer = ")[0],
        "opt-run": source["opt-run"],
        "opt-values": source["opt-values"],
    }
    for part in parts.values():
        exec(part, namespace)
    naive, own, reserved, continuous, pages = namespace["values"]
    said = " ".join(cell["source"] for cell in cells(".", CHAPTER) if cell["cell_type"] == "markdown")
    assert f"lie at {naive / 81:.1f} to {pages / 1865:.0f} times the published ones" in said
    assert reserved / naive == pytest.approx(pages / reserved, rel=0.2)  # "about as much as both mechanisms together"
    assert continuous / reserved == pytest.approx(2.5, rel=0.1) and pages / continuous == pytest.approx(2, rel=0.1)
    assert own < reserved


def played(lengths, slots, continuous):
    """Steps until all are done, one step after the other."""
    queue, left, steps = list(lengths), [], 0
    while queue or left:
        if continuous or not left:
            while queue and len(left) < slots:
                left.append(queue.pop(0))
        left, steps = [n - 1 for n in left if n > 1], steps + 1
    return steps


def test_the_steps_of_the_pencil_exercise_are_those_that_a_queue_takes():
    lengths = 2 * ch06.LENGTHS
    assert played(lengths, 4, False) == 2 * max(ch06.LENGTHS)
    assert played(sorted(lengths), 4, False) == ch06.SORTED and played(lengths, 4, True) == ch06.JOINED


def test_the_last_experiment_gives_the_ratios_that_the_check_expects():
    source, namespace = code("solutions", CHAPTER), {}
    exec(source["imports"], namespace)
    exec(source["as-good-run"], namespace)
    assert float(namespace["rows"][-1][-1].rstrip("×")) == ch06.UNSORTED_RATIO and namespace["SLOTS"][-1] == 8
    exec(source["as-good-answer"], namespace)
    assert round(namespace["sorted_queue"], 2) == ch06.SORTED_RATIO
