"""Figures of the papers on acceptance: SpecTr 1, 2, 3, 5 and SpecTr++ 1, 2.

Curves are exact, in float64; points are measured by running the plans' `select`. A new figure is a
function of the config that returns a `Figure`, and a line in `FIGURES`.
"""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import tqdm

from spectr_jax import transport
from spectr_jax.experiments.config import figures_config
from spectr_jax.experiments.figures.base import Figure, Series, write
from spectr_jax.experiments.measure import report
from spectr_jax.experiments.measure.finished import Finished, check_table
from spectr_jax.loading.by_name import Trained
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.frozen import Frozen, check_context, freeze
from spectr_jax.transport.draws import draw
from spectr_jax.utils.config import check_fields, check_positive, config_hash, to_json
from spectr_jax.utils.errors import unknown

NAME = "figures"


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, again: bool = False
) -> dict[str, Figure]:
    """Makes the figures of the config and writes each to `workdir` as PNG and JSON. Returns those
    that were made: unless `again`, figures that are there already are skipped.

    Raises:
      UserError: the config is invalid, a model cannot be loaded, or `workdir` holds a figure of
        another config or other weights, before any figure is drawn.
    """
    check_fields(config, figures_config())
    check_positive(config, "draws", "pairs")
    names = tuple(name for name in config.only if name) or tuple(FIGURES)
    for name in names:
        if name not in FIGURES:
            raise unknown("figure", name, FIGURES)
    weights: dict[str, list[str]] = {name: [] for name in names}
    if (measured := "spectr_figure_5") in names:
        target, drafts = load_pair(config.target, (config.draft,), "float32")
        weights[measured] = report.weights(target, *drafts)
    # Which figures are drawn together does not change them.
    settings = ml_collections.ConfigDict(
        {name: config[name] for name in config if name not in ("experiment", "only")}
    )
    left = [name for name in names if _is_left(settings, workdir, name, weights[name], again)]
    workdir.mkdir(parents=True, exist_ok=True)
    about = {"settings": to_json(settings), "config_hash": config_hash(settings)}
    made = {}
    for name in (bar := tqdm.tqdm(left, unit="figure", disable=not left, dynamic_ncols=True)):
        bar.set_description(name)
        started = time.monotonic()
        figure = made[name] = FIGURES[name](config)
        seconds = round(time.monotonic() - started, 1)
        write(figure, workdir / name, **about, weights=weights[name], seconds=seconds)
        tqdm.tqdm.write(f"{workdir / name}.png: {figure.title}\n  {figure.caption}")
    return made


def _is_left(
    settings: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    name: str,
    weights: list[str],
    again: bool,
) -> bool:
    """Returns whether the figure is to be drawn. If it is finished, prints so."""
    try:
        check_table(settings, workdir, name, weights, again)
    except Finished as finished:
        print(finished)
        return False
    return True


