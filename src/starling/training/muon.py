"""Muon for a whole model: matrices are stepped by `torch.optim.Muon`, and all other parameters by AdamW."""

from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Optimizer


class Muon(Optimizer):
    """Muon for the parameters with two dimensions, and AdamW for the others, such as biases and convolutions.

    Both optimizers have the same learning rate and weight decay. By default, Muon's steps are scaled to the size of
    AdamW's steps, so that one learning rate fits both.

    Args:
        params: The trainable parameters.
        lr: The learning rate.
        weight_decay: The decoupled weight decay.
        momentum: Muon's momentum.
        nesterov: Whether Muon's momentum is Nesterov's.
        ns_steps: The number of Newton-Schulz iterations that make the momentum orthogonal.
        adjust_lr_fn: How Muon scales its steps; see `torch.optim.Muon`.
        betas: The decay rates of AdamW's two moments.

    References:
        Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
        Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv 2502.16982, from which the scale comes.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> None:
        matrices = [each for each in params if each.ndim == 2]
        others = [each for each in params if each.ndim != 2]
        self._members: list[Optimizer] = []
        if matrices:
            muon = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
            self._members.append(torch.optim.Muon(matrices, lr, weight_decay, **muon))  # type: ignore[arg-type]
        if others:
            self._members.append(AdamW(others, lr, betas, weight_decay=weight_decay, fused=True))
        super().__init__([group for member in self._members for group in member.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step of both optimizers."""
        for member, group in zip(self._members, self.param_groups, strict=True):
            member.state, member.param_groups = self.state, [group]  # `load_state_dict` replaces both
            member.step()
