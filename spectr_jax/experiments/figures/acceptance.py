"""Figures of the papers on acceptance: SpecTr 1, 2, 3, 5 and SpecTr++ 1, 2.

Curves are exact, in float64; points are measured by running the plans' `select`. A new figure is a
function that returns a `Figure`, and a line in `FIGURES`.
"""

import dataclasses
import functools
import math
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
from spectr_jax.loading.by_name import Trained
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.transport.base import draw
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError, unknown

NAME = "figures"
LARGEST_PROGRAM = 25_000
"""Largest linear program that Figure 5 solves, in flow variables; each takes seconds."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of the figures, as in `experiments.config.figures_config`."""

    target: str = "6m"
    draft: str = "2m"
    prompt: str = "He said he also has asked prosecutors to"
    draws: int = 20_000
    pairs: int = 100
    seed: int = 0


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Figure]:
    """Makes the figures of the config and writes each to `workdir` as PNG and JSON.

    Raises:
      UserError: the config is invalid or a model cannot be loaded, before any figure is drawn.
    """
    check_fields(config, figures_config())
    check_positive(config, "draws", "pairs")
    names = tuple(name for name in config.only if name) or tuple(FIGURES)
    for name in names:
        if name not in FIGURES:
            raise unknown("figure", name, FIGURES)
    if "spectr_figure_5" in names:
        load_pair(config.target, (config.draft,), "float32")
    fields = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: config[name] for name in fields})
    workdir.mkdir(parents=True, exist_ok=True)
    made = {}
    for name in (bar := tqdm.tqdm(names, unit="figure", dynamic_ncols=True)):
        bar.set_description(name)
        started = time.monotonic()
        figure = made[name] = FIGURES[name](settings)
        seconds = round(time.monotonic() - started, 1)
        write(figure, workdir / name, settings=dataclasses.asdict(settings), seconds=seconds)
        tqdm.tqdm.write(f"{workdir / name}.png: {figure.title}\n  {figure.caption}")
    return made


