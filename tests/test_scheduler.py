"""The scheduler under random loads, with no model: a fake runner draws random tokens and keeps a fake memory.

The memory holds, for every slot, the token that was written there. So each step shows whether what a request would
read is its own prefix, whatever was shared, copied, preempted or freed before. `World` is one engine with its checks;
it is driven by a seeded loop, which is fast, and by `hypothesis`, which finds small examples.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from minillm.config import EngineConfig, ModelConfig
from minillm.engine import Engine
from minillm.request import Request, Status
from minillm.sampling import SamplingParams
from minillm.scheduler import Scheduler

EOS, VOCAB, CONTEXT = 3, 997, 40


def shape(max_context: int = CONTEXT) -> ModelConfig:
    """Only its vocabulary, context and end-of-text id matter here."""
    return ModelConfig(VOCAB, 8, 1, 1, 1, 8, 8, max_context, eos_token_ids=(EOS,))


class FakeRunner:
    """Draws random tokens, ends a text now and then, and looks at every step as closely as it can."""

    def __init__(self, num_blocks: int, config: EngineConfig, rng: random.Random):
        self.config, self.num_blocks, self.engine_config, self.rng = shape(), num_blocks, config, rng
        self.memory: list[int | None] = [None] * (num_blocks * config.block_size)
        self.clock, self.steps, self.raises = 100.0, 0, None
        self.drawn: dict[tuple[int, int], list[int]] = {}
        self.before: dict[Request, int] = {}  # what ran before the step was made, and how much of it was computed
        self.queue: list[Request] = []  # what waited
        self.computed: Counter = Counter()  # tokens, by sample
        self.cached: dict[tuple[int, int], int] = {}  # what each found when it started
        self.recomputed: Counter = Counter()
        self.overtaken: Counter = Counter()
        self.scheduler: Scheduler | None = None

    def now(self) -> float:
        return self.clock

    def wait_until(self, moment: float) -> None:
        self.clock = max(self.clock, moment)

    def execute(self, step) -> list[list[int]]:
        self.steps += 1
        self.clock += self.rng.uniform(0.001, 1)
        check_step(step, self.scheduler, self.before)
        self.account(step)
        if self.raises:
            error, self.raises = self.raises, None
            raise error
        self.move(step)
        drawn = []
        for request, samples in zip(step.requests, step.samples, strict=True):
            drawn.append([EOS if self.rng.random() < 0.02 else self.rng.randrange(VOCAB) for _ in range(samples)])
            for sampled, token in zip([request, *request.samples], drawn[-1], strict=False):
                self.drawn.setdefault(key(sampled), []).append(token)
        return drawn

    def account(self, step) -> None:
        """Who found how much, lost how much, and was overtaken how often, seen from outside."""
        for request in step.preempted:
            self.recomputed[key(request)] += self.before[request]
        started = [request for request in self.scheduler.running if request not in self.before]
        for request in started:
            found, name = request.num_computed_tokens, key(request)
            assert found == 0 or self.engine_config.prefix_caching
            assert found % self.engine_config.block_size == 0 and request.num_missing >= 1
            if request.timeline.preemptions:  # E13: found again is neither cached nor recomputed
                self.recomputed[name] = max(0, self.recomputed[name] - found)
            else:
                self.cached[name] = found
        for place, request in enumerate(self.queue):
            if request.status is Status.WAITING:
                self.overtaken[key(request)] += sum(later in self.queue[place + 1 :] for later in started)
                assert self.overtaken[key(request)] <= self.scheduler.max_batch_size, f"{request!r} is always passed"

    def move(self, step) -> None:
        """Copy blocks, write the new tokens, and read every prefix back."""
        size, memory = self.engine_config.block_size, self.memory
        copied = [(target, memory[source * size : (source + 1) * size]) for source, target in step.copies]
        assert len({target for target, _ in copied}) == len(copied), "two copies into one block"
        for target, content in copied:
            memory[target * size : (target + 1) * size] = content
        for request, count in zip(step.requests, step.counts, strict=True):
            start = request.num_computed_tokens
            self.computed[key(request)] += count
            for block in request.block_table.blocks[start // size : -(-(start + count) // size)]:
                assert self.scheduler.pool.ref_count(block) == 1, f"{request!r} writes into a shared block"
            new = request.token_ids[start : start + count]
            for slot, token in zip(request.block_table.slots(start, start + count), new, strict=True):
                memory[slot] = token
        for request, count in zip(step.requests, step.counts, strict=True):
            stop = request.num_computed_tokens + count
            read = [memory[slot] for slot in request.block_table.slots(0, stop)]
            assert read == request.token_ids[:stop], f"{request!r} reads what is not its own"


def key(request: Request) -> tuple[int, int]:
    """Order of arrival."""
    return request.id, request.index


def check_step(step, scheduler: Scheduler, before: dict[Request, int]) -> None:
    """What holds for every step of every schedule; `before` ran before it was made."""
    config = scheduler.config
    assert step.requests and len({key(r) for r in step.requests}) == len(step.requests)
    for request, count, samples in zip(step.requests, step.counts, step.samples, strict=True):
        assert request.status is Status.RUNNING and 1 <= count <= request.num_missing
        assert samples == (1 + len(request.samples) if count == request.num_missing else 0)
    if config.chunked_prefill:
        assert sum(step.counts) <= config.token_budget
    else:  # at most one prompt reaches beyond the budget, and it is computed whole
        longest = max(step.counts)
        assert sum(step.counts) <= max(config.token_budget, longest + scheduler.max_batch_size)
        assert all(count == r.num_missing for r, count in zip(step.requests, step.counts, strict=True))
    # First come, first served; and who gives way started later than all who stay.
    running, waiting = [key(r) for r in scheduler.running], [key(r) for r in scheduler.waiting]
    if config.order == "arrival" or not config.prefix_caching:
        assert running + waiting == sorted(running + waiting), "out of order of arrival"
    stay = [r for r in scheduler.running if r in before]
    assert stay == list(before)[: len(stay)] == scheduler.running[: len(stay)], "out of order of their starts"
    assert waiting[: len(step.preempted)] == [key(r) for r in reversed(step.preempted)]
    assert not step.preempted or set(running) <= {key(r) for r in before}, "who takes memory away admits nobody"
    # Nobody starves: the oldest advances at every step, and every decode does (E8).
    assert key(step.requests[0]) == running[0]
    taken = {key(r) for r in step.requests}
    for request in scheduler.running:
        if request in before and request.num_missing == 1:
            assert key(request) in taken, f"{request!r} waits for a step"
    if config.batching == "continuous" and config.chunked_prefill:
        assert taken == set(running), "a running request waits for a step"
    if config.batching == "static" and before:
        assert set(running) <= {key(r) for r in before}, "a request joined a static batch"


@dataclass
class World:
    """One engine, everything that was asked of it, and everything it gave back."""

    config: EngineConfig
    num_blocks: int
    seed: int
    aborted: set = field(default_factory=set)
    failed: set = field(default_factory=set)
    alive: dict = field(default_factory=dict)  # id -> (prompt, params), not delivered
    delivered: dict = field(default_factory=dict)
    refused: int = 0

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.runner = FakeRunner(self.num_blocks, self.config, self.rng)
        self.engine = Engine(self.runner, self.config)
        self.scheduler = self.runner.scheduler = self.engine.scheduler
        self.texts = [[self.rng.randrange(VOCAB) for _ in range(CONTEXT)] for _ in range(2)]  # to start like

    def arrive(self, prompt_tokens: int, params: SamplingParams, shared: int = 0) -> None:
        """Ask for something; the engine takes it exactly if it can ever be served.

        Its first `shared` tokens are those of a common text, or of an earlier prompt and its answer.
        """
        start = self.rng.choice([*self.texts[:2], *self.texts[-2:]])[: min(shared, prompt_tokens)]
        prompt = start + [self.rng.randrange(VOCAB) for _ in range(prompt_tokens - len(start))]
        problem = self.problem(prompt_tokens, params)
        before = (list(self.scheduler.waiting), list(self.scheduler.running), self.scheduler.pool.num_free)
        if problem is None:
            request_id = self.engine.add_request(prompt, params)
            assert request_id not in self.alive and request_id not in self.delivered
            self.alive[request_id] = prompt, params
        else:
            with pytest.raises(ValueError, match=problem):
                self.engine.add_request(prompt, params)
            assert before == (list(self.scheduler.waiting), list(self.scheduler.running), self.scheduler.pool.num_free)
            self.refused += 1

    def problem(self, prompt_tokens: int, params: SamplingParams) -> str | None:
        """Why it can never be served, from the definitions."""
        size, places = self.config.block_size, min(self.config.max_batch_size, self.config.token_budget)
        need = -(-(prompt_tokens + params.max_tokens - 1) // size)
        if self.config.reserve == "max_context":
            need = params.n * -(-CONTEXT // size)
        if prompt_tokens + params.max_tokens > CONTEXT:
            return f"context of {CONTEXT}"
        if params.n > places:
            return f"n={params.n} samples at once, but a batch holds {places}"
        if need > self.num_blocks:
            return f"needs {need} blocks of {size} tokens, and the pool has {self.num_blocks}"
        return None

    def step(self) -> None:
        """One step; everything holds after it."""
        self.runner.before = {request: request.num_computed_tokens for request in self.scheduler.running}
        self.runner.queue, steps = list(self.scheduler.waiting), self.runner.steps
        work = bool(self.scheduler.running or self.scheduler.waiting)
        try:
            outputs = self.engine.step()
        except KeyboardInterrupt:
            outputs = []
        assert self.runner.steps == steps + work, "there was work, and nothing was done"
        self.check()
        self.receive(outputs)

    def check(self) -> None:
        """The scheduler's books; and the cache holds what its keys say, locked as often as it is used."""
        self.scheduler.check()
        if not self.config.prefix_caching:
            return
        size, memory, locks = self.config.block_size, self.runner.memory, Counter()
        for request in [*self.scheduler.running, *self.scheduler.held]:
            node, tokens = request.prefix if request.block_table else self.scheduler.prefixes.root, ()
            while node.parent:
                locks[id(node)] += 1
                node, tokens = node.parent, node.tokens + tokens
            assert tokens == tuple(request.token_ids[: len(tokens)]), f"{request!r} locks what is not its own"
        for node in self.scheduler.prefixes.nodes():
            kept = [token for block in node.blocks for token in memory[block * size : (block + 1) * size]]
            assert tuple(kept) == node.tokens, "what is cached is not what was computed"
            assert node.locks == locks[id(node)], "a lock too many or too few"

    def fail(self, error: BaseException) -> None:
        """The next step raises: its requests end, the others go on."""
        self.runner.raises, before = error, set(self.alive)
        requests: list[Request] = []
        execute = self.runner.execute

        def watched(step):
            requests.extend(step.requests)
            self.failed |= {key(request) for request in requests}
            return execute(step)

        self.runner.execute = watched
        self.step()
        self.runner.execute, self.runner.raises = execute, None
        assert before >= {r.id for r in requests}
        for request in requests:
            assert request.status is Status.FINISHED and request.error == f"{type(error).__name__}: {error}"

    def abort(self, request_id: int) -> None:
        """Whatever state it is in."""
        output = self.engine.abort(request_id)
        self.check()
        if request_id not in self.alive:
            assert output is None
            return
        self.aborted.add(request_id)
        assert all(sample.finish_reason for sample in output.outputs)
        if output.finished:
            self.receive([output])
        else:  # its place in a static batch is kept
            assert self.config.batching == "static" and self.scheduler.held

    def receive(self, outputs) -> None:
        """Every request comes once, whole, with the right reason and exactly its tokens."""
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            prompt, params = self.alive[output.request_id]
            assert output.prompt_ids == prompt and len(output.outputs) == params.n
            if output.finished:
                self.delivered[output.request_id] = output
                del self.alive[output.request_id]
                self.texts.append(prompt + output.outputs[0].token_ids)
                for sample in output.outputs:
                    self.check_sample(output.request_id, params, sample)
                    self.check_counts(output.request_id, len(prompt), sample)

    def check_counts(self, request_id: int, prompt_tokens: int, sample) -> None:
        """E13: cached is what it found at its start, recomputed what it lost and did not find again."""
        name, line = (request_id, sample.index), sample.timeline
        assert line.cached_tokens == self.runner.cached.get(name, 0) < prompt_tokens
        assert line.recomputed_tokens == self.runner.recomputed[name]
        assert self.config.prefix_caching or line.cached_tokens == 0
        if sample.finish_reason in ("length", "stop"):  # the last token is never fed back
            given = prompt_tokens if sample.index else line.cached_tokens
            due = prompt_tokens + len(sample.token_ids) - 1 - given + line.recomputed_tokens
            assert self.runner.computed[name] <= due, "more is computed than counted"
            found_more = line.preemptions and self.config.prefix_caching  # others may have computed more than it lost
            assert self.runner.computed[name] == due or found_more

    def check_sample(self, request_id: int, params: SamplingParams, sample) -> None:
        """Against what the runner drew."""
        tokens, line = sample.token_ids, sample.timeline
        assert tokens == self.runner.drawn.get((request_id, sample.index), [])
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
        stopped = [place for place, token in enumerate(tokens) if token in ends]
        if stopped or len(tokens) == params.max_tokens:
            assert sample.finish_reason == ("stop" if stopped else "length")
            assert stopped in ([], [len(tokens) - 1]) and len(tokens) <= params.max_tokens
        elif sample.finish_reason == "error":
            assert (request_id, 0) in self.failed or (request_id, sample.index) in self.failed
            assert "broken" in sample.error
        else:
            assert sample.finish_reason == "abort" and request_id in self.aborted
        moments = [line.arrival, *([] if line.scheduled is None else [line.scheduled]), *line.token_times, line.end]
        assert moments == sorted(moments) and len(line.token_times) == len(tokens)
        assert (line.recomputed_tokens > 0) <= (line.preemptions > 0)

    def drain(self) -> int:
        """To the end, in a bounded number of steps: at each, the oldest sample advances by a token at least."""
        bound = sum(params.n * (len(prompt) + params.max_tokens) for prompt, params in self.alive.values()) + 1
        steps = 0
        while self.engine.has_unfinished:
            self.step()
            steps += 1
            assert steps <= bound, "somebody starves"
        assert not self.alive and not self.scheduler.waiting and not self.scheduler.running and not self.scheduler.held
        assert self.scheduler.num_free == self.num_blocks, "blocks are lost"
        enough = self.scheduler.max_batch_size * self.scheduler.pool.blocks_for(CONTEXT)
        if self.config.reserve == "max_context" or self.num_blocks >= enough:
            assert self.engine.stats["preemptions"] == 0, "there was memory for all"
        return self.runner.steps


