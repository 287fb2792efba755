"""What the chapters say in words: numbers that a formula gives, times that are nobody's own, and where it loses."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from minillm.config import ModelConfig
from minillm.lab import notebooks
from minillm.linear import PACKED_FROM
from minillm.roofline import Device, crossover_batch, decode_step, max_decode_rate, prefill_step

BOOK = notebooks.ROOT / "book"
CHAPTERS = sorted(BOOK.glob("[0-9][0-9]_*.ipynb"))


def cells(name: str, kind: str) -> list[str]:
    loaded = json.loads((BOOK / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in loaded if cell["cell_type"] == kind]


def flowing(text: str) -> str:
    """The text without its line breaks, and without the ends of strings that a cell breaks over lines."""
    return re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*f?"', "", text))


# Numbers that a formula of ours gives


def claims(post: ModelConfig, smollm2: ModelConfig, card: Device) -> Iterator[tuple[str, str]]:
    """(chapter, phrase) for each number typed in a chapter that follows from a model's shape or a device's peaks."""
    tiny, draft = ModelConfig.preset("tiny"), ModelConfig.preset("draft")
    kipply = Device("as kipply rounds it", 1.5e12, {"bfloat16": 312e12}, 40e9, "kipply 2022")

    def passes(p: int, n: int) -> int:
        return sum(p + i for i in range(n))

    one = "01_naive_generation"
    yield one, f"a real chat model with {smollm2.num_parameters() / 1e6:.0f} million of them"
    yield one, f"`tiny`, a model of {tiny.num_parameters() / 1e6:.0f} million weights"
    yield one, f"the point at about {kipply.ridge():.0f} tokens for an NVIDIA A100"
    yield one, f"= {passes(100, 50):,}$ against ${100 + 50 - 1}$".replace(",", "{,}")
    yield one, f"Nearly {passes(100, 50) / 149:.0f} times the work"
    report = sum(prefill_step(smollm2, card, 200 + i, sampled=0).flops for i in range(2000))
    # A token that sees one more costs one pair more: without any pair, its matrix products are left.
    products = 2 * prefill_step(smollm2, card, 1, sampled=0).flops - prefill_step(smollm2, card, 1, 1, sampled=0).flops
    yield one, f"attention adds about {report / (passes(200, 2000) * products) - 1:.0%} to the operations of SmolLM2's"

    two, gb = "02_memory_bound", post.weight_bytes("bfloat16") / 1e9
    weights, peak, ridge = f"{post.num_parameters() / 1e6:.1f} million", card.flops["bfloat16"], card.ridge()
    rate = round(max_decode_rate(post, card), -1)
    yield two, f"a model of {weights} weights in bf16"
    yield two, f"{card.bandwidth / 1e9:,.0f} GB/s, and {peak / 1e12} trillion bf16 operations per second"
    yield two, f"{weights} × 2 bytes is {gb:.2f} GB"
    yield two, f"{card.bandwidth / 1e9:,.0f} / {gb:.2f} is about {rate:,.0f} tokens per second"
    yield two, f"{peak / 1e12} / {card.bandwidth / 1e12} is about {ridge:.0f}"
    yield two, f"they cross at a batch of about {ridge:.0f}"
    yield two, f"has a ridge of {kipply.ridge():.0f}: up to about {kipply.ridge():.0f} tokens"
    yield two, f"in layers of {PACKED_FROM:,} weights or more"
    small = smollm2.weight_bytes("float32") / 1e9
    yield two, f"{smollm2.num_parameters() / 1e6:.1f} million weights of 4 bytes ({small:.2f} GB)"
    yield two, f"and {smollm2.n_layers} layers; on a GPU"
    yield two, f"with {weights} weights of 2 bytes ({gb:.2f} GB) and {post.n_layers} layers"
    yield two, f"add {smollm2.n_layers} (or {post.n_layers}) times the empty layer"
    yield two, f"The crossover of about {crossover_batch(None, card):.0f} counts weights alone"
    more, less = (decode_step(post, card, context=context) for context in (1001, 1000))
    own, work = more.bytes - less.bytes, more.flops - less.flops
    yield two, f"Each earlier token adds {own:,.0f} bytes and {work:,.0f} operations"
    yield two, f"{work / own:.0f} operations per byte, far below the ridge of {ridge:.0f}"
    chen = 12 * 40 * 5120**2
    yield two, f"a model of {chen / 1e9:.0f} billion weights (40 layers, width 5,120)"
    yield two, f"about {22.0 / (1000 * 2 * chen / kipply.bandwidth):.1f} times the bound"
    h100 = Device.datasheet("H100").bandwidth / 1e9
    yield two, f"{h100:,.0f} / 16 is about {h100 / 16:.0f} tokens per second"
    assert round(draft.num_parameters(), -5) == 500_000
    yield two, "`draft` is a model of half a million weights"

    three, token = "03_kv_cache", smollm2.kv_bytes_per_token("bfloat16")
    yield three, f"{post.n_layers} layers, {post.n_kv_heads} key/value heads of size {post.head_dim}, 2 bytes a number"
    yield three, f"its full context of {post.max_context:,} tokens"
    yield three, f"at 3,000 tokens ({post.max_context - 1:,} for `post-0.5b`, whose context ends there)"
    at_32k = {heads: 32_768 * post.with_kv_heads(heads).kv_bytes_per_token("bfloat16") / 1e9 for heads in (20, 4, 1)}
    yield three, f"{at_32k[20]:.2f} GB with 20 key/value heads, {at_32k[4]:.2f} GB with 4, {at_32k[1]:.2f} GB with 1"
    yield three, f"A dotted line marks the weights at {gb:.2f} GB"
    yield three, f"has {smollm2.n_layers} layers and {smollm2.n_kv_heads} key/value heads of size {smollm2.head_dim}"
    product = rf"{smollm2.n_layers} \cdot {smollm2.n_kv_heads} \cdot {smollm2.head_dim} \cdot 2"
    yield three, rf"$2 \cdot {product} = {token:,.0f}$ bytes".replace(",", "{,}")
    yield three, f"A step takes {1000 / 26:.0f} ms there"  # of the 26 tokens a second that the sentence before quotes
    yield three, f"Position {100 + 1}. While"


PRESETS = ModelConfig.preset("post-0.5b"), ModelConfig.preset("smollm2"), Device.datasheet("RTX 5090")
CLAIMS = tuple(claims(*PRESETS))


def missing(said: dict[str, str], stated=CLAIMS) -> list[str]:
    return [f"{name} does not say: {phrase}" for name, phrase in stated if phrase not in said[name]]


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """Everything a chapter says, its alternative texts included."""
    return {p.stem: flowing("\n".join(cells(p.stem, "markdown") + cells(p.stem, "code"))) for p in CHAPTERS}


def test_numbers_in_the_text_are_what_our_formulas_give(said):
    """B4: a constant typed twice drifts, and a printed product is wrong."""
    assert not missing(said)


def test_a_number_that_drifts_is_found(said):
    """B4: in the text, in a model's shape, and in a device's peak."""
    for name, phrase in CLAIMS:
        digit = re.search(r"\d", phrase)
        if digit:
            other = phrase[: digit.start()] + str((int(digit[0]) + 1) % 10) + phrase[digit.end() :]
            assert missing(said | {name: said[name].replace(phrase, other)}, [(name, phrase)])
    post, smollm2, card = PRESETS
    assert len(missing(said, claims(replace(post, n_layers=25), smollm2, card))) >= 6
    assert len(missing(said, claims(post, replace(smollm2, n_kv_heads=9), card))) >= 2
    assert len(missing(said, claims(post, smollm2, replace(card, bandwidth=1008e9)))) >= 5


# Times, rates and sampled text

NUMBER = r"(?<![\w.^{])\d[\d.,]*\s*"
UNITS = (
    r"[µumn]s\b|s\b|seconds?\b|minutes?\b|[KMGT]i?B/s|tokens? (?:a|per) second|tokens/s|"
    r"(?:tr|b|m)illion (?:[a-z0-9]+ )?(?:operations|bytes) per second|"
    r"times (?:as fast|as slow|faster|slower)|×(?! ?\d)"
)
MEASURED = re.compile(rf"{NUMBER}(?:{UNITS})")
# What a reader's own run shows. A number of that kind is printed by a cell, never written down.
OWN = re.compile(r"\b(?:your|this|our) (?:machine|laptop|computer|CPU|GPU)\b|\b(?:you|we) (?:see|saw|got|measured?)\b")
# What the models of the book wrote: a verb of speech and then words in quotes.
SAMPLED = re.compile(
    r"\b(?:models?|SmolLM2|tiny|draft|engine|answer|it)`?,? (?:says?|said|answers?|answered|writes?|wrote|replie[sd]|"
    r"prints?|printed|continues?|continued|generates?|generated|reads?)\b[^.]{0,40}?[\"“*`][^\"”*`]*\w[^\"”*`]*[\"”*`]"
)
CITED = re.compile(r"\{cite")
# Given in a question, or told of a work that the paragraph before cites.
GIVEN = (
    "runs on an H100 (3,350 GB/s)",
    "which makes 18.5 ms; activations add 2.2 ms",
    "would take under 1 ms",
)


def paragraphs(text: str) -> list[str]:
    return [flowing(part) for part in re.split(r"\n\s*\n|\n(?=- |\d\. )", text) if part.strip()]


def faults(text: str, allowed: tuple[str, ...] = ()) -> list[str]:
    """Times and rates of nobody in particular or of the reader's machine, and text that a model may have written."""
    found = [f"sampled text: {match[0]}" for match in SAMPLED.finditer(flowing(text))]
    for paragraph in paragraphs(text):
        cited = CITED.search(paragraph)
        for phrase in allowed:
            paragraph = paragraph.replace(phrase, "")
        for sentence in re.split(r"(?<=[.:?])\s+(?=[A-Z`*])", paragraph):
            figure = MEASURED.search(sentence)
            if figure and (not cited or OWN.search(sentence)):
                found.append(f"{figure[0]} in: {sentence}")
    return found


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_prose_depends_on_no_sampled_text_and_no_exact_time(path):
    """B15: a figure in prose is cited, or follows from a formula that a test evaluates, or is given in a question."""
    allowed = GIVEN + tuple(phrase for name, phrase in CLAIMS if name == path.stem)
    for text in cells(path.stem, "markdown"):
        assert not faults(text, allowed)


