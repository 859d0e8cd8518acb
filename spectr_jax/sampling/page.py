"""Decoded sequences as one HTML page: coloured tokens, speeds, and the draft tree of every call."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from spectr_jax.data.tokenizer import SPACE, AnyTokenizer
from spectr_jax.decoding.tree import Tree
from spectr_jax.sampling.session import Decoded, Session, Speed
from spectr_jax.sampling.terminal import NAMES, speeds
from spectr_jax.sampling.trace import ACCEPTED, Recorded
from spectr_jax.utils.layout import rows_of_paths

COLUMN, ROW, MARGIN, BEND = 88, 20, 12, 22
"""Pixels of a drawn tree: between levels, between leaves, around the tree, and the width in which an
edge changes rows."""
LONGEST = 10
"""The longest token in a tree, in characters."""
SMALLEST = 0.75
"""The smallest scale of a tree on a narrow screen; wider trees scroll."""


class Shown(NamedTuple):
    """One prompt on the page. `baseline` is set only with --compare."""

    prompt: str
    decoded: Decoded
    baseline: Decoded | None
    speed: Speed | None


def page(session: Session, command: str, shown: Sequence[Shown]) -> str:
    """Returns an HTML page of prompts with their continuations, made by `command`.

    It follows the reader's light or dark mode.
    """
    title = f"spectr_jax: {session.method.name}"
    models = f"Target {session.target.name}"
    models += f", draft {session.draft.name}" if session.draft else ""
    tree, tokenizer = session.method.tree, session.target.tokenizer
    about = f"<p>{escape(models)}; {tree.size} drafted tokens a call.</p><p>{escape(command)}</p>"
    names = dict(NAMES)
    if any(len(call.live) > len(call.path) for one in shown for call in one.decoded.calls):
        names[ACCEPTED] += ", and drafts that repeat it"
    legend = " ".join(f'<span class="{origin}">{name}</span>' for origin, name in names.items())
    parts = (_prompt(number, one, tree, tokenizer) for number, one in enumerate(shown, start=1))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><style>{STYLE}</style></head><body>'
        f'<h1>{escape(title)}</h1><div class="about">{about}</div><p class="legend">{legend}</p>'
        f"{''.join(parts)}</body></html>\n"
    )


def _prompt(number: int, shown: Shown, tree: Tree, tokenizer: AnyTokenizer) -> str:
    columns, has_tree = "", tree.size > 0
    for one in filter(None, (shown.baseline, shown.decoded)):
        text = _text(shown.prompt, one, number if one is shown.decoded and has_tree else None)
        columns += f"<section><h3>{escape(one.method)}</h3>{text}{_logprobs(one)}</section>"
    lines = speeds(shown.speed, shown.baseline, shown.decoded) if shown.speed else []
    figures = "".join(f"<p>{escape(line)}</p>" for line in lines)
    trees = _calls(number, shown.decoded, tree, tokenizer) if has_tree else ""
    return (
        f'<article><div class="texts">{columns}</div><div class="figures">{figures}</div>{trees}'
        "</article>"
    )


def _calls(number: int, decoded: Decoded, tree: Tree, tokenizer: AnyTokenizer) -> str:
    """Returns a card for each call, as wide as the longest path needs."""
    cards = "".join(
        f'<figure id="{_anchor(number, index)}"><figcaption>{_caption(index, call)}</figcaption>'
        f"{_drawn(tree, call, tokenizer)}</figure>"
        for index, call in enumerate(decoded.calls)
    )
    style = f"--width: {COLUMN * (tree.height + 2) + 3 * MARGIN}px"
    return f'<h3>Calls of the target</h3><div class="calls" style="{style}">{cards}</div>'


def _text(prompt: str, decoded: Decoded, number: int | None) -> str:
    """Returns the continuation as HTML; each token links to its call if the prompt has a number."""
    spans = [f'<span class="prompt">{escape(prompt)}</span>']
    for token in decoded.tokens:
        title = f"call {token.call + 1}: {_name(token.origin)}"
        if token.logprobs is not None:
            policy, model = token.logprobs
            title += f"; log-probability {policy:.3f}, of the model {model:.3f}"
        about = f'class="{token.origin}" title="{title}"'
        tag, link = ("a", f' href="#{_anchor(number, token.call)}"') if number else ("span", "")
        text = token.text.lstrip()
        space = token.text[: len(token.text) - len(text)]  # The space is not underlined.
        spans.append(f"{space}<{tag}{link} {about}>{escape(text)}</{tag}>")
    return f'<p class="text">{"".join(spans)}</p>'


def _logprobs(decoded: Decoded) -> str:
    """Returns a table of the tokens, because a phone shows no tooltips; "" if not computed."""
    rows = [
        (
            repr(one.text) if one.text else "no text",
            _name(one.origin),
            *map("{:.3f}".format, scores),
        )
        for one in decoded.tokens
        if (scores := one.logprobs) is not None
    ]
    header = "Token", "Origin", "Policy", "Model"
    return _table("Log-probabilities", header, rows) if rows else ""


def _table(summary: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table that unfolds below its summary."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    table = f"<table><tr>{head}</tr>{body}</table>"
    return f'<details><summary>{summary}</summary><div class="wide">{table}</div></details>'


def _anchor(number: int, call: int) -> str:
    return f"prompt-{number}-call-{call + 1}"


def _caption(index: int, call: Recorded) -> str:
    drafts = f"{len(call.path)} accepted draft{'' if len(call.path) == 1 else 's'}"
    last = "" if len(call.emitted) == len(call.path) else f" and a {_name(call.origins[-1])}"
    return f"Call {index + 1}: {drafts}{last}"


def _name(origin: str) -> str:
    return NAMES.get(origin, "token of the target")


def _drawn(tree: Tree, call: Recorded, tokenizer: AnyTokenizer) -> str:
    """Returns the tree from left to right, with the accepted path in bold and the next token."""
    drafted = np.flatnonzero(call.tokens >= 0).tolist()
    paths, tokens = [tree.path(node) for node in drafted], call.tokens[drafted].tolist()
    parents = np.searchsorted(drafted, tree.parent[drafted]).tolist()
    about = [f"draft p = {call.p[node]:.3f}, target q = {call.q[node]:.3f}" for node in drafted]
    kinds = ["accepted" if node in call.live else "draft" for node in drafted]
    kinds[0], about[0] = "root", "the last token before the call"
    if len(call.emitted) > len(call.path):
        end = int(np.searchsorted(drafted, call.path[-1])) if call.path else 0
        paths.append((*paths[end], tree.size))  # Below its siblings.
        parents.append(end)
        tokens.append(call.emitted[-1])
        kinds.append(call.origins[-1])
        about.append(f"{_name(call.origins[-1])}, from the target")
    rows = rows_of_paths(paths)
    depths = np.array([len(path) for path in paths])
    places = list(zip(MARGIN + COLUMN * depths, MARGIN + ROW * rows, strict=True))
    # Emitted edges are drawn last, on top.
    order = sorted(range(1, len(paths)), key=lambda node: kinds[node] != "draft")
    edges = [_edge(places[parents[node]], places[node], kinds[node]) for node in order]
    pieces = [*map(tokenizer.piece, tokens)]
    nodes = [_node(*node) for node in zip(places, pieces, kinds, about, strict=True)]
    width, height = COLUMN * (depths.max() + 1) + MARGIN, 2 * MARGIN + ROW * rows.max()
    size = (
        f'width="{width}" viewBox="0 0 {width} {height:g}" style="min-width: {SMALLEST * width}px"'
    )
    svg = f'<svg {size} role="img">{"".join(edges)}{"".join(nodes)}</svg>'
    below = sorted(range(1, len(paths)), key=lambda node: paths[node])
    cells = [("· " * (len(paths[node]) - 1) + repr(pieces[node]), about[node]) for node in below]
    table = _table("Probabilities", ("Token", "Probability"), cells)
    return f'<div class="wide" tabindex="0">{svg}</div>{table}'


def _edge(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    """Returns an edge that runs along the parent's row, past its label, and then up or down."""
    (x, y), (u, v) = start, end
    half = u - BEND / 2
    line = f"M{x:g} {y:g}H{u - BEND:g}C{half:g} {y:g} {half:g} {v:g} {u:g} {v:g}"
    return f'<path class="edge {kind}" d="{line}"/>'


