"""Identities, messages and connections; nothing here knows the state of a training run.

messages, wire, connection_phases,   typed records, their bytes, their order, their limits
message_limits, message_quota
trust/                               keys, certificates, invites
enrolment, machine_check             from an invite to a certificate; a check from outside
network/                             the interface to the network, TCP and TLS, lanes
addresses, dial_order                addresses, and which of two members dials
arena                                memory shared with the trainer
errors, text, durable_files          errors by the reaction to them; printable text; safe writes
"""
