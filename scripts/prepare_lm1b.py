"""Prepares TFDS's lm1b as array records; `scripts/prepare_lm1b.sh` runs it where TensorFlow is
installed."""

import argparse
import os
import traceback

EPILOG = """\
example:
  scripts/prepare_lm1b.sh --data_dir=data

exit status: 0 done; 2 bad input, full disk or no network: one line on stderr says what to do; 130
stopped by Ctrl-C; 1 a bug"""


class Parser(argparse.ArgumentParser):
    """Errors as in `spectr_jax.utils.cli`, which is not installed here."""

    def error(self, message):
        self.exit(2, f"error: {message}; see --help\n")


def main():
    parser = Parser(
        prog="scripts/prepare_lm1b.sh",
        description="Prepares LM1B for training.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--data_dir", help="folder of the data set (default: that of TFDS)")
    parser.add_argument("--manual_dir", help="folder with the archive, if you have it already")
    parser.add_argument("--verbose", action="store_true", help="also print an error's traceback")
    arguments = parser.parse_args()
    data_dir, manual_dir = arguments.data_dir, arguments.manual_dir
    if manual_dir is not None and not os.path.isdir(manual_dir):
        parser.error(f"--manual_dir={manual_dir} is not a folder")
    try:
        prepare(data_dir, manual_dir)
    except OSError as error:  # Errors of the disk and, from `requests`, of the network.
        if arguments.verbose:
            traceback.print_exc()
        reason = " ".join(str(error).split())[:300]
        fix = "check the disk and the network, and run the same command again"
        parser.exit(2, f"error: LM1B is not ready ({reason}); {fix}\n")
    except KeyboardInterrupt:
        parser.exit(130, "interrupted; the same command resumes\n")


def prepare(data_dir: str | None, manual_dir: str | None) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow reads it when imported.
    import tensorflow_datasets as tfds

    builder = tfds.builder("lm1b", data_dir=data_dir, file_format="array_record")
    download = tfds.download.DownloadConfig(manual_dir=manual_dir)
    builder.download_and_prepare(download_config=download)
    for name, split in builder.info.splits.items():
        print(f"{name}: {split.num_examples:,} sentences in {split.num_shards} files")
    flag = f"; train with --config.data.tfds_dir={data_dir}" if data_dir else ""
    print(f"ready in {builder.data_dir}{flag}")


if __name__ == "__main__":
    main()
