"""The engine with a prefix cache: the same tokens, whoever shares what with whom, and no block lost or mixed up.

First a real model in float64, held to naive generation. Then a runner without a model that remembers which tokens
each slot holds, for many thousands of random steps.
"""

import functools
import json
import random
from dataclasses import replace

import pytest
import torch

from minillm import naive
from minillm.config import EngineConfig, ModelConfig
from minillm.engine import Engine
from minillm.lab.notebooks import ROOT
from minillm.metrics import summarize
from minillm.model import Transformer
from minillm.prefix_cache import PrefixCache
from minillm.request import Status
from minillm.roofline import Device
from minillm.runner import ModelRunner
from minillm.sampling import SamplingParams
from minillm.scheduler import Scheduler
from minillm.simulate import num_blocks
from minillm.workload import Session, TimedRequest, converse, fixed, make_sessions, programs, replay, uniform

SHAPE = ModelConfig(
    vocab_size=61, dim=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6, ffn_dim=31, max_context=64
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)


# A real model


@functools.cache
def model() -> Transformer:
    """Random weights, large enough that the next token depends on the whole prefix."""
    made = Transformer(SHAPE).initialize(5).to(torch.float64).requires_grad_(False)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter *= 8 if parameter.dim() > 1 else 1.3
    return made


@functools.cache
def expected(prompt: tuple[int, ...], params: SamplingParams = GREEDY) -> list[int]:
    return naive.generate(model(), list(prompt), params)


def family(size: int, seed: int = 0) -> list[list[int]]:
    """Prompts that are starts of each other, that part within and at a block's border, and that repeat."""
    rng = random.Random(f"{size} {seed}")
    base = [rng.randrange(SHAPE.vocab_size) for _ in range(4 * size + 2)]
    lengths = {max(1, blocks * size + more) for blocks in (1, 2, 4) for more in (-1, 0, 1)}
    prompts = [base[:length] for length in sorted(lengths)]
    for place in (2 * size - 1, 2 * size, 2 * size + 1):
        other = list(base)
        other[place] = (other[place] + 1) % SHAPE.vocab_size
        prompts.append(other)
    prompts += [base, base, prompts[0]]
    rng.shuffle(prompts)
    return prompts


def engine_for(**settings) -> Engine:
    """Its keys and values start as NaN: whatever is read before it is written shows."""
    config = EngineConfig(**{"num_blocks": 60, "block_size": 3} | settings)
    runner = ModelRunner(model(), config)
    runner.cache.k.fill_(torch.nan)
    runner.cache.v.fill_(torch.nan)
    return Engine(runner, config)


def run(engine: Engine) -> dict:
    """Step to the end, the books checked after every step."""
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check()
    return done


def give_back(scheduler: Scheduler) -> None:
    """Nothing runs: all blocks are free or evictable, and then all are free."""
    assert not scheduler.running and not scheduler.waiting and not scheduler.held
    if scheduler.prefixes:
        assert scheduler.prefixes.num_evictable == scheduler.prefixes.num_blocks
        scheduler.prefixes.evict(scheduler.pool.num_blocks)
        scheduler.check()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


