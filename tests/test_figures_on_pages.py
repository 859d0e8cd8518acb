"""Tests that numbers on README.md and on pages of docs/ match their tables."""

import json
import re

import pytest

from helpers import ROOT

README, METHOD, SPEED = "README.md", "docs/which_method.md", "docs/speed.md"
SAMPLING, LAYER = "docs/sampling.md", "docs/otm_layer.md"
CALL, MEASURED, SPEEDUP = "tokens_per_call", "measured_per_call", "speedup"
PER_SECOND = "tokens_per_second"
CHAINS, TREE = "(8,1,1,1,1,1,1,1)", "(4,2,1,1,1,1,1,1)"


def rows(table, *fixed_names, place=("rows",), **fixed):
    """Returns a function that names one field of a table as (table, place, row, field).

    The function takes the values of `fixed_names`, and the name of the field. `row` has the values
    that select the row, and `place` has the keys of the rows in the table's JSON.
    """

    def field(*values):
        *values, name = values
        return table, place, fixed | dict(zip(fixed_names, values, strict=True)), name

    return field


K_L = ("algorithm", "num_drafts", "draft_length")
paper = rows("target_97m/cpu/tokens_per_call", *K_L, draft="6M")
ladder = rows("ladder/tokens_per_call", "draft", *K_L)
h200 = rows("target_97m/h200/one/tokens_per_call", *K_L)
h200_250 = rows("target_97m/h200/many/tokens_per_call", *K_L)
auto_97m = rows("target_97m/fastest_1/auto", method="block", nodes=2)
auto_20m = rows("ladder/fastest_1/auto", method="block", nodes=2)
auto_20m_32 = rows("ladder/fastest_32/auto", method="block", nodes=2)
auto_smollm2 = rows("smollm2/fastest_1/auto", method="block", nodes=2)
trees = rows("trees/trees", "method", "size", "shape")
spec_bench = rows("spec_bench/spec_bench", "method", task="overall", temperature=0)
retrieval = rows("spec_bench/retrieval/spec_bench", method="recycle recall:5", task="overall")
sampled = rows("spec_bench/temperature_1/spec_bench", "method", task="overall")
phases = rows(
    "target_97m/h200/latency", place=("phases",), method="spectr", draft_length=4, batch=1
)
llama_cpp = rows("smollm2/llama_cpp", "name", place=("groups", "decoding"))
llama_answers = rows("smollm2/llama_cpp", "name", place=("groups", "answers"))

NAMES = "spectr", "recursive", "otm", "otm_block", "traversal_iid", "gbv", "otm_layer"
SMOLLM2 = "otm_layer", "otm_block", "gbv", "traversal_iid", "spectr"


def on_drafts(pair, stem, paths, names, temperature=1.0):
    row = {"temperature": temperature, "top_p": 1.0, "stem": stem, "paths": paths}
    place = f"frontier/{pair}/frontier", ("rows",), row
    return [(*place, f"tokens_per_call_by_seed {name}") for name in names]


def through_slots(table, method):
    return [(f"slots/{table}/slots", ("rows",), {"method": method}, "ratio")]


