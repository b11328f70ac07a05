"""One process group after another in the same test process."""

import torch
from deepspeed.utils import groups


def leave() -> None:
    """Destroy the group, and make DeepSpeed forget the groups that it cloned of it."""
    torch.distributed.destroy_process_group()
    for name, value in vars(groups).items():
        if "_GROUP" not in name or not name.isupper():
            continue
        if isinstance(value, dict):
            value.clear()
        else:
            setattr(groups, name, None)
