"""Builds TFDS's lm1b as array records; `scripts/prepare_lm1b.sh` runs it where TensorFlow is
installed."""

import argparse
import os
import traceback

EPILOG = """\
example:
  scripts/prepare_lm1b.sh --data_dir=data

exit status: 0 done; 2 bad input, no room or no network, told in one line on stderr; 130 stopped by Ctrl-C; 1 a bug"""


class Parser(argparse.ArgumentParser):
    """Errors as those of `spectr_jax.utils.cli`, which is not installed here."""

    def error(self, message):
        self.exit(2, f"error: {message}; see --help\n")


def main():
    parser = Parser(
        prog="scripts/prepare_lm1b.sh",
        description="Makes LM1B ready for training.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--data_dir", help="where the data set goes (default: TFDS's own, ~/tensorflow_datasets)"
    )
    parser.add_argument(
        "--manual_dir", help="a folder with the archive, if you have it; its checksum is verified"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print the traceback of an error too, above its line"
    )
    arguments = parser.parse_args()
    if arguments.manual_dir is not None and not os.path.isdir(arguments.manual_dir):
        parser.error(f"--manual_dir={arguments.manual_dir} is not a folder")
    try:
        prepare(arguments)
    except (
        OSError
    ) as error:  # What the disk says; and the network, whose errors of requests are OSErrors too.
        if arguments.verbose:
            traceback.print_exc()
        reason = " ".join(str(error).split())[:300]
        parser.exit(
            2,
            f"error: LM1B is not ready ({reason}); see to the disk or the network, and give the "
            "same command again\n",
        )
    except KeyboardInterrupt:
        parser.exit(130, "interrupted; the same command resumes\n")


def prepare(arguments: argparse.Namespace) -> None:
    os.environ.setdefault(
        "TF_CPP_MIN_LOG_LEVEL", "2"
    )  # Before TensorFlow is imported: it greets at length.
    import tensorflow_datasets as tfds

    builder = tfds.builder("lm1b", data_dir=arguments.data_dir, file_format="array_record")
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(manual_dir=arguments.manual_dir)
    )
    for name, split in builder.info.splits.items():
        print(f"{name}: {split.num_examples:,} sentences in {split.num_shards} files")
    print(
        f"ready in {builder.data_dir}"
        + (f"; train with --config.data.tfds_dir={arguments.data_dir}" * bool(arguments.data_dir))
    )


if __name__ == "__main__":
    main()
