"""Caches to decode from."""

from __future__ import annotations

import torch

from tercet.model.cache import HostLengths


def filled(layer, lengths: list[int], room: int):
    """A cache of random tokens."""
    cache = layer.make_cache(len(lengths), room)
    for store in cache._stores.values():
        store.normal_()
    cache.lengths.copy_(torch.tensor(lengths))
    cache.host_lengths = HostLengths(tuple(lengths))
    return cache
