"""Start and end of a training process: join the other ranks, and exit with the right code."""

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
from tercet.terminal import printable
from tercet.train import manifest
from tercet.train.run_folder import locate


def join_run(
    config: RunConfig, resume: str | None, launch: Launch, device: torch.device
) -> tuple[Strategy, Path, str | None]:
    """The strategy, the run folder that all ranks agreed on, and what to resume from.

    A process that torchrun restarted resumes from the newest checkpoint, whatever the first one was asked to do.
    """
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    try:
        warnings = check_launch(config.parallel, launch, device.type, gpus)
    except LaunchError as error:
        error.reported_elsewhere = launch.rank > 0  # all ranks see the same error
        raise
    for warning in warnings if launch.local_rank == 0 else []:  # once per machine
        print(f"warning: {printable(warning)}", file=sys.stderr)
    if config.parallel.strategy == "single":
        return Single(), locate(config, resume), resume

    def folder(earlier: str | None) -> Path:
        return Path(earlier) if earlier else locate(config, resume)

    world = join(launch, config.parallel, device, flatten_table(config.model_dump(mode="json")), folder)
    path = Path(world.folder or "")
    # a machine that joins again counts its restarts from zero
    restarts = max(member["restarts"] for member in world.members)
    if restarts and (resume is None or manifest.complete_checkpoints(path / "checkpoints")):
        resume = "auto"
    strategy = build_strategy(config.parallel, config.train, world)
    strategy.publish_status(lambda: (0, "starting"))
    return strategy, path, resume


@contextmanager
def rank_context(strategy: Strategy) -> Iterator[None]:
    """Leave the process groups at the end. On an error, exit at once: closing groups would wait for other ranks."""
    try:
        yield
    except BaseException as error:
        if strategy.world_size == 1:
            raise
        cause = strategy.explain(error)
        if not isinstance(cause, TercetError) or "--debug" in sys.argv:
            traceback.print_exception(cause)
        elif not cause.reported_elsewhere:
            print(f"error: {printable(str(cause))}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code(cause))
    strategy.close()


def _exit_code(error: BaseException) -> int:
    """The exit code of a single process with this error."""
    if isinstance(error, TercetError):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else EXIT_FAILURE
