"""A peer of several hosts: machines of one site that train one replica together.

    the run  <──>  head: the member; shared state, TrainerGroup   (``head.Head``)
                     ▲   │
       ranks' words, │   │ messages to ranks, starts and stops
       boxes posted  │   ▼ boxes of the shared state
                   host: ranks, arenas of their boxes             (``host.FurtherHost``)

Head and hosts are a little run of their own: its authority is the head's, its invite is the string
that ``holdfast join --hosts`` prints, and its links are those of ``collectives.links``. So a host
has no certificate, no place and no link in the run itself.

Ranks cannot tell where they run. On a host they reach a Unix socket and arenas, as beside the head.
"""
