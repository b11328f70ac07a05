"""What a rollout server adds to vLLM's worker: weights that arrive as safetensors files, and their fingerprints.

vLLM imports this module in the worker process because the server names `WorkerExtension`; importing it registers the backend.
"""

from dataclasses import dataclass

import torch
from safetensors import safe_open
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from fastsched.engines.rollout.vllm_model import model_fingerprints, repack_tied_head, watch_packing

BACKEND = WeightTransferConfig(backend="safetensors")


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing has to be agreed on before the first file."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """One file of an update, with Hugging Face names; all files together hold every weight."""

    path: str


class SafetensorsTransfer(WeightTransferEngine[NoInit, FileUpdate]):
    """Weights through files in shared memory, or on a file system that trainer and server both see. No pickle anywhere."""

    init_info_cls = NoInit
    update_info_cls = FileUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdate) -> None:
        with safe_open(update_info.path, "pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.model_config.hf_text_config.tie_word_embeddings:
            repack_tied_head(self.model)

    def shutdown(self) -> None:
        pass


class WorkerExtension:
    """Methods of the worker that /collective_rpc reaches."""

    def fingerprints(self) -> dict[str, int | None]:
        return model_fingerprints(self.get_model(), self.model_config.dtype)


watch_packing()
WeightTransferEngineFactory.register_engine(BACKEND.backend, SafetensorsTransfer)
