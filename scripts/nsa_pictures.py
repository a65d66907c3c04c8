"""Draw the pictures of docs/nsa.md: python scripts/nsa_pictures.py [FOLDER]

Every mark comes from the code: tokens that the reference backend's masks let a query see, or blocks that a layer
selected.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch

import tercet
from tercet.attention import reference

COLOURS = {"compressed": "#3b6ea5", "selected": "#d1782c", "window": "#5a9a5a"}
GREY = "#d9d9d9"


def one_query(folder: Path) -> Path:
    """The tokens that one query sees in each branch, at sizes small enough to count."""
    config = tercet.NSAConfig(
        compress_block=8,
        compress_stride=4,
        select_block=16,
        select_count=5,
        select_initial=1,
        select_local=2,
        window=24,
    )
    length, t = 192, torch.tensor([170])
    torch.manual_seed(3)
    scores = torch.rand(1, config.num_blocks(length))
    blocks = reference.select(scores, t, config)[0]
    s = torch.arange(length)
    i = torch.arange(config.num_compressed(length))
    sees_compressed = reference.visible_compressed(t, i, config)[0]
    sees_selected = reference.in_selected(t, s, blocks[None, None, None], config.num_blocks(length), config)[0, 0, 0]
    sees_window = reference.in_window(t, s, config)[0]

    figure, axis = plt.subplots(figsize=(9.5, 3.4))
    for j in range(config.num_blocks(length)):
        axis.axvline(j * config.select_block, color="#eeeeee", lw=1, zorder=0)
    for index in i.tolist():
        colour = COLOURS["compressed"] if sees_compressed[index] else GREY
        first = index * config.compress_stride
        axis.barh(3.0 + 0.42 * (index % 2), config.compress_block - 0.6, 0.36, left=first, color=colour, align="edge")
    for row, sees, name in ((1.6, sees_selected, "selected"), (0.4, sees_window, "window")):
        colours = [COLOURS[name] if seen else GREY for seen in sees.tolist()]
        axis.bar(s.numpy(), 0.8, 0.8, bottom=row, color=colours, align="edge")
    axis.axvline(int(t) + 0.5, color="black", lw=1.2)
    axis.text(int(t) + 2, 4.05, f"query t = {int(t)}", fontsize=9)
    axis.set_yticks([0.8, 2.0, 3.4], ["window", "selected", "compressed"])
    axis.set_xticks(range(0, length + 1, config.select_block))
    axis.set(xlim=(0, length), ylim=(0.2, 4.4), xlabel="token")
    keys = int(sees_compressed.sum() + sees_selected.sum() + sees_window.sum())
    title = (
        f"What one query reads: {int(sees_compressed.sum())} compressed tokens, {int(sees_selected.sum())} tokens of "
        f"{int((blocks >= 0).sum())} blocks, a window of {int(sees_window.sum())}: {keys} keys of {int(t) + 1}"
    )
    axis.set_title(title, fontsize=10, loc="left")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    return _save(figure, folder / "one-query.svg")


def selection_map(folder: Path) -> Path:
    """The blocks that each query of an untrained layer selects, on a sequence that repeats a part of itself."""
    config = tercet.NSAConfig(
        compress_block=8,
        compress_stride=4,
        select_block=16,
        select_count=6,
        select_initial=1,
        select_local=2,
        window=32,
    )
    torch.manual_seed(0)
    layer = tercet.NativeSparseAttention(64, 4, 1, 32, config=config, compression="mean", rope_theta=1e6)
    layer.init_weights(std=0.25, output_std=0.1)
    with torch.no_grad():  # tie keys to queries: similar tokens attend to each other, as in many trained heads
        layer.kv_proj.weight[:32] = layer.q_proj.weight.view(4, 32, 64).mean(0) * 2
    length, part = 768, 128
    steps = torch.randn(length, 64)
    x = (
        torch.stack([steps[max(0, k - 24) : k + 1].mean(0) for k in range(length)]) * 4
    )  # neighbours resemble each other
    x[512 : 512 + part] = x[192 : 192 + part]
    captured = {}
    layer.stats.update = lambda gates, indices, packing: captured.update(indices=indices)  # type: ignore[method-assign]
    layer(x[None])
    indices = captured["indices"][0, :, 0]
    num_blocks = config.num_blocks(length)
    picture = torch.ones(length, num_blocks, 3)
    t = torch.arange(length)
    c = t // config.select_block
    j = torch.arange(num_blocks)
    picture[j[None] > c[:, None]] = torch.tensor([0.95, 0.95, 0.95])
    for n in range(indices.shape[1]):
        real = indices[:, n] >= 0
        block = indices[:, n].clamp(min=0).long()
        forced = (block < config.select_initial) | (block > c - config.select_local)
        chosen = torch.tensor(matplotlib.colors.to_rgb(COLOURS["selected"]), dtype=torch.float32)
        given = torch.tensor([0.62, 0.62, 0.62])
        picture[t[real], block[real]] = torch.where(forced[real, None], given, chosen)
    figure, axis = plt.subplots(figsize=(5.6, 5.6))
    axis.imshow(picture.numpy(), aspect="auto", interpolation="nearest", extent=(0, num_blocks, length, 0))
    axis.set(xlabel="selection block", ylabel="query")
    title = "Orange: selected by score. Grey: forced.\nQueries 512 to 639 repeat tokens 192 to 319 (blocks 12 to 19)"
    axis.set_title(title, fontsize=10, loc="left")
    return _save(figure, folder / "selection-map.svg")


def _save(figure: plt.Figure, path: Path) -> Path:
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": "tercet"}):  # reproducible files
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0]) if arguments else Path(__file__).parent.parent / "docs" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    for draw in (one_query, selection_map):
        print(draw(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
