"""Kinds of layers and of their parts, as data: sizes, what they count, what tp must divide. Standard library only.

A kind names the module that builds it (`module`), which is imported when a model is built and not before. A layer of
one's own is a kind and a module: nothing else in the engine knows which kinds there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from triaxis.models.config import ModelConfig


class ActivationKind(StrEnum):
    SWIGLU = "swiglu"
    GELU = "gelu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Blocks that tp must divide.

    serving: finer blocks, each group of which shares one of these; tp may then also be a multiple of the blocks, since
        ranks in a row hold the same one
    """

    blocks: int
    what: str
    serving: int | None = None

    def allows(self, tp: int) -> bool:
        if self.serving is None:
            return self.blocks % tp == 0
        # A tp that does not divide the finer blocks is refused for those.
        return self.serving % tp != 0 or self.blocks % tp == 0 or tp % self.blocks == 0


class Kind(ABC):
    """A part of a model that counts for itself.

    module: "package.module:Class" of an nn.Module that is made with (kind, model, build, name); a layer's is called
        with the hidden state and a SequenceContext, and returns the hidden state
    """

    __slots__ = ()
    module: ClassVar[str]

    @property
    def has_loss(self) -> bool:
        """Whether the layer returns a pair, the hidden state and a loss of its own, scaled.

        The first tensor rank's loss is reported, or the sum over tensor ranks under sequence parallelism.
        """
        return False

    @property
    def experts(self) -> int:
        """Experts of the layer, which ep must divide; 0 for none."""
        return 0

    @property
    def has_choosing_bias(self) -> bool:
        """Whether its experts are chosen with a bias that moves by their load."""
        return False

    @abstractmethod
    def parameters(self, model: ModelConfig) -> int:
        """All its parameters, exact."""

    @abstractmethod
    def matmul_parameters(self, model: ModelConfig) -> int:
        """The weights that each token is multiplied with."""

    def attention_products(self, model: ModelConfig, length: int) -> int:
        """Multiplications of a token with keys and values, in a causal sequence of `length`, on average."""
        return 0

    def cuts(self) -> tuple[Cut, ...]:
        """What tp must divide, and why."""
        return ()

    def expert_cuts(self) -> tuple[Cut, ...]:
        """What tp must divide besides where ep is 1, since experts are cut over tp then."""
        return ()

    def active_parameters(self, model: ModelConfig) -> int:
        """Parameters that a token has to do with; all of them but experts that it does not choose."""
        return self.parameters(model)

    def head_sizes(self) -> tuple[int, ...]:
        """Sizes of the heads that rotary positions turn."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention(Kind):
    """Causal attention; each of `kv_heads` key/value heads serves heads / kv_heads query heads in a row.

    bias: on q, k and v; output_bias: on the output's projection; qk_norm: an RMS norm over each head of q and k
    """

    module: ClassVar[str] = "triaxis.models.attention:Attention"

    heads: int
    kv_heads: int
    head_size: int
    bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "heads", "kv_heads", "head_size")
        if self.heads % self.kv_heads:
            divisors = ", ".join(str(part) for part in range(1, self.heads + 1) if self.heads % part == 0)
            raise ValueError(
                f"model `kv_heads` must divide `heads` ({self.heads}), but is {self.kv_heads}; "
                f"these do: {divisors}"
            )

    def parameters(self, model: ModelConfig) -> int:
        biases = self.bias * self.head_size * (self.heads + 2 * self.kv_heads)
        biases += self.output_bias * model.hidden_size
        return self.matmul_parameters(model) + biases + self.qk_norm * 2 * self.head_size

    def matmul_parameters(self, model: ModelConfig) -> int:
        """q, k, v and o: h·d·(2a + 2k)."""
        return model.hidden_size * self.head_size * 2 * (self.heads + self.kv_heads)

    def attention_products(self, model: ModelConfig, length: int) -> int:
        """a·d·s: scores and values, half of each since a token sees what came before."""
        return self.heads * self.head_size * length

    def cuts(self) -> tuple[Cut, ...]:
        return (
            Cut(blocks=self.heads, what="attention heads"),
            Cut(blocks=self.kv_heads, what="key/value heads", serving=self.heads),
        )

    def head_sizes(self) -> tuple[int, ...]:
        return (self.head_size,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense(Kind):
    """A feed-forward layer of `ffn_size` inner features: "swiglu" (gate, up, down) or "gelu" (tanh form; up, down)."""

    module: ClassVar[str] = "triaxis.models.blocks:MLP"

    ffn_size: int
    activation: ActivationKind = ActivationKind.SWIGLU
    bias: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "ffn_size")

    @property
    def inputs(self) -> int:
        """Matrices before the activation."""
        return 2 if self.activation is ActivationKind.SWIGLU else 1

    def parameters(self, model: ModelConfig) -> int:
        biases = self.bias * (self.inputs * self.ffn_size + model.hidden_size)
        return self.matmul_parameters(model) + biases

    def matmul_parameters(self, model: ModelConfig) -> int:
        """g·h·f with g = 3 for SwiGLU and 2 for GELU."""
        return (self.inputs + 1) * model.hidden_size * self.ffn_size

    def cuts(self) -> tuple[Cut, ...]:
        return (Cut(blocks=self.ffn_size, what="MLP features"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Kind):
    """Attention and feed-forward, each on its own norm and added to the residual stream.

    A subclass with a `module` of its own may put the two together otherwise; `norms` is how many norms it has then.
    """

    module: ClassVar[str] = "triaxis.models.blocks:Block"
    norms: ClassVar[int] = 2

    attention: Kind
    feed_forward: Kind

    def parameters(self, model: ModelConfig) -> int:
        parts = self.attention.parameters(model) + self.feed_forward.parameters(model)
        return parts + self.norms * model.norm_parameters()

    def matmul_parameters(self, model: ModelConfig) -> int:
        return self.attention.matmul_parameters(model) + self.feed_forward.matmul_parameters(model)

    def attention_products(self, model: ModelConfig, length: int) -> int:
        return self.attention.attention_products(model, length)

    @property
    def has_loss(self) -> bool:
        return self.feed_forward.has_loss

    @property
    def experts(self) -> int:
        return self.feed_forward.experts

    @property
    def has_choosing_bias(self) -> bool:
        return self.feed_forward.has_choosing_bias

    def cuts(self) -> tuple[Cut, ...]:
        return (*self.attention.cuts(), *self.feed_forward.cuts())

    def expert_cuts(self) -> tuple[Cut, ...]:
        return self.feed_forward.expert_cuts()

    def active_parameters(self, model: ModelConfig) -> int:
        idle = self.feed_forward.parameters(model) - self.feed_forward.active_parameters(model)
        return self.parameters(model) - idle

    def head_sizes(self) -> tuple[int, ...]:
        return self.attention.head_sizes()


def require_positive(kind: Kind, *names: str) -> None:
    """ValueError for a size below 1."""
    for name in names:
        if getattr(kind, name) < 1:
            raise ValueError(f"model `{name}` must be at least 1, but is {getattr(kind, name)}")