# A claim is a page, a sentence with a placeholder for each number, and the fields of the numbers.
CLAIMS = [
    (README, "| `speculative`, L = 4 | {:.2f} | {:.2f} |",
     [h200("speculative", 1, 4, CALL), h200("speculative", 1, 4, SPEEDUP)]),
    (README, "| `block`, L = 2 | {:.2f} | {:.2f} |", [auto_97m(MEASURED), auto_97m(SPEEDUP)]),
    (README, "| `block`, L = 2 | {:.2f} | {:.2f} |",
     [auto_smollm2(MEASURED), auto_smollm2(SPEEDUP)]),
    (README, "Spec-Bench | {:.2f} | {:.2f} |",
     [spec_bench("recycle recall:5", CALL), spec_bench("recycle recall:5", SPEEDUP)]),
    (README, "the speedup is {:.2f}", [retrieval(SPEEDUP)]),
    (README, "that `otm_layer` is {:.2f} times as fast", [paper("otm_layer", 8, 8, SPEEDUP)]),
    (README, "| `block`, L = 4 | {:.2f} | {:.2f} |",
     [h200_250("block", 1, 4, CALL), h200_250("block", 1, 4, SPEEDUP)]),
    (README, "emits {:.2f} tokens per call and SpecTr's K-SEQ {:.2f}; the paper reports {:.2f} ",
     [paper("otm_layer", 8, 8, CALL), paper("spectr", 8, 8, CALL), paper("spectr", 8, 8, "paper")]),
    (METHOD, "97M target: {:.2f} x", [auto_97m(SPEEDUP)]),
    (METHOD, "SmolLM2-135M: {:.2f} x", [auto_smollm2(SPEEDUP)]),
    (METHOD, "20M target: `block` {:.2f} x", [auto_20m(SPEEDUP)]),
    (METHOD, "97M target on an H200: {:.2f} x and up to {:.2f} x",
     [h200("speculative", 1, 4, SPEEDUP), h200("spectr", 8, 4, SPEEDUP)]),
    (METHOD, "32 at once: `block` {:.2f} x", [auto_20m_32(SPEEDUP)]),
    (METHOD, "250 at once: `block` {:.2f} x", [h200_250("block", 1, 4, SPEEDUP)]),
    (METHOD, "five tasks of Spec-Bench: {:.2f} x, `lookup` {:.2f} x, `block` {:.2f} x",
     [spec_bench(method, SPEEDUP)
      for method in ("recycle recall:5", "lookup chain:2", "block chain:1")]),
    (METHOD, "retrieval: {:.2f} x", [retrieval(SPEEDUP)]),
    (METHOD, "SmolLM2-135M on Spec-Bench: {:.2f} x; with a draft model, `block` {:.2f} x",
     [sampled("recycle 2", SPEEDUP), sampled("block chain:1", SPEEDUP)]),
    (METHOD, "slower than the baseline there: {:.2f} x",
     [trees("otm_layer", 32, "(4,1,1,1,1,1,1,1)", SPEEDUP)]),
    (METHOD, "`otm_layer` at 8 x 8 has {:.2f} of its speed", [paper("otm_layer", 8, 8, SPEEDUP)]),
    (METHOD, "emits {:.2f} tokens per call at {:.2f} x",
     [trees("self_speculative", 8, "chain", field) for field in (CALL, SPEEDUP)]),
    (METHOD, "| {:.2f} tokens per call with 32 drafted tokens, K-SEQ {:.2f} ",
     [trees(method, 32, "(4,1,1,1,1,1,1,1)", CALL) for method in ("otm_layer", "spectr")]),
    (METHOD, "| {:.2f} tokens per call, `speculative` {:.2f} ",
     [trees(method, 8, "chain", CALL) for method in ("block", "speculative")]),
    (METHOD, "| {:.2f} tokens per call with 64 drafted tokens",
     [trees("ersd", 64, "optimal", CALL)]),
    (METHOD, "| {:.2f} to {:.2f} tokens per call with 6M drafts",
     [paper("spectr", 2, 4, CALL), paper("spectr", 8, 8, CALL)]),
    (METHOD, "`block` emits {:.2f} tokens per call at 16 drafted tokens and {:.2f} at 64",
     [trees("block", size, "chain", CALL) for size in (16, 64)]),
    (METHOD, "`otm_block` emits {:.2f} and {:.2f} tokens per call, K-SEQ {:.2f} and {:.2f} ",
     [trees("otm_block", 64, CHAINS, CALL), trees("otm_block", 64, TREE, CALL),
      trees("spectr", 64, CHAINS, CALL), trees("spectr", 64, f"{TREE}, best", CALL)]),
    (METHOD, "{:.2f} tokens per call with four 2M drafts, {:.2f} with eight, and {:.2f} with four",
     [ladder(draft, "otm_block", k, 4, CALL) for draft, k in (("2M", 4), ("2M", 8), ("6M", 4))]),
    *((METHOD, f"| {k} x {n} | {{:.2f}} | {{:.2f}} | **{{:.2f}}** | {{:.2f}} |",
       [*(paper(method, k, n, CALL) for method in ("spectr", "otm_block", "otm_layer")),
        paper("spectr", k, n, "paper")])
      for k, n in ((2, 4), (4, 4), (8, 4), (8, 8))),
    (SPEED, "decodes {:.2f} times as fast on two CPU cores", [auto_97m(SPEEDUP)]),
    (SPEED, "{:.2f} times as fast on an H200", [h200("speculative", 1, 4, SPEEDUP)]),
    (SPEED, "takes {:.1f} ms to draft, {:.1f} ms to score and {:.1f} ms to select",
     [phases(f"ms {phase}") for phase in ("draft", "score", "select")]),
    (SPEED, "| 97M, 6M, 1 | CPU, int8 | `block`, L = 2 | {:.2f} |", [auto_97m(SPEEDUP)]),
    (SPEED, "| 20M, 2M, 1 | CPU, int8 | `block`, L = 2 | {:.2f} |", [auto_20m(SPEEDUP)]),
    (SPEED, "| 20M, 2M, 32 | CPU, bfloat16 | `block`, L = 2 | {:.2f} |", [auto_20m_32(SPEEDUP)]),
    (SPEED, "| 97M, 6M, 1 | H200, bfloat16 | `speculative`, L = 4 | {:.2f} |",
     [h200("speculative", 1, 4, SPEEDUP)]),
    (SPEED, "| 97M, 6M, 1 | H200, bfloat16 | `otm_layer`, 8 x 4 | {:.2f} |",
     [h200("otm_layer", 8, 4, SPEEDUP)]),
    (SPEED, "| 97M, 6M, 250 | H200, bfloat16 | `block`, L = 4 | {:.2f} |",
     [h200_250("block", 1, 4, SPEEDUP)]),
    (SPEED, "{:.2f} times as fast as llama.cpp's Q8_0 without drafts and {:.2f} times as fast with",
     [llama_cpp("spectr_jax int8", "ratio"),
      llama_cpp("spectr_jax int8, drafts, L = 2", "ratio")]),
    (SPEED, "prompts of 64 to 1,024 tokens {:.2f} to {:.2f} times",
     [("smollm2/llama_cpp", ("groups", f"prompt of {n}"), {"name": "spectr_jax int8"}, "ratio")
      for n in (256, 64)]),
    (SPEED, "prompts included, come {:.2f} times as fast",
     [llama_answers("spectr_jax int8, recycle, 4 nodes", "ratio")]),
    (SPEED, "| `spectr_jax`, baseline | | {:.0f} | {:.0f} | {:.0f} |",
     [llama_cpp(f"spectr_jax {dtype}", PER_SECOND) for dtype in ("int8", "bfloat16", "float32")]),
    (SPEED, "`block`, L = 2 | | {:.0f} | | |",
     [llama_cpp("spectr_jax int8, drafts, L = 2", PER_SECOND)]),
    (SPEED, "| llama.cpp | {:.0f} | {:.0f} | {:.0f} | {:.0f} |",
     [llama_cpp(f"llama.cpp {kind}", PER_SECOND) for kind in ("Q4_1", "Q8_0", "F16", "F32")]),
    *((LAYER, f"| {stem}, {paths}, {nodes} | " + " | ".join(["{:.2f}"] * 5) + middle,
       on_drafts("97m", stem, paths, [name for name in NAMES if "gbv" not in name or not stem]))
      for stem, paths, nodes, middle in (
          (0, 2, 16, " | {:.2f} | **{:.2f}** |"), (0, 4, 32, " | {:.2f} | **{:.2f}** |"),
          (1, 4, 29, " | - | **{:.2f}** |"), (4, 4, 20, " | - | **{:.2f}** |"))),
    (LAYER, "`otm_layer` emits {:.2f} tokens per call at temperature 1, `otm_block` {:.2f}, `gbv` "
     "{:.2f}, `traversal_iid` {:.2f} and K-SEQ {:.2f}; at 0.6 these are {:.2f}, {:.2f}, {:.2f}, "
     "{:.2f} and {:.2f}.",
     [*on_drafts("smollm2", 0, 4, SMOLLM2), *on_drafts("smollm2", 0, 4, SMOLLM2, 0.6)]),
    (SAMPLING, "| 32 | `block`, L = 2 | 65 % | {:.2f} |", through_slots("20m", "block chain:2")),
    (SAMPLING, "| 32 | the baseline | 65 % | {:.2f} |", through_slots("20m", "baseline")),
    (SAMPLING, "| `recycle` | 33 % | {:.2f} |", through_slots("smollm2_greedy", "recycle 2")),
    (SAMPLING, "| the baseline | 26 % | {:.2f} |", through_slots("smollm2", "baseline")),
]  # fmt: skip
# A figure from a note, because no command makes its table any more: a page, its words there, the
# note, and its words there.
NOTED = [
    (METHOD, "2.65 tokens per call on `4,2,1,1`", "layer", "2.65 on the 28 of (4, 2, 1, 1)"),
    (METHOD, "costs `otm_layer` 19 to 45 %", "layer", "if to its square root, 19, 28 and 35 %"),
    (METHOD, "costs `otm_layer` 19 to 45 %", "layer", "22 % (± 3), 37 % (± 2) and 45 % (± 2)"),
    (SPEED, "2.76 times as fast as assisted", "speed", "2.76 times as fast as assisted"),
    (SPEED, "first word of README's chat with SmolLM2 appears 3.5 s after Enter, and 7.7 s", "speed",
     "| First, mean | f89da72 | 7.7 | 9.6 |"),
    (SPEED, "first word of README's chat with SmolLM2 appears 3.5 s after Enter, and 7.7 s", "speed",
     "| Second, mean of two medians | f89da72 | 3.5 | 5.3 |"),
]  # fmt: skip
VERSION = r"(Python|jax|Apache-) ?\d+\.\d+"
# The rows of the call times on docs/which_method.md, and their tables.
AUTO = {
    "20M, int8, 1": "ladder/fastest_1/auto",
    "97M, int8, 1": "target_97m/fastest_1/auto",
    "SmolLM2-135M, int8, 1": "smollm2/fastest_1/auto",
    "SmolLM2-135M, int8, 8": "smollm2/fastest_8/auto",
    "20M, bfloat16, 32": "ladder/fastest_32/auto",
}


