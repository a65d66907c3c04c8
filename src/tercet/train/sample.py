"""A piece of text from the model in training. Plain and uncached: it must work on whatever is being trained."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from tercet.data.tokenizers import Tokenizer
from tercet.model.sampling import NOTHING, Sampling, choose
from tercet.train.step import autocast


def sample_text(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    *,
    temperature: float,
    context: int,
    device: torch.device,
    precision: str,
    seed: int,
    agree: Callable[[Callable[[], int]], int] = lambda choose: choose(),
) -> str:
    """What the model writes after `prompt`, until end of document or `tokens` tokens; at most `context` are read.

    Draws from a generator of its own, so that a run with samples and one without train alike.
    """
    generator = torch.Generator().manual_seed(seed)
    how = Sampling(temperature=temperature)
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    start = len(ids)
    was_training = model.training
    model.eval()
    # Every length is a new shape: compiled blocks would be compiled again for each.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), autocast(device, precision):
        for _ in range(tokens):
            logits = model(torch.tensor([ids[-context:]], device=device))[:, -1].float().cpu()
            choice = int(choose(logits, how, torch.rand(1, dtype=torch.float64, generator=generator)))
            # Ranks that part here would wait for each other for ever: rank 0's choice is everybody's.
            choice = agree(partial(int, choice))
            if choice in (tokenizer.eos_id, NOTHING):
                break
            ids.append(choice)
    model.train(was_training)
    return tokenizer.decode(ids[start:])
