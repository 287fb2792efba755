"""The engine and `LLM`: every path against naive generation or `transformers`, and every door with bad input."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from minillm import naive, runner
from minillm.config import EngineConfig, ModelConfig
from minillm.engine import Engine
from minillm.llm import LLM
from minillm.model import Transformer
from minillm.naive import NoCache
from minillm.request import Status
from minillm.runner import ModelRunner, default_num_blocks
from minillm.sampling import SamplingParams, probabilities
from minillm.tokenizer import load_tokenizer
from minillm.weights import save_model

CONFIG = ModelConfig(
    vocab_size=83, dim=24, n_layers=2, n_heads=6, n_kv_heads=3, head_dim=10, ffn_dim=31, max_context=64,
    eos_token_ids=(7,),
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
SMALL = EngineConfig(block_size=4, num_blocks=60, max_batch_size=8, token_budget=32)


@pytest.fixture(scope="module")
def model():
    """Random weights, large enough that the next token depends on the whole prefix."""
    made = Transformer(CONFIG).initialize(3).double().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter *= 8
    return made


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


@pytest.fixture(scope="module")
def tiny():
    return LLM("tiny", EngineConfig(num_blocks=64), dtype="float64")


def make_engine(model, config: EngineConfig = SMALL, **options) -> Engine:
    """Its cache is full of NaN, so that a read before a write shows."""
    made = Engine(ModelRunner(model, config), config, **options)
    made.runner.cache.k.fill_(torch.nan)
    made.runner.cache.v.fill_(torch.nan)
    return made


def run(engine: Engine) -> dict:
    """To the end, the books checked after every step; all outputs by id, and every block to be had again."""
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        engine.scheduler.check()
    assert all_free(engine)
    return done


def all_free(engine: Engine) -> bool:
    """Nobody uses a block: each is free, or only the prefix cache has it."""
    return engine.scheduler.num_free == engine.scheduler.pool.num_blocks


def tokens(output) -> list[list[int]]:
    return [sample.token_ids for sample in output.outputs]


def some_prompts(count: int, seed: int = 0, longest: int = 20) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(CONFIG.vocab_size) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


# What comes out


@pytest.mark.parametrize("caching", [True, False])
def test_identical_prompts_in_one_step(model, caching):
    """E1: the first of them leaves early; its blocks are used again, and the others' are still theirs."""
    prompt, other = some_prompts(2, seed=1)
    engine = make_engine(model, replace(SMALL, num_blocks=24, prefix_caching=caching))
    ids = [engine.add_request(prompt, replace(GREEDY, max_tokens=n)) for n in (1, 9, 5, 9)]
    done = {output.request_id: output for output in engine.step() if output.finished}
    assert list(done) == [0]
    engine.add_request(other, GREEDY)
    done |= run(engine)
    expected = naive.generate(model, prompt, GREEDY)
    assert [tokens(done[id]) for id in ids] == [[expected[:n]] for n in (1, 9, 5, 9)]
    assert tokens(done[4]) == [naive.generate(model, other, GREEDY)]


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_exactly_the_tokens_asked_for(model, max_tokens):
    """E12: the first one included."""
    engine, params = make_engine(model), replace(GREEDY, max_tokens=max_tokens)
    engine.add_request([5, 6], params)
    output = run(engine)[0]
    assert tokens(output) == [naive.generate(model, [5, 6], params)] and len(tokens(output)[0]) == max_tokens
    assert output.outputs[0].finish_reason == "length" and output.prompt_ids == [5, 6]


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_ragged_batch_gives_what_transformers_gives_each_alone(model, batching, tmp_path):
    """E16: no padding, no shifted position, no NaN; nine prompts of 1 to 19 tokens in float64."""
    transformers = pytest.importorskip("transformers")
    save_model(model, tmp_path, torch.float64)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    peer.generation_config.eos_token_id = None
    prompts, engine = some_prompts(9, seed=2), make_engine(model, replace(SMALL, batching=batching))
    for prompt in prompts:
        engine.add_request(prompt, GREEDY)
    done = run(engine)
    for id, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        made = peer.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9, pad_token_id=0
        )
        assert tokens(done[id]) == [made[0, len(prompt) :].tolist()]