def random_world(seed: int) -> World:
    """Any settings; pools from far too small to more than enough."""
    rng = random.Random(seed)
    config = EngineConfig(
        block_size=rng.choice([1, 2, 3, 4, 7, 16]), max_batch_size=rng.choice([1, 3, 5, 9, 16]),
        token_budget=rng.choice([1, 2, 5, 8, 13, 30, 64]), batching=rng.choice(["continuous", "continuous", "static"]),
        reserve=rng.choice(["on_demand"] * 3 + ["max_context"]), chunked_prefill=rng.random() < 0.7,
        prefix_caching=rng.random() < 0.7, order=rng.choice(["arrival", "prefix"]),
    )  # fmt: skip
    whole = -(-CONTEXT // config.block_size)
    return World(config, max(1, round(whole * rng.choice([0.6, 1, 1, 1.2, 1.5, 2, 3, 16]))), seed)


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.choice([1, 2, 3, 5, 9, 20, 30, 30]), n=rng.choice([1, 1, 1, 2, 3]), seed=rng.randrange(9),
        ignore_eos=rng.random() < 0.5, stop_token_ids=rng.sample(range(VOCAB), rng.choice([0, 0, 30])),
    )  # fmt: skip


def drive(seed: int) -> World:
    """One random run: arrivals, steps, aborts and faults in any order, then to the end."""
    world, rng = random_world(seed), random.Random(-seed - 1)
    busy = rng.choice([0.15, 0.4])
    for _ in range(rng.choice([20, 60, 120])):
        chance = rng.random()
        if chance < busy:
            length, shared = rng.choice([1, 2, 3, 4, 7, 15, 16, 17, 30]), rng.choice([0, 0.5, 1, 1])
            for _ in range(rng.choice([1, 1, 1, 3])):  # three at once are often alike
                world.arrive(length, random_params(rng), shared=round(shared * length))
        elif chance < busy + 0.04 and world.alive:
            world.abort(rng.choice([*world.alive, 10_000]))
        elif chance < busy + 0.05 and (world.scheduler.running or world.scheduler.waiting):
            world.fail(rng.choice([RuntimeError, KeyboardInterrupt])("broken"))
        else:
            world.step()
    world.drain()
    return world


