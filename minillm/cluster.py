"""Several simulated GPUs as one service: prefill and decode together on each, or each on GPUs of its own.

The engines are the ones of real runs over a virtual clock (`minillm.simulate`), so everything that its docstring leaves
out is left out here. Requests go to the engine with the least to do. Where the phases are apart, a prompt's keys and
values travel over a link; the first token is there when the prefill ends, the second after the transfer and a decode
step, as in DistServe (Zhong et al., 2024) and Splitwise (Patel et al., 2024).

Left out besides: the prefill side never runs short of memory for prompts that wait to be sent, a link carries one
prompt at a time at its full rate, and the router is free and knows every queue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from minillm.config import EngineConfig, ModelConfig
from minillm.engine import Engine
from minillm.request import RequestOutput
from minillm.roofline import Device, activation_dtype
from minillm.simulate import PLACEHOLDER, SimulatedRunner
from minillm.workload import Refusal, TimedRequest

# Bytes per second in one direction. NVLink of an A100 has 600 GB/s both ways together. The last three join the machines
# of Patel et al. (2024, section V), Agrawal et al. (2024, section 5) and Zhong et al. (2024, section 6.1).
LINKS = {
    "NVLink (A100)": 300e9,
    "PCIe 4.0 x16": 32e9,
    "InfiniBand, 200 Gb/s": 25e9,
    "Ethernet, 100 Gb/s": 12.5e9,
    "network, 25 Gb/s": 3.125e9,
}


def transfer_time(config: ModelConfig, tokens: int, bandwidth: float, dtype="bfloat16") -> float:
    """Seconds that the keys and values of `tokens` tokens need over a link of `bandwidth` bytes per second."""
    return tokens * config.kv_bytes_per_token(activation_dtype(dtype)) / bandwidth


def exposed_time(compute: float, transfer: float, layers: int) -> float:
    """Seconds of a transfer that are left when the prefill is done, if each layer is sent as soon as it is computed.

    Compute and transfer are seconds of all layers together, equal for each. A fast link leaves the last layer's
    message, transfer / layers; on a slow one everything waits for the first layer: transfer - compute * (1 - 1/layers).
    """
    return max(transfer / layers, transfer - compute * (1 - 1 / layers))


def simulated_engines(
    count: int,
    config: ModelConfig,
    device: Device,
    settings: EngineConfig = EngineConfig(),  # noqa: B008, it is frozen
    **assumptions,
) -> list[Engine]:
    """`count` engines alike, each on a `device` of its own; `assumptions` as for `SimulatedRunner`.

    Raises ValueError for a count below 1.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"count must be an integer of at least 1, got {count!r}")
    return [Engine(SimulatedRunner(config, device, settings, **assumptions), settings) for _ in range(count)]


def together(requests: Sequence[TimedRequest], engines: Sequence[Engine]) -> list[RequestOutput | Refusal]:
    """Serve a workload on engines that do both phases; outputs in the order of `requests`, as `replay` gives them."""

    def add(engine: Engine, place: int) -> int:
        request = requests[place]
        return engine.add_request(list(request.prompt_ids), request.params, request.arrival)

    found = dispatch([request.arrival for request in requests], engines, add)
    return [served_or_refused(requests[place], found[place]) for place in range(len(requests))]


def apart(
    requests: Sequence[TimedRequest],
    prefill: Sequence[Engine],
    decode: Sequence[Engine],
    bandwidth: float,
    layer_by_layer: bool = True,
) -> list[RequestOutput | Refusal]:
    """Serve a workload on `prefill` engines that compute prompts and `decode` engines that go on from there.

    `bandwidth` in bytes per second is that of each prefill engine's link. Outputs in the order of `requests`; each has
    one timeline: its first token at the end of its prefill, the others from the decode engine.
    Raises ValueError for a bandwidth that is not positive.
    """
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be a positive number of bytes per second, got {bandwidth!r}")

    def add_prompt(engine: Engine, place: int) -> int:
        only_first = replace(requests[place].params, max_tokens=1, ignore_eos=True)
        return engine.add_request(list(requests[place].prompt_ids), only_first, requests[place].arrival)

    firsts = dispatch([request.arrival for request in requests], prefill, add_prompt)
    going_on = [place for place, (_, out) in firsts.items() if is_served(out) and requests[place].params.max_tokens > 1]
    ready = arrivals(going_on, firsts, prefill[0].runner, bandwidth, layer_by_layer)

    def add_computed(engine: Engine, number: int) -> int:
        place = order[number]
        first, request = firsts[place][1].metrics, requests[place]
        prompt, moment = list(request.prompt_ids), first.token_times[0]
        return engine.add_computed(prompt, request.params, None, PLACEHOLDER, moment, request.arrival)

    order = sorted(ready, key=ready.get)
    rests = dispatch([ready[place] for place in order], decode, add_computed)
    outputs = {place: output for place, (_, output) in firsts.items()}
    for number, (_, rest) in rests.items():
        if is_served(rest):
            first = outputs[order[number]].metrics
            rest.metrics.scheduled = first.scheduled
            rest.metrics.preemptions += first.preemptions
        outputs[order[number]] = rest
    return [served_or_refused(requests[place], (None, outputs[place])) for place in range(len(requests))]


