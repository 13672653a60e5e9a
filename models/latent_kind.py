"""Latent attention, as data: sizes of its latents and heads, what they count. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from triaxis.models.kinds import Cut, Kind, require_positive

if TYPE_CHECKING:
    from triaxis.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Kind):
    """Causal attention whose keys and values come out of one small latent for each token (DeepSeek-V2, section 2.1).

    latent: elements that keys and values are made of; query_latent: the same for queries, 0: out of the hidden state
    plain_size, turned_size: elements of a query and key head without and with rotary positions; all heads share one
        turned part of the key
    value_size: elements of a value head
    Example (DeepSeek-V3): 576 elements a token, latent 512 and turned 64, stand for 128 heads of 192 and of 128.
    """

    module: ClassVar[str] = "triaxis.models.latent:LatentAttentionLayer"
    norm_eps: ClassVar[float] = 1e-6  # of the latents' norms, whatever the model's is

    heads: int
    latent: int
    plain_size: int
    turned_size: int
    value_size: int
    query_latent: int = 0

    def __post_init__(self) -> None:
        require_positive(self, "heads", "latent", "plain_size", "turned_size", "value_size")
        if self.query_latent < 0:
            raise ValueError(f"model `query_latent` must be at least 0, but is {self.query_latent}")
        if self.value_size > self.head_size:
            raise ValueError(
                f"model `value_size` must be at most the {self.head_size} elements of a key head, "
                f"but is {self.value_size}"
            )

    @property
    def head_size(self) -> int:
        """Elements of a query or key head."""
        return self.plain_size + self.turned_size

    def parameters(self, model: ModelConfig) -> int:
        """The products' weights and the two norms'."""
        return self.matmul_parameters(model) + self.latent + self.query_latent

    def matmul_parameters(self, model: ModelConfig) -> int:
        """Down to the latents, up to the heads, and the output: h·(c + r) + c·a·(n + v) + a·v·h, and queries'."""
        hidden, queries = model.hidden_size, self.heads * self.head_size
        query = hidden * queries
        if self.query_latent:
            query = self.query_latent * (hidden + queries)
        down = hidden * (self.latent + self.turned_size)
        up = self.latent * self.heads * (self.plain_size + self.value_size)
        return query + down + up + self.heads * self.value_size * hidden

    def attention_products(self, model: ModelConfig, length: int) -> int:
        """a·(n + r + v)·s / 2: scores over a key head, values over a value head, half of each."""
        return self.heads * (self.head_size + self.value_size) * length // 2

    def cuts(self) -> tuple[Cut, ...]:
        return (Cut(blocks=self.heads, what="attention heads"),)

    def head_sizes(self) -> tuple[int, ...]:
        return (self.turned_size,)
