"""The progress bar of long programs, on stderr."""

import tqdm

from spectr_jax.utils import hosts


def progress(total: int, unit: str, leave: bool = True, initial: int = 0) -> tqdm.tqdm:
    """Returns a progress bar that only the first process shows; `initial` steps are done already."""
    return tqdm.tqdm(
        total=total,
        unit=unit,
        leave=leave,
        initial=initial,
        dynamic_ncols=True,
        disable=not hosts.is_first(),
    )
