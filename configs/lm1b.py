"""The paper's ladder on LM1B: draft_2m, draft_6m, draft_20m, target_97m (SpecTr, section 8 and appendix F).

    tfds build lm1b --file_format=array_record        # once; downloads 1.7 GB, needs TensorFlow
    python -m spectr_jax.train --config=configs/lm1b.py:draft_6m --workdir=runs/lm1b/draft_6m

The recipe of Flax's LM1B example: AdamW, rsqrt after 1,000 steps of warm-up, weight decay 0.1, dropout 0.1, 256 rows of
128 tokens. One tokenizer for all, trained by whichever run comes first. For accelerators; bfloat16 activations.
To read the unpacked official release instead:

    --config.data.train='DIR/training-monolingual.tokenized.shuffled/news.en-*'
    --config.data.heldout='DIR/heldout-monolingual.tokenized.shuffled/news.en.heldout-*'
"""

from spectr_jax.config import train_config


def get_config(model: str = "draft_6m"):
    config = train_config(model)
    config.model.dtype = "bfloat16"
    config.data.tokenizer = "runs/lm1b/tokenizer.model"
    return config
