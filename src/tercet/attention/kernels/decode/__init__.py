"""A decode step: one new token for each row of a batch, rows of any length.

    append   rotate q and k to their positions, write k and v to the cache, run φ on blocks that are now complete
    attend   compressed tokens, split over programs; keeps their scores, or scores blocks by single tokens
    scores   block importance, if compressed tokens score, and selection of the best blocks
    attend   selected blocks and window
    merge    parts into branches, branches into the output; advances the row's length

Five launches (three for dense attention). The host reads nothing back, and no size depends on row lengths, so that a
step can be captured as a CUDA graph. Scratch is allocated for the longest row that the cache has room for.
"""

from tercet.attention.kernels.decode.append import Held, Norms, arrivals
from tercet.attention.kernels.decode.common import Heads
from tercet.attention.kernels.decode.compress import CompressionWeights
from tercet.attention.kernels.decode.step import dense_step, nsa_step, too_long, unsupported

__all__ = [
    "CompressionWeights",
    "Heads",
    "Held",
    "Norms",
    "arrivals",
    "dense_step",
    "nsa_step",
    "too_long",
    "unsupported",
]
