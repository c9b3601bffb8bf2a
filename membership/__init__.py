"""The rules of a run, as pure state machines: the members, what they agree on, who reduces what.

Nothing here does I/O, reads a clock or draws a random number. Time comes in as ``now_s`` arguments.
What is to be done goes out as frozen records (``master_effects``, ``peer_effects``); the daemon
carries them out.

    master     the master's rules; the daemon calls ``coordinator``
    peer       a peer's rules; the daemon calls ``replica``
    shared     what the rules of the master and of a peer both need
    planning   which member owns which chunk of a reduction, from measured bandwidths
    spec       run.toml
"""
