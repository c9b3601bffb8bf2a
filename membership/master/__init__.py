"""The rules of the master. Pure.

status        the state as plain records
coordinator   entry of every event of a run; beside it the rules for members that come, leave and
              contribute
rounds        rounds and their reductions
sync          copies of the state
routes        routes between two members
state         what all of them share: history, roster, effects
"""
