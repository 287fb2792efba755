"""Prefill and decode apart: the same tokens, what travels and in which order, and what happens when a process dies."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from one_process import Wire, arrived, decode, prefill
from test_equivalence import random_model, small_config, workload

from minillm import kv_cache, kv_transfer, naive
from minillm.config import EngineConfig
from minillm.disaggregate import Disaggregated
from minillm.engine import Engine
from minillm.kv_transfer import GOODBYE, PrefillRunner, SendingView
from minillm.paged_cache import BlockPool, BlockTable, PagedCache
from minillm.sampling import SamplingParams
from minillm.weights import load_model

CONFIG = EngineConfig(token_budget=9, block_size=4, num_blocks=30, max_batch_size=4)
GREEDY, SAMPLED = SamplingParams(max_tokens=7, temperature=0), SamplingParams(max_tokens=6, temperature=0.9, seed=3)
BOUND = 180.0  # seconds in which anything must end, on a very busy machine too


# Without processes: both sides in one, over a list instead of a network.


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_in_one_process_any_split_of_the_work_gives_naive_tokens(monkeypatch, seed, sampled):
    """E5: chunks of every size, blocks of every size, pools that run dry on both sides; odd shapes, fresh weights."""
    wire, rng = Wire(monkeypatch), random.Random(seed)
    model = random_model(small_config(rng), torch.float64, seed)
    prompts = workload(model.config, rng)
    params = SamplingParams(max_tokens=9, temperature=0.8 if sampled else 0, seed=seed)
    expected = [naive.generate(model, prompt, params) for prompt in prompts]
    size = rng.choice([1, 3, 4, 16])
    smallest = max(-(-(len(prompt) + 8) // size) for prompt in prompts)
    for num_blocks, budget in ((64 * 16 // size, 64), (smallest, rng.randrange(2, 9)), (smallest + 2, 5)):
        config = EngineConfig(
            block_size=size, num_blocks=num_blocks, token_budget=budget, max_batch_size=3, prefix_caching=False
        )
        prefill(model, prompts, params, config)
        assert decode(model, prompts, params, config, arrived(model)) == expected
        assert not wire.sent


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_prompts_around_a_block_border_arrive_whole(monkeypatch, length):
    """E4, E6: block_size - 1, block_size, block_size + 1; the first decoded position is the prompt's length."""
    Wire(monkeypatch)
    model = random_model(small_config(random.Random(length)), torch.float64, length)
    prompt = [(7 * i + length) % model.config.vocab_size for i in range(length)]
    config = EngineConfig(block_size=4, num_blocks=12, token_budget=3, max_batch_size=2, prefix_caching=False)
    prefill(model, [prompt], GREEDY, config)
    (ready,) = arrived(model)
    shape = (model.config.n_layers, 2, length, model.config.n_kv_heads, model.config.head_dim)
    assert ready.kv.shape == shape
    assert decode(model, [prompt], GREEDY, config, [ready]) == [naive.generate(model, prompt, GREEDY)]


def test_a_preempted_prefill_sends_its_prompt_anew(monkeypatch):
    """What was sent before the preemption is dropped, not put in front."""
    Wire(monkeypatch)
    model = random_model(small_config(random.Random(8)), torch.float64, 8)
    prompts = [[(5 * i + j) % model.config.vocab_size for i in range(18)] for j in range(3)]
    config = EngineConfig(block_size=2, num_blocks=12, token_budget=7, max_batch_size=3, prefix_caching=False)
    runner = PrefillRunner(model, config)
    engine = Engine(runner, config)
    for job, prompt in enumerate(prompts):
        runner.jobs[engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))] = job
    engine.step(), engine.step()
    victim = next(r for r in engine.scheduler.running if 0 < r.num_computed_tokens < 18)
    engine.scheduler._preempt(victim, type("Step", (), {"preempted": []})())
    while engine.has_unfinished:
        engine.step()
    kv_transfer.dist.send(torch.tensor([GOODBYE]), kv_transfer.DECODE)
    ready = arrived(model)
    assert sorted(r.job for r in ready) == [0, 1, 2] and {r.kv.shape[2] for r in ready} == {18}
    roomy = EngineConfig(block_size=2, num_blocks=90, prefix_caching=False)
    renamed = [kv_transfer.Computed(100 + r.job, r.kv, r.token, r.moment) for r in ready]
    expected = [naive.generate(model, prompt, GREEDY) for prompt in prompts]
    assert decode(model, prompts, GREEDY, roomy, renamed) == expected


