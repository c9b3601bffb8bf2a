"""The rules of the master. Pure.

status        the same state as plain JSON, and what must always hold
coordinator   every event of a run comes in here; admission, places, lineage beside it
rounds        rounds and their reductions
sync          copies of the state
routes        how two members reach each other
state         what all of them share: history, roster, effects
"""