@pytest.mark.parametrize("phrase", GIVEN)
def test_what_is_allowed_is_still_there(phrase):
    """B15: an exception outlives its sentence by no day."""
    assert any(phrase in flowing("\n".join(cells(path.stem, "markdown"))) for path in CHAPTERS)


@pytest.mark.parametrize(
    "planted",
    [
        "A token takes 41 ms here.",
        "With the cache we get 24.3 tokens a second.",
        "The engine is 2.7× faster with a cache.",
        "The engine is now 2.7 times faster.",
        "On this machine the copy reaches 22 GB/s {cite:p}`chen2022arithmetic`.",
        "As you see, a step takes 35.3 ms {cite:p}`chen2022arithmetic`.",
        "- **TTFT**: 0.11 s.",
        "The product runs at 175 billion operations per second.",
        'The model answers "The capital of France is Paris".',
        "SmolLM2 says: *The Rhine, the Danube*.",
        "`tiny` wrote “Once upon a time there was”.",
    ],
)
def test_a_planted_time_or_sampled_sentence_is_found(planted):
    """B15."""
    assert faults(f"Some words before it.\n\n{planted} And some after it.\n\nMore.")


@pytest.mark.parametrize(
    "harmless",
    [
        "Carol Chen measured 22 ms on an A100 {cite:p}`chen2022arithmetic`.",
        "A prompt of 100 tokens takes 3 passes, 4 layers and 16 GB.",
        "The matrices are of 4,096 × 4,096, and the time grows with $n^2$.",
        "The model writes one token after the other.",
    ],
)
def test_cited_figures_and_counts_are_no_fault(harmless):
    assert not faults(harmless)