def test_each_layer_leaves_before_the_next_one_is_computed(monkeypatch):
    """The transfer hides behind the prefill only if a layer's keys and values do not wait for the others."""
    wire, events = Wire(monkeypatch), []
    model = random_model(small_config(random.Random(2)), torch.float64, 2)
    layers = model.config.n_layers
    cache, pool = PagedCache(model.config, 8, 4, dtype=torch.float64), BlockPool(8, 4)
    (table := BlockTable(pool)).prepare(0, 11)

    class Watched:
        inner = cache.view([table], [0], [11])

        def attend(self, layer, q, k, v):
            events.append((layer, len(wire.sent)))
            return self.inner.attend(layer, q, k, v)

    view = SendingView(Watched())
    with torch.inference_mode():
        model(torch.arange(11), torch.arange(11), view)
    assert events == [(layer, layer + 1) for layer in range(layers)]
    slots = torch.tensor(table.slots(0, 11))
    for layer, message in enumerate(wire.sent):
        assert torch.equal(message[0], cache.k[layer, slots // 4, :, slots % 4])
        assert torch.equal(message[1], cache.v[layer, slots // 4, :, slots % 4])
    assert len(view.sending) == layers


def test_what_is_sent_is_counted_to_the_byte(monkeypatch):
    """Bytes of a step: its tokens times the KV bytes of one."""
    Wire(monkeypatch)
    model = random_model(small_config(random.Random(4)), torch.float64, 4)
    runner = PrefillRunner(model, EngineConfig(num_blocks=20, prefix_caching=False))
    engine = Engine(runner, EngineConfig(num_blocks=20, prefix_caching=False))
    for job, length in enumerate((5, 9)):
        runner.jobs[engine.add_request([1] * length, SamplingParams(max_tokens=1, ignore_eos=True))] = job
    engine.step()
    assert (runner.last.tokens, runner.last.bytes) == (14, 14 * model.config.kv_bytes_per_token("float64"))
    assert 0 <= runner.last.waited <= runner.last.seconds


def test_a_connection_that_breaks_is_an_arrival_too(monkeypatch):
    """The decode process hears of it in the place where it waits for prompts."""
    wire = Wire(monkeypatch)
    model = random_model(small_config(random.Random(5)), torch.float64, 5)
    prefill(model, [[1, 2, 3], [4] * 6], GREEDY, EngineConfig(num_blocks=20, prefix_caching=False))
    del wire.sent[-2:]  # the drawn tokens and the goodbye
    (error,) = arrived(model)
    assert isinstance(error, RuntimeError) and "connection closed" in str(error)


# Two processes.


@pytest.fixture(scope="module")
def model():
    return load_model("tiny", "cpu", torch.float64)


@pytest.fixture(scope="module")
def llm():
    with Disaggregated("tiny", CONFIG, dtype="float64", timeout=BOUND) as started:
        yield started


def prompts_of(lengths, vocab_size=500, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_two_processes_give_the_tokens_of_one(llm, model, params):
    """Prompts around block borders and above the budget of a step, so that some are chunks."""
    prompts = prompts_of([1, 3, 4, 5, 8, 9, 13, 23], seed=params.temperature == 0)
    before = len(llm.transfers)
    outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == [naive.generate(model, p, params) for p in prompts]
    assert all(output.finished and output.outputs[0].finish_reason in ("length", "stop") for output in outputs)
    assert all(0 < output.metrics.ttft <= output.metrics.latency < BOUND for output in outputs)
    sent = llm.transfers[before:]
    assert len(sent) > 1 and sum(t.tokens for t in sent) == sum(map(len, prompts))
    assert all(t.bytes == t.tokens * model.config.kv_bytes_per_token("float64") for t in sent)


def test_the_decode_process_preempts_and_recomputes(llm, model):
    """Three requests that grow to 84 tokens each in a pool of 120; the tokens are those of a contiguous cache."""
    prompts = prompts_of([24, 23, 22], seed=5)
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [kv_cache.generate(model, p, params) for p in prompts]
    assert sum(output.metrics.preemptions for output in outputs) > 0
    assert all(output.metrics.recomputed_tokens >= 22 for output in outputs if output.metrics.preemptions)


def test_one_token_and_a_stop_token_end_a_request_at_once(llm, model):
    """E12: exactly the tokens asked for; the first one may be the last."""
    (prompt,) = prompts_of([6], seed=9)
    first = naive.generate(model, prompt, GREEDY)[0]
    one = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))[0].outputs[0]
    assert (one.token_ids, one.finish_reason) == ([first], "length")
    stopped = llm.generate([prompt], SamplingParams(max_tokens=9, temperature=0, stop_token_ids=(first,)))[0]
    assert (stopped.outputs[0].token_ids, stopped.outputs[0].finish_reason) == ([first], "stop")
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[1], []], GREEDY, "prompt 1: the prompt is empty"),
        ([[1, -2]], GREEDY, r"prompt 0: prompt_ids\[1\] is -2"),
        ([[1]], SamplingParams(n=2), "n=2"),
        ([[1]], SamplingParams(stop=("x",)), "stop strings .'x'. need a tokenizer"),
        ([[1] * 100], SamplingParams(max_tokens=40), "prompt 0: .* needs 35 blocks of 4 tokens, and the pool has 30"),
        ([[1] * 500], SamplingParams(max_tokens=40), "exceed the model's context"),
    ],
)
def test_bad_input_is_refused_at_the_door_and_nothing_runs(llm, prompts, params, message):
    """E3: what can never fit is refused with its need and the pool's size; the workers never see it."""
    before = len(llm.transfers)
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)
    assert len(llm.transfers) == before and all(worker.is_alive() for worker in llm.workers)
    assert llm.generate([[1, 2]], GREEDY)[0].finished