def test_the_first_new_token_stands_at_the_length_of_the_prompt(model):
    """E6: whole or in chunks, positions go 0, 1, 2 ... without a gap."""
    for budget in (32, 4):
        engine, seen = make_engine(model, replace(SMALL, token_budget=budget)), []
        hook = model.rope.register_forward_hook(lambda module, args, out, seen=seen: seen.append(args[0].tolist()))
        engine.add_request([9] * 10, replace(GREEDY, max_tokens=4))
        run(engine)
        hook.remove()
        assert sum(seen, []) == list(range(13)) and seen[-3:] == [[10], [11], [12]]


@pytest.mark.parametrize("caching", [False, True])
def test_recomputed_tokens_are_not_cached_ones(model, caching):
    """E13: a preempted request counts what it computes twice, and that alone; its tokens are the same.

    It loses 12 tokens. What it finds of them again in the prefix cache is neither recomputed nor a hit.
    """
    engine = make_engine(model, replace(SMALL, num_blocks=6, prefix_caching=caching))
    prompts = [[1] * 8, [2] * 8]
    for prompt in prompts:
        engine.add_request(prompt, GREEDY)
    done = run(engine)
    older, newer = (done[id].metrics for id in (0, 1))
    assert (older.preemptions, older.recomputed_tokens) == (0, 0)
    assert newer.preemptions == engine.stats["preemptions"] == 1
    assert newer.recomputed_tokens == (4 if caching else 12)
    assert older.cached_tokens == newer.cached_tokens == 0
    assert [tokens(done[id])[0] for id in (0, 1)] == [naive.generate(model, prompt, GREEDY) for prompt in prompts]
    assert engine.stats["tokens"] == 2 * (8 + 9 - 1) + newer.recomputed_tokens


# Samples and seeds


def test_samples_of_one_prompt_are_independent(model):
    """E18: 400 first tokens of one prompt follow the model's own distribution (chi-squared)."""
    prompt, params = [3, 1, 4], SamplingParams(max_tokens=1, temperature=2.0, seed=5, n=400)
    engine = make_engine(model, EngineConfig(block_size=4, num_blocks=9, max_batch_size=400))
    engine.add_request(prompt, params)
    firsts = torch.tensor([ids[0] for ids in tokens(run(engine)[0])])
    hidden = model(torch.tensor(prompt), torch.arange(3), NoCache())
    expected = 400 * probabilities(model.logits(hidden[-1:]), [params])[0]
    counts = torch.bincount(firsts, minlength=83).double()
    likely = expected >= 5
    groups = [(counts[i], expected[i]) for i in likely.nonzero()[:, 0]]
    groups.append((counts[~likely].sum(), expected[~likely].sum()))
    assert len(groups) > 5
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in groups).item()
    assert statistic < 3.5 * len(groups), (statistic, len(groups))


def test_a_seed_gives_the_same_samples_whatever_else_is_in_the_batch(model):
    """Alone, in a crowd, preempted, and however many samples are asked for; the first is that of naive generation."""
    prompt, params = [8, 2, 8], SamplingParams(max_tokens=12, top_p=0.9, top_k=30, seed=11, n=4)
    alone = make_engine(model)
    alone.add_request(prompt, params)
    expected = tokens(run(alone)[0])
    assert expected[0] == naive.generate(model, prompt, replace(params, n=1))
    assert len({tuple(sample) for sample in expected}) == 4
    crowd = make_engine(model, replace(SMALL, num_blocks=16, token_budget=9))
    for other in some_prompts(3, seed=3):
        crowd.add_request(other, SamplingParams(max_tokens=10, ignore_eos=True))
    id = crowd.add_request(prompt, params)
    pair = crowd.add_request(prompt, replace(params, n=2))
    done = run(crowd)
    assert tokens(done[id]) == expected and tokens(done[pair]) == expected[:2]
    assert crowd.stats["preemptions"] > 0


