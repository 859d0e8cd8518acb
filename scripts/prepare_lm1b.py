"""Builds TFDS's lm1b as array records; `scripts/prepare_lm1b.sh` runs it where TensorFlow is installed."""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Before TensorFlow is imported: it greets at length.

import tensorflow_datasets as tfds


def main():
    parser = argparse.ArgumentParser(prog="scripts/prepare_lm1b.sh", description="Makes LM1B ready for training.")
    parser.add_argument("--data_dir", help="where the data set goes (default: TFDS's own, ~/tensorflow_datasets)")
    parser.add_argument("--manual_dir", help="a folder with the archive, if you have it; its checksum is verified")
    arguments = parser.parse_args()
    builder = tfds.builder("lm1b", data_dir=arguments.data_dir, file_format="array_record")
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(manual_dir=arguments.manual_dir))
    for name, split in builder.info.splits.items():
        print(f"{name}: {split.num_examples:,} sentences in {split.num_shards} files")
    print(
        f"ready in {builder.data_dir}"
        + (f"; train with --config.data.tfds_dir={arguments.data_dir}" * bool(arguments.data_dir))
    )


if __name__ == "__main__":
    main()
