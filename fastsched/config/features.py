"""What `fastsched cluster` computes of every training row with the base policy (algorithms.md 2.1)."""

from dataclasses import dataclass

from fastsched.config.checks import require

SENTENCE_TRANSFORMERS = "sentence-transformers:"


@dataclass(frozen=True)
class FeaturesConfig:
    encoder: str = "policy"
    """Embedding of a row: `policy`, the mean of the base policy's last hidden states, or `sentence-transformers:MODEL`."""
    reference_column: str | None = None
    """Column with the reference chain of thought, which is embedded behind the question; the answer where there is none."""
    max_tokens: int = 4096
    """Longer texts, and answers behind longer prompts, are cut."""
    clusters: int = 64
    dims: int = 128
    """Dimensions that PCA keeps for clustering; fewer where the data has fewer."""
    seed: int = 42
    batch_tokens: int = 16384
    """Tokens of one forward pass, padding included."""

    def __post_init__(self):
        require(self.encoder == "policy" or self.encoder.removeprefix(SENTENCE_TRANSFORMERS) not in ("", self.encoder),
                f"features.encoder: {self.encoder!r} is neither policy nor {SENTENCE_TRANSFORMERS}MODEL")
        require(min(self.max_tokens, self.clusters, self.dims, self.batch_tokens) >= 1,
                "features: max_tokens, clusters, dims and batch_tokens must be positive")