def test_random_loads():
    """10,000 steps and more over any settings: never stuck, nobody starves, nothing leaks, every token is its own.

    E1: no block in the free list is in a live table. E3: what can never fit is refused, alone. E8: no running request
    waits. E12: exactly the tokens that were drawn. E13: recomputed is not cached.
    """
    steps = preempted = refused = samples = cached = passed = found_again = seed = 0
    reasons: set[str] = set()
    while steps < 12_000:
        try:
            world = drive(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}, {random_world(seed).config}") from error
        steps += world.runner.steps
        preempted += world.engine.stats["preemptions"]
        refused += world.refused
        passed += sum(world.runner.overtaken.values())
        for output in world.delivered.values():
            samples += len(output.outputs)
            reasons |= {sample.finish_reason for sample in output.outputs}
            cached += output.metrics.cached_tokens
            found_again += sum(s.timeline.preemptions > 0 == s.timeline.recomputed_tokens for s in output.outputs)
        seed += 1
    assert reasons == {"length", "stop", "abort", "error"}
    assert preempted > 150 and refused > 300 and samples > 1000, "the loads are too light to prove anything"
    assert cached > 900 and passed > 90 and found_again > 5, "the prefix cache has too little to do"


class Machine(RuleBasedStateMachine):
    """The same world, in an order that hypothesis chooses, and makes as short as it can where something fails."""

    @initialize(
        config=st.builds(
            EngineConfig, block_size=st.integers(1, 17), max_batch_size=st.integers(1, 6),
            token_budget=st.integers(1, 30), batching=st.sampled_from(["continuous", "static"]),
            reserve=st.sampled_from(["on_demand", "max_context"]), chunked_prefill=st.booleans(),
            prefix_caching=st.booleans(), order=st.sampled_from(["arrival", "prefix"]),
        ),
        num_blocks=st.integers(1, 60), seed=st.integers(0, 99),
    )  # fmt: skip
    def start(self, config, num_blocks, seed):
        self.world = World(config, num_blocks, seed)

    @rule(
        prompt=st.integers(1, 33), max_tokens=st.integers(1, 25), n=st.integers(1, 3), ignore_eos=st.booleans(),
        shared=st.integers(0, 33),
    )  # fmt: skip
    def arrive(self, prompt, max_tokens, n, ignore_eos, shared):
        self.world.arrive(prompt, SamplingParams(max_tokens=max_tokens, n=n, seed=1, ignore_eos=ignore_eos), shared)

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data())
    def abort(self, data):
        self.world.abort(data.draw(st.sampled_from(sorted(self.world.alive))))

    @precondition(lambda self: self.world.scheduler.running or self.world.scheduler.waiting)
    @rule(kind=st.sampled_from([RuntimeError, KeyboardInterrupt]))
    def fail(self, kind):
        self.world.fail(kind("broken"))

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def scheduler(num_blocks: int = 12, **settings) -> Scheduler:
    """Without a prefix cache unless asked for: all prompts here are alike, and these tests count blocks."""
    small = {"block_size": 4, "max_batch_size": 4, "token_budget": 16, "prefix_caching": False}
    return Scheduler(EngineConfig(**small | settings), 40, num_blocks)


