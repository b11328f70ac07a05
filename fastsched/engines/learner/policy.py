"""A causal language model as one module whose forward ends in the loss, so that ZeRO-3 gathers the head's weight as well."""

from functools import partial
from typing import Any, Callable, Optional

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from fastsched.engines.models.loading import backbone_and_head
from fastsched.types import COMMON, Head, MicroBatch


class Policy(nn.Module):
    """`forward(micro, loss)`: packed tokens -> hidden states of the R trained tokens -> `loss(Head)`.

    Without dropout, as the sampler computes them: with it a policy would differ from itself.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        turn_off_dropout(model)
        split = backbone_and_head(model)
        self.model = model
        self.head = _HeadModule(split.weight, split.bias, split.softcap)
        self.mask = {"sdpa": partial(additive_mask, dtype=split.weight.dtype),
                     "flex_attention": flex_mask}.get(model.config._attn_implementation)

    def forward(self, micro: MicroBatch, loss: Callable[[Head], Any]) -> Any:
        device = self.head.weight.device
        move = lambda values: torch.from_numpy(values).to(device, non_blocking=True)
        mask = self.mask(move(micro.group_ids), move(micro.response_ids)) if self.mask else None
        hidden = self.model.get_decoder()(
            input_ids=move(micro.input_ids), position_ids=move(micro.position_ids), attention_mask=mask, use_cache=False
        ).last_hidden_state
        return self.head(hidden.flatten(0, 1).index_select(0, move(micro.rows)), loss)


def turn_off_dropout(model: nn.Module) -> None:
    """Evaluation mode for every module, except that layers which recompute their activations still do so in backward."""
    model.eval()
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            layer.training = True  # this layer alone: it recomputes in training mode only
            for name in [n for n, value in vars(layer).items() if "drop" in n and isinstance(value, float)]:
                setattr(layer, name, 0.0)


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
    visible = _visible(group_ids[:, :, None], group_ids[:, None, :], response_ids[:, :, None], response_ids[:, None, :])
    return (visible & causal)[:, None]


def additive_mask(group_ids: torch.Tensor, response_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, W, W]: `attention_mask` as 0 and -inf, which sdpa adds to the scores. Made once: of a bool mask every layer makes its own, and
    keeps it for the backward pass."""
    visible = attention_mask(group_ids, response_ids)
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))


def flex_mask(group_ids: torch.Tensor, response_ids: torch.Tensor) -> BlockMask:
    """`attention_mask` by blocks of 128 for FlexAttention: no [W, W] array, and blocks that nothing sees are not computed."""
    batch, width = group_ids.shape

    def mask(b, h, i, j):
        return (j <= i) & _visible(group_ids[b, i], group_ids[b, j], response_ids[b, i], response_ids[b, j])

    return create_block_mask(mask, B=batch, H=None, Q_LEN=width, KV_LEN=width, device=group_ids.device)


def _visible(group_i: torch.Tensor, group_j: torch.Tensor, response_i: torch.Tensor, response_j: torch.Tensor) -> torch.Tensor:
    return ((group_i == group_j) | (group_j == COMMON)) & ((response_j == 0) | (response_i == response_j))


def weight_names(policy: Policy) -> list[tuple[str, nn.Parameter]]:
    """Parameters under their Hugging Face names; a tied head appears once, as the input embedding."""
    return [(name.removeprefix("model."), p) for name, p in policy.named_parameters()]