def read(table, *place):
    found = json.loads((ROOT / f"results/{table}.json").read_text())
    for name in place:
        found = found[name]
    return found


def stated(text, figures):
    """Returns the text with the numbers from the tables in its placeholders."""
    values = []
    for table, place, row, field in figures:
        (value,) = [each for each in read(table, *place) if row.items() <= each.items()]
        for name in [field] if field in value else field.split():
            value = value[name]
        values.append(sum(value) / len(value) if isinstance(value, list) else value)
    return text.format(*values)


def prose(page):
    """Returns a page's text on one line, without code blocks and link addresses."""
    text = re.sub(r"^```[\s\S]*?^```$|^ {4}.*$", "", (ROOT / page).read_text(), flags=re.MULTILINE)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", text).split())


@pytest.mark.parametrize(("page", "text", "figures"), CLAIMS)
def test_numbers_on_a_page_match_their_table(page, text, figures):
    assert prose(page).count(stated(text, figures)) == 1


@pytest.mark.parametrize("target", AUTO)
def test_call_times_on_the_page_match_their_table(target):
    times = read(AUTO[target], "target_ms")
    cells = [f"{times[n]:.1f}" if n in times else "" for n in ("1", "5", "17")]
    assert " ".join(f"| {target} ([table]) | {' | '.join(cells)} |".split()) in prose(METHOD)


