"""Tests the papers' figures on acceptance, with few draws and few pairs of distributions."""

import functools
import json
import pathlib

import numpy as np
import pytest

from spectr_jax.experiments.config import figures_config
from spectr_jax.experiments.figures.acceptance import FIGURES, run
from spectr_jax.experiments.figures.base import Figure, Series
from spectr_jax.utils.errors import UserError

pytestmark = pytest.mark.xdist_group("figures")  # The tests share one run of all figures.


def _config(**changes):
    config = figures_config()
    config.update({"draws": 300, "pairs": 3, **changes})
    return config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns the folder of the figures, and the figures.

    Both figures of SpecTr++ use one vocabulary here, so that they share compiled programs.
    """
    folder = tmp_path_factory.mktemp("figures")
    with pytest.MonkeyPatch.context() as patched:
        second = "spectr_plus_plus_figure_2"
        patched.setitem(FIGURES, second, functools.partial(FIGURES[second], vocabulary=5))
        return folder, run(_config(), folder)


@pytest.mark.slow
def test_figures_are_written_as_png_and_json(made):
    folder, figures = made
    for name, figure in figures.items():
        assert (folder / f"{name}.png").stat().st_size > 10_000
        stored = json.loads((folder / f"{name}.json").read_text())
        assert stored["title"] == figure.title and stored["settings"]["pairs"] == 3
        assert {"command", "commit", "hardware", "seconds"} <= stored.keys()
        for ours, theirs in zip(figure.series, stored["series"], strict=True):
            assert list(ours.y) == theirs["y"] and len(theirs["x"]) == len(theirs["y"])


@pytest.mark.slow
def test_measured_points_lie_on_the_exact_curves(made):
    for figure in made[1].values():
        curves = {
            series.label: series
            for series in figure.series
            if series.error is None and series.panel == 0
        }
        points = [series for series in figure.series if series.error is not None and series.like]
        assert points
        for series in points:
            curve = curves[series.like]
            at = [int(np.argmin(np.abs(np.asarray(curve.x) - x))) for x in series.x]
            bars = 5 * np.maximum(series.error, 1 / 300)
            assert np.all(np.abs(np.asarray(curve.y)[at] - series.y) < bars), (figure.title, series)


def test_a_finished_figure_is_drawn_again_only_on_demand(toy, tmp_path, monkeypatch, capsys):
    names, drawn = ("spectr_figure_1", "spectr_figure_5"), []
    for name in names:
        figure = Figure(name, "caption", "x", ("y",), [Series("curve", [1], [1])])
        monkeypatch.setitem(FIGURES, name, lambda _, f=figure: (drawn.append(f.title), f)[1])
    pair = {name: str(tmp_path / f"{name}.safetensors") for name in ("target", "draft")}
    for path in pair.values():
        pathlib.Path(path).write_bytes((toy.folder / "target.safetensors").read_bytes())
    (tmp_path / "tokenizer.model").write_bytes((toy.folder / "tokenizer.model").read_bytes())
    folder = tmp_path / "figures"
    assert [*run(_config(only=names[:1], **pair), folder)] == [*names[:1]]
    capsys.readouterr()
    config = _config(only=names, **pair)
    assert [*run(config, folder)] == [*names[1:]]
    assert capsys.readouterr().out.startswith(f"{folder / names[0]}.json is finished: commit ")
    assert not run(config, folder) and drawn == [*names]
    with pytest.raises(UserError, match=r"another config \(its seed is 0, not 1\)"):
        run(_config(only=names, **pair, seed=1), folder)
    (tmp_path / "draft.safetensors").write_bytes((toy.folder / "draft.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"figure_5.*other weights"):
        run(config, folder)
    assert drawn == [*names] and [*run(config, folder, again=True)] == [*names]
    assert not run(config, folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"only": ("spectr_figure_4",)}, "unknown figure 'spectr_figure_4'"),
        ({"draws": 0}, "draws=0: must be at least 1"),
        ({"draft": "nowhere"}, "no model at 'nowhere'"),
        (
            {"only": ("spectr_figure_5",), "prompt": "long " * 200},
            "prompt='long .*context 128 of 'draft_2m'",
        ),
    ],
)
def test_bad_configs_are_refused(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        run(_config(**changes), tmp_path / "figures")