def arrivals(places, firsts, runner: SimulatedRunner, bandwidth: float, layer_by_layer: bool) -> dict[int, float]:
    """When the keys and values of each prompt are complete on the decode side, in seconds."""
    free, ready = {}, {}  # when each prefill engine's link is free again
    layers = runner.config.n_layers
    for place in sorted(places, key=lambda place: firsts[place][1].metrics.token_times[0]):
        engine, output = firsts[place]
        begin, computed = output.metrics.scheduled, output.metrics.token_times[0]
        own = transfer_time(runner.config, len(output.prompt_ids), bandwidth, runner.kv_dtype or runner.dtype)
        link_free = free.get(engine, 0.0)
        if layer_by_layer:
            # It starts with the first layer, or with the link; the last layer's share leaves after the last layer.
            start = max(begin + (computed - begin) / layers, link_free)
            ready[place] = max(start + own, computed + own / layers)
        else:
            ready[place] = max(computed, link_free) + own
        free[engine] = ready[place]
    return ready


def dispatch(times: Sequence[float], engines: Sequence[Engine], add: Callable[[Engine, int], int]) -> dict[int, tuple]:
    """Give item i, at times[i], to the engine with the least to do; {i: (engine's number, output or refusal)}.

    `add(engine, i)` queues it and returns the engine's id. Engines that are behind are run up to each moment first; a
    step that has begun ends before anything new is looked at. Raises ValueError if times decrease.
    """
    if not engines:
        raise ValueError("there must be at least one engine, got none")
    if list(times) != sorted(times):
        raise ValueError("requests must come in order of arrival")
    found: dict[int, tuple] = {}
    places: list[dict[int, int]] = [{} for _ in engines]

    def run(number: int, until: float) -> None:
        engine = engines[number]
        while engine.has_unfinished and engine.runner.now() < until:
            for output in engine.step():
                if output.finished:
                    found[places[number].pop(output.request_id)] = (number, output)

    for item, moment in enumerate(times):
        for number in range(len(engines)):
            run(number, moment)
        number = min(range(len(engines)), key=lambda n: (load(engines[n]), engines[n].runner.now()))
        engine = engines[number]
        if not engine.has_unfinished:
            engine.runner.wait_until(moment)
        try:
            places[number][add(engine, item)] = item
        except ValueError as error:
            found[item] = (number, Refusal((), str(error)))
    for number in range(len(engines)):
        run(number, math.inf)
    return found


def load(engine: Engine) -> int:
    """Tokens that an engine must compute before each of its requests has its next one; what it received is computed."""
    scheduler = engine.scheduler
    return sum(
        max(1, request.num_missing - request.num_received) for request in (*scheduler.waiting, *scheduler.running)
    )


def is_served(output) -> bool:
    """Whether an engine took the request and ended it well."""
    return not isinstance(output, Refusal) and output.outputs[0].error is None


def served_or_refused(request: TimedRequest, found: tuple) -> RequestOutput | Refusal:
    """The output, or the refusal of this request, with its prompt."""
    output = found[1]
    return replace(output, prompt_ids=request.prompt_ids) if isinstance(output, Refusal) else output


def highest_rate(attained: Sequence[tuple[float, float]], share: float = 0.9) -> float:
    """Goodput as DistServe counts it: the highest rate at which `share` of the requests meet their targets.

    `attained` holds (rate, share that met both targets) in rising order of rates. Between two rates the share is taken
    to fall on a line; 0 if the lowest rate is too high already, the last rate if all are fine (it may be higher then).
    """
    if not attained:
        raise ValueError("there must be at least one rate, got none")
    best, met = 0.0, None
    for rate, now in attained:
        if now < share:
            return best if met is None else best + (rate - best) * (met - share) / (met - now)
        best, met = rate, now
    return best