SETTINGS = {
    "plain": {},
    "blocks of 1": {"block_size": 1, "num_blocks": 200},
    "blocks of 4, prefix order": {"block_size": 4, "order": "prefix", "max_batch_size": 3},
    "budget of 1": {"token_budget": 1},
    "budget of 5": {"token_budget": 5, "order": "prefix"},
    "whole prompts": {"chunked_prefill": False, "token_budget": 20, "max_batch_size": 4},
    "one at a time": {"max_batch_size": 1},
    "pool for one": {"num_blocks": "smallest"},
    "pool for one, blocks of 1": {"block_size": 1, "num_blocks": "smallest", "order": "prefix"},
    "pool for two": {"num_blocks": "twice", "token_budget": 7},
    "static": {"batching": "static", "max_batch_size": 4},
    "static, pool for one": {"batching": "static", "num_blocks": "smallest"},
    "reserved": {"reserve": "max_context", "num_blocks": 3 * 22},
}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_sharing_changes_no_token(name, caching):
    """Adversarial prompts in two waves, the second on what the first left behind: the tokens of naive generation."""
    settings = dict(SETTINGS[name])
    size = settings.get("block_size", 3)
    prompts = family(size)
    again = [prompt + expected(tuple(prompt))[:5] + [3] for prompt in prompts[:4]] + prompts[3:7]
    longest = max(map(len, again)) + GREEDY.max_tokens - 1
    factor = {"smallest": 1, "twice": 2}.get(settings.get("num_blocks"))
    if factor:
        settings["num_blocks"] = factor * -(-longest // size)
    engine, hits = engine_for(prefix_caching=caching, **settings), 0
    for wave in (prompts, again):
        ids = [engine.add_request(prompt, GREEDY) for prompt in wave]
        done = run(engine)
        for id, prompt in zip(ids, wave, strict=True):
            output = done[id].outputs[0]
            assert output.token_ids == expected(tuple(prompt)), f"{prompt} in {ids}"
            assert output.timeline.cached_tokens < len(prompt), "at least one token is computed"
            assert output.timeline.cached_tokens % size == 0
            hits += output.timeline.cached_tokens
    assert bool(hits) == caching
    if factor and caching:
        assert engine.scheduler.prefixes.num_blocks <= settings["num_blocks"]
    if factor:
        assert engine.stats["preemptions"] or factor == 2 or settings.get("max_batch_size") == 1
    give_back(engine.scheduler)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("budget", [4, 512])
def test_equal_prompts_in_one_step(length, budget):
    """E1: nobody's block is freed under him when several compute the same; and the tree keeps one copy."""
    engine, prompt = engine_for(token_budget=budget), list(range(2, 2 + length))
    ids = [engine.add_request(prompt, GREEDY) for _ in range(4)]
    done = run(engine)
    assert all(done[id].outputs[0].token_ids == expected(tuple(prompt)) for id in ids)
    assert engine.scheduler.prefixes.num_blocks == (length + GREEDY.max_tokens - 1) // 3
    give_back(engine.scheduler)


@pytest.mark.parametrize("length", [5, 6, 7, 9])
def test_a_whole_prompt_in_the_cache_leaves_a_token_to_compute(length):
    """Blocks of 3: all of the prompt is cached the second time; hits are the whole blocks before its last token."""
    engine, prompt = engine_for(), [7] * length
    for found in (0, (length - 1) // 3 * 3):
        id = engine.add_request(prompt, GREEDY)
        output = run(engine)[id].outputs[0]
        assert output.timeline.cached_tokens == found
        assert output.token_ids == expected(tuple(prompt))


def test_an_answer_is_found_by_the_next_turn():
    """Keys and values of the answer are cached too, but for its last token, which was never fed back."""
    engine, prompt = engine_for(), list(range(10))
    id = engine.add_request(prompt, GREEDY)
    answer = run(engine)[id].outputs[0].token_ids
    following = [*prompt, *answer, 1, 2]
    id = engine.add_request(following, GREEDY)
    output = run(engine)[id].outputs[0]
    assert output.timeline.cached_tokens == (len(prompt) + len(answer) - 1) // 3 * 3
    assert output.token_ids == expected(tuple(following))


def test_a_preempted_request_finds_its_own_blocks_and_that_is_no_hit():
    """E13: what it finds again was not saved, only not lost; `cached_tokens` stays what it was."""
    config = {"num_blocks": 8, "block_size": 2, "max_batch_size": 2}
    long = replace(GREEDY, max_tokens=9)
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    engine = engine_for(**config)
    ids = [engine.add_request(prompt, long) for prompt in prompts]
    done = run(engine)
    lines = [done[id].outputs[0].timeline for id in ids]
    assert [line.preemptions for line in lines] == [0, 1]
    assert [line.cached_tokens for line in lines] == [0, 0]
    without = engine_for(prefix_caching=False, **config)
    ids = [without.add_request(prompt, long) for prompt in prompts]
    lost = run(without)[ids[1]].outputs[0].timeline
    assert 0 <= lines[1].recomputed_tokens < lost.recomputed_tokens
    for id, prompt in zip(ids, prompts, strict=True):
        assert done[id].outputs[0].token_ids == expected(tuple(prompt), long)


@pytest.mark.parametrize("caching", [True, False])
def test_forks_and_aborts_leave_the_others_alone(caching):
    """Samples share the blocks of their prompt and those of the tree; whoever is aborted takes nothing along."""
    engine = engine_for(prefix_caching=caching, max_batch_size=8, token_budget=11, num_blocks=40)
    prompts = family(3, seed=1)[:6]
    rng = random.Random(3)
    for round_ in range(3):
        ids = {engine.add_request(prompt, replace(GREEDY, n=1 + k % 3)): prompt for k, prompt in enumerate(prompts)}
        done, aborted = {}, set()
        while engine.has_unfinished:
            done |= {output.request_id: output for output in engine.step() if output.finished}
            alive = sorted(ids.keys() - done.keys() - aborted)
            if alive and len(aborted) < 2 and rng.random() < 0.2:
                gone = rng.choice(alive)
                aborted.add(gone)
                engine.abort(gone)
            engine.scheduler.check()
        for id, prompt in ids.items():
            if id not in aborted:
                assert all(sample.token_ids == expected(tuple(prompt)) for sample in done[id].outputs), round_
    give_back(engine.scheduler)


# Without a model


class Remembering:
    """Draws random tokens. What it stores in a slot is the whole start that ends there; it checks all that is read.

    `recomputed` counts, for each sample, the tokens that it computed although it had them before.
    """

    config = ModelConfig.preset("tiny")

    def __init__(self, num_blocks: int, block_size: int, rng: random.Random):
        self.num_blocks, self.size, self.rng, self.time = num_blocks, block_size, rng, 0.0
        self.keys: dict[int, tuple[int, ...]] = {}
        self.had: dict[tuple[int, int], int] = {}
        self.recomputed: dict[tuple[int, int], int] = {}

    def now(self) -> float:
        return self.time

    def wait_until(self, moment: float) -> None:
        self.time = max(self.time, moment)

    def execute(self, step) -> list[list[int]]:
        self.time += 1
        for source, target in step.copies:
            for place in range(self.size):
                self.keys[target * self.size + place] = self.keys.get(source * self.size + place)
        work = list(zip(step.requests, step.counts, strict=True))
        for request, count in work:
            start, stop = request.num_computed_tokens, request.num_computed_tokens + count
            for t, slot in zip(range(start, stop), request.block_table.slots(start, stop), strict=True):
                self.keys[slot] = tuple(request.token_ids[: t + 1])
            who = (request.id, request.index)
            had = max(start, self.had.get(who, 0))
            self.recomputed[who] = self.recomputed.get(who, 0) + max(0, min(had, stop) - start)
            for sample in [request, *request.samples]:  # samples that fork off now start with the whole prompt
                self.had[sample.id, sample.index] = max(had, stop)
        for request, count in work:
            stop = request.num_computed_tokens + count
            for t, slot in enumerate(request.block_table.slots(0, stop)):
                assert self.keys.get(slot) == tuple(request.token_ids[: t + 1]), (
                    f"{request!r} reads a foreign token {t}"
                )
        return [[self.rng.randrange(2) for _ in range(drawn)] for drawn in step.samples]


def random_config(rng: random.Random) -> EngineConfig:
    return EngineConfig(
        block_size=rng.choice([1, 2, 3, 4]),
        num_blocks=rng.randrange(8, 40),
        max_batch_size=rng.randrange(1, 8),
        token_budget=rng.randrange(1, 20),
        batching=rng.choice(["continuous", "continuous", "static"]),
        chunked_prefill=rng.random() < 0.8,
        order=rng.choice(["arrival", "prefix"]),
        prefix_caching=rng.random() < 0.9,
    )


class Play:
    """One engine under random requests, forks and aborts; `steps` taken so far, and what was seen on the way."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.config = random_config(self.rng)
        self.runner = Remembering(self.config.num_blocks, self.config.block_size, self.rng)
        self.engine, self.live, self.steps = Engine(self.runner, self.config), [], 0
        self.seen = {"hits": 0, "preemptions": 0, "aborts": 0, "forks": 0, "refused": 0, "evictions": 0}
        self.bases = [[self.rng.randrange(2) for _ in range(self.rng.randrange(1, 14))] for _ in range(3)]

    def ask(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.bases)[: rng.randrange(1, 14)] + [rng.randrange(2) for _ in range(rng.randrange(5))]
        params = SamplingParams(max_tokens=rng.randrange(1, 9), ignore_eos=True, n=rng.choice([1, 1, 1, 2, 3]))
        try:
            self.live.append(self.engine.add_request(prompt, params))
            self.seen["forks"] += params.n > 1
        except ValueError:
            self.seen["refused"] += 1

    def step(self) -> None:
        scheduler, tree = self.engine.scheduler, self.engine.scheduler.prefixes
        before = tree.num_blocks if tree else 0
        for output in self.engine.step():
            for sample in output.outputs if output.finished else ():
                self.finished(output, sample)
        scheduler.check()
        self.seen["evictions"] += bool(tree) and tree.num_blocks < before
        for request in scheduler.waiting:
            assert request.overtaken <= scheduler.max_batch_size, "it starves"
        self.steps += 1

    def finished(self, output, sample) -> None:
        line = sample.timeline
        assert sample.finish_reason in ("length", "abort"), sample
        if sample.finish_reason == "length":
            again = self.runner.recomputed.get((output.request_id, sample.index), 0)
            assert line.recomputed_tokens == again, f"{sample}: {again} tokens were computed again"
        assert line.cached_tokens < len(output.prompt_ids) and line.cached_tokens % self.config.block_size == 0
        self.seen["hits"] += line.cached_tokens
        self.seen["preemptions"] += line.preemptions

    def play(self) -> None:
        for turn in range(80):
            if turn < 60 and self.rng.random() < 0.5:
                self.ask()
            if self.live and self.rng.random() < 0.05:
                aborted = self.engine.abort(self.live.pop(self.rng.randrange(len(self.live))))
                self.seen["aborts"] += aborted is not None
                self.engine.scheduler.check()
            self.step()
        while self.engine.has_unfinished:
            self.step()
            assert self.steps < 5000, "it never ends"
        give_back(self.engine.scheduler)


@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_random_steps_mix_up_and_lose_nothing(part):
    """E1, E13: 2,500 steps a part; every slot read holds what its request's tokens say; no block leaks."""
    steps, seen, seed = 0, {}, 1000 * part
    while steps < 2500:
        game = Play(seed)
        game.play()
        steps, seed = steps + game.steps, seed + 1
        seen = {name: seen.get(name, 0) + count for name, count in game.seen.items()}
    assert all(seen[name] > 3 for name in seen), seen


def no_locks(patch):
    patch.setattr(PrefixCache, "lock", lambda self, node: None)
    patch.setattr(PrefixCache, "unlock", lambda self, node: None)


def no_unlock(patch):
    patch.setattr(PrefixCache, "unlock", lambda self, node: None)


def half_a_block(patch):
    """A block goes into the tree when its first token is computed, not its last."""

    def advance(self, request, count):
        request.num_computed_tokens += count
        size = self.pool.block_size
        whole = min(-(-request.num_computed_tokens // size), request.num_tokens // size)
        if self.prefixes:
            node, _ = self.prefixes.insert(request.token_ids[: whole * size], request.block_table.blocks[:whole])
            self.prefixes.lock(node)
            self.prefixes.unlock(request.prefix)
            request.prefix = node

    patch.setattr(Scheduler, "advance", advance)


def first_tokens_alone(patch):
    """A block is taken for another that starts with the same token."""
    patch.setattr(PrefixCache, "_key", lambda self, tokens: tokens[:1])
    walk = PrefixCache._walk

    def careless(self, tokens):
        found = self.root.children.get(tuple(tokens[:1])) if len(tokens) >= self.pool.block_size else None
        return iter([(found, 1)]) if found else walk(self, ())

    patch.setattr(PrefixCache, "_walk", careless)


def found_again_is_a_hit(patch):
    enter = Scheduler._enter

    def counted(self, request):
        before = request.timeline.recomputed_tokens
        enter(self, request)
        request.timeline.recomputed_tokens = before

    patch.setattr(Scheduler, "_enter", counted)


def evicts_all(patch):
    """Eviction takes leaves that are in use as well."""
    evict = PrefixCache.evict

    def careless(self, num_blocks):
        locked = [node for node in self.nodes() if node.locks and not node.children]
        if num_blocks > 0 and locked:
            self.pool.free(locked[0].blocks)
        return evict(self, num_blocks)

    patch.setattr(PrefixCache, "evict", careless)


@pytest.mark.parametrize(
    "fault", [no_locks, no_unlock, half_a_block, first_tokens_alone, found_again_is_a_hit, evicts_all]
)
def test_planted_faults_are_found(fault, monkeypatch):
    """E1, E2, E13: a harness that passes whatever the engine does would prove nothing."""
    fault(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        for seed in range(60):
            Play(seed).play()


# The order of the queue


def serve_stream(order: str, steps: int = 60) -> tuple[int, Engine]:
    """One cold request among ever new ones with a hot start; the steps until the cold one runs."""
    config = EngineConfig(block_size=2, num_blocks=24, max_batch_size=3, token_budget=8, order=order)
    engine = Engine(Remembering(24, 2, random.Random(1)), config)
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    cold = None
    for step in range(steps):
        for extra in (1, 2, 3):
            engine.add_request([1, 1, 0, 0, 1, 0, extra], short)
        if step == 3:
            engine.add_request([5, 5, 5, 5, 5], short)
            cold = engine.scheduler.waiting[-1]
        engine.step()
        engine.scheduler.check()
        if cold and cold.status is not Status.WAITING:
            return step, engine
    raise AssertionError("the cold request starved")


def test_a_request_without_a_prefix_is_overtaken_a_bounded_number_of_times():
    """Longest prefix first would never take it while hot ones keep coming; a batch's worth of passes is the limit."""
    _, engine = serve_stream("prefix")
    cold = next(r for r in engine.scheduler.running if r.token_ids[0] == 5)
    assert cold.overtaken == engine.scheduler.max_batch_size


def test_without_the_limit_it_starves(monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(Scheduler, "_next", lambda self: max(
        self.waiting, key=lambda request: self.prefixes.peek(request.token_ids[:-1])
    ))  # fmt: skip
    with pytest.raises(AssertionError, match="starved"):
        serve_stream("prefix")


def hit_rate(outputs) -> float:
    prompts = sum(len(output.prompt_ids) for output in outputs)
    return sum(output.metrics.cached_tokens for output in outputs) / prompts


def test_prefix_order_finds_more_in_a_small_pool():
    """Eight starts take turns and the pool holds three of them: in order of arrival each is gone when it comes back."""
    sessions = make_sessions(48, fixed(5), fixed(2), 50, shared=40, groups=8, seed=2)
    rates = {}
    for order in ("arrival", "prefix"):
        config = EngineConfig(block_size=4, num_blocks=40, max_batch_size=16, token_budget=64, order=order)
        engine = Engine(Remembering(40, 4, random.Random(2)), config)
        rates[order] = hit_rate([outputs[0] for outputs in converse(engine, sessions)])
        give_back(engine.scheduler)
    assert rates["arrival"] < 0.2 < 0.5 < rates["prefix"]


# Workloads that share


def test_sessions_are_what_was_asked_for():
    sessions = make_sessions(7, uniform(2, 5), uniform(1, 3), 40, shared=6, groups=2, turns=3, copies=2, seed=4)
    assert [len(session.turns) for session in sessions] == [3] * 7
    starts = [session.turns[0][:6] for session in sessions]
    assert starts[0] == starts[1] == starts[4] and starts[2] == starts[3] == starts[6] and starts[0] != starts[2]
    assert sessions[0].turns == sessions[1].turns and sessions[1].turns != sessions[4].turns
    for session in sessions:
        assert all(2 <= len(turn) <= 5 for turn in session.turns[1:]) and 8 <= len(session.turns[0]) <= 11
        assert 1 <= session.params.max_tokens <= 3 and session.params.ignore_eos
    assert sessions == make_sessions(7, uniform(2, 5), uniform(1, 3), 40, shared=6, groups=2, turns=3, copies=2, seed=4)
    assert sessions != make_sessions(7, uniform(2, 5), uniform(1, 3), 40, shared=6, groups=2, turns=3, copies=2, seed=5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 0}, "count must be an integer of at least 1, got 0"),
        ({"shared": -1}, "shared must be an integer of at least 0, got -1"),
        ({"turns": 0}, "turns must be an integer of at least 1, got 0"),
        ({"groups": 1.5}, "groups must be an integer of at least 1, got 1.5"),
        ({"copies": True}, "copies must be an integer"),
        ({"seed": -2}, "seed must be an integer of at least 0, got -2"),
    ],
)
def test_sessions_that_make_no_sense_are_refused(wrong, message):
    asked = {"count": 2, "own": fixed(2), "outputs": fixed(1), "vocab_size": 9} | wrong
    with pytest.raises(ValueError, match=message):
        make_sessions(asked.pop("count"), **asked)
    with pytest.raises(ValueError, match="at least one turn"):
        Session((), GREEDY)


@pytest.mark.parametrize("caching", [True, False])
def test_a_conversation_goes_on_from_its_answers(caching):
    """Every prompt is the one before, its answer and the new turn; later turns find earlier ones."""
    sessions = make_sessions(4, uniform(2, 9), uniform(2, 5), 50, shared=7, turns=4, seed=6)
    config = EngineConfig(block_size=3, num_blocks=200, prefix_caching=caching)
    talked = converse(Engine(Remembering(200, 3, random.Random(3)), config), sessions)
    for session, outputs in zip(sessions, talked, strict=True):
        past = []
        for turn, output in zip(session.turns, outputs, strict=True):
            prompt = [*past, *turn]
            assert output.prompt_ids == prompt
            known = (len(past) - 1) // 3 * 3 if past else 0  # the answer's last token was never fed back
            assert output.metrics.cached_tokens >= known if caching else not output.metrics.cached_tokens
            past = [*prompt, *output.outputs[0].token_ids]
    late = converse(Engine(Remembering(200, 3, random.Random(3)), config), [replace(sessions[0], arrival=50.0)])
    assert [output.metrics.arrival for output in late[0]][0] == 50.0


def test_a_session_ends_where_the_engine_refuses_its_turn():
    config = EngineConfig(block_size=2, num_blocks=6)
    engine = Engine(Remembering(6, 2, random.Random(4)), config)
    asked = Session(((1, 2, 3), (4,) * 20, (5,)), SamplingParams(max_tokens=2, ignore_eos=True))
    first, refused = converse(engine, [asked])[0]
    assert first.finished and "needs" in refused.reason and not refused.outputs
    single = replay(engine, [TimedRequest(0.0, [1, 2, 3], asked.params)])
    assert single[0].metrics.cached_tokens == 2


@pytest.mark.parametrize("kind", programs(8))
def test_each_kind_of_program_hits_what_its_lengths_say(kind):
    """Counted by hand from the prompts: with a large pool, one request at a time, every whole block seen before."""
    sessions = make_sessions(8, **programs(8)[kind], vocab_size=4096, seed=1)
    config = EngineConfig(block_size=4, num_blocks=2000, max_batch_size=1)
    talked = converse(Engine(Remembering(2000, 4, random.Random(5)), config), sessions)
    outputs = sorted((o for each in talked for o in each), key=lambda output: output.request_id)
    seen, expected_hits = set(), []
    for output in outputs:
        prompt = output.prompt_ids
        whole = [tuple(prompt[:stop]) for stop in range(4, len(prompt), 4)]
        expected_hits.append(4 * next((k for k, start in enumerate(whole) if start not in seen), len(whole)))
        stored = [*prompt, *output.outputs[0].token_ids][:-1]
        seen |= {tuple(stored[:stop]) for stop in range(4, len(stored) + 1, 4)}
    assert [output.metrics.cached_tokens for output in outputs] == expected_hits
    assert (sum(expected_hits) > 0) == (kind != "nothing shared")
    assert summarize(outputs).served == len(outputs)


def test_numbers_in_the_chapter_are_what_our_formulas_give():
    """B4: a number typed twice drifts."""
    loaded = json.loads((ROOT / "book" / "08_prefix_cache.ipynb").read_text(encoding="utf-8"))["cells"]
    text = " ".join("".join(cell["source"]) for cell in loaded if cell["cell_type"] == "markdown")
    llama = ModelConfig(32_000, 4096, 32, 32, 32, 128, 11_008, 4096, tie_embeddings=False)
    card = Device("A10G", 600e9, {"float16": 70e12}, 24e9, "as the chapter has it")
    tokens = 16 * num_blocks(llama, card, 16, "float16")
    assert f"about {round(tokens, -2):,} tokens, fewer than 32 chats need" in text
    assert f"{programs(64)['chat']['turns']} turns" in text.replace("four", "4")
    assert "with $s = 512$ and $q = 40$" in text and "eight different starts" in text


def test_a_pool_that_does_not_hold_a_request_refuses_it_whatever_is_cached():
    engine = engine_for(num_blocks=5)
    run_first = engine.add_request([1] * 6, GREEDY)
    assert run(engine)[run_first].finished
    with pytest.raises(ValueError, match="needs 6 blocks of 3 tokens, and the pool has 5"):
        engine.add_request([1] * 12, GREEDY)
