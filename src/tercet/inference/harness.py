"""Run tasks of EleutherAI's lm-eval on a model: its interface for language models, and one call that evaluates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tercet.errors import TercetError, UsageError
from tercet.inference.generate import generate
from tercet.inference.load import LanguageModel
from tercet.inference.perplexity import score

Request = tuple[Any, list[int], list[int]]  # (text, context, continuation)
MAX_NEW_TOKENS = 256  # for generation tasks that name no limit


class HarnessModel(TemplateLM):
    """A LanguageModel as lm-eval sees it. Contexts are cut on the left to the training length."""

    def __init__(self, model: LanguageModel, batch: int) -> None:
        super().__init__()
        self.model, self.batch, self.max_length = model, batch, model.context

    @property
    def eot_token_id(self) -> int:
        return self.model.tokenizer.eos_id

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self.model.tokenizer.encode(string, specials=True)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: Sequence[Request], **_: Any) -> list[tuple[float, bool]]:
        """(log-likelihood of the continuation, whether it is the greedy one) of each request."""
        found: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        for first in range(0, len(order), self.batch):
            numbers = order[first : first + self.batch]
            scores = self._score([requests[i][1:] for i in numbers])
            found |= dict(zip(numbers, scores, strict=True))
        return [found[i] for i in range(len(requests))]

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        model, device = self.model, self.model.device
        rows = [(context + continuation)[-self.max_length - 1 :] for context, continuation in pairs]
        width = max(len(row) - 1 for row in rows)
        # Attention is causal: padding on the right changes nothing before it.
        tokens = torch.tensor([row[:-1] + [0] * (width + 1 - len(row)) for row in rows], device=device)
        sizes = [min(len(continuation), len(row) - 1) for row, (_, continuation) in zip(rows, pairs, strict=True)]
        places = [i * width + at for i, (row, n) in enumerate(zip(rows, sizes, strict=True))
                  for at in range(len(row) - 1 - n, len(row) - 1)]  # fmt: skip
        targets = torch.tensor([token for row, n in zip(rows, sizes, strict=True) for token in row[-n:]], device=device)
        hidden = model.hidden(tokens).flatten(0, 1)[torch.tensor(places, device=device)]
        nats, right = score(model, hidden, targets)
        for loss, greedy in zip(nats.split(sizes), right.split(sizes), strict=True):
            yield -float(loss.sum()), bool(greedy.all())

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the training length."""
        windows: list[Request] = []
        bounds = [0]
        for (text,) in (request.args for request in requests):
            parts = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            windows += [(None, *make_disjoint_window(part)) for part in parts]
            bounds.append(len(windows))
        scores = self._loglikelihood_tokens(windows)
        return [sum(score for score, _ in scores[a:b]) for a, b in pairwise(bounds)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers of generation tasks; requests with equal options are generated in batches."""
        answers: list[str] = []
        for options, group in groupby((request.args for request in requests), key=lambda args: args[1]):
            contexts = [context for context, _ in group]
            for first in range(0, len(contexts), self.batch):
                answers += self._generate(contexts[first : first + self.batch], options)
        return answers

    def _generate(self, contexts: list[str], options: dict[str, Any]) -> list[str]:
        new = min(int(options.get("max_gen_toks", MAX_NEW_TOKENS)), self.max_length - 1)
        until = options.get("until") or []
        prompts = [self.tok_encode(text)[-(self.max_length - new) :] or [self.eot_token_id] for text in contexts]
        temperature = float(options.get("temperature", 1.0)) if options.get("do_sample") else 0.0
        stop = [until] if isinstance(until, str) else list(until)
        made = generate(self.model, prompts, max_new_tokens=new, temperature=temperature, stop=stop)
        assert isinstance(made, list)
        return [answer.text for answer in made]


def evaluate(
    model: LanguageModel,
    tasks: Sequence[str],
    *,
    batch: int = 8,
    limit: int | None = None,
    fewshot: int | None = None,
    include: Path | None = None,
) -> dict[str, Any]:
    """lm-eval's results for `tasks`. include: a folder with more task definitions."""
    manager = _task_manager(tasks, include)
    try:
        results = simple_evaluate(
            HarnessModel(model, batch),
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            num_fewshot=fewshot,
            bootstrap_iters=1000,
            log_samples=False,
        )
    except OSError as error:  # a dataset that cannot be fetched
        text = " ".join(str(error).split())[:300]
        fix = "check the network (HF_HUB_OFFLINE=1 reads what was downloaded before), or the task's paths"
        raise TercetError(f"lm-eval could not read its data ({text}): {fix}") from None
    assert results is not None
    return dict(results)


def _task_manager(tasks: Sequence[str], include: Path | None) -> TaskManager:
    """The manager that knows `tasks`. Indexing lm-eval's own tasks takes 10 s: skipped if `include` has them all."""
    unknown: list[str] = []
    for defaults in (False, True) if include is not None else (True,):
        path = None if include is None else str(include)
        manager = TaskManager(include_path=path, include_defaults=defaults)
        unknown = [task for task in tasks if not manager.match_tasks([task])]
        if not unknown:
            return manager
    raise UsageError(f"--tasks {unknown[0]} is not a task of lm-eval: `lm-eval ls tasks` lists them")