def test_without_a_seed_every_request_is_another(model):
    """No two of 20 requests give the same 12 tokens."""
    engine = make_engine(model)
    for _ in range(20):
        engine.add_request([4], SamplingParams(max_tokens=12, temperature=3.0, ignore_eos=True))
    assert len({tuple(tokens(output)[0]) for output in run(engine).values()}) == 20


def test_samples_share_the_blocks_of_their_prompt(model):
    """Four samples of 10 tokens in blocks of 4: two full blocks once, and of the partial one three copies."""
    engine = make_engine(model, trace=True)
    engine.add_request([6] * 10, replace(GREEDY, n=4, max_tokens=4))
    run(engine)
    assert [(record.used_blocks, record.stored_tokens) for record in engine.trace[:3]] == [
        (3, 10),
        (2 + 4, 8 + 4 * 3),
        (2 + 4, 8 + 4 * 4),
    ]
    assert [record.requests for record in engine.trace[:2]] == [[(0, 0, 10)], [(0, i, 1) for i in range(4)]]


# When it ends


def test_stopping_like_naive_generation(model):
    """Stop ids, the model's own end of text, and ignore_eos: the same tokens, and the right reason."""
    ends = set()
    for seed, prompt in enumerate(some_prompts(30, seed=4, longest=6)):
        params = SamplingParams(
            max_tokens=20, seed=seed, stop_token_ids=(5, 6) if seed % 2 else (), ignore_eos=seed % 3 == 0
        )
        engine = make_engine(model)
        engine.add_request(prompt, params)
        output, expected = run(engine)[0], naive.generate(model, prompt, params)
        assert tokens(output) == [expected]
        stopped = expected[-1] in params.stop_token_ids or (expected[-1] == 7 and not params.ignore_eos)
        assert output.outputs[0].finish_reason == ("stop" if stopped else "length")
        ends.add((stopped, expected[-1]))
    assert {(True, 7), (True, 5), (True, 6)} <= ends


def scripted(llm: LLM, monkeypatch, *texts: list[int]) -> None:
    """The runner draws these tokens, for each request its own, whatever the model would say."""
    scripts: dict[int, list[int]] = {}
    left = list(texts)

    def execute(step):
        drawn = []
        for request, samples in zip(step.requests, step.samples, strict=True):
            script = scripts.setdefault(request.id, []) or scripts[request.id]
            if not script and not request.output_ids:
                script += left.pop(0)
            drawn.append([script.pop(0) for _ in range(samples)])
        return drawn

    monkeypatch.setattr(llm.engine.runner, "execute", execute)


ODD = "Zoë writes 🙂🙃 in 北京, naïvely: «ça va». END"


def test_a_stream_is_whole_characters(tiny, tokenizer, monkeypatch):
    """E20: no piece has a replacement mark, though many tokens are parts of a character; joined, it is the text."""
    ids = tokenizer.encode(ODD, add_special_tokens=False)
    assert any("\ufffd" in tokenizer.decode([token]) for token in ids), "no token is half a character"
    scripted(tiny, monkeypatch, ids)
    pieces = list(tiny.stream("hello", SamplingParams(max_tokens=len(ids), ignore_eos=True)))
    assert "".join(pieces) == ODD and "" not in pieces
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stop", [["END"], ["va».", "END"], ["x", "🙃 in", "京,"], ["Zoë"]])
def test_a_stream_never_shows_the_start_of_a_stop_string(tiny, tokenizer, monkeypatch, stop):
    """E20: what was sent is always the start of the final text, which ends before the first stop string."""
    ids = tokenizer.encode(ODD + " and more", add_special_tokens=False)
    scripted(tiny, monkeypatch, ids, ids)
    params = SamplingParams(max_tokens=len(ids), ignore_eos=True, stop=stop)
    expected = ODD[: min(ODD.index(s) for s in stop if s in ODD)]
    sent = ""
    for piece in tiny.stream("hello", params):
        sent += piece
        assert expected.startswith(sent)
    assert sent == expected
    [output] = tiny.generate(["hello"], params)
    assert output.outputs[0].text == expected and output.outputs[0].finish_reason == "stop"


