"""All-reduce of chunks over links of encrypted lanes.

    codecs       values of a chunk <-> bytes                       pure
    arithmetic   how a fragment is cut, added up and decoded       pure
    limiter      the node's upload cap
    routing      which frame goes to whom
    link         one member: a control stream and its lanes
    hub          all links of a node, kept up as the view says
    allreduce    one attempt at a reduction over them

Each knows only those above it. State transfer uses links, too: it registers for BLOCK frames and
takes the control messages that the hub does not know.
"""