@pytest.mark.parametrize(("page", "text", "note", "noted"), NOTED)
def test_figures_without_a_table_are_in_their_note(page, text, note, noted):
    assert prose(page).count(text) == 1
    assert prose(f"results/notes/2026-11-{note}.md").count(noted) == 1


def int8_cost():
    """Returns the sentence on the largest cost of int8, which is computed from several fields."""
    scores = [row["scores"] for row in read("quality/quality", "rows")]
    bits = "eval_bits_per_character"
    costs = [100 * (each["int8"][bits] / each["float32"][bits] - 1) for each in scores]
    return f"costs at most {max(costs):.2f} % in bits per character"


def test_the_quality_cost_of_int8_matches_its_table():
    assert prose(SPEED).count(int8_cost()) == 1


@pytest.mark.parametrize("page", [README, METHOD, SPEED, SAMPLING])
def test_every_decimal_number_on_a_page_is_checked_or_a_version(page):
    text = re.sub(VERSION, "", prose(page).replace(int8_cost(), ""))
    for claimed, claim, figures in CLAIMS:
        if claimed == page:
            text = text.replace(stated(claim, figures), "")
    for claimed, claim, *_ in NOTED:
        if claimed == page:
            text = text.replace(claim, "")
    for start in AUTO:
        text = re.sub(rf"\| {re.escape(start)} [^`a-z]*", "", text.replace("([table]) ", ""))
    assert not re.findall(r".{0,20}\b\d+\.\d+", text)