def _node(place: tuple[float, float], token: str, kind: str, about: str) -> str:
    label = token if len(token) <= LONGEST else token[: LONGEST - 1] + "…"
    label = label.strip() or label.replace(" ", SPACE)
    x, y = place
    return (
        f'<g class="node {kind}"><title>{escape(repr(token))}: {escape(about)}</title>'
        f'<circle cx="{x:g}" cy="{y:g}" r="4"/>'
        f'<text x="{x + 7:g}" y="{y + 4:g}">{escape(label)}</text></g>'
    )


STYLE = """
:root { --ground: #fff; --ink: #1c1e21; --faint: #6b7280; --line: #d5d9df; --card: #f6f7f9;
        --accepted: #15803d; --correction: #b91c1c; --bonus: #1d4ed8; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #15171a; --ink: #e6e8eb; --faint: #9aa3af; --line: #3a4049; --card: #1d2024;
          --accepted: #4ade80; --correction: #f87171; --bonus: #7db0ff; } }
body { background: var(--ground); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; max-width: 1180px;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .3rem; } h3 { font-size: 1rem; margin: .2rem 0; }
.about p, .figures p, figcaption { margin: .1rem 0; color: var(--faint); font-size: .9rem; }
.about p { overflow-wrap: anywhere; }
.legend span { margin-right: 1.2rem; }
article { border-top: 1px solid var(--line); padding: 1rem 0; }
.texts { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 1.5rem; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 1.08rem; margin: .3rem 0; }
.prompt { color: var(--faint); }
a { color: inherit; text-decoration: none; border-radius: 3px; } a:hover { background: var(--line); }
.accepted { color: var(--accepted); } .bonus { color: var(--bonus); font-weight: 600; }
.correction { color: var(--correction); text-decoration: underline; text-underline-offset: 3px; }
.figures { margin: .8rem 0; }
.calls { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(var(--width), 100%), 1fr)); gap: .8rem; }
figure { margin: 0; padding: .6rem .8rem; background: var(--card); border-radius: 8px; min-width: 0; }
figure:target { outline: 2px solid var(--bonus); }
.wide { overflow-x: auto; }
.wide:has(svg) { background-repeat: no-repeat; background-size: 2rem 100%, 2rem 100%, .8rem 100%, .8rem 100%;
  background-attachment: local, local, scroll, scroll; background-image:
  linear-gradient(90deg, var(--card) 50%, #0000), linear-gradient(270deg, var(--card) 50%, #0000),
  linear-gradient(90deg, var(--line), #0000), linear-gradient(270deg, var(--line), #0000);
  background-position: left, right, left, right; }
summary { color: var(--faint); font-size: .9rem; cursor: pointer; }
table { border-collapse: collapse; font-size: .85rem; } th { text-align: left; font-weight: 600; }
th, td { padding: .1rem .8rem .1rem 0; white-space: nowrap; }
svg { display: block; max-width: 100%; height: auto; font: 12px system-ui, sans-serif; }
.edge { fill: none; stroke: var(--line); stroke-width: 1.2; }
.edge.accepted { stroke: var(--accepted); stroke-width: 3; }
.edge.correction { stroke: var(--correction); stroke-dasharray: 4 3; stroke-width: 2; }
.edge.bonus { stroke: var(--bonus); stroke-dasharray: 4 3; stroke-width: 2; }
.node circle { fill: var(--line); }
.node text { fill: var(--faint); paint-order: stroke; stroke: var(--card); stroke-width: 4px; text-decoration: none; }
.node.root circle, .node.accepted circle { fill: var(--accepted); }
.node.root text { fill: var(--ink); font-weight: 700; } .node.accepted text { fill: var(--accepted); font-weight: 700; }
.node.correction circle { fill: var(--correction); } .node.correction text { fill: var(--correction); font-weight: 700; }
.node.bonus circle { fill: var(--bonus); } .node.bonus text { fill: var(--bonus); font-weight: 700; }
"""