def request(number: int, prompt_tokens: int = 6, max_tokens: int = 9, n: int = 1) -> Request:
    first, *others = [
        Request(number, list(range(1, prompt_tokens + 1)), SamplingParams(max_tokens=max_tokens, n=n), index=i)
        for i in range(n)
    ]
    first.samples = others
    return first


def advance(scheduler: Scheduler) -> list[Request]:
    """One step in which every request that may draw draws token 5."""
    step = scheduler.schedule()
    for request, count, samples in zip(step.requests, step.counts, step.samples, strict=True):
        scheduler.advance(request, count)
        if samples:
            drawing = [request, *request.samples]
            if request.samples:
                scheduler.fork(request)
            for sampled in drawing:
                sampled.append(5, 0.0)
    return step.requests


def busy(**settings) -> Scheduler:
    """Two requests run, the first of them as two samples that share a block; one waits."""
    made = scheduler(**settings)
    for number, n in ((0, 2), (1, 1), (2, 3)):
        made.add(request(number, n=n))
    for _ in range(3):
        advance(made)
    made.check()
    assert [key(r) for r in made.running] == [(0, 0), (0, 1), (1, 0)] and len(made.waiting) == 1
    return made


def leak(s):
    s.running[0].block_table.blocks.pop()


def free_in_use(s):
    s.pool.free([s.running[1].block_table.blocks[-1]])


