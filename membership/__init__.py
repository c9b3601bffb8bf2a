"""The run's rules as pure state machines: who is in, what is agreed, who reduces what.

Nothing here does I/O, reads a clock or draws a random number. Time comes in as ``now_s`` arguments,
what must be done goes out as the frozen records of ``master_effects``; the daemon carries them out.

    coordinator  the master's rules, composed of the rooms below    (the daemon talks to this one)
      context      what all of them share: history, roster, the effects so far
      admission    who may enter
      roster       members, their copies of the state, places and views
      detector     who has been silent for too long
      syncing      roots that the run agrees on; bringing copies up to date
      succession   which of several masters is obeyed, and whether a new one may decide yet
      lineage      versions that the journal has lost, or that nobody holds any more
      pace         when the next round is due
      rounds       one round as data: phases, quorum, the norm gate, agreement
      conductor    opens rounds, reruns them, commits them
      status       the same state as plain JSON
    replica      the peer's rules
    plan         who owns which chunk of a reduction
    spec         run.toml
    journal      what the master must remember over its own death
"""