def test_half_a_character_at_the_end(tiny, tokenizer, monkeypatch):
    """A character cut by max_tokens is one replacement mark, at the very end."""
    ids = tokenizer.encode("ab🙂", add_special_tokens=False)[:-1]
    scripted(tiny, monkeypatch, ids)
    text = "".join(tiny.stream("hello", SamplingParams(max_tokens=len(ids), ignore_eos=True)))
    assert text.startswith("ab") and set(text[2:]) == {"\ufffd"}


# Aborting


def test_abort_in_every_state(model):
    """Waiting, in the middle of a prompt with samples to come, decoding, with samples running, gone, never there."""
    engine = make_engine(model, replace(SMALL, max_batch_size=4, token_budget=5))
    ids = [engine.add_request([n + 1] * 9, replace(GREEDY, n=n)) for n in (1, 3, 2)]
    engine.step()
    engine.step()
    first, second, third = (engine._samples[id] for id in ids)
    assert len(first[0].output_ids) == 1 and second[0].status is Status.RUNNING and not second[0].output_ids
    assert len(second[0].samples) == 2 and third[0].status is Status.WAITING
    for id, made in ((ids[2], [[], []]), (ids[1], [[], [], []]), (ids[0], [first[0].output_ids])):
        output = engine.abort(id)
        engine.scheduler.check()
        assert tokens(output) == made and output.finished
        assert all(sample.finish_reason == "abort" and sample.timeline.end for sample in output.outputs)
        assert engine.abort(id) is None and not engine.is_unfinished(id)
    assert not engine.has_unfinished and all_free(engine) and engine.step() == []
    forked = engine.add_request([1, 2], replace(GREEDY, n=3))
    engine.step()
    assert [len(ids) for ids in tokens(engine.abort(forked))] == [1, 1, 1] and all_free(engine)
    assert engine.abort(99) is None


def test_abort_in_a_static_batch(model):
    """One that is done keeps its reason, one that runs ends now; both are delivered when the batch leaves."""
    engine = make_engine(model, replace(SMALL, batching="static"))
    for n in (1, 9, 4):
        engine.add_request([n], replace(GREEDY, max_tokens=n))
    engine.step()
    held = engine.abort(0)
    assert not held.finished and held.outputs[0].finish_reason == "length"
    cut = engine.abort(1)
    assert not cut.finished and cut.outputs[0].finish_reason == "abort" and len(tokens(cut)[0]) == 1
    done = run(engine)
    assert [done[id].outputs[0].finish_reason for id in range(3)] == ["length", "abort", "length"]
    assert len({output.metrics.end for output in done.values()}) == 1
    assert [len(tokens(done[id])[0]) for id in range(3)] == [1, 1, 4]


# Faults


def fails_once(engine: Engine, monkeypatch, error: BaseException, at: int = 2) -> None:
    """The runner raises at its `at`-th step."""
    steps, execute = itertools.count(1), engine.runner.execute

    def failing(step):
        if next(steps) == at:
            raise error
        return execute(step)

    monkeypatch.setattr(engine.runner, "execute", failing)


def test_a_step_that_raises(model, monkeypatch):
    """Its requests end with the reason; the one that waits is served as if nothing had been."""
    engine = make_engine(model, replace(SMALL, max_batch_size=3))
    for prompt in ([1, 2], [3]):
        engine.add_request(prompt, replace(GREEDY, n=1 if prompt == [3] else 2))
    waiting = engine.add_request([4, 5], GREEDY)
    fails_once(engine, monkeypatch, RuntimeError("out of memory"))
    done = run(engine)
    for id in (0, 1):
        assert done[id].finished
        for sample in done[id].outputs:
            assert (sample.finish_reason, sample.error) == ("error", "RuntimeError: out of memory")
            assert len(sample.token_ids) == len(sample.timeline.token_times) == 1 and sample.timeline.end
    assert tokens(done[waiting]) == [naive.generate(model, [4, 5], GREEDY)]
    assert done[waiting].outputs[0].error is None


