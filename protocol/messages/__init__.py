"""Every message that crosses a control stream, as typed records; nothing else lives here.

A message is an attrs class. Its fields' validators are its limits, so a record that exists keeps
the limits, on the sending and on the receiving side. ``wire`` converts records to msgpack and back,
and refuses bytes that do not fit. Tensor bytes never travel in messages: they are chunks on lanes.

The first word of a docstring is the sender. Units are last in names. A peer is named by its peer
id, 32 hex digits (see ``identity``).

    limits, fields      the largest counts and lengths, and the validators that hold them
    parts               what messages share
    newcomers           newcomer <-> master, before a certificate
    to_master           peer -> master
    to_peer             master -> peer
    between_masters     master <-> master
    between_peers       peer <-> peer (a link's control stream)
    between_hosts       head <-> host of one peer, likewise
    trainer             daemon <-> trainer (Unix socket)
"""

from .between_hosts import *
from .between_masters import *
from .between_peers import *
from .limits import *
from .newcomers import *
from .parts import *
from .to_master import *
from .to_peer import *
from .trainer import *
