"""All-reduce of chunks over links of encrypted lanes.

    codecs/             values of a chunk <-> bytes                                  pure
    arithmetic, combine, robust_rules   how a fragment is cut, added up and encoded  pure
    links/              connections to the other members, kept up as the view says
    result, chunk_tracker   the bytes and the state of each chunk
    chunk_sender, chunk_adder   frames that go out, frames that come in
    reduction           the life of one reduction: start, flush, repair, finish, fail
    spot_check          a chunk is added up again by another member

State transfer (``checkpoint``) uses ``links`` only.
"""
