"""A causal language model as one module whose forward ends in the loss, so that ZeRO-3 gathers the head's weight as well."""

from typing import Any, Callable, Optional

import torch
from torch import nn

from fastsched.engines.models import backbone_and_head
from fastsched.types import COMMON, Head, MicroBatch


class Policy(nn.Module):
    """`forward(micro, loss)`: packed tokens -> hidden states of the R trained tokens -> `loss(Head)`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        split = backbone_and_head(model)
        self.model = model
        self.head = _HeadModule(split.weight, split.bias, split.softcap)
        self.block_mask = model.config._attn_implementation == "sdpa"

    def forward(self, micro: MicroBatch, loss: Callable[[Head], Any]) -> Any:
        device = self.head.weight.device
        move = lambda values: torch.from_numpy(values).to(device, non_blocking=True)
        mask = attention_mask(move(micro.group_ids), move(micro.response_ids)) if self.block_mask else None
        hidden = self.model.get_decoder()(
            input_ids=move(micro.input_ids), position_ids=move(micro.position_ids), attention_mask=mask, use_cache=False
        ).last_hidden_state
        return self.head(hidden.flatten(0, 1).index_select(0, move(micro.rows)), loss)


class _HeadModule(nn.Module):
    def __init__(self, weight: nn.Parameter, bias: Optional[nn.Parameter], softcap: Optional[float]):
        super().__init__()
        self.weight, self.bias, self.softcap = weight, bias, softcap

    def forward(self, hidden: torch.Tensor, loss: Callable[[Head], Any]) -> Any:
        return loss(Head(hidden, self.weight, self.bias, self.softcap))


def attention_mask(group_ids: torch.Tensor, response_ids: torch.Tensor) -> torch.Tensor:
    """[B, 1, W, W] bool: position i sees j <= i of its own or the common group that is prompt or of its own response (MicroBatch)."""
    width = group_ids.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=group_ids.device).tril()
    same_group = (group_ids[:, :, None] == group_ids[:, None, :]) | (group_ids[:, None, :] == COMMON)
    visible = (response_ids[:, None, :] == 0) | (response_ids[:, :, None] == response_ids[:, None, :])
    return (same_group & visible & causal)[:, None]


def weight_names(policy: Policy) -> list[tuple[str, nn.Parameter]]:
    """Parameters under their Hugging Face names; a tied head appears once, as the input embedding."""
    return [(name.removeprefix("model."), p) for name, p in policy.named_parameters()]