def spectr_1(config: ml_collections.ConfigDict) -> Figure:
    """Returns SpecTr's Figure 1: from U(d) to U(d / r), where K-SEQ is optimal too (Appendices B.2
    and D.1)."""
    d, ks, series = 120, range(1, 21), []
    for r in (2, 3, 5, 10, 20):
        curve, labels = f"q = U(d/{r})", ("", "")
        if r == 2:
            labels = "otm, simulated", "K-SEQ, simulated"
        pmfs = np.array([np.full(d, 1 / d), np.where(np.arange(d) < d // r, r / d, 0.0)])
        series.append(Series(curve, ks, [1 - (1 - 1 / r) ** k for k in ks]))
        series.append(_measured(config, "otm", pmfs, (1, 4, 16), labels[0], curve))
        series.append(_measured(config, "kseq", pmfs, (2, 8), labels[1], curve))
    caption = f"Optimal acceptance probability as a function of k when p = U(d) for d = {d}."
    return Figure("SpecTr, Figure 1", caption, "number of drafts k", ("acceptance",), series)


def spectr_2(config: ml_collections.ConfigDict) -> Figure:
    """Returns SpecTr's Figure 2: Bernoulli distributions, over k."""
    ks, series = range(1, 11), []
    for b in (0.05, 0.15, 0.25, 0.5, 0.75, 0.95):
        curve, label = f"q = Ber({b})", "otm, simulated" if b == 0.05 else ""
        p, q = pmfs = np.array([[0.75, 0.25], [1 - b, b]])
        series.append(Series(curve, ks, [transport.optimal_acceptance(p, q, k) for k in ks]))
        series.append(_measured(config, "otm", pmfs, (1, 2, 4, 8), label, curve))
    caption = "Optimal acceptance probability as a function of k when p = Ber(0.25)."
    return Figure("SpecTr, Figure 2", caption, "number of drafts k", ("acceptance",), series)


def spectr_3(config: ml_collections.ConfigDict) -> Figure:
    """Returns SpecTr's Figure 3: Bernoulli distributions, over q."""
    p, places, series = [0.75, 0.25], np.linspace(0, 1, 101), []
    for k in (1, 2, 4, 8):
        curve, label = f"k = {k}", "otm, simulated" if k == 1 else ""
        exact = [transport.optimal_acceptance(p, [1 - b, b], k) for b in places]
        series.append(Series(curve, places.tolist(), exact))
        for b in places[5::15]:
            pmfs = np.array([p, [1 - b, b]])
            point = _measured(config, "otm", pmfs, (k,), label, curve, most=8)
            series.append(dataclasses.replace(point, x=[float(b)]))
            label = ""
    caption = "Optimal acceptance probability as a function of q when p = Ber(0.25)."
    xlabel = "q: probability of 1 under the target"
    return Figure("SpecTr, Figure 3", caption, xlabel, ("acceptance",), series)


def spectr_5(config: ml_collections.ConfigDict) -> Figure:
    """Returns SpecTr's Figure 5 (Appendix D.2): next-token distributions of real models, restricted
    to the union of their ten likeliest tokens."""
    target, (draft,) = load_pair(config.target, (config.draft,), "float32")
    full = [_next_token_pmf(trained, config.prompt) for trained in (draft, target)]
    support = np.union1d(*(np.argsort(-pmf)[:10] for pmf in full))
    p, q = (pmf[support] / pmf[support].sum() for pmf in full)
    ks = range(1, 11)
    curves = {"OTM-k, exact plan": "otm", "K-SEQ": "kseq", "SpecTr++": "spectr++"}
    series = [
        Series(label, ks, [transport.get(name).acceptance(p, q, k) for k in ks])
        for label, name in curves.items()
    ]
    for label, name in curves.items():
        simulated = f"{label}, simulated"
        series.append(_measured(config, name, np.array([p, q]), (1, 2, 4, 8), simulated, label))
    caption = (
        f"Acceptance with compressed conditional distributions after “{config.prompt}”: "
        f"{draft.name} drafts for {target.name}, {len(support)} tokens in the union of the two top "
        "tens."
    )
    return Figure("SpecTr, Figure 5", caption, "number of drafts k", ("acceptance",), series)


def spectr_plus_plus(config: ml_collections.ConfigDict, vocabulary: int, number: int) -> Figure:
    """Returns SpecTr++'s Figure 1 or 2 (section 5): mean acceptance on random pairs of
    distributions, and the worst ratio to OTM."""
    rng = np.random.default_rng(config.seed)
    pmfs = rng.random((config.pairs, 2, vocabulary))
    pmfs /= pmfs.sum(axis=2, keepdims=True)
    ks = (1, 2, 3, 4)
    plans = {
        "STr (K-SEQ)": "kseq",
        "STr+": "spectr+",
        "STr++": "spectr++",
        "optimal kSEQ": "optimal_kseq",
        "OTM": "otm",
    }
    series, worst = [], []
    best = np.array([[transport.optimal_acceptance(p, q, k) for p, q in pmfs] for k in ks])
    for label, name in plans.items():
        acceptance = transport.get(name).acceptance
        accepted = np.array([[acceptance(p, q, k) for p, q in pmfs] for k in ks])
        ratio = accepted / best
        series.append(Series(label, ks, accepted.mean(axis=1).tolist()))
        series.append(Series(label, ks, ratio.min(axis=1).tolist(), panel=1))
        worst.append(f"{label} {ratio.min():.3f}")
        if name != "optimal_kseq":  # It is for analysis only.
            simulated = "simulated" if name == "otm" else ""
            series.append(_measured(config, name, pmfs, ks, simulated, label))
    caption = (
        f"Results for |Omega| = {vocabulary}, {config.pairs} random pairs. Worst ratio to OTM: "
        f"{', '.join(worst)}."
    )
    ylabels = "mean acceptance", "worst ratio to OTM"
    return Figure(f"SpecTr++, Figure {number}", caption, "number of drafts k", ylabels, series)


FIGURES: dict[str, Callable[[ml_collections.ConfigDict], Figure]] = {
    "spectr_figure_1": spectr_1,
    "spectr_figure_2": spectr_2,
    "spectr_figure_3": spectr_3,
    "spectr_figure_5": spectr_5,
    "spectr_plus_plus_figure_1": functools.partial(spectr_plus_plus, vocabulary=5, number=1),
    "spectr_plus_plus_figure_2": functools.partial(spectr_plus_plus, vocabulary=10, number=2),
}


def _measured(
    config: ml_collections.ConfigDict,
    name: str,
    pmfs: np.ndarray,
    ks: Sequence[int],
    label: str,
    like: str,
    most: int = 0,
) -> Series:
    """Returns points at `ks`: the rate at which the plan's `select` accepts, for one pair of
    distributions [2, V] or on average over pairs [n, 2, V].

    Series with the same `most`, by default the largest of `ks`, share a program.
    """
    pmfs = pmfs.reshape(-1, *pmfs.shape[-2:])
    plan, draws, shares = transport.get(name), -(-config.draws // len(pmfs)), []
    for k in ks:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), k), len(pmfs))
        valid = np.arange(most or max(ks)) < k
        shares.append(np.asarray(_accepted(plan, keys, jnp.float32(pmfs), valid, draws)) / draws)
    error = [float(np.sqrt(np.sum(share * (1 - share)) / draws) / len(pmfs)) for share in shares]
    marker = "s" if name == "kseq" else "o"
    return Series(label, ks, [float(share.mean()) for share in shares], error, like, marker)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _accepted(plan, keys, pmfs, valid, draws: int) -> jax.Array:
    """Returns how many of `draws` choices are accepted, for each pair of distributions."""

    def pair(key_and_pmfs):
        key, (p, q) = key_and_pmfs

        def one(key):
            draft_key, select_key = jax.random.split(key)
            return plan.select(select_key, p, q, draw(draft_key, p, valid.shape), valid).accepted

        return jnp.sum(jax.vmap(one)(jax.random.split(key, draws)))

    return jax.lax.map(pair, (keys, pmfs))


def _next_token_pmf(trained: Trained, prompt: str) -> np.ndarray:
    tokens = np.array([trained.tokenizer.prompt(prompt)], np.int32)
    check_context(f"prompt={prompt!r:.60}", tokens.shape[1], trained, "shorten it")
    logits = _logits(freeze(trained.model), tokens)
    return np.asarray(jax.nn.softmax(logits[0, -1]), np.float64)


@jax.jit
def _logits(model: Frozen, tokens: jax.Array) -> jax.Array:
    visible = np.tri(tokens.shape[1], dtype=bool)[None]
    return model.merge().extend(tokens, jnp.arange(tokens.shape[1])[None], visible)[0]