def spectr_1(settings: Settings) -> Figure:
    """SpecTr, Figure 1: from U(d) to U(d / r), where K-SEQ is optimal too (Appendices B.2 and
    D.1)."""
    d, ks = 120, range(1, 21)
    series = []
    for r in (2, 3, 5, 10, 20):
        curve = f"q = U(d/{r})"
        pmfs = np.array([np.full(d, 1 / d), np.where(np.arange(d) < d // r, r / d, 0.0)])
        series.append(Series(curve, ks, [1 - (1 - 1 / r) ** k for k in ks]))
        series.append(
            _measured(settings, "otm", pmfs, (1, 4, 16), "otm, simulated" if r == 2 else "", curve)
        )
        series.append(
            _measured(settings, "kseq", pmfs, (2, 8), "K-SEQ, simulated" if r == 2 else "", curve)
        )
    caption = f"Optimal acceptance probability as a function of k when p = U(d) for d = {d}."
    return Figure("SpecTr, Figure 1", caption, "number of drafts k", ("acceptance",), series)


def spectr_2(settings: Settings) -> Figure:
    """SpecTr, Figure 2: Bernoulli distributions, over k."""
    ks = range(1, 11)
    series = []
    for b in (0.05, 0.15, 0.25, 0.5, 0.75, 0.95):
        curve = f"q = Ber({b})"
        p, q = pmfs = np.array([[0.75, 0.25], [1 - b, b]])
        series.append(Series(curve, ks, [transport.optimal_acceptance(p, q, k) for k in ks]))
        series.append(
            _measured(
                settings, "otm", pmfs, (1, 2, 4, 8), "otm, simulated" if b == 0.05 else "", curve
            )
        )
    caption = "Optimal acceptance probability as a function of k when p = Ber(0.25)."
    return Figure("SpecTr, Figure 2", caption, "number of drafts k", ("acceptance",), series)


def spectr_3(settings: Settings) -> Figure:
    """SpecTr, Figure 3: Bernoulli distributions, over q."""
    p, places = [0.75, 0.25], np.linspace(0, 1, 101)
    series = []
    for k in (1, 2, 4, 8):
        curve = f"k = {k}"
        series.append(
            Series(
                curve,
                places.tolist(),
                [transport.optimal_acceptance(p, [1 - b, b], k) for b in places],
            )
        )
        for b in places[5::15]:
            point = _measured(settings, "otm", np.array([p, [1 - b, b]]), (k,), "", curve, most=8)
            label = "otm, simulated" if k == 1 and b == places[5] else ""
            series.append(dataclasses.replace(point, x=[float(b)], label=label))
    caption = "Optimal acceptance probability as a function of q when p = Ber(0.25)."
    return Figure(
        "SpecTr, Figure 3", caption, "q: probability of 1 under the target", ("acceptance",), series
    )


def spectr_5(settings: Settings) -> Figure:
    """SpecTr, Figure 5 (Appendix D.2): conditionals of real models, cut to the union of their ten
    likeliest tokens."""
    target, (draft,) = load_pair(settings.target, (settings.draft,), "float32")
    full = [_next_token_pmf(trained, settings.prompt) for trained in (draft, target)]
    support = np.union1d(*(np.argsort(-pmf)[:10] for pmf in full))
    p, q = (pmf[support] / pmf[support].sum() for pmf in full)
    ks = range(1, 11)
    small = [
        k
        for k in ks
        if sum(m * math.comb(len(support), m) for m in range(1, k + 1)) <= LARGEST_PROGRAM
    ]
    curves = {"OTM-k, exact plan": "otm", "K-SEQ": "kseq", "SpecTr++": "spectr++"}
    series = [
        Series(label, ks, [transport.get(name).acceptance(p, q, k) for k in ks])
        for label, name in curves.items()
    ]
    for label, name in curves.items():
        series.append(
            _measured(settings, name, np.array([p, q]), (1, 2, 4, 8), f"{label}, simulated", label)
        )
    program = [transport.get("otm_lp").acceptance(p, q, k) for k in small]
    series.append(Series("OTM-k, linear program", small, program, [0.0] * len(small), marker="s"))
    caption = (
        f"Acceptance with compressed conditional distributions after “{settings.prompt}”: "
        f"{draft.name} drafts for "
        f"{target.name}, {len(support)} tokens in the union of the two top tens."
    )
    return Figure("SpecTr, Figure 5", caption, "number of drafts k", ("acceptance",), series)


def spectr_plus_plus(settings: Settings, vocabulary: int, number: int) -> Figure:
    """SpecTr++, Figures 1 and 2 (section 5): random pairs of distributions; mean acceptance, and
    worst ratio to OTM."""
    rng = np.random.default_rng(settings.seed)
    pmfs = rng.random((settings.pairs, 2, vocabulary))
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
        accepted = np.array(
            [[transport.get(name).acceptance(p, q, k) for p, q in pmfs] for k in ks]
        )
        ratio = accepted / best
        series.append(Series(label, ks, accepted.mean(axis=1).tolist()))
        series.append(Series(label, ks, ratio.min(axis=1).tolist(), panel=1))
        worst.append(f"{label} {ratio.min():.3f}")
        if name != "optimal_kseq":  # It is for analysis only.
            series.append(
                _measured(settings, name, pmfs, ks, "simulated" if name == "otm" else "", label)
            )
    caption = f"Results for |Omega| = {vocabulary}, {settings.pairs} random pairs. Worst ratio to OTM: {', '.join(worst)}."
    ylabels = "mean acceptance", "worst ratio to OTM"
    return Figure(f"SpecTr++, Figure {number}", caption, "number of drafts k", ylabels, series)


FIGURES: dict[str, Callable[[Settings], Figure]] = {
    "spectr_figure_1": spectr_1,
    "spectr_figure_2": spectr_2,
    "spectr_figure_3": spectr_3,
    "spectr_figure_5": spectr_5,
    "spectr_plus_plus_figure_1": functools.partial(spectr_plus_plus, vocabulary=5, number=1),
    "spectr_plus_plus_figure_2": functools.partial(spectr_plus_plus, vocabulary=10, number=2),
}


def _measured(
    settings: Settings,
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
    draws = -(-settings.draws // len(pmfs))
    shares = []
    for k in ks:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(settings.seed), k), len(pmfs))
        valid = np.arange(most or max(ks)) < k
        shares.append(
            np.asarray(_accepted(transport.get(name), keys, jnp.float32(pmfs), valid, draws))
            / draws
        )
    error = [float(np.sqrt(np.sum(share * (1 - share)) / draws) / len(pmfs)) for share in shares]
    marker = "s" if name == "kseq" else "o"
    return Series(label, ks, [float(share.mean()) for share in shares], error, like, marker)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _accepted(plan, keys, pmfs, valid, draws: int) -> jax.Array:
    """Returns how many of `draws` choices are accepted, for each pair of distributions."""

    def one(key, p, q):
        draft_key, select_key = jax.random.split(key)
        return plan.select(select_key, p, q, draw(draft_key, p, valid.shape), valid).accepted

    def pair(key, pmf):
        return jnp.sum(
            jax.vmap(one, in_axes=(0, None, None))(jax.random.split(key, draws), pmf[0], pmf[1])
        )

    return jax.lax.map(lambda both: pair(*both), (keys, pmfs))


def _next_token_pmf(trained: Trained, prompt: str) -> np.ndarray:
    tokens = np.array([trained.tokenizer.prompt(prompt)], np.int32)
    length = tokens.shape[1]
    if length > trained.model.context:
        raise UserError(
            f"the prompt has {length} tokens and {trained.name!r} a context of "
            f"{trained.model.context}; cut it"
        )
    logits = _logits(freeze(trained.model), tokens)
    return np.asarray(jax.nn.softmax(logits[0, -1]), np.float64)


@jax.jit
def _logits(model: Frozen, tokens: jax.Array) -> jax.Array:
    visible = np.tri(tokens.shape[1], dtype=bool)[None]
    return model.merge().extend(tokens, jnp.arange(tokens.shape[1])[None], visible)[0]
