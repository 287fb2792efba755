"""Requests and their timelines: arithmetic on paper, and what a reader sees of an output."""

import pytest

from minillm.request import Request, RequestOutput, Status, Timeline
from minillm.sampling import SamplingParams
from minillm.tokenizer import load_tokenizer


def test_timeline_by_hand():
    """Arrival at 10, first token at 12, then gaps of 1, 3 and 2 seconds, and gone at 20."""
    line = Timeline(arrival=10.0, scheduled=11.5, token_times=[12.0, 13.0, 16.0, 18.0], end=20.0)
    assert (line.ttft, line.tpot, line.itl, line.latency) == (2.0, 2.0, [1.0, 3.0, 2.0], 10.0)


def test_timeline_that_has_not_come_far():
    """What is not known yet is None, not zero; one token has no gap."""
    assert (Timeline(3.0).ttft, Timeline(3.0).tpot, Timeline(3.0).itl, Timeline(3.0).latency) == (None, None, [], None)
    one = Timeline(3.0, token_times=[4.0], end=4.0)
    assert (one.ttft, one.tpot, one.itl, one.latency) == (1.0, None, [], 1.0)


def test_counts_of_a_request():
    """A prompt, then tokens: computed chases all there are, and the last token drawn is never stored."""
    request = Request(7, [5, 6, 8], SamplingParams(max_tokens=2, ignore_eos=True), arrival=1.0, eos_token_ids=(9,))
    assert (request.num_tokens, request.num_missing, request.max_stored) == (3, 3, 4)
    request.num_computed_tokens = 3
    assert request.append(9, 2.0) is None, "ignore_eos"
    assert (request.prompt_ids, request.output_ids, request.num_missing) == ([5, 6, 8], [9], 1)
    assert request.append(4, 2.5) == "length"
    assert request.timeline.token_times == [2.0, 2.5]
    assert repr(request) == "Request(7.0, waiting, 3 of 5 tokens computed)"


def test_prompt_is_copied():
    """The caller's list stays the caller's."""
    prompt = [1, 2]
    request = Request(0, prompt, SamplingParams())
    request.append(3, 0.0)
    prompt.append(99)
    assert request.token_ids == [1, 2, 3]


def test_the_end_of_text_stops():
    """The token that ends a text counts as generated."""
    request = Request(0, [1], SamplingParams(max_tokens=5), eos_token_ids=(9,))
    assert [request.append(4, 0.0), request.append(9, 1.0)] == [None, "stop"]
    assert request.output_ids == [4, 9]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_text_held_back_is_given_at_the_end(reason):
    """While it runs, " wor" could become " world", which stops; a request that is ended there has spelled it."""
    tokenizer = load_tokenizer("tiny")
    request = Request(0, [1], SamplingParams(max_tokens=50, stop=" world"), tokenizer=tokenizer)
    for token in tokenizer.encode("Hello wor", add_special_tokens=False):
        request.append(token, 0.0)
    assert request.text == "Hello"
    request.status, request.finish_reason = Status.FINISHED, reason
    assert request.text == "Hello wor"


def test_output_of_several_samples():
    """Finished when the last of them is; the metrics are those of the first."""
    samples = [Request(4, [1, 2], SamplingParams(n=2, max_tokens=3), arrival=1.0, index=index) for index in (0, 1)]
    samples[0].append(8, 2.0)
    samples[0].finish_reason, samples[0].timeline.end = "abort", 3.0
    output = RequestOutput.of(samples)
    assert (output.request_id, output.prompt_ids, output.finished) == (4, [1, 2], False)
    assert [(o.index, o.token_ids, o.finish_reason) for o in output.outputs] == [(0, [8], "abort"), (1, [], None)]
    assert output.metrics is samples[0].timeline and output.metrics.latency == 2.0
    samples[1].timeline.end = 4.0
    assert RequestOutput.of(samples).finished
