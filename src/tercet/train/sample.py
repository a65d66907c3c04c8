"""A piece of text from the model in training. Plain and uncached: it must work on whatever is being trained."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from tercet.data.tokenizers import Tokenizer
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
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    start = len(ids)
    was_training = model.training
    model.eval()
    # Every length is a new shape: compiled blocks would be compiled again for each.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), autocast(device, precision):
        for _ in range(tokens):
            logits = model(torch.tensor([ids[-context:]], device=device))[0, -1].float().cpu()
            if temperature == 0:
                choice = int(logits.argmax())
            else:
                chances = torch.softmax(logits / temperature, dim=-1)
                choice = int(torch.multinomial(chances, 1, generator=generator))
            # Ranks that part here would wait for each other for ever: rank 0's choice is everybody's.
            choice = agree(partial(int, choice))
            if choice == tokenizer.eos_id:
                break
            ids.append(choice)
    model.train(was_training)
    return tokenizer.decode(ids[start:])
