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

One selection, n = 3, as tile lists and as inverted lists (one range):

    query      selected blocks       tile list (4 queries)        inverted lists (block: queries)
    q0         0 . 2 3 . . .         block  q0 q1 q2 q3           0: q0 q1 q2 q3 q4 q5 q6 q7
    q1         0 . 2 3 . . .           0     1  1  1  1              └─ piece 0 ┘└─ piece 1 ┘   (segment = 4)
    q2         0 1 . 3 . . .           1     .  .  1  .           1: q2 q6
    q3         0 . 2 3 . . .    ->     2     1  1  .  1    or     2: q0 q1 q3 q5
    ------- tile -----------           3     1  1  1  1           3: q0 q1 q2 q3
    q4         0 . . . 4 5 .                                      4: q4 q6 q7
    q5         0 . 2 . . 5 .         0, 1, 2, 4, 5                5: q4 q5 q7
    q6         0 1 . . 4 . .
    q7         0 . . . 4 5 .         query-major: 1 program       KV-major: 1 program per piece
    ------- tile -----------         per tile and KV head
"""
