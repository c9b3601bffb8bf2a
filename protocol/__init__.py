"""How nodes know and talk to each other; nothing here knows what a training run is.

addresses, identity, authority,      who and where: keys, certificates, the string that invites
credentials, invite, enrol           and how it becomes a certificate
messages, wire, stream               what is said: typed records, their bytes, their framing
lane                                 bulk bytes beside the control streams
network, sockets, memory             the one interface to the outside, real and virtual
arena                                memory shared with the trainer
errors                               what can go wrong, by what to do about it
"""