def take_from_the_free_list(s):
    s.running[0].block_table.blocks.append(s.pool._free[0])


def swap_in_anothers_block(s):
    s.running[2].block_table.blocks[-1] = s.running[0].block_table.blocks[-1]


def free_twice(s):
    s.pool._free.append(s.pool._free[0])


def lose_a_block(s):
    s.pool._free.pop()


def count_one_user_more(s):
    s.pool._ref_counts[s.running[0].block_table.blocks[0]] += 1


def run_and_wait(s):
    s.waiting.append(s.running[0])


def run_twice(s):
    s.running.append(s.running[2])


def finish_without_leaving(s):
    s.running[0].status = Status.FINISHED


def wait_with_blocks(s):
    s.waiting[0].block_table = s.running[0].block_table.fork()


def wait_as_computed(s):
    s.waiting[0].num_computed_tokens = 3


def wait_as_running(s):
    s.waiting[0].status = Status.RUNNING


def store_beyond_the_table(s):
    s.running[1].block_table.truncate(4)


def compute_more_than_there_is(s):
    s.running[2].num_computed_tokens = s.running[2].num_tokens + 1


def crowd(s):
    s.running[2].samples = [request(9), request(10)]


FAULTS = [
    leak, free_in_use, take_from_the_free_list, swap_in_anothers_block, free_twice, lose_a_block, count_one_user_more,
    run_and_wait, run_twice, finish_without_leaving, wait_with_blocks, wait_as_computed, wait_as_running,
    store_beyond_the_table, compute_more_than_there_is, crowd,
]  # fmt: skip