def test_a_killed_prefill_process_ends_its_requests_and_no_others(llm, model):
    """In bounded time; what had reached the decode process is served to its end, and that process lives."""
    prompts, before = prompts_of([20] * 48, seed=7), len(llm.transfers)

    def kill_after_some():
        deadline = time.monotonic() + BOUND
        while len(llm.transfers) < before + 12 and time.monotonic() < deadline:
            time.sleep(0.002)
        llm.workers[0].kill()

    (killer := threading.Thread(target=kill_after_some)).start()
    start = time.monotonic()
    outputs = llm.generate(prompts, GREEDY)
    killer.join()
    assert time.monotonic() - start < BOUND
    by_reason = {output.outputs[0].finish_reason: output for output in outputs}
    assert set(by_reason) == {"length", "error"}
    assert "the prefill process is lost" in by_reason["error"].outputs[0].error
    served = outputs.index(by_reason["length"])
    assert outputs[served].outputs[0].token_ids == naive.generate(model, prompts[served], GREEDY)
    assert llm.workers[1].is_alive()
    again = llm.generate(prompts[:2], GREEDY)
    assert [output.outputs[0].finish_reason for output in again] == ["error", "error"]


def test_a_silent_process_and_then_a_dead_one(model):
    """Silence ends after the time-out, and what comes late is no answer to a later question. Death ends at once."""
    prompts = prompts_of([9, 14], seed=11)
    with Disaggregated("tiny", CONFIG, dtype="float64", timeout=BOUND) as llm:
        llm.timeout = 1.0
        os.kill(llm.workers[0].pid, signal.SIGSTOP)
        start = time.monotonic()
        silent = llm.generate(prompts, GREEDY)
        assert 1.0 <= time.monotonic() - start < BOUND
        assert [output.outputs[0].error for output in silent] == ["a worker is lost, or silent"] * 2
        os.kill(llm.workers[0].pid, signal.SIGCONT)
        llm.timeout = BOUND
        late = llm.generate(prompts[::-1], GREEDY)
        assert [o.outputs[0].token_ids for o in late] == [naive.generate(model, p, GREEDY) for p in prompts[::-1]]
        threading.Timer(0.05, llm.workers[1].kill).start()
        start = time.monotonic()
        lost = llm.generate(prompts_of([20] * 60), SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
        assert time.monotonic() - start < BOUND
        assert {output.outputs[0].finish_reason for output in lost} <= {"error", "length"}
        assert lost[-1].outputs[0].error == "a worker is lost, or silent"
        llm.workers[0].join(timeout=BOUND)
        assert not llm.workers[0].is_alive(), "the prefill process outlives what it sends to"
    llm.close()  # again: nothing happens
    with pytest.raises(ValueError, match="this pair is closed"):
        llm.generate(prompts, GREEDY)


def test_workers_leave_when_their_front_is_killed():
    """No orphan keeps a machine's memory."""
    script = (
        "import os, signal\nfrom minillm.disaggregate import Disaggregated\n"
        "if __name__ == '__main__':\n"
        "    llm = Disaggregated('tiny')\n"
        "    print(*[worker.pid for worker in llm.workers], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * BOUND)
    pids, deadline = list(map(int, run.stdout.split())), time.monotonic() + BOUND
    assert len(pids) == 2, run.stderr
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    """False for a process that is gone, or dead and not yet collected."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "tinny"}, ValueError, "tinny"),
        ({"model": "tiny", "config": EngineConfig(batching="static")}, ValueError, 'must be "continuous"'),
        ({"model": "tiny", "devices": ("nowhere", "cpu")}, RuntimeError, "did not start"),
        ({"model": "tiny", "devices": "cpu"}, ValueError, "two devices and a timeout above 0, got 'cpu'"),
        ({"model": "tiny", "timeout": "60"}, ValueError, "two devices and a timeout above 0, got .* and '60'"),
    ],
)
def test_a_pair_that_cannot_start_says_so(arguments, error, message, capfd):
    with pytest.raises(error, match=message):
        Disaggregated(**arguments)


def test_torchrun_starts_both_and_the_decode_process_prints(model):
    """The text of each prompt goes on as naive generation does."""
    from minillm.tokenizer import load_tokenizer

    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command[-2:] = ["--standalone"]
    texts = ["It was a fine morning", "My dear"]
    command += ["-m", "minillm.disaggregate", "tiny", *texts, "--max-tokens", "6"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=2 * BOUND, env=environment)
    assert run.returncode == 0, run.stderr
    tokenizer, single = load_tokenizer("tiny"), load_model("tiny", "cpu")
    params = SamplingParams(max_tokens=6, temperature=0)
    expected = {t + tokenizer.decode(naive.generate(single, tokenizer.encode(t), params)) for t in texts}
    assert expected <= set(run.stdout.splitlines()), run.stdout
