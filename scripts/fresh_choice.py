"""Count the different blocks that neighbouring queries select with fresh weights, as in `tercet bench train`.

    python scripts/fresh_choice.py --length 8192 --layers 3

The selected branch runs query-major or KV-major depending on this number (attention/kernels/table.py). Runs the
reference on a CPU, on random tokens, with preset m7c except for the number of layers. Under a minute on one core.
"""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from tercet.attention.kernels.table import selected_settings
from tercet.config.load import load
from tercet.model import nsa as layer_module
from tercet.model.transformer import Transformer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = load("m7c", flags={"model.layers": arguments.layers}).config.model
    nsa, head = config.nsa, config.head_dim
    settings = selected_settings(head, head, torch.bfloat16, nsa.select_block)
    queries = settings.tile_rows // (config.heads // config.kv_heads)  # of a tile
    chosen: list[Tensor] = []
    run = layer_module.run_nsa

    def spy(*args: Any, **options: Any) -> Any:
        result = run(*args, **options)
        chosen.append(result[1])
        return result

    layer_module.run_nsa = spy
    torch.manual_seed(arguments.seed)
    with torch.no_grad():
        Transformer(config)(torch.randint(0, config.vocab_size, (1, arguments.length)))
    limits = [limit * nsa.select_count for limit in (settings.forward_limit, settings.backward_limit)]
    print(
        f"different blocks of {queries} neighbours, mean; KV-major above {limits[0]:.0f} forward, {limits[1]:.0f} back"
    )
    for layer, blocks in enumerate(chosen):  # [1, T, G, n]
        tiles = blocks[0].transpose(0, 1).split(queries, dim=1)
        counts = [len(set(group.flatten().tolist()) - {-1}) for tile in tiles for group in tile]
        print(f"layer {layer}: {fmean(counts):.1f}")


if __name__ == "__main__":
    main()
