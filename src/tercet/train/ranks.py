"""The way into a run on several ranks, and out of it again."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tercet.config.keys import flatten_table
from tercet.config.schema import RunConfig
from tercet.errors import EXIT_FAILURE, TercetError
from tercet.parallel.distributed import build_strategy
from tercet.parallel.launch import Launch, LaunchError, check_launch, join
from tercet.parallel.strategy import Single, Strategy
from tercet.train import manifest
from tercet.train.run_folder import locate


def enter(
    config: RunConfig, resume: str | None, launch: Launch, device: torch.device
) -> tuple[Strategy, Path, str | None]:
    """The strategy among all ranks, the run folder they agreed on, and what to resume from.

    A process that torchrun started again goes on from the newest checkpoint, whatever the first one was told.
    """
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    try:
        warnings = check_launch(config.parallel, launch, device.type, gpus)
    except LaunchError as error:
        error.reported_elsewhere = launch.rank > 0  # all see the same
        raise
    for sentence in warnings if launch.local_rank == 0 else []:  # they are about this machine
        print(f"warning: {sentence}", file=sys.stderr)
    if config.parallel.strategy == "single":
        return Single(), locate(config, resume), resume

    def folder(earlier: str | None) -> Path:
        return Path(earlier) if earlier else locate(config, resume)

    world = join(launch, config.parallel, device, flatten_table(config.model_dump(mode="json")), folder)
    path = Path(world.folder or "")
    # a machine that joins anew counts from zero, whatever the others have been through
    restarts = max(member["restarts"] for member in world.members)
    if restarts and (resume is None or manifest.complete_checkpoints(path / "checkpoints")):
        resume = "auto"
    strategy = build_strategy(config.parallel, config.train, world)
    strategy.publish_status(lambda: (0, "starting"))
    return strategy, path, resume


@contextmanager
def parting(strategy: Strategy) -> Iterator[None]:
    """Leave the other ranks in order; or, when something failed, at once: closing groups would wait for them."""
    try:
        yield
    except BaseException as error:
        if strategy.world_size == 1:
            raise
        cause = strategy.explain(error)
        if not isinstance(cause, TercetError):
            traceback.print_exception(cause)
        elif not getattr(cause, "reported_elsewhere", False):
            print(f"error: {cause}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code(cause))
    strategy.close()


def _exit_code(error: BaseException) -> int:
    """As the command line would end with it in one process."""
    if isinstance(error, TercetError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else EXIT_FAILURE
