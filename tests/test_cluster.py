"""Simulated clusters against timelines worked out by hand, and limits that need no simulation."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.cluster import LINKS, apart, exposed_time, highest_rate, simulated_engines, together, transfer_time
from minillm.config import EngineConfig, ModelConfig
from minillm.engine import Engine
from minillm.metrics import summarize
from minillm.roofline import Device, decode_step, prefill_step, step_cost
from minillm.sampling import SamplingParams
from minillm.simulate import SimulatedRunner, published_model
from minillm.workload import Refusal, TimedRequest, fixed, make_workload, poisson, replay, uniform

SMALL = ModelConfig(vocab_size=10, dim=4, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=2, ffn_dim=6, max_context=64)
ROUND = Device("round", bandwidth=1000.0, flops={"bfloat16": 4000.0}, memory=1e6, source="test")
KV = 2 * 2 * 2 * 2  # bytes a token: keys and values, 2 layers, 1 head of 2, 2 bytes
SETTINGS = EngineConfig(block_size=4, num_blocks=64, token_budget=64, max_batch_size=8, prefix_caching=False)
FAST = 1e12


def engines(count, **changes):
    settings = EngineConfig(**{**vars(SETTINGS), **changes})
    return simulated_engines(count, SMALL, ROUND, settings)


def request(arrival, prompt, output):
    return TimedRequest(arrival, [1] * prompt, SamplingParams(max_tokens=output, temperature=0, ignore_eos=True))


def prefill(tokens, context=0):
    return prefill_step(SMALL, ROUND, tokens, context).time


def decode(*contexts):
    return step_cost(SMALL, ROUND, [(1, context) for context in contexts]).time


def times(output):
    return output.outputs[0].timeline.token_times


def test_one_request_by_hand():
    """First token at the end of the prefill; second after the transfer and one decode step; the third a step later."""
    bandwidth = 40.0
    sent = 10 * KV / bandwidth
    (output,) = apart([request(3.0, 10, 3)], engines(1), engines(1), bandwidth, layer_by_layer=False)
    first = 3.0 + prefill(10)
    assert times(output) == pytest.approx([first, first + sent + decode(10), first + sent + decode(10) + decode(11)])
    line = output.metrics
    assert line.ttft == pytest.approx(prefill(10)) and line.scheduled == 3.0 and line.end == times(output)[-1]
    assert line.tpot == pytest.approx((sent + decode(10) + decode(11)) / 2)
    assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("bandwidth", [KV * 10 / 0.001, KV * 10 / 50.0], ids=["fast link", "slow link"])
def test_layer_by_layer_leaves_what_the_formula_says(bandwidth):
    """Two layers: on a fast link half of the transfer is left, on a slow one all of it but half of the prefill."""
    sent, computed = 10 * KV / bandwidth, prefill(10)
    left = exposed_time(computed, sent, 2)
    assert left == pytest.approx(sent / 2 if sent < computed else sent - computed / 2)
    (output,) = apart([request(0.0, 10, 2)], engines(1), engines(1), bandwidth)
    assert times(output)[1] - times(output)[0] == pytest.approx(left + decode(10))


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(1, 100))
def test_the_overlap_is_that_of_layers_sent_one_after_the_other(compute, transfer, layers):
    """Each layer is computed, then sent when it is there and the one before it has left."""
    sent = 0.0
    for layer in range(1, layers + 1):
        sent = max(sent, layer * compute / layers) + transfer / layers
    assert exposed_time(compute, transfer, layers) == pytest.approx(sent - compute)


def test_two_prompts_share_one_link_and_two_links_do_not():
    """The second transfer of an engine waits for the first; on two engines both are under way at once."""
    bandwidth = 1.0
    requests = [request(0.0, 8, 2), request(0.0, 8, 2)]
    budget = {"token_budget": 8, "max_batch_size": 2, "chunked_prefill": False}  # one prompt a step
    outputs = apart(requests, engines(1, **budget), engines(2), bandwidth, layer_by_layer=False)
    one, two = prefill(8), 2 * prefill(8)
    assert [times(o)[0] for o in outputs] == pytest.approx([one, two])
    assert times(outputs[0])[1] == pytest.approx(one + 8 * KV + decode(8))
    assert times(outputs[1])[1] == pytest.approx(one + 16 * KV + decode(8))
    outputs = apart(requests, engines(2, **budget), engines(2), bandwidth, layer_by_layer=False)
    assert [times(o)[1] for o in outputs] == pytest.approx([one + 8 * KV + decode(8)] * 2)


def test_requests_that_decode_together_share_a_step():
    """Two prompts computed in one step: the link brings one a little earlier, the other joins at the next step."""
    outputs = apart([request(0.0, 6, 3), request(0.0, 9, 3)], engines(1), engines(1), FAST)
    both = step_cost(SMALL, ROUND, [(6, 0), (9, 0)]).time
    joined = both + decode(6) + decode(7, 9)
    assert times(outputs[0]) == pytest.approx([both, both + decode(6), joined])
    assert times(outputs[1]) == pytest.approx([both, joined, joined + decode(10)])


def test_the_least_loaded_engine_gets_the_next_request():
    """A long prompt on the first engine sends the next two to the second; who is free first breaks a tie."""
    requests = [request(0.0, 40, 1), request(0.0, 10, 1), request(0.0, 10, 1)]
    outputs = together(requests, engines(2, token_budget=40, chunked_prefill=False))
    both = step_cost(SMALL, ROUND, [(10, 0), (10, 0)]).time
    assert [times(o)[0] for o in outputs] == pytest.approx([prefill(40), both, both])


def test_one_engine_is_what_replay_gives():
    requests = make_workload(40, uniform(1, 30), uniform(1, 20), 10, poisson(0.05), max_total=60, seed=3)
    for changes in ({}, {"chunked_prefill": False}, {"token_budget": 9}, {"num_blocks": 20}):
        settings = EngineConfig(**{**vars(SETTINGS), **changes})
        alone = replay(Engine(SimulatedRunner(SMALL, ROUND, settings), settings), requests)
        outputs = together(requests, engines(1, **changes))
        assert [times(o) for o in outputs] == [times(o) for o in alone]


@pytest.mark.parametrize("seed", range(3))
def test_everybody_gets_what_was_asked_for_on_any_cluster(seed):
    """Tokens asked for, in order of time; a first token never later than alone allows; pools that run dry included."""
    rng = random.Random(seed)
    requests = make_workload(50, uniform(1, 30), uniform(1, 20), 10, poisson(rng.choice([0.05, 0.5])), seed=seed)
    blocks, bandwidth = rng.choice([14, 64]), rng.choice([1.0, 50.0, FAST])
    outputs = apart(requests, engines(rng.randrange(1, 4)), engines(rng.randrange(1, 4), num_blocks=blocks), bandwidth)
    for asked, output in zip(requests, outputs, strict=True):
        line = output.metrics
        assert len(line.token_times) == asked.params.max_tokens and line.token_times == sorted(line.token_times)
        assert line.arrival == asked.arrival <= line.scheduled < line.token_times[0]
        assert line.ttft >= prefill(len(asked.prompt_ids)) * (1 - 1e-9)
        if len(line.token_times) > 1:
            left = exposed_time(0.0, transfer_time(SMALL, len(asked.prompt_ids), bandwidth), SMALL.n_layers)
            assert line.itl[0] >= min(left, left / SMALL.n_layers) * (1 - 1e-9)
    assert summarize(outputs).served == 50


def test_decodes_never_wait_for_a_prompt_where_the_phases_are_apart():
    """What the chapter is about: the gaps of a request do not grow when a long prompt arrives."""
    requests = [request(0.0, 4, 20), request(0.5, 60, 2)]
    colocated = together(requests, engines(1, token_budget=61, chunked_prefill=False))[0].metrics
    separate = apart(requests, engines(1), engines(1), FAST)[0].metrics
    assert max(colocated.itl) > 1.5 * max(separate.itl)
    assert max(separate.itl) <= decode(23, 60) + 1e-9


def test_a_prompt_that_was_computed_elsewhere_goes_on_as_one_sample():
    """Two samples need two first tokens, and only one has come."""
    several = TimedRequest(0.0, [1], SamplingParams(max_tokens=3, n=2, temperature=0, ignore_eos=True))
    outputs = apart([several, request(0.0, 5, 4)], engines(1), engines(1), FAST)
    assert isinstance(outputs[0], Refusal) and "n=2: a prompt that was computed elsewhere" in outputs[0].reason
    assert len(times(outputs[1])) == 4


def test_what_an_engine_refuses_is_a_refusal_and_the_others_go_on():
    """E3: too large for the pool of the prefill side, or of the decode side alone."""
    requests = [request(0.0, 30, 4), request(0.0, 5, 4), request(0.0, 10, 30)]
    outputs = apart(requests, engines(1, num_blocks=6), engines(1, num_blocks=8), FAST)
    assert isinstance(outputs[0], Refusal) and "8 blocks" in outputs[0].reason and "has 6" in outputs[0].reason
    assert isinstance(outputs[2], Refusal) and "has 8" in outputs[2].reason
    assert len(times(outputs[1])) == 4
    summary = summarize(outputs, ttft=99.0, tpot=99.0)
    assert (summary.served, summary.attainment) == (1, pytest.approx(1 / 3))


def test_a_single_token_needs_no_decode_side_and_no_transfer():
    (output,) = apart([request(0.0, 10, 1)], engines(1), engines(1), 1e-9)
    assert times(output) == pytest.approx([prefill(10)]) and output.metrics.end == pytest.approx(prefill(10))


def test_transfer_of_the_published_example():
    """DistServe section 3.3: 512 tokens of OPT-66B are about 1.13 GB (of 2**30 bytes), and ten a second 11.3 GB/s."""
    opt66 = ModelConfig(50_272, 9216, 64, 72, 72, 128, 24_576, 2048)
    size = transfer_time(opt66, 512, 1.0)
    assert size == 512 * 2.25 * 2**20
    assert 10 * size / 2**30 == pytest.approx(11.3, rel=0.01)
    assert transfer_time(published_model("Llama-2 70B"), 1000, LINKS["Ethernet, 100 Gb/s"]) == pytest.approx(0.0262144)
    assert transfer_time(SMALL, 3, 1.0, "int4") == transfer_time(SMALL, 3, 1.0, "bfloat16")


def test_links_are_in_bytes_one_way():
    assert LINKS["NVLink (A100)"] == 600e9 / 2
    assert LINKS["Ethernet, 100 Gb/s"] == 100e9 / 8 and LINKS["network, 25 Gb/s"] == 25e9 / 8
    assert sorted(LINKS.values(), reverse=True) == list(LINKS.values())


@pytest.mark.parametrize(
    ("attained", "rate"),
    [
        ([(1, 1.0), (2, 0.9), (3, 0.5)], 2.0),
        ([(1, 1.0), (3, 0.8)], 2.0),
        ([(1, 1.0), (2, 0.95)], 2.0),
        ([(1, 0.89), (2, 1.0)], 0.0),
        ([(1, 1.0), (2, 0.4), (3, 0.99)], 1 + 0.1 / 0.6),
    ],
)
def test_highest_rate_by_hand(attained, rate):
    """Where the line falls through 90%; the first time counts."""
    assert highest_rate(attained) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simulated_engines(0, SMALL, ROUND), "count must be an integer of at least 1, got 0"),
        (lambda: apart([], engines(1), engines(1), 0), "bandwidth must be a positive number .*, got 0"),
        (lambda: together([], []), "at least one engine"),
        (lambda: highest_rate([]), "at least one rate"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


OVERLAP = {"compute_efficiency": 0.60, "bandwidth_efficiency": 0.65}
IN_TURN = {"compute_efficiency": 0.75, "bandwidth_efficiency": 0.65, "overlap": False}
both_ways = pytest.mark.parametrize("reached", [OVERLAP, IN_TURN], ids=["overlap", "in turn"])


@both_ways
def test_constants_that_distserve_fitted_are_near_the_shares_that_the_chapter_assumes(reached):
    """OPT-13B on one A100-80GB: prefill 18.1 + 0.1019 l + 7.12e-6 l**2 ms, decode 19.93 + 6.27e-4 context + 0.0385 B ms
    (profile in the authors' repository), whether reading and computing overlap or go in turn."""
    opt, settings = published_model("OPT-13B"), EngineConfig(num_blocks=100)
    device = SimulatedRunner(opt, Device.datasheet("A100-80GB"), settings, **reached).device

    def ours(cost):
        return 1000 * (cost.time if reached is OVERLAP else cost.memory_time + cost.compute_time)

    for tokens in (512, 1024, 2048):
        fitted = 18.1 + 0.1019 * tokens + 7.12e-6 * tokens**2
        assert ours(prefill_step(opt, device, tokens)) == pytest.approx(fitted, rel=0.13)
    for batch, context in ((1, 100), (16, 512), (64, 512)):
        fitted = 19.93 + 6.27e-4 * batch * context + 0.0385 * batch
        assert ours(decode_step(opt, device, batch, context)) == pytest.approx(fitted, rel=0.1)
    assert math.isclose(opt.kv_bytes_per_token(), 800 * 1024)


@both_ways
def test_who_wins_under_a_tight_target_depends_on_the_overlap(reached):
    """Chapter 9: 90% within TTFT 0.25 s and TPOT 25 ms. The best chunks lead with overlap, two GPUs in turn."""
    opt, a100 = published_model("OPT-13B"), Device.datasheet("A100-80GB")

    def gpu(**changes):
        settings = EngineConfig(block_size=64, prefix_caching=False, **changes)
        return simulated_engines(1, opt, a100, settings, **reached)

    def attained(serve, rate, count):
        load = make_workload(36 * count, fixed(512), fixed(64), opt.vocab_size, poisson(rate * count), seed=1)
        return summarize(serve(load), ttft=0.25, tpot=0.025).attainment

    def separate(load):
        return apart(load, gpu(chunked_prefill=False, max_batch_size=1), gpu(), LINKS["NVLink (A100)"])

    rate = 4 if reached is OVERLAP else 1.5
    chunks = max(attained(lambda load, b=b: together(load, gpu(token_budget=b)), rate, 1) for b in (160, 192, 384))
    whole = attained(lambda load: together(load, gpu(chunked_prefill=False, token_budget=2048)), rate, 1)
    two = attained(separate, rate, 2)
    assert whole < 0.9 and (chunks >= 0.9 > two if reached is OVERLAP else two >= 0.9 > chunks)


def test_requests_must_come_in_order_of_time():
    with pytest.raises(ValueError, match="in order of arrival"):
        together([request(2.0, 3, 1), request(1.0, 3, 1)], engines(1))


def test_a_burst_is_spread_evenly():
    """Equal requests at once: each engine gets as many as the others."""
    requests = make_workload(12, fixed(8), fixed(2), 10)
    outputs = together(requests, engines(3, token_budget=8, max_batch_size=2, chunked_prefill=False))
    firsts = sorted(times(o)[0] for o in outputs)
    assert firsts[0] == firsts[2] and firsts[3] > firsts[2]
