"""The responses of a prompt share all of its computation, not only the whole blocks of the paged cache that it fills.

vLLM shares a prompt by blocks (32 tokens on a CPU) and computes the tokens behind the last whole block for every response anew. Here
one request of each prompt computes them; in the next step the others get a copy of its last block and compute the prompt's last token only.
vLLM loads `PromptSharing` by name, as what it calls a KV connector; scheduler and worker each have an instance.
"""

from dataclasses import dataclass

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA
from vllm.v1.kv_cache_interface import FullAttentionSpec


@dataclass
class Copies(KVConnectorMetadata):
    """Blocks (source, target) to copy before this step's forward pass."""

    pairs: list[tuple[int, int]]


class PromptSharing(KVConnectorBase_V1, SupportsHMA):
    """Among requests that are open at the same time: what an ended one leaves behind is not used."""

    def __init__(self, vllm_config, role: KVConnectorRole, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._shares = len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec  # else a prompt's state is more than blocks
        self._block_size = vllm_config.cache_config.block_size
        self._first: dict[tuple[int, ...], object] = {}  # of each prompt, the request that computes it
        self._blocks: dict[str, list[int]] = {}  # of those
        self._pairs: list[tuple[int, int]] = []
        self._caches: list[torch.Tensor] = []

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens of the prompt behind `num_computed_tokens` come as a copy; None: ask in the next step, they are computed now."""
        if not self._shares or request.num_preemptions:
            return 0, False
        first = self._first.setdefault(_prompt(request), request)
        tail = request.num_prompt_tokens - 1 - num_computed_tokens
        if first is request or not 0 < tail < self._block_size:
            return 0, False
        return (tail if first.num_computed_tokens >= request.num_prompt_tokens - 1 else None), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        own, *_ = blocks.get_block_ids()
        first = self._first.get(_prompt(request))
        if first is request:
            self._blocks[request.request_id] = own
        elif num_external_tokens:
            last = (request.num_prompt_tokens - 2) // self._block_size  # block of the last token that is copied
            self._pairs.append((self._blocks[first.request_id][last], own[last]))

    def build_connector_meta(self, scheduler_output) -> Copies:
        pairs, self._pairs = self._pairs, []
        return Copies(pairs)

    def request_finished(self, request, block_ids: list[int]) -> tuple[bool, None]:
        if self._first.get(_prompt(request)) is request:
            del self._first[_prompt(request)]
            self._blocks.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context, **kwargs) -> None:
        if pairs := self._get_connector_metadata().pairs:
            source, target = torch.tensor(pairs).T
            for cache in self._caches:  # [blocks, ...]
                cache[target] = cache[source]

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata, **kwargs) -> None: ...

    def wait_for_save(self) -> None: ...


def _prompt(request) -> tuple[int, ...]:
    return tuple(request.prompt_token_ids)