@pytest.mark.parametrize("wrong", [[], [[1]], [[1], []], [[1], [2, 3]], None])
def test_a_runner_that_draws_too_few_or_too_many(model, monkeypatch, wrong):
    """The engine does not go on with half a step: both requests end, the next one is served."""
    engine = make_engine(model)
    engine.add_request([1, 2], GREEDY)
    engine.add_request([3], GREEDY)
    execute = engine.runner.execute
    monkeypatch.setattr(engine.runner, "execute", lambda step: wrong)
    outputs = engine.step()
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    assert not engine.has_unfinished and all_free(engine)
    monkeypatch.setattr(engine.runner, "execute", execute)
    id = engine.add_request([4], GREEDY)
    assert tokens(run(engine)[id]) == [naive.generate(model, [4], GREEDY)]


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_an_interrupt_leaves_the_engine_usable(model, monkeypatch, batching):
    """Ctrl-C in `generate` goes through; nothing of it is left, and the next call is right."""
    llm = LLM(model, replace(SMALL, batching=batching))
    fails_once(llm.engine, monkeypatch, KeyboardInterrupt(), at=3)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(some_prompts(12, seed=5), GREEDY)
    assert not llm.engine.has_unfinished and all_free(llm.engine)
    [output] = llm.generate([[4, 2]], GREEDY)
    assert tokens(output) == [naive.generate(model, [4, 2], GREEDY)]


def test_a_stream_says_what_failed(tiny, monkeypatch):
    """RuntimeError with the reason; the engine goes on."""
    fails_once(tiny.engine, monkeypatch, MemoryError("no room"))
    with pytest.raises(RuntimeError, match="MemoryError: no room"):
        list(tiny.stream("Once", SamplingParams(max_tokens=5, ignore_eos=True)))
    assert not tiny.engine.has_unfinished
    assert tiny.generate("Once", SamplingParams(max_tokens=2, ignore_eos=True))[0].finished


def test_logits_that_are_not_numbers_are_an_error_of_the_request(model):
    """A model whose weights are broken: the reason names them."""
    broken = Transformer(CONFIG).initialize(1).requires_grad_(False)
    broken.norm.weight.fill_(torch.nan)
    [output] = LLM(broken, SMALL).generate([[1, 2]], GREEDY)
    assert output.outputs[0].finish_reason == "error" and "nan as its largest value" in output.outputs[0].error


# The front door


def test_results_come_in_the_order_of_the_prompts(model):
    """However long each takes, and with parameters of its own."""
    prompts = some_prompts(10, seed=6)
    each = [replace(GREEDY, max_tokens=1 + (7 * n) % 11) for n in range(10)]
    outputs = LLM(model, SMALL).generate(prompts, each)
    expected = [naive.generate(model, p, params) for p, params in zip(prompts, each, strict=True)]
    assert [tokens(output)[0] for output in outputs] == expected
    assert [output.prompt_ids for output in outputs] == prompts


def test_text_in_text_out(tiny):
    """tiny's own tokenizer: a text, its ids, a single text and a stream all give the same."""
    params = SamplingParams(max_tokens=12, temperature=0)
    ids = tiny.tokenizer.encode("Once upon a time")
    expected = naive.generate(tiny.model, ids, params)
    outputs = [*tiny.generate(["Once upon a time", ids], params), *tiny.generate("Once upon a time", params)]
    for output in outputs:
        assert output.prompt_ids == ids and tokens(output) == [expected]
        assert output.outputs[0].text == tiny.tokenizer.decode(expected)
    assert "".join(tiny.stream("Once upon a time", params)) == outputs[0].outputs[0].text
    assert tiny.generate([]) == []


def test_smollm2_speaks():
    """The chat model's tokenizer ends the answer by itself."""
    try:
        llm = LLM("smollm2", EngineConfig(num_blocks=16))
    except (ValueError, ImportError) as missing:
        pytest.skip(str(missing))
    prompt = llm.tokenizer.chat_prompt([{"role": "user", "content": "What is the capital of France? One word."}])
    [output] = llm.generate([prompt], SamplingParams(max_tokens=16, temperature=0))
    assert "Paris" in output.outputs[0].text and output.outputs[0].finish_reason == "stop"


