"""The selected branch (Eq. 12): softmax over the tokens of each query's selected blocks.

Two designs compute the same thing:

- *Query-major* (query_major.py): a program holds a tile of queries and loops over the blocks that any of them selected.
  It is faster where neighbouring queries select the same blocks, and on short sequences.
- *KV-major* (kv_major.py): a program holds one block's K and V and gathers the queries that selected it. It is faster
  where selections are *scattered*: neighbouring queries select different blocks of a long sequence. Forced blocks,
  which neighbours share, stay query-major in the forward.

The mean length of the tile lists decides, on the device and for each range: both designs are launched, and one exits at
once. Where even the longest possible lists are short, shapes alone decide and KV-major is not launched. dK/dV is always
KV-major; only dQ moves between the designs.

Glossary:

    tile       consecutive queries (with all heads of a group) that one query-major program holds
    tile list  the union of the blocks that a tile's queries selected, each with one bit per query
    slot       position 0 … n-1 in a query's list of selected blocks; also: where a piece writes its results
    entry      one (query, slot) of the selection, i.e. one selected block of one query
    list       inverted list: the entries of one (range, KV head, block), free ones first, then forced ones
    forced     initial and local blocks, which every query selects; the others are free
    piece      part of a list that one KV-major program processes
    segment    most entries of a piece
    range      consecutive queries that one KV-major launch processes, to bound its scratch memory
               (not the query range of varlen.py, which says what q holds)

docs/kernels.md draws both.
"""