# A technique that can lose

THREE_WAYS = re.compile(r"lab\.compare\(\s*\{(?=[^}]*\"recompute\")(?=[^}]*\"concatenate\")(?=[^}]*\"in place\")")


def loss_faults(markdown: list[str], code: list[str]) -> list[str]:
    """What chapter 3 lacks of: the measurement of a cache that can lose, its result shown, and the regime in words."""
    found, text = [], flowing("\n\n".join(markdown))
    race = next((source for source in code if THREE_WAYS.search(source)), None)
    if race is None:
        found.append("no cell times recomputing, concatenating and writing in place in turn")
    elif "speedup(" not in race or "lab.table(" not in race:
        found.append("the cell does not show how many times faster each cache is")
    if not any("class ConcatenatingCache" in source and "torch.cat" in source for source in code):
        found.append("no concatenating cache is built")
    section = text.partition("## What it costs, and where it loses")[2].partition("## Check yourself")[0]
    for words in (
        "It can also cost time",
        "copies everything it holds, in every layer, at every step",
        "**A cache saves arithmetic and pays with bytes. Where arithmetic is not the limit, it saves no time.**",
        "When not to use it:",
    ):
        if words not in section:
            found.append(f"the section on where it loses does not say: {words}")
    if not re.search(r"on an NVIDIA A100 from 26 to 25\b.{0,250}\{cite:p\}`raschka2025qwen3`", section):
        found.append("the published case in which the cache loses is not told")
    return found


def test_chapter_3_measures_a_cache_that_can_lose_and_says_when():
    """E22: a concatenating cache was slower than none on a GPU, and the text said otherwise."""
    markdown, code = cells("03_kv_cache", "markdown"), cells("03_kv_cache", "code")
    assert not loss_faults(markdown, code)
    assert loss_faults(markdown, [source for source in code if '"recompute"' not in source])
    assert loss_faults(markdown, [source.replace("speedup(", "median(") for source in code])
    assert loss_faults([text.replace("it saves no time", "it saves time") for text in markdown], code)
    assert loss_faults([text.replace("from 26 to 25", "from 25 to 26") for text in markdown], code)
