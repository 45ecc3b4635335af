"""The load of the experts over a step: counted on the device, reported in the log, and balanced by the expert bias.

Each router counts its tokens during the micro-batches of a step (`megatron.lm.model.moe.router`). At the end of the step the counts of all
ranks are summed, the bias of an expert with fewer tokens than the mean rises by `--moe-router-bias-update-rate`, and the bias of one with
more falls (arXiv:2408.15664). A skipped step changes no bias, but its load is reported. Nothing waits for the device, so a CUDA graph can
contain the end of a step.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.lm.config import ModelConfig
from megatron.lm.model.moe.router import AUX, ENTROPY, MICRO_BATCHES, Z, routers
from megatron.lm.processes.grid import Grid
from megatron.lm.processes.process_groups import device


class ExpertLoad:
    """The load of this rank's layers with experts.

    Args:
        model: of this rank; None, or a dense model, has no experts.
        config: of the model.
        grid: defines the ranks whose tokens are counted.

    Attributes:
        routers: of this rank's layers, in order.
    """

    def __init__(self, model: nn.Module | None = None, config: ModelConfig | None = None, grid: Grid | None = None) -> None:
        self.routers = [] if model is None else list(routers(model))
        self.config, self.grid = config, Grid() if grid is None else grid
        if self.routers:
            # Results of the last step, at fixed addresses, which graphs overwrite.
            self._counts = torch.stack([router.tokens_per_expert for router in self.routers]).double()
            self._sums = torch.stack([router.sums for router in self.routers]).double()

    @torch.no_grad()
    def end_step(self, usable: Tensor) -> None:
        """Sum the step's load over ranks, update the expert biases, and start counting the next step. Collective.

        Args:
            usable: bool 0-dim, whether the optimizer took the step, the same on all ranks.
        """
        if not self.routers:
            return
        # FP64 is exact up to 2^53 tokens, and one tensor needs one collective.
        loads = torch.stack([torch.cat([router.tokens_per_expert.double(), router.sums.double()]) for router in self.routers])
        if self.grid.scales.size > 1:
            dist.all_reduce(loads, group=self.grid.scales.group)
        self._counts.copy_(loads[:, : self._counts.shape[1]])
        self._sums.copy_(loads[:, self._counts.shape[1] :])
        assert self.config is not None
        rate = self.config.moe_router_bias_update_rate * usable.to(self._counts.device)
        missing = torch.sign(self._counts.mean(1, keepdim=True) - self._counts)
        for router, direction in zip(self.routers, missing, strict=True):
            if router.expert_bias is not None:
                router.expert_bias += (rate * direction).to(router.expert_bias.dtype)
            router.tokens_per_expert.zero_()
            router.sums.zero_()

    def by_layer(self) -> dict[int, dict[str, Tensor]]:
        """Return the last step's load by layer, numbered from 0, of the whole model. Collective; waits for the device.

        Returns:
            For each layer with experts, `load`: FP64 [E], each expert's share of the choices; and FP64 0-dim `aux_loss` and `z_loss`,
            without their coefficients and 0 if they are off, and `entropy` of the router's scores in nats, means over tokens. Layers that
            counted no token are absent.
        """
        if self.config is None or self.config.num_experts is None:
            return {}
        experts, pipeline = self.config.num_experts, self.grid.pipeline
        table = torch.zeros(self.config.num_layers, experts + 4, dtype=torch.float64, device=device())
        for router, counts, sums in zip(self.routers, *((self._counts, self._sums) if self.routers else ((), ())), strict=True):
            scaled = sums.clone()
            scaled[[AUX, Z]] *= router.parts
            table[router.layer_number - 1] = torch.cat([counts, scaled])
        if pipeline.size > 1:
            dist.all_reduce(table, group=pipeline.group)
        table = table.cpu()
        return {
            layer: {
                "load": row[:experts] / row[:experts].sum(),
                "aux_loss": row[experts + AUX] / row[experts + MICRO_BATCHES],
                "z_loss": row[experts + Z] / row[experts + MICRO_BATCHES],
                "entropy": row[experts + ENTROPY] / row[experts + MICRO_BATCHES],
            }
            for layer, row in enumerate(table)
            if row[experts + MICRO_BATCHES]
        }

    def values(self) -> dict[str, float]:
        """Return the last step's numbers for the log; empty for a dense model. Collective.

        Returns:
            `moe_aux_loss`, `moe_z_loss` and `moe_entropy`, means over layers; `moe_load_max` and `moe_load_min`, the largest and smallest
            load of an expert of any layer, where 1 is the mean.
        """
        layers = self.by_layer()
        if not layers:
            return {}
        loads = torch.stack([layer["load"] for layer in layers.values()])
        loads = loads * loads.shape[1]
        means = {name: float(torch.stack([layer[name] for layer in layers.values()]).mean()) for name in ("aux_loss", "z_loss", "entropy")}
        return {
            **{f"moe_{name}": value for name, value in means.items()},
            "moe_load_max": float(loads.max()),
            "moe_load_min": float(loads.min()),
        }
