"""Non-finite steps: judged, skipped and counted on the device; the host learns of them at the next log."""

from __future__ import annotations

import torch
from torch import Tensor


class NonFiniteGuard:
    """Counts bad steps and, past a limit, freezes the weights until the host reads and stops the run.

    The freeze is what makes the dump exact: between the bad step and the log line that notices it, no later
    update may move the weights that produced it.
    """

    def __init__(self, device: torch.device, max_total: int, max_in_row: int) -> None:
        self.max_total, self.max_in_row = max_total, max_in_row
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        self._in_row = torch.zeros((), dtype=torch.int64, device=device)
        self._halted_at = torch.zeros((), dtype=torch.int64, device=device)  # 0: not

    def judge(self, step: int, loss: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """(bad, skip), both [] bool: whether this step is not finite, and whether its update is skipped."""
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        live = self._halted_at == 0
        self._total += bad & live
        self._in_row = torch.where(live, torch.where(bad, self._in_row + 1, 0), self._in_row)
        over = (self._total > self.max_total) | (self._in_row > self.max_in_row)
        self._halted_at = torch.where(live & bad & over, step, self._halted_at)
        return bad, bad | ~live

    def halted_at(self) -> int:
        """The step that passed a limit, 0 if none did. Waits for the device."""
        return int(self._halted_at.item())

    def total(self) -> int:
        """Bad steps so far. Waits for the device."""
        return int(self._total.item())

    def state_dict(self) -> dict[str, int]:
        """For the checkpoint. Waits for the device."""
        return {"total": int(self._total.item()), "in_row": int(self._in_row.item())}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on counting where a checkpoint left off."""
        self._total.fill_(state["total"])
        self._in_row.fill_(state["in_row"])
