"""A feed-forward layer of experts, as data: who chooses, how many there are, what they count. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

from triaxis.models.kinds import Cut, Kind

if TYPE_CHECKING:
    from triaxis.models.config import ModelConfig


class ScoreKind(StrEnum):
    """What a router's logits become before experts are chosen."""

    SOFTMAX = "softmax"  # over all experts (Qwen3-MoE, DeepSeek-V2)
    SIGMOID = "sigmoid"  # each expert for itself (DeepSeek-V3, GLM-4.5, Kimi-K2)
    CHOSEN_SOFTMAX = "chosen_softmax"  # over the chosen experts' logits (Mixtral, GPT-OSS)


class GroupScore(StrEnum):
    """What a group of experts is worth where only some groups may be chosen from."""

    BEST = "best"  # its best expert (DeepSeek-V2)
    TWO_BEST = "two_best"  # the sum of its two best (DeepSeek-V3)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How tokens choose experts. The rule is told by the family, never guessed from sizes.

    experts: of the layer; chosen: for each token
    renormalised: divide the chosen experts' weights by their sum
    scale: multiplies the weights, after that
    groups, chosen_groups: experts fall into `groups` equal runs, and a token chooses from its best `chosen_groups`
    choosing_bias: a bias that is added to scores for the choice only, and moved by the load
    """

    experts: int
    chosen: int
    scores: ScoreKind = ScoreKind.SOFTMAX
    renormalised: bool = True
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_score: GroupScore = GroupScore.BEST
    choosing_bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(
                f"`chosen` experts must be from 1 to the {self.experts} of a layer, but is {self.chosen}"
            )
        if self.groups < 1 or self.experts % self.groups:
            raise ValueError(f"`groups` must divide the {self.experts} experts, but is {self.groups}")
        if not 1 <= self.chosen_groups <= self.groups:
            raise ValueError(f"`chosen_groups` must be from 1 to {self.groups}, but is {self.chosen_groups}")
        if self.chosen > self.chosen_groups * (self.experts // self.groups):
            raise ValueError(
                f"`chosen_groups` must hold the {self.chosen} experts that a token chooses, but is "
                f"{self.chosen_groups} of {self.experts // self.groups} experts each"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Kind):
    """A router and SwiGLU experts of `ffn_size` inner features each.

    shared_ffn_size: of an MLP that every token passes; 0: none. shared_gate: its output is weighed by a sigmoid gate
    bias_rate: what the choosing bias moves by after a step
    sequence_loss: coefficient of the balancing loss over each sequence; z_loss: of the squared log-sum-exp of logits
    """

    module: ClassVar[str] = "triaxis.models.experts:ExpertLayer"

    rule: RoutingRule
    ffn_size: int
    shared_ffn_size: int = 0
    shared_gate: bool = False
    bias_rate: float = 1e-3
    sequence_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.ffn_size < 1 or self.shared_ffn_size < 0:
            raise ValueError(
                f"model `ffn_size` must be at least 1 and `shared_ffn_size` at least 0, but they are {self.ffn_size} "
                f"and {self.shared_ffn_size}"
            )

    @property
    def has_loss(self) -> bool:
        return self.sequence_loss > 0 or self.z_loss > 0

    def _expert(self, model: ModelConfig) -> int:
        return 3 * model.hidden_size * self.ffn_size

    def _besides(self, model: ModelConfig) -> int:
        """The router, and what every token passes."""
        gate = model.hidden_size if self.shared_gate else 0
        return model.hidden_size * (self.rule.experts + 3 * self.shared_ffn_size) + gate

    def parameters(self, model: ModelConfig) -> int:
        biases = self.rule.experts if self.rule.choosing_bias else 0
        return self.rule.experts * self._expert(model) + self._besides(model) + biases

    def matmul_parameters(self, model: ModelConfig) -> int:
        """Of the experts that a token chooses, the router and the shared expert."""
        return self.rule.chosen * self._expert(model) + self._besides(model)

    def active_parameters(self, model: ModelConfig) -> int:
        """Parameters that a token has to do with."""
        return self.parameters(model) - (self.rule.experts - self.rule.chosen) * self._expert(model)

    def cuts(self) -> tuple[Cut, ...]:
        shared = Cut(blocks=self.shared_ffn_size, what="features of the shared expert")
        return (shared,) if self.shared_ffn_size else ()

    def expert_cuts(self) -> tuple[Cut, ...]:
        return (Cut(blocks=self.ffn_size, what="features of an expert (or --ep must be above 1)"),)

    @property
    def experts(self) -> int:
        return self.rule.experts

    @property
    def has_choosing_bias(self) -> bool:
        return self.rule.choosing_bias
