"""Reading DCP's metadata: the one place, since it is a pickle and so must only be read from trusted files."""

from __future__ import annotations

import os

from torch.distributed.checkpoint.metadata import Metadata

from quantshard.checkpoints import store
from quantshard.errors import CheckpointError


def read_metadata(path: str | os.PathLike[str]) -> Metadata:
    """The metadata of the checkpoint in directory `path`.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        return store.reader(path).read_metadata()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: it has no .metadata, which is written last; choose another"
        ) from None
    except Exception as error:  # what is not a pickle, or half of one, can fail in any way
        raise CheckpointError(f"{path}: its .metadata cannot be read ({error}); choose another checkpoint") from error
