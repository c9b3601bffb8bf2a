"""How fast a node sends: what its line carries, who gets how much of it, and how bytes are held
back.
"""
