"""The exercises of chapter 2: answers right and wrong for `test_exercises.py`; the conditions are the text's."""

from solutions import prose

from minillm.lab.answers import ch02

CHAPTER = "02_memory_bound"
SECONDS = {1: 1.0, 2: 1.9, 4: 2.0, 8: 2.6, 16: 4.16}  # what a machine might have measured
SKIPPED_RUNS, NAMESPACE = {"free-run"}, {"seconds": SECONDS}  # this experiment times things: nbmake runs it
BUILT = {"largest": ch02.largest_batch}
ROOM = '(batch + 1) * (context + 1) * config.kv_bytes_per_token("bfloat16") > room'
FITS = 'int(room // ((context + 1) * config.kv_bytes_per_token("bfloat16")))'
WRONG_BUILT = [
    ("largest", [('return batch, "room"', 'return batch + 1, "room"')], "one less"),
    ("largest", [("batch = 0", "batch = 1")], "the answer is 0"),
    ("largest", [(' - config.weight_bytes("bfloat16")', "")], "must hold the weights"),
    ("largest", [("(context + 1)", "context")], "context \\+ 1 tokens"),
    ("largest", [("(batch + 1) * (context", "batch * (context")], "one less"),
    ("largest", [("(batch + 1) * (context + 1)", "(context + 1)")], "of every request"),
    ("largest", [("> limit", "> limit and batch > 499")], "too slow"),
    ("largest", [("device, batch + 1, context", "device, 1, context"), ("while True", "while batch < 501")],
     "whole batch"),
    ("largest", [("batch + 1, context)", "batch + 1, context + 1)")], "stored before the step: .*not one more"),
    ("largest", [("batch + 1, context)", "batch + 1, context - 1)")], "stored before the step: .*not one less"),
    ("largest", [("batch + 1, context)", "batch + 1, context + 5)")], "the result"),
    ("largest", [('batch, "time"', 'batch, "room"')], "name the limit"),
    ("largest", [('config.weight_bytes("bfloat16")', "decode_step(config, device, 1, context).weight_bytes")],
     "the rows of the embedding that a step does not read"),
    ("largest", [(ROOM, "decode_step(config, device, batch + 1, context).bytes > device.memory")], "the result"),
    ("largest", [("    while True", f"    if room < 0:\n        return {FITS}, 'room'\n    while True")],
     r"where the weights take [\d,]+ bytes, a token's keys and values [\d,]+, and the memory .*0, not fewer"),
]  # fmt: skip


def free_batch(last, speedup):
    """Exercise "Is a second request free?" on that machine."""
    ch02.free_batch(SECONDS, last, speedup)


REGIMES = {"a": "memory", "b": "compute", "c": "memory", "d": "overhead", "e": "compute"}
RIGHT = {
    ch02.bound: (72, 279, 1400, 42.3),
    ch02.regimes: (REGIMES,),
    free_batch: (8, 3.85),
    ch02.long_context: (1, "while the keys and values are small"),
}
WRONG_NUMBERS = [  # check, which argument is wrong, the wrong value, what the message says
    (ch02.bound, 0, 144, "rate16: .*two bytes"),
    (ch02.bound, 0, 9, "rate16: .*divides by bits"),
    (ch02.bound, 0, 72 * 1.024, "rate16: .*it is too large$"),
    (ch02.bound, 0, 72_000, "rate16: .*factor of 1,000"),
    (ch02.bound, 2, "1.4 TB/s", "bandwidth: expected a number in GB/s"),
    (ch02.bound, 2, 1400 / 1.024**3, "bandwidth: .*GB are 10⁹ bytes"),
    (ch02.bound, 3, "many", "batch4: expected a number of requests"),
    (ch02.bound, 0, 11_800, "rate16: .*bound of arithmetic"),
    (ch02.bound, 1, 288, "rate4: .*leaves out the scales"),
    (ch02.bound, 1, 57.6, "rate4: .*an eighth of a bit"),
    (ch02.bound, 1, 34.9, "rate4: .*divide by 8"),
    (ch02.bound, 2, 700, "bandwidth: .*two bytes"),
    (ch02.bound, 2, 2800, "bandwidth: .*16 bits are two$"),
    (ch02.bound, 2, 1.4, "bandwidth: .*TB/s"),
    (ch02.bound, 3, 164, "batch4: .*earlier crossover"),
    (ch02.bound, 3, 41, "batch4: .*leaves out the scales"),
    (ch02.bound, 3, 84.5, "batch4: .*two operations per request"),
    (ch02.bound, 3, 169, "batch4: .*divide by two"),
    (ch02.regimes, 0, REGIMES | {"a": "compute"}, r"operation a: 'compute' .*33\.6 MB .*how long does each take"),
    (ch02.regimes, 0, REGIMES | {"c": "compute"}, "operation c"),
    (ch02.regimes, 0, REGIMES | {"d": "memory"}, "operation d"),
    (ch02.regimes, 0, REGIMES | {"e": "memory"}, "operation e"),
    (ch02.regimes, 0, REGIMES | {"b": "arithmetic"}, "operation b: 'arithmetic' is not one of"),
    (ch02.regimes, 0, {"a": "memory"}, "regimes: expected a dict with the keys a, b, c, d, e"),
    (free_batch, 0, 16, r"last: 16 is not right; .*1 to 2: 1\.900, .*8 to 16: 1\.600"),
    (free_batch, 0, 4, "last: 4 is not right; .*the batch after doubling"),
    (free_batch, 0, 1, "last: 1 is not right"),
    (free_batch, 1, None, "not answered yet: last and speedup"),
    (free_batch, 1, ..., "not answered yet: last and speedup"),
    (free_batch, 1, 4.16, "speedup: .*how many more tokens"),
    (free_batch, 1, 16, "speedup: .*no longer at all"),
    (free_batch, 1, 0.26, "speedup: .*inverse"),
    (free_batch, 1, "four", "speedup: expected a number times the tokens/s of batch 1, got 'four'"),
    (ch02.long_context, 0, 0.125, "kv_over_weights: .*batch of eight|kv_over_weights: .*those of the batch"),
    (ch02.long_context, 0, 2, "kv_over_weights: .*before doubling"),
    (ch02.long_context, 1, "always", "conclusion: .*second table"),
    (ch02.long_context, 1, "never", "conclusion: .*first row"),
]
MISTAKES = [(ch02.batch_cases, ch02.BATCH_MISTAKES)]


def test_the_conditions_in_the_text_are_those_that_the_checks_use():
    """B4: a constant typed twice drifts."""
    for phrase in (
        f"{ch02.BILLION_WEIGHTS} billion weights", f"an {ch02.CARD.name}:",
        f"{ch02.CARD.bandwidth / 1e9:,.0f} GB/s",
        f"{ch02.CARD.peak('bfloat16') / 1e12} TFLOP/s", f"claims {ch02.CLAIMED_RATE} tokens",
        f"writes {ch02.BANDWIDTH / 1e9:,.0f} GB/s, does {ch02.FLOPS / 1e12:.0f} TFLOP/s",
        f"needs {ch02.STARTING * 1e6:.0f} µs", f"at most {ch02.FREE} times as long as before",
    ):  # fmt: skip
        assert phrase in prose(CHAPTER), phrase
