"""A layer of experts: route, send each token to the experts that it chose, multiply, bring back, mix.

Nothing is dropped, however uneven the load, and the order of every sum is fixed: the layer gives the same bits for the
same tokens each time, in forward and in recomputation.

Shapes: T tokens routed here, D hidden, E experts of the layer, K chosen for a token, R = T · K rows, S rows for the
experts held here, F inner features held here, B rows of the microbatch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from triaxis.models.balance import balance_loss, z_loss
from triaxis.models.batch import SequenceContext
from triaxis.models.blocks import MLP
from triaxis.models.config import ModelConfig
from triaxis.models.experts_kind import Experts
from triaxis.models.kinds import Dense
from triaxis.models.routing import bias_step, choose, expert_counts
from triaxis.parallel.layers.build import Build
from triaxis.parallel.layers.declare import declare, declare_state
from triaxis.parallel.layers.experts import (
    bring_back,
    enter_experts,
    grouped_linear,
    leave_experts,
    plan_exchange,
    return_rows,
    router_logits,
    send_to_experts,
    take_rows,
)
from triaxis.parallel.places.layout import (
    EXPERT_REPLICAS,
    REPLICAS,
    Init,
    ParameterLayout,
    replicated,
    slab,
)


class ExpertLayer(nn.Module):
    """[T, D] → [T, D], and the layer's own loss where it has one.

    With ep 1 experts are cut over tp like a dense MLP; with ep above 1 each rank holds whole ones.
    counts_ME: for each microbatch of this step, how many tokens each expert got here; None: nobody asks (`count`)
    recorded: for each microbatch, the experts to take in place of the router's choice (None: choose)
    """

    bias_E: Tensor | None

    def __init__(self, kind: Experts, model: ModelConfig, build: Build, name: str) -> None:
        super().__init__()
        mesh, rule = build.mesh, kind.rule
        if rule.experts % mesh.ep.size:
            raise ValueError(
                f"`ep` must divide the {rule.experts} experts of a layer of {model.name}, but is {mesh.ep.size}"
            )
        self.kind, self.mesh, self.name = kind, mesh, name
        self.sequence_parallel = build.sequence_parallel
        self.whole = mesh.ep.size > 1
        self.held = rule.experts // mesh.ep.size
        self.swiglu = build.kernels.swiglu
        self.counts_ME: Tensor | None = None
        self.recorded: dict[int, Tensor] | None = None
        # Every tensor rank sees other tokens, or makes a part of every output: the router's gradient is partial.
        self.router = declare(
            build.parameter(rule.experts, model.hidden_size),
            replicated(
                f"{name}.gate.weight",
                (rule.experts, model.hidden_size),
                mesh.tp.rank,
                sequence_parallel=True,
                decayed=True,
                init=Init.NORMAL,
                std=model.init_std,
            ),
        )
        self._add_experts(kind, model, build, name)
        self._add_bias(kind, build, name)
        self.shared = self.shared_gate = None
        if kind.shared_ffn_size:
            dense = Dense(ffn_size=kind.shared_ffn_size)
            self.shared = MLP(dense, model, build, f"{name}.shared_experts")
        if kind.shared_gate:
            self.shared_gate = declare(
                build.parameter(1, model.hidden_size),
                replicated(
                    f"{name}.shared_expert_gate.weight",
                    (1, model.hidden_size),
                    mesh.tp.rank,
                    sequence_parallel=build.sequence_parallel,
                    decayed=True,
                    init=Init.NORMAL,
                    std=model.init_std,
                ),
            )

    def _add_experts(self, kind: Experts, model: ModelConfig, build: Build, name: str) -> None:
        """gate_up [experts · 2F, D] (each expert's gate above its up) and down [experts · D, F]."""
        parts = 1 if self.whole else self.mesh.tp.size
        place = 0 if self.whole else self.mesh.tp.rank
        if kind.ffn_size % parts:
            raise ValueError(
                f"`tp` must divide the {kind.ffn_size} features of an expert of {model.name} where ep is 1, "
                f"but is {parts}; give --ep"
            )
        features, hidden = kind.ffn_size // parts, model.hidden_size
        first = self.mesh.ep.rank * self.held
        low, high = place * features, (place + 1) * features

        def piece(expert: int, part: str, std: float) -> ParameterLayout:
            down = part == "down_proj"
            shape = (hidden, kind.ffn_size) if down else (kind.ffn_size, hidden)
            offsets, sizes = slab(shape, int(down), low, high)
            return ParameterLayout(
                name=f"{name}.experts.{expert}.{part}.weight",
                shape=shape,
                offsets=offsets,
                sizes=sizes,
                local_shape=sizes,
                outermost=int(down),
                std=std,
                replicas=EXPERT_REPLICAS if self.whole else REPLICAS,
            )

        experts = range(first, first + self.held)
        self.gate_up = declare(
            build.parameter(self.held * 2 * features, hidden),
            *(piece(expert, part, model.init_std) for expert in experts for part in ("gate_proj", "up_proj")),
        )
        self.down = declare(
            build.parameter(self.held * hidden, features),
            *(piece(expert, "down_proj", model.output_std()) for expert in experts),
        )

    def _add_bias(self, kind: Experts, build: Build, name: str) -> None:
        """A state without a gradient: fp32 whatever the model is in, the same on every rank."""
        bias_E = None
        if kind.rule.choosing_bias:
            size = kind.rule.experts
            device = build.mesh.world.device
            bias_E = torch.zeros(size, dtype=torch.promote_types(build.dtype, torch.float32), device=device)
            layout = replicated(
                f"{name}.gate.e_score_correction_bias", (size,), build.mesh.tp.rank, init=Init.ZEROS
            )
            declare_state(bias_E, layout)
        self.register_buffer("bias_E", bias_E, persistent=False)

    def forward(self, hidden_TD: Tensor, context: SequenceContext) -> Tensor | tuple[Tensor, Tensor]:
        group, rule = self.mesh.tp, self.kind.rule
        tokens_TD = enter_experts(
            hidden_TD, group, whole=self.whole, sequence_parallel=self.sequence_parallel
        )
        logits_TE = router_logits(tokens_TD, self.router)
        microbatch = context.inputs.microbatch
        recorded = None if self.recorded is None else self.recorded[microbatch]
        routes = choose(logits_TE, rule, self.bias_E, recorded)
        counts_E = expert_counts(routes.ids_TK, rule.experts)
        if self.counts_ME is not None and torch.is_grad_enabled():  # not in evaluation
            self.counts_ME[microbatch].copy_(counts_E)  # never added to: recomputation comes here again
        order_R = routes.ids_TK.flatten().argsort(stable=True)
        exchange = plan_exchange(counts_E, order_R.numel(), self.mesh.ep, self.mesh.world)
        rows_SD = send_to_experts(take_rows(tokens_TD, order_R, rule.chosen), exchange)
        inner_SF = self.swiglu(grouped_linear(rows_SD, self.gate_up, exchange.counts))
        output_RD = bring_back(grouped_linear(inner_SF, self.down, exchange.counts), exchange)
        output_TKD = return_rows(output_RD, order_R).unflatten(0, (-1, rule.chosen))
        # In the order of the choices and in the scores' precision: K numbers are added for every token.
        mixed_TD = (routes.weights_TK[:, None] @ output_TKD.to(routes.weights_TK.dtype))[:, 0]
        output_TD = leave_experts(
            mixed_TD.to(hidden_TD.dtype), group, whole=self.whole, sequence_parallel=self.sequence_parallel
        )
        if self.shared is not None:
            output_TD = output_TD + self._shared(hidden_TD, context)
        if not self.kind.has_loss:
            return output_TD
        return output_TD, self._loss(logits_TE, routes.scores_TE, routes.ids_TK, context)

    def _shared(self, hidden_TD: Tensor, context: SequenceContext) -> Tensor:
        assert self.shared is not None
        output_TD: Tensor = self.shared(hidden_TD, context)
        if self.shared_gate is not None:
            output_TD = torch.sigmoid(F.linear(hidden_TD, self.shared_gate)) * output_TD
        return output_TD

    def _loss(self, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, context: SequenceContext) -> Tensor:
        """Scaled by the global batch's rows; on each tensor rank its part, or (cut experts) all of it on the first."""
        rows, length = context.inputs.batch.tokens_BL.shape
        tensor = self.mesh.tp
        first = tensor.rank * logits_TE.shape[0] if self.whole else 0
        sharing = tensor if self.whole else None
        loss = self.kind.sequence_loss * balance_loss(
            scores_TE, ids_TK, rows=rows, length=length, first=first, sharing=sharing
        )
        loss = loss + self.kind.z_loss * z_loss(logits_TE) / length
        counted = self.whole or tensor.rank == 0
        loss = loss * (context.inputs.row_scale * counted)
        if (
            self.whole and not self.sequence_parallel
        ):  # the first rank's is reported: it must be all ranks' parts
            total = loss.detach().clone()
            tensor.all_reduce(total, label="loss of a layer")
            loss = loss + (total - loss.detach())
        return loss

    def count(self, microbatches: int) -> None:
        """Counts tokens from now on, of so many microbatches a step."""
        sizes = microbatches, self.kind.rule.experts
        self.counts_ME = torch.zeros(sizes, dtype=torch.int64, device=self.router.device)

    def tokens_per_expert(self) -> Tensor:
        """int64 [E]: over this step's microbatches, each token counted by one of the ranks that hold it."""
        assert self.counts_ME is not None, "`count` comes first"
        return self.counts_ME.sum(0) * int(self.whole or self.mesh.tp.rank == 0)

    @torch.no_grad()
    def settle(self, counts_E: Tensor, rate: float | None = None) -> None:
        """Moves the choosing bias after a step, by `rate` or the kind's own. counts_E: over the whole global batch."""
        if self.bias_E is not None:
            moved = self.kind.bias_rate if rate is None else rate
            self.bias_E.copy_(bias_step(self.bias_E, counts_E, moved))
