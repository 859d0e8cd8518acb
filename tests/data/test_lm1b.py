"""Tests `scripts/prepare_lm1b.sh` on an archive of the official layout, with TFDS's own builder."""

import pathlib
import subprocess
import sys
import tarfile

import numpy as np
import pytest

from spectr_jax.data.corpus import open_sentences

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("lm1b"),
]  # One worker installs the environment with TensorFlow, once.
ROOT = pathlib.Path(__file__).parents[2]
URL = (
    "http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz"
)
TOP = "1-billion-word-language-modeling-benchmark-r13output"
FILES = {  # As in the release, whose training file 0 became the held-out files.
    "training-monolingual.tokenized.shuffled": [
        "news.en-00001-of-00100",
        "news.en-00002-of-00100",
        "news.en-00099-of-00100",
    ],
    "heldout-monolingual.tokenized.shuffled": [
        "news.en.heldout-00000-of-00050",
        "news.en.heldout-00049-of-00050",
    ],
}


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Returns the unpacked archive: 4,000 sentences, some repeated, some not ASCII."""
    folder = tmp_path_factory.mktemp("release") / TOP
    rng = np.random.default_rng(0)
    words = ["draft", "target", "token", "law", "plan", "naïve", "東京", "U.S."]
    for name, files in FILES.items():
        (folder / name).mkdir(parents=True)
        for file in files:
            lines = [
                f"{' '.join(rng.choice(words, rng.integers(1, 9)))} {rng.integers(500)} ."
                for _ in range(800)
            ]
            (folder / name / file).write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def prepared(release, tmp_path_factory):
    """Returns a TFDS folder that the script filled from an archive among TFDS's downloads."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download import resource

    data_dir = tmp_path_factory.mktemp("tfds")
    official = tfds.builder_cls("lm1b").url_infos[URL]
    assert official.filename == f"{TOP}.tar.gz" and official.size == 1_792_209_805
    archive = data_dir / "downloads" / "lm1b" / resource.get_dl_fname(URL, official.checksum)
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as file:
        file.add(release, TOP)
    archive.with_name(f"{archive.name}.INFO").write_text("{}")
    command = ["scripts/prepare_lm1b.sh", f"--data_dir={data_dir}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if not (ROOT / ".venv-lm1b/installed").exists():
        pytest.skip(
            f"TensorFlow cannot be installed here: {result.stderr.strip().splitlines()[-1]}"
        )
    assert result.returncode == 0, result.stderr
    assert "train: 2,400 sentences in 1 files\ntest: 1,600 sentences in 1 files\n" in result.stdout
    return data_dir


def test_tfds_and_the_unpacked_release_have_the_same_sentences(release, prepared):
    for split, folder in zip(("train", "test"), FILES, strict=True):
        built, unpacked = (
            open_sentences(f"tfds:lm1b:{split}", str(prepared)),
            open_sentences(str(release / folder)),
        )
        ours, theirs = (
            [corpus[index] for index in range(len(corpus))] for corpus in (built, unpacked)
        )
        assert ours != theirs  # TFDS shuffles.
        assert sorted(ours) == sorted(theirs) and len(set(ours)) < len(ours)


def test_training_runs_on_the_prepared_corpus(prepared, tmp_path):
    """Takes three steps of a small model, with a config of the ladder."""
    fields = {
        "steps": 3,
        "batch_size": 8,
        "eval_every": 3,
        "model.width": 16,
        "model.mlp": 32,
        "model.vocab_size": 300,
    }
    fields |= {
        "data.tfds_dir": prepared,
        "data.tokenizer": tmp_path / "tokenizer.model",
        "data.heldout_sentences": 100,
    }
    given = [f"--config.{name}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "spectr_jax.train"]
    result = subprocess.run(
        [*command, "--config=configs/lm1b.py:draft_2m", *given, f"--workdir={tmp_path / 'run'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run/checkpoints/3").is_dir() and "eval_bits_per_character" in (
        tmp_path / "run/metrics.jsonl"
    ).read_text()