def unlock_what_is_in_use(s):
    for r in s.running:
        s.prefixes.unlock(r.prefix)


def cache_a_free_block(s):
    node = s.running[0].prefix
    node.blocks[0] = s.pool._free[0]


def forget_who_caches(s):
    s.pool._ref_counts[s.running[0].prefix.blocks[0]] -= 1


CACHE_FAULTS = [unlock_what_is_in_use, cache_a_free_block, forget_who_caches]


@pytest.mark.parametrize(
    ("fault", "caching"),
    [*((fault, caching) for fault in FAULTS for caching in (True, False)), *((fault, True) for fault in CACHE_FAULTS)],
)
def test_check_finds_a_planted_fault(fault, caching):
    """E1, and its kin: the invariant that the other tests rely on is not an empty function."""
    planted = busy(prefix_caching=caching)
    fault(planted)
    with pytest.raises(AssertionError):
        planted.check()


def test_a_burst_starts_together():
    """Admission fills the batch in one step, as far as budget and blocks go."""
    full = scheduler(token_budget=24)
    for number in range(6):
        full.add(request(number))
    assert [r.id for r in advance(full)] == [0, 1, 2, 3]
    short = scheduler(num_blocks=5)  # 6 tokens and the one after: two blocks each
    for number in range(3):
        short.add(request(number))
    assert [r.id for r in advance(short)] == [0, 1]