def test_several_streams_at_once(tiny):
    """Read in turn, abandoned, or with a `generate` in between: each gets all of its own text."""
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    starts = ["Once upon", "The old man", "She"]
    expected = [output.outputs[0].text for output in tiny.generate(starts, params)]
    streams = [tiny.stream(start, replace(params, max_tokens=10)) for start in starts]
    texts = ["", "", ""]
    for pieces in itertools.zip_longest(*streams, fillvalue=""):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert texts == expected
    stream, other = tiny.stream(starts[0], params), tiny.stream(starts[1], params)
    begun = next(stream)
    next(other)
    other.close()
    [output] = tiny.generate(starts[2], params)
    assert output.outputs[0].text == expected[2]
    assert begun + "".join(stream) == expected[0]
    assert not tiny.engine.has_unfinished and all_free(tiny.engine)


def test_a_request_that_somebody_else_took(tiny):
    """Stepping the engine by hand between two pieces must not leave a stream waiting for ever."""
    stream = tiny.stream("Once", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    next(stream)
    while tiny.engine.has_unfinished:
        tiny.engine.step()
    with pytest.raises(RuntimeError, match="was aborted, or taken by another caller"):
        list(stream)
    assert not tiny.engine.has_unfinished


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["Once"], None, r"prompt 0: no tokenizer \(none was given\): give prompts as lists of token ids"),
        ([[1], []], GREEDY, "prompt 1: the prompt is empty"),
        ([[1], [83]], GREEDY, r"prompt 1: prompt_ids\[0\] is 83, outside the vocabulary of 0 to 82"),
        ([1, 2], None, "prompt 0: prompt_ids must be a list of token ids, got int"),
        (5, None, "prompts must be a text, or a list of texts or of lists of token ids; got 5"),
        (None, None, "prompts must be a text"),
        ({"prompt": [1]}, None, "prompts must be a text"),
        ([[1]], [GREEDY, GREEDY], "1 prompts and 2 SamplingParams"),
        ([[1]], {"max_tokens": 3}, "prompt 0: params must be SamplingParams, got dict"),
        ([[1]], [7], "prompt 0: params must be SamplingParams, got int"),
        ([[1] * 60], [GREEDY], "prompt 0: 60 prompt tokens . max_tokens=9 exceed the model's context of 64"),
        ([[1]], SamplingParams(9, n=9), "prompt 0: n=9 samples at once, but a batch holds 8"),
        ([[1]], SamplingParams(9, stop="x"), "prompt 0: stop strings .* need a tokenizer"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(model, prompts, params, message):
    """The message says which prompt, which value and what would do; nothing stays behind."""
    llm = LLM(model, SMALL)
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert not llm.engine.has_unfinished and llm.engine.stats["steps"] == 0


def test_other_doors(model, tiny):
    """The stream, the engine, its clock and its config."""
    with pytest.raises(ValueError, match="no tokenizer .*, so no text to stream"):
        next(LLM(model, SMALL).stream([1]))
    with pytest.raises(ValueError, match="a stream is one sample, got n=2"):
        next(tiny.stream("Once", SamplingParams(n=2)))
    with pytest.raises(ValueError, match="params must be SamplingParams, got str"):
        next(tiny.stream("Once", "fast"))
    with pytest.raises(ValueError, match="config must be an EngineConfig, got {'block_size': 4}"):
        LLM(model, {"block_size": 4})
    with pytest.raises(ValueError, match="tokenizer must be a Tokenizer, .* got 3"):
        LLM("tiny", tokenizer=3)
    with pytest.raises(ValueError, match="this model is on cpu in torch.float64: move it with model.to"):
        LLM(model, SMALL, dtype="float32")
    with pytest.raises(ValueError, match="block_size is 16 in this config and 4 in the runner's"):
        Engine(ModelRunner(model, SMALL))
    engine = make_engine(model)
    for arrival in ("now", float("nan"), float("inf"), -float("inf"), engine.runner.now() + 1e6):
        with pytest.raises(ValueError, match="arrival must be a moment up to now, .* got"):
            engine.add_request([1], GREEDY, arrival=arrival)
    assert not engine.has_unfinished


def test_a_shape_has_no_tokenizer():
    """Random weights serve token ids; a text gets the reason why there is no tokenizer."""
    shape = replace(CONFIG, vocab_size=50)
    llm = LLM(Transformer(shape).initialize(1).requires_grad_(False), SMALL)
    assert len(tokens(llm.generate([[1, 2]], GREEDY)[0])[0]) == 9


# Clocks and memory


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_timelines(model, batching):
    """Arrival, start, tokens and end follow each other; what is earlier in the queue starts no later."""
    engine = make_engine(model, replace(SMALL, batching=batching, max_batch_size=3))
    before = engine.runner.now()
    for n, prompt in enumerate(some_prompts(8, seed=7)):
        engine.add_request(prompt, replace(GREEDY, max_tokens=1 + n % 4), arrival=before)
    lines = [output.metrics for _, output in sorted(run(engine).items())]
    for n, line in enumerate(lines):
        moments = [line.arrival, line.scheduled, *line.token_times, line.end]
        assert moments == sorted(moments) and line.arrival == before and len(line.token_times) == 1 + n % 4
        assert line.ttft > 0 and len(line.itl) == n % 4
    assert [line.scheduled for line in lines] == sorted(line.scheduled for line in lines)
    ends = [line.end for line in lines]
    if batching == "static":
        assert ends[0] == ends[1] == ends[2] < ends[3] == ends[4] == ends[5] < ends[6] == ends[7]
    else:
        assert lines[0].end < lines[1].end < lines[2].end


def test_what_the_engine_counts(model):
    """Steps, tokens and seconds: of each prompt and its new tokens, all but the last are computed."""
    engine = make_engine(model, trace=True)
    prompts = some_prompts(5, seed=8)
    for prompt in prompts:
        engine.add_request(prompt, GREEDY)
    run(engine)
    stats = engine.stats
    assert stats["tokens"] == sum(len(prompt) + 8 for prompt in prompts) and stats["preemptions"] == 0
    assert stats["steps"] == len(engine.trace) and 0 < stats["runner_seconds"] <= stats["seconds"]
    assert sum(count for record in engine.trace for _, _, count in record.requests) == stats["tokens"]
    assert all(record.start <= record.end for record in engine.trace)
    assert engine.trace[-1].stored_tokens == 0
    assert engine.trace[-1].used_blocks == engine.scheduler.prefixes.num_blocks > 0  # what the cache keeps


def test_the_real_clock(model, monkeypatch):
    """It runs; waiting sleeps for what is left, and not at all for a moment that has passed."""
    slept, clock = [], ModelRunner(model, SMALL)
    assert clock.now() <= clock.now()
    monkeypatch.setattr(clock, "now", lambda: 100.0)
    monkeypatch.setattr(runner.time, "sleep", slept.append)
    clock.wait_until(102.5)
    clock.wait_until(90.0)
    assert slept == [2.5, 0.0]


def test_how_many_blocks_a_pool_has(model, monkeypatch):
    """A full batch of full contexts, or what memory allows of it, but one whole context at least."""
    per_token = 2 * CONFIG.n_layers * CONFIG.n_kv_heads * CONFIG.head_dim * 8  # keys and values, float64
    config = EngineConfig(block_size=5, max_batch_size=3)
    whole = 13  # 64 tokens in blocks of 5
    assert default_num_blocks(model, config) == ModelRunner(model, config).num_blocks == 3 * whole
    monkeypatch.setattr(runner, "CACHE_BYTES", 20 * 5 * per_token + 1)
    assert default_num_blocks(model, config) == 20
    monkeypatch.setattr(runner, "CACHE_BYTES", 1)
    assert default_num_blocks(model, config) == whole
    on_gpu = SimpleNamespace(config=CONFIG, dtype=torch.float64, device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (25 * 5 * per_token, 10**12))
    assert default_num_blocks(on_gpu, config) == 20  # 80% of what is free
    assert ModelRunner(model, replace(config, num_blocks=7)).num_blocks == 7