def test_decodes_go_before_prompts():
    """E8: ten queued prompts do not hold up a decode, and are computed in the rest of each step."""
    loaded = scheduler(num_blocks=100, token_budget=8, max_batch_size=8)
    loaded.add(request(0, max_tokens=30))
    advance(loaded)
    for number in range(1, 11):
        loaded.add(request(number, prompt_tokens=30, max_tokens=30))
    for _ in range(20):
        step = loaded.schedule()
        assert step.requests[0].id == 0 and step.counts[0] == 1 and sum(step.counts) == 8
        for r, count, samples in zip(step.requests, step.counts, step.samples, strict=True):
            loaded.advance(r, count)
            if samples:
                r.append(5, 0.0)


@pytest.mark.parametrize("prompt_tokens", [3, 4, 5])
def test_blocks_at_the_edges(prompt_tokens):
    """E4: prompts of block_size - 1, block_size and block_size + 1; a block comes when a token needs it, not before."""
    edge = scheduler()
    edge.add(request(0, prompt_tokens, max_tokens=12))
    for stored in range(prompt_tokens, prompt_tokens + 11):
        advance(edge)
        assert edge.running[0].num_computed_tokens == stored
        assert len(edge.running[0].block_table.blocks) == -(-stored // 4)
        assert edge.stored_tokens == stored and edge.used_blocks == -(-stored // 4)


@pytest.mark.parametrize("together", [True, False])
def test_equal_prompts_keep_one_copy(together):
    """What one leaves behind must not crowd out the other, which computed some of it again.

    Two that start together find nothing of each other; one that starts later computes the last block again, for its
    last token. Two blocks of prompt and four of answer fill the pool.
    """
    twins = scheduler(num_blocks=6, prefix_caching=True)
    early, late = (request(number, prompt_tokens=8, max_tokens=1 + 16 * number) for number in range(2))
    twins.add(early)
    if together:
        twins.add(late)
        assert advance(twins) == [early, late]
        twins.finish(early, "length")
    else:
        assert advance(twins) == [early]
        twins.finish(early, "length")
        twins.add(late)
        assert advance(twins) == [late] and late.timeline.cached_tokens == 4
    assert twins.used_blocks == 2
    for _ in range(16):
        assert advance(twins) == [late]
        twins.check()
    assert late.num_computed_tokens == 24 and late.timeline.preemptions == 0
    twins.finish(late, "length")
    assert twins.num_free == 6


def test_shared_tokens_are_counted_once():
    """Three samples of one prompt: its full block is shared, the partial one copied by all but one."""
    forked = scheduler()
    forked.add(request(0, prompt_tokens=6, n=3))
    advance(forked)
    assert (forked.stored_tokens, forked.used_blocks) == (6, 2)
    advance(forked)
    assert (forked.stored_tokens, forked.used_blocks) == (4 + 3 * 3, 1 + 3)
    for r in list(forked.running):
        forked.finish(r, "length")
    assert forked.used_blocks == forked.stored_tokens == 0


def test_a_long_prompt_goes_whole_without_chunks():
    """One that exceeds the budget is computed in one step, and nothing but decodes is beside it."""
    whole = scheduler(num_blocks=100, chunked_prefill=False)
    whole.add(request(0))
    advance(whole)
    whole.add(request(1, prompt_tokens=30))
    whole.add(request(2))
    step = whole.schedule()
    assert [(r.id, count) for r, count in zip(step.requests, step.counts, strict=True)] == [(0, 1), (1, 30)]


def test_a_static_batch_starts_and_leaves_together():
    """What is done keeps its place and its blocks; all leave with the last, and only then the next batch starts."""
    static = scheduler(batching="static", max_batch_size=2)
    for number, max_tokens in enumerate([1, 3, 1]):
        static.add(request(number, max_tokens=max_tokens))
    first, second = advance(static)
    assert static.finish(first, "length") == [] and static.used_blocks == 4
    advance(static)
    assert [r.id for r in static.running] == [1]
    assert static.finish(second, "length") == [first, second] and static.used_blocks == 0
    assert [r.id for r in advance(static)] == [2]


def test_a_reservation_is_whole_from_the_start():
    """reserve="max_context": 40 tokens are ten blocks of four, whatever is stored; who runs is never preempted."""
    reserved = scheduler(num_blocks=25, reserve="max_context")
    for number in range(3):
        reserved.add(request(number))
    assert [r.id for r in advance(reserved)] == [0, 1]
    assert (reserved.used_blocks, reserved.stored_tokens) == (20, 12)


@pytest.mark.parametrize(
    ("settings", "asked", "message"),
    [
        ({}, {"prompt_tokens": 31, "max_tokens": 19}, "49 stored tokens needs 13 blocks of 4 .* pool has 12"),
        ({"num_blocks": 9, "reserve": "max_context"}, {}, "1 reservations of 40 tokens needs 10 .* pool has 9"),
        ({"num_blocks": 15, "reserve": "max_context"}, {"n": 2}, "2 reservations of 40 tokens needs 20 blocks"),
        ({}, {"n": 5}, "n=5 samples at once, but a batch holds 4"),
        ({"token_budget": 2}, {"n": 3}, "n=3 samples at once, but a batch holds 2"),
    ],
)  # fmt: skip
def test_what_can_never_run_is_refused_alone(settings, asked, message):
    """E3: with its need and the pool's size; the queue is as before. The largest that fits is taken."""
    small = scheduler(**settings)
    with pytest.raises(ValueError, match=message):
        small.add(request(0, **asked))
    assert not small.waiting
    fits = scheduler()
    fits.add(request(0, prompt_tokens=31, max_tokens=18))


def test_a_request_ends_once():
    """Finishing again is refused."""
    s = busy()
    done = s.running[0]
    s.finish(done, "stop")
    with pytest.raises(ValueError, match="finished already"):
        s.finish(done, "stop")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("block_size", 0), ("block_size", 1.5), ("num_blocks", 0), ("num_blocks", True), ("max_batch_size", -1),
        ("token_budget", "many"), ("batching", "dynamic"), ("reserve", True), ("chunked_prefill", 1),
        ("prefix_caching", "yes"), ("order", "random"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(setting, value):
    """The message names the setting and the value."""
    with pytest.raises(ValueError, match=f"{setting} must be .*, got {value!r}"):
        EngineConfig(**{setting: value})
    with pytest.raises(ValueError, match="config must be an EngineConfig, got {}"):
        Scheduler({}, 40, 12)
